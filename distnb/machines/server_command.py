"""The command `python -m distnb.server`, or `distnb worker`: a server that waits for notebooks to use this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distnb.cluster.resolvers import TFConfigClusterResolver
from distnb.command import Command
from distnb.errors import DistnbError, OptionError
from distnb.machines.secret import SECRET_VARIABLE

if TYPE_CHECKING:
    from distnb.machines.engine_server import Server

__all__ = ["WORKER"]

_TEXT = """\
TF_CONFIG describes the cluster and this machine's task in it. The server listens on that task's address and waits for
a notebook that calls distnb.start(on=distnb.Servers(…)). It runs the engines that the notebook requests. SIGTERM or
Ctrl-C ends the server and its engines.

Notebook and servers authenticate with a secret file, the same on all machines and readable only by you:
  (umask 077; head -c 48 /dev/urandom | base64 > ~/.distnb-secret)
"""


def _main(arguments: Sequence[str] | None, prog: str = "distnb worker") -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--secret-file", metavar="PATH", help=f"the secret file (default: the one that {SECRET_VARIABLE} names)"
    )
    options = parser.parse_args(arguments)
    from distnb.machines.engine_server import serve_until_signal

    try:
        serve_until_signal(_server(options.secret_file))
    except OptionError as error:
        parser.error(str(error))
    except DistnbError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _server(secret: str | None) -> Server:
    from distnb.machines.engine_server import Server

    resolver = TFConfigClusterResolver()
    spec, kind, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    if not spec or kind is None or index is None:
        raise OptionError(
            'TF_CONFIG does not say which task this machine is. Set it, such as {"cluster": {"worker": '
            '["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}.'
        )
    return Server(spec, kind, index, secret=secret)


WORKER = Command("worker", "wait for a notebook that uses this machine", _main)
