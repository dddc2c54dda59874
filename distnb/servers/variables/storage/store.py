"""The variables on a parameter server and the operations on them. This module uses no sockets and no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distnb.errors import ClosureCancelled, OptionError, StaleHandleError
from distnb.objects.modes.environment import apply_environment
from distnb.servers.closure_messages import Fence
from distnb.servers.server_messages import (
    Create,
    Describe,
    Drop,
    GetOptimizer,
    MakeOptimizer,
    Pull,
    PullRows,
    ServerReply,
    ServerRequest,
    SetOptimizer,
    Shard,
    ShardInfo,
    StepDone,
    StepOptimizer,
    Token,
    WriteShard,
)
from distnb.servers.variables.storage.optimizers import ServerOptimizer
from distnb.variables import scattering
from distnb.variables.settings import value_for

__all__ = ["ShardStore"]


@dataclass
class _Held:
    """A shard with its version and its number of updates."""

    name: str
    parameter: torch.nn.Parameter
    version: int
    updates: int = 0

    @property
    def label(self) -> str:
        return f"variable {self.name!r}"

    def changed(self) -> None:
        self.version += 1
        self.updates += 1


class ShardStore:
    """The shards and optimizers of one server. Requests are atomic: one is finished before the next one starts.

    Args:
        first_version: The version of new shards. A server that replaces another uses a different number, so no client
            mistakes its copies of the old server's shards for copies of the new ones.
    """

    def __init__(self, first_version: int = 0) -> None:
        self._first_version = first_version
        self._shards: dict[Shard, _Held] = {}
        self._optimizers: dict[int, ServerOptimizer] = {}
        self._oldest = 0  # all closures with a smaller number have ended
        self._astray: set[int] = set()  # the closures from `_oldest` on that have ended
        self._applied: dict[int, set[Token]] = {}  # by unfinished closure: its changes that were applied
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Create: self._create,
            Drop: self._drop,
            Pull: self._pull,
            PullRows: self._pull_rows,
            WriteShard: self._write,
            MakeOptimizer: self._make_optimizer,
            StepOptimizer: self._step,
            GetOptimizer: self._get_optimizer,
            SetOptimizer: self._set_optimizer,
            Describe: self._describe,
        }

    def handle(self, request: ServerRequest) -> ServerReply:
        """Run a request's operations in order, up to the first that raises.

        An operation that raises has changed nothing, and its token can be used again. There is one exception: an
        optimizer that raises during its step may have changed some of the shards.

        Returns:
            The reply. Its tensors are the store's own and must be sent before the next request is handled.
        """
        self._note_ended(request.fence)
        results: list[Any] = []
        try:
            with torch.no_grad():
                for operation in request.operations:
                    results.append(self._handlers[type(operation)](operation))
        except Exception as error:  # noqa: BLE001 - the client's function may raise anything; the client receives it
            return ServerReply(request.number, tuple(results), error)
        return ServerReply(request.number, tuple(results))

    # -- exactly once ------------------------------------------------------------------------------------------------

    def _note_ended(self, fence: Fence) -> None:
        oldest = max(self._oldest, fence.oldest)
        if oldest == self._oldest and self._astray.issuperset(fence.astray):
            return
        self._oldest = oldest
        self._astray = {closure for closure in self._astray.union(fence.astray) if closure >= oldest}
        self._applied = {closure: made for closure, made in self._applied.items() if not self._has_ended(closure)}

    def _has_ended(self, closure: int) -> bool:
        return closure < self._oldest or closure in self._astray

    def _was_applied(self, token: Token | None) -> bool:
        """Return whether a change was already applied, when an earlier worker ran its closure.

        Raises:
            ClosureCancelled: The closure has ended. A late change, from a worker that was given up, would alter values
                after the coordinator considered the closure finished.
        """
        if token is None:
            return False
        if self._has_ended(token[0]):
            raise ClosureCancelled(
                "A parameter server refused a change of a function that has ended: it was cancelled, or another worker "
                "has finished it."
            )
        return token in self._applied.get(token[0], ())

    def _note_applied(self, token: Token | None) -> None:
        if token is not None:
            self._applied.setdefault(token[0], set()).add(token)

    # -- shards ------------------------------------------------------------------------------------------------------

    def _held(self, shard: Shard) -> _Held:
        held = self._shards.get(shard)
        if held is None:
            raise StaleHandleError(
                f"This parameter server has no shard {shard}: its variable is gone, or the server is a new one. "
                "Restore the variables from the last checkpoint."
            )
        return held

    def _create(self, asked: Create) -> int:
        if asked.value is None:
            value = torch.zeros(asked.shape, dtype=asked.dtype, device="cpu")
        else:
            # Copy the value. The message's memory may be shared with a client, which can end, and a shared page that is
            # written to exists twice.
            value = asked.value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        learns = asked.trainable and (value.is_floating_point() or value.is_complex())
        before = self._shards.get(asked.shard)
        self._forget(asked.shard)
        version = self._first_version if before is None else before.version + 1
        self._shards[asked.shard] = _Held(
            name=asked.name, parameter=torch.nn.Parameter(value, requires_grad=learns), version=version
        )
        return version

    def _drop(self, asked: Drop) -> None:
        for shard in asked.shards:
            self._forget(shard)
            self._shards.pop(shard, None)

    def _forget(self, shard: Shard) -> None:
        for number, optimizer in list(self._optimizers.items()):
            optimizer.forget(shard)
            if not optimizer:
                del self._optimizers[number]

    def _pull(self, asked: Pull) -> dict[Shard, tuple[int, torch.Tensor]]:
        found = {shard: self._held(shard) for shard in asked.known}
        return {
            shard: (held.version, held.parameter.detach())
            for shard, held in found.items()
            if held.version != asked.known[shard]
        }

    def _pull_rows(self, asked: PullRows) -> tuple[int, torch.Tensor]:
        held = self._held(asked.shard)
        return held.version, held.parameter.detach().index_select(0, asked.rows)

    def _write(self, asked: WriteShard) -> int | None:
        held = self._held(asked.shard)
        if not self._was_applied(asked.token):
            if asked.seen not in (None, held.version):
                return None
            _change(held, asked)
            held.changed()
            self._note_applied(asked.token)
        return held.version

    def _describe(self, asked: Describe) -> tuple[ShardInfo, ...]:
        return tuple(
            ShardInfo(
                shard=shard,
                name=held.name,
                shape=tuple(own.shape),
                dtype=own.dtype,
                nbytes=own.nbytes,
                version=held.version,
                updates=held.updates,
            )
            for shard, held in self._shards.items()
            for own in (held.parameter,)
        )

    # -- optimizers --------------------------------------------------------------------------------------------------

    def _optimizer(self, number: int) -> ServerOptimizer:
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            raise StaleHandleError(
                f"This parameter server has no optimizer {number}: its parameters are gone, or the server is a new "
                "one. Restore from the last checkpoint."
            )
        return optimizer

    def _make_optimizer(self, asked: MakeOptimizer) -> None:
        apply_environment(asked.environment.on("cpu"))  # servers keep shards and optimizers on the CPU
        parameters = {shard: self._held(shard).parameter for group in asked.groups for shard in group}
        self._optimizers[asked.optimizer] = ServerOptimizer(asked.factory, asked.groups, parameters)

    def _step(self, asked: StepOptimizer) -> StepDone:
        optimizer = self._optimizer(asked.optimizer)
        held = {shard: self._held(shard) for shard in asked.gradients}
        applied = not self._was_applied(asked.token)
        stale = max((each.version - asked.seen[s] for s, each in held.items() if s in asked.seen), default=0)
        if applied:
            ready = optimizer.prepare(asked.gradients, asked.options)
            try:
                optimizer.step(ready, asked.options)
            finally:  # even if the step raises: a half-done step changes values too, so clients must read them again
                for each in held.values():
                    each.changed()
            self._note_applied(asked.token)
        return StepDone({shard: each.version for shard, each in held.items()}, stale if applied else 0, applied)

    def _get_optimizer(self, asked: GetOptimizer) -> dict[str, Any]:
        optimizer = self._optimizer(asked.optimizer)
        return {"state": optimizer.state(), "steps": optimizer.steps}

    def _set_optimizer(self, asked: SetOptimizer) -> None:
        self._optimizer(asked.optimizer).load(asked.state, asked.steps)


def _change(held: _Held, asked: WriteShard) -> None:
    """Apply a change to a shard. If this raises, nothing has changed."""
    own, method = held.parameter.detach(), asked.method
    if method.startswith("scatter_"):
        rows, updates = scattering.parse_scatter(own, held.label, method, asked.rows, asked.value)
        scattering.apply(method, own, rows, updates)
        return
    if method == "assign_rows":
        count = len(asked.value)
        if not 0 <= asked.rows <= asked.rows + count <= len(own):
            raise OptionError(
                f"{method} of {held.label}: rows {asked.rows} to {asked.rows + count - 1} are outside its {len(own)}."
            )
        own = own[asked.rows : asked.rows + count]
    value = value_for(own, held.label, method, asked.value)
    if method == "assign_add":
        own.add_(value)
    elif method == "assign_sub":
        own.sub_(value)
    elif method in ("assign", "assign_rows"):
        own.copy_(value)
    else:
        raise OptionError(f"A parameter server has no method {method!r} for {held.label}.")
