"""The meaning of a strategy's calls on real replicas: run, reduce, gather, contexts, collectives, values."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
import torch

from distnb.values import PerReplica
from tests.support.ranks import Rank, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

_PRELUDE = """
import collections, dataclasses, enum, time
import numpy as np
import distnb
from distnb import errors
from distnb.values import PerReplica
strategy = distnb.MirroredStrategy()
n, me = strategy.num_replicas_in_sync, distnb.replica_id()
result = {}

def run(fn, *args, **kwargs):
    return strategy.run(fn, args, kwargs)

def per_replica(*components):
    return PerReplica(components, n)

def error(call, *kinds):
    try:
        call()
    except Exception as raised:
        assert isinstance(raised, kinds), (raised, kinds)
        return f"{type(raised).__name__}: {raised}"
    return None
"""


def ranks(program: str, n: int) -> list[Rank]:
    import textwrap

    ended = run_ranks(_PRELUDE + textwrap.dedent(program), n, timeout_s=90)
    return [rank.check() for rank in ended]


def joined(results: list[Any]) -> Any:
    """Return the tuple of all components of each rank's PerReplica."""
    assert all(isinstance(one, PerReplica) and one.num_replicas == len(results) for one in results), results
    return tuple(one.component(rank) for rank, one in enumerate(results))


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_run_regroups_leaf_by_leaf(n: int) -> None:
    ended = ranks(
        """
        Pair = collections.namedtuple("Pair", "a b")
        class Colour(enum.Enum):
            RED = 1
        @dataclasses.dataclass
        class Box:
            x: object
            y: object = 7

        def step(c):
            return {"id": c, "same": 3, "text": "t", "none": None, "mixed": None if c else 1.5,
                    "tensor": torch.ones(2 + c), "list": [c, Colour.RED], "pair": Pair(c, 2.5), "nan": float("nan"),
                    "dtype": torch.ones(1, dtype=torch.float64 if c else torch.float32)}
        ids = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        for _ in range(3):
            found = run(step, ids)
        result["found"] = {**found, "pair": tuple(found["pair"])}
        box = run(lambda c: Box(c), ids)
        result["box"] = (type(box).__name__, box.x, box.y)
        result["none"] = run(lambda: None)
        result["one"] = run(lambda: 1)
        result["kwargs"] = strategy.run(lambda x, y=0: x + y, args=(ids,), kwargs={"y": 10})
        """,
        n,
    )
    found = [rank.result["found"] for rank in ended]
    if n == 1:
        assert found[0]["id"] == 0
        assert found[0]["mixed"] == 1.5
        assert found[0]["list"][0] == 0
        assert ended[0].result["kwargs"] == 10
        return
    assert joined([one["id"] for one in found]) == tuple(range(n))
    assert all(one["same"] == 3 and one["text"] == "t" and one["none"] is None for one in found)
    assert joined([one["mixed"] for one in found]) == (1.5, *[None] * (n - 1))
    assert [len(t) for t in joined([one["tensor"] for one in found])] == [2 + r for r in range(n)]
    assert joined([one["list"][0] for one in found]) == tuple(range(n))
    assert not isinstance(found[0]["list"][1], PerReplica)
    assert all(one["pair"][1] == 2.5 and math.isnan(one["nan"]) for one in found)
    assert joined([rank.result["kwargs"] for rank in ended]) == tuple(r + 10 for r in range(n))
    for rank in ended:
        assert rank.result["none"] is None
        assert rank.result["one"] == 1
        assert rank.result["box"][0] == "Box"
        assert rank.result["box"][2] == 7


def test_run_refuses_wrong_arguments() -> None:
    ended = ranks(
        """
        ids = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        result["structures"] = error(lambda: run(lambda c: {"a": 1} if c else (1, 2), ids), ValueError)
        result["more"] = error(lambda: run(lambda x: x, PerReplica([1, 2, 3])), ValueError)
        result["fewer"] = error(lambda: run(lambda x: x, PerReplica([1])), ValueError)
        result["args"] = error(lambda: strategy.run(print, torch.ones(2)), TypeError, ValueError)
        result["string"] = error(lambda: strategy.run(print, "ab"), TypeError)
        result["call"] = error(lambda: strategy.run(3), TypeError)
        result["returned"] = error(lambda: run(lambda: ids), TypeError)
        """,
        2,
    )
    for rank in ended:
        found = rank.result
        assert "{'a': *}" in found["structures"]
        assert "(*, *)" in found["structures"]
        assert "3 replica(s)" in found["more"]
        assert "strategy of 2" in found["more"]
        assert "1 replica(s)" in found["fewer"]
        assert "args=(x,)" in found["args"]
        assert "args=(x,)" in found["string"]
        assert "without calling fn" in found["call"]
        assert "returned" in found["returned"]


def test_nested_distributed_values_are_selected_and_other_arguments_keep_their_identity() -> None:
    ended = ranks(
        """
        history = []
        value = per_replica(10, 20)
        def step(tree, log):
            log.append(tree["x"][0])
            return tree["x"][0]
        found = run(step, {"x": (value, "s")}, history)
        result["history"] = history
        result["found"] = found
        """,
        2,
    )
    assert [rank.result["history"] for rank in ended] == [[10], [20]]
    assert joined([rank.result["found"] for rank in ended]) == (10, 20)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_reduce_combines_components(n: int) -> None:
    ended = ranks(
        """
        even = strategy.distribute_values_from_function(lambda c: torch.arange(4.0) + 4 * c.replica_id_in_sync_group)
        uneven = strategy.distribute_values_from_function(
            lambda c: torch.arange(4.0) if c.replica_id_in_sync_group == 0 else torch.tensor([4.0, 5.0]))
        empty = strategy.distribute_values_from_function(lambda c: torch.empty(0))
        matrix = strategy.distribute_values_from_function(
            lambda c: torch.full((2, 3), 1.0 + c.replica_id_in_sync_group))
        numbers = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group + 1)
        reduce = strategy.reduce
        result["even"] = [reduce(op, even, axis=axis) for op in ("sum", "MEAN") for axis in (None, 0, -1, (0,), [0])]
        result["uneven"] = [reduce(distnb.ReduceOp.SUM, uneven, 0), reduce("mean", uneven, 0)]
        result["empty"] = [reduce("sum", empty, 0), reduce("mean", empty, 0)]
        result["matrix"] = [reduce("sum", matrix, (0, 1)), reduce("mean", matrix, 1), reduce("sum", matrix, -2)]
        result["numbers"] = [reduce("sum", numbers, None), reduce("mean", numbers, None)]
        result["tree"] = reduce("mean", {"a": [even, numbers], "b": (matrix,)}, None)
        result["tree0"] = reduce("sum", {"a": even, "b": matrix}, 0)
        result["ints"] = reduce("mean", strategy.distribute_values_from_function(
            lambda c: torch.tensor(1 + c.replica_id_in_sync_group)), None)
        result["small"] = reduce("sum", strategy.distribute_values_from_function(
            lambda c: torch.tensor([1, 2], dtype=torch.int32)), None)
        result["half"] = reduce("sum", strategy.distribute_values_from_function(
            lambda c: torch.tensor([1, 2], dtype=torch.bfloat16)), 0)
        result["array"] = reduce("sum", strategy.distribute_values_from_function(lambda c: np.array([1.0, 2.0])), None)
        waves = strategy.distribute_values_from_function(lambda c: torch.tensor([1 + 1j]))
        result["complex"] = reduce("sum", {"a": waves, "b": even}, 0)
        """,
        n,
    )
    expect = [torch.arange(4.0) + 4 * r for r in range(n)]
    uneven = torch.cat([torch.arange(4.0), *[torch.tensor([4.0, 5.0])] * (n - 1)])
    total = float(sum(t.sum() for t in expect))
    for rank in ended:
        found = rank.result
        torch.testing.assert_close(found["even"][0], sum(expect))
        assert [float(x) for x in found["even"][1:5]] == [total] * 4
        torch.testing.assert_close(found["even"][5], sum(expect) / n)
        assert [float(x) for x in found["even"][6:]] == [total / (4 * n)] * 4
        assert found["uneven"] == [uneven.sum(), uneven.mean()]
        assert float(found["empty"][0]) == 0
        assert math.isnan(found["empty"][1])
        assert float(found["matrix"][0]) == 6 * sum(range(1, n + 1))
        torch.testing.assert_close(found["matrix"][1], torch.full((2,), (n + 1) / 2))
        assert found["matrix"][2].shape == (3,)
        assert found["numbers"] == [sum(range(1, n + 1)), (n + 1) / 2]
        assert type(found["numbers"][0]) is int
        assert type(found["numbers"][1]) is float
        torch.testing.assert_close(found["tree"]["a"][0], sum(expect) / n)
        assert found["tree"]["a"][1] == (n + 1) / 2
        assert float(found["tree0"]["a"]) == total
        assert found["tree0"]["b"].shape == (3,)
        assert found["ints"].dtype is torch.float64
        assert float(found["ints"]) == (n + 1) / 2
        assert found["small"].dtype is torch.int32
        assert found["small"].tolist() == [n, 2 * n]
        assert found["half"].dtype is torch.bfloat16
        assert float(found["half"]) == 3 * n
        assert found["array"].tolist() == [1.0 * n, 2.0 * n]
        assert complex(found["complex"]["a"]) == n * (1 + 1j)


def test_reduce_refuses_wrong_arguments() -> None:
    ended = ranks(
        """
        def value(make):
            return strategy.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))
        vector = value(lambda r: torch.ones(3))
        reduce = strategy.reduce
        result["max"] = error(lambda: reduce("MAX", vector, None), ValueError)
        result["axis"] = error(lambda: reduce("sum", vector), TypeError)
        result["scalar"] = error(lambda: reduce("sum", value(lambda r: torch.tensor(1.0)), 0), ValueError)
        result["range"] = error(lambda: reduce("sum", vector, 1), ValueError)
        result["badaxis"] = error(lambda: reduce("sum", vector, "x"), ValueError)
        result["bool"] = error(lambda: reduce("sum", value(lambda r: torch.tensor([True])), None), TypeError)
        result["plain"] = [error(lambda a=a: reduce("sum", torch.ones(2), a), TypeError) for a in (None, 0)]
        result["number"] = error(lambda: reduce("sum", 3, None), TypeError)
        result["itself"] = [
            reduce("mean", 3, None), reduce("mean", torch.ones(2), 0).tolist(), reduce("mean", {"a": 2}, None)]
        result["text"] = error(lambda: reduce("sum", value(lambda r: "ab"), None), TypeError)
        result["after"] = reduce("sum", vector, 0)
        # The same number of elements: nothing in the message shows that these do not belong together.
        turned = value(lambda r: torch.ones(2 + r, 3 - r))
        result["unlike"] = error(lambda: reduce("sum", [turned, vector], None), RuntimeError)
        """,
        2,
    )
    assert all("float32[2, 3]" in rank.result["unlike"] and "float32[3, 2]" in rank.result["unlike"] for rank in ended)
    for rank in ended:
        found = rank.result
        assert "'SUM'" in found["max"]
        assert "'MEAN'" in found["max"]
        assert "axis" in found["axis"]
        assert "scalar" in found["scalar"]
        assert "(3,)" in found["range"]
        assert "'x'" in found["badaxis"]
        assert "booleans" in found["bool"]
        assert all("plain value" in text for text in found["plain"])
        assert "Return a tensor" in found["number"]
        assert found["itself"] == [3, [1.0, 1.0], {"a": 2}]
        assert "local_results" in found["text"]
        assert float(found["after"]) == 6


def test_uneven_components_do_not_reduce_element_by_element() -> None:
    ended = run_ranks(
        _PRELUDE
        + """
uneven = strategy.distribute_values_from_function(lambda c: torch.ones(4 - 2 * c.replica_id_in_sync_group))
result = error(lambda: strategy.reduce("sum", uneven, None), Exception)
""",
        2,
    )
    assert all(rank.result and "float32[4]" in rank.result and "float32[2]" in rank.result for rank in ended), ended
    assert all('strategy.reduce("sum", value, axis=0)' in rank.result for rank in ended), ended


def test_a_script_that_catches_a_mismatch_ends_at_its_next_collective() -> None:
    ended = ranks(
        """
        both = strategy.distribute_values_from_function(lambda c: torch.ones(2))
        result["first"] = error(lambda: strategy.reduce("sum" if me else "mean", both, None), RuntimeError)
        try:
            strategy.reduce("sum", both, None)
        except distnb.errors.ProgramAborted as aborted:
            result["then"] = str(aborted), type(aborted.__cause__).__name__
        """,
        2,
    )
    for rank in ended:
        assert "different collectives" in rank.result["first"]
        assert rank.result["then"] == (
            "This error ends the program on every replica, although the program went on after it.",
            "CollectiveMismatchError",
        )


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_gather_concatenates_components(n: int) -> None:
    ended = ranks(
        """
        def value(make):
            return strategy.distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))
        gather = strategy.gather
        result["uneven"] = gather(value(lambda r: torch.full((r, 2), float(r))), 0)
        result["negative"] = gather(value(lambda r: torch.full((2, 1), r)), -1)
        result["bool"] = gather(value(lambda r: torch.tensor([r == 0])), 0)
        result["tree"] = gather({"a": value(lambda r: torch.ones(1)), "b": [value(lambda r: torch.tensor([r]))]}, 0)
        result["complex"] = gather(value(lambda r: torch.tensor([r * 1j])), 0)
        result["empty"] = gather(value(lambda r: torch.empty(0, 3)), 0)
        result["half"] = gather(value(lambda r: torch.ones(1, dtype=torch.bfloat16)), 0)
        result["scalar"] = error(lambda: gather(value(lambda r: torch.tensor(1.0)), 0), ValueError)
        result["range"] = error(lambda: gather(value(lambda r: torch.ones(2)), 1), ValueError)
        result["unlike"] = error(lambda: gather(value(lambda r: torch.ones(2, 3 + r)), 0), ValueError)
        result["sparse"] = error(lambda: gather(value(lambda r: torch.eye(2).to_sparse()), 0), NotImplementedError)
        result["plain"] = error(lambda: gather(torch.ones(2), 0), TypeError)
        result["in"] = error(lambda: run(lambda: strategy.gather(torch.ones(2), 0)), RuntimeError)
        """,
        n,
    )
    for rank in ended:
        found = rank.result
        torch.testing.assert_close(found["uneven"], torch.cat([torch.full((r, 2), float(r)) for r in range(n)]))
        assert found["negative"].tolist() == [list(range(n))] * 2
        assert found["bool"].tolist() == [r == 0 for r in range(n)]
        assert found["tree"]["b"][0].tolist() == list(range(n))
        assert found["complex"].tolist() == [r * 1j for r in range(n)]
        assert found["empty"].shape == (0, 3)
        assert found["half"].dtype is torch.bfloat16
        assert "scalar" in found["scalar"]
        assert "(2,)" in found["range"]
        assert "replica 1" in found["unlike"]
        assert "[2, 4]" in found["unlike"]
        assert "sparse" in found["sparse"]
        assert "plain" in found["plain"]
        assert "all_gather" in found["in"]


def test_contexts_allow_their_own_operations_only() -> None:
    ended = ranks(
        """
        def where():
            return distnb.has_strategy(), distnb.in_cross_replica_context(), distnb.get_replica_context() is not None
        result["outside"] = where()
        with strategy.scope():
            result["scope"] = where()
            assert distnb.get_strategy() is strategy
            with strategy.scope():
                result["again"] = where()
            other = distnb.MirroredStrategy(gradient_reduction="mean")
            result["mixing"] = [error(call, RuntimeError) for call in (
                lambda: other.scope(), lambda: other.run(print), lambda: other.reduce("sum", 1, None),
                lambda: distnb.get_strategy.__globals__["DefaultStrategy"]().scope())]
        seen = []
        def step():
            seen.append(where())
            assert distnb.get_strategy() is strategy
            context = distnb.get_replica_context()
            def merge(given, value):
                seen.append(where())
                assert given is strategy
                return given.reduce("sum", value, axis=None)
            merged = context.merge_call(merge, args=(torch.tensor(context.replica_id_in_sync_group + 1.0),))
            seen.append(where())
            return merged
        result["merged"] = run(step)
        result["run"], result["merge"], result["back"] = seen
        result["inside"] = [error(lambda call=call: run(call), RuntimeError) for call in (
            lambda: strategy.run(print), lambda: strategy.reduce("sum", 1, axis=None), lambda: strategy.scope())]
        kept = []
        run(lambda: kept.append(distnb.get_replica_context()))
        result["kept"] = error(lambda: kept[0].all_reduce("sum", 1), RuntimeError)
        import threading
        def in_thread():
            threads = []
            thread = threading.Thread(target=lambda: threads.append(where()))
            thread.start(); thread.join()
            return threads[0]
        result["thread"] = [one for one in run(lambda: seen.append(in_thread())) or [seen[-1]]]
        result["default"] = distnb.get_replica_context().all_reduce("sum", 3)
        result["spread"] = run(
            lambda: distnb.get_replica_context().merge_call(lambda s, v: v, args=(distnb.replica_id(),)))
        """,
        2,
    )
    for rank in ended:
        found = rank.result
        assert found["outside"] == (False, False, True)
        assert found["scope"] == found["again"] == (True, True, False)
        assert found["run"] == found["back"] == (True, False, True)
        assert found["merge"] == (True, True, False)
        assert all("Mixing different Strategy objects" in text for text in found["mixing"])
        assert "directly" in found["inside"][0]
        assert "all_reduce" in found["inside"][1]
        assert "before strategy.run" in found["inside"][2]
        assert "outside its function" in found["kept"]
        assert found["thread"] == [(False, False, True)]
        assert found["default"] == 3
    assert [float(one) for one in joined([rank.result["merged"] for rank in ended])] == [3.0, 3.0]
    assert joined([rank.result["spread"] for rank in ended]) == (0, 1)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_gradients_flow_through_collectives(n: int) -> None:
    ended = ranks(
        """
        def step():
            context = distnb.get_replica_context()
            me = context.replica_id_in_sync_group
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            found = {}
            for op in ("sum", "mean"):
                y = context.all_reduce(op, x)
                found[op] = torch.autograd.grad((y * (me + 1)).sum(), x)[0]
            part = torch.full((me + 1, 2), 3.0, requires_grad=True)
            whole = context.all_gather(part, 0)
            weight = torch.arange(float(len(whole))).reshape(-1, 1) * (me + 1)
            found["gather"] = torch.autograd.grad((whole * weight).sum(), part)[0]
            z = torch.tensor(2.0, requires_grad=True)
            cube = context.all_reduce("sum", z ** 3)
            (first,) = torch.autograd.grad(cube, z, create_graph=True)
            found["second"] = torch.autograd.grad(first, z)[0]
            tree = context.all_reduce("sum", {"a": x, "b": (me, 2.0), "c": torch.tensor([me])})
            found["tree"] = {**tree, "a": tree["a"].detach()}
            found["whole"] = whole.detach()
            found["bool"] = error(lambda: context.all_reduce("sum", True), TypeError)
            found["mean"] = context.all_reduce("mean", torch.tensor([1, 2])).dtype
            return found
        result = run(step)
        context_of = lambda: distnb.get_replica_context()
        result["none"] = run(lambda: context_of().all_reduce("sum", [None, 1, None]))
        result["holes"] = error(
            lambda: run(lambda: context_of().all_reduce("sum", [1.0, None] if me == 0 else [None, 1.0])), RuntimeError)
        """,
        n,
    )
    assert all(one.result["none"] == [None, n, None] for one in ended)
    assert all("called different collectives" in str(one.result["holes"]) for one in ended)
    total = n * (n + 1) / 2
    for rank, one in enumerate(ended):
        found = {
            key: value.component(rank) if isinstance(value, PerReplica) else value
            for key, value in one.result.items()
            if key not in ("tree", "none", "holes")
        }
        assert found["sum"].tolist() == [total] * 2
        assert found["mean"] is torch.float64
        tree = one.result["tree"]
        assert tree["b"] == (sum(range(n)), 2.0 * n)
        assert tree["a"].component(rank).tolist() == [n, 2 * n]
        begin = rank * (rank + 1) // 2
        expected = torch.arange(begin, begin + rank + 1.0).reshape(-1, 1).expand(-1, 2) * total
        torch.testing.assert_close(found["gather"], expected)
        assert float(found["second"]) == 12.0 * n * n / n
        assert "booleans" in found["bool"]


def test_local_results_can_be_combined_and_broadcast() -> None:
    ended = ranks(
        """
        ids = strategy.experimental_distribute_values_from_function(
            lambda c: {"id": torch.tensor(c.replica_id_in_sync_group), "n": c.num_replicas_in_sync})
        result["local"] = strategy.experimental_local_results(ids)
        result["plain"] = strategy.local_results(5)
        result["repr"] = repr(ids["id"])
        mine = [f"from {me}", torch.full((me + 1,), float(me))]
        result["broadcast"] = strategy.broadcast({"a": ids["id"], "b": mine}, 1)
        result["value"] = float(strategy.reduce("sum", ids["id"], axis=None))
        result["bool"] = error(lambda: bool(ids["id"]), TypeError)
        result["devices"] = strategy.worker_devices
        resolver = distnb.MultiWorkerMirroredStrategy().cluster_resolver
        result["task"] = resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()
        distnb.on_chief(lambda: result.update(chief=True))()

        def write(path):
            with open(path, "x") as file:
                time.sleep(0.1)
                file.write("whole")
            return len("whole")

        path = os.environ["DISTNB_TEST_RESULT"].rstrip("012") + "-written"
        result["written"] = distnb.on_chief(write)(path), open(path).read()
        if me == 0:
            distnb.on_chief(str)(1)  # the others need not call it
        strategy.run(lambda: distnb.on_chief(str)(1))
        result["twice"] = error(lambda: distnb.on_chief(write)(path), FileExistsError)
        result["of its own"] = error(lambda: distnb.on_chief(lambda: [].remove(1))(), ValueError)

        def without_the_chief():
            if me != 0:
                distnb.on_chief(str)(1)
            strategy.reduce("sum", ids["id"], axis=None)

        def made_in_the_scope():
            with strategy.scope():
                os.mkdir(path + "-folder")

        try:
            made_in_the_scope()
        except FileExistsError as raised:
            result["in the scope"] = raised.__notes__

        import shutil, tempfile
        from distnb.runtime.this_process import this_process
        own = tempfile.TemporaryDirectory()
        try:
            with strategy.scope():
                open(own.name + "/log.csv")
        except FileNotFoundError as raised:
            result["in a folder of its own"] = getattr(raised, "__notes__", [])
        own.cleanup()
        folder = result["folder"] = distnb.shared_folder("distnb-semantics-")
        in_run = strategy.local_results(strategy.run(lambda: distnb.shared_folder(parent=folder)))[0]
        this_process.replica.workers = (0, 0, 1)  # as if replica 2 were on another machine
        os.getcwd = lambda: folder
        result["in the folder"] = [os.path.dirname(each) for each in (in_run, distnb.shared_folder())]
        os.path.isdir = lambda path: me != 2
        result["elsewhere"] = error(lambda: distnb.shared_folder(parent=folder), ValueError)
        result["no parent"] = error(lambda: distnb.shared_folder(parent=folder + "/none"), FileNotFoundError)
        distnb.on_chief(shutil.rmtree)(folder)
        result["alone"] = error(without_the_chief, RuntimeError)
        """,
        3,
    )
    for rank, one in enumerate(ended):
        found = one.result
        assert found["local"] == ({"id": torch.tensor(rank), "n": 3},)
        assert found["plain"] == (5,)
        assert f"{rank}: tensor({rank})" in found["repr"]
        assert int(found["broadcast"]["a"]) == 1
        assert found["broadcast"]["b"][0] == "from 1"
        assert found["broadcast"]["b"][1].tolist() == [1.0, 1.0]
        assert found["value"] == 3
        assert "reduce" in found["bool"]
        assert "local_results" in found["bool"]
        assert len(found["devices"]) == 3
        assert found["task"] == ("worker", rank, {}), "TensorFlow's test for the chief is true on one replica"
        assert found.get("chief", False) is (rank == 0)
        assert found["written"] == (5 if rank == 0 else None, "whole")
        assert "File exists" in found["twice"]
        assert "not in list" in found["of its own"]
        assert "Replica 0 must call it, too" in found["alone"] or rank == 0
        assert any("distnb.shared_folder()" in note for note in found["in a folder of its own"]) == (rank > 0)
        assert found["folder"] == ended[0].result["folder"]
        assert found["in the folder"] == [found["folder"]] * 2
        assert f"but {socket.gethostname()} does not have it" in found["elsewhere"]
        assert "No such file" in found["no parent"]
    in_the_scope = [one.result["in the scope"] for one in ended if "in the scope" in one.result]
    assert len(in_the_scope) == 2, "one replica created it"
    assert all("All 3 replicas run this code" in notes[0] for notes in in_the_scope)
