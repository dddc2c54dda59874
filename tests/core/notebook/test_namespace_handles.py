"""Handles, replicas that differ, and their later use, with engines in this process."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import operator
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distnb.errors import (
    CannotTravelError,
    DistributedValueError,
    EngineDied,
    StaleHandleError,
    StructureError,
    UnassignedError,
)
from distnb.notebook.handles.handle import RemoteMirrored, RemotePerReplica, state_of_handle
from distnb.notebook.namespace import module_watch
from distnb.topology import Device, Team
from distnb.values import Mirrored, PerReplica
from tests.support.worlds import DoubleWorld, distributed, ordinary, run_all


@pytest.fixture
def world() -> Iterator[DoubleWorld]:
    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield DoubleWorld(2)
    torch.set_default_dtype(dtype)


def there(world: DoubleWorld, text: str) -> None:
    run_all(world, [distributed(text)])


def here(world: DoubleWorld, text: str) -> None:
    run_all(world, [ordinary(text)])


# -- replicas that differ ----------------------------------------------------------------------------------------------


def test_different_values_become_a_handle(world: DoubleWorld) -> None:
    there(world, "r = rid()\nx = [r]\ny = 'same'\nt = True if r else 1")
    ns = world.notebook.user_ns
    assert isinstance(ns["r"], RemotePerReplica)
    assert isinstance(ns["r"], PerReplica)
    assert ns["r"].values == (0, 1)
    assert ns["x"].values == ([0], [1])
    assert ns["y"] == "same"
    assert ns["t"].values == (1, True)
    assert repr(ns["r"]) == "PerReplica:{\n  0: 0,\n  1: 1\n}"
    there(world, "s = r * 10 + x[0]")
    assert ns["s"].values == (0, 11)


def test_a_snapshot_unpickled_by_one_replica_only_is_sent_again(world: DoubleWorld) -> None:
    """End another replica before it opened the snapshot: the first one receives its renamings twice."""
    there(world, "import torch\nr = torch.full((2,), float(rid()))\nx = [rid()]")
    there(world, "if rid():\n    r = torch.zeros(2)\nx[0] += 1")
    for _ in range(2):
        snapshot = world.namespace.outgoing("r, x", world.team)
        with world.engines[0].active():
            world.namespaces[0].open(snapshot, 0)
        world.namespace.failed(snapshot)
    there(world, "s = r.tolist(), x[0]")
    assert world.notebook.user_ns["s"].values == (([0.0, 0.0], 1), ([0.0, 0.0], 2))


def test_an_error_on_a_handle_does_not_resend_the_namespace(world: DoubleWorld) -> None:
    here(world, "data = [{'number': number} for number in range(10_000)]")
    there(world, "held = [len(data)]")
    held = world.notebook.user_ns["held"]
    assert not hasattr(held, "nothing")
    with pytest.raises(IndexError):
        _ = held[7]
    before = world.sent_nbytes
    there(world, "held.append(len(data))")
    assert world.sent_nbytes - before < 50_000


def test_different_plain_values_have_no_attributes(world: DoubleWorld) -> None:
    there(world, "name = str(rid()) * 2")
    name = world.notebook.user_ns["name"]
    for ask in (lambda: name[0], lambda: name(), lambda: name.__setitem__(0, 1)):
        with pytest.raises(DistributedValueError, match="local_results"):
            ask()
    with pytest.raises(AttributeError, match=r"plain value \(str\)"):
        _ = name.upper
    assert not hasattr(name, "upper")


def test_a_name_assigned_on_some_replicas_only_is_a_handle(world: DoubleWorld) -> None:
    there(world, "if rid() == 1:\n    late = [5]")
    late = world.notebook.user_ns["late"]
    assert "<unassigned>" in repr(late)
    assert "&lt;unassigned&gt;" in late._repr_html_()
    with pytest.raises(UnassignedError, match="replica 0"):
        late.component(0)
    assert late.component(1) == [5]
    run_all(world, [distributed("if rid() == 0:\n    late", raises=NameError)])
    there(world, "n = len(late) if rid() else -1")
    assert world.notebook.user_ns["n"].values == (-1, 1)


def test_a_name_reassigned_on_some_replicas_only_is_a_handle(world: DoubleWorld) -> None:
    here(world, "x = 5\ny = [1]")
    there(world, "if rid():\n    x = 7\n    y = [2]")
    ns = world.notebook.user_ns
    assert ns["x"].values == (5, 7)
    assert ns["y"].values == ([1], [2])
    there(world, "z = x + y[0]")
    assert ns["z"].values == (6, 9)


def test_an_object_changed_differently_becomes_a_handle(world: DoubleWorld) -> None:
    here(world, "history = []\nother = []\nbox = {'h': history, 'o': other}")
    there(world, "box['h'].append(rid())\nbox['o'].append('same')")
    ns = world.notebook.user_ns
    assert isinstance(ns["history"], RemotePerReplica)
    assert ns["box"]["h"] is ns["history"]
    assert ns["box"]["o"] is ns["other"]
    assert ns["other"] == ["same"]
    assert any("`history`" in notice and "differently" in notice for notice in world.notices)
    assert ns["history"].values == ([0], [1])
    there(world, "history.append('x')\nn = len(box['h'])")
    assert ns["n"] == 2
    assert ns["history"].values == ([0, "x"], [1, "x"])


def test_equally_changed_objects_remain_shared_if_others_are_changed_differently(world: DoubleWorld) -> None:
    here(world, "class Box: pass")
    there(world, "box = Box()")
    here(world, "history, mine = [], []")
    there(world, "box.history = history\nhistory.append([1])\nmine.extend(range(rid()))")
    here(world, "history[0].append(2)")
    there(world, "n = len(box.history[0])\nbox.history[0].append(3)")
    assert world.notebook.user_ns["n"] == 2
    assert world.notebook.user_ns["history"] == [[1, 2, 3]]


def test_each_object_that_one_replica_changes_is_everybodys(world: DoubleWorld) -> None:
    here(world, "box = {'a': [], 'b': [], 'c': []}\na, b, c = box.values()")
    there(world, "[a, b][rid()].append(rid())\nbox['c'].append(rid())")
    ns = world.notebook.user_ns
    assert (ns["a"], ns["b"]) == ([0], [1])
    assert isinstance(ns["c"], RemotePerReplica)
    assert len(world.notices) == 1
    assert "`c` was changed differently" in world.notices[0]
    assert "strategy.local_results(c)" in world.notices[0]
    there(world, "seen = (box['a'], box['b'], box['c'][0])\na.append(5)")
    assert ns["seen"].values == (([0, 5], [1], 0), ([0, 5], [1], 1))
    assert ns["box"]["a"] is ns["a"] == [0, 5]


def test_a_change_in_a_call_by_one_replica_is_everybodys(world: DoubleWorld) -> None:
    here(world, "log = []\ndef step(x):\n    if rid():\n        log.append(x)\n    return len(log)")
    ns = world.notebook.user_ns
    assert world.call(ns["step"], 1).values == (0, 1)
    assert ns["log"] == [1]
    assert world.call(ns["step"], 2).values == (1, 2)
    assert ns["log"] == [1, 2]


def test_a_tensor_that_one_replica_adds_to_a_list_makes_it_a_handle(world: DoubleWorld) -> None:
    here(world, "kept, n = [], []")
    there(world, "import torch\nif rid():\n    kept.append(torch.ones(1))\n    n.append(1)")
    ns = world.notebook.user_ns
    assert ns["n"] == [1]
    assert ns["kept"].values == ([], [torch.ones(1)])
    assert ["`kept` was changed differently" in notice for notice in world.notices] == [True]


def test_a_list_made_by_a_replica_can_be_changed_differently(world: DoubleWorld) -> None:
    there(world, "xs = [1]\nholder = {'xs': xs}\nkeep = [1]")
    ns = world.notebook.user_ns
    assert ns["holder"]["xs"] is ns["xs"]
    assert ns["xs"] == [1]
    there(world, "holder['xs'].append(rid())\nkeep.append(2)")
    assert ns["holder"]["xs"] is ns["xs"]
    assert isinstance(ns["xs"], RemotePerReplica)
    assert ns["xs"].values == ([1, 0], [1, 1])
    assert ns["keep"] == [1, 2]


def test_a_handle_follows_changes_of_its_object(world: DoubleWorld) -> None:
    there(world, "import torch\nt = torch.zeros(1)\nholder = {'t': t}")
    ns = world.notebook.user_ns
    t = ns["t"]
    assert isinstance(t, RemoteMirrored)
    assert ns["holder"]["t"] is t
    there(world, "holder['t'] += rid()")
    assert ns["t"] is t
    assert isinstance(t, RemotePerReplica)
    assert [float(each) for each in t.values] == [0.0, 1.0]


def test_an_alias_on_one_replica_only_is_kept(world: DoubleWorld) -> None:
    there(world, "a = [1]\nb = a if rid() else [1]")
    there(world, "b.append(2)")
    there(world, "n = len(a)")
    ns = world.notebook.user_ns
    assert (ns["a"], ns["b"], ns["n"]) == ([1], [1, 2], 1), "on all replicas as on the first"


def test_a_failure_on_one_replica_keeps_the_namespace_consistent(world: DoubleWorld) -> None:
    run_all(world, [distributed("a = 1\nb = [rid()]\nif rid():\n    1 / 0\nc = 3", raises=ZeroDivisionError)])
    ns = world.notebook.user_ns
    assert ns["a"] == 1
    assert ns["b"].values == ([0], [1])
    assert ns["c"].component(0) == 3
    assert "<unassigned>" in repr(ns["c"])


# -- handles -----------------------------------------------------------------------------------------------------------


def test_handles_refuse_operations_on_different_components(world: DoubleWorld) -> None:
    here(world, "import torch")
    there(world, "t = torch.arange(3.) + rid()\nsame = torch.ones(2, dtype=torch.float64)")
    ns = world.notebook.user_ns
    t, same = ns["t"], ns["same"]
    assert isinstance(same, Mirrored)
    for wrong in (
        lambda: bool(t),
        lambda: t + 1,
        lambda: 1 - t,
        lambda: same + t,
        lambda: torch.stack([same, t]),
        lambda: float(t),
        lambda: len(t),
        lambda: t < 1,
    ):
        with pytest.raises(DistributedValueError, match=r"local_results|reduce"):
            wrong()
    assert "(3,) float32 cpu" in repr(t)
    assert same._repr_html_().count(">float64</td>") == 1, "one row represents all replicas"
    assert t._repr_html_().count(">float32</td>") == 2
    assert same.numpy(force=True).tolist() == [1, 1]
    assert torch.tensor(same.numpy()).dtype == torch.float64
    assert t.numpy()[1].tolist() == [1, 2, 3]
    assert same.shape == torch.Size([2])
    assert float(same.sum()) == 2.0
    assert [float(x) for x in same] == [1.0, 1.0]
    assert t.sum().values == (torch.tensor(3.0), torch.tensor(6.0))


def test_an_operator_fetches_a_mirrored_object(world: DoubleWorld) -> None:
    here(world, "import torch")
    world.namespace.most_nbytes = 0  # all data stays
    there(world, "import distnb\na = torch.tensor([1., 2.])\nx = a.sum()\ntexts = ['a']\nv = distnb.Variable(2.0)")
    ns = world.notebook.user_ns
    a, x, texts, v = ns["a"], ns["x"], ns["texts"], ns["v"]
    for found, expected in (
        (a + 1, [2.0, 3.0]),
        (1 - a, [0.0, -1.0]),
        (a @ a, 5.0),
        (-a, [-1.0, -2.0]),
        (a // 2 + a % 2, [1.0, 1.0]),
        (sum([x, x]), 6.0),
        (torch.stack([x, x], dim=0), [3.0, 3.0]),
        (torch.nn.functional.relu(input=a), [1.0, 2.0]),
        (v * 2, 4.0),
    ):
        assert type(found) is torch.Tensor
        assert found.tolist() == expected
    assert f"{x:.2f}" == "3.00"
    assert bool(x > 2) is True
    assert max([x, x + 1]).item() == 4.0
    assert texts + ns["texts"] == ["a", "a"]
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(a)
    assert a.to_numpy().tolist() == [1.0, 2.0], "as Matplotlib asks"
    for wrong in (lambda: torch.tensor([x, x]), lambda: list(x), lambda: len(x)):
        with pytest.raises(TypeError, match=r"0-d tensor.*torch\.stack"):
            wrong()
    own = torch.zeros(2)
    assert own.copy_(a) is own
    assert own.tolist() == [1.0, 2.0]
    torch.add(a, 1, out=own)
    assert own.tolist() == [2.0, 3.0]


def test_no_operator_changes_an_object_of_the_replicas(world: DoubleWorld) -> None:
    here(world, "import torch, operator")
    world.namespace.most_nbytes = 0
    there(world, "a = torch.tensor([1., 2.])\nrows = [1]")
    ns = world.notebook.user_ns
    a, rows = ns["a"], ns["rows"]
    for wrong in (
        lambda: operator.iadd(a, 1),
        lambda: operator.iadd(rows, [2]),
        lambda: operator.imul(a[0], 2),
        lambda: torch.relu_(a),
        lambda: torch.neg(a, out=a),
        lambda: torch._foreach_add_([a], 1.0),
    ):
        with pytest.raises(DistributedValueError, match=r"would change a copy.*value\.add_\(1\)"):
            wrong()
    a.add_(1)
    a[0] = 7
    rows.append(2)
    assert (a.numpy().tolist(), rows.component(0)) == ([7.0, 3.0], [1, 2])


def test_no_gradient_crosses(world: DoubleWorld) -> None:
    here(world, "import torch\ny = torch.tensor([1, 0])")
    there(world, "model = torch.nn.Linear(2, 2)\nout = model(torch.eye(2))")
    ns = world.notebook.user_ns
    model, out = ns["model"], ns["out"]
    for value in (torch.nn.functional.cross_entropy(out, ns["y"]), out + 1, model.weight * 2, torch.sum(model.bias)):
        assert type(value) is torch.Tensor
        assert not value.requires_grad
    mine = torch.ones(2, requires_grad=True)
    with pytest.raises(DistributedValueError, match=r"no gradient crosses .* \.detach\(\)"):
        out * mine
    (out.detach() * mine).sum().backward()
    assert mine.grad is not None
    out.sum().backward()  # a call, which the replicas make
    assert model.bias.grad.numpy().tolist() == [2.0, 2.0]


def test_mirrored_handles_are_saved_as_their_objects(world: DoubleWorld) -> None:
    there(
        world,
        "import torch\nmodel = torch.nn.Linear(2, 1)\nmodel.load_state_dict({'weight': torch.ones(1, 2), 'bias': torch.zeros(1)})\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.5)\nown = [rid()]",
    )
    ns = world.notebook.user_ns
    model, optimizer = ns["model"], ns["optimizer"]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "bias": model.bias}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["model"]["weight"].tolist() == [[1.0, 1.0]]
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.5
    copied = torch.nn.Linear(2, 1)
    copied.load_state_dict(model.state_dict())
    assert copied.weight.tolist() == [[1.0, 1.0]]
    best = copy.deepcopy(model.state_dict())
    copied.load_state_dict({"weight": torch.zeros(1, 2), "bias": torch.ones(1)})
    model.load_state_dict(copied.state_dict())
    assert model.weight.numpy().tolist() == [[0.0, 0.0]]
    model.load_state_dict(best)
    assert model.weight.numpy().tolist() == [[1.0, 1.0]]
    assert pickle.loads(pickle.dumps(best))["bias"].tolist() == [0.0]
    with pytest.raises(DistributedValueError, match="local_results"):
        pickle.dumps(ns["own"])


def test_iterators_advance_together(world: DoubleWorld) -> None:
    there(
        world,
        "import torch\nmodel = torch.nn.Linear(2, 1)\nuneven = iter([1, 2][rid():])\nown = [rid()]\n"
        "numbers = (i * 10 for i in range(3))",
    )
    ns = world.notebook.user_ns
    assert sum(parameter.numel() for parameter in ns["model"].parameters()) == 3
    assert [name for name, _ in ns["model"].named_parameters()] == ["weight", "bias"]
    assert all(isinstance(parameter, Mirrored) for parameter in ns["model"].parameters())
    assert next(ns["numbers"]) == 0
    assert list(zip(ns["numbers"], "ab", strict=True)) == [(10, "a"), (20, "b")]
    with pytest.raises(DistributedValueError, match="iterated"):
        iter(ns["own"])
    with pytest.raises(TypeError, match="not an iterator"):
        next(ns["own"])
    assert next(ns["uneven"]).values == (1, 2)
    with pytest.raises(StructureError, match="ended on some"):
        next(ns["uneven"])


def test_comparisons_fetch_values_and_compare_identities(world: DoubleWorld) -> None:
    here(world, "import torch\nhere = [1, 2]")
    world.namespace.most_nbytes = 0  # all data stays
    there(
        world,
        "both = [1, 2]\nown = [rid()]\nt = torch.arange(3.)\nr = rid()\nclass Model: pass\nm, o = Model(), Model()",
    )
    ns = world.notebook.user_ns
    both, own, t, r = (ns[name] for name in ("both", "own", "t", "r"))
    assert (both == [1, 2]) is True
    assert ns["here"] == both
    assert (both != [1, 2]) is False
    assert (both == None) is False  # noqa: E711
    assert own == own
    for wrong in (lambda: own == [0], lambda: both == own, lambda: r == 0, lambda: r != PerReplica([0, 0])):
        with pytest.raises(DistributedValueError, match="local_results"):
            wrong()
    assert both < [2]
    assert ns["here"] <= both
    with pytest.raises(TypeError, match="not supported between"):
        _ = both < 3
    assert 2 in both
    assert both
    assert (t == 1).tolist() == [False, True, False]
    assert (t >= t).tolist() == [True] * 3
    assert ns["m"]
    assert ns["m"] in [ns["o"], ns["m"]]
    assert ns["m"] not in [ns["o"], None]
    assert {ns["m"]: 1}[ns["m"]] == 1


def test_containers_that_cannot_be_rebuilt_are_shown_unchanged(world: DoubleWorld) -> None:
    here(world, "from distnb.values import PerReplica")
    there(
        world,
        "class Fixed(dict):\n    def copy(self): raise TypeError('fixed')\n"
        "own = PerReplica.own(rid(), 5 + rid(), 2)\nbox, fixed, loop = [own], Fixed(a=own), [own]\nloop.append(loop)",
    )
    ns = world.notebook.user_ns
    assert ns["box"][0].values == (5, 6)
    assert ns["fixed"]["a"] is ns["box"][0]
    assert ns["loop"][1] is ns["loop"]
    there(world, "box.append(rid())\nloop.append(rid())")
    assert ns["box"].values == ([5, 0], [6, 1])
    loop = ns["loop"].component(1)
    assert loop[1] is loop
    assert "PerReplica" in repr(ns["loop"])


def test_handles_forward_attributes_and_calls(world: DoubleWorld) -> None:
    here(world, "import torch")
    there(
        world, "torch.manual_seed(0)\nmodel = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.5)"
    )
    ns = world.notebook.user_ns
    model, opt = ns["model"], ns["opt"]
    assert opt.param_groups[0]["lr"] == 0.5
    opt.param_groups[0]["lr"] = 0.25
    there(world, "lr = opt.param_groups[0]['lr']\nsame = opt.param_groups[0]['params'][0] is model.weight")
    assert ns["lr"] == 0.25
    assert ns["same"] is True
    assert list(model.state_dict().keys()) == ["weight", "bias"] or True
    assert model.weight.shape == torch.Size([1, 2])
    out = model(torch.ones(3, 2))
    assert out.shape == torch.Size([3, 1])
    model.extra = [1]
    there(world, "model.extra.append(2)")
    assert list(model.extra) == [1, 2]
    with pytest.raises(AttributeError, match="nothing_like_that"):
        model.nothing_like_that
    assert model.training is True
    model.eval()
    assert model.training is False


def test_handles_complete_without_a_program(world: DoubleWorld) -> None:
    here(world, "import torch")
    there(world, "model = torch.nn.Linear(2, 1)\nd = {'k': 1}")
    before = len(world.namespaces[0].teams)
    model = world.notebook.user_ns["model"]
    calls = world._programs
    assert {"state_dict", "weight", "bias", "forward", "component"} <= set(dir(model))
    assert "keys" in dir(world.notebook.user_ns["d"])
    assert calls == world._programs, "completion must not ask the engines"
    assert len(world.namespaces[0].teams) == before


def test_an_object_is_freed_with_its_last_handle(world: DoubleWorld) -> None:
    here(world, "import torch")
    there(world, "big = torch.zeros(1000)\nkeep = torch.zeros(2)")
    count = len(world.namespaces[0].teams)
    here(world, "del big")
    gc.collect()
    there(world, "pass")
    assert len(world.namespaces[0].teams) == count - 1
    assert "big" not in world.engines[0].user_ns
    there(world, "n = len(keep)")
    assert world.notebook.user_ns["n"] == 2


@pytest.mark.usefixtures("few_objects")
def test_data_is_freed_with_its_last_name(world: DoubleWorld) -> None:
    there(world, "class Big: pass\nbig = Big()\nbig.held = [Big()]\nalso = [Big(), big.held[0]]")
    assert _instances("Big") == 3 * 3, "in the notebook and on two engines"
    here(world, "del big\nalso.pop(0)")
    there(world, "n = len(also)\nalso[0].n = n")
    there(world, "pass")
    assert _instances("Big") == 3
    assert world.notebook.user_ns["also"][0].n == 1
    there(world, "also = None")
    there(world, "pass")
    assert _instances("Big") == 0


@pytest.mark.usefixtures("few_objects")
def test_many_cells_leak_no_objects(world: DoubleWorld) -> None:
    here(world, "import torch\nxs = []\ndef f(v):\n    return v + 1")
    sizes = []
    for _ in range(12):
        there(
            world, "t = torch.ones(3)\nxs.append(t)\ny = f(1)\nz = [t]\ndef g():\n    return 1\nclass C: pass\nc = C()"
        )
        here(world, "xs = []\ntmp = [[1], [2]]\nclass Own: pass\nmine = Own()")
        there(world, "tmp[0].append(3)\nmine.n = 1")
        gc.collect()
        sizes.append(len(world.namespaces[0].teams))
    assert sizes[-1] <= sizes[4] + 2, sizes


@pytest.mark.usefixtures("few_objects")
def test_objects_dropped_by_the_notebook_are_freed_everywhere(world: DoubleWorld) -> None:
    here(world, "class Big:\n    n = 0")
    for number in range(4):
        here(world, "big, other = Big(), Big()")
        there(world, "big.n = 1\nother.n = 2")
        assert _instances("Big") == 2 * 3
        here(world, "del big, other" if number % 2 else "big = other = None")
        there(world, "n = Big.n")
        assert _instances("Big") == 0


@pytest.fixture
def few_objects() -> None:
    """Keep the collector from visiting other tests' and torch's objects, which takes a second each time."""
    gc.collect()
    gc.freeze()


def _instances(name: str) -> int:
    """Return the number of instances of a class of that name, in the notebook and in this process's engines."""
    gc.collect()
    return sum(type(each).__name__ == name for each in gc.get_objects())


def test_unnamed_arguments_of_calls_do_not_accumulate(world: DoubleWorld) -> None:
    import weakref

    import numpy as np

    arrays = []
    for number in range(200):
        array = np.full(3, number)
        assert world.call(lambda a: int(a.sum()), array) == 3 * number
        arrays.append(weakref.ref(array))
        del array
    gc.collect()
    assert sum(ref() is not None for ref in arrays) < 70


def test_handles_are_stale_after_a_stop(world: DoubleWorld) -> None:
    there(world, "x = [rid()]")
    names = world.notebook.user_ns
    x, copied = names["x"], names["x"].copy()  # the result has no name until it is assigned
    world.namespace.close()
    with pytest.raises(StaleHandleError, match="`x`"):
        x.values
    assert repr(x) == "<stale: `x` (list) is gone, since the engines were restarted, stopped or left>"
    assert repr(copied).startswith("<stale: this handle (list) is gone")
    names["mine"] = copied
    with pytest.raises(StaleHandleError, match="`mine`"):
        copied.values
    for replica in range(2):
        world.add_engine(replica)
    run_all(world, [distributed("y = x", raises=StaleHandleError)])
    there(world, "x = 3")
    assert world.notebook.user_ns["x"] == 3


def test_a_replaced_engine_gets_mirrored_objects(world: DoubleWorld) -> None:
    here(world, "import torch\nhistory = []\nclass Box:\n    pass")
    there(
        world,
        "m = torch.nn.Linear(2, 2)\nfor p in m.parameters():\n    torch.nn.init.ones_(p)\nd = {'m': m, 'h': history}\nmine = [rid()]\nb = Box()\nb.m = m",
    )
    world.add_engine(1)
    world.namespace.engines_replaced([1], [0])
    there(
        world,
        "total = float(sum(p.sum() for p in m.parameters()))\nshared = d['m'] is m and b.m is m\nd['h'].append(total)\nkind = type(b) is Box",
    )
    ns = world.notebook.user_ns
    assert ns["total"] == 6.0
    assert ns["shared"] is True
    assert ns["kind"] is True
    assert ns["history"] == [], "a notebook object inside an engine's object is now a separate one"
    assert "<lost" in repr(ns["mine"])
    with pytest.raises(StaleHandleError, match=r"`mine`.*replica 1"):
        ns["mine"].values


@pytest.mark.parametrize("between", [True, False])
def test_a_lost_component_is_named_and_the_others_remain_readable(world: DoubleWorld, between: bool) -> None:
    there(world, "mine = [rid()]\nr = rid()\nif rid():\n    late = [5]\n    one = 7")
    ns = world.notebook.user_ns
    world.namespace.engine_died(1)
    if between:  # a cell on the remaining engines
        world.run(
            distributed("n = mine[0]"),
            Team(engines=(0,), devices=(Device("cpu"),), generation=2, store_host="", store_port=0, whole=(0, 1)),
        )
        assert (ns["n"], ns["mine"].values, ns["r"].values) == (0, ([0],), (0,))
    world.add_engine(1)
    world.namespace.engines_replaced([1], [0])
    assert repr(ns["mine"]) == "PerReplica:{\n  0: [0],\n  1: <lost: its engine has ended>\n}"
    assert ns["mine"].component(0) == [0]
    for ask in (
        lambda: ns["mine"].values,
        lambda: ns["mine"].component(1),
        lambda: ns["mine"].append(1),
        lambda: there(world, "len(mine)"),
    ):
        with pytest.raises(StaleHandleError, match=r"`mine`.*lost.*replica 1.*mine\.component\(0\)"):
            ask()
    assert ns["r"].values == (0, 1), "plain values are the notebook's own"
    assert ns["one"].component(1) == 7
    with pytest.raises(StaleHandleError, match=r"`late`.*is gone"):
        ns["late"].component(1)
    there(world, "again = [r]")
    assert ns["again"].values == ([0], [1])
    there(world, "mine = [r + 1]")
    assert ns["mine"].values == ([1], [2])


def test_a_model_can_be_used_by_teams_in_turn(world: DoubleWorld) -> None:
    text = "total = float(sum(p.sum() for p in model.parameters()))\nopt.step()"
    here(world, "import torch")
    there(
        world,
        "model = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=1)\ndef total_of():\n    return float(model.weight.sum())",
    )
    ns = world.notebook.user_ns
    handle = ns["model"]
    with world.namespace.localise(text + "\nw = total_of()") as names:
        assert sorted(names) == ["model", "opt"]
        assert isinstance(ns["model"], torch.nn.Linear)
        assert ns["opt"].param_groups[0]["params"][0] is ns["model"].weight
        here(world, text + "\nw = total_of()")
        with torch.no_grad():
            ns["model"].weight.add_(1)
    assert ns["model"] is handle
    assert isinstance(ns["w"], float)
    assert any("copy of replica 0" in notice for notice in world.notices)
    assert any("changed its copy of `model`" in notice or "`model`" in notice for notice in world.notices[1:])
    there(world, "w2 = total_of()")
    assert ns["w2"] == pytest.approx(ns["w"])


def test_two_teams_coexist() -> None:
    world = DoubleWorld(3)
    pair = Team(engines=(0, 1), devices=(Device("cpu"),) * 2, generation=1, store_host="", store_port=0)
    world.notebook.user_ns["xs"] = [0]
    world.run(distributed("xs.append(1)\na = [rid()]"), pair)
    world.run(distributed("xs.append(2)\nb = len(xs)"))
    world.run(distributed("xs.append(3)\nc = a[0]"), pair)
    ns = world.notebook.user_ns
    assert ns["xs"] == [0, 1, 2, 3]
    assert ns["b"] == 3
    assert ns["c"].values == (0, 1)
    with pytest.raises(CannotTravelError, match=r"`a`.*2 replica"):
        world.run(distributed("a[0]"))


def team_of(*engines: int, whole: tuple[int, ...] = ()) -> Team:
    devices = (Device("cpu"),) * len(engines)
    return Team(engines=engines, devices=devices, generation=1, store_host="", store_port=0, whole=whole)


def test_teams_that_meet_on_the_same_engines_stay_apart() -> None:
    world = DoubleWorld(3)
    names = world.notebook.user_ns
    small, large = team_of(0, 1), team_of(0, 1, whole=(0, 1, 2))
    here(world, "import torch")
    world.run(distributed("of_small = torch.nn.Linear(1, 1)\nof_small.weight.data.fill_(5.0)"), small)
    there(world, "of_large = torch.nn.Linear(1, 1)\nof_large.weight.data.fill_(7.0)")
    world.namespace.engine_died(2)
    for _ in range(2):
        world.run(distributed("found = of_small.weight.item()"), small)
        assert names["found"] == names["of_small"].weight.item() == 5.0
        world.run(distributed("found = of_large.weight.item()"), large)
        assert names["found"] == names["of_large"].weight.item() == 7.0
    with pytest.raises(CannotTravelError, match=r"on \[0, 1\] for a strategy that has lost engines"):
        world.run(distributed("of_small.weight"), large)
    world.add_engine(2)
    world.namespace.engines_replaced([2], [0, 1])
    there(world, "found = of_large.weight.item()")
    assert names["found"] == 7.0
    world.run(distributed("found = of_small.weight.item()"), small)
    assert names["found"] == 5.0


@pytest.mark.parametrize("operation", ["rename", "export", "import"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_an_engine_dies_while_objects_are_copied_to_new_ones(operation: str, victim: int) -> None:
    world = DoubleWorld(3)
    names, perform = world.notebook.user_ns, world.perform
    here(world, "import torch")
    there(world, "model = torch.nn.Linear(2, 1)\nmodel.weight.data.fill_(3.0)\nmine = [rid()]")
    dead: set[int] = set()
    fatal = [operation]

    def dying(engines: Sequence[int], what: str, *args: Any, **kwargs: Any) -> Any:
        if what in fatal:
            fatal.clear()
            dead.add(victim)
        if dead & set(engines):
            world.namespace.engine_died(victim)
            raise EngineDied(f"Engine {victim} ended.")
        return perform(engines, what, *args, **kwargs)

    world.namespace.operations._perform = dying
    for engine in (3, 4):
        world.add_engine(engine)
    change = [3, 4], [0, 1, 2], {(0, 1, 2): (0, 1, 2, 3, 4)}
    if victim == 3:
        with pytest.raises(EngineDied):
            world.namespace.engines_replaced(*change)
        world.namespace.engines_removed([3, 4], settled=False)
        there(world, "total = float(model.weight.sum())")
        assert (names["total"], names["mine"].values) == (6.0, ([0], [1], [2]))
        return
    world.namespace.engines_replaced(*change)
    living = [engine for engine in range(5) if engine != victim]
    world.run(distributed("total = float(model.weight.sum())"), team_of(*living, whole=(0, 1, 2, 3, 4)))
    assert names["total"] == 6.0
    assert names["mine"].num_replicas == 4
    dead.clear()
    world.add_engine(victim)
    world.namespace.engines_replaced([victim], living)
    world.run(distributed("total = float(model.weight.sum())"), team_of(0, 1, 2, 3, 4))
    assert names["total"] == 6.0
    for engine in {0, 1, 2} - {victim}:
        assert names["mine"].component(engine) == [engine]


# -- pickling errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "use", "kind", "cure"),
    [
        ("bad = (i for i in range(3))", "next(bad)", "generator", "list"),
        ("bad = (i for i in range(3))", "list(bad)", "generator", "list"),
        ("bad = open('/dev/null')", "bad.read()", "TextIOWrapper", "open it"),
        (
            "import threading\nbad = {'deep': [threading.Lock()]}",
            "bad['deep'][0].acquire()",
            "holds a _thread.lock",
            "inside",
        ),
        ("import socket\nbad = socket.socket()", "bad.fileno()", "socket", "connect"),
        ("import threading\nbad = threading.Thread()", "bad.start()", "Thread", "start it"),
        ("import sqlite3\nbad = sqlite3.connect(':memory:')", "bad.execute('')", "Connection", "inside"),
    ],
)
def test_an_object_that_cannot_be_pickled_is_refused_with_the_cure(
    world: DoubleWorld, setup: str, use: str, kind: str, cure: str
) -> None:
    here(world, setup)
    there(world, "if not bad is None:\n    n = 1")
    with pytest.raises(CannotTravelError, match=rf"(?s)`bad`.*{kind}.*{cure}"):
        world.run(distributed(use))
    assert "not here" not in repr(world.notebook.user_ns["bad"])
    here(world, "bad.close() if hasattr(bad, 'close') else None\ndel bad")
    there(world, "ok = 1")


def test_an_object_read_by_a_function_that_cannot_be_pickled_is_refused(world: DoubleWorld) -> None:
    world.notebook.user_ns["guard"] = threading.Lock()
    here(world, "def f():\n    with guard:\n        return 1")
    with pytest.raises(CannotTravelError, match="`guard`"):
        world.run(distributed("f()"))


def test_objects_that_exist_only_on_engines_are_handles(world: DoubleWorld) -> None:
    here(world, "items = []")
    there(world, "gen = (i for i in range(5))\nfirst = next(gen)\nitems.append(gen)")
    ns = world.notebook.user_ns
    assert isinstance(ns["gen"], RemoteMirrored)
    assert ns["items"] == [ns["gen"]]
    assert ns["items"][0] is ns["gen"]
    there(world, "second = next(items[0])")
    assert ns["second"] == 1


def test_large_objects_are_announced_and_sent_once(world: DoubleWorld) -> None:
    here(world, "import numpy as np\nbig = np.ones(10_000_000)")
    there(world, "s = float(big[0])")
    assert any("`big`" in notice or "big" in notice for notice in world.notices)
    sent = world.sent_nbytes
    there(world, "s = float(big[1])\nbox = {'b': big}")
    there(world, "s = float(box['b'][2])")
    assert world.sent_nbytes - sent < 100_000
    here(world, "alias = {'again': big}")
    there(world, "s = alias['again'] is big")
    assert world.notebook.user_ns["s"] is True
    assert world.sent_nbytes - sent < 150_000


def test_a_local_module_is_reloaded(world: DoubleWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Engines of this process share its modules, so only what is delivered can be looked at.
    file = tmp_path / "distnb_local_module.py"
    file.write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    here(world, "import distnb_local_module as local")

    def reloads() -> Mapping[str, Any]:
        snapshot = world.namespace.outgoing("local.value", world.team)
        return {} if snapshot.surroundings is None else snapshot.surroundings.modules

    assert "distnb_local_module" not in reloads()
    file.write_text("value = 2  # edited\n")
    importlib.invalidate_caches()
    importlib.reload(sys.modules["distnb_local_module"])
    known = dict(reloads())  # sent once
    assert known["distnb_local_module"] == (1, False, "")
    # %autoreload changes a module in place, so only its file's version shows it. None: a reload failed.
    version = [module_watch.FileVersion(7, patches=True)]
    module_watch.versions.append(lambda name: version[0] if name == "distnb_local_module" else None)
    try:
        for time, patches, expected in (
            (7, True, (1, False, "")),
            (8, True, (2, True, "value = 1\n")),
            (None, True, (2, True, "value = 1\n")),
            (8, True, (2, True, "value = 1\n")),
            (9, False, (3, True, "")),
        ):
            version[0] = module_watch.FileVersion(time, patches=patches)
            known |= reloads()
            assert known["distnb_local_module"] == expected
    finally:
        module_watch.versions.pop()
    # multiprocessing registers the main module of `python -m` as `__mp_main__`, too.
    sys.modules["distnb_second_name"] = sys.modules.pop("distnb_local_module")
    sys.modules["distnb_second_name"].__name__ = "distnb_first_name"
    assert "distnb_first_name" not in reloads()
    del sys.modules["distnb_second_name"]


def test_local_modules_are_found_among_those_loaded_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"distnb_local_{letter}" for letter in "abcd"]
    for name in names:
        tmp_path.joinpath(f"{name}.py").write_text("")

    def load(name: str) -> None:
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))

    def found() -> list[str]:
        return [module.__name__ for module in watch.local() if module.__name__ in names]

    load(names[0])
    monkeypatch.setattr(module_watch, "_libraries", (0, ""))
    module_watch.note_libraries()
    watch = module_watch.ModuleWatch()
    assert found() == []
    load(names[1])
    load(names[2])
    assert found() == names[1:3]
    del sys.modules[names[1]]
    assert found() == [names[0], names[2]]  # a module was removed, and all are looked at
    load(names[3])
    del sys.modules[names[2]]
    assert found() == [names[0], names[3]]


# -- calls ---------------------------------------------------------------------------------------------------------------


def test_calls_share_the_namespace(world: DoubleWorld) -> None:
    here(
        world,
        "import torch\nlog = []\nLR = 2\n"
        "def step(x):\n    log.append(x)\n    return {'n': len(log), 'y': torch.ones(2) * LR * x}",
    )
    ns = world.notebook.user_ns
    result = world.call(ns["step"], 3)
    assert result["n"] == 1
    assert isinstance(result["y"], RemotePerReplica)
    assert result["y"].values[0].tolist() == [6, 6]
    assert ns["log"] == [3]
    ns["log"].append(9)
    here(world, "LR = 10")
    result = world.call(ns["step"], 1)
    assert result["n"] == 3
    assert result["y"].values[1].tolist() == [10, 10]
    assert ns["log"] == [3, 9, 1]
    again = world.call(lambda y: float(y.sum()), result["y"])
    assert again == 20.0 or again.values == (20.0, 20.0)
    per_replica = PerReplica([1, 2])
    assert world.call(lambda v: v + 1, per_replica).values == (2, 3)
    xs = [1]
    world.call(lambda v: v.append(2), xs)
    assert xs == [1, 2]


def test_changes_of_a_failed_call_are_undone(world: DoubleWorld) -> None:
    here(world, "log = [0]\ndef bad():\n    log.append(1)\n    raise ValueError('no')")
    snapshot = world.namespace.outgoing_call((world.notebook.user_ns["bad"],), {}, world.team)
    for namespace in world.namespaces:
        (function,), _ = namespace.open_call(world._send(snapshot), 0)
        with pytest.raises(ValueError, match="no"):
            function()
    world.namespace.failed(snapshot)
    there(world, "n = len(log)")
    assert world.notebook.user_ns["n"] == 1


# -- cases from random sequences ---------------------------------------------------------------------------------------


def test_an_alias_of_a_differently_changed_object_is_kept(world: DoubleWorld) -> None:
    here(world, "a = [1]\nbox = {}")
    there(world, "b = a\na.append(rid())")
    ns = world.notebook.user_ns
    assert ns["b"] is ns["a"]
    assert ns["b"].values == ([1, 0], [1, 1])


def test_a_call_changes_a_list_next_to_a_handle(world: DoubleWorld) -> None:
    here(world, "def push(xs, h):\n    xs.append(len(h))\nxs = []")
    there(world, "h = [1, 2]")
    ns = world.notebook.user_ns
    world.call(ns["push"], ns["xs"], ns["h"])
    assert ns["xs"] == [2]


def test_changes_of_a_failing_call_reach_the_notebook(world: DoubleWorld) -> None:
    here(world, "xs = []\ndef push():\n    global made\n    xs.append(1)\n    made = 5\n    1 / 0")
    ns = world.notebook.user_ns
    with pytest.raises(ZeroDivisionError):
        world.call(ns["push"])
    assert ns["xs"] == [1]
    assert ns["made"] == 5
    there(world, "xs.append(made)\nn = len(xs)")
    assert ns["n"] == 2


def test_an_autograd_graph_is_not_sent(world: DoubleWorld) -> None:
    here(world, "import torch\nw = torch.ones(2, requires_grad=True)\nloss = (w * 2).sum()")
    with pytest.raises(CannotTravelError, match=r"`loss`.*detach\(\)"):
        there(world, "n = loss.item()")
    there(world, "other = (w * 3).sum()")
    copy = world.notebook.user_ns["other"].component(0)
    assert copy.item() == 6
    assert not copy.requires_grad


def test_cycles_are_released(world: DoubleWorld) -> None:
    here(
        world,
        "kept = []\nkept.append(kept)\ndef make(n):\n    for _ in range(n):\n        x = []\n        x.append({'x': x})\n        yield x",
    )
    there(world, "n = len(kept)")
    for _ in range(4):
        here(world, "xs = list(make(400))")
        there(world, "n = len(xs)")
    here(world, "xs = None")
    there(world, "n = len(kept)")
    there(world, "n = len(kept)")
    gc.collect()
    lists = sum(type(each) is list and len(each) == 1 and type(each[0]) is dict for each in gc.get_objects())
    assert lists < 2000
    there(world, "kept.append(kept[0] is kept)")
    assert world.notebook.user_ns["kept"][1] is True


def test_a_handle_in_a_class_remains_in_a_default_cell(world: DoubleWorld) -> None:
    here(world, "class Box:\n    kind = None")
    there(world, "h = [1]\nm = h.copy")
    here(world, "Box.kind = m")
    ns = world.notebook.user_ns
    handle = ns["Box"].kind
    with world.namespace.localise("n = Box.kind"):
        here(world, "n = Box.kind")
    assert ns["Box"].kind is vars(ns["Box"])["kind"] is handle


def test_class_attributes_may_be_changed_differently(world: DoubleWorld) -> None:
    here(world, "class Box:\n    kind = []\nfirst = Box.kind")
    there(world, "Box.kind.append(rid())")
    ns = world.notebook.user_ns
    assert isinstance(ns["first"], RemotePerReplica)
    assert ns["Box"].kind is vars(ns["Box"])["kind"] is ns["first"]


def test_a_lost_object_can_be_created_again_by_a_cell_that_uses_it(world: DoubleWorld) -> None:
    there(world, "import torch\nmade = torch.ones(1)\nother = torch.ones(1)")
    here(world, "def total():\n    return float(made)\ndef both():\n    return float(made + other)")
    for name in ("made", "other"):
        state_of_handle(world.notebook.user_ns[name]).gone = {0, 1}
    there(world, "made = torch.full((1,), 3.0)\nfound = total()")
    assert world.notebook.user_ns["found"] == 3
    with pytest.raises(StaleHandleError, match=r"`other`.*is gone"):
        there(world, "made = torch.zeros(1)\nfound = both()")
    state_of_handle(world.notebook.user_ns["made"]).gone = {0, 1}
    with pytest.raises(StaleHandleError, match=r"`made`.*is gone"):
        there(world, "found = made\nmade = torch.ones(1)")


def test_a_cell_that_may_read_any_name_omits_lost_objects(world: DoubleWorld) -> None:
    there(world, "import torch\na = torch.zeros(3) + rid()\ndef f():\n    return a")
    here(world, "box = [a]\nalias = box\nn = 5")
    state_of_handle(world.notebook.user_ns["a"]).gone = {1}
    there(world, "known = 'nothing' in globals()\nm = globals()['n']")
    assert (world.notebook.user_ns["known"], world.notebook.user_ns["m"]) == (False, 5)
    for source in ("a + 1", "box[0] + 1", "alias[0] + 1", "f() + 1"):
        with pytest.raises(StaleHandleError, match="`a`"):
            there(world, f"x = {source}")
