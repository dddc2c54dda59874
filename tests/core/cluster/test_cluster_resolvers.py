"""ClusterSpec, and the resolvers that read arguments, TF_CONFIG and Slurm's variables."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import pytest

from distnb.cluster.resolvers.host_list import expand_counts, expand_host_list
from distnb.cluster.resolvers.ray import RayMeeting
from distnb.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from distnb.errors import OptionError

# -- ClusterSpec ------------------------------------------------------------------------------------------------------

DENSE = {"chief": ["c:1"], "worker": ["a:1", "b:1"]}


def test_a_spec_lists_its_jobs_and_tasks():
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {1: "p:1", 3: "q:1"}})
    assert spec.jobs == ["worker", "ps"]
    assert (spec.num_tasks("worker"), spec.num_tasks("ps")) == (2, 2)
    assert spec.task_indices("ps") == [1, 3]
    assert spec.task_address("ps", 3) == "q:1"
    assert spec.job_tasks("ps") == [None, "p:1", None, "q:1"]
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": {1: "p:1", 3: "q:1"}}
    assert bool(spec)
    assert not ClusterSpec({})


def test_specs_are_compared_hashed_copied_and_pickled_by_value():
    spec = ClusterSpec(DENSE)
    other = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}, "chief": {"0": "c:1"}})
    assert spec == other == ClusterSpec(spec) == pickle.loads(pickle.dumps(spec))
    assert len({spec, other}) == 1
    assert spec != ClusterSpec({"worker": ["b:1", "a:1"], "chief": ["c:1"]})
    assert spec != DENSE
    assert eval(repr(spec)) == spec


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.num_tasks("ps"), "no job 'ps' in the cluster: the jobs are chief, worker"),
        (lambda s: s.task_address("worker", 2), "no task 2 in job 'worker'. Its tasks are 0, 1"),
        (lambda s: s.task_address("worker", "1"), "no task '1'"),
        (lambda s: s.task_address("worker", True), "no task True"),
        (lambda s: ClusterSpec({}).task_indices("worker"), "the cluster is empty"),
    ],
)
def test_missing_jobs_and_tasks_are_named(ask: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ask(ClusterSpec(DENSE))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (["a:1"], "from job names to addresses"),
        ({"worker": "a:1"}, "'worker': its tasks are a list"),
        ({"worker": 2}, "'worker': its tasks are a list"),
        ({"worker": ["a:1", 5]}, "5 is not an address"),
        ({"worker": ["a:1", " "]}, "' ' is not an address"),
        ({"worker": {-1: "a:1"}}, "-1 is not a task index"),
        ({"worker": {"x": "a:1"}}, "'x' is not a task index"),
        ({"worker": {1.0: "a:1"}}, "1.0 is not a task index"),
        ({3: ["a:1"]}, "job's name is text"),
    ],
)
def test_a_malformed_cluster_shows_the_wrong_part(cluster: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ClusterSpec(cluster)


# -- SimpleClusterResolver --------------------------------------------------------------------------------------------


def test_a_simple_resolver_returns_its_arguments():
    resolver = SimpleClusterResolver(
        ClusterSpec(DENSE),
        master="m:9",
        task_type="worker",
        task_id=1,
        environment="google",
        num_accelerators={"GPU": 3},
        rpc_layer="grpc",
    )
    assert resolver.cluster_spec() == ClusterSpec(DENSE)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("google", "grpc")
    assert resolver.master() == "grpc://m:9"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.master("worker", 0, rpc_layer="") == "a:1"
    assert resolver.num_accelerators() == {"GPU": 3}
    assert SimpleClusterResolver(DENSE, task_type="worker", task_id=1).master() == "b:1"
    assert SimpleClusterResolver({}).master() == ""


def test_the_task_of_a_simple_resolver_can_be_assigned_and_is_checked():
    resolver = SimpleClusterResolver(DENSE)
    assert (resolver.task_type, resolver.task_id) == (None, None)
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "b:1"
    with pytest.raises(ValueError, match="no task 7"):
        SimpleClusterResolver(DENSE, task_type="worker", task_id=7)
    with pytest.raises(ValueError, match="task_id=-1"):
        resolver.task_id = -1
    with pytest.raises(ValueError, match="task_type=''"):
        resolver.task_type = ""
    with pytest.raises(ValueError, match="no job 'ps'"):
        resolver.master("ps", 0)


def test_only_local_accelerators_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resolver = SimpleClusterResolver(DENSE, task_type="worker", task_id=1)
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 1) == {}
    with pytest.raises(ValueError, match="asked for worker 0, but this process is worker 1"):
        resolver.num_accelerators("worker", 0)
    with pytest.raises(ValueError, match="config_proto"):
        resolver.num_accelerators(config_proto=object())


# -- TFConfigClusterResolver ------------------------------------------------------------------------------------------


def tf_config(monkeypatch: pytest.MonkeyPatch, config: Any) -> TFConfigClusterResolver:
    monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
    return TFConfigClusterResolver()


def task(kind: Any = "worker", index: Any = 1, cluster: Any = DENSE) -> dict[str, Any]:
    return {"cluster": cluster, "task": {"type": kind, "index": index}}


def test_tf_config_is_read_at_each_access(monkeypatch: pytest.MonkeyPatch):
    resolver = tf_config(monkeypatch, task())
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "b:1")
    assert resolver.cluster_spec() == ClusterSpec(DENSE)
    tf_config(monkeypatch, {**task("chief", 0), "rpc_layer": "grpc", "environment": "cloud"})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("chief", 0, "grpc://c:1")
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.master("worker", 0) == "grpc://a:1"


@pytest.mark.parametrize("text", [None, "{}", '{"cluster": {}}', '{"cluster": {}, "task": {}}'])
def test_a_missing_tf_config_means_no_cluster(monkeypatch: pytest.MonkeyPatch, text: str | None):
    monkeypatch.setenv("TF_CONFIG", text or "")
    if text is None:
        monkeypatch.delenv("TF_CONFIG")
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert (resolver.environment, resolver.rpc_layer) == ("", None)


def test_arguments_override_tf_config(monkeypatch: pytest.MonkeyPatch):
    tf_config(monkeypatch, task())
    resolver = TFConfigClusterResolver("chief", 0, rpc_layer="x", environment="y")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("chief", 0, "x://c:1")
    assert resolver.environment == "y"
    resolver.task_type, resolver.task_id = None, None
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_an_index_may_be_text_and_an_evaluator_outside_of_the_cluster(monkeypatch: pytest.MonkeyPatch):
    assert tf_config(monkeypatch, task(index="0")).task_id == 0
    resolver = tf_config(monkeypatch, task("evaluator", 0))
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("evaluator", 0, "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{'cluster': 1}", "TF_CONFIG is not JSON"),
        ("", "TF_CONFIG is not JSON .*: it is empty"),
        ("  ", "it is empty.*leave it unset"),
        ("null", "TF_CONFIG is null, but must be a JSON object"),
        ("[1]", r"TF_CONFIG is \[1\]"),
        ('"worker"', 'TF_CONFIG is "worker"'),
        ({"cluster": None}, '"cluster" is null'),
        ({"cluster": ["a:1"]}, r'"cluster" is \["a:1"\]'),
        ({"cluster": {"worker": "a:1"}}, "is malformed.*its tasks are a list"),
        ({"cluster": {"worker": ["a:1", None]}}, "None is not an address"),
        ({"cluster": DENSE, "task": []}, r'"task" is \[\]'),
        ({"cluster": DENSE, "task": {"index": 0}}, 'lacks a "type"'),
        ({"cluster": DENSE, "task": {"type": "", "index": 0}}, 'lacks a "type"'),
        ({"cluster": DENSE, "task": {"type": "worker"}}, 'lacks an "index"'),
        (task(index=2), "this is worker 2. There is no task 2 in job 'worker'. Its tasks are 0, 1"),
        (task(index=-1), "the index -1 is invalid. Give a whole number"),
        (task(index=1.0), "the index 1.0 is invalid. Give a whole number"),
        (task(index=True), "the index True is invalid. Give a whole number"),
        (task(index="one"), "the index 'one' is invalid. Give a whole number"),
        (task("ps", 0), "this is ps 0. There is no job 'ps' in the cluster: the jobs are chief, worker"),
        (task(cluster={}), "the cluster is empty"),
        ({"rpc_layer": 5}, '"rpc_layer" is 5'),
    ],
)
def test_a_wrong_tf_config_shows_the_wrong_part(monkeypatch: pytest.MonkeyPatch, config: Any, message: str):
    resolver = tf_config(monkeypatch, config)
    with pytest.raises(OptionError, match=message):
        _ = (resolver.task_type, resolver.task_id, resolver.rpc_layer)


def test_unused_keys_are_named(monkeypatch: pytest.MonkeyPatch):
    resolver = tf_config(monkeypatch, {**task(), "session_master": "x", "servise": 1})
    with pytest.warns(UserWarning, match="'session_master', 'servise'"):
        assert resolver.task_id == 1


def test_a_master_needs_a_task(monkeypatch: pytest.MonkeyPatch):
    resolver = tf_config(monkeypatch, {"cluster": DENSE})
    with pytest.raises(ValueError, match=r"does not know which task.*master\('worker', 0\)"):
        resolver.master()
    assert resolver.master("worker", 0) == "a:1"


# -- unions -----------------------------------------------------------------------------------------------------------


def test_several_resolvers_are_combined():
    first = SimpleClusterResolver(DENSE, task_type="worker", task_id=1, rpc_layer="grpc", num_accelerators={"GPU": 2})
    both = UnionResolver(first, SimpleClusterResolver({"worker": ["d:1", "a:1"], "ps": {3: "p:1"}}))
    assert both.cluster_spec().as_dict() == {**DENSE, "worker": ["a:1", "b:1", "d:1"], "ps": {3: "p:1"}}
    assert (both.task_type, both.task_id, both.rpc_layer, both.num_accelerators()) == ("worker", 1, "grpc", {"GPU": 2})
    assert both.master() == "grpc://b:1"
    assert UnionResolver(both, task_type="chief", task_id=0, rpc_layer="x").master() == "x://c:1"
    sparse = UnionResolver(SimpleClusterResolver({"w": {1: "a:1"}}), SimpleClusterResolver({"w": {1: "b:1"}}))
    with pytest.raises(ValueError, match="different addresses for w 1: a:1 and b:1"):
        sparse.cluster_spec()
    with pytest.raises(ValueError, match="got 'a:1'"):
        UnionResolver("a:1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none"):
        UnionResolver()


def test_a_spec_can_be_converted_to_a_cluster_def():
    converted = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "p:1"}}).as_cluster_def()
    assert [(job.name, dict(job.tasks)) for job in converted.job] == [
        ("ps", {3: "p:1"}),
        ("worker", {0: "a:1", 1: "b:1"}),
    ]
    assert ClusterSpec(converted).as_dict() == {"ps": {3: "p:1"}, "worker": ["a:1", "b:1"]}


# -- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n10,n9", ["n10", "n9"]),
        ("gpu[1-2].site.net", ["gpu1.site.net", "gpu2.site.net"]),
        ("r[1-2]n[01,03]-ib", ["r1n01-ib", "r1n03-ib", "r2n01-ib", "r2n03-ib"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]):
    assert expand_host_list(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1,,2]", "n[]", "n[a-b]", "n[1-2-3]", "n1,,n2", "", "n1,", "n[1-2", "n1-2]", "n[[1]]"]
)
def test_malformed_host_lists_are_refused(text: str):
    with pytest.raises(ValueError, match="is not a list in Slurm's notation"):
        expand_host_list(text)


def test_counts_per_node_are_expanded():
    assert expand_counts("3(x2),1,4(x1)") == [3, 3, 1, 4]
    for wrong in ("", "2(3)", "x", "1,,2", "2(x999999999)"):
        with pytest.raises(ValueError, match="is not a list in Slurm's notation"):
            expand_counts(wrong)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Provide the environment of task 3 of five, on three nodes."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    found = {"STEP_NODELIST": "n[9-11]", "STEP_TASKS_PER_NODE": "2(x2),1", "PROCID": "3", "NODEID": "1", "LOCALID": "1"}
    for name, value in found.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return monkeypatch


def test_a_slurm_step_defines_a_cluster(slurm: pytest.MonkeyPatch):
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["n9:8888", "n9:8889", "n10:8888", "n10:8889", "n11:8888"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "n10:8889"
    assert resolver.num_accelerators() == {}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_tasks_are_divided_among_jobs(slurm: pytest.MonkeyPatch):
    resolver = SlurmClusterResolver({"chief": 1, "ps": 1, "worker": 3}, port_base=5000, rpc_layer="grpc")
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["n9:5000"],
        "ps": ["n9:5001"],
        "worker": ["n10:5000", "n10:5001", "n11:5000"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master("chief", 0) == "grpc://n9:5000"


def test_tasks_get_gpus_of_their_own(slurm: pytest.MonkeyPatch):
    resolver = SlurmClusterResolver(gpus_per_node=4)
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert resolver.num_accelerators() == {"GPU": 2}
    slurm.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    SlurmClusterResolver(gpus_per_node=4, gpus_per_task=1).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    slurm.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    SlurmClusterResolver(gpus_per_node=4, auto_set_gpu=False).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


@pytest.mark.parametrize("name", ["STEP_NODELIST", "STEP_TASKS_PER_NODE", "PROCID"])
def test_a_missing_variable_is_named(slurm: pytest.MonkeyPatch, name: str):
    slurm.delenv(f"SLURM_{name}")
    with pytest.raises(ValueError, match=f"SLURM_{name}.* is not set.*srun"):
        _ = SlurmClusterResolver().task_id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jobs": {"worker": 4}}, "4 tasks, but this Slurm step has 5"),
        ({"jobs": {"worker": "many"}}, "'many'"),
        ({"jobs": {}}, "jobs="),
        ({"port_base": 0}, "port_base"),
        ({"tasks_per_node": {"n9": 1}}, "no number for n10, n11"),
        ({"gpus_per_node": 1}, "2 tasks run on one node with 1 GPU"),
        ({"gpus_per_node": 3, "gpus_per_task": 2}, "more than its 3 GPUs"),
        ({"gpus_per_task": -1}, "gpus_per_task=-1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(slurm: pytest.MonkeyPatch, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SlurmClusterResolver(**arguments).cluster_spec()


def test_a_node_named_twice_is_refused(slurm: pytest.MonkeyPatch):
    slurm.setenv("SLURM_STEP_NODELIST", "n[9-10],n9")
    with pytest.raises(ValueError, match="lists the nodes n9, n10, n9, but numbers of tasks for 3"):
        SlurmClusterResolver().cluster_spec()


def test_unsupported_task_distributions_are_refused(slurm: pytest.MonkeyPatch):
    slurm.setenv("SLURM_NODEID", "0")
    with pytest.raises(ValueError, match="--distribution=block"):
        _ = SlurmClusterResolver().task_id
    slurm.setenv("SLURM_PROCID", "5")
    with pytest.raises(ValueError, match="SLURM_PROCID is 5"):
        _ = SlurmClusterResolver().task_id


def test_workers_of_ray_are_numbered_as_they_come():
    meeting = RayMeeting()
    assert meeting.attend("a", None, "h:1") == {0: ("a", "h:1")}
    assert meeting.attend("a", None, "h:1") == {0: ("a", "h:1")}
    assert meeting.attend("b", 0, "h:2") == {0: ("a", "h:1")}  # its index is taken
    assert meeting.attend("c", None, "h:3") == {0: ("a", "h:1"), 1: ("c", "h:3")}
