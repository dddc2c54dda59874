"""The notebook's commands, `%distnb` and `%%distribute`. They parse their lines, and delegate to the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Load distnb into a shell: `%load_ext distnb`. Loading twice changes nothing, and it cannot be unloaded."""
    from distnb.magics.extension import Extension

    if not hasattr(shell, "_distnb"):
        shell._distnb = Extension(shell)  # type: ignore[attr-defined]
        shell._distnb.install()  # type: ignore[attr-defined]
