"""A stream of one replica: lines, carriage returns, nested bars."""

from __future__ import annotations

import io

import pytest

from distnb.notebook.output.screen import REOPEN_S, Screen


def feed(screen: Screen, *pieces: str, now: float = 0.0) -> list[str]:
    return [line for piece in pieces for line in screen.feed(piece, now)]


def test_newlines_finish_lines() -> None:
    screen = Screen()
    assert feed(screen, "one", " line\ntwo\nthr") == ["one line", "two"]
    assert screen.rows == ["thr"]
    assert screen.finish() == ["thr"]
    assert not screen.open


def test_empty_lines_are_kept() -> None:
    assert feed(Screen(), "\n\na\n") == ["", "", "a"]


def test_windows_newlines_are_line_ends() -> None:
    screen = Screen()
    assert feed(screen, "a\r\nb\r\n") == ["a", "b"]
    assert not screen.drawn


def test_colours_are_kept_and_cursor_codes_are_dropped() -> None:
    screen = Screen()
    blue = "\x1b[34mblue\x1b[0m"
    assert feed(screen, f"\x1b[?25l{blue}\r\x1b[2K", f"{blue}\x1b[?2", f"5h\n{blue}\n") == [blue, blue]


def test_carriage_return_rewrites_the_line() -> None:
    screen = Screen()
    assert feed(screen, "\r 10%", "\r 20%", "\r 30%") == []
    assert screen.rows == [" 30%"]
    assert screen.drawn


def test_shorter_text_keeps_the_rest_like_a_terminal() -> None:
    screen = Screen()
    feed(screen, "abcdef\rxy")
    assert screen.rows == ["xycdef"]


def test_a_finished_bar_settles_after_a_while() -> None:
    screen = Screen()
    assert feed(screen, "\r 10%\r100%\n", now=1.0) == []
    assert screen.pop_finished(1.0 + REOPEN_S / 2) == []
    assert screen.pop_finished(1.1 + REOPEN_S) == ["100%"]
    assert not screen.open


def test_erasing_and_moving_are_applied() -> None:
    screen = Screen()
    feed(screen, "hello\x08\x08\x1b[K!")
    assert screen.rows == ["hel!"]
    feed(screen, "\x08?")
    assert screen.rows == ["hel?"]


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_nested_tqdm_bars_end_as_in_a_terminal(chunk: int, leave: bool) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    written = io.StringIO()
    for _ in tqdm(range(3), desc="epoch", file=written, ncols=60, mininterval=0):
        for _ in tqdm(range(4), desc="batch", file=written, ncols=60, mininterval=0, leave=leave):
            pass
    text = written.getvalue()
    screen, lines = Screen(), []
    for at in range(0, len(text), chunk):
        lines += screen.feed(text[at : at + chunk], 0.0)
    assert lines == []
    final = screen.finish()
    assert [line.partition("|")[0] for line in final] == (["batch: 100%"] * 3 if leave else []) + ["epoch: 100%"]
    assert not any("\r" in line or "\x1b" in line for line in final)


def test_text_printed_after_a_bar_is_not_delayed() -> None:
    screen = Screen()
    assert feed(screen, "\r 10%\r100%\n", now=0.0) == []
    assert feed(screen, "a warning\n", now=0.01) == ["100%", "a warning"]
    assert not screen.drawn


def test_lines_written_above_a_bar_settle_while_it_goes_on() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    written = io.StringIO()
    screen, lines, at = Screen(), [], 0
    for step in tqdm(range(30), file=written, ncols=60, mininterval=0):
        if step % 10 == 0:
            tqdm.write(f"step {step}", file=written)
        lines += screen.feed(written.getvalue()[at:], step * 0.1)
        at = len(written.getvalue())
    assert [line.strip() for line in lines] == ["step 0", "step 10", "step 20"]
    assert len(screen.rows) == 1


def test_an_empty_line_below_an_empty_bar_is_a_line() -> None:
    screen = Screen()
    assert screen.feed("\n\r", 0.0) == []
    lines = screen.feed("\n", 0.2) + screen.feed("b", 0.4) + screen.feed("\rc\n", 0.6) + screen.finish()
    assert lines == ["", "", "c"]


def test_frames_of_several_lines_are_drawn_over_one_another_however_slowly() -> None:
    """Write as Rich does: text comes above a frame, and the cursor is hidden while there are frames."""
    screen = Screen()
    assert feed(screen, "before\n\x1b[?25l", "\r\x1b[2Kepoch 1\n  loss 3", now=1.0) == ["before"]
    assert feed(screen, "\r\x1b[2K\x1b[1A\x1b[2Kepoch 2\n  loss 2", now=2.0) == []
    assert screen.rows == ["epoch 2", "  loss 2"]
    assert feed(screen, "\r\x1b[2K\x1b[1A\x1b[2Kprinted\nepoch 2\n  loss 2", now=3.0) == []
    last = "\r\x1b[2K\x1b[1A\x1b[2Kepoch 3\n  loss 1\n\x1b[?25h"
    assert feed(screen, last, "after\n", now=4.0) == ["printed", "epoch 3", "  loss 1", "after"]
    assert not screen.open
