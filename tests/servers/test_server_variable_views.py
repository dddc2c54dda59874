"""Parts of variables on servers: they are read as any tensor, and changes in place raise one error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import distnb
from distnb.errors import ContextError
from distnb.partitioners import FixedShardsPartitioner
from tests.servers.test_server_variables import InHouse, Worker, packer_of, servers

__all__ = ["servers"]

VALUE = torch.arange(1.0, 25.0).reshape(6, 4)
ONES = torch.ones(4)


def augmented(v: Any) -> None:
    v[0] += 1


def augmented_rows(v: Any) -> None:
    v[[4, 5]] += 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "augmented": augmented,
    "augmented rows": augmented_rows,
    "row": lambda v: v[0].add_(1),
    "element of a row": lambda v: v[1][2].sub_(5),
    "steps": lambda v: v[::2, 1:].zero_(),
    "backwards": lambda v: v[::-1].add_(1),
    "set": lambda v: v.__setitem__(2, 7.0),
    "set mask": lambda v: v.__setitem__(v.sum(1) > 30, 0.0),
    "set within a part": lambda v: v[3].__setitem__(slice(0, 2), 0.5),
    "flat": lambda v: v.view(-1)[3:6].fill_(2),
    "detached": lambda v: v.detach()[2].add_(1),
    "data": lambda v: v.data.mul_(2),
    "data of a row": lambda v: v[4].data.mul_(2),
    "data of a row, set": lambda v: setattr(v[4], "data", ONES),
    "one of several": lambda v: v.split(2)[1].add_(1),
    "of rows": lambda v: [row.add_(1) for row in v],
    "whole": lambda v: v.add_(torch.arange(4.0)),
    "operator": lambda v: v.__imul__(2),
    "out": lambda v: torch.add(ONES, 1, out=v[0]),
    "out, one of several": lambda v: torch.sort(ONES, out=(v[1], torch.zeros(4, dtype=torch.int64))),
    "foreach": lambda v: torch._foreach_add_([ONES, v[0]], 1.0),
    "shape": lambda v: v[0].unsqueeze_(0),
}


@pytest.mark.parametrize("shards", [1, 4])
def test_a_change_in_place_is_an_error_with_the_cure(servers: InHouse, shards: int) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        v = distnb.Variable(VALUE, name="v")
    for name, change in CHANGES.items():
        with torch.no_grad(), pytest.raises(ContextError, match=r"lives on parameter servers.*assign_add.*scatter_add"):
            change(v)
        assert torch.equal(v.read_value(), VALUE), name
    assert ONES.tolist() == [1] * 4
    with torch.no_grad(), pytest.raises(ContextError, match=r"add_ of a part of variable 'v' is not possible"):
        Worker(servers, 0).run(packer_of(strategy), 1, lambda: v[0].add_(1))


@pytest.mark.parametrize("where", ["coordinator", "worker"])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_variable_and_a_row_can_be_filled(servers: InHouse, shards: int, where: str) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        v = distnb.Variable(VALUE)

    def fill() -> Any:
        with torch.no_grad():
            v.data.fill_(2)
            torch.nn.init.constant_(v[3], 0.25)
            v.data[-1].zero_()
        return v.detach().clone()

    found = fill() if where == "coordinator" else Worker(servers, 0).run(packer_of(strategy), 1, fill)
    expected = torch.full((6, 4), 2.0)
    expected[3], expected[5] = 0.25, 0
    assert torch.equal(found, expected)
    assert torch.equal(v.read_value(), expected)


def test_a_part_is_read_like_any_tensor(servers: InHouse) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        v, whole = distnb.Variable(VALUE), distnb.Variable(torch.ones(4))
    row = v[1]
    assert repr(row.detach()) == repr(VALUE[1])
    assert type(row + 1) is torch.Tensor
    assert type(torch.stack([row, row])) is torch.Tensor
    file = io.BytesIO()
    torch.save({"row": row.detach()}, file)
    file.seek(0)
    for each in (
        copy.deepcopy(row.detach()),
        pickle.loads(pickle.dumps(row.detach())),
        torch.load(file, weights_only=True)["row"],
    ):
        assert type(each) is torch.Tensor
        assert torch.equal(each, VALUE[1])
    array = np.asarray(row.detach())
    array[0] = 99
    np.asarray(whole.detach())[0] = 99
    row.detach().numpy()[0] = 99
    assert v[1].tolist() == VALUE[1].tolist(), "an array is a copy"
    assert whole.tolist() == [1] * 4
    (row.sum() + (whole.view(2, 2) * 2).sum()).backward()
    assert v.grad is not None
    assert v.grad.to_dense()[1].tolist() == [1] * 4
    assert whole.grad is not None
    assert whole.grad.tolist() == [2] * 4
    worker = Worker(servers, 0)
    assert worker.run(packer_of(strategy), 1, lambda given: (type(given), v[1]), row.detach())[0] is torch.Tensor
    found = worker.run(packer_of(strategy), 2, lambda: (v[1].detach(), whole.detach()))
    assert [type(each) for each in found] == [torch.Tensor] * 2
    assert found[0].tolist() == VALUE[1].tolist()
