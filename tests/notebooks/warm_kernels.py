"""A plugin for nbval's process: its kernels are forked from a process that has loaded torch (`tests.warm_engines`)."""

from __future__ import annotations

import jupyter_client.provisioning.local_provisioner as provisioner

from tests import warm_engines

_launch = provisioner.launch_kernel


def _launch_warm(command: list[str], **settings: object) -> object:
    if warm_engines.suits(settings["env"]):  # type: ignore[arg-type]
        return warm_engines.start_kernel(command, **settings)  # type: ignore[arg-type]
    return _launch(command, **settings)


provisioner.launch_kernel = _launch_warm  # type: ignore[assignment]


def pytest_unconfigure() -> None:
    warm_engines.close()
