"""Private names of ipykernel: the application of the process."""

from __future__ import annotations

from distnb.compat.versions import private_names

with private_names("ipykernel"):
    from ipykernel.kernelapp import IPKernelApp

    _no_instance = IPKernelApp._instance

__all__ = ["set_application"]


def set_application(application: IPKernelApp) -> None:
    """Make `IPKernelApp.instance()` return an existing application."""
    IPKernelApp._instance = application  # type: ignore[assignment]
