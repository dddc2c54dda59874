"""A worker with several replicas, each on its own device. All run the function; the servers see a single client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.sums import sum_sparse
from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.collectives.gradients.gradient_sync import GradientSync
from distnb.compat import torch_internals
from distnb.runtime import contexts
from distnb.runtime.reduction.gathering import broadcast_bytes
from distnb.runtime.replica import Spmd
from distnb.runtime.scopes import metric_binding
from distnb.runtime.scopes.registration import Registration
from distnb.runtime.this_process import this_process
from distnb.runtime.variable_homes import ReplicaHome
from distnb.servers.variables.here import servers_here
from distnb.values.distributed import PerReplica
from distnb.values.structure import map_structure
from distnb.variables.variable import Variable
from distnb.wire.codec import Frame, decode
from distnb.wire.tensors import encode_tensors

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group
    from distnb.runtime.base import Owner
    from distnb.runtime.spmd import SpmdProcess
    from distnb.servers.variables.access import ServerAccess
    from distnb.servers.variables.server_variable import ServerVariable

__all__ = ["WorkerReplicas", "WorkingTogether"]

_NONE, _SPARSE, _DENSE = range(3)


class WorkerReplicas:
    """The replicas of this worker, including this process. All strategies that functions use share them.

    Replica 0 communicates with the servers for all replicas. The others make the same requests and receive its answers.
    Only rows of tables are read by each replica for itself. Gradients are summed over the replicas, as in a
    MirroredStrategy.

    Attributes:
        access: This replica's access to the variables.
        process: This replica's process.
        sync: The synchronisation of the gradients of models' parameters.
        registration: The registration of these parameters.
        home: The home of the replicas' variables.
    """

    def __init__(self, access: ServerAccess) -> None:
        assert this_process.replica is not None
        self.access = access
        self.process: SpmdProcess = this_process.replica
        self.sync = GradientSync(self._aggregation, in_replica=contexts.in_replica)
        self.registration = _CopyRegistration(None, self.sync, lambda: self._group)
        self.home = ReplicaHome(self.registration, self._aggregation)
        self._rows = _GradientsElsewhere(self)
        self._of_group: Aggregation | None = None
        self._generation = -1

    @property
    def _group(self) -> Group:
        return self.process.group

    def _aggregation(self) -> Aggregation:
        if self._of_group is None or self._of_group.group is not self._group:
            self._of_group = Aggregation(self._group)
        return self._of_group

    def begin(self, access: ServerAccess) -> None:
        """Prepare for a closure in the current process group.

        Args:
            access: This replica's access. After a replica was replaced, all replicas start again with a new one.
        """
        if access is not self.access:
            self.sync.detach()
            self.access = access
        if self._group.generation != self._generation:
            # The failure that ended the previous group may have left the replicas with different copies.
            self._generation = self._group.generation
            access.copies.mark_doubtful()
            self.sync.meet()

    def keep_in_sync(self, models: Sequence[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of new copies over the replicas from now on. The copies are equal on all replicas."""
        within = {id(parameter) for model in models for parameter in model.parameters()}
        loose = [parameter for parameter in parameters if id(parameter) not in within]
        if models or loose:
            self.registration.register_equal(models, loose)
        if self.access.representatives:
            BACKWARD_PASSES.listen(self._rows)

    def bind(self, metric: Any) -> None:
        """Bind a metric, so that each replica updates its own copy with its own part of the data."""
        import torchmetrics

        for each in metric.modules():
            if isinstance(each, torchmetrics.Metric):
                metric_binding.bind(each)

    def owns(self, made: Any) -> bool:
        """Return whether a tensor is the copy of a variable on the servers, or represents one."""
        return self.registration.owns(made) or self.access.represented.stored_of(made) is not None

    def ask_once(self, ask: Callable[[], Any]) -> Any:
        """Call `ask` on replica 0 and return its answer on all replicas. All replicas must call this method.

        An error on replica 0 ends the closure on all replicas.
        """
        if self._group.rank == 0:
            answers = ask()
            broadcast_bytes(self._group, _joined(encode_tensors(answers)), 0)
            return answers
        return decode(_split(broadcast_bytes(self._group, None, 0)))

    def whole(self, value: Any) -> Any:
        """Return a function's result in which each PerReplica value has the components of all replicas."""
        return map_structure(self._gathered, value)

    def _gathered(self, leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        (own,) = leaf.values
        return PerReplica(self._group.all_gather_object(map_structure(_on_host, own)))


class _CopyRegistration(Registration):
    """The registration of copies that are parameters of models. Representatives of tables are not registered."""

    def _register(self, parameter: torch.nn.Parameter, *args: Any, **kwargs: Any) -> bool:
        return not isinstance(parameter, Variable) and super()._register(parameter, *args, **kwargs)


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _joined(frames: Sequence[Frame]) -> bytes:
    """Join frames into one byte string: their number, the length of each (8 bytes, little-endian), their content."""
    lengths = [len(frames), *(memoryview(frame).nbytes for frame in frames)]
    return b"".join([each.to_bytes(8, "little") for each in lengths] + list(frames))


def _split(data: bytes) -> list[Frame]:
    count = int.from_bytes(data[:8], "little")
    begin, frames = 8 * (count + 1), list[Frame]()
    for place in range(count):
        nbytes = int.from_bytes(data[8 * place + 8 : 8 * place + 16], "little")
        frames.append(bytearray(memoryview(data)[begin : begin + nbytes]))
        begin += nbytes
    return frames


class WorkingTogether(Spmd):
    """The runtime of a strategy on a worker with several replicas, in a function that the coordinator has scheduled."""

    def __init__(self, strategy: Owner, replicas: WorkerReplicas) -> None:
        self._replicas = replicas
        super().__init__(replicas.process, strategy)
        self._sync, self.registration, self.home = replicas.sync, replicas.registration, replicas.home

    def owns(self, made: Any) -> bool:
        return self._replicas.owns(made)

    def _resynchronise(self, within: str) -> None:
        # The servers hold the authoritative values, and `WorkerReplicas.begin` has the copies read from them.
        self._generation = self._process.group.generation


class _GradientsElsewhere:
    """A listener to backward passes that sums, over the replicas, gradients of variables that have no parameter here.

    These are `distnb.Variable`s and tables whose rows were read. `GradientSync` does the same for parameters.
    """

    def __init__(self, replicas: WorkerReplicas) -> None:
        self._replicas = replicas
        self._before: list[tuple[ServerVariable, torch.Tensor | None]] = []
        self._local: set[int] = set()  # variables with gradients made under `no_sync`, which are not summed yet
        self._in_replica = False

    @property
    def aggregates(self) -> bool:
        return self._replicas.process.size > 1 and servers_here.access is self._replicas.access

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        self._in_replica = contexts.in_replica()
        variables = [each for each in self._replicas.access.representatives.values() if each.requires_grad]
        self._before = [(each, None if each.number in self._local else each.grad) for each in variables]
        for variable, before in self._before:
            if before is not None:
                variable.grad = None

    def end(self) -> None:
        if self._in_replica and not self._replicas.sync.is_synced:
            self._local.update(each.number for each, _ in self._before if each.grad is not None)
        elif self._in_replica and self._before:
            self._add_up([each for each, _ in self._before])
        for variable, before in self._before:
            if before is not None:
                fresh, variable.grad = variable.grad, before
                if fresh is not None:
                    variable._add_gradient(fresh)
        self._before = []

    def failed(self) -> None:
        for variable, before in self._before:
            if variable.number not in self._local:
                variable.grad = before
        self._before = []

    def computing(self, inputs: Sequence[Any], create_graph: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def _add_up(self, variables: Sequence[ServerVariable]) -> None:
        group = self._replicas.process.group
        own = [_NONE if each.grad is None else _SPARSE if each.grad.is_sparse else _DENSE for each in variables]
        kinds = torch.tensor(own)
        group.all_reduce(kinds, "max")
        for variable, kind in zip(variables, kinds.tolist(), strict=True):
            if kind == _NONE:
                continue
            gradient = variable.grad
            if kind == _SPARSE:
                variable.grad = sum_sparse(group, self._no_rows(variable) if gradient is None else gradient)
                continue
            if gradient is None:
                gradient = torch.zeros(variable.shape, dtype=variable.dtype, device=self._replicas.access.device)
            total = gradient.to_dense().clone(memory_format=torch.contiguous_format)
            group.all_reduce(total)
            variable.grad = total
        self._local.clear()

    def _no_rows(self, variable: ServerVariable) -> torch.Tensor:
        device = self._replicas.access.device
        rows = torch.zeros((1, 0), dtype=torch.int64, device=device)
        values = torch.zeros((0, *variable.shape[1:]), dtype=variable.dtype, device=device)
        return torch_internals.sparse_tensor(rows, values, variable.shape)
