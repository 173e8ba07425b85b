"""Joint capture: every rank of somebody else's program, also when one of them dies, whole files or none."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from data_tables import SCRIPTS

pytest.importorskip("torch")

import torch

from forks import wait_until
from meshwise.core.errors import DataError, MissingExtraError
from meshwise.runtime.profile import HOOK, capture, capture_environment, profile_command
from meshwise.trace.read import read_trace
from meshwise.trace.summary import summarize_paths
from other_python import other_python
from ports import own_port

pytestmark = pytest.mark.slow

PROGRAM = str(SCRIPTS / "all_reduces.py")


def test_spawned_ranks_and_one_that_is_killed(tmp_path):
    """mp.spawn, no destroy, rank 1 ends by SIGKILL: ranks 0 and 2 leave whole profiles that match."""
    words = [sys.executable, PROGRAM, "1", str(tmp_path / "meeting")]
    done = profile_command(words, tmp_path / "out", stdout=subprocess.DEVNULL)
    assert done.exit_code != 0
    assert [file.name for file in done.files] == ["rank-0.json", "rank-2.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["rank-0.json", "rank-2.json"]
    found = summarize_paths(done.files)
    assert [trace.rank for trace in found.traces] == [0, 2]
    assert [problem.reason[:31] for problem in found.problems] == ["there is no trace of rank 1 of "]
    reduced = [one for one in found.collectives if one.name == "all_reduce"]
    assert [(one.index, one.group, one.bytes, one.num_ranks) for one in reduced] == [
        (k, "0-2", 1024, 2) for k in (1, 2, 3)
    ]
    for trace in found.traces:
        names = [trace.name(i) for i in range(len(trace))]
        assert names.count("aten::mm") == 3 and names.count("MoELayer") == 3
        assert len(trace.memory.time_ns) > 0 and trace.shapes


def test_the_sleeper_is_named(tmp_path):
    """Four real processes of which one sleeps 200 ms a step longer, as no busy machine does."""
    words = [sys.executable, str(SCRIPTS / "sleeper.py"), "4", "2", str(tmp_path / "meeting")]
    done = profile_command(words, tmp_path / "out", stdout=subprocess.DEVNULL)
    found = summarize_paths(done.files)
    named = [one.ranks for one in found.findings if 0 < len(one.ranks) < 4]
    assert found.alignment.method == "one host, one clock" and named == [(2,)]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="naming hosts needs root")
def test_ranks_of_two_hosts_share_a_folder(tmp_path):
    """Each host runs `meshwise profile` into the same folder; the traces name their hosts and match."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    hosts = []
    for node in range(2):
        profile = [sys.executable, "-m", "meshwise", "profile", "-o", str(tmp_path / "out"), "--"]
        script = f'hostname node-{node} && exec "$@"'
        command = ["unshare", "--uts", "sh", "-c", script, "sh", *profile, sys.executable, PROGRAM, "-1"]
        hosts.append(subprocess.Popen(command, env=os.environ | world | {"RANK": str(node)}))
    assert [host.wait(120) for host in hosts] == [0, 0]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["rank-0.json", "rank-1.json"]
    found = summarize_paths([tmp_path / "out"])
    assert [trace.host for trace in found.traces] == ["node-0", "node-1"]
    assert [one.num_ranks for one in found.collectives if one.name == "all_reduce"] == [2, 2, 2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_from_outside(tmp_path, how):
    """torchrun's ranks end too, and leave what they have; it ends as signalled programs do; nothing stays."""
    ranks = ["python", "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ranks += [str(SCRIPTS / "endless.py"), str(tmp_path)]
    words = [sys.executable, "-m", "meshwise", "profile", "-o", str(tmp_path / "out"), "--", *ranks]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    own = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert "meshwise: interrupted" in err or how != signal.SIGINT
    assert len(own) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in own))
    wait_until(lambda: len(list((tmp_path / "out").glob("rank-*.json"))) == 2)
    pids = [path.name.split("-")[2] for path in tmp_path.glob("running-*")]
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids))
    traces = summarize_paths([tmp_path / "out"]).traces
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]


def test_programs_that_do_as_they_please(tmp_path, monkeypatch):
    """Forked ranks, two groups, FSDP2 from `meta`, no ordinary exit: all but what they profile and swap."""
    monkeypatch.chdir(tmp_path)
    done = profile_command([sys.executable, str(SCRIPTS / "awkward.py")], tmp_path / "out")
    assert done.exit_code == 0 and len(done.files) == 10
    for path in (own := list(tmp_path.glob("own-*.json.gz"))):
        trace, _ = read_trace(path)
        assert "aten::exp" in {trace.name(i) for i in range(len(trace))}
    assert len(own) == 4
    found = summarize_paths(done.files)
    assert [trace.rank for trace in found.traces] == [0, 1]
    for trace in found.traces:
        names = [trace.name(i) for i in range(len(trace))]
        assert names.count("aten::mm") == 2 and names.count("gloo:all_reduce") == 2
        assert (np.diff(trace.start_ns) >= 0).all() and "aten::exp" not in names
    reduced = [one for one in found.collectives if one.name == "all_reduce"]
    assert [(one.bytes, one.num_ranks) for one in reduced] == [(64, 2)] * 2
    assert all("further part" in problem.reason for problem in found.problems)


def test_capture_around_ones_own_code(tmp_path):
    """Without a process group the caller tells rank and world; a second capture never replaces the first."""
    for _ in range(2):
        with capture(tmp_path, rank=5, world_size=8):
            torch.ones(4, 4) @ torch.ones(4, 4)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-5-again-1.json", "rank-5.json"]
    trace, notes = read_trace(tmp_path / "rank-5.json")
    assert (trace.rank, trace.world_size, notes) == (5, 8, [])
    assert "aten::mm" in {trace.name(i) for i in range(len(trace))}


def test_full_disk_leaves_nothing(tmp_path):
    """A file size limit stands in for the full disk: one sentence, no file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(DataError) as said, capture(tmp_path / "out", rank=0, world_size=1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
            for _ in range(100):
                torch.ones(4, 4) @ torch.ones(4, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.match(f"cannot write the profile in {re.escape(str(tmp_path))}/out[^\n]*$", str(said.value))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_capture_starts_at_once(tmp_path):
    """PyTorch's compiler, which takes longer to load than torch itself, is not loaded; it can be later."""
    code = """
    import sys, torch
    from meshwise.runtime.profile import capture
    with capture(sys.argv[1], rank=0, world_size=1):
        torch.ones(4, 4) @ torch.ones(4, 4)
    print("torch._inductor" in sys.modules, torch._inductor.__name__)
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "torch._inductor"]


def test_hook_runs_the_sitecustomize_it_hides(tmp_path):
    """And imports nothing that the program does not import."""
    (tmp_path / "sitecustomize.py").write_text("print('hidden one')")
    environment = capture_environment(tmp_path / "out", shapes=True, memory=True, stacks=False)
    path = os.pathsep.join([str(HOOK), str(tmp_path)])
    words = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    done = subprocess.run(
        words, env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["hidden one", "False"]


def test_refusals(tmp_path):
    (tmp_path / "rank-0.json").write_text("{}")
    with pytest.raises(DataError, match="already holds profiles"):
        profile_command(["python", "x.py"], tmp_path)
    with pytest.raises(DataError, match="cannot write"):
        profile_command(["python", "x.py"], tmp_path / "rank-0.json" / "out")
    with pytest.raises(MissingExtraError, match="no such command"):
        profile_command(["no-such-command-here"], tmp_path / "out")


ONE_PROCESS = (SCRIPTS / "one_process.py").read_text()


def test_one_process_in_an_environment_without_meshwise(meshwise, tmp_path, monkeypatch):
    """No process group, a loader with a worker, another Python: one rank, and the output is the program's."""
    (tmp_path / "train.py").write_text(ONE_PROCESS)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = other_python(tmp_path / "env")
    done = meshwise("profile", "-o", str(tmp_path / "out"), "--", python, str(tmp_path / "train.py"))
    assert done.code == 0, done.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank-0.json"]
    (trace,) = summarize_paths([tmp_path / "out"]).traces
    assert (trace.rank, trace.world_size) == (0, 1)
    assert [trace.name(i) for i in range(len(trace))].count("aten::addmm") == 2


def test_a_capture_that_fails_leaves_the_program_alone(tmp_path):
    broken = "import torch, torch.profiler\ntorch.profiler.profile.start = None\n"
    (tmp_path / "train.py").write_text(f"{broken}{ONE_PROCESS}")
    done = profile_command(["python", str(tmp_path / "train.py")], tmp_path / "out")
    assert (done.exit_code, done.files) == (0, ())


def test_an_older_torch_is_refused(meshwise, tmp_path):
    """The program runs to its end all the same."""
    modules = tmp_path / "torch" / "nn" / "modules"
    modules.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.7.1'")
    (modules / "module.py").touch()
    text = "import torch, torch.nn.modules.module, pathlib\npathlib.Path('done').touch()"
    (tmp_path / "train.py").write_text(text)
    words = ["env", "-C", str(tmp_path), "python", "train.py"]
    done = meshwise("profile", "-o", str(tmp_path / "out"), "--", *words)
    assert done.code == 3 and (tmp_path / "done").exists() and not list((tmp_path / "out").iterdir())
    assert done.err.splitlines() == ["meshwise: profiles need torch 2.8 or newer, and this is 2.7.1"]


def test_command_without_torch(meshwise, tmp_path):
    done = meshwise("profile", "-o", str(tmp_path / "out"), "--", "python", "-c", "pass")
    assert done.code == 2 and "left no profile" in done.err and Path(tmp_path / "out").is_dir()
