"""The limit of open files of the notebook's process, which has several for each engine."""

from __future__ import annotations

import logging
import os
import resource

from distnb.errors import StartError

__all__ = ["FILES_PER_ENGINE", "raise_file_limit", "raise_file_limit_of_server"]

_logger = logging.getLogger("distnb.cluster")

FILES_PER_ENGINE = 6
"""The end of its process, the pipes to its machine, and the sockets for control, programs and closures."""

_FEW = 256  # for everything else that the notebook opens
_SERVERS = 1 << 16  # one address has fewer ports, so it cannot open as many connections to a server


def raise_file_limit_of_server() -> None:
    """Raise this process's limit of open files, since anyone may open connections to its port."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _SERVERS if most == resource.RLIM_INFINITY else min(_SERVERS, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        _logger.info("the limit of open files is %d instead of %d", wanted, limit)


def raise_file_limit(engines: int) -> None:
    """Raise this process's limit of open files if a cluster of this size may need it.

    Most systems begin with a low limit of 1,024 files, because old programs fail with more, and let each process raise
    it up to a high one.

    Raises:
        StartError: The system's limit is too low.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + engines * FILES_PER_ENGINE + _FEW
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise StartError(
            f"{engines} engines may need {needed:,} open files in this process ({FILES_PER_ENGINE} each), but the "
            f"system allows {most:,}. Raise the limit for the notebook's server (ulimit -Hn; LimitNOFILE= of a system "
            f"service; --ulimit nofile= of a container), or start fewer engines."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
    _logger.info("the limit of open files is %d instead of %d", needed, limit)
