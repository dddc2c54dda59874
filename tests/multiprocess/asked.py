"""What tests ask engines. A module of its own: an engine that unpickles these imports nothing else of the tests."""

from __future__ import annotations


def who(x: int) -> tuple[int, str, int]:
    from IPython import get_ipython

    names = get_ipython().user_ns
    return names["engine"], names["device"], x


def threads() -> tuple[int, str, str]:
    import os

    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"]


def ident() -> str:
    from IPython import get_ipython

    return str(get_ipython().kernel.ident)


def debuggers() -> list[str]:
    """Which modules of a debugger this process has loaded."""
    import sys

    return [name for name in sys.modules if name.partition(".")[0] in ("debugpy", "pydevd", "_pydevd_bundle")]
