"""Private names of ipykernel: the application of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distnb.compat import patches

if TYPE_CHECKING:
    from ipykernel.kernelapp import IPKernelApp

__all__ = ["set_application"]


def set_application(application: IPKernelApp) -> None:
    """Make `IPKernelApp.instance()` return an existing application."""
    patches.replace("ipykernel.kernelapp:IPKernelApp._instance", application)
