"""The base class of all resolvers, which describe the cluster of a process."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from distnb.cluster.devices import available_gpus
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError

__all__ = ["ClusterResolver", "whole_number"]


class ClusterResolver(ABC):
    """The cluster that this process belongs to. Implementations read their source again at each call.

    `task_type` and `task_id` identify the task of this process. Assign them if the resolver cannot determine them.
    """

    # Values that were assigned, or passed to the constructor. They take precedence over values from the source.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and addresses; empty if there is no cluster."""

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is unknown."""
        return self._task()[0]

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        if value is not None and (not isinstance(value, str) or not value):
            raise OptionError(f"task_type={value!r}: give a job's name, such as 'worker'.")
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is unknown."""
        return self._task()[1]

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else whole_number(value, f"task_id={value!r}")

    @property
    def environment(self) -> str:
        """The cluster manager's name for the environment of this process; "" if it has none."""
        return self._environment if self._environment is not None else self._found("environment") or ""

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` prepends to addresses; None for none."""
        return self._rpc_layer if self._rpc_layer is not None else self._found("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, with the protocol if there is one; "" if there is no cluster.

        Args:
            task_type, task_id: The task; by default, the task of this process.
            rpc_layer: The protocol, in place of the resolver's.

        Raises:
            OptionError: The task does not exist, or you named none and the task of this process is unknown.
        """
        spec = self.cluster_spec()
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if not spec or (kind == "evaluator" and kind not in spec.jobs):
            return ""
        if kind is None or index is None:
            raise OptionError(
                f"master() needs the task of this process, but {type(self).__name__} does not know "
                f"which task of the cluster this is: {spec.as_dict()}. Name one, master('worker', 0), or assign "
                "task_type and task_id."
            )
        return self._with_protocol(spec.task_address(kind, index), rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the number of accelerators that this process can use, by kind: `{"GPU": 2}`, or `{}` on the CPU.

        Args:
            task_type, task_id: The task of this process, which is the default. Other machines cannot be examined.
            config_proto: Must be None, because distnb has no sessions to configure.

        Raises:
            OptionError: You named another task, or gave a `config_proto`.
        """
        if config_proto is not None:
            raise OptionError(f"config_proto={config_proto!r} is not supported: there are no sessions. Leave it out.")
        own = (self.task_type, self.task_id)
        asked = (own[0] if task_type is None else task_type, own[1] if task_id is None else task_id)
        if asked != own:
            raise OptionError(
                f"num_accelerators was asked for {asked[0]} {asked[1]}, but this process is {own[0]} {own[1]}, which "
                "cannot examine another machine. Call it in that task."
            )
        gpus = available_gpus()
        return {"GPU": gpus} if gpus else {}

    @property
    def knows_accelerators(self) -> bool:
        """True if `num_accelerators` works for all tasks, not only for the task of this process."""
        return type(self).num_accelerators is not ClusterResolver.num_accelerators

    def _task(self) -> tuple[str | None, int | None]:
        """Return the task of this process, as far as it is known."""
        return self._task_type, self._task_id

    def _found(self, name: str) -> str | None:
        """Return the source's value of "environment" or "rpc_layer", if it has one."""
        return None

    def _with_protocol(self, address: str, rpc_layer: str | None) -> str:
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{protocol}://{address}" if protocol and address else address

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def whole_number(value: Any, what: str) -> int:
    """Return a whole number, 0 or more, from a number or text. Raises an OptionError that begins with `what`."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{what} is invalid. Give a whole number, 0 or more.")
    return value
