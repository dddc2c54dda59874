"""Rulings on differences from TensorFlow in a notebook: datasets in ordinary cells, and distributed cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distnb
from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with started() as session:
        yield session


def test_next_returns_a_batch_until_the_data_ends(session: Any) -> None:
    strategy = session.user_ns["strategy"]
    dataset = strategy.distribute_dataset([torch.ones(2), torch.ones(3)])
    assert isinstance(dataset, distnb.DistributedDataset)
    assert (dataset.cardinality, len(dataset)) == (2, 2)
    batches = iter(dataset)
    assert isinstance(batches, distnb.DistributedIterator)
    assert strategy.gather(batches.get_next(), axis=0).numpy().tolist() == [1.0] * 2
    optional = batches.get_next_as_optional()
    assert strategy.gather(optional.get_value(), axis=0).numpy().tolist() == [1.0] * 3
    assert not batches.get_next_as_optional().has_value()
    assert list(batches) == []
    scalars = strategy.distribute_datasets_from_function(lambda context: range(3))
    assert [strategy.local_results(one) for one in scalars] == [(0, 1), (2, None)]


def test_components_of_unlike_kinds_can_be_used_in_a_cell(session: Any) -> None:
    source = """
unlike = strategy.run(lambda: None if distnb.replica_id() else torch.ones(2))
shown = repr(unlike)
try:
    strategy.reduce("sum", unlike, axis=None)
except TypeError as error:
    refused = str(error)
passed_on = strategy.run(lambda one: type(one).__name__, (unlike,))
total = strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None).item()
distnb.set_strategy(strategy)
made = torch.nn.Linear(1, 1)
"""
    run_cell(session, source, "unlike")
    names = session.user_ns
    assert names["refused"].count("replica 0 holds a tensor; replica 1 holds None") == 1
    assert names["total"] == 2.0
    assert session.user_ns["strategy"].local_results(names["passed_on"]) == ("Tensor", "NoneType")
    # The cell's settings have ended with it, and the objects that it made are kept in sync.
    run_cell(session, "within = distnb.has_strategy()\nstrategy.assert_in_sync(made)", "after")
    assert names["within"] is False
    assert isinstance(names["made"], distnb.Mirrored)


def test_a_missing_gpu_is_an_error(session: Any) -> None:
    if torch.version.cuda is not None:
        pytest.skip("it may be there, or torch refuses the tests' engines, which are forked after Keras asked for GPUs")
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        run_cell(session, "torch.ones(1).cuda()", "gpu")
    assert "Leave out .cuda()" in "\n".join(getattr(raised.value, "__notes__", []))
