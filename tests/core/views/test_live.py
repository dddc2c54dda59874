"""Values to draw: `distnb.live`, the model behind the live view, and its pictures."""

from __future__ import annotations

import io
import math
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

from distnb.errors import OptionError
from distnb.runtime.this_process import this_process
from distnb.values import PerReplica
from distnb.views.live_model import HERE, MOST_POINTS, Curve, Line, LiveCall, LiveModel
from distnb.views.wording import short_number
from distnb.watching.live import TextProgress, live
from distnb.widgets.cell_view import CellView
from distnb.widgets.content import head_text, picture_bundle, plain_summary, replica_table
from distnb.widgets.live_views import TextView
from distnb.widgets.picture import nice_ticks
from distnb.widgets.publisher import TerminalPublisher
from distnb.wire.messages import Died, ProgramEnded, Status
from tests.support.live_events import draw, pictures, sample, started, team_of


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(this_process, "live_sink", lambda point, place, run: taken.append(point))
    return taken


def test_late_values_of_a_replica_are_compared_with_earlier_ones_of_others() -> None:
    model = LiveModel()
    draw(model, *((step, 0, {"loss": 1.0 / step}) for step in range(1, 28)), replica=1)
    draw(model, *((step, 0, {"loss": 2.0 / step}) for step in range(1, 4)))
    assert model.curves["loss"].differs
    assert len(model.curves["loss"].shown()) == 2


# -- distnb.live -----------------------------------------------------------------------------------------------------


def test_numbers_tensors_and_arrays_are_read_at_once(points: list[dict[str, Any]]) -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    live(loss=loss, one=torch.ones(1, 1), array=torch.tensor(3).numpy(), step=3, flag=True)
    live()
    with torch.no_grad():
        loss.add_(1)
    assert points == [{"loss": 2.0, "one": 1.0, "array": 3.0, "step": 3.0, "flag": 1.0}]


def test_a_replica_reports_its_own_component_and_the_notebook_all(points: list[dict[str, Any]]) -> None:
    live(loss=PerReplica.own(1, 0.5, 2))
    live(loss=PerReplica([0.5, 0.7]))
    assert points == [{"loss": 0.5}, {"loss": {0: 0.5, 1: 0.7}}]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        *((value, OptionError, "draws single numbers") for value in ("text", [1, 2], None, {"a": 1}, 1j)),
        (torch.zeros(2, 3), OptionError, r"shape \[2, 3\].*mean"),
        (torch.ones((), device="meta"), RuntimeError, "meta"),
    ],
)
def test_other_values_are_refused(points: list[dict[str, Any]], value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        live(loss=value)
    assert points == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(Terminal(), 25), (io.StringIO(), 3)])
def test_a_script_prints_the_latest_values_regularly_and_at_the_end(stream: io.StringIO, lines: int) -> None:
    now = [0.0]
    progress = TextProgress(stream, lambda: now[0])
    for step in range(100):
        now[0] = step * 0.25
        progress({"loss": 1 / (step + 1)}, (step + 1, 0))
    progress.finish()
    progress.finish()
    written = stream.getvalue().splitlines()
    assert len(written) == lines
    assert written[-1] == "step 100 · loss 0.01"


# -- the model -------------------------------------------------------------------------------------------------------


def test_a_line_is_bounded_and_keeps_its_extremes() -> None:
    line = Line()
    for step in range(100_000):
        line.add(step, 1e6 if step == 777 else math.sin(step))
    assert len(line.points) <= MOST_POINTS
    assert max(point[3] for point in line.points) == 1e6
    assert line.last == math.sin(99_999)
    steps = [point[0] for point in line.points]
    assert steps == sorted(steps)


def test_nan_does_not_hide_extremes() -> None:
    line = Line(most=2)
    for value in (1.0, math.nan, 3.0, math.nan):
        line.add(0, value)
    assert min(p[2] for p in line.points) == 1.0
    assert max(p[3] for p in line.points) == 3.0


def test_equal_values_make_one_line_and_different_values_two() -> None:
    curve = Curve(name="loss")
    for step in range(3):
        for replica in (0, 1):
            curve.add(replica, step, 0.5 * step, 2)
    assert list(curve.shown()) == [(0, 1)]
    curve.add(0, 3, 1.0, 2)
    assert list(curve.shown()) == [(0, 1)]  # replica 1 has not reported step 3 yet
    curve.add(1, 3, 2.0, 2)
    assert list(curve.shown()) == [(0,), (1,)]


def test_nan_on_all_replicas_is_equal() -> None:
    curve = Curve(name="loss")
    for replica in (0, 1):
        curve.add(replica, 1, math.nan, 2)
    assert not curve.differs


def test_steps_continue_across_the_programs_of_a_cell() -> None:
    model = LiveModel(counted_before={0: (100, 0)})
    for program in range(1, 4):
        draw(model, (100 + program, program, {"loss": 1.0}), program=program)
        model.feed(sample(0, 0.1 * program, program=program, steps=100 + program, examples=16 * program), 0.0)
    assert [point[0] for point in model.curves["loss"].lines[0].points] == [1, 2, 3]
    assert (model.rows[0].steps, model.rows[0].examples) == (3, 48)


def test_a_replaced_engine_counts_from_the_beginning() -> None:
    model = LiveModel(counted_before={0: (100, 1600)})
    for steps in range(0, 300, 50):  # beyond the count of its predecessor
        model.feed(sample(0, 0.01 * steps, steps=steps, examples=16 * steps), 0.01 * steps)
    assert (model.rows[0].steps, model.rows[0].examples) == (250, 4000)
    assert model.rows[0].examples_per_second() == pytest.approx(1600)


def test_rates_are_computed_from_counts() -> None:
    model = started()
    for tick in range(11):
        for replica in (0, 1):
            model.feed(sample(replica, tick * 0.2, steps=tick * 10, examples=tick * 160), tick * 0.2)
    assert [row.examples_per_second() for row in model.rows.values()] == pytest.approx([800, 800])
    assert head_text(model, 2.0) == "mirrored · 2 replicas · running · 2.0 s · step 100 · 1,600 examples/s"


def test_unknown_columns_are_left_out() -> None:
    model = started()
    model.feed(sample(), 0.2)
    assert replica_table(model)[0] == ["replica", "device", "memory"]


def test_rows_show_the_states_of_replicas() -> None:
    model = started()
    assert model.state == "running"
    model.feed(ProgramEnded(engine=0, program=1, status="error", summary="ValueError: no"), 1.0)
    model.feed(Died(1, 4711, "was killed by SIGKILL"), 1.0)
    assert (model.rows[0].state, model.rows[1].state) == ("failed", "died")
    model.feed(Status(program=1, state="ended", team=team_of(2), text="failed"), 1.1)
    model.end(1.1, failed=True)
    assert model.state == "failed"
    assert model.seconds(99.0) == pytest.approx(1.1)


def test_the_places_of_interrupted_and_failed_replicas_are_shown() -> None:
    model = started()
    for replica in (0, 1):
        model.feed(sample(replica, where=f"cell 3, line {replica}"), 0.2)
        model.feed(ProgramEnded(engine=replica, program=1, status="interrupted"), 0.3)
    model.feed(Status(program=1, state="ended", team=team_of(2), text="failed"), 0.4)
    model.end(0.4, failed=True)
    assert "· interrupted ·" in head_text(model, 1.0)
    for part in ("cell 3, line 0", "cell 3, line 1"):
        assert part in picture_bundle(model, 1.0)["text/html"]

    model = started()
    for replica in (0, 1):
        model.feed(sample(replica, where="cell 3, line 9"), 0.2)
    model.feed(ProgramEnded(engine=1, program=1, status="error", summary="ValueError: no", where="cell 2, line 4"), 0.3)
    model.feed(ProgramEnded(engine=0, program=1, status="aborted"), 0.3)
    assert {row[0]: row[-1] for row in replica_table(model)[1]} == {"0": "cell 3, line 9", "1": "cell 2, line 4"}


# -- pictures --------------------------------------------------------------------------------------------------------


def trained() -> LiveModel:
    model = started()
    for replica in (0, 1):
        points = ((s, 0, {"loss": 1 / s, "own <loss>": 1 / s + 0.1 * replica}) for s in range(1, 50))
        draw(model, *points, replica=replica)
    return model


def drawn(*values: float) -> ET.Element:
    """Return the picture of a curve."""
    model = started(1)
    draw(model, *((step, 0, {"x": value}) for step, value in enumerate(values)))
    return ET.fromstring(pictures(model)["x"])


def test_a_picture_is_well_formed_and_thick_where_reduced() -> None:
    drawn = {name: ET.fromstring(svg) for name, svg in pictures(trained()).items()}
    widths = {
        name: [path.get("stroke-width") for path in root.iter() if path.get("class") == "line"]
        for name, root in drawn.items()
    }
    assert widths == {"loss": ["2.6"], "own <loss>": ["1.3", "1.3"]}
    assert "loss" in "".join(drawn["loss"].itertext())
    assert "[0-1]" in "".join(drawn["loss"].itertext())


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [math.nan], [math.inf, 1.0], [1e-30, 2e-30], [-5.0, 1e12]])
def test_odd_values_are_drawn(values: list[float]) -> None:
    assert not any("nan" in attribute for part in drawn(*values).iter() for attribute in part.attrib.values())


def test_an_error_has_its_own_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    view = CellView(TerminalPublisher(), TextView)
    view.feed(Status(program=1, state="started", team=team_of(1)), 0.0)
    view.tick(1.0)
    assert "running" in terminal.getvalue()
    view.feed(Status(program=1, state="ended", team=team_of(1), text="failed"), 2.0)
    view.flush(2.0)
    view.tick(3.0)
    assert terminal.getvalue().rsplit("\r", 2)[1].isspace(), "the line is not wiped"
    view.publisher.area(("\x1b[34m" + "x" * 500,))
    assert "\x1b" not in terminal.getvalue()


def test_a_line_has_a_gap_at_values_that_are_not_finite() -> None:
    picture = drawn(1.0, 2.0, math.nan, math.inf, 3.0, math.nan, 4.0, 5.0)
    (line,) = [path.get("d", "") for path in picture.iter() if path.get("class") == "line"]
    assert [part.count("L") for part in line.split("M")[1:]] == [1, 0, 1]


def test_values_that_are_not_finite_are_marked_and_never_hidden() -> None:
    picture = drawn(*(math.nan if step == 700 else 1.0 + step for step in range(3000)))
    (mark,) = [path for path in picture.iter() if path.get("class") == "mark"]
    assert mark.get("d", "").count("M") == 1
    assert "nan" in "".join(picture.itertext())
    assert not [path for path in ET.fromstring(pictures(trained())["loss"]).iter() if path.get("class") == "mark"]


def test_long_names_leave_room_for_the_values() -> None:
    name = "validation/" + "layer/" * 10 + "loss"
    model = started()
    draw(model, (1, 0, {name: 0.5}))
    draw(model, (1, 0, {name: 0.25}), replica=1)
    (title, *_) = [text for text in ET.fromstring(pictures(model)[name]).iter() if text.tag.endswith("}text")]
    words = " ".join(title.itertext())
    assert len(words) < 85
    assert words.startswith("va")
    assert "loss 0.5 [0] 0.25 [1]" in words


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.123), (-3, 1000), (1e-9, 3e-9), (5, 5), (math.nan, 1)])
def test_ticks_are_few_and_inside_the_chart(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert len(ticks) <= 8
    if high > low:
        assert len(ticks) >= 2
        assert all(low - 1e-12 <= tick <= high * (1 + 1e-9) for tick in ticks)


def test_numbers_are_shortened() -> None:
    values = (None, 0.123456, 12345.6, 20000, 1234567.0, math.nan)
    assert [short_number(value) for value in values] == ["", "0.1235", "12346", "20000", "1.23e+06", "nan"]


def test_the_saved_picture_needs_no_script() -> None:
    model = trained()
    model.end(2.0, failed=False)
    html = picture_bundle(model, 2.0)["text/html"]
    assert '<img src="data:image/svg+xml;base64,' in html
    assert "<script" not in html
    assert "own &lt;loss&gt;" in html
    text = plain_summary(model, 2.0)
    assert text.splitlines()[0] == "mirrored · 2 replicas · ended · 2.0 s"
    assert "loss: 1 → 0.02041" in text


def test_a_cell_without_curves_leaves_one_line() -> None:
    model = started()
    assert pictures(model) == {}
    model.end(3.0, failed=False)
    html = picture_bundle(model, 3.0)["text/html"]
    assert "<img" not in html
    assert "<table" not in html


# -- steps of values -------------------------------------------------------------------------------------------------


def points_of(model: LiveModel, name: str, replica: int = 0) -> list[tuple[float, float]]:
    return [point[:2] for point in model.curves[name].lines[replica].points]


def test_values_reported_in_a_training_step_have_that_step() -> None:
    model = started()
    for replica in (0, 1):
        points = [(0, 0, {"accuracy": 0.1})]  # evaluation, before the first step
        for step in range(1, 5):
            points += [(step, step, {"loss": 1 / step}), (step, step, {"loss": 2 / step}), (step, 0, {"rate": 0.1})]
        points.append((4, 0, {"accuracy": 0.9}))
        draw(model, *points, replica=replica)
    assert [step for step, _ in points_of(model, "loss")] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [step for step, _ in points_of(model, "rate")] == [1, 2, 3, 4]
    assert points_of(model, "accuracy") == [(0, 0.1), (4, 0.9)]
    assert not model.curves["loss"].differs


def test_values_without_training_are_numbered_by_call() -> None:
    model = started(1)
    draw(model, *((0, 0, {name: float(i)}) for i in range(3) for name in ("a", "b")))
    draw(model, *((1, call, {"in run": float(call)}) for call in (1, 1, 2, 3)), replica=1)
    assert [points_of(model, name) for name in ("a", "b")] == [[(0, 0), (1, 1), (2, 2)]] * 2
    assert [step for step, _ in points_of(model, "in run", 1)] == [1, 1, 2, 3]


def test_manual_updates_are_not_steps_and_are_aligned() -> None:
    model = started(1)
    draw(model, *(each for call in (1, 2, 3) for each in ((1, call, {"inner": 1.0}), (0, 0, {"outer": 1.0}))))
    assert [step for step, _ in points_of(model, "inner")] == [1, 2, 3]
    assert [step for step, _ in points_of(model, "outer")] == [1, 2, 3]


def test_steps_restart_in_each_cell() -> None:
    model = LiveModel(counted_before={0: (100, 1600), HERE: (50, 0)}, devices={0: "cuda:0"})
    draw(model, (101, 1, {"loss": 1.0}), (102, 2, {"loss": 0.5}), program=7)
    model.feed_local(LiveCall(point={"mine": 1.0}, place=(51, 0)), 0.0)
    model.feed_local(LiveCall(point={"mine": 2.0}, place=(52, 0)), 0.0)
    assert points_of(model, "loss") == [(1, 1.0), (2, 0.5)]
    assert points_of(model, "mine") == [(1, 1.0), (2, 2.0)]
    assert replica_table(model) == (["replica", "device", "loss", "mine"], [["0", "cuda:0", "0.5", "2"]])
    model.feed_local(LiveCall(point={"each": {0: 1.0, 1: 2.0}}, place=(52, 0)), 0.1)
    assert set(model.curves["each"].lines) == {0, 1}
