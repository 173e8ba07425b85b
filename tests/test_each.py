"""One function over many items: the same answers here, in processes, on a cluster that loses a node."""

import itertools
import operator
import os
import sys

import pytest

import tasks
from jobs import Job, write_job
from meshwise.core.each import Lost, each, on_ray
from meshwise.core.errors import DataError


@pytest.mark.parametrize("how", [{"jobs": 1}, {"jobs": 3}, {"jobs": 2, "fresh": True}])
def test_each_item_is_answered_once(how):
    found = list(each(operator.neg, range(10), **how))
    assert sorted(found) == [(n, -n) for n in range(10)]


def test_what_a_function_raises_is_raised_and_what_dies_is_lost():
    with pytest.raises(ValueError, match="invalid literal"):
        dict(each(int, ["1", "x"], jobs=2))
    found = dict(each(tasks.die_of_minus_one, [1, -1, 2], jobs=2))
    assert found[0] == 1 and found[2] == 2
    assert isinstance(found[1], Lost) and found[1].reason == "the process was ended by SIGKILL: about to die"


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_answers_all_and_repeats_nothing(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is an extra; .ci/run installs it")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the nodes
    items = [(n, str(tmp_path / "log"), 0.4) for n in range(16)]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with on_ray(cluster.address):
            answers = each(tasks.slow_square, items)
            first = list(itertools.islice(answers, 5))
            cluster.remove_node(second, allow_graceful=False)
            found = first + list(answers)
    finally:
        cluster.shutdown()
    assert sorted(found) == [(n, n * n) for n in range(16)]
    done = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert set(done) == set(range(16)) and len(done) <= 17  # at most what the lost node had not yet told
    assert all(done.count(place) == 1 for place, _ in first)


def test_no_cluster_is_one_sentence():
    pytest.importorskip("ray", reason="Ray is an extra; .ci/run installs it")
    with pytest.raises(DataError, match="Connection refused"), on_ray("127.0.0.1:1"):
        pass


@pytest.mark.slow
def test_a_study_a_sizing_and_traces_are_the_same_on_a_cluster(tmp_path, meshwise):
    """To the last digit; a study here is what its points are alone."""
    pytest.importorskip("ray", reason="Ray is an extra; .ci/run installs it")
    write_job(tmp_path, Job(4, 6, "slow device", rank=1, has_marks=True, has_numbers=True))
    study = ("search", "llama3-8b", "--cluster", "h100-80g-sxm:8", "--batch", "16", "--seq", "2048")
    study += ("--plan", "vpp=1,schedule=1f1b,cp=1", "--vary", "gpus=4|8")
    sizing = ("serve", "llama3-8b", "--cluster", "h100-80g-sxm:8,h200-sxm:8", "--prompt", "512")
    sizing += ("--output", "128", "--rate", "2", "--ttft-ms", "500", "--token-ms", "50")
    traces = ("trace", "summary", str(tmp_path))
    for words in (study, sizing, traces):
        alone, there = (meshwise(*words, *more, "--json").document for more in ((), ("--ray", "local")))
        for document in (alone, there):
            for speed in ("elapsed_s", "configurations_per_s"):
                document.get("sizing", {}).pop(speed, None)
        assert alone == there
