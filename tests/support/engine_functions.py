"""Functions that tests run on engines, in a separate module so that an engine imports no other test code with them."""

from __future__ import annotations


def identity(x: int) -> tuple[int, str, int]:
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
    """Return the debugger modules that this process has loaded."""
    import sys

    return [name for name in sys.modules if name.partition(".")[0] in ("debugpy", "pydevd", "_pydevd_bundle")]
