"""A plugin for nbval's process: its kernels are forked from a process that has loaded torch (`tests.support.warm_engines`)."""

from __future__ import annotations

from tests.support import warm_base, warm_engines

warm_engines.patch_kernels()


def pytest_unconfigure() -> None:
    warm_engines.close()
    warm_base.close()
