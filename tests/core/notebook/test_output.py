"""Merging the replicas' output and displays: events in, instructions out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distnb.notebook.output.displays import Area, Clear, Show, WriteText
from distnb.notebook.output.output_merger import FIRST_S, HOLD_S, OutputMerger
from distnb.wire.messages import Display, Output


def out(replica: int, text: str, stream: Any = "stdout") -> Output:
    return Output(engine=replica, program=1, replica=replica, stream=stream, text=text)


def png(replica: int, content: str, **keywords: Any) -> Display:
    return Display(
        engine=replica, program=1, replica=replica, data={"image/png": content, "text/plain": "<Figure>"}, **keywords
    )


def text_of(instructions: list[Any], stream: str = "stdout") -> str:
    return "".join(each.text for each in instructions if isinstance(each, WriteText) and each.stream == stream)


def test_equal_lines_are_shown_once_and_marked() -> None:
    merger = OutputMerger(4, "m")
    for replica in range(4):
        merger.feed(out(replica, "epoch 1\n"), 0.01 * replica)
    assert merger.collect(0.03) == [WriteText("stdout", "[0-3] epoch 1\n")]
    assert merger.idle


def merger_that_has_waited() -> OutputMerger:
    """Return a merger of a program in which only replica 0 has written anything before time 0."""
    merger = OutputMerger(2, "m")
    merger.feed(out(0, "only the chief's\n"), -FIRST_S)
    assert merger.collect(-0.01) == []
    assert text_of(merger.collect(0.0)) == "[0] only the chief's\n"
    return merger


def test_a_line_waits_briefly_for_its_duplicates() -> None:
    merger = merger_that_has_waited()
    merger.feed(out(0, "hello\n"), 0.0)
    assert merger.collect(HOLD_S - 0.01) == []
    assert merger.collect(HOLD_S) == [WriteText("stdout", "[0] hello\n")]


def test_a_duplicate_within_the_hold_is_folded() -> None:
    merger = merger_that_has_waited()
    merger.feed(out(0, "hello\n"), 0.0)
    merger.collect(0.05)
    merger.feed(out(1, "hello\n"), HOLD_S - 0.01)
    assert text_of(merger.collect(HOLD_S - 0.01)) == "[0-1] hello\n"


def test_the_first_lines_wait_for_engines_that_begin_late() -> None:
    merger = OutputMerger(2, "m")
    for line in range(3):
        merger.feed(out(0, f"{line}\n"), line)
        assert merger.collect(line + 0.8) == []
        merger.feed(out(1, f"{line}\n"), line + 0.8)
        assert text_of(merger.collect(line + 0.8)) == f"[0-1] {line}\n"


def test_after_a_late_duplicate_lines_wait_longer() -> None:
    merger = merger_that_has_waited()
    merger.feed(out(0, "24\n"), 0.0)
    assert text_of(merger.collect(HOLD_S)) == "[0] 24\n"
    merger.feed(out(1, "24\n25\n"), 0.3)
    assert text_of(merger.collect(0.3 + HOLD_S)) == ""
    merger.feed(out(0, "25\n"), 0.8)
    assert text_of(merger.collect(0.9)) == "[1] 24\n[0-1] 25\n"


def test_different_lines_are_released() -> None:
    merger = merger_that_has_waited()
    merger.feed(out(0, "loss 0.1\n"), 0.0)
    merger.feed(out(1, "loss 0.2\n"), 0.1)
    assert text_of(merger.collect(HOLD_S)) == "[0] loss 0.1\n"
    assert text_of(merger.collect(0.1 + HOLD_S)) == "[1] loss 0.2\n"


def test_a_shared_line_may_move_behind_a_line_of_one_replica() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(out(0, "100% 19.7it/s\ncareful\n"), 0.0)
    merger.feed(out(1, "100% 19.9it/s\ncareful\n"), 0.1)
    assert text_of(merger.collect(FIRST_S)) == "[0] 100% 19.7it/s\n[1] 100% 19.9it/s\n[0-1] careful\n"


def test_a_slow_replica_does_not_delay_others() -> None:
    merger, shown = merger_that_has_waited(), ""
    for tick in range(100):
        now = tick * 0.05
        merger.feed(out(0, f"fast {tick}\n"), now)
        if tick % 10 == 0:
            merger.feed(out(1, f"slow {tick}\n"), now)
        shown += text_of(merger.collect(now))
        assert f"fast {tick - 4}\n" in shown or tick < 4


def test_each_replicas_order_is_kept() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(out(0, "a\nb\n"), 0.0)
    merger.feed(out(1, "b\na\n"), 0.0)
    assert text_of(merger.collect(1.0)) == "[0] a\n[0-1] b\n[1] a\n"


def test_the_order_does_not_depend_on_timing() -> None:
    merger = OutputMerger(3, "m")
    for replica, now in ((2, 0.0), (0, 0.02), (1, 0.04)):
        merger.feed(out(replica, f"start\nI am {replica}\n"), now)
        assert "I am" not in text_of(merger.collect(now))
    assert text_of(merger.collect(FIRST_S)) == "[0] I am 0\n[1] I am 1\n[2] I am 2\n"


def test_repeated_lines_pair_in_order() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(out(0, "x\nx\nx\n"), 0.0)
    merger.feed(out(1, "x\nx\n"), 0.0)
    assert text_of(merger.collect(1.0)) == "[0-1] x\n[0-1] x\n[0] x\n"


def test_marks_name_the_replicas() -> None:
    merger = OutputMerger(5, "m")
    for replica in (0, 1, 3):
        merger.feed(out(replica, "x\n"), 0.0)
    assert text_of(merger.collect(1.0)) == "[0-1,3] x\n"


def test_one_replica_is_not_marked_and_never_waits() -> None:
    merger = OutputMerger(1, "m")
    merger.feed(out(0, "x\n"), 0.0)
    assert text_of(merger.collect(0.0)) == "x\n"


def test_an_ended_replica_is_not_waited_for() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(out(1, "unfinished"), 0.0)
    merger.ended(1, 0.0)
    merger.feed(out(0, "hello\n"), 0.0)
    assert text_of(merger.collect(0.0)) == "[0] hello\n"
    merger.ended(0, 0.0)
    assert text_of(merger.collect(0.0)) == "[1] unfinished\n"


def test_streams_remain_separate_and_in_order() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(out(replica, "a\n"), 0.0)
        merger.feed(out(replica, "careful\n", "stderr"), 0.0)
        merger.feed(out(replica, "b\n"), 0.0)
    assert merger.collect(0.0) == [
        WriteText("stdout", "[0-1] a\n"),
        WriteText("stderr", "[0-1] careful\n"),
        WriteText("stdout", "[0-1] b\n"),
    ]


def test_partial_lines_appear_in_the_area_and_end_as_lines() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(out(0, "..."), 0.0)
    assert merger.collect(0.05) == []
    assert merger.collect(0.5) == [Area(("[0] ...",))]
    merger.feed(out(0, "done\n"), 0.6)
    final = merger.collect(0.6 + FIRST_S)
    assert final == [WriteText("stdout", "[0] ...done\n"), Area(())]


def test_progress_bars_have_one_line_per_replica() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(out(replica, "\r 10%|#", "stderr"), 0.0)
        merger.feed(out(replica, f"\r {20 + replica}%|##", "stderr"), 0.02)
    assert merger.collect(0.5) == [Area(("[0]  20%|##", "[1]  21%|##"))]
    for replica in range(2):
        merger.feed(out(replica, "\r100%|##########\n", "stderr"), 1.0)
    merger.collect(1.0)
    assert text_of(merger.collect(1.3), "stderr") == "[0-1] 100%|##########\n"
    assert merger.collect(1.6) == [] or merger.collect(1.6) == [Area(())]


def test_equal_progress_is_folded() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(out(replica, "\r 10%\r 20%", "stderr"), 0.0)
    assert merger.collect(0.5) == [Area(("[0-1]  20%",))]


def test_the_final_collection_holds_nothing_back() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(out(0, "a\nunfinished"), 0.0)
    assert text_of(merger.collect(0.0, final=True)) == "[0] a\n[0] unfinished\n"


def test_plain_values_are_shown_as_lines() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(Display(engine=replica, program=1, replica=replica, data={"text/plain": "first\nsecond"}), 0.0)
    assert text_of(merger.collect(0.0)) == "[0-1] first\n      second\n"


def test_a_flood_is_truncated_and_reported() -> None:
    merger = OutputMerger(2, "m")
    shown = []
    for tick in range(100):
        now = tick * 0.05
        for replica in range(2):
            text = "".join(f"line {tick * 1_000 + i}\n" for i in range(1_000))
            merger.feed(out(replica, text), now)
        shown += merger.collect(now)
    shown += merger.collect(6.0, final=True)
    text = text_of(shown)
    assert text.count("\n") < 3_000
    assert "… left out: " in text
    assert "%distnb output" in text
    assert "line 99999" in text  # the last one is there


def test_the_number_of_omitted_lines_is_exact() -> None:
    merger = OutputMerger(1, "m")
    merger.feed(out(0, "".join(f"{i}\n" for i in range(4_000))), 0.0)
    text = text_of(merger.collect(0.0, final=True))
    assert text.startswith("0\n1\n")
    left_out = [int(line.split()[3].replace(",", "")) for line in text.splitlines() if line.startswith("…")]
    assert text.count("\n") - len(left_out) + sum(left_out) == 4_000


def test_a_flood_of_figures_is_truncated_and_reported() -> None:
    merger = OutputMerger(1, "m")
    for number in range(200):
        merger.feed(png(0, f"figure {number}"), 0.0)
    shown = merger.collect(0.0, final=True)
    assert sum(isinstance(each, Show) for each in shown) == 50
    assert text_of(shown).startswith("… left out: 150 of the")


def test_a_very_long_line_is_cut() -> None:
    merger = OutputMerger(1, "m")
    merger.feed(out(0, "x" * 100_000 + "\n"), 0.0)
    text = text_of(merger.collect(1.0, final=True))
    assert len(text) < 21_000
    assert "80,000 more characters" in text


def test_equal_figures_are_shown_once() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(png(replica, "AAAA"), 0.0)
    (shown,) = merger.collect(0.0)
    assert isinstance(shown, Show)
    assert shown.bundle.data == {"image/png": "AAAA", "text/plain": "<Figure>"}


def test_different_figures_are_shown_next_to_each_other() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(png(0, "AAAA"), 0.0)
    merger.feed(png(1, "BBBB"), 0.05)
    (shown,) = merger.collect(0.05)
    html = shown.bundle.data["text/html"]
    assert html.index("[0]") < html.index("AAAA") < html.index("[1]") < html.index("BBBB")


def test_a_late_figure_updates_the_display() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(png(0, "AAAA"), 0.0)
    (first,) = merger.collect(FIRST_S)
    assert "[0]" in first.bundle.data["text/html"]
    merger.feed(png(1, "AAAA"), 5.0)
    (change,) = merger.collect(6.0)
    assert change.update
    assert change.name == first.name
    assert change.bundle.data["image/png"] == "AAAA"


def test_a_figure_of_the_chief_alone_does_not_shift_others() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(png(1, "BBBB", site=b"all"), 0.0)
    merger.feed(png(0, "only the chief's", site=b"chief"), 0.1)
    merger.feed(png(0, "BBBB", site=b"all"), 0.2)
    shown = merger.collect(1.0)
    first, second = (each.bundle.data for each in shown if isinstance(each, Show))
    assert "[0]" in first["text/html"]
    assert second["image/png"] == "BBBB"


def test_display_ids_are_updated() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(
            Display(
                engine=replica,
                program=1,
                replica=replica,
                data={"text/html": "<b>0</b>"},
                transient={"display_id": f"r{replica}"},
            ),
            0.0,
        )
    (shown,) = merger.collect(0.0)
    assert shown.bundle.data["text/html"] == "<b>0</b>"
    for replica in range(2):
        merger.feed(
            Display(
                engine=replica,
                program=1,
                replica=replica,
                data={"text/html": f"<b>{replica}</b>"},
                transient={"display_id": f"r{replica}"},
                update=True,
            ),
            1.0,
        )
    (change,) = merger.collect(1.0)
    assert change.update
    assert "<b>1</b>" in change.bundle.data["text/html"]


def test_clear_output_of_all_clears_the_cell() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(out(replica, "old\n"), 0.0)
        merger.feed(Display(engine=replica, program=1, replica=replica, data={}, clear="wait"), 0.0)
        merger.feed(png(replica, "new"), 0.0)
    instructions = merger.collect(0.0)
    assert instructions[0] == Clear(True)
    assert isinstance(instructions[1], Show)
    assert text_of(instructions) == ""


def test_clear_output_of_one_removes_its_displays_only() -> None:
    merger = OutputMerger(2, "m")
    merger.feed(png(0, "AAAA"), 0.0)
    merger.feed(png(1, "BBBB"), 0.0)
    merger.collect(0.5)
    merger.feed(Display(engine=0, program=1, replica=0, data={}, clear="now"), 1.0)
    (change,) = merger.collect(2.0)
    assert change.update
    assert "AAAA" not in change.bundle.data["text/html"]
    assert "BBBB" in change.bundle.data["text/html"]


def test_a_loop_that_clears_and_draws_shows_the_last_figure() -> None:
    merger = OutputMerger(2, "m")
    shown: dict[str, str] = {}
    for step in range(50):
        now = step * 0.1
        for replica in range(2):
            merger.feed(Display(engine=replica, program=1, replica=replica, data={}, clear="wait"), now)
            merger.feed(png(replica, f"figure {step}"), now)
        for each in merger.collect(now):
            if isinstance(each, Clear):
                shown.clear()
            elif isinstance(each, Show):
                shown[each.name] = str(each.bundle.data.get("image/png"))
    assert list(shown.values()) == ["figure 49"]


def test_a_loop_that_clears_and_draws_is_never_truncated() -> None:
    merger = OutputMerger(1, "m")
    for step in range(300):
        merger.feed(Display(engine=0, program=1, replica=0, data={}, clear="wait"), step * 0.01)
        merger.feed(png(0, f"figure {step}"), step * 0.01)
        shown = merger.collect(step * 0.01)
        assert [type(each) for each in shown] == [Clear, Show]


def test_widgets_are_stacked_with_marks() -> None:
    merger = OutputMerger(2, "m")
    view = "application/vnd.jupyter.widget-view+json"
    for replica in (0, 1):
        data = {
            view: {"model_id": str(replica)},
            "text/plain": "HTML()",
            "text/html": "<b>as a page without widgets has it</b>",
        }
        merger.feed(Display(engine=replica, program=1, replica=replica, data=data), 0.0)
    shown = [each.bundle.data for each in merger.collect(1.0) if isinstance(each, Show)]
    assert [each.get(view, {"model_id": each["text/plain"]})["model_id"] for each in shown] == ["[0]", "0", "[1]", "1"]


class Page:
    """A page that carries out instructions: the plain texts of its displays, in order."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def follow(self, instructions: list[Any]) -> list[str]:
        for each in instructions:
            assert isinstance(each, Show)
            assert each.update == (each.name in self._texts)
            self._texts[each.name] = each.bundle.data["text/plain"]
        return [text for text in self._texts.values() if text]


def plotly(replica: int, title: str, site: bytes = b"fig.show()") -> Display:
    html = f"<div id='{random.random()}'></div>"
    data = {"application/vnd.plotly.v1+json": {"layout": title}, "text/html": html, "text/plain": title}
    return Display(engine=replica, program=1, replica=replica, data=data, site=site)


def test_other_rich_displays_are_shown_once_or_marked() -> None:
    merger = OutputMerger(2, "m")
    for replica in range(2):
        merger.feed(plotly(replica, "x"), 0.0)
    merger.feed(plotly(1, "y", b"if chief"), 0.0)
    assert Page().follow(merger.collect(1.0)) == ["x", "[1]", "y"]


def test_displays_that_cannot_be_combined_are_in_the_order_of_the_replicas() -> None:
    merger, page = OutputMerger(3, "m"), Page()
    merger.feed(plotly(1, "b"), 0.0)
    assert page.follow(merger.collect(2.0)) == ["[1]", "b"]
    merger.feed(plotly(0, "a"), 2.0)
    assert page.follow(merger.collect(4.0)) == ["[0]", "a", "[1]", "b"]
    merger.feed(plotly(2, "b"), 4.0)
    assert page.follow(merger.collect(6.0)) == ["[0]", "a", "[1-2]", "b"]


def test_late_equal_displays_are_shown_once() -> None:
    merger, page = OutputMerger(2, "m"), Page()
    merger.feed(plotly(1, "x"), 0.0)
    page.follow(merger.collect(2.0))
    merger.feed(plotly(0, "x"), 2.0)
    assert page.follow(merger.collect(4.0)) == ["x"]


def test_figures_of_one_line_are_shown_together() -> None:
    merger = OutputMerger(2, "m")
    for replica in (1, 0):
        for number in range(3):
            merger.feed(png(replica, f"{number} of {replica}", site=b"in a loop"), 0.0)
    rows = [each.bundle.data["text/html"] for each in merger.collect(0.0) if isinstance(each, Show)]
    assert len(rows) == 3
    for number, row in enumerate(rows):
        assert [row.find(f"{number} of {replica}") > 0 for replica in range(2)] == [True, True]


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_lost_and_orders_are_kept(seed: int) -> None:
    chance = random.Random(seed)
    replicas = chance.randint(1, 4)
    said = {r: [f"line {chance.randint(0, 5)}" for _ in range(chance.randint(0, 30))] for r in range(replicas)}
    rest = {r: "".join(line + "\n" for line in lines) for r, lines in said.items()}
    merger, now, text = OutputMerger(replicas, "m"), 0.0, ""
    while any(rest.values()):
        replica = chance.choice([r for r in rest if rest[r]])
        cut = chance.randint(1, 40)
        merger.feed(out(replica, rest[replica][:cut]), now)
        rest[replica] = rest[replica][cut:]
        now += chance.random() * 0.1
        text += text_of(merger.collect(now))
    text += text_of(merger.collect(now, final=True))
    shown_lines: dict[int, list[str]] = {r: [] for r in range(replicas)}
    for line in text.splitlines():
        for replica in range(replicas):
            if replicas == 1 or replica in _marked(line):
                shown_lines[replica].append(line if replicas == 1 else line.partition("] ")[2])
    assert shown_lines == said


def _marked(line: str) -> set[int]:
    found: set[int] = set()
    for part in line[1 : line.index("]")].split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
