"""Changes in place of parts of server variables: as for a torch tensor, or an error."""

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
CHANGES: dict[str, Callable[[Any], Any]] = {
    "row": lambda v: v[0].add_(1),
    "last row": lambda v: v[-1].mul_(3),
    "element": lambda v: v[1, 2].add_(5),
    "element of a row": lambda v: v[1][2].sub_(5),
    "slice": lambda v: v[1:4].neg_(),
    "steps": lambda v: v[::2, 1:].zero_(),
    "column": lambda v: v[:, 1].copy_(torch.arange(6.0)),
    "newaxis": lambda v: v[2, None].add_(torch.ones(1, 4)),
    "set": lambda v: v.__setitem__(2, 7.0),
    "set slice": lambda v: v.__setitem__(slice(1, 3), torch.ones(2, 4)),
    "set element": lambda v: v.__setitem__((5, 0), 1.5),
    "set rows": lambda v: v.__setitem__([4, 0, 4], torch.tensor([[1.0], [2.0], [3.0]])),
    "set pairs": lambda v: v.__setitem__(([4, 0], [1, 2]), torch.tensor([8.0, 9.0])),
    "set block": lambda v: v.__setitem__((slice(0, 4), [1, 2]), torch.zeros(4, 2)),
    "set mask": lambda v: v.__setitem__(v.sum(1) > 30, 0.0),
    "set all": lambda v: v.__setitem__(..., -1.0),
    "set within a view": lambda v: v[3].__setitem__(slice(0, 2), 0.5),
    "flat": lambda v: v.view(-1)[3:6].fill_(2),
    "transposed": lambda v: v.T[1].div_(2),
    "detached": lambda v: v.detach()[2].add_(1),
    "data": lambda v: v.data.mul_(2),
    "data of a row": lambda v: v[4].data.mul_(2),
    "same": lambda v: v.contiguous().add_(1),
    "narrow": lambda v: v.narrow(0, 2, 2).clamp_(max=11),
    "one of several": lambda v: v.split(2)[1].add_(1),
    "unbind": lambda v: v.unbind(1)[3].zero_(),
    "diagonal": lambda v: v.diagonal().fill_(1),
    "index_add_ of a view": lambda v: v[1:5].index_add_(0, torch.tensor([0, 3, 0]), torch.ones(3, 4)),
    "masked": lambda v: v[2:].masked_fill_(v[2:] > 18, 0.0),
    "init": lambda v: torch.nn.init.constant_(v[3], 0.25),
    "operand of itself": lambda v: v[0].add_(v[1]),
    "whole": lambda v: v.add_(torch.arange(4.0)),
    "cumulative": lambda v: v.cumsum_(0),
}


def augmented(v: Any) -> None:
    v[0] += 1
    v[1, 2] -= 2
    v[2:4] *= 2
    v[:, 0] += torch.ones(6)
    v[[4, 5]] += 1


CHANGES["augmented"] = augmented


def of_rows(value: Any) -> Any:
    """Return the rows one by one, since `for row in v` yields the shards of a sharded variable."""
    for number in range(6):
        value[number].add_(number)


CHANGES["each row"] = of_rows


@pytest.mark.parametrize("where", ["coordinator", "worker"])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_change_of_a_part_changes_the_variable(servers: InHouse, shards: int, where: str) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        v = distnb.Variable(VALUE, name="v")
    packer, worker = packer_of(strategy), Worker(servers, 0)
    for number, (name, change) in enumerate(CHANGES.items()):
        v.assign(VALUE)
        expected = VALUE.clone()
        change(expected)

        def closure(change: Any = change) -> Any:
            with torch.no_grad():
                change(v)
                return v.detach().clone()

        found = closure() if where == "coordinator" else worker.run(packer, number, closure)
        assert torch.equal(v.read_value(), expected), name
        assert torch.equal(found, expected), f"{name}, as the changing process sees it"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_view_shows_its_own_change_and_can_be_written_back(servers: InHouse, shards: int) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        v = distnb.Variable(VALUE)
    row = v[2]
    assert row.add_(1) is row
    assert torch.equal(row, VALUE[2] + 1)
    before = v[0].clone()
    v.assign(0.0)
    v[0] = before
    v[2] = row  # a read copies the value: the current value counts
    assert torch.equal(v.read_value()[[0, 2]], torch.stack([VALUE[0], VALUE[2] + 1]))
    v[2] = row.sub_(1)
    assert torch.equal(v[2], torch.zeros(4) + row)
    assert torch.equal(row, v.read_value()[2])


@pytest.mark.parametrize("shards", [1, 3])
def test_a_change_of_a_part_keeps_changes_of_workers(servers: InHouse, shards: int) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        v = distnb.Variable(torch.zeros(6, 2))
    packer, worker, number = packer_of(strategy), Worker(servers, 0), 0
    plain = servers.exchange

    def busy(requests: Any, fence: Any = None) -> Any:
        """Let a worker add one before each write of the coordinator."""
        nonlocal number
        writes = [each for its in requests.values() for each in its if type(each).__name__ == "WriteShard"]
        if writes and number < 30:
            number += 1
            servers.exchange = plain  # type: ignore[method-assign]
            worker.run(packer, number, lambda: v.assign_add(torch.ones(6, 2)) is None)
            servers.exchange = busy  # type: ignore[method-assign]
        return plain(requests)

    servers.exchange = busy  # type: ignore[method-assign]
    rows = torch.zeros(6, 2)
    for turn in range(3):
        v[turn].add_(10)
        v[turn + 1] += 10
        v.add_(torch.ones(6, 2))
        v.add_(1)
        rows[turn] += 10
        rows[turn + 1] += 10
        rows += 2
    servers.exchange = plain  # type: ignore[method-assign]
    assert number >= 12
    assert torch.equal(v.read_value(), rows + number)


def test_a_change_that_always_loses_against_others_is_an_error(servers: InHouse, monkeypatch: Any) -> None:
    strategy = distnb.ParameterServerStrategy()
    with strategy.scope():
        v = distnb.Variable(torch.zeros(2), name="hot")
    plain = servers.exchange

    def busy(requests: Any, fence: Any = None) -> Any:
        for operation in [each for its in requests.values() for each in its if hasattr(each, "seen")]:
            plain({v.stored.parts[0].server: [operation._replace(method="assign_add", value=1.0, seen=None)]})
        return plain(requests)

    monkeypatch.setattr(servers, "exchange", busy)
    with pytest.raises(ContextError, match=r"hot could not be changed in place.*join\(\), or use assign"):
        v[0].add_(1)


def test_changes_that_cannot_reach_the_servers_are_refused(servers: InHouse) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        table = distnb.Variable(VALUE, name="table")
        plain = distnb.Variable(torch.zeros(3), name="plain")
    ones = torch.ones(4)
    for refused in (
        lambda: torch.add(ones, 1, out=table[0]),
        lambda: torch.add(ones[:3], 1, out=plain),
        lambda: torch.sort(ones, out=(table[1], torch.zeros(4, dtype=torch.int64))),
        lambda: torch._foreach_add_([ones, table[0]], 1.0),
        lambda: table[::-1].add_(1),
        lambda: table[0].unsqueeze_(0),
        lambda: table[0].resize_(2),
    ):
        with pytest.raises(ContextError, match=r"of a part of variable 'table'|of variable 'plain'"):
            refused()
    assert torch.equal(table.read_value(), VALUE)
    assert ones.tolist() == [1] * 4


def test_a_view_is_read_like_any_tensor(servers: InHouse) -> None:
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
