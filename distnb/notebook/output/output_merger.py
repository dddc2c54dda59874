"""The output of all replicas, merged into one cell's output: events in, instructions out, without IO and clock.

A line that several replicas print, about at the same time, is shown once, marked with their numbers. Displays that
replicas show by the same line of code belong together. Each replica's own order is kept. Unfinished lines (progress
bars) are shown in a separate area until they end. Example:

    replica 0 writes  "start\\n"  "loss 0.5\\n"      [0-1] start
    replica 1 writes  "start\\n"  "loss 0.4\\n"      [0] loss 0.5
                                                   [1] loss 0.4
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from distnb.activity import output_period_s
from distnb.notebook.output.displays import (
    Area,
    Bundle,
    Clear,
    Instruction,
    Show,
    Stream,
    WriteText,
    combine,
    plain_text,
)
from distnb.notebook.output.screen import Screen
from distnb.notebook.output.weave import Weave, WovenStep
from distnb.views.wording import mark
from distnb.wire.messages import Display, Output

__all__ = ["FIRST_S", "HOLD_S", "OutputMerger"]

HOLD_S = 0.15
"""The time for which a line waits for equal lines of other replicas, which send theirs every 0.05 seconds. Of large
teams, which send less often, lines wait longer (`output_period_s`)."""

FIRST_S = 1.0
"""The longest time for which a line waits: the first one of a program, since engines may begin it at different times,
and lines after equal ones that came too late."""

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_AREA_S = 0.1  # the least time between two drawings of the area
_CHANGE_S = 0.2  # the least time between two changes of a display
_PARTIAL_S = 0.4  # the age at which a line without an end is shown
_LONGEST_LINE = 20_000
_BURST, _PER_SECOND = 1_000.0, 50  # units that each replica may send at once, and per second; a line is one
_MOST_AT_ONCE = 8  # all replicas together may send as much as this number of replicas
_DISPLAY = 20  # units of a display
_MOST_UNFINISHED = 32  # the number of unfinished lines that are shown
_TAIL = 20  # the number of omitted lines that are shown when the cell ends, the last ones


@dataclass(eq=False)
class _Slot:
    """A place for the replicas' displays that belong together, side by side or one below the other."""

    name: str
    group: dict[int, Bundle] = field(default_factory=dict)
    waiting: dict[int, Bundle] = field(default_factory=dict)  # displays of which the step has not been released
    shown: list[str] = field(default_factory=list)  # the shown contents, as `Bundle.identity`
    changed: float = 0.0
    dirty: bool = True


_Entry = WovenStep[str | _Slot]
"""A step of the merged sequence: a text, or a place for a display."""


class _Gate:
    """A token bucket that limits one replica's output to an amount that a notebook can show.

    An empty bucket stays shut until it is partly full again. Otherwise a flood would pass one line at a time, each with
    a note about omitted lines.

    Args:
        replicas: The number of replicas whose output together it limits.

    Attributes:
        count: The number of omitted lines and displays since the last note about them.
        tail: The last of these lines.
    """

    def __init__(self, replicas: int = 1) -> None:
        self.count = 0
        self.tail: deque[tuple[Stream, str]] = deque(maxlen=_TAIL)
        self._burst, self._per_second = _BURST * replicas, _PER_SECOND * replicas
        self._level = self._burst
        self._then = 0.0
        self._shut = False

    def admit(self, units: float, now: float) -> bool:
        """Return whether this many units may pass, and take them from the bucket if so."""
        self._level = min(self._burst, self._level + (now - self._then) * self._per_second)
        self._then = now
        self._shut = units > self._level or (self._shut and self._level < 2 * self._per_second)
        if not self._shut:
            self._level -= units
        return not self._shut

    def cleared(self) -> None:
        """Refill a little after the cell was cleared, since earlier output is no longer shown."""
        self._level = max(self._level, 2 * self._per_second)
        self.count = 0
        self.tail.clear()


class OutputMerger:
    """The merger of the replicas' texts and displays.

    Args:
        total: The number of replicas. The output of a single one is not marked.
        name: The prefix of the names of its displays, unique in the notebook.
        who: The noun for replica numbers in marks: "worker " gives `[worker 1]`.
    """

    def __init__(self, total: int, name: str, who: str = "") -> None:
        self._total = total
        self._who = who
        self._name = name
        hold_s = HOLD_S * output_period_s(total) / output_period_s(1)
        first_s = max(hold_s, FIRST_S)
        self._weave: Weave[str | _Slot] = Weave(total, *((hold_s, first_s) if total > 1 else (0.0, 0.0)))
        self._screens: dict[tuple[int, Stream], Screen] = {}
        self._unfinished: set[tuple[int, Stream]] = set()  # the screens with unfinished lines
        self._slots: list[_Slot] = []  # the slots that are shown
        self._named: defaultdict[int, dict[str, _Slot]] = defaultdict(dict)  # by replica, and by its own names
        self._named_slots: list[_Slot] = []
        self._of_lines: dict[tuple[bytes, int], _Slot] = {}
        self._counts: Counter[tuple[int, bytes]] = Counter()
        self._numbers = itertools.count()
        self._seen: set[int] = set()  # replicas with output since the last clearing
        self._area: tuple[str, ...] = ()
        self._area_drawn = 0.0
        self._gates: defaultdict[int, _Gate] = defaultdict(_Gate)  # by replica
        # The gate of merged lines. Fewer replicas are limited by their own gates.
        self._gate = _Gate(_MOST_AT_ONCE) if total > _MOST_AT_ONCE else None

    # -- events in -------------------------------------------------------------------------------------------------

    def feed(self, event: Output | Display, now: float) -> None:
        """Handle an event of a replica. `now` is the time of a monotonic clock, the same as in `collect`."""
        if not 0 <= event.replica < self._total:
            return
        if isinstance(event, Display):
            self._feed_display(event, now)
            return
        key = event.replica, event.stream
        screen = self._screens.get(key)
        if screen is None:
            screen = self._screens[key] = Screen()
        self._add_lines(*key, screen.feed(event.text, now), now)
        if len(screen.rows[-1]) > _LONGEST_LINE:
            self._add_lines(*key, screen.finish(), now)
        if screen.open:
            self._unfinished.add(key)
        else:
            self._unfinished.discard(key)

    def break_off(self, replica: int, now: float) -> None:
        """Finish the unfinished lines of a replica that pauses."""
        for stream in _STREAMS:
            if (replica, stream) in self._screens:
                self._add_lines(replica, stream, self._screens[replica, stream].finish(), now)
                self._unfinished.discard((replica, stream))

    def ended(self, replica: int, now: float) -> None:
        """Finish the unfinished lines of a replica that will write no more, and stop waiting for it."""
        self.break_off(replica, now)
        tail = list(self._gates[replica].tail)
        self._note_omitted(replica, len(tail), now)
        for stream, line in tail:
            self._add_line(replica, stream, line, now)
        self._weave.active.discard(replica)

    def _add_lines(self, replica: int, stream: Stream, lines: Sequence[str], now: float) -> None:
        gate = self._gates[replica]
        for at, line in enumerate(lines):
            if not gate.admit(1 + len(line) / 500, now):
                gate.count += len(lines) - at
                gate.tail.extend((stream, each) for each in lines[max(at, len(lines) - _TAIL) :])
                return
            self._note_omitted(replica, 0, now)
            self._add_line(replica, stream, line, now)

    def _note_omitted(self, replica: int, but: int, now: float) -> None:
        gate = self._gates[replica]
        if gate.count > but:
            self._add_line(replica, "stdout", _omitted(gate.count - but), now)
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
            if self._gate is not None:
                self._gate.cleared()
            self._weave.add(("clear", event.clear), replica, "", now)
        elif event.update:
            slot = self._named[replica].get(str(name))
            if slot is not None:
                held = slot.waiting if replica in slot.waiting else slot.group
                held[replica], slot.dirty = bundle, True
        elif name is None and (text := plain_text(bundle.data)) is not None:
            self._add_lines(replica, "stdout", [text], now)
        elif not self._gates[replica].admit(_DISPLAY, now):
            self._gates[replica].count += 1
        elif name is not None:
            self._feed_named(replica, str(name), bundle, now)
        else:
            self._feed_unnamed(replica, event.site, bundle, now)

    def _feed_named(self, replica: int, name: str, bundle: Bundle, now: float) -> None:
        slots = self._named[replica]
        if name not in slots:
            # Names may be random, so the displays of different replicas are paired by their order.
            if len(slots) == len(self._named_slots):
                self._named_slots.append(_Slot(name=self._new_name()))
            slots[name] = self._named_slots[len(slots)]
        self._add_display(replica, slots[name], bundle, now)

    def _feed_unnamed(self, replica: int, site: bytes, bundle: Bundle, now: float) -> None:
        """Add a replica's display to the other replicas' displays of the same line of the user's code.

        A line in a loop shows displays repeatedly: the n-th one of each replica belongs to the n-th of the others.
        """
        count = self._counts[replica, site] = self._counts[replica, site] + 1
        if (site, count) not in self._of_lines:
            self._of_lines[site, count] = _Slot(name=self._new_name())
        self._add_display(replica, self._of_lines[site, count], bundle, now)

    def _add_display(self, replica: int, slot: _Slot, bundle: Bundle, now: float) -> None:
        slot.waiting[replica] = bundle
        self._weave.add(("display", slot.name), replica, slot, now)

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    # -- instructions out ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if `collect` has nothing to do, now or later, without new events."""
        return (
            self._weave.empty
            and not self._area
            and not any(slot.dirty for slot in self._slots)
            and not self._unfinished
        )

    def collect(self, now: float, *, final: bool = False, held: bool = True) -> list[Instruction]:
        """Return the instructions that are due now.

        Args:
            final: Whether to hold nothing back, because the cell ends.
            held: Whether to hold back lines of which other replicas may still write equal ones.
        """
        for key in sorted(self._unfinished):
            screen = self._screens[key]
            if screen.drawn:
                self._add_lines(*key, screen.pop_finished(now), now)
                if not screen.open:
                    self._unfinished.discard(key)
        if final:
            for replica in range(self._total):
                self.ended(replica, now)
        out: list[Instruction] = []
        for entry in self._weave.release(now, final=final or not held):
            self._release(entry, out, now)
        if final:
            self._show_omitted(out, _TAIL)
        for slot in self._slots:
            if slot.dirty and (final or now - slot.changed >= _CHANGE_S):
                self._draw(slot, out, now)
        self._draw_area(out, now, final=final)
        return out

    def _release(self, entry: _Entry, out: list[Instruction], now: float) -> None:
        content = entry.content
        if entry.key[0] == "clear":
            self._clear(entry, out)
            return
        self._seen |= entry.replicas
        if isinstance(content, str):
            prefix = mark(entry.replicas, self._who) + " " if self._total > 1 else ""
            text = prefix + content.replace("\n", "\n" + " " * len(prefix)) + "\n"
            stream: Stream = "stderr" if entry.key[0] == "stderr" else "stdout"
            if self._gate is None or self._gate.admit(1 + len(text) / 500, now):
                self._show_omitted(out, 0)
                _print(out, stream, text)
            else:
                self._gate.count += 1
                self._gate.tail.append((stream, text))
        else:
            content.group |= {each: content.waiting.pop(each) for each in entry.replicas if each in content.waiting}
            content.dirty = True
            if content not in self._slots:
                self._slots.append(content)
                self._draw(content, out, now)

    def _show_omitted(self, out: list[Instruction], count: int) -> None:
        """Show a note about the merged lines that were omitted, and the last `count` of these."""
        if self._gate is None or not self._gate.count:
            return
        tail = [*self._gate.tail][-count:] if count else []
        if self._gate.count > len(tail):
            _print(out, "stdout", _omitted(self._gate.count - len(tail)) + "\n")
        for stream, text in tail:
            _print(out, stream, text)
        self._gate.count = 0
        self._gate.tail.clear()

    def _draw(self, slot: _Slot, out: list[Instruction], now: float) -> None:
        slot.dirty, slot.changed = False, now
        bundles = combine(slot.group, self._total, self._who) if slot.group else []
        bundles += [Bundle({"text/plain": ""})] * (len(slot.shown) - len(bundles))
        contents = [bundle.identity or str(bundle.data) for bundle in bundles]
        for place, (bundle, content) in enumerate(zip(bundles, contents, strict=True)):
            update = place < len(slot.shown)
            if not update or content != slot.shown[place]:
                out.append(Show(f"{slot.name}.{place}" if place else slot.name, bundle, update=update))
        slot.shown = contents

    def _clear(self, entry: _Entry, out: list[Instruction]) -> None:
        """Clear the cell if every replica with output in it has requested that.

        Until then, remove only the displays of the replicas that have.
        """
        whole = self._seen <= entry.replicas
        self._seen -= entry.replicas
        if whole:
            # The output of the instructions so far would be erased at once.
            out[:] = [Clear(entry.key[1] == "wait")]
            self._area = ()
            for slot in self._slots:
                slot.group, slot.shown = {}, []
            self._slots.clear()
            self._of_lines = {place: slot for place, slot in self._of_lines.items() if slot.waiting}
        for slot in self._slots:
            slot.group = {replica: bundle for replica, bundle in slot.group.items() if replica not in entry.replicas}
            slot.dirty = True

    def _draw_area(self, out: list[Instruction], now: float, *, final: bool) -> None:
        if not final and now - self._area_drawn < _AREA_S:
            return
        by_text: dict[str, list[int]] = {}
        for replica, stream in () if final else sorted(self._unfinished):
            screen = self._screens[replica, stream]
            if screen.drawn or now - screen.since >= _PARTIAL_S:
                for row in filter(None, (row.rstrip() for row in screen.rows)):
                    by_text.setdefault(row[-500:], []).append(replica)
        shown = [f"{mark(who, self._who)} {row}" if self._total > 1 else row for row, who in by_text.items()]
        lines = tuple(shown[:_MOST_UNFINISHED])
        if len(shown) > _MOST_UNFINISHED:
            lines += (f"… and {len(shown) - _MOST_UNFINISHED:,} more unfinished lines",)
        if lines != self._area:
            self._area, self._area_drawn = lines, now
            out.append(Area(lines))


def _omitted(count: int) -> str:
    what = f"{count:,} of the lines and displays, too many for a notebook"
    return f"… left out: {what}. `%distnb output` shows all lines."


def _print(out: list[Instruction], stream: Stream, text: str) -> None:
    last = out[-1] if out else None
    if isinstance(last, WriteText) and last.stream == stream:
        out[-1] = WriteText(stream, last.text + text)
    else:
        out.append(WriteText(stream, text))
