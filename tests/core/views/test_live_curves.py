"""Curves in depth: the record, runs and their comparison, troubles in words, epochs and time left, messages."""

from __future__ import annotations

import math
import re
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distnb.errors import OptionError
from distnb.input.progress import Progress
from distnb.notebook import compose
from distnb.notebook.front_end import FrontEnd
from distnb.runtime import step_count
from distnb.views.chart_model import charts
from distnb.views.curves import Curve, Line, ValueHistory, apart, mean_points
from distnb.views.event_files import EventFiles
from distnb.views.live_model import LiveCall, LiveModel
from distnb.views.runs import History
from distnb.watching.live import TextProgress, live
from distnb.widgets.content import head_text, picture_bundle, plain_summary
from distnb.widgets.exports import history, live_figure
from distnb.widgets.publisher import TerminalPublisher
from distnb.widgets.widget_view import WidgetView
from distnb.wire.messages import TelemetrySample
from tests.support.live_events import draw_curves, pictures, sample, started


def sampled(steps: int, now: float, **more: Any) -> tuple[TelemetrySample, float]:
    return sample(0, now, steps=steps, **more), now


# -- lines -----------------------------------------------------------------------------------------------------------


def test_a_long_record_keeps_every_second_or_fourth_value() -> None:
    record = ValueHistory(most=8)
    for number in range(8):
        record.add(number, number * 0.5, 0.0)
    assert [step for step, *_ in record.since(0)] == list(range(8))
    for number in range(8, 33):
        record.add(number, number * 0.5, 0.0)
    assert (record.count, record.stride) == (33, 8)
    assert [step for step, *_ in record.since(0)] == [0, 8, 16, 24, 32]
    assert [step for step, *_ in record.since(9)] == [16, 24, 32]


def exploded(values: list[float]) -> bool:
    line = Line()
    for step, value in enumerate(values):
        line.add(step, value)
    return line.exploded is not None


@pytest.mark.parametrize("growth", [1.05, 1.5, 3.0])
def test_exponential_growth_is_reported_as_exploding(growth: float) -> None:
    assert exploded([2.3 - 0.01 * step for step in range(100)] + [1.2 * growth**step for step in range(250)])


@pytest.mark.parametrize(
    "values",
    [
        [float(step) for step in range(5_000)],  # a counter
        [step * 1e-6 for step in range(5_000)],  # a rate that is warmed up
        [step**3 for step in range(5_000)],
        [5 * math.exp(-step / 100) + (step % 50 == 0) * 4 for step in range(5_000)],  # spikes below earlier values
        [0.0] * 50 + [1.0] * 50,
    ],
)
def test_ordinary_growth_is_not_reported_as_exploding(values: list[float]) -> None:
    assert not exploded(values)


def test_troubles_are_described_with_their_replica() -> None:
    model = started()
    norm = [math.nan, 1.0, math.nan, 1.0, 1.0]
    draw_curves(model, loss=[1.0, math.nan, 2.0, math.inf, math.inf], norm=norm, replica=0)
    draw_curves(model, loss=[1.0, 2.0, 3.0, 4.0, 5.0], norm=norm, replica=1)
    assert model.troubles() == [
        "loss is inf since step 4 (replica 0)",
        "norm was nan at step 3 (2 such values in all)",
    ]
    draw_curves(model, big=[1.0] * 50 + [1e6], first=6)
    assert "big exploded: 1e+06 at step 56, up from at most 1" in model.troubles()
    for text in (picture_bundle(model, 2.0)["text/html"], plain_summary(model, 2.0)):
        assert "big exploded" in text
    assert 'class="exploded"' in pictures(model)["big"]


def test_many_replicas_are_drawn_as_a_band_with_outliers_named() -> None:
    model = started(16)
    for replica in range(16):
        level = 5.0 if replica == 11 else replica * 0.01
        draw_curves(model, own=[level + step for step in range(40)], replica=replica)
    (chart,) = charts(model)
    assert [series.label for series in chart.series] == ["mean of 16", "[11]"]
    mean = mean_points(model.curves["own"].lines)
    assert len(mean) == 40
    assert mean[3] == (4, pytest.approx(3 + (5.0 + sum(range(16)) * 0.01 - 0.11) / 16), 3.0, 8.0)
    assert apart({replica: model.curves["own"].lines[replica] for replica in range(10)}) == []


def test_facts_list_the_latest_least_greatest_and_best_value() -> None:
    model = LiveModel()
    draw_curves(model, loss=[2.0, 0.5, 1.0], accuracy=[0.1, 0.9, 0.8], rate=[0.1, 0.1, 0.1])
    assert [chart.facts for chart in charts(model)] == [
        "last 1 · min 0.5 at step 2 (best) · max 2 at step 1",
        "last 0.8 · min 0.1 at step 1 · max 0.9 at step 2 (best)",
        "last 0.1",
    ]
    assert "loss: 2 → 1 · min 0.5 at step 2 (best)" in plain_summary(model, 1.0)
    assert "min 0.5 at step 2" in picture_bundle(model, 1.0)["text/html"]


# -- runs ------------------------------------------------------------------------------------------------------------


def steps_of(curve: Curve) -> list[float]:
    return [step for step, *_ in curve.lines[0].points]


def test_runs_of_a_cell_begin_at_step_one_and_are_overlaid() -> None:
    model = LiveModel(name="In[3]")
    draw_curves(model, loss=[3.0, 2.0, 1.0], run="lr=0.1")
    draw_curves(model, loss=[3.0, 2.5], run="lr=0.2", first=4)
    assert [steps_of(run.curves["loss"]) for run in model.runs.values()] == [[1, 2, 3], [1, 2]]
    (chart,) = charts(model)
    assert [series.label for series in chart.series] == ["lr=0.1", "lr=0.2"]
    assert len({series.css_color for series in chart.series}) == 2
    assert model.curves["loss"].lines[0].last == 2.5


def test_named_runs_of_earlier_cells_are_compared_and_others_are_not() -> None:
    kept = History()
    for number, run in enumerate(["a", "", "b", "a"]):
        model = LiveModel(name=f"In[{number}]", history=kept)
        draw_curves(model, run=run, **{"loss": [float(number)], f"only {number}": [1.0]})
    assert list(kept.runs) == ["In[1]", "b", "a"], "a name used again belongs to the later cell"
    assert [series.label for series in charts(model)[0].series] == ["b", "a"]
    assert [chart.name for chart in charts(model)] == ["loss", "only 3"]
    plain = LiveModel(name="In[9]", history=kept)
    draw_curves(plain, loss=[1.0])
    assert [series.label for series in charts(plain)[0].series] == [""]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> History:
    drawn = History()
    monkeypatch.setattr(compose, "_front", FrontEnd(history=drawn))
    model = started(name="In[1]", history=drawn)
    draw_curves(model, loss=[2.0, 1.0], replica=0)
    draw_curves(model, loss=[2.0, 1.5], replica=1)
    model = LiveModel(name="In[2]", history=drawn)
    draw_curves(model, loss=[3.0, math.nan], run="fast")
    return drawn


def test_the_history_is_a_table_of_what_was_drawn(kept: History) -> None:
    pytest.importorskip("pandas")
    table = history()
    assert list(table.columns) == ["step", "replica", "name", "value", "run", "time"]
    rows = table[["step", "replica", "name", "value", "run"]].to_numpy().tolist()
    assert rows[:4] == [
        [1, 0, "loss", 2.0, "In[1]"],
        [2, 0, "loss", 1.0, "In[1]"],
        [1, 1, "loss", 2.0, "In[1]"],
        [2, 1, "loss", 1.5, "In[1]"],
    ]
    assert str(table["time"][1]) == "1970-01-01 00:00:01"
    assert history("fast")["value"].tolist()[0] == 3.0
    with pytest.raises(OptionError, match=r"no run 'fest'.*fast.*In\[1\], fast"):
        history("fest")


def test_an_empty_history_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "_front", FrontEnd(history=History()))
    with pytest.raises(OptionError, match="Nothing has been drawn"):
        history()
    monkeypatch.setattr(compose, "_front", FrontEnd())
    with pytest.raises(OptionError, match="%load_ext distnb"):
        history()


def test_a_figure_has_a_chart_for_each_name_and_a_line_for_each_replica_or_run(kept: History, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = live_figure("loss", runs=["In[1]"], log=True, smoothing=0.5).axes
    assert axes.get_yscale() == "log"
    assert [line.get_label() for line in axes.lines if not str(line.get_label()).startswith("_")] == ["[0]", "[1]"]
    figure = live_figure(runs=["In[1]", "fast"])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["In[1]", "fast"]
    figure.savefig(tmp_path / "charts.png")
    assert (tmp_path / "charts.png").stat().st_size > 1_000
    for wrong in (lambda: live_figure("lass"), lambda: live_figure(smoothing=1.0)):
        with pytest.raises(OptionError):
            wrong()


def test_old_runs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distnb.views.runs.MOST_VALUES", 5)
    drawn = History()
    for number in range(4):
        draw_curves(LiveModel(name=f"In[{number}]", history=drawn), loss=[1.0, 2.0, 3.0])
    assert list(drawn.runs) == ["In[2]", "In[3]"]


def test_the_name_of_a_run_must_be_a_text() -> None:
    with pytest.raises(OptionError, match=r"run=0\.1"):
        live(run=0.1, loss=1.0)


def test_a_script_prints_the_end_of_a_run_before_the_next_begins(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TextProgress()
    for run in ("a", "b"):
        progress({"loss": 1.0}, (1, 0), run)
    progress.finish()
    assert capsys.readouterr().err.splitlines() == ["a · step 1 · loss 1", "b · step 2 · loss 1"]


def test_event_files_hold_each_value_once_and_replicas_only_if_they_differ(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files, model = EventFiles(tmp_path), started(name="In[1]")
    for first in (1, 3):
        for replica in (0, 1):
            own = [1.0 + replica, 2.0 + replica]
            draw_curves(model, loss=[1.0, 2.0], own=own, run="lr=0.1/a", replica=replica, first=first)
        files.write(model.runs.values())
    files.close()
    found = {}
    for path in sorted(tmp_path.rglob("events.*")):
        events = accumulators.EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found[path.parent.relative_to(tmp_path / "lr=0.1_a").parts[1:], tag] = [
                (event.step, event.value) for event in events.Scalars(tag)
            ]
    assert found == {
        ((), "loss"): [(1, 1.0), (2, 2.0), (3, 1.0), (4, 2.0)],
        (("replica 0",), "own"): [(1, 1.0), (2, 2.0), (3, 1.0), (4, 2.0)],
        (("replica 1",), "own"): [(1, 2.0), (2, 3.0), (3, 2.0), (4, 3.0)],
    }


# -- epochs and time left ----------------------------------------------------------------------------------------------


def test_epochs_follow_the_training_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_count, "steps", 100)
    monkeypatch.setattr(step_count, "_pass", None)
    monkeypatch.setattr(Progress, "latest", None)
    step_count.epochs_begun()
    for epoch in range(2):
        trains, evaluates = Progress(epoch=epoch, batches=3), Progress(epoch=epoch, batches=9)
        for _ in range(3):
            trains.count_batch()
            step_count.stepped()
        for _ in range(9):
            evaluates.count_batch()
    assert step_count.epochs_begun() == ((100, 0), (103, 1))
    assert step_count.epochs_begun() == ()
    assert step_count.reading() == (1, 3, 3, None)


def test_remaining_time_is_shown_if_the_number_of_batches_is_known() -> None:
    model = LiveModel()
    for now in range(4):
        reading = (0, 10 * now, 100, None)
        model.feed(*sampled(10 * now, float(now), epochs=((0, 0),) if now == 0 else (), reading=reading))
    assert model.seconds_left() == (pytest.approx(7.0), False)
    assert "epoch 1 · batch 30 of 100 · 7.0 s left of the epoch" in head_text(model, 3.0)
    model.feed(*sampled(40, 4.0, reading=(0, 40, 100, 5)))
    assert model.seconds_left() == (pytest.approx(46.0), True)
    assert "epoch 1 of 5 · batch 40 of 100 · 46.0 s left ·" in head_text(model, 4.0) + " ·"
    model.end(5.0, failed=False)
    assert "left" not in head_text(model, 5.0)


def test_data_distributed_again_for_each_epoch_has_epochs() -> None:
    model, step = LiveModel(), 0
    for epoch in range(3):  # each is the first of its dataset
        for batch in range(4):
            begun = ((step, 0),) if batch == 0 else ()
            step += 1
            model.feed(*sampled(step, float(step), epochs=begun, reading=(0, batch + 1, 4, None)))
            assert f"epoch {epoch + 1} · batch {batch + 1} of 4" in head_text(model, float(step))
    assert model.epochs == {0: 0, 4: 1, 8: 2}
    for epoch in range(2):  # a dataset that is distributed once goes on
        model.feed(*sampled(step + 4, 20.0, epochs=((step, epoch),), reading=(epoch, 4, 4, None)))
        step += 4
    model.feed(*sampled(step + 4, 20.0, epochs=((step, 0),), reading=(0, 4, 4, None)))
    assert [*model.epochs.values()] == [0, 1, 2, 3, 4, 0], "the last one is another training"


def test_remaining_time_is_not_shown_if_it_is_unknown() -> None:
    model = LiveModel(counted_before={0: (40, 0)})
    stale = (3, 40, 40, None)  # data read by an earlier cell
    for now in range(3):
        model.feed(*sampled(40, float(now), epochs=((0, 3),), reading=stale))
    assert (model.seconds_left(), model.reading, model.epochs) == (None, None, {})
    model.feed(*sampled(45, 4.0, epochs=((40, 4),), reading=(4, 5, None, None)))
    assert (model.seconds_left(), model.epochs) == (None, {0: 4})
    assert "epoch 5" in head_text(model, 4.0)
    assert "batch" not in head_text(model, 4.0)


def test_epochs_are_marked_in_pictures() -> None:
    model = LiveModel(counted_before={0: (100, 0)})
    model.feed(*sampled(130, 1.0, epochs=((100, 0), (110, 1), (120, 2))))
    draw_curves(model, loss=[1.0] * 30, first=101)
    (chart,) = charts(model)
    assert chart.epochs == {0: 0, 10: 1, 20: 2}
    svg = pictures(model)["loss"]
    assert svg.count('class="epoch"') == 2
    assert ">epoch 2<" in svg


@pytest.mark.parametrize("curves", [("loss",), ("loss", "accuracy")])
def test_labels_of_pictures_are_apart_and_inside(curves: tuple[str, ...]) -> None:
    model = LiveModel()
    model.feed(*sampled(1201, 1.0, epochs=tuple((29 * epoch, epoch) for epoch in range(41))))
    draw_curves(model, **dict.fromkeys(curves, [0.123456] * 1_201))
    for svg in pictures(model).values():
        right = float(re.search(r'width="(\d+)"', svg)[1])  # type: ignore[index]
        rows: dict[str, list[tuple[float, float]]] = {}
        for x, y, more, words in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"([^>]*)>([^<]*)</text>', svg):
            wide = 5.5 * len(words)
            left = float(x) - wide * (1.0 if 'anchor="end"' in more else 0.5 if "anchor" in more else 0.0)
            rows.setdefault(y, []).append((left, left + wide))
        assert max(map(len, rows.values())) > 3
        for row in rows.values():
            edges = [edge for label in row for edge in label]
            assert edges == sorted(edges)
            assert edges[0] >= 0
            assert edges[-1] <= right


def test_a_loop_in_the_notebook_has_epochs_too() -> None:
    model = LiveModel()
    for step in range(1, 4):
        model.feed_local(LiveCall(point={"loss": 1.0}, place=(step, 0), epochs=((step - 1, step - 1),)), float(step))
    assert model.epochs == {0: 0, 1: 1, 2: 2}


# -- messages to the page ------------------------------------------------------------------------------------------------


class Page:
    """A page that handles messages as live_view.js does."""

    def __init__(self) -> None:
        self.lines: dict[int, tuple[int, list[tuple[float, ...]]]] = {}
        self.nbytes = 0

    def take(self, content: dict[str, Any], points: array[float]) -> None:
        from distnb.views.curves import _joined

        self.nbytes += points.itemsize * len(points)
        place = 0
        for number, width, at, count in content["lines"]:
            new = [tuple(points[place + 4 * i : place + 4 * i + 4]) for i in range(count)]
            place += 4 * count
            there, known = self.lines.get(number, (width, [])) if at else (width, [])
            while there < width:
                known = [
                    _joined(*known[i : i + 2]) if i + 1 < len(known) else known[i] for i in range(0, len(known), 2)
                ]
                there *= 2
            if len(known) >= at:
                self.lines[number] = width, [*known[:at], *new]


def test_a_page_that_receives_updates_equals_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distnb.widgets.widget_view.LiveWidget", lambda view: SimpleNamespace())
    model, page, late = started(), Page(), Page()
    view = WidgetView(model, TerminalPublisher(), "x")
    step = 0
    for update in range(300):
        for _ in range(1 + update % 37):  # past several halvings, in the middle of points that are not full
            step += 1
            for replica in (0, 1):
                draw_curves(model, loss=[math.sin(step) + replica], replica=replica, first=step)
        view._repeat_some()
        message = view.message(charts(model), view._sent)
        page.take(*message)
        if update > 150:
            late.take(*message)
    lines = model.curves["loss"].lines
    assert lines[0].width > 4
    for each in (page, late):
        for replica, (_, points) in each.lines.items():
            assert [array("f", point).tolist() for point in lines[replica].points] == list(map(list, points))
        assert each.lines.keys() == lines.keys()
    assert page.nbytes < 300 * 16 * (37 + 300 + 1100)
    whole = Page()
    whole.take(*view.message(charts(model), {}))
    assert whole.lines == page.lines
