"""The resolver of a cluster that is given in arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distnb.cluster.resolvers.base import ClusterResolver, whole_number
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError

__all__ = ["SimpleClusterResolver"]


class SimpleClusterResolver(ClusterResolver):
    """The cluster in the arguments.

    Args:
        cluster_spec: The cluster.
        master: The result of `master()` without a task; "" for the address of this process's task.
        task_type, task_id: The task of this process.
        environment: See `ClusterResolver.environment`.
        num_accelerators: The result of `num_accelerators()`, such as `{"GPU": 4}`; None to count this machine's.
        rpc_layer: See `ClusterResolver.rpc_layer`.

    Raises:
        OptionError: An argument is malformed, or names a task that the cluster does not have.

    Example:
        >>> resolver = SimpleClusterResolver({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=1)
        >>> resolver.master()
        'b:1'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._spec = ClusterSpec(cluster_spec)
        self._master = master
        self.task_type = task_type
        self.task_id = task_id
        self._environment = environment
        self._accelerators = None if num_accelerators is None else _checked(num_accelerators)
        self._rpc_layer = rpc_layer
        if task_type is not None and task_id is not None and task_type in self._spec.jobs:
            self._spec.task_address(task_type, task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the given cluster."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the named task; without a task, the given master or the address of this process."""
        if self._master and task_type is None and task_id is None:
            return self._with_protocol(self._master, rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the given numbers, for every task. Without them, see `ClusterResolver.num_accelerators`."""
        if self._accelerators is not None:
            return dict(self._accelerators)
        return super().num_accelerators(task_type, task_id, config_proto)

    @property
    def knows_accelerators(self) -> bool:
        """True if the numbers were given."""
        return self._accelerators is not None

    def __repr__(self) -> str:
        return (
            f"SimpleClusterResolver({self._spec.as_dict()!r}, task_type={self.task_type!r}, task_id={self.task_id!r})"
        )


def _checked(accelerators: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(accelerators, Mapping):
        raise OptionError(f"num_accelerators={accelerators!r} is not a dict. Give one, such as {{'GPU': 2}}.")
    return {str(kind): whole_number(n, f"num_accelerators[{kind!r}]={n!r}") for kind, n in accelerators.items()}
