"""The number of threads with which an engine computes."""

from __future__ import annotations

import os

import torch

from distnb.cluster.process_environment import SHARING_VARIABLE, THREADS_VARIABLE, cores

__all__ = ["share_cores"]


def share_cores(engines: int) -> None:
    """Share this machine's cores with another number of engines than at the start.

    A number of threads that the user has chosen stays, in OMP_NUM_THREADS or by `torch.set_num_threads`.
    """
    before = os.environ.get(THREADS_VARIABLE)
    if os.environ.get(SHARING_VARIABLE) != "1" or before != str(torch.get_num_threads()):
        return
    threads = max(1, cores() // engines)
    torch.set_num_threads(threads)
    os.environ[THREADS_VARIABLE] = os.environ["OMP_NUM_THREADS"] = str(threads)
