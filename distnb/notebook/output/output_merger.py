"""The output of all replicas, merged into that of one cell: events in, instructions out, no IO and no clock.

Lines that several replicas write within `HOLD_S` are shown once, marked with whose they are; each replica's own order
is kept. Figures are completed after they are shown; unfinished lines (progress bars) are shown in an area of their
own until they end.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from distnb.notebook.output.displays import (
    Area,
    Bundle,
    Clear,
    Instruction,
    Show,
    Stream,
    Write,
    align,
    combine,
    is_figure,
    plain_text,
)
from distnb.notebook.output.screen import Screen
from distnb.notebook.output.weave import Step, Weave
from distnb.notebook.output.wording import mark
from distnb.wire.messages import Display, Output

__all__ = ["HOLD_S", "OutputMerger"]

HOLD_S = 0.15
"""A line waits at most this long for its doubles."""

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_AREA_S = 0.1  # the unfinished lines are drawn anew at most ten times a second
_CHANGE_S = 0.2  # and a display that was changed at most five times
_PARTIAL_S = 0.4  # a line without an end is shown after so long
_LONGEST_LINE = 20_000
_OPEN_FIGURES = 20  # so many of the latest figures may still be paired anew
_BURST, _LINES_AGAIN = 1_000, 100  # lines of each replica that may come at once, and more at each collection
_TAIL = 20  # of the lines left out, so many last ones are shown when the cell ends


@dataclass
class _Slot:
    """A place for one display: of the replicas' figures that belong together, or of one named by the user."""

    name: str
    group: dict[int, Bundle] = field(default_factory=dict)
    shown: str | None = None  # digest of what is shown
    changed: float = 0.0
    dirty: bool = False
    step: _Entry | None = None


_Content = str | _Slot | Bundle | int
"""A step of the merged sequence: a text, a figure's place, another rich display, or a number of lines left out."""

_Entry = Step[_Content]


class _Pace:
    """A token bucket that, once empty, stays shut until it has filled up a good part.

    Without that, a flood would let single lines through, each with a note about those left out around it.

    Args:
        burst: Units that may come at once.
        per_second: Units that it gains in a second.
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._reopen = min(burst, 2 * per_second)
        self._level = burst
        self._then: float | None = None
        self._shut = False

    def take(self, units: float, now: float) -> bool:
        """Take so many units, or none and False."""
        if self._then is not None:
            self._level = min(self._burst, self._level + (now - self._then) * self._per_second)
        self._then = now
        self._shut = units > self._level or (self._shut and self._level < self._reopen)
        if not self._shut:
            self._level -= units
        return not self._shut


class OutputMerger:
    """Merges what replicas write and show.

    Args:
        total: Replicas that take part; with one, nothing is marked.
        name: Prefix of the names of its displays, unique in the notebook.
    """

    def __init__(self, total: int, name: str) -> None:
        self._total = total
        self._name = name
        self._weave: Weave[_Content] = Weave(total, HOLD_S if total > 1 else 0.0)
        self._screens: dict[tuple[int, Stream], Screen] = {}
        self._slots: list[_Slot] = []  # of figures not yet complete on every replica
        self._figures: dict[int, list[Bundle]] = {}
        self._named: defaultdict[int, dict[str, _Slot]] = defaultdict(dict)  # by replica, and by its own names
        self._named_slots: list[_Slot] = []
        self._all_slots: list[_Slot] = []
        self._numbers = itertools.count()
        self._seen: set[int] = set()  # replicas with output since the last clearing
        self._area: tuple[str, ...] = ()
        self._area_drawn = 0.0
        self._fed: Counter[int] = Counter()  # lines of each replica, of late
        self._skipped: dict[tuple[int, Stream], tuple[int, str]] = {}  # how many lines are left out, and the end
        self._lines = _Pace(1_000, 50)
        self._displays = _Pace(60, 2)
        self._omitted = self._omitted_displays = 0
        self._omitting: set[int] = set()
        self._tail: deque[_Entry] = deque(maxlen=_TAIL)

    # -- events in -------------------------------------------------------------------------------------------------

    def feed(self, event: Output | Display, now: float) -> None:
        """Take an event of a replica.

        Args:
            event: What it wrote or showed.
            now: Seconds of the same steady clock as `collect`'s.
        """
        if not 0 <= event.replica < self._total:
            return
        if isinstance(event, Output):
            self._feed_text(event.replica, event.stream, event.text, now)
        elif event.clear != "no":
            self._weave.add(("clear", event.clear), event.replica, "", now)
        else:
            self._feed_display(event, now)

    def ended(self, replica: int, now: float) -> None:
        """A replica will write no more: nobody waits for it, and its unfinished lines are finished."""
        for stream in _STREAMS:
            key = (replica, stream)
            self._unskip(key, now)
            if key in self._screens:
                self._add_lines(*key, self._screens[key].finish(), now)
        self._weave.active.discard(replica)

    def _feed_text(self, replica: int, stream: Stream, text: str, now: float) -> None:
        key = (replica, stream)
        screen = self._screens.setdefault(key, Screen())
        room = max(0, _BURST - self._fed[replica])
        lines = text.count("\n")
        self._fed[replica] += min(lines, room)
        if lines > room:
            parts = text.split("\n", room)
            if room > 0:
                self._unskip(key, now)
            self._add_lines(replica, stream, screen.feed("".join(part + "\n" for part in parts[:-1]), now), now)
            self._skip(key, parts[-1])
            return
        self._unskip(key, now)
        self._add_lines(replica, stream, screen.feed(text, now), now)
        if len(screen.rows[-1]) > _LONGEST_LINE:
            self._add_lines(replica, stream, screen.finish(), now)

    def _skip(self, key: tuple[int, Stream], text: str) -> None:
        """A flood: only the end of it is kept, to be shown after all."""
        self._screens[key].finish()
        left_out, before = self._skipped.get(key, (0, ""))
        whole = before + text
        kept = whole[-1_000:].partition("\n")[2] if len(whole) > 1_000 else whole
        self._skipped[key] = (left_out + whole.count("\n") - kept.count("\n"), kept)

    def _unskip(self, key: tuple[int, Stream], now: float) -> None:
        if key in self._skipped:
            left_out, text = self._skipped.pop(key)
            self._weave.add(("left out", str(key[0])), key[0], left_out, now)
            self._add_lines(*key, self._screens[key].feed(text, now), now)

    def _add_lines(self, replica: int, stream: Stream, lines: Iterable[str], now: float) -> None:
        for line in lines:
            if len(line) > _LONGEST_LINE:
                line = f"{line[:_LONGEST_LINE]} … {len(line) - _LONGEST_LINE:,} more characters"
            self._weave.add((stream, line), replica, line, now)

    def _feed_display(self, event: Display, now: float) -> None:
        bundle = Bundle.of(event.data, event.metadata)
        name = event.transient.get("display_id")
        replica = event.replica
        slot = self._named[replica].get(str(name))
        if slot is not None:
            slot.group[replica], slot.dirty = bundle, True
        elif event.update:
            return
        elif name is not None:
            self._feed_named(replica, str(name), bundle, now)
        elif (text := plain_text(bundle.data)) is not None:
            self._weave.add(("stdout", text), replica, text, now)
        elif is_figure(bundle.data):
            self._feed_figure(replica, bundle, now)
        else:
            self._weave.add(("rich", bundle.digest), replica, bundle, now)

    def _feed_named(self, replica: int, name: str, bundle: Bundle, now: float) -> None:
        # Names may be random, so the replicas' displays are paired by their order.
        count = len(self._named[replica])
        if count == len(self._named_slots):
            self._named_slots.append(self._new_slot(replica, now))
        slot = self._named[replica][name] = self._named_slots[count]
        if slot.step is not None:
            self._weave.join(slot.step, replica)
        slot.group[replica], slot.dirty = bundle, True

    def _feed_figure(self, replica: int, bundle: Bundle, now: float) -> None:
        self._figures.setdefault(replica, []).append(bundle)
        groups = align(self._figures)
        while len(self._slots) < len(groups):
            self._slots.append(self._new_slot(replica, now))
        for slot, group in zip(self._slots, groups, strict=True):
            if slot.group != group:
                if slot.step is not None and replica in group and replica not in slot.group:
                    self._weave.join(slot.step, replica)
                slot.group, slot.dirty = group, True
        # Nothing before a figure that is the same everywhere will change any more.
        equal = [i for i, group in enumerate(groups) if _is_everywhere(group, self._total)]
        done = max(equal[-1] + 1 if equal else 0, len(groups) - _OPEN_FIGURES)
        for group in groups[: max(0, done)]:
            for each in group:
                self._figures[each].pop(0)
        del self._slots[: max(0, done)]

    def _new_slot(self, replica: int, now: float) -> _Slot:
        slot = _Slot(self._new_name())
        self._all_slots.append(slot)
        slot.step = self._weave.add(("slot", slot.name), replica, slot, now, last=True)
        return slot

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    # -- instructions out ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether `collect` would have nothing to do, now or later, without new events."""
        return (
            not self._weave.steps
            and not self._area
            and not any(slot.dirty for slot in self._all_slots)
            and not any(screen.open for screen in self._screens.values())
        )

    def collect(self, now: float, *, final: bool = False) -> list[Instruction]:
        """What is to be shown now.

        Args:
            now: Seconds of a steady clock.
            final: Hold nothing back: the cell ends.
        """
        for key, screen in list(self._screens.items()):
            if screen.drawn and screen.open:
                self._add_lines(*key, screen.settle(now), now)
        if final:
            for replica in range(self._total):
                self.ended(replica, now)
        out: list[Instruction] = []
        for entry in self._weave.release(now, final=final):
            self._release(entry, out, now)
        self._fed -= Counter(dict.fromkeys(self._fed, _LINES_AGAIN))
        if final:
            self._show_tail(out)
        for slot in self._all_slots:
            if slot.dirty and slot.shown is not None and (final or now - slot.changed >= _CHANGE_S):
                self._draw(slot, out, now)
        self._draw_area(out, now, final=final)
        return out

    def _release(self, entry: _Entry, out: list[Instruction], now: float) -> None:
        if entry.key[0] == "clear":
            self._clear(entry, out)
            return
        self._seen |= entry.replicas
        content = entry.content
        if isinstance(content, int):
            self._omitted += content
            self._omitting |= entry.replicas
        elif not isinstance(content, str):
            if not self._displays.take(1, now):
                self._omitted_displays += 1
            elif isinstance(content, _Slot):
                self._draw(content, out, now)
            else:
                if len(entry.replicas) < self._total:
                    _print(out, "stdout", f"{mark(entry.replicas)}\n")
                out.append(Show(self._new_name(), content))
        elif self._lines.take(1 + content.count("\n") + len(content) / 500, now):
            self._show_omitted(out)
            self._write(entry, out)
        else:
            if len(self._tail) == _TAIL:
                self._count_omitted(self._tail.popleft())
            self._tail.append(entry)

    def _write(self, entry: _Entry, out: list[Instruction]) -> None:
        text = str(entry.content)
        if self._total > 1:
            prefix = mark(entry.replicas) + " "
            text = prefix + text.replace("\n", "\n" + " " * len(prefix))
        _print(out, "stderr" if entry.key[0] == "stderr" else "stdout", text + "\n")

    def _count_omitted(self, entry: _Entry) -> None:
        self._omitted += 1 + str(entry.content).count("\n")
        self._omitting |= entry.replicas

    def _show_omitted(self, out: list[Instruction]) -> None:
        while self._tail:
            self._count_omitted(self._tail.popleft())
        self._note_omitted(out)

    def _show_tail(self, out: list[Instruction]) -> None:
        tail = list(self._tail)
        self._tail.clear()
        self._note_omitted(out)
        for entry in tail:
            self._write(entry, out)
        if self._omitted_displays:
            what = f"{self._omitted_displays:,} displays left out: a cell shows 2 a second once it has shown 60."
            _print(out, "stdout", f"… {what}\n")
            self._omitted_displays = 0

    def _note_omitted(self, out: list[Instruction]) -> None:
        if self._omitted > 0:
            who = f"{mark(self._omitting)} " if self._total > 1 else ""
            lines = "1 line" if self._omitted == 1 else f"{self._omitted:,} lines"
            _print(out, "stdout", f"{who}… {lines} left out: too many for a notebook. `%distnb output` shows them.\n")
            self._omitted = 0
            self._omitting.clear()

    def _draw(self, slot: _Slot, out: list[Instruction], now: float) -> None:
        slot.dirty = False
        self._seen |= slot.group.keys()
        bundle = combine(slot.group, self._total) if slot.group else Bundle({"text/plain": ""})
        content = bundle.digest or str(bundle.data)
        if content != slot.shown:
            out.append(Show(slot.name, bundle, update=slot.shown is not None))
        slot.shown, slot.changed = content, now

    def _clear(self, entry: _Entry, out: list[Instruction]) -> None:
        """Clear the cell once every replica whose output is there wants it; before that, a replica's own displays."""
        whole = self._seen <= entry.replicas
        self._seen -= entry.replicas
        if whole:
            # Everything that was still to come before would be wiped at once.
            out[:] = [Clear(entry.key[1] == "wait")]
            self._displays = _Pace(60, 2)
            self._area = ()
        for slot in self._all_slots:
            if slot.shown is not None:  # others come after the clearing
                slot.group = {r: bundle for r, bundle in slot.group.items() if r not in entry.replicas}
                slot.dirty = not whole
                slot.shown = None if whole else slot.shown
        self._slots = [slot for slot in self._slots if slot.group]
        self._figures = {r: [slot.group[r] for slot in self._slots if r in slot.group] for r in range(self._total)}

    def _draw_area(self, out: list[Instruction], now: float, *, final: bool) -> None:
        if not final and now - self._area_drawn < _AREA_S:
            return
        by_text: dict[str, list[int]] = {}
        for (replica, _), screen in sorted(self._screens.items()):
            if not final and screen.open and (screen.drawn or now - screen.since >= _PARTIAL_S):
                for row in filter(None, (row.rstrip() for row in screen.rows)):
                    by_text.setdefault(row[-500:], []).append(replica)
        lines = tuple(f"{mark(who)} {row}" if self._total > 1 else row for row, who in by_text.items())
        if lines != self._area:
            self._area, self._area_drawn = lines, now
            out.append(Area(lines))


def _print(out: list[Instruction], stream: Stream, text: str) -> None:
    last = out[-1] if out else None
    if isinstance(last, Write) and last.stream == stream:
        out[-1] = Write(stream, last.text + text)
    else:
        out.append(Write(stream, text))


def _is_everywhere(group: dict[int, Bundle], total: int) -> bool:
    return len(group) == total and len({bundle.digest for bundle in group.values()}) == 1
