"""`distnb kernel`, which installs the specification of a kernel that shares memory with others."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distnb.command import Command

__all__ = ["KERNEL", "PROVISIONER", "specification"]

PROVISIONER = "distnb-shared"
"""The name of the provisioner, an entry point of the package."""

_TEXT = """\
Installs a kernel whose notebooks share the memory of Python, torch and distnb with the other notebooks of their Jupyter
server, and with their engines. Choose it in a notebook as "Python 3 (distnb, shared memory)". `jupyter kernelspec
uninstall NAME` removes it.
"""


def specification() -> dict[str, object]:
    """Return the content of the kernel's `kernel.json`, for this Python."""
    return {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (distnb, shared memory)",
        "language": "python",
        "metadata": {"debugger": True, "kernel_provisioner": {"provisioner_name": PROVISIONER}},
    }


def _install(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="distnb kernel", description=_TEXT)
    parser.add_argument("--name", default="distnb", help="its name (default: distnb)")
    parser.add_argument("--user", action="store_true", help="for this user (default: for this Python environment)")
    found = parser.parse_args(words)
    from jupyter_client.kernelspec import KernelSpecManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(specification(), indent=1))
        prefix = None if found.user else sys.prefix
        place = KernelSpecManager().install_kernel_spec(folder, found.name, user=found.user, prefix=prefix)
    print(f"The kernel is installed in {place}. Restart the Jupyter server.")
    return 0


KERNEL = Command("kernel", "install a kernel that shares memory with others", _install)
