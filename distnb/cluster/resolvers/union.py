"""Several resolvers combined into one."""

from __future__ import annotations

from typing import Any

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError

__all__ = ["UnionResolver"]


class UnionResolver(ClusterResolver):
    """The combined cluster of several resolvers.

    Jobs of the same name are merged. If every resolver numbers the tasks of a job from 0, the tasks are renumbered
    consecutively; otherwise they keep their indices. The task of this process, the protocol, the environment and the
    accelerators are the first resolver's.

    Args:
        *resolvers: One or more resolvers.
        task_type, task_id, rpc_layer: Values that replace the first resolver's.

    Raises:
        OptionError: An argument is not a resolver; or, at access, two resolvers have different addresses for one task.

    Example:
        >>> from distnb.cluster_resolver import SimpleClusterResolver
        >>> both = UnionResolver(SimpleClusterResolver({"worker": ["a:1"]}), SimpleClusterResolver({"worker": ["b:1"]}))
        >>> both.cluster_spec().as_dict()
        {'worker': ['a:1', 'b:1']}
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        unfit = [each for each in resolvers if not isinstance(each, ClusterResolver)]
        if unfit or not resolvers:
            raise OptionError(
                f"UnionResolver takes one or more ClusterResolvers but got {unfit[0] if unfit else 'none'!r}. Write "
                "UnionResolver(TFConfigClusterResolver(), …)."
            )
        self._resolvers = resolvers
        self.task_type = task_type
        self.task_id = task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return all jobs of all resolvers."""
        specs = [each.cluster_spec() for each in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec.jobs)
        return ClusterSpec({job: _merge(job, [spec for spec in specs if job in spec.jobs]) for job in jobs})

    def _found(self, name: str) -> str | None:
        found: str | None = getattr(self._resolvers[0], name)
        return found

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the first resolver's accelerators."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def knows_accelerators(self) -> bool:
        """True if the first resolver knows the accelerators of all tasks."""
        return self._resolvers[0].knows_accelerators

    def _task(self) -> tuple[str | None, int | None]:
        first = self._resolvers[0]
        kind = self._task_type if self._task_type is not None else first.task_type
        return kind, self._task_id if self._task_id is not None else first.task_id

    def __repr__(self) -> str:
        return f"UnionResolver({', '.join(map(repr, self._resolvers))})"


def _merge(job: str, specs: list[ClusterSpec]) -> dict[int, str]:
    """Return the addresses of one job's tasks, by index."""
    parts = [{index: spec.task_address(job, index) for index in spec.task_indices(job)} for spec in specs]
    if all(list(part) == list(range(len(part))) for part in parts):
        addresses = dict.fromkeys(address for part in parts for address in part.values())
        return dict(enumerate(addresses))
    tasks: dict[int, str] = {}
    for part in parts:
        for index, address in part.items():
            if tasks.setdefault(index, address) != address:
                raise OptionError(
                    f"Two resolvers have different addresses for {job} {index}: {tasks[index]} and {address}. Give the "
                    "tasks other indices in one of them."
                )
    return tasks
