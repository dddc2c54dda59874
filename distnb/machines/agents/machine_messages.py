"""The messages between a machine agent and the process that owns its engines: lines on the agent's standard streams.

Each line is a JSON list, whose first element names the message. The agent's have a prefix, since the programs on the
way may print, too:

    orders    ["wait"]                       the cluster is still planned, again and again before anything else
              ["begin", ASSIGNMENT]          the cluster
              ["launch", [[3, "cuda:0"]], 8] start engines; 8 processes share the machine
              ["end", [3]]                   end engines: SIGTERM, then SIGKILL
              ["close"]                      end everything

    reports   distnb ["facts", FACTS]        the machine, as soon as the agent runs
              distnb ["beat"]                once a second
              distnb ["output", 3, "text"]   what an engine wrote outside programs
              distnb ["ended", 3, "exited with code 1"]
              distnb ["closes", "was killed by SIGTERM"]   the last one: how all engines end that have not yet
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distnb.cluster.connection import Connection

__all__ = ["Assignment", "decode_report", "encode_order", "encode_report"]

_PREFIX = b"distnb ["


@dataclass(frozen=True)
class Assignment:
    """The cluster to which the engines of a machine belong, and their common settings.

    Attributes:
        connection: The information that the engines need to reach the notebook. Its `notebook_pid` is not valid there.
        notebook: The notebook's address.
        agent: The module whose `install` makes an engine of a process.
        hash_seed: The seed of string hashes, the same on every machine.
        variables: Environment variables of the notebook that the engines get, too.
    """

    connection: Connection
    notebook: str
    agent: str
    hash_seed: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Assignment:
        """Return the assignment whose fields an order contains."""
        return cls(**{**found, "connection": Connection(**found["connection"])})


def encode_order(*words: Any) -> bytes:
    """Return a line for the agent."""
    return json.dumps(words).encode() + b"\n"


def encode_report(*words: Any) -> bytes:
    """Return a line of the agent."""
    return b"distnb " + encode_order(*words)


def decode_report(line: bytes) -> list[Any] | None:
    """Return a report; None if another program wrote the line."""
    at = line.find(_PREFIX)  # mpiexec and srun may be asked to label lines
    try:
        report: list[Any] | None = json.loads(line[at + len(_PREFIX) - 1 :]) if at >= 0 else None
    except ValueError:
        return None
    return report
