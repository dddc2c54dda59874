"""The reports that replicas exchange during a backward pass if a strategy has several models.

A replica cannot know which models its pass reaches on the others: a loss head may be used for rare examples only. So
the replicas report it before they reduce anything:

    replica 0                          replica 1
    STARTS decoder              =      STARTS decoder              equal: its first buckets start during the pass
    (the decoder's buckets)            (the decoder's buckets)
    STARTS encoder              ≠      ENDED, reached {decoder}    unequal: nothing more starts during this pass
    ENDED, {decoder, encoder}   ≠      ENDED, {decoder}            all have ended: the encoder joins, with zeros

Between two reports a replica starts all buckets of a model that it has announced, so the order of the collectives is
the same on all replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from distnb.collectives.digests import digest_of_text

if TYPE_CHECKING:
    from distnb.collectives.gradients.parameter_groups import Identity
    from distnb.collectives.group.interface import Group

__all__ = ["Report", "all_equal", "digest_of", "exchange"]


class Report(NamedTuple):
    """A replica's report about a running pass.

    Attributes:
        ended: Whether the pass has ended on the replica; if not, it is about to start the buckets of one model.
        models: A digest of that model's identity; at the end, of what the pass has reached.
        outdated: A digest of the models that have changed since the replicas agreed on them: frozen, cast, extended.
        living: The number of models that exist on the replica.
    """

    ended: bool
    models: int
    outdated: int = 0
    living: int = 0


def exchange(group: Group, report: Report) -> list[Report]:
    """Return the reports of all replicas, in replica order. All of them must call this."""
    rows = [row.tolist() for row in group.all_gather(torch.tensor(report, dtype=torch.int64, device="cpu"))]
    return [Report(bool(ended), models, outdated, living) for ended, models, outdated, living in rows]


def all_equal(reports: Iterable[Report]) -> bool:
    """Return whether all replicas reported the same, regardless of the number of their models."""
    return len({report[:3] for report in reports}) == 1


@functools.lru_cache(maxsize=1024)
def digest_of(*identities: tuple[Identity, ...]) -> int:
    """Return a digest of lists of identities."""
    return digest_of_text(repr(identities))
