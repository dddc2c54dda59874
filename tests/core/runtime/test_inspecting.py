"""A process's facts about its values: statistics, trees, and which part is where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb
from distnb.errors import OptionError
from distnb.input.distribute import distribute
from distnb.runtime.inspection import statistics
from distnb.runtime.inspection.holdings import holdings_of, report
from distnb.runtime.inspection.inspecting import inspect
from distnb.runtime.inspection.statistics import digest_of, norms, statistics_of
from distnb.topology import Device
from distnb.values import PerReplica
from distnb.wire.value_facts import BINS, Holding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_statistics_match_the_tensor(dtype: torch.dtype) -> None:
    tensor = (torch.randn(30, 70) * 3).clamp(0 if dtype is torch.bool else -99).to(dtype)
    described, exact = statistics_of(tensor), tensor.double().numpy()
    assert described is not None
    assert (described.elements, described.sampled) == (2100, 2100)
    assert (described.low, described.high) == (exact.min(), exact.max())
    assert described.mean == pytest.approx(exact.mean(), abs=1e-6)
    assert described.norm == pytest.approx(np.linalg.norm(exact), rel=1e-6)
    assert described.histogram == tuple(np.histogram(exact, BINS)[0]) or dtype not in (torch.float64, torch.float32)
    assert sum(described.histogram) == 2100


def test_non_finite_values_are_counted_and_the_rest_is_described() -> None:
    described = statistics_of(torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf]))
    assert described is not None
    assert (described.nans, described.infinities, described.low, described.high, described.mean) == (
        1,
        2,
        1.0,
        3.0,
        2.0,
    )
    assert math.isnan(described.norm)
    nothing = statistics_of(torch.tensor([math.nan]))
    assert nothing is not None
    assert math.isnan(nothing.low)
    assert nothing.nans == 1


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_neither_overflow_nor_vanish(scale: float) -> None:
    described = statistics_of(torch.full((4,), scale))
    assert described is not None
    assert described.norm == pytest.approx(2 * scale)


@pytest.mark.parametrize("laid_out", ["plain", "turned", "window"])
def test_a_large_tensor_is_sampled(laid_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MOST_ELEMENTS", 5_000)
    tensor = {
        "plain": torch.randn(300, 200),
        "turned": torch.randn(200, 300).t(),
        "window": torch.randn(400, 300)[50:350, 20:220],
    }[laid_out]
    described = statistics_of(tensor)
    assert described is not None
    assert described.elements == 60_000
    assert 2_000 <= described.sampled <= 5_000
    assert described.norm == pytest.approx(tensor.norm().item(), rel=0.1)
    assert -0.2 < described.mean < 0.2


def test_norms_are_computed_for_each_tensor() -> None:
    tensors = [torch.ones(4), torch.zeros(0), torch.full((9,), 2), torch.ones(2, device="meta")]
    assert norms(tensors)[:3] == [2.0, 0.0, 6.0]
    assert math.isnan(norms(tensors)[3])


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.tensor([3 + 4j]),
        torch.empty(0, 4),
        torch.empty(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.zeros(2, requires_grad=True) * 2,
        np.arange(5)[::-1],
        np.array(["a", "b"]),
        np.array(1.5),
        torch.nn.LazyLinear(3),
        torch.ones(3).expand(4, 3),
    ],
    ids=str,
)
def test_values_of_every_kind_can_be_inspected(value: object) -> None:
    described = inspect(value)
    assert described.type == type(value).__name__
    holdings_of(value)


def test_equal_contents_are_recognised() -> None:
    complex_ones = torch.tensor([3 + 4j]), torch.tensor([4 + 3j])
    assert digest_of(complex_ones[0]) != digest_of(complex_ones[1]), "though their absolute values are equal"
    one, other = {"a": [torch.ones(2), "x"]}, {"a": [torch.ones(2), "y"]}
    assert inspect(one).content == inspect({"a": [torch.ones(2), "x"]}).content != inspect(other).content
    assert inspect(object()).content == 0, "its repr is an address"


def test_a_module_is_described_by_its_layers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    module(torch.randn(4, 3)).square().sum().backward()
    described = inspect(module)
    linear, norm = (dict(described.items)[name] for name in "01")
    weight = dict(linear.items)["weight"]
    assert (described.parameters, linear.parameters, norm.parameters) == (12, 8, 4)
    assert weight.norm == pytest.approx(module[0].weight.norm().item())
    assert weight.gradient_norm == pytest.approx(module[0].weight.grad.norm().item())  # type: ignore[union-attr]
    total = torch.cat([each.flatten() for each in module.parameters()]).norm().item()
    assert described.norm == pytest.approx(total)
    assert dict(linear.items)["bias"].note == "frozen"
    assert dict(norm.items)["running_mean"].note == "buffer"
    assert described.note == "training mode"
    before = described.content
    with torch.no_grad():
        module[1].weight[0] = math.nan
    assert math.isnan(inspect(module).norm or 0)
    assert inspect(module).content != before
    named = torch.nn.ParameterDict({"scale": torch.nn.Parameter(torch.ones(2))})
    assert (linear.text, inspect(named).text) == ("in_features=3, out_features=2, bias=True", "")


def test_optimizers_and_metrics_are_described_by_their_state() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    assert inspect(optimizer).items == ()
    parameter.grad = torch.ones(2)
    optimizer.step()
    described = inspect(optimizer)
    assert described.text == "lr 0.5"
    assert [each.name for each in holdings_of(optimizer)] == ["[0]['momentum_buffer']"]
    metric = distnb.metrics.MeanMetric()
    metric.update(3.0)
    inner = dict(inspect(metric).items)
    assert inner["['mean_value']"].text == "3"
    assert all(each.content == 0 for each in inner.values()), "each replica's own, so that no drift is seen in them"


def test_long_and_deep_structures_are_truncated() -> None:
    described = inspect([torch.ones(1)] * 1000)
    assert len(described.items) + described.left_out == 1000
    assert sum(each.statistics is not None for _, each in described.items) < 100
    read = 0

    class Long(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal read
            for each in super().__iter__():
                read += 1
                yield each

    assert inspect(Long(range(100_000))).text == "100000 items"
    assert read < 1000, "hidden parts are not read"
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    assert inspect(deep).type == "list"
    itself: list[object] = []
    itself.extend([itself] * 100)
    assert inspect(itself).type == "list"
    assert holdings_of(itself) == ()


def test_images_and_figures_become_small_pictures() -> None:
    for image in (torch.rand(40, 600), torch.rand(3, 40, 40), torch.randint(0, 255, (40, 40, 3), dtype=torch.uint8)):
        assert inspect(image).picture.startswith("data:image/png;base64,")
        assert len(inspect(image).picture) < 100_000
    assert inspect(torch.rand(5, 40, 40)).picture == ""
    assert inspect(torch.rand(4, 4)).picture == ""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    pyplot.close(figure)
    assert inspect(figure).picture.startswith("data:image/png;base64,")


# -- places of parts ------------------------------------------------------------------------------------------------


def test_a_replica_reports_its_rows_of_a_batch() -> None:
    part = PerReplica.own(1, torch.zeros(3, 4), 2, 7)
    (held,) = holdings_of({"x": part})
    assert (held.name, held.whole, held.bounds, held.kind, held.nbytes) == (
        "['x']",
        (7, 4),
        ((4, 7), (0, 4)),
        "rows",
        48,
    )
    (unlike,) = holdings_of(PerReplica.own(0, torch.zeros(5), 2, 7))
    assert (unlike.bounds, unlike.note) == (None, "5 rows"), "an unusual slice: its position is unknown"


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_dataset_reports_the_rows_of_its_batches_without_reading(drop_last: bool) -> None:
    loader = DataLoader(TensorDataset(torch.arange(67)), batch_size=33, drop_last=drop_last, shuffle=True)
    here = {"num_replicas": 2, "device": Device("cpu"), "shared_randomness": nullcontext}
    state = torch.get_rng_state()
    (full, *last), (other, *_) = (holdings_of(distribute(loader, replica_id=i, **here)) for i in range(2))  # type: ignore[arg-type]
    assert (full.name, full.bounds, other.bounds) == ("2 batches of 33 rows", ((0, 17),), ((17, 33),))
    assert [(each.name, each.whole, each.bounds) for each in last] == (
        [] if drop_last else [("the last batch", (1,), ((0, 1),))]
    )
    assert torch.equal(state, torch.get_rng_state())


def test_objects_without_tensors_are_refused() -> None:
    with pytest.raises(OptionError, match="visualize got a int without any tensor"):
        distnb.visualize(3)
    with pytest.raises(OptionError, match="without any tensor"):
        report({"a": 1})
    assert report(torch.nn.ReLU())["replicas"] == {0: ()}


def test_a_plain_value_is_described_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    distnb.visualize(torch.nn.Linear(3, 2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Linear · this process: 32 B"
    assert lines[2].split() == ["weight", "(2,", "3)", "float32", "all", "this", "process", "cpu", "24", "B"]
    assert holdings_of(torch.ones(2))[0] == Holding(
        name="", whole=(2,), bounds=((0, 2),), kind="own", dtype="float32", device="cpu", nbytes=8
    )
