"""The output of all replicas, merged into that of one cell: events in, instructions out, no IO and no clock.

Lines that several replicas write within `HOLD_S` are shown once, marked with whose they are; each replica's own order
is kept. Figures are completed after they are shown; unfinished lines (progress bars) are shown in an area of their
own until they end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from distnb.notebook.output.figures import Bundle, align, combine, is_figure, mark, plain_text
from distnb.notebook.output.instructions import Area, Change, Clear, Instruction, Show, Stream, Write, joined
from distnb.notebook.output.pacing import Pace
from distnb.notebook.output.screen import Screen
from distnb.notebook.output.weave import Step, Weave
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
_TAIL = 20  # of the lines left out, so many last ones are shown when the cell ends


@dataclass
class _Slot:
    """A place for one display: of the replicas' figures that belong together, or of one named by the user."""

    name: str
    group: dict[int, Bundle] = field(default_factory=dict)
    shown: str | None = None  # digest of what is shown
    changed: float = 0.0
    dirty: bool = False
    step: Step[_Content] | None = None


@dataclass
class _Content:
    """What a step of the merged sequence shows: a text, a figure's place, or another rich display."""

    text: str = ""
    slot: _Slot | None = None
    bundle: Bundle | None = None


_Entry = Step[_Content]


class OutputMerger:
    """Merges what replicas write and show.

    Args:
        total: Replicas that take part; with one, nothing is marked.
        name: Prefix of the names of its displays, unique in the notebook.
        hold_s: How long a line may wait for its doubles.
    """

    def __init__(self, total: int, name: str, hold_s: float = HOLD_S) -> None:
        self._total = total
        self._name = name
        self._weave: Weave[_Content] = Weave(total, hold_s if total > 1 else 0.0)
        self._screens: dict[tuple[int, Stream], Screen] = {}
        self._coming: deque[_Entry] = deque()  # released, and not yet shown
        self._slots: list[_Slot] = []  # of figures not yet complete on every replica
        self._figures: dict[int, list[Bundle]] = {}
        self._named: dict[tuple[int, str], _Slot] = {}
        self._named_slots: list[_Slot] = []
        self._named_count: dict[int, int] = {}
        self._all_slots: list[_Slot] = []
        self._numbers = itertools.count()
        self._seen: set[int] = set()  # replicas with output since the last clearing
        self._area: tuple[str, ...] = ()
        self._area_drawn = 0.0
        self._flood = {replica: Pace(5_000, 2_000) for replica in range(total)}
        self._skipped: dict[tuple[int, Stream], str] = {}
        self._lines = Pace(1_000, 50)
        self._displays = Pace(60, 2)
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
            self._weave.add(("clear", event.clear), event.replica, _Content(), now)
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
        lines = text.count("\n")
        units = lines + len(text) / 500
        granted = self._flood[replica].grant(units, now)
        if granted:
            self._unskip(key, now)
        if granted < units:
            head, text = _split_lines(text, int(lines * granted / units))
            self._add_lines(replica, stream, screen.feed(head, now), now)
            self._skip(key, text)
            return
        self._add_lines(replica, stream, screen.feed(text, now), now)
        if len(screen.rows[-1]) > _LONGEST_LINE:
            self._add_lines(replica, stream, screen.finish(), now)

    def _skip(self, key: tuple[int, Stream], text: str) -> None:
        """A flood: only the end of it is kept, to be shown after all."""
        self._screens[key].finish()
        whole = self._skipped.get(key, "") + text
        self._skipped[key] = whole[-1_000:].partition("\n")[2] if len(whole) > 1_000 else whole
        self._omitted += whole.count("\n") - self._skipped[key].count("\n")
        self._omitting.add(key[0])

    def _unskip(self, key: tuple[int, Stream], now: float) -> None:
        if key in self._skipped:
            self._add_lines(*key, self._screens[key].feed(self._skipped.pop(key), now), now)

    def _add_lines(self, replica: int, stream: Stream, lines: Iterable[str], now: float) -> None:
        for line in lines:
            if len(line) > _LONGEST_LINE:
                line = f"{line[:_LONGEST_LINE]} … {len(line) - _LONGEST_LINE:,} more characters"
            self._weave.add((stream, line), replica, _Content(line), now)

    def _feed_display(self, event: Display, now: float) -> None:
        bundle = Bundle.of(event.data, event.metadata)
        name = event.transient.get("display_id")
        replica = event.replica
        if event.update or (name is not None and (replica, str(name)) in self._named):
            slot = self._named.get((replica, str(name)))
            if slot is not None:
                slot.group[replica], slot.dirty = bundle, True
        elif name is not None:
            self._feed_named(replica, str(name), bundle, now)
        elif (text := plain_text(bundle.data)) is not None:
            self._weave.add(("stdout", text), replica, _Content(text), now)
        elif is_figure(bundle.data):
            self._feed_figure(replica, bundle, now)
        else:
            self._weave.add(("rich", bundle.digest), replica, _Content(bundle=bundle), now)

    def _feed_named(self, replica: int, name: str, bundle: Bundle, now: float) -> None:
        # Names may be random, so the replicas' displays are paired by their order.
        count = self._named_count[replica] = self._named_count.get(replica, 0) + 1
        if count > len(self._named_slots):
            self._named_slots.append(self._new_slot(replica, now))
        slot = self._named[replica, name] = self._named_slots[count - 1]
        if slot.step is not None:
            self._weave.follow(slot.step, replica)
        slot.group[replica], slot.dirty = bundle, True

    def _feed_figure(self, replica: int, bundle: Bundle, now: float) -> None:
        self._figures.setdefault(replica, []).append(bundle)
        groups = align(self._figures)
        while len(self._slots) < len(groups):
            self._slots.append(self._new_slot(replica, now))
        for slot, group in zip(self._slots, groups, strict=True):
            if slot.group != group:
                if slot.step is not None and replica in group and replica not in slot.group:
                    self._weave.follow(slot.step, replica)
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
        slot.step = self._weave.add_fixed(("slot", slot.name), replica, _Content(slot=slot), now)
        return slot

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    # -- instructions out ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether `collect` would have nothing to do, now or later, without new events."""
        return (
            not len(self._weave)
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
        self._coming.extend(self._weave.release(now, final=final))
        while self._coming:
            self._release(self._coming.popleft(), out, now)
        if final:
            self._show_tail(out)
        for slot in self._all_slots:
            if slot.dirty and slot.shown is not None and (final or now - slot.changed >= _CHANGE_S):
                self._draw(slot, out, now)
        self._draw_area(out, now, final=final)
        return joined(out)

    def _release(self, entry: _Entry, out: list[Instruction], now: float) -> None:
        if entry.key[0] == "clear":
            self._clear(entry, out)
            return
        self._seen |= entry.replicas
        content = entry.content
        if content.slot is not None or content.bundle is not None:
            if not self._displays.take(1, now):
                self._omitted_displays += 1
                return
            if content.slot is not None:
                self._draw(content.slot, out, now, first=True)
            elif content.bundle is not None:
                if len(entry.replicas) < self._total:
                    out.append(Write("stdout", f"{mark(entry.replicas)}\n"))
                out.append(Show(self._new_name(), content.bundle))
        elif self._lines.take(1 + entry.content.text.count("\n") + len(entry.content.text) / 500, now):
            self._show_omitted(out)
            out.append(self._text(entry))
        else:
            if len(self._tail) == _TAIL:
                self._count_omitted(self._tail.popleft())
            self._tail.append(entry)

    def _text(self, entry: _Entry) -> Write:
        text = entry.content.text
        if self._total > 1:
            prefix = mark(entry.replicas) + " "
            text = prefix + text.replace("\n", "\n" + " " * len(prefix))
        return Write("stderr" if entry.key[0] == "stderr" else "stdout", text + "\n")

    def _count_omitted(self, entry: _Entry) -> None:
        self._omitted += 1 + entry.content.text.count("\n")
        self._omitting |= entry.replicas

    def _show_omitted(self, out: list[Instruction]) -> None:
        while self._tail:
            self._count_omitted(self._tail.popleft())
        self._note_omitted(out)

    def _show_tail(self, out: list[Instruction]) -> None:
        tail = list(self._tail)
        self._tail.clear()
        self._note_omitted(out)
        out.extend(self._text(entry) for entry in tail)
        if self._omitted_displays:
            out.append(
                Write(
                    "stdout",
                    f"… {self._omitted_displays:,} displays left out: a cell shows 2 a second once it has shown 60.\n",
                )
            )
            self._omitted_displays = 0

    def _note_omitted(self, out: list[Instruction]) -> None:
        if self._omitted > 0:
            who = f"{mark(self._omitting)} " if self._total > 1 else ""
            lines = "1 line" if self._omitted == 1 else f"{self._omitted:,} lines"
            out.append(
                Write("stdout", f"{who}… {lines} left out: too many for a notebook. `%distnb output` shows them.\n")
            )
            self._omitted = 0
            self._omitting.clear()

    def _draw(self, slot: _Slot, out: list[Instruction], now: float, *, first: bool = False) -> None:
        slot.dirty = False
        self._seen |= slot.group.keys()
        bundle = combine(slot.group, self._total) if slot.group else Bundle({"text/plain": ""})
        content = bundle.digest or str(bundle.data)
        if first:
            out.append(Show(slot.name, bundle))
        elif content != slot.shown:
            out.append(Change(slot.name, bundle))
        slot.shown, slot.changed = content, now

    def _clear(self, entry: _Entry, out: list[Instruction]) -> None:
        """Clear the cell once every replica whose output is there wants it; before that, a replica's own displays."""
        if self._seen <= entry.replicas:
            # Everything that was still to come before would be wiped at once.
            out[:] = [Clear(entry.key[1] == "wait")]
            self._seen.clear()
            self._forget_displays(lambda replica: True)
            self._displays = Pace(60, 2)
            self._area = ()
        else:
            self._seen -= entry.replicas
            self._forget_displays(lambda replica: replica in entry.replicas)

    def _forget_displays(self, whose: Callable[[int], bool]) -> None:
        pending = {step.content.slot.name for step in (*self._weave, *self._coming) if step.content.slot is not None}
        for slot in self._all_slots:
            # What follows the clearing waits in the sequence, and stays.
            if slot.name not in pending and slot.group:
                slot.group = {replica: bundle for replica, bundle in slot.group.items() if not whose(replica)}
                slot.dirty = slot.shown is not None
        if all(whose(replica) for replica in range(self._total)):
            for slot in self._all_slots:
                if slot.name not in pending:
                    slot.shown, slot.dirty = None, False
        kept = [slot for slot in self._slots if slot.name in pending or slot.group]
        self._figures = {}
        for slot in kept:
            for replica, bundle in slot.group.items():
                self._figures.setdefault(replica, []).append(bundle)
        self._slots = kept

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


def _split_lines(text: str, count: int) -> tuple[str, str]:
    """The first so many lines, and the rest."""
    parts = text.split("\n", count)
    return "".join(part + "\n" for part in parts[:count]), parts[count]


def _is_everywhere(group: dict[int, Bundle], total: int) -> bool:
    return len(group) == total and len({bundle.digest for bundle in group.values()}) == 1
