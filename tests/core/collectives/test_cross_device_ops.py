"""Algorithms as objects: their arguments, equality, pickling, and calls."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import distnb
from distnb import HierarchicalCopyAllReduce, NcclAllReduce, ReduceOp, ReductionToOneDevice, errors
from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.hierarchical_copy import tree
from distnb.topology import Device

CPUS = ["cpu:0", "cpu:1"]


class Own(distnb.CrossDeviceOps):
    returns: Any = None

    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Any) -> Any:
        return tensor if self.returns is None else self.returns


@dataclass
class Unhashable(Own):
    factor: float = 1.0


@dataclass(frozen=True)
class Frozen(Own):
    factor: float = 1.0


# -- trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 20))
def test_a_tree_connects_every_replica_to_the_root_once(size: int) -> None:
    levels = tree(size)
    assert len(levels) == (size - 1).bit_length()
    held = {rank: {rank} for rank in range(size)}
    for level in levels:
        assert len({rank for edge in level for rank in edge}) == 2 * len(level)  # one message for each
        for child, parent in level:
            held[parent] |= held.pop(child)
    assert held == {0: set(range(size))}


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [NcclAllReduce, HierarchicalCopyAllReduce])
@pytest.mark.parametrize("num_packs", [-1, 1.5, True, "2"])
def test_invalid_numbers_of_packs_are_refused(cls: Any, num_packs: Any) -> None:
    with pytest.raises(ValueError, match="whole number, 0 or more"):
        cls(num_packs=num_packs)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cross_device_ops": HierarchicalCopyAllReduce}, "give an instance of distnb.NcclAllReduce"),
        ({"cross_device_ops": Unhashable()}, "cannot be hashed"),
        ({"cross_device_ops": NcclAllReduce()}, "needs a GPU of its own for each replica, and .* cpu:0"),
        ({"cross_device_ops": NcclAllReduce(), "devices": ["cuda:0", "cpu:0"]}, "have cuda:0, cpu:0"),
        ({"cross_device_ops": NcclAllReduce(), "devices": ["cuda:0"] * 2, "oversubscribe": True}, "GPU of its own"),
        ({"cross_device_ops": ReductionToOneDevice("gpu:3"), "devices": CPUS}, "'cuda:3' is the device of no replica"),
        ({"cross_device_ops": ReductionToOneDevice("cpu:7"), "devices": CPUS}, "'cpu:7' is the device of no replica"),
    ],
)
def test_a_strategy_refuses_invalid_algorithms(
    arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distnb.strategies.mirrored.available_gpus", lambda: 0)
    with pytest.raises(errors.OptionError, match=text):
        distnb.MirroredStrategy(**{"devices": None, **arguments})
    with pytest.raises(errors.OptionError, match="not a device"):
        ReductionToOneDevice("nonsense:x")
    with pytest.raises(errors.OptionError, match="function of a list of tensors"):
        ReductionToOneDevice(accumulation_fn=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        distnb.CrossDeviceOps()  # type: ignore[abstract]


def test_nccl_is_used_if_each_replica_has_a_gpu() -> None:
    strategy = distnb.MirroredStrategy(["cuda:0", "cuda:1"], cross_device_ops=NcclAllReduce(2))
    assert (
        repr(strategy) == "MirroredStrategy(devices=['cuda:0', 'cuda:1'], cross_device_ops=NcclAllReduce(num_packs=2))"
    )


# -- equality of strategies --------------------------------------------------------------------------------------------


def test_equal_algorithms_make_the_same_strategy() -> None:
    def made(ops: distnb.CrossDeviceOps | None = None) -> distnb.Strategy:
        return distnb.MirroredStrategy(CPUS, cross_device_ops=ops)

    assert made(HierarchicalCopyAllReduce()) is made(HierarchicalCopyAllReduce(num_packs=1)) is not made()
    assert made(HierarchicalCopyAllReduce(2)) is not made(HierarchicalCopyAllReduce(3))
    assert made(ReductionToOneDevice("CPU:1", sum)) is made(ReductionToOneDevice("/cpu:1", sum))  # type: ignore[arg-type]
    assert made(ReductionToOneDevice("cpu:1")) is not made(ReductionToOneDevice("cpu:0"))
    assert NcclAllReduce() != HierarchicalCopyAllReduce()
    one, other = Own(), Own()
    assert made(one) is made(one) is not made(other)
    assert made(Frozen(2.0)) is made(Frozen(2.0)) is not made(Frozen(3.0))


def test_an_unpickled_algorithm_is_the_same_object() -> None:
    for ops in (
        Own(),
        Frozen(5.0),
        HierarchicalCopyAllReduce(4),
        ReductionToOneDevice(None, lambda tensors: tensors[0]),
    ):
        assert pickle.loads(pickle.dumps(ops)) is ops
        assert copy.deepcopy(ops) is ops
    # As in another process, whose classes have no instances yet.
    names: dict[str, Any] = {"distnb": distnb, "__name__": "__main__"}
    exec(
        "class Cell(distnb.CrossDeviceOps):\n    def reduce_implementation(self, op, tensor, replicas): return 7", names
    )
    ops = names["Cell"]()
    ops.note = "kept"
    sent = pickle.dumps([ops, ops])
    del ops, names
    gc.collect()
    first, second = pickle.loads(sent)
    again = pickle.loads(sent)[0]
    assert first is second is again
    assert (first.note, first.reduce_implementation(None, None, None)) == ("kept", 7)
    unsendable = Own()
    unsendable.lock = (each for each in ())  # type: ignore[attr-defined]
    with pytest.raises(errors.OptionError, match="cannot be sent to the replicas"):
        pickle.dumps(unsendable)


# -- calls -------------------------------------------------------------------------------------------------------------


class Group:
    rank, size, devices = 0, 2, (Device("cpu", 0), Device("cpu", 1))

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        self.calls.append((tuple(tensor.shape), op))
        return tensor.mul_(2)

    def note(self, operation: str, tensors: Any) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, tensor]


@pytest.mark.parametrize(
    "returned",
    [
        3,
        torch.ones(2),
        torch.ones(3, dtype=torch.int32),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        [torch.ones(3)],
    ],
    ids=["number", "shape", "dtype", "sparse", "meta", "list"],
)
def test_a_result_of_the_wrong_kind_is_an_error(returned: Any) -> None:
    ops = Own()
    ops.returns = returned
    with pytest.raises(
        errors.OptionError,
        match=r"Own\.reduce_implementation was given torch\.float32.*must return a tensor of the same",
    ):
        Aggregation(Group(), ops).all_reduce(torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sum_up", "message"),
    [
        (lambda tensors: tensors[0].double(), r"torch\.float64"),
        (lambda tensors: tensors[0].to_sparse(), r"torch\.float32\[3\] sparse_coo"),
        (lambda tensors: tensors[0].numpy(), "array"),
    ],
    ids=["dtype", "sparse", "array"],
)
def test_the_result_of_an_accumulation_function_is_checked(sum_up: Any, message: str) -> None:
    ops = ReductionToOneDevice(accumulation_fn=sum_up)

    class Replicas:
        devices, size = CPUS, 2

        def gather(self, tensor: torch.Tensor, to: int) -> list[torch.Tensor]:
            return [tensor, tensor]

    with pytest.raises(errors.OptionError, match=rf"given 2 tensors, torch\.float32.* returned {message}"):
        ops.reduce_implementation(ReduceOp.SUM, torch.ones(3), Replicas())  # type: ignore[arg-type]


def test_ncclallreduce_uses_the_groups_own_reduction_unless_it_is_overridden() -> None:
    group: Any = Group()
    plain = Aggregation(group, NcclAllReduce())
    tensor = torch.ones(3)
    plain.all_reduce(tensor, ReduceOp.MEAN)
    assert (tensor.tolist(), group.calls, plain.is_groups_own) == ([2.0] * 3, [((3,), ReduceOp.MEAN)], True)

    class Replaced(NcclAllReduce):
        def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Any) -> torch.Tensor:
            return super().reduce_implementation(op, tensor.repeat(2), replicas)[:3] + 1

    replaced = Aggregation(group, Replaced())
    replaced.all_reduce(tensor)
    assert (tensor.tolist(), group.calls[1:], replaced.is_groups_own) == ([5.0] * 3, [((6,), ReduceOp.SUM)], False)
