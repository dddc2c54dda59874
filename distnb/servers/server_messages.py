"""The messages to a parameter server, and its replies.

The servers store each variable in one or more *shards*. A request is a tuple of operations, which a server runs as one
atomic unit. The docstring of an operation names its result. For example, a worker's step on server 0:

    ServerRequest(number=7, fence=..., operations=(
        StepOptimizer(optimizer=1, gradients={(3, 0): tensor}, options=({"lr": 0.1},), seen={(3, 0): 12}),
        Pull(known={(3, 0): 12}),
    ))
    ServerReply(number=7, results=(
        StepDone(versions={(3, 0): 14}, staleness=1, applied=True),   another worker's change came first: version 13
        {(3, 0): (14, tensor)},
    ))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from distnb.objects.modes.environment import NO_CHANGES, Environment
from distnb.servers.closure_messages import Fence
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
"""A shard's name: (the variable's number, the number of the part)."""

Token = tuple[int, Shard | int, int]
"""The identity of a closure's change: (the closure's number, the target, the number of the target's change).

The target is a shard, or the number of an optimizer that takes a step. For example, `(7, (3, 0), 2)` is the second
change that closure 7 makes to the shard `(3, 0)`. A server applies a change once, even if it receives several requests
with the change's token.
"""


class RowsGradient(NamedTuple):
    """The gradient of some rows of a shard. Gradients of the same row are summed.

    Attributes:
        rows: The row numbers within the shard, `[k]` int64.
        values: The gradients, `[k, ...]`.
        sparse: Whether the optimizer receives a sparse gradient. If not, the server converts it to a dense one.
    """

    rows: torch.Tensor
    values: torch.Tensor
    sparse: bool


Gradient = torch.Tensor | RowsGradient


# -- shards ------------------------------------------------------------------------------------------------------------


class Create(NamedTuple):
    """An operation that makes a shard. The result is its version.

    An existing shard of this name is replaced and removed from optimizers.

    Attributes:
        value: The initial value. None: zeros of `shape` and `dtype`.
        trainable: Whether the shard requires gradients, if its dtype allows it.
    """

    shard: Shard
    name: str
    value: torch.Tensor | None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    trainable: bool = True


class Drop(NamedTuple):
    """An operation that removes shards. Unknown shards are ignored. An optimizer without shards is removed as well."""

    shards: tuple[Shard, ...]


class Pull(NamedTuple):
    """An operation that reads shards. The result is `dict[Shard, (version, tensor)]` of the shards that have changed.

    Attributes:
        known: The version of each shard that the client has; -1 if it has none. A shard that still has this version is
            left out of the result.
    """

    known: Mapping[Shard, int]


class PullRows(NamedTuple):
    """An operation that reads some rows `[k]` of a shard. The result is `(version, values [k, ...])`."""

    shard: Shard
    rows: torch.Tensor


class WriteShard(NamedTuple):
    """An operation that changes a shard. The result is its new version.

    Attributes:
        method: assign, assign_add or assign_sub; with `rows` `[k]`: scatter_add, _sub, _update, _min, _max, _mul or
            _div; with the number of the first row in `rows`: assign_rows, which assigns as many rows as `value` has.
        token: The identity of the change. None: the change does not belong to a closure.
        seen: The version from which the value was computed. If the shard has another version, it is not changed and the
            result is None. None: any version.
    """

    shard: Shard
    method: str
    value: Any
    rows: Any = None
    token: Token | None = None
    seen: int | None = None


class Describe(NamedTuple):
    """An operation whose result is a tuple with a `ShardInfo` for each shard."""


class ShardInfo(NamedTuple):
    """The description of a shard.

    Attributes:
        version: The version, which increases by one with each change. It starts at a number that no earlier server has
            used.
        updates: The number of changes.
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
    """An operation that makes an optimizer and replaces one with the same number.

    Attributes:
        factory: A function, pickled with cloudpickle. It receives a list of `torch.nn.Parameter` for each group, and
            returns a `torch.optim.Optimizer` with these groups in this order.
        groups: The shards of each group that this server holds. A group may have none here.
        environment: The client's modes, which are set before the factory is unpickled.
    """

    optimizer: int
    factory: bytes
    groups: tuple[tuple[Shard, ...], ...]
    environment: Environment = NO_CHANGES


class StepOptimizer(NamedTuple):
    """An operation that takes an optimizer's step on the shards in `gradients`. The result is a `StepDone`.

    Attributes:
        options: The options of each group (lr, …) without "params". They are set before the step.
        seen: The version of each shard from which its gradient was computed.
        token: The identity of the step. None: the step does not belong to a closure.
    """

    optimizer: int
    gradients: Mapping[Shard, Gradient]
    options: tuple[Mapping[str, Any], ...]
    seen: Mapping[Shard, int]
    token: Token | None = None


class StepDone(NamedTuple):
    """The result of a step.

    Attributes:
        versions: The versions, after the step, of the shards that had gradients.
        staleness: The largest number of changes that one of these shards had between the version seen and this step.
        applied: Whether this request applied the step. False: a request with the same token had applied it before.
    """

    versions: dict[Shard, int]
    staleness: int
    applied: bool


class GetOptimizer(NamedTuple):
    """An operation that reads an optimizer's state.

    The result is `{"state": {shard: {name: tensor or number}}, "steps": the number of steps}`.
    """

    optimizer: int


class SetOptimizer(NamedTuple):
    """An operation that sets an optimizer's state for some shards, even before its first step. Other states stay."""

    optimizer: int
    state: Mapping[Shard, Mapping[str, Any]]
    steps: int


# -- envelopes ---------------------------------------------------------------------------------------------------------


class ServerRequest(NamedTuple):
    """A client's request.

    Attributes:
        number: The number of the request, which its reply repeats.
        fence: The closures that have ended. The server refuses their changes from now on.
        operations: The operations, which the server runs in order.
    """

    number: int
    fence: Fence
    operations: tuple[Any, ...]


class ServerReply(NamedTuple):
    """A server's reply.

    Attributes:
        number: The request's number. -1: the server could not read a request of this client.
        results: The result of each operation, up to the first that failed.
        error: The exception of the operation that failed. Later operations were not run.
    """

    number: int
    results: tuple[Any, ...]
    error: BaseException | None = None


class Address(NamedTuple):
    """The address of a server.

    Attributes:
        path: The path of its UNIX socket, for clients on its host.
        url, public: The ZeroMQ address and the server's public CURVE key (Z85), for clients on other hosts. Empty if
            the server does not listen on a port.
    """

    path: str
    url: str = ""
    public: str = ""


give_codes(16, ServerRequest, ServerReply, Pull, PullRows, StepOptimizer, StepDone)
