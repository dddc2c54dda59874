"""The messages to a parameter server, and its replies.

A variable lies on the servers in *shards*. A request is a tuple of operations that a server does in one atomic turn.
An operation's docstring names its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from distnb.objects.modes import NO_CHANGES, Environment
from distnb.wire.closure_messages import Fence
from distnb.wire.codec import give_codes

__all__ = [
    "Address",
    "Create",
    "Describe",
    "Drop",
    "GetOptimizer",
    "Gradient",
    "MakeOptimizer",
    "Pull",
    "PullRows",
    "RowsGradient",
    "ServerReply",
    "ServerRequest",
    "SetOptimizer",
    "Shard",
    "ShardInfo",
    "StepDone",
    "StepOptimizer",
    "Token",
    "WriteShard",
]

Shard = tuple[int, int]
"""(variable's number, part)."""

Token = tuple[int, int]
"""Names a change: (number of the closure that makes it, which of its changes). It is made once, however often asked."""


class RowsGradient(NamedTuple):
    """The gradient of some rows of a shard; those that are named twice are summed.

    Attributes:
        rows: `[k]` int64, within the shard.
        values: `[k, ...]`.
        sparse: Whether the optimizer gets a sparse gradient; if not, the server makes it dense.
    """

    rows: torch.Tensor
    values: torch.Tensor
    sparse: bool


Gradient = torch.Tensor | RowsGradient


# -- shards ------------------------------------------------------------------------------------------------------------


class Create(NamedTuple):
    """Make a shard; one that exists is replaced, and optimizers forget it. Gives its version.

    Attributes:
        value: None: zeros of that shape and dtype.
        trainable: Whether optimizers may have it.
    """

    shard: Shard
    name: str
    value: torch.Tensor | None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    trainable: bool = True


class Drop(NamedTuple):
    """Forget shards; those that are not there are no error. An optimizer that has none left is forgotten, too."""

    shards: tuple[Shard, ...]


class Pull(NamedTuple):
    """Read `dict[Shard, (version, tensor)]` of those whose version is not the known one (-1: none is known)."""

    known: Mapping[Shard, int]


class PullRows(NamedTuple):
    """Read `(version, values [k, ...])` of some rows `[k]` of a shard."""

    shard: Shard
    rows: torch.Tensor


class WriteShard(NamedTuple):
    """Change a shard. Gives its version.

    Attributes:
        method: assign, assign_add, assign_sub; with `rows` `[k]` scatter_add, _sub, _update, _min, _max, _mul, _div;
            assign_rows: the rows from `rows` on, as many as `value` has.
        token: None: it is not a closure's.
        seen: The version of which the value was computed. Nothing changes if the shard has another one, and the
            answer is None. None: any version.
    """

    shard: Shard
    method: str
    value: Any
    rows: Any = None
    token: Token | None = None
    seen: int | None = None


class Describe(NamedTuple):
    """Read a `ShardInfo` of each shard, in a tuple."""


class ShardInfo(NamedTuple):
    """The description of a shard.

    Attributes:
        version: Grows by one with each change, from a number that no earlier server has used.
        updates: How many changes there were.
    """

    shard: Shard
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    version: int
    updates: int


# -- optimizers --------------------------------------------------------------------------------------------------------


class MakeOptimizer(NamedTuple):
    """Make an optimizer, in the place of one of that number.

    Attributes:
        factory: By cloudpickle, a function that is given a list of lists of `torch.nn.Parameter`, one for each group,
            and returns a `torch.optim.Optimizer` with these groups, in order.
        groups: The shards of each group that this server has; there may be none.
        environment: The client's modes that have to be set before the factory is opened.
    """

    optimizer: int
    factory: bytes
    groups: tuple[tuple[Shard, ...], ...]
    environment: Environment = NO_CHANGES


class StepOptimizer(NamedTuple):
    """Let an optimizer step on the shards that have gradients here. Gives a `StepDone`.

    Attributes:
        options: Of each group what it is to have (lr, …), set before the step; without "params".
        seen: The version that each gradient was computed with.
        token: None: it is not a closure's.
    """

    optimizer: int
    gradients: Mapping[Shard, Gradient]
    options: tuple[Mapping[str, Any], ...]
    seen: Mapping[Shard, int]
    token: Token | None = None


class StepDone(NamedTuple):
    """The result of a step.

    Attributes:
        versions: Of the shards that had gradients, now.
        staleness: The most changes that one of them had between the version seen and this step.
        applied: False: the change of this token had been made before.
    """

    versions: dict[Shard, int]
    staleness: int
    applied: bool


class GetOptimizer(NamedTuple):
    """Read `{"state": {shard: {name: tensor or number}}, "steps": the number of steps}`."""

    optimizer: int


class SetOptimizer(NamedTuple):
    """Give an optimizer the state of some shards, also before its first step; that of others stays."""

    optimizer: int
    state: Mapping[Shard, Mapping[str, Any]]
    steps: int


# -- envelopes ---------------------------------------------------------------------------------------------------------


class ServerRequest(NamedTuple):
    """A client's request.

    Attributes:
        number: The answer carries it.
        fence: The closures that have ended: from now on their changes are refused.
    """

    number: int
    fence: Fence
    operations: tuple[Any, ...]


class ServerReply(NamedTuple):
    """A server's reply.

    Attributes:
        number: The request's; -1: some request of this client could not be read.
        results: Of each operation; of those before the one that failed.
        error: Why an operation failed. Later ones were not begun.
    """

    number: int
    results: tuple[Any, ...]
    error: BaseException | None = None


class Address(NamedTuple):
    """The address of a server.

    Attributes:
        path: That of its UNIX socket, for clients of its host.
        url, public: ZeroMQ's address, and the server's CURVE key (Z85), for others; "" if it listens on no port.
    """

    path: str
    url: str = ""
    public: str = ""


give_codes(16, ServerRequest, ServerReply, Pull, PullRows, StepOptimizer, StepDone)
