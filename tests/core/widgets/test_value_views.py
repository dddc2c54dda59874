"""The drawing of values, places and devices from the processes' reports."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import torch

from distnb.notebook.output.displays import Show
from distnb.notebook.output.output_merger import OutputMerger
from distnb.runtime.inspection.inspecting import inspect
from distnb.values import Mirrored, PerReplica
from distnb.views.devices_model import DevicesModel
from distnb.views.placement_model import PlacementModel
from distnb.views.value_model import ValueModel
from distnb.widgets.value_views.devices_html import devices_html, devices_text
from distnb.widgets.value_views.placement_html import placement_html, placement_text
from distnb.widgets.value_views.placement_picture import placement_svg
from distnb.widgets.value_views.showing import drawn
from distnb.widgets.value_views.value_html import value_html
from distnb.widgets.value_views.value_text import value_text
from distnb.wire.messages import Display, MemoryUse
from distnb.wire.value_facts import PLACEMENT, VALUE, Bounds, Holding, Inspected

RED = "#ef4444"


def model(kind: str, *values: object, **others: object) -> ValueModel:
    return ValueModel(kind=kind, size=len(values), components=dict(enumerate(map(inspect, values))), **others)  # type: ignore[arg-type]


def rows_of(page: str) -> int:
    return page.count("<tr") - page.count("<thead>")


# -- values ---------------------------------------------------------------------------------------------------------


def test_equal_components_share_a_row() -> None:
    one, other = torch.arange(3.0), torch.arange(3.0) + 1
    page = value_html(model("PerReplica", one, one.clone(), other, one.clone()))
    assert rows_of(page) == 2
    assert "replicas 0–1, 3" in page
    assert "replica 2" in page
    assert RED not in page, "components of a PerReplica may differ"
    text = value_text(model("PerReplica", one, one.clone(), other, one.clone()))
    assert text.splitlines()[1].startswith("  replicas 0–1, 3: Tensor (3,) float32 cpu")
    assert "= [0., 1., 2.]" in text


def test_devices_do_not_count_as_a_difference() -> None:
    described = inspect(torch.ones(2))
    devices = {replica: described._replace(device=f"cuda:{replica}") for replica in range(2)}
    page = value_html(ValueModel(kind="Mirrored", size=2, components=devices))
    assert rows_of(page) == 1
    assert "cuda:0, cuda:1" in page


def test_drift_is_marked_and_described() -> None:
    equal = [torch.nn.Linear(2, 2) for _ in range(3)]
    for each in equal:
        each.load_state_dict(equal[0].state_dict())
    assert RED not in value_html(model("Mirrored", *equal))
    with torch.no_grad():
        equal[1].bias[0] += 1
    drifted = model("Mirrored", *equal)
    assert drifted.drifted == (1,)
    page = value_html(drifted)
    assert "DRIFT: replica 1 differs from replica 0" in page
    assert re.search(rf'<span style="color:{RED}">replica 1</span>', page)
    assert page.count(">drift<") == 1, "the weight has not drifted"
    assert "← drift" in value_text(drifted)
    assert not model("PerReplica", *equal).drifted
    assert not model("Mirrored", *equal, together=True).drifted, "parts of one value may differ"


def test_values_that_cannot_be_compared_are_not_drift() -> None:
    unknown = [inspect(object()) for _ in range(2)]
    assert not ValueModel(kind="Mirrored", size=2, components=dict(enumerate(unknown))).drifted


def test_nan_and_infinity_are_flagged() -> None:
    page = value_html(model("PerReplica", torch.tensor([1.0, math.nan, math.inf])))
    assert f'<span style="color:{RED}">⚠ 1 nan, 1 inf</span>' in page
    assert "⚠ 1 nan, 1 inf" in value_text(model("PerReplica", torch.tensor([1.0, math.nan, math.inf])))
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 0] = math.nan
    assert "⚠ not finite" in value_html(model("Mirrored", module))
    assert "⚠" not in value_html(model("Mirrored", torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())))


def test_structures_are_shown_as_trees_with_escaped_text() -> None:
    page = value_html(model("PerReplica", {"<b>": [torch.ones(2), "<script>"]}, {"<b>": [torch.ones(2), "other"]}))
    assert page.count("<details") == 2
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>[&#x27;&lt;b&gt;&#x27;]</b>" in page
    assert value_text(model("PerReplica", {"a": 1}, {"b": 2})).splitlines()[1:] == [
        "  replica 0: dict, 1 item",
        "  replica 1: dict, 1 item",
        "    replica 0: ['a'] 1",
        "    replica 1: ['b'] 2",
    ]


def test_absent_components_are_reported() -> None:
    page = value_html(ValueModel(kind="PerReplica", size=2, components={0: inspect(1)}, absent={1: "<unassigned>"}))
    assert "replica 1: &lt;unassigned&gt;" in page


def test_pictures_are_shown_next_to_each_other() -> None:
    images = [torch.rand(3, 20, 20) for _ in range(3)]
    page = value_html(model("PerReplica", *images))
    assert page.count('<img src="data:image/png;base64,') == 3
    assert page.count("display:inline-block;vertical-align:top") == 3
    assert 'alt="Tensor (3, 20, 20) of replica 2"' in page


def test_a_sample_is_marked_as_a_sample() -> None:
    described = inspect(torch.ones(2_200, 2_200))
    assert "a sample of " in value_html(ValueModel(kind="PerReplica", size=1, components={0: described}))


def test_values_of_this_process_are_drawn() -> None:
    page = PerReplica([torch.ones(2), torch.zeros(2)])._repr_html_()
    assert "PerReplica on 2 replicas" in page
    assert rows_of(page) == 2
    assert "DRIFT" in Mirrored([torch.ones(2), torch.zeros(2)])._repr_html_()


# -- several replicas' displays are one --------------------------------------------------------------------------------


def display(replica: int, site: bytes, value: float, size: int = 2) -> Display:
    described = {"kind": "PerReplica", "size": size, "replicas": {replica: inspect(value)}}
    data = {VALUE: described, "text/plain": "…"}
    return Display(engine=replica, program=1, replica=replica, data=data, site=site)


def shown(merger: OutputMerger, now: float) -> list[dict[int, Inspected]]:
    latest = {each.name: each.bundle.data for each in merger.collect(now, final=True) if isinstance(each, Show)}
    return [each[VALUE]["replicas"] for each in latest.values()]


def test_displays_of_one_line_form_one_value() -> None:
    merger = OutputMerger(2, "m")
    for site in (b"line 1", b"line 2"):
        merger.feed(display(0, site, 0.0), 0.0)
    merger.collect(5.0)
    for site in (b"line 1", b"line 2"):
        merger.feed(display(1, site, 1.0), 5.0)
    assert [sorted(each) for each in shown(merger, 5.0)] == [[0, 1], [0, 1]], "even if the other display is late"


def test_a_display_of_one_replica_alone_is_separate() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(display(0, b"if chief", 0.0), 0.0)
    merger.feed(display(0, b"all", 1.0), 0.0)
    merger.feed(display(1, b"all", 2.0), 0.0)
    assert sorted(sorted(each) for each in shown(merger, 1.0)) == [[0], [0, 1]]


def test_displays_in_a_loop_are_matched_by_iteration() -> None:
    merger = OutputMerger(2, "m")
    for step in range(3):
        merger.feed(display(0, b"loop", step), 0.0)
    for step in range(3):
        merger.feed(display(1, b"loop", step), 1.0)
    for each in shown(merger, 2.0):
        assert each[0].text == each[1].text


def test_reports_become_pages_and_texts() -> None:
    data = drawn(display(0, b"", 1.5).data)
    assert sorted(data) == ["text/html", "text/plain"]
    assert "1.5" in data["text/plain"]
    described = {
        "kind": "Linear",
        "size": 1,
        "replicas": {0: (Holding(name="w", whole=(2,), bounds=((0, 2),), kind="copy"),)},
    }
    assert "mirrored copy" in drawn({PLACEMENT: described})["text/html"]
    assert drawn({"text/plain": "x"}) == {"text/plain": "x"}


# -- places -----------------------------------------------------------------------------------------------------------


def shard(bounds: Bounds, whole: tuple[int, ...] = (4, 6), kind: str = "shard") -> Holding:
    return Holding(name="w", whole=whole, bounds=bounds, kind=kind, dtype="float32", device="cpu", nbytes=8)  # type: ignore[arg-type]


def place(*held: Holding) -> PlacementModel:
    return PlacementModel.of("it", len(held), {replica: (each,) for replica, each in enumerate(held)})


def test_copies_share_a_row_and_count_each() -> None:
    copies = place(*[shard(((0, 4), (0, 6)), kind="copy")] * 4)
    (tensor,) = copies.tensors
    assert [part.who for part in tensor.parts] == ["replicas 0–3"]
    assert tensor.nbytes == 32
    assert placement_text(copies).splitlines()[0] == "it · each of 4 replicas: 8 B"
    assert "<img" not in placement_html(copies), "nothing is truncated"


def test_shared_memory_is_counted_once() -> None:
    text = placement_text(place(*[shard(((0, 4), (0, 6)), kind="shared")] * 2))
    assert text.splitlines()[0] == "it · shared memory: 8 B"


def test_a_grid_shows_the_part_of_each_replica() -> None:
    quarters = [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))]
    model = place(*map(shard, quarters))
    (tensor,) = model.tensors
    assert tensor.cut_axes == (0, 1)
    boxes = [line.split("|")[1:-1] for line in placement_text(model).splitlines() if line.startswith("|")]
    assert [[each.strip() for each in row] for row in boxes] == [["0", "1"], ["2", "3"]]
    svg = placement_svg(tensor)
    assert svg.count("<rect") == 4
    assert "[0:2, 3:6]" in placement_text(model)


def test_replicated_shards_are_named_together_and_uneven_ones_to_scale() -> None:
    model = place(*(shard(bounds) for bounds in [((0, 3), (0, 6)), ((0, 3), (0, 6)), ((3, 4), (0, 6))]))
    svg = placement_svg(model.tensors[0])
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg)]
    assert len(widths) == 2
    assert widths[0] > 2 * widths[1]
    assert ">0–1<" in svg


def test_names_on_cells_are_legible_whatever_the_theme() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    svg = placement_svg(place(*(shard(((at, at + 1), (0, 6)), (8, 6)) for at in range(8))).tensors[0])
    cells = re.findall(r'<rect [^>]*fill="(#[0-9a-f]{6})"/><text [^>]*fill="(#[0-9a-f]{6})"', svg)
    assert len({ground for ground, _ in cells}) == 8, "opaque, and one colour for each"
    for ground, ink in cells:
        assert (luminance(ground) + 0.05) / (luminance(ink) + 0.05) >= 7


def test_more_axes_make_more_grids() -> None:
    whole = (2, 2, 2)
    parts = [tuple((at >> axis & 1, (at >> axis & 1) + 1) for axis in (2, 1, 0)) for at in range(8)]
    model = place(*(shard(each, whole) for each in parts))
    assert placement_svg(model.tensors[0]).count("axis 0: ") == 2
    assert placement_text(model).count("axis 0: ") == 2


def test_a_replica_without_rows_is_reported() -> None:
    model = place(shard(((0, 1),), (1,), "rows"), shard(((1, 1),), (1,), "rows"))
    text = placement_text(model)
    assert "row 0" in text
    assert "nothing" in text
    placement_html(model)


# -- devices ----------------------------------------------------------------------------------------------------------


def test_memory_is_divided_into_engines_others_and_free() -> None:
    rows = [SimpleNamespace(engine=i, device=f"cuda:{i}", host="here", task="", state="idle") for i in range(2)]
    rows[1].state = "was killed"
    described = {
        0: MemoryUse(engine=0, rss=100, host_free=500, host_total=1000, allocated=30, device_free=20, device_total=90)
    }
    model = DevicesModel.of(rows, described, {0: {"model": 2_000, "x": 5}}, idle=["cuda:1", "cuda:2"])  # type: ignore[arg-type]
    host, device = model.memories
    assert (host.used, host.others, host.free) == ({"engine 0": 100}, 400, 500)
    assert (device.name, device.others) == ("cuda:0", 40)
    text = devices_text(model)
    assert "cuda:0  engine 0" in text
    assert "model 2.0 kB, x 5 B" in text
    assert "cuda:1  engine 1 (was killed)" in text
    assert "cuda:2  –" in text
    assert "free: 20 B of 90 B" in text
    assert devices_html(model).count("<img") == 2


def test_devices_without_a_cluster_show_the_machine() -> None:
    (memory,) = DevicesModel.without_engines(["cpu:0"]).memories
    assert 0 < memory.free < memory.total
