"""One function over many items: the same answers here, in processes, on a cluster that loses a node."""

import itertools
import operator
import os
import sys
from contextlib import contextmanager, nullcontext

import pytest

import tasks
from jobs import Job, write_job
from meshwise.core.each import Lost, Worker, each, on_ray, telling
from meshwise.core.errors import DataError


@pytest.mark.parametrize("how", [{"jobs": 1}, {"jobs": 3}, {"jobs": 2, "fresh": True}])
def test_each_item_is_answered_once(how):
    found = list(each(operator.neg, range(10), **how))
    assert sorted(found) == [(n, -n) for n in range(10)]


def test_every_answer_is_told():
    told = []
    with telling(lambda done, total: told.append((done, total))):
        assert len(list(each(operator.neg, range(3), jobs=2))) == 3
    assert told == [(1, 3), (2, 3), (3, 3)] and list(each(operator.neg, [1])) and len(told) == 3


def test_what_a_function_raises_is_raised_and_what_dies_is_lost():
    with pytest.raises(ValueError, match="invalid literal"):
        dict(each(int, ["1", "x"], jobs=2))
    found = dict(each(tasks.die_of_minus_one, [1, -1, 2], jobs=2))
    assert found[0] == 1 and found[2] == 2
    assert isinstance(found[1], Lost) and found[1].reason == "the process was ended by SIGKILL: about to die"


HEAD = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
HEAD["_system_config"] = {"health_check_period_ms": 200, "health_check_failure_threshold": 2}
"""A dead node, which refuses connections, is missed at once, not after fifteen seconds."""


@pytest.fixture(scope="module")
def cluster():
    """The head of Ray's own cluster of this machine."""
    pytest.importorskip("ray", reason="Ray is an extra; .ci/run installs it")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the nodes
        cluster = Cluster(initialize_head=True, head_node_args=HEAD)
        yield cluster
        cluster.shutdown()


@contextmanager
def dying_node(cluster):
    """A second node for a while, which is killed at the first answer."""
    nodes = [cluster.add_node(num_cpus=1)]
    cluster.wait_for_nodes()

    def tell(done, total):
        while nodes:
            cluster.remove_node(nodes.pop(), allow_graceful=False)

    with telling(tell):
        yield
    assert not nodes


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_answers_all_and_repeats_nothing(tmp_path, cluster):
    items = [(n, str(tmp_path / "log"), 0.4) for n in range(16)]
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    with on_ray(cluster.address):
        answers = each(tasks.slow_square, items)
        first = list(itertools.islice(answers, 5))
        cluster.remove_node(second, allow_graceful=False)
        found = first + list(answers)
    assert sorted(found) == [(n, n * n) for n in range(16)]
    done = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert set(done) == set(range(16)) and len(done) <= 17  # at most what the lost node had not yet told
    assert all(done.count(place) == 1 for place, _ in first)


def test_no_cluster_is_one_sentence():
    pytest.importorskip("ray", reason="Ray is an extra; .ci/run installs it")
    with pytest.raises(DataError, match="Connection refused"), on_ray("127.0.0.1:1"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["search", "serve", "sweep", "trace", "explain"])
def test_verbs_answer_the_same_on_a_cluster(verb, tmp_path, meshwise, cluster):
    """To the last digit, a sweep though a node is lost; a study here is what its points are alone."""
    write_job(tmp_path, Job(4, 6, "slow device", rank=1, has_marks=True, has_numbers=True))
    sizing = "serve llama3-8b --cluster h100-80g-sxm:8,h200-sxm:8 --prompt 512 --output 128 --rate 2"
    study = "search llama3-8b --cluster h100-80g-sxm:8 --batch 16 --seq 2048 --vary gpus=4|8"
    words = {
        "search": [*study.split(), "--plan", "vpp=1,schedule=1f1b,cp=1"],
        "serve": [*sizing.split(), "--ttft-ms", "500", "--token-ms", "50"],
        "sweep": ["sweep", str(tmp_path / "grid.toml")],
        "trace": ["trace", "summary", str(tmp_path)],
        "explain": ["explain", str(tmp_path)],
    }[verb]
    grid = 'verb = "estimate"\narguments = ["gpt2"]\n[options]\ncluster = "h100-80g-sxm:8"\n'
    (tmp_path / "grid.toml").write_text(grid + "[grid]\nbatch = [8, 16, 32]\n")
    alone = meshwise(*words, "--json").document
    for kept in (*tmp_path.glob("*.sqlite"), *tmp_path.glob(".meshwise/*")):
        kept.unlink()
    with dying_node(cluster) if verb == "sweep" else nullcontext():
        there = meshwise(*words, "--ray", cluster.address, "--json").document
    for document in (alone, there):
        for speed in ("elapsed_s", "configurations_per_s"):
            document.get("sizing", {}).pop(speed, None)
        for point in document.get("points", ()):
            point.pop("seconds", None)
    assert alone == there


def test_a_closed_worker_starts_no_process():
    worker = Worker()
    assert worker.call(abs, -1) == (1, None)
    worker.close()
    with pytest.raises(OSError, match="closed"):
        worker.call(abs, -1)
