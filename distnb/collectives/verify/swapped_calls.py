"""Calls at different lines that met in one collective, though they are written to be about different things.

`if rank == 0: all_reduce(a)`, `else: all_reduce(b)` is what replicas do that each have lines of their own; and it is
what they do that reduce `a` and `b` in different orders, which would put unlike things together unseen. The first such
meeting is worth a warning. If the same two meet again with the replicas exchanged, the order was different.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Final

from distnb.collectives.verify import callsite
from distnb.collectives.verify.collective_log import Record

__all__ = ["SwappedCalls", "combines"]

# Nothing is put together in these, and taking turns with barriers is a custom.
_EMPTY: Final = frozenset({"barrier", "monitored_barrier", "new_group"})
_UNKNOWN: Final = bytes(8)


def combines(record: Record) -> bool:
    """Whether a collective brings something of the replicas together."""
    return _name(record) not in _EMPTY


def _name(record: Record) -> str:
    return record.operation.partition("(")[0]


def _all_alike(record: Record) -> bool:
    """Whether all replicas give the same kind of thing; a root, or all but it, may well have others for arguments."""
    return "root=" not in record.operation or _name(record) == "reduce"


class SwappedCalls:
    """What has met so far, as one replica sees it.

    Args:
        warn: Called with a text and the identity of this replica's call site.
    """

    def __init__(self, warn: Callable[[str, bytes], None] | None = None) -> None:
        self._warn = warn or _warn_at
        # (rank, signature, what this replica's call was about, what the other's was) -> number
        self._met: dict[tuple[int, bytes, bytes, bytes], int] = {}
        self._warned: set[tuple[bytes, bytes]] = set()

    def forget(self) -> None:
        """A program began: names mean other things in it."""
        self._met.clear()

    def crossed(self, number: int, mine: Record, rank: int, other: Record) -> int | None:
        """Note that two calls met; both are known to combine something.

        Returns:
            The number of an earlier collective of this program where they met with the replicas exchanged, or None.
        """
        pairs = [(mine.chain_about, other.chain_about)]
        if mine.about != other.about:
            pairs.append((mine.about, other.about))
        earlier = None
        for here, there in pairs:
            if here != there and _UNKNOWN not in (here, there):
                earlier = earlier or self._met.get((rank, mine.signature, there, here))
                self._met.setdefault((rank, mine.signature, here, there), number)
        return earlier

    def suspect(self, mine: Record, replica: int, other: Record, others: Callable[[], Sequence[int]]) -> None:
        """Warn, once for each two lines, if two calls that met are about different things.

        Args:
            mine: This replica's call.
            replica: This replica.
            other: The call that it met.
            others: Gives the replicas that made it.
        """
        if mine.about == other.about or _UNKNOWN in (mine.about, other.about) or not _all_alike(mine):
            return
        lines = (mine.bare_line, other.bare_line)
        if lines in self._warned:
            return
        self._warned.add(lines)
        them = others()
        who = f"replica{'s' if len(them) > 1 else ''} {', '.join(map(str, them))}"
        self._warn(
            f"One collective, {mine.operation}, was called{_as(mine)} on replica {replica} ({mine.place}) and"
            f"{_as(other)} on {who} ({other.place}). If these are not parts of the same thing, the result is "
            "wrong: the replicas may call their collectives in different orders. If they are, say so by a single call "
            "that all replicas make, with the value chosen in a line before it.",
            mine.site,
        )


def _as(record: Record) -> str:
    return f" as `{record.words}`" if record.words else ""


def _warn_at(text: str, identity: bytes) -> None:
    site = callsite.find(identity)
    warnings.warn_explicit(text, UserWarning, site.file, site.line)
