"""The output of all replicas, merged into that of one cell: events in, instructions out, no IO and no clock.

Lines and figures that several replicas make within `HOLD_S` are shown once, marked with whose they are; each replica's
own order is kept. Unfinished lines (progress bars) are shown in an area of their own until they end.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from distnb.notebook.output.displays import (
    Area,
    Bundle,
    Clear,
    Instruction,
    Show,
    Stream,
    WriteText,
    combine,
    is_figure,
    plain_text,
)
from distnb.notebook.output.screen import Screen
from distnb.notebook.output.weave import Weave, WovenStep
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
_BURST, _PER_SECOND = 1_000.0, 50  # units of each replica that may come at once, and in a second; a line is one
_DISPLAY = 20  # units
_TAIL = 20  # of the lines left out, so many last ones are shown when the cell ends


@dataclass(eq=False)
class _Slot:
    """A place for one display: the replicas' figures side by side, or their displays of one name."""

    name: str
    group: dict[int, Bundle] = field(default_factory=dict)
    shown: str | None = None  # what is, as `Bundle.identity` has it
    changed: float = 0.0
    dirty: bool = True


_Entry = WovenStep[str | _Slot | Bundle]
"""A step of the merged sequence: a text, a place for a named display, or another rich display."""


class _Gate:
    """Lets one replica's output through, as long as it is not too much for a notebook: a token bucket.

    Once empty it stays shut until it has filled up a good part. Without that, a flood would let single lines through,
    each with a note about those left out around it.

    Attributes:
        count: Lines and displays that were left out, and not told of yet.
        tail: The last lines of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.tail: deque[tuple[Stream, str]] = deque(maxlen=_TAIL)
        self._level = _BURST
        self._then = 0.0
        self._shut = False

    def take(self, units: float, now: float) -> bool:
        """Whether so much may pass."""
        self._level = min(_BURST, self._level + (now - self._then) * _PER_SECOND)
        self._then = now
        self._shut = units > self._level or (self._shut and self._level < 2 * _PER_SECOND)
        if not self._shut:
            self._level -= units
        return not self._shut

    def cleared(self) -> None:
        """What has passed is not shown any more, and some may pass in its place."""
        self._level = max(self._level, 2 * _PER_SECOND)
        self.count = 0
        self.tail.clear()


class OutputMerger:
    """Merges what replicas write and show.

    Args:
        total: Replicas that take part; with one, nothing is marked.
        name: Prefix of the names of its displays, unique in the notebook.
        who: What their numbers are of, for marks: "worker " gives `[worker 1]`.
    """

    def __init__(self, total: int, name: str, who: str = "") -> None:
        self._total = total
        self._who = who
        self._name = name
        self._weave: Weave[str | _Slot | Bundle] = Weave(total, HOLD_S if total > 1 else 0.0)
        self._screens: dict[tuple[int, Stream], Screen] = {}
        self._slots: list[_Slot] = []  # that are shown
        self._beside: _Slot | None = None  # figures of other replicas may still be shown in it
        self._named: defaultdict[int, dict[str, _Slot]] = defaultdict(dict)  # by replica, and by its own names
        self._named_slots: list[_Slot] = []
        self._parts: dict[tuple[bytes, int], _Slot] = {}
        self._counts: Counter[tuple[int, bytes]] = Counter()
        self._numbers = itertools.count()
        self._seen: set[int] = set()  # replicas with output since the last clearing
        self._area: tuple[str, ...] = ()
        self._area_drawn = 0.0
        self._gates: defaultdict[int, _Gate] = defaultdict(_Gate)  # by replica

    # -- events in -------------------------------------------------------------------------------------------------

    def feed(self, event: Output | Display, now: float) -> None:
        """Take an event of a replica. The clock is any steady one, `collect`'s too."""
        if not 0 <= event.replica < self._total:
            return
        if isinstance(event, Display):
            self._feed_display(event, now)
            return
        screen = self._screens.setdefault((event.replica, event.stream), Screen())
        self._add_lines(event.replica, event.stream, screen.feed(event.text, now), now)
        if len(screen.rows[-1]) > _LONGEST_LINE:
            self._add_lines(event.replica, event.stream, screen.finish(), now)

    def break_off(self, replica: int, now: float) -> None:
        """A replica writes no more for now: its unfinished lines are finished."""
        for stream in _STREAMS:
            if (replica, stream) in self._screens:
                self._add_lines(replica, stream, self._screens[replica, stream].finish(), now)

    def ended(self, replica: int, now: float) -> None:
        """A replica will write no more: nobody waits for it, and its unfinished lines are finished."""
        self.break_off(replica, now)
        tail = list(self._gates[replica].tail)
        self._tell_left_out(replica, len(tail), now)
        for stream, line in tail:
            self._add_line(replica, stream, line, now)
        self._weave.active.discard(replica)

    def _add_lines(self, replica: int, stream: Stream, lines: Sequence[str], now: float) -> None:
        gate = self._gates[replica]
        for at, line in enumerate(lines):
            if not gate.take(1 + len(line) / 500, now):
                gate.count += len(lines) - at
                gate.tail.extend((stream, each) for each in lines[max(at, len(lines) - _TAIL) :])
                return
            self._tell_left_out(replica, 0, now)
            self._add_line(replica, stream, line, now)

    def _tell_left_out(self, replica: int, but: int, now: float) -> None:
        gate = self._gates[replica]
        if gate.count > but:
            what = f"{gate.count - but:,} of the lines and displays, too many for a notebook"
            self._add_line(replica, "stdout", f"… left out: {what}. `%distnb output` shows all lines.", now)
        gate.count = 0
        gate.tail.clear()

    def _add_line(self, replica: int, stream: Stream, line: str, now: float) -> None:
        if len(line) > _LONGEST_LINE:
            line = f"{line[:_LONGEST_LINE]} … {len(line) - _LONGEST_LINE:,} more characters"
        self._weave.add((stream, line), replica, line, now)

    def _feed_display(self, event: Display, now: float) -> None:
        replica, name = event.replica, event.transient.get("display_id")
        bundle = Bundle.of(event.data, event.metadata)
        if event.clear != "no":
            self._gates[replica].cleared()
            self._weave.add(("clear", event.clear), replica, "", now)
        elif event.update:
            slot = self._named[replica].get(str(name))
            if slot is not None:
                slot.group[replica], slot.dirty = bundle, True
        elif name is None and (text := plain_text(bundle.data)) is not None:
            self._add_lines(replica, "stdout", [text], now)
        elif not self._gates[replica].take(_DISPLAY, now):
            self._gates[replica].count += 1
        elif name is not None:
            self._feed_named(replica, str(name), bundle, now)
        elif bundle.site is not None:
            self._feed_part(replica, bundle.site, bundle, now)
        else:
            self._weave.add(("display", bundle.identity), replica, bundle, now)

    def _feed_named(self, replica: int, name: str, bundle: Bundle, now: float) -> None:
        slots = self._named[replica]
        if name not in slots:
            # Names may be random, so the replicas' displays are paired by their order.
            if len(slots) == len(self._named_slots):
                self._named_slots.append(_Slot(self._new_name()))
            slot = slots[name] = self._named_slots[len(slots)]
            self._weave.add(("named", slot.name), replica, slot, now)
        slots[name].group[replica] = bundle
        slots[name].dirty = True

    def _feed_part(self, replica: int, site: bytes, bundle: Bundle, now: float) -> None:
        """A replica's part of a value: to those that the others show from the same line, as often as this one has."""
        count = self._counts[replica, site] = self._counts[replica, site] + 1
        if (site, count) not in self._parts:
            self._parts[site, count] = _Slot(self._new_name())
        slot = self._parts[site, count]
        slot.group[replica], slot.dirty = bundle, True
        self._weave.add(("named", slot.name), replica, slot, now)

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    # -- instructions out ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether `collect` would have nothing to do, now or later, without new events."""
        return (
            self._weave.empty
            and not self._area
            and not any(slot.dirty for slot in self._slots)
            and not any(screen.open for screen in self._screens.values())
        )

    def collect(self, now: float, *, final: bool = False, held: bool = True) -> list[Instruction]:
        """What is to be shown now; with `final`, nothing is held back: the cell ends. Unless `held`, nor is a line."""
        for key, screen in list(self._screens.items()):
            if screen.drawn and screen.open:
                self._add_lines(*key, screen.settle(now), now)
        if final:
            for replica in range(self._total):
                self.ended(replica, now)
        out: list[Instruction] = []
        for entry in self._weave.release(now, final=final or not held):
            self._release(entry, out, now)
        for slot in self._slots:
            if slot.dirty and (final or slot.shown is None or now - slot.changed >= _CHANGE_S):
                self._draw(slot, out, now)
        self._draw_area(out, now, final=final)
        return out

    def _release(self, entry: _Entry, out: list[Instruction], now: float) -> None:
        content = entry.content
        figure = isinstance(content, Bundle) and is_figure(content.data)
        if not figure or (self._beside is not None and not entry.replicas.isdisjoint(self._beside.group)):
            self._close_figures(out, now)
        if entry.key[0] == "clear":
            self._clear(entry, out)
            return
        self._seen |= entry.replicas
        if isinstance(content, str):
            prefix = mark(entry.replicas, self._who) + " " if self._total > 1 else ""
            text = prefix + content.replace("\n", "\n" + " " * len(prefix)) + "\n"
            _print(out, "stderr" if entry.key[0] == "stderr" else "stdout", text)
        elif isinstance(content, _Slot):
            if content not in self._slots:
                self._slots.append(content)
                self._draw(content, out, now)
        elif figure and self._beside is not None:
            self._beside.group.update(dict.fromkeys(entry.replicas, content))
            self._beside.dirty = True
        elif figure:
            self._beside = _Slot(self._new_name(), dict.fromkeys(entry.replicas, content))
            self._slots.append(self._beside)
        else:
            if len(entry.replicas) < self._total:
                _print(out, "stdout", f"{mark(entry.replicas, self._who)}\n")
            out.append(Show(self._new_name(), content))

    def _close_figures(self, out: list[Instruction], now: float) -> None:
        """What comes next is shown below the figures that stand side by side."""
        if self._beside is not None and self._beside.dirty:
            self._draw(self._beside, out, now)
        self._beside = None

    def _draw(self, slot: _Slot, out: list[Instruction], now: float) -> None:
        slot.dirty = False
        bundle = combine(slot.group, self._total, self._who) if slot.group else Bundle({"text/plain": ""})
        content = bundle.identity or str(bundle.data)
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
            self._area = ()
            self._slots.clear()
        for slot in self._slots:
            slot.group = {replica: bundle for replica, bundle in slot.group.items() if replica not in entry.replicas}
            slot.dirty = True

    def _draw_area(self, out: list[Instruction], now: float, *, final: bool) -> None:
        if not final and now - self._area_drawn < _AREA_S:
            return
        by_text: dict[str, list[int]] = {}
        for (replica, _), screen in sorted(self._screens.items()):
            if not final and screen.open and (screen.drawn or now - screen.since >= _PARTIAL_S):
                for row in filter(None, (row.rstrip() for row in screen.rows)):
                    by_text.setdefault(row[-500:], []).append(replica)
        lines = tuple(f"{mark(who, self._who)} {row}" if self._total > 1 else row for row, who in by_text.items())
        if lines != self._area:
            self._area, self._area_drawn = lines, now
            out.append(Area(lines))


def _print(out: list[Instruction], stream: Stream, text: str) -> None:
    last = out[-1] if out else None
    if isinstance(last, WriteText) and last.stream == stream:
        out[-1] = WriteText(stream, last.text + text)
    else:
        out.append(WriteText(stream, text))
