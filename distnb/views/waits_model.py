"""The model of waits: sentences about replicas that have waited for seconds, and about the replicas that are missing.

Samples go in, and lines come out. Example: replicas 0 and 2 are in collective 17 of the group, and replica 1 sleeps
before it. After three seconds the line is "replicas 0, 2 have waited in all_reduce (cell 3, line 4; number 17) for 3 s;
replica 1 has not arrived: it has been in cell 3, line 2, in sleep, for 3 s."
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from distnb.activity import sample_period_s
from distnb.views.wording import cell_place, ranges
from distnb.wire.messages import TelemetrySample, Waiting

__all__ = ["WaitsModel"]

_PATIENCE_S: Final = 3.0  # a shorter wait is not worth a sentence
_SILENT_S: Final = 2.0  # an older sample is out of date, unless there are many replicas, whose samples are rare
_PERIODS: Final = 3  # as many periods of samples are also allowed
_MOST_PLACES: Final = 5  # the number of places of missing replicas that a sentence names
_LATELY_S: Final = 1.0  # replicas that are ended report other places for a moment before they report their end


class _Elsewhere(NamedTuple):
    """The place of replicas that have not arrived where others wait. Replicas at equal places share a sentence.

    Attributes:
        state: "asks", "silent", "waits" or "is".
        where: The user's line; for "waits", the wait of one replica in words.
        more: The function that the line calls; for "waits", the wait of several replicas in words.
    """

    state: str
    where: str
    more: str = ""


class WaitsModel:
    """The waits and places of a program's replicas.

    Attributes:
        asking: The replicas at a prompt that the user has not answered yet.
    """

    def __init__(self, who: str = "replica") -> None:
        self.who = who
        self.asking: set[int] = set()
        self._latest: dict[
            int, tuple[TelemetrySample, float]
        ] = {}  # each replica's latest sample, and the time of its arrival
        self._steady: dict[int, float] = {}  # the time since which a replica has been at its place
        # The time when a replica moved while others waited, and the lines until then.
        self._before: tuple[float, list[str]] = (0.0, [])
        self._replicas = 0  # the largest number of replicas at once
        self._soonest = math.inf  # before this time, no replica has waited for seconds

    def feed(self, sample: TelemetrySample, now: float) -> None:
        """Apply a sample of a replica."""
        before = self._latest.get(sample.replica)
        if before is None or _place(before[0]) != _place(sample):
            if now - self._before[0] > _LATELY_S or not self._before[1]:
                self._before = now, self.lines(now)
            self._steady[sample.replica] = now
        self._latest[sample.replica] = sample, now
        self._replicas = max(self._replicas, len(self._latest))
        if sample.waiting is not None:
            self._soonest = min(self._soonest, now - sample.waiting.seconds + _PATIENCE_S)

    def ended(self, replicas: Iterable[int]) -> None:
        """Forget replicas whose part of the program has ended."""
        for replica in list(replicas):
            self._latest.pop(replica, None)
            self.asking.discard(replica)

    def lines(self, now: float) -> list[str]:
        """Return a sentence for each operation in which replicas have waited for seconds."""
        if now < self._soonest:
            return []  # the usual case, which is asked for at each sample of each replica
        self._soonest = math.inf
        long: defaultdict[tuple[str, str, str, int], list[int]] = defaultdict(list)
        for replica in sorted(self._latest):
            wait = self._wait(replica)
            # A call that succeeds reports its end by its reply alone, and no further sample arrives.
            if wait is None or not self._is_fresh(replica, now):
                continue
            seconds = self._seconds(replica, now)
            self._soonest = min(self._soonest, now - seconds + _PATIENCE_S)
            if seconds >= _PATIENCE_S:
                long[wait.kind, wait.what, wait.where, wait.number].append(replica)
        return [self._line(replicas, now) for replicas in long.values()]

    def before_the_end(self, now: float) -> list[str]:
        """Return the latest sentences from before the order to end moved the replicas."""
        moved, lines = self._before
        return lines if lines and now - moved <= _LATELY_S else self.lines(now)

    def _wait(self, replica: int) -> Waiting | None:
        return self._latest[replica][0].waiting

    def _is_fresh(self, replica: int, now: float) -> bool:
        return now - self._latest[replica][1] <= max(_SILENT_S, _PERIODS * sample_period_s(self._replicas))

    def _seconds(self, replica: int, now: float) -> float:
        """Return the seconds for which a replica has been in its current wait."""
        sample, arrived = self._latest[replica]
        return (sample.waiting.seconds if sample.waiting is not None else 0.0) + now - arrived

    def _line(self, replicas: list[int], now: float) -> str:
        sample = self._latest[replicas[0]][0]
        wait = sample.waiting
        assert wait is not None
        seconds = max(self._seconds(replica, now) for replica in replicas)
        line = f"{self._name(replicas)} {_words(sample, wait, len(replicas))} for {seconds:.0f} s"
        if wait.kind in ("input", "servers"):
            return f"{line}."
        places: defaultdict[_Elsewhere, list[int]] = defaultdict(list)
        for replica in sorted(self._latest):
            if not self._is_there(replica, wait):
                places[self._elsewhere(replica, now)].append(replica)
        others = [self._absent(each, place, now) for place, each in [*places.items()][:_MOST_PLACES]]
        more = sum(map(len, [*places.values()][_MOST_PLACES:]))
        others += [f"{more:,} more have not arrived"] if more else []
        return "; ".join([line, *(others or ["all have arrived"])]) + "."

    def _is_there(self, replica: int, wait: Waiting) -> bool:
        """Return whether a replica is in the same collective, or in a later one of the same group."""
        other = self._wait(replica)
        return other is not None and other.group == wait.group and other.number >= wait.number

    def _elsewhere(self, replica: int, now: float) -> _Elsewhere:
        """Return the place of a replica that has not arrived."""
        sample, _ = self._latest[replica]
        if replica in self.asking:
            return _Elsewhere("asks", sample.where)
        if not self._is_fresh(replica, now):
            return _Elsewhere("silent", sample.where)
        if sample.waiting is not None:
            return _Elsewhere("waits", _words(sample, sample.waiting), _words(sample, sample.waiting, 2))
        return _Elsewhere("is", sample.where, sample.call)

    def _absent(self, replicas: list[int], place: _Elsewhere, now: float) -> str:
        """Return a sentence about replicas that have not arrived, and that are at one place."""
        several = len(replicas) > 1
        has, it = ("have", "they") if several else ("has", "it")
        name = f"{self._name(replicas)} {has} not arrived"
        if place.state == "asks":
            asks = "ask" if several else "asks"
            return f"{name}: {it} {asks} you for a line" + (f", in {place.where}" if place.where else "")
        if place.state == "silent":
            silent_s = max(now - self._latest[replica][1] for replica in replicas)
            seen = f"; {it} {'were' if several else 'was'} last seen in {place.where}" if place.where else ""
            return f"{name}, and {has} reported nothing for {silent_s:.0f} s{seen}"
        if place.state == "waits":
            seconds = max(self._seconds(replica, now) for replica in replicas)
            return f"{name}: {it} {place.more if several else place.where} for {seconds:.0f} s"
        if not place.where:
            return name
        call = f", in {place.more}" if place.more else ""
        seconds = max(now - self._steady[replica] for replica in replicas)
        return f"{name}: {it} {has} been in {place.where}{call}, for {seconds:.0f} s"

    def _name(self, replicas: list[int]) -> str:
        return f"{self.who}{'s' if len(replicas) > 1 else ''} {', '.join(ranges(replicas))}"


def _place(sample: TelemetrySample) -> tuple[object, ...]:
    wait = sample.waiting
    return sample.where, sample.steps, (wait.kind, wait.what, wait.number) if wait is not None else None


def _words(sample: TelemetrySample, wait: Waiting, count: int = 1) -> str:
    """Return the wait of one or several replicas in words: "has waited in all_reduce (cell 3, line 4; number 17)"."""
    facts = [cell_place(wait.where) or sample.where, f"number {wait.number}" if wait.number else ""]
    at = f" ({'; '.join(filter(None, facts))})" if any(facts) else ""
    has, its = ("has", "its") if count == 1 else ("have", "their")
    if wait.kind == "input":
        return f"{has} waited for {its} next batch{at}"
    if wait.kind == "servers":
        return f"{has} waited for {wait.what}{at}"
    if wait.kind == "background":
        return f"{has} had {_short(wait.what)}{at} under way"
    return f"{has} waited in {_short(wait.what)}{at}"


def _short(operation: str) -> str:
    """Return the name by which the user called an operation: all_reduce for `distnb's all_reduce(float32[10], sum)`."""
    return operation.partition("(")[0].removeprefix("distnb's ")
