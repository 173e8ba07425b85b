"""Is a job's cluster file true of its other plans? Four ranks on two hosts whose link is known, over gloo.

A host is a network namespace; both hang on a third, each by a virtual cable that a token bucket slows down
to `RATE_BITS_PER_S` in either direction. `train` runs under each plan and is captured. `calibrate --from`
reads one capture alone, and `estimate` on that cluster is held against the steps of every plan, the first
step left out; so for each capture. Steps are mostly communication, so that what the cores are shared with
tells little. Needs root and iproute2.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import meshwise as mw
from meshwise.calibrate.from_traces import calibrate_from
from meshwise.core.errors import DataError
from meshwise.trace.summary import summarize_paths

RATE_BITS_PER_S = 15e6
RANKS_PER_HOST, NUM_HOSTS = 2, 2
BATCH, SEQ, NUM_STEPS = 8, 128, 4
MODEL = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
"intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
"vocab_size": 1024, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false}"""
PLANS = (("tp=2,zero=3", 4), ("zero=3", 2), ("zero=1", 2), ("zero=0", 2), ("tp=4", 8), ("tp=2,zero=1", 4))
"""Plans, and sequences of a microbatch: all of a replica's at once."""
PORT = 29640


def main() -> None:
    """Print the measured step of each plan, and the errors of a cluster calibrated on each."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("making hosts needs root and iproute2: left out")
        return
    _compare()


def _compare() -> None:
    with tempfile.TemporaryDirectory() as name, _hosts() as hosts:
        folder = Path(name)
        model, cluster = folder / "model.json", folder / "my.toml"
        model.write_text(MODEL)
        measured_s = {}
        for number, (plan, microbatch) in enumerate(PLANS):
            _capture(hosts, model, plan, microbatch, folder / plan, PORT + number)
            measured_s[plan] = _step_s(folder / plan)
            print(f"{plan:<12} measured {measured_s[plan]:6.2f} s")
        for known, _ in PLANS:
            try:
                calibrate_from([folder / known], steps=f"1-{NUM_STEPS - 1}").write(cluster)
            except DataError as error:
                print(f"calibrated on {known}: {error}")
                continue
            errors = []
            for plan, microbatch in PLANS:
                words = f"{plan},dtype=fp32,implementation=fsdp2"
                work = {"batch": BATCH, "seq": SEQ, "microbatch": microbatch}
                predicted_s = mw.estimate(model, cluster, words, **work).step_s
                errors.append(f"{plan} {predicted_s / measured_s[plan] - 1:+.1%}")
            print(f"calibrated on {known:<12} {', '.join(errors)}")


def _step_s(folder: Path) -> float:
    """The mean step of the slowest rank, the first left out."""
    steps = [one for one in summarize_paths([folder]).steps if one.number]
    spans = [[one.breakdown.span_s for one in steps if one.number == n] for n in range(1, NUM_STEPS)]
    return sum(map(max, spans)) / len(spans)


def _capture(hosts: list[str], model: Path, plan: str, microbatch: int, folder: Path, port: int) -> None:
    """Run `train` on all ranks and keep their traces in `folder`."""
    num_ranks = RANKS_PER_HOST * NUM_HOSTS
    words = ["run", "train", "--ranks", num_ranks, "--model", model, "--plan", f"{plan},dtype=fp32"]
    words += ["--batch", BATCH, "--seq", SEQ, "--microbatch", microbatch, "--steps", NUM_STEPS]
    command = [sys.executable, "-m", "meshwise", *map(str, words), "--no-ledger", "--profile", str(folder)]
    ranks = []
    for rank in range(num_ranks):
        host, local = divmod(rank, RANKS_PER_HOST)
        place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local, "MASTER_PORT": port}
        about = {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
        named = f'hostname {hosts[host]}; exec nice -n -10 "$@"'
        inside = ["ip", "netns", "exec", hosts[host], "unshare", "--uts", "sh", "-c", named, "sh"]
        environment = os.environ | about | {key: str(value) for key, value in place.items()}
        ranks.append(subprocess.Popen([*inside, *command], env=environment, stdout=subprocess.DEVNULL))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"{plan} failed")


def _address(host: int, side: int = 1) -> str:
    return f"10.232.{host}.{side}"


@contextmanager
def _hosts() -> Iterator[list[str]]:
    """The names of namespaces, joined by one that routes between them."""
    switch, hosts = f"meshwise-{os.getpid()}", [f"meshwise-{os.getpid()}-{i}" for i in range(NUM_HOSTS)]
    bucket = ["root", "tbf", "rate", f"{RATE_BITS_PER_S:.0f}bit", "burst", "32kb", "limit", "64mb"]
    try:
        for name in (switch, *hosts):
            _ip("netns", "add", name)
        _in(switch, "sysctl", "-w", "net.ipv4.ip_forward=1")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            _ip("link", "add", "cable", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            for name, device, side in ((host, "cable", 1), (switch, port, 2)):
                _in(name, "ip", "addr", "add", f"{_address(number, side)}/24", "dev", device)
                _in(name, "ip", "link", "set", device, "up")
                _in(name, "tc", "qdisc", "add", "dev", device, *bucket)
            _in(host, "ip", "link", "set", "lo", "up")
            _in(host, "ip", "route", "add", "default", "via", _address(number, 2))
            for setting in ("tcp_slow_start_after_idle=0", "tcp_congestion_control=reno"):
                _in(host, "sysctl", "-w", f"net.ipv4.{setting}")
        yield hosts
    finally:
        for name in (switch, *hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _in(namespace: str, *words: str) -> None:
    _ip("netns", "exec", namespace, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
