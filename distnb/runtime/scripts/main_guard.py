"""The check that a process of multiprocessing does not run the whole script again.

If a DataLoader's workers are not forked (the default since Python 3.14), each worker imports the script. Without
`if __name__ == "__main__":` a worker would join the replicas or start engines, while the real replicas wait for data.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from distnb.errors import ContextError

__all__ = ["check_main_guard"]


def check_main_guard(what: str) -> None:
    """Raise ContextError if multiprocessing is importing this process's script.

    Args:
        what: The name, for the error, of the call that must not be repeated.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing's own check uses it too
        return
    script = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
    raise ContextError(
        f"{what} was reached while a process of multiprocessing, such as a DataLoader's worker, imports {script}. Each "
        "process that is not forked imports the script again (the default since Python 3.14). Move the lines that "
        'train into a function, and call it under `if __name__ == "__main__":`. Or have the workers forked: '
        'DataLoader(..., multiprocessing_context="fork").'
    )
