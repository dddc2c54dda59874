"""Events of replicas as a cell's view receives them, and a publisher that records what the cell shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distnb.topology import Device, Team
from distnb.views.chart_model import charts
from distnb.views.live_model import LiveModel
from distnb.widgets.picture import picture
from distnb.widgets.publisher import Publisher
from distnb.wire.messages import Live, Status, TelemetrySample


def team_of(replicas: int) -> Team:
    """Return a team of engines on this machine's processor."""
    devices = tuple(Device("cpu", replica) for replica in range(replicas))
    return Team(engines=tuple(range(replicas)), devices=devices, generation=1, store_host="", store_port=0)


def started(replicas: int = 2, **options: Any) -> LiveModel:
    """Return the model of a cell whose program has started."""
    model = LiveModel("mirrored", **options)
    model.feed(Status(program=1, state="started", team=team_of(replicas)), 0.0)
    return model


def sample(replica: int = 0, seconds: float = 0.2, **more: Any) -> TelemetrySample:
    """Return a sample of a replica after some seconds."""
    values = {"program": 1, "steps": 0, "examples": 0, "rss_nbytes": 10, **more}
    return TelemetrySample(engine=replica, replica=replica, seconds=seconds, **values)


def draw(
    model: LiveModel, *points: tuple[int, int, Mapping[str, float]], replica: int = 0, program: int = 1, **more: Any
) -> None:
    """Feed points of a replica: a step, the number of the call, and values by name."""
    model.feed(Live(engine=replica, program=program, replica=replica, points=points, **more), 0.1)


def draw_curves(model: LiveModel, *, replica: int = 0, run: str = "", first: int = 1, **curves: list[float]) -> None:
    """Feed steps from `first` on, each with a value for each curve, one a second."""
    rows = zip(*curves.values(), strict=True)
    points = [(first + place, 0, dict(zip(curves, row, strict=True))) for place, row in enumerate(rows)]
    draw(model, *points, replica=replica, run=run, times=tuple(range(len(points))))


class Recorded(Publisher):
    """A cell without a front end.

    Attributes:
        text: The written text.
        shown: The data of each display and of each change of one, and the unfinished lines.
    """

    def __init__(self) -> None:
        self.text = ""
        self.shown: list[Mapping[str, Any]] = []

    def write(self, stream: str, text: str) -> None:
        self.text += text

    def display(self, name: str, data: Mapping[str, Any], metadata: Any, *, update: bool = False) -> None:
        self.shown.append(data)

    def area(self, lines: tuple[str, ...]) -> None:
        self.shown += [{"text/plain": line} for line in lines]

    def clear(self, wait: bool) -> None:
        pass


def pictures(model: LiveModel) -> dict[str, str]:
    """Return every chart of a model as an SVG document, by name."""
    drawn = charts(model)
    return {chart.name: picture(chart, wide=len(drawn) == 1) for chart in drawn}
