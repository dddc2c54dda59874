"""The notebook's commands: `%distnb` and `%%distribute`. They parse and delegate to the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What `%load_ext distnb` does. Loading twice changes nothing."""
    from distnb.magics.extension import Extension

    if getattr(shell, "_distnb", None) is None:
        shell._distnb = Extension(shell)  # type: ignore[attr-defined]
        shell._distnb.install()  # type: ignore[attr-defined]


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """What `%unload_ext distnb` does. A running cluster goes on."""
    extension = getattr(shell, "_distnb", None)
    if extension is not None:
        extension.remove()
        shell._distnb = None  # type: ignore[attr-defined]
