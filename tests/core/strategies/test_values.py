"""Distributed values and structure rules, without processes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from distnb.errors import DistributedValueError, StructureError
from distnb.values import DistributedValues, Mirrored, PerReplica
from distnb.values.structure import (
    flatten,
    has_distributed,
    map_structure,
    paths,
    regroup,
    select,
    structure_of,
    unflatten,
)

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Box:
    x: Any
    y: Any = 1


def test_values_load_no_torch() -> None:
    code = (
        "import sys, distnb.values.structure, distnb.strategies.context, distnb; distnb.MirroredStrategy();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_repr_matches_tf_distribute() -> None:
    assert repr(PerReplica([1, torch.tensor(2)])) == "PerReplica:{\n  0: 1,\n  1: tensor(2)\n}"
    assert repr(Mirrored(["a", "a"])) == "Mirrored:{\n  0: 'a',\n  1: 'a'\n}"
    assert repr(PerReplica({1: 5}, 2)) == "PerReplica:{1: 5, …}"


def test_all_components_can_be_read_as_arrays_and_numbers() -> None:
    value = PerReplica([torch.tensor(1.5, requires_grad=True), 2.5])
    assert value.item() == (1.5, 2.5)
    first, second = value.numpy()
    assert (first.dtype, first.shape, float(first), float(second)) == ("float32", (), 1.5, 2.5)
    assert PerReplica({1: torch.tensor([7])}, 2).item() == (7,)


def test_components_can_be_read() -> None:
    value = PerReplica({1: "b"}, 3, global_batch_size=7)
    assert (value.values, value.replica_ids, value.num_replicas, value.global_batch_size) == (("b",), (1,), 3, 7)
    with pytest.raises(DistributedValueError, match="on another replica"):
        value.component(0)
    with pytest.raises(DistributedValueError, match="numbered from 0"):
        value.component(3)
    for wrong in ([], {}, {3: 1}):
        with pytest.raises(StructureError, match="one component for each"):
            PerReplica(wrong, 3)
    with pytest.raises(StructureError):
        PerReplica([1, 2], 3)


@pytest.mark.parametrize(
    "use",
    [
        bool, len, iter, float, int, abs, list, torch.tensor, torch.as_tensor, torch.relu, np.asarray,
        lambda v: v + 1, lambda v: 1 + v, lambda v: v < 1, lambda v: v[0], lambda v: 1 in v, lambda v: -v,
        lambda v: v == [1], lambda v: v != 1,
        lambda v: torch.ones(2) + v, lambda v: torch.stack([v]), lambda v: v @ v,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_a_distributed_value_is_not_a_plain_value(use: Any, kind: type[DistributedValues]) -> None:
    with pytest.raises(DistributedValueError) as raised:
        use(kind([torch.ones(2), torch.ones(2)]))
    assert isinstance(raised.value, TypeError)
    assert "strategy." in str(raised.value)


def test_missing_attributes_name_the_cure() -> None:
    value = PerReplica([1, 2])
    with pytest.raises(AttributeError, match="local_results"):
        value.mean()
    assert not callable(value)
    assert value == value
    assert {value: 1}[value] == 1


def test_values_can_be_pickled_and_copied() -> None:
    value = PerReplica([1, 2], global_batch_size=3)
    for other in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert other.values == (1, 2)
        assert other.global_batch_size == 3


TREE: Any = {"b": [1, (2, Pair(3, None))], "a": Box({"c": 4}), "d": collections.OrderedDict(z=5, y=6)}


def test_structures_can_be_flattened_and_rebuilt() -> None:
    leaves, shape = flatten(TREE)
    assert leaves == [4, 1, 1, 2, 3, None, 6, 5]
    assert unflatten(shape, leaves) == TREE
    doubled = unflatten(shape, [leaf and leaf * 2 for leaf in leaves])
    assert doubled["b"] == [2, (4, Pair(6, None))]
    assert doubled["a"] == Box({"c": 8}, 2)
    assert list(doubled["d"].items()) == [("z", 10), ("y", 12)]
    assert list(doubled) == ["b", "a", "d"]
    assert paths(TREE)[0] == "['a'].x['c']"


def test_special_containers_keep_their_types() -> None:
    default = collections.defaultdict(list, x=1)
    assert map_structure(lambda v: v + 1, default)["missing"] == []
    size = torch.Size([1, 2])
    assert flatten(size)[0] == [size]
    found = map_structure(lambda t: t + 1, torch.max(torch.ones(2, 2), dim=0))
    assert type(found).__name__ == "max"
    assert found.values.tolist() == [2.0, 2.0]


def test_a_container_that_holds_itself_is_an_error_with_the_cure() -> None:
    endless: list[Any] = [1]
    endless.append({"again": endless})
    with pytest.raises(StructureError, match=r"A list contains itself.*a class of your own"):
        flatten(endless)


def test_structures_compare_without_order() -> None:
    assert structure_of({"a": 1, "b": [2]}) == structure_of({"b": [3], "a": None})
    assert structure_of([1, 2]) != structure_of((1, 2))
    assert (
        structure_of(TREE)
        == "{'a': Box(x={'c': *}, y=*), 'b': [*, (*, Pair(a=*, b=*))], 'd': OrderedDict({'y': *, 'z': *})}"
    )


def test_components_can_be_selected() -> None:
    value = PerReplica([10, 20])
    plain = {"x": [1]}
    tree = (value, plain, Box(value))
    picked = select(tree, 1, 2)
    assert picked == (20, plain, Box(20))
    assert picked[1] is plain
    assert has_distributed(tree)
    assert not has_distributed(plain)
    with pytest.raises(StructureError, match="2 replica"):
        select(tree, 0, 3)


def test_components_can_be_regrouped() -> None:
    grouped = regroup([{"a": 1, "b": None, "c": "x"}, {"c": "y", "b": None, "a": 1}])
    assert grouped["a"] == 1
    assert grouped["b"] is None
    assert grouped["c"].values == ("x", "y")
    assert regroup([True, 1]).values == (True, 1)
    assert regroup([float("nan")] * 2) != regroup([float("nan")] * 2)  # one nan each, not a PerReplica
    assert isinstance(regroup([None, 1]), PerReplica)
    assert regroup([torch.float32, torch.float32]) is torch.float32
    assert regroup([[1]]) == [1]
    with pytest.raises(StructureError) as raised:
        regroup([(1, 2), [1, 2]])
    assert "(*, *)" in str(raised.value)
    assert "[*, *]" in str(raised.value)


def test_formatting_like_a_number_is_refused_with_the_cure() -> None:
    value = PerReplica([1.5, 2.5])
    assert f"{value}" == repr(value)
    with pytest.raises(DistributedValueError, match=r"A PerReplica cannot be formatted as '\.3f'.*strategy\.reduce"):
        f"{value:.3f}"
