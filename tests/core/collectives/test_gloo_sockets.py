"""Finding the event loop of a Gloo device."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distnb.collectives.group.gloo_sockets import event_loops


def test_a_loop_that_reuses_a_descriptor_counts_as_new() -> None:
    def device() -> Any:
        return dist.ProcessGroupGloo.create_device(interface="lo", lazy_init=False)

    empty = event_loops()
    first = device()
    before = event_loops()
    [earlier] = [poller for pipe, poller in before.items() if pipe not in empty]
    del first
    second = device()
    [later] = [poller for pipe, poller in event_loops().items() if pipe not in before]
    assert later == earlier
    del second
