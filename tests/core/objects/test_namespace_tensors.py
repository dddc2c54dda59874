"""Tensors of every kind, and torch's changes of their storages: read by cells, assigned there, changed in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from distnb.errors import CannotTravelError
from distnb.notebook.handles.handle import HANDLES
from distnb.values import Mirrored
from tests.support.worlds import DoubleWorld, PlainWorld, compare, distributed, ordinary, run_all

KINDS = {
    "coo": "torch.eye(3).to_sparse()",
    "csr": "torch.eye(3).to_sparse_csr()",
    "csc": "torch.eye(3).to_sparse_csc()",
    "bsr": "torch.eye(4).to_sparse_bsr((2, 2))",
    "nested": "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])",
    "jagged": "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)",
    "quantized": "torch.quantize_per_tensor(1 * torch.ones(3), 0.1, 0, torch.qint8)",
    "meta": "torch.ones(3, device='meta')",
    "complex": "torch.tensor([1 + 2j])",
    "conjugate": "torch.tensor([1 + 2j]).conj()",
    "negative bit": "torch.tensor([1 + 2j]).conj().imag",
    "float8": "torch.ones(3).to(torch.float8_e4m3fn)",
    "subclass": "torch.ones(3).as_subclass(type('Own', (torch.Tensor,), {}))",
    "sparse parameter": "torch.nn.Parameter(torch.eye(3).to_sparse())",
    "mkldnn": "torch.ones(3).to_mkldnn()",
    "expanded": "torch.ones(1).expand(3)",
}
THERE_ONLY = {
    "fake": "FakeTensorMode().from_tensor(torch.ones(()))",
    "without memory": "torch._efficientzerotensor(3)",
    "emptied": "torch.ones(3); t.untyped_storage().resize_(0)",
}
SHOWN = "__import__('re').sub(r'j[0-9]+', 'j', str(t))"
"""A tensor's text, without the number that torch gives to a length that varies."""

CHANGEABLE = ("coo", "csr", "csc", "bsr", "nested", "jagged", "complex", "conjugate", "negative bit")


@pytest.fixture(scope="module")
def world() -> Iterator[DoubleWorld]:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's: prototypes, deprecations
        made = DoubleWorld(2)
        run_all(made, [ordinary("import torch")])
        yield made


@pytest.mark.parametrize("kind", [*KINDS, *THERE_ONLY])
def test_an_assigned_tensor_of_any_kind_is_a_handle_and_affects_no_other_name(world: DoubleWorld, kind: str) -> None:
    text = {**KINDS, **THERE_ONLY}[kind]
    run_all(world, [distributed(f"from torch._subclasses import FakeTensorMode\nt = {text}\nn = 7")])
    ns = world.notebook.user_ns
    assert ns["n"] == 7
    assert isinstance(ns["t"], HANDLES)
    assert repr(ns["t"])
    assert isinstance(ns["t"], Mirrored) == (kind != "fake")  # because it cannot be described
    run_all(world, [distributed("m = type(t).__name__, n + 1")])
    assert ns["m"][1] == 8


@pytest.mark.parametrize("kind", ["coo", "nested", "quantized", "meta", "conjugate"])
def test_a_call_may_return_a_tensor_of_any_kind(world: DoubleWorld, kind: str) -> None:
    run_all(world, [ordinary(f"def make():\n    return {KINDS[kind]}, 5")])
    tensor, number = world.call(world.notebook.user_ns["make"])
    assert isinstance(tensor, HANDLES)
    assert number == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_can_be_read(world: DoubleWorld, kind: str) -> None:
    check = f"seen = type(t).__name__, str(t.layout), str(t.dtype), t.requires_grad, {SHOWN}"
    run_all(world, [ordinary(f"t = {KINDS[kind]}\n{check}\nhere = seen"), distributed(check)])
    assert world.notebook.user_ns["seen"] == world.notebook.user_ns["here"]
    before = world.sent_nbytes
    run_all(world, [distributed("t; n = 1")])  # the engines know it, so it is not sent again
    assert world.sent_nbytes - before < 4000


@pytest.mark.parametrize("kind", CHANGEABLE)
def test_a_change_in_place_reaches_the_notebook(world: DoubleWorld, kind: str) -> None:
    before = ordinary(f"t = {KINDS[kind]}\nkept = [t]")
    after = ordinary(f"same = kept[0] is t\nshown = {SHOWN}\nt = {KINDS[kind]} * 2\nalone = {SHOWN}")
    run_all(world, [before, distributed("t.mul_(2)\nn = 1"), after])
    ns = world.notebook.user_ns
    assert (ns["same"], ns["n"]) == (True, 1)
    assert ns["shown"] == ns["alone"]


def test_a_conjugate_shares_its_memory(world: DoubleWorld) -> None:
    cells = [
        ordinary("z = torch.tensor([1 + 2j])\nc = z.conj()"),
        distributed("z.mul_(2)\nc"),
        ordinary("n = c.item()"),
    ]
    run_all(world, cells)
    assert world.notebook.user_ns["n"] == 2 - 4j


@pytest.mark.parametrize(
    "text",
    [
        "(torch.eye(3) * rid()).to_sparse()",
        "torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * rid()])",
        "torch.quantize_per_tensor(torch.ones(3) * rid(), 0.1, 0, torch.qint8)",
        "(torch.tensor([1 + 2j]) * rid()).conj()",
    ],
)
def test_tensors_that_differ_are_not_mirrored(world: DoubleWorld, text: str) -> None:
    run_all(world, [distributed(f"t = {text}")])
    assert not isinstance(world.notebook.user_ns["t"], Mirrored)


# -- storages that are resized -------------------------------------------------------------------------------------------

RESIZED = {
    "resized": "w.resize_(len(w) + 3).fill_(1)",
    "less": "w.resize_(1)",
    "another shape": "w.resize_(2, len(w) // 2)",
    "its storage": "s = w.untyped_storage()\nn = s.nbytes()\ns.resize_(2 * n)\nw.set_(s, 0, (2 * len(w),))\nw.fill_(2)",
    "emptied and filled": "s = w.untyped_storage()\nn = s.nbytes()\ns.resize_(0)\ns.resize_(n)\nw.fill_(3)",
    "set": "w.set_(torch.tensor([5.0, 6.0, 7.0]))",
    "data": "w.data = torch.tensor([1, 2, 3])",
    "out": "torch.arange(5.0, out=w.resize_(0))",
}


@pytest.mark.parametrize(
    ("how", "size"), [*((how, 2) for how in RESIZED), ("resized", 1 << 19), ("emptied and filled", 1 << 19)]
)
def test_a_tensor_from_the_notebook_can_be_resized(world: DoubleWorld, how: str, size: int) -> None:
    plain = PlainWorld()
    cells = [
        ordinary(f"import torch\nw = torch.zeros({size})\nbag = {{'w': w, 'half': w[:1]}}"),
        distributed(f"bag\n{RESIZED[how]}\ndel s, n" if "s = " in RESIZED[how] else f"bag\n{RESIZED[how]}"),
        ordinary(
            "w += 1\nbag['half'] += 1\nsame = bag['w'] is w\nbefore = w.reshape(-1)[:9].tolist(), bag['half'].tolist()"
        ),
        distributed(
            "w.resize_(len(w) + 1)[-1] = 9\nafter = w.reshape(-1)[-9:].tolist(), bag['half'].tolist(), bag['w'] is w"
        ),
        ordinary("last = w.reshape(-1)[-9:].tolist()\nw.resize_(1)"),
        distributed("length = len(w)"),
    ]
    for each in (plain, world):
        run_all(each, cells)
    names, found = plain.names(), world.names()
    compare({name: names[name] for name in names}, {name: found[name] for name in names})


def test_an_emptied_storage_stays_empty_until_it_is_filled(world: DoubleWorld) -> None:
    """Empty a storage as sharded parameters do between two uses."""
    empty = "w.untyped_storage().resize_(0)"
    check = "nbytes, shape = w.untyped_storage().nbytes(), tuple(w.shape)"
    cells = [
        ordinary("w = torch.ones(300, 2)"),
        distributed(f"{empty}\nn = 1"),
        ordinary(check),
        distributed("w; m = 2"),
    ]
    run_all(world, cells)
    ns = world.notebook.user_ns
    assert (ns["nbytes"], ns["shape"], ns["n"], ns["m"]) == (0, (300, 2), 1, 2)
    run_all(world, [distributed("w.untyped_storage().resize_(2400)\nw.fill_(4)"), ordinary("total = w.sum().item()")])
    assert ns["total"] == 2400
    run_all(world, [ordinary(empty), distributed(check), ordinary("w.untyped_storage().resize_(2400)\nw.fill_(1)")])
    assert ns["nbytes"] == 0
    run_all(world, [distributed("total = w.sum().item()")])
    assert ns["total"] == 600


def test_reading_leaves_a_storage_resizable(world: DoubleWorld) -> None:
    cells = [ordinary("w = torch.ones(2)\nbig = torch.ones(1 << 19)"), distributed("w, big, None\nw += 1")]
    run_all(world, [*cells, ordinary("w.resize_(3)\nbig.resize_(1 << 20)")])


def test_a_storage_is_read_with_the_tensors_on_it(world: DoubleWorld) -> None:
    cells = [
        ordinary("w = torch.zeros(4)\ns = w.untyped_storage()\nboth = [w, s]"),
        distributed("t, u = both\nt[0] = 1\nread = u[3], t.untyped_storage().data_ptr() == u.data_ptr()"),
        ordinary("read_here = s[3], w.tolist()"),
    ]
    run_all(world, cells)
    ns = world.notebook.user_ns
    assert ns["read"] == (63, True)
    assert ns["read_here"] == (63, [1, 0, 0, 0])


def test_a_partly_resized_tensor_is_not_read(world: DoubleWorld) -> None:
    """Let torch change the shape before it fails: the memory beyond the storage belongs to others."""
    made = "w = torch.from_numpy(__import__('numpy').zeros(2, 'float32'))"
    text = f"{made}\ntry:\n    w.resize_(1 << 20)\nexcept RuntimeError:\n    n = 1"
    run_all(world, [distributed(text)])
    ns = world.notebook.user_ns
    assert (ns["n"], isinstance(ns["w"], HANDLES)) == (1, True)
    run_all(world, [ordinary(text)])
    with pytest.raises(CannotTravelError, match=r"`w`.*its storage has 8 bytes, but its shape needs 4194304"):
        run_all(world, [distributed("w.sum()")])


TOGETHER = """
many = {f"v{i}": torch.full((i % 3 + 1,), float(i)) for i in range(6)} | {
    "scalar": torch.tensor(7), "square": torch.ones(2, 2), "half": torch.ones(3, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False]), "none": torch.ones(0), "large": torch.ones(70_000), "strided": torch.ones(4)[::2],
}
many["alias"] = many["v2"].view(3, 1)
many["row"] = many["square"][0]
many["same"] = many["v1"]
"""
"""A value with tensors that are sent in one buffer, and others that share memory or are of another kind."""


def test_small_tensors_are_sent_with_their_shapes_dtypes_and_shared_memory(world: DoubleWorld) -> None:
    """Change tensors of a dict on either side, and compare with one process."""
    read = "{name: (t.tolist() if t.numel() < 9 else t.sum().item(), str(t.dtype)) for name, t in many.items()}"
    cells = [
        ordinary(f"import torch\n{TOGETHER}"),
        distributed(f"there = {read}\nmany['v2'] += 1\nmany['row'] += 1\nmany['v1'] += 1\nmany['large'][-1] = 0"),
        ordinary(f"here = {read}\nsame = many['same'] is many['v1']\nmany['v3'] += 5\nmany['square'].zero_()"),
        distributed(f"then = {read}\nsizes = [many[k].untyped_storage().nbytes() for k in ('v0', 'v1', 'square')]"),
    ]
    plain = PlainWorld()
    for each in (plain, world):
        run_all(each, cells)
    names, found = plain.names(), world.names()
    compare({name: names[name] for name in names}, {name: found[name] for name in names})


@pytest.mark.parametrize(
    "view", ["many['v5'][1:]", "many['v5'].numpy()", "many['v5'].view(3, 1)", "many['v5'].detach()"]
)
def test_a_view_that_is_read_later_shares_the_memory_of_a_small_tensor(world: DoubleWorld, view: str) -> None:
    plain = PlainWorld()
    cells = [
        ordinary(f"import torch\n{TOGETHER}"),
        distributed("many; n = 1"),
        ordinary(f"view = {view}\nview += 1"),
        distributed("view[-1] = 9\nthere = many['v5'].tolist()"),
        ordinary("here = many['v5'].tolist()\nmany['v5'][-1] = 4\nother = many['v5'].view(-1)"),
        distributed("other[-1] += 1\nlast = float(view[-1]), many['v5'].tolist()"),
        ordinary("here = float(view[-1]), many['v5'].tolist(), other.tolist()"),
    ]
    for each in (plain, world):
        run_all(each, cells)
    names, found = plain.names(), world.names()
    compare({name: names[name] for name in names}, {name: found[name] for name in names})


def test_values_that_differ_in_a_kind_of_tensor_are_sent_again(world: DoubleWorld) -> None:
    """Exchange two tensors of which only one is plain, which leaves the digest of each alone as it was."""
    cells = [
        ordinary("pair = [torch.ones(2), torch.ones(4)[::2]]"),
        distributed("before = [t.stride() for t in pair]"),
        ordinary("pair.reverse()"),
        distributed("after = [t.stride() for t in pair]"),
    ]
    run_all(world, cells)
    ns = world.notebook.user_ns
    assert (ns["before"], ns["after"]) == ([(1,), (2,)], [(2,), (1,)])
