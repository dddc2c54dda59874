"""The base of all resolvers: what a process can ask about its cluster."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from distnb.cluster.devices import available_gpus
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError

__all__ = ["ClusterResolver", "whole_number"]


class ClusterResolver(ABC):
    """Tells of the cluster that this process belongs to. Implementations look anew at each call.

    `task_type` and `task_id` say which task this process is, and can be assigned where a resolver cannot know.
    """

    # What was assigned, or given to the constructor; it goes before what can be found out.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The jobs and addresses; empty where there is no cluster."""

    @property
    def task_type(self) -> str | None:
        """The job of this process; None where that is not known."""
        return self._task()[0]

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        if value is not None and (not isinstance(value, str) or not value):
            raise OptionError(f"task_type={value!r}: give a job's name, such as 'worker'.")
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None where that is not known."""
        return self._task()[1]

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else whole_number(value, f"task_id={value!r}")

    @property
    def environment(self) -> str:
        """What the cluster manager calls the place where this runs; "" where it says nothing."""
        return self._environment if self._environment is not None else self._found("environment") or ""

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` puts before addresses; None for none."""
        return self._rpc_layer if self._rpc_layer is not None else self._found("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, with the protocol before it if there is one; "" where there is no cluster.

        Args:
            task_type, task_id: Which task; this process's where they are not given.
            rpc_layer: Another protocol than the resolver's.

        Raises:
            OptionError: There is no such task, or it was not named and which one this process is is not known.
        """
        spec = self.cluster_spec()
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if not spec or (kind == "evaluator" and kind not in spec.jobs):
            return ""
        if kind is None or index is None:
            raise OptionError(
                f"master() was asked for the address of this process's task, and {type(self).__name__} does not know "
                f"which task of the cluster this is: {spec.as_dict()}. Name one, master('worker', 0), or assign "
                "task_type and task_id."
            )
        return self._with_protocol(spec.task_address(kind, index), rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """How many accelerators this process can use, by kind: `{"GPU": 2}`, or `{}` on the CPU.

        Args:
            task_type, task_id: This process's own task, or nothing: other machines cannot be looked into.
            config_proto: Must be None: there are no sessions to configure.

        Raises:
            OptionError: Another task was named.
        """
        if config_proto is not None:
            raise OptionError(f"config_proto={config_proto!r} cannot be honoured: there are no sessions here.")
        own = (self.task_type, self.task_id)
        asked = (own[0] if task_type is None else task_type, own[1] if task_id is None else task_id)
        if asked != own:
            raise OptionError(
                f"num_accelerators was asked for {asked[0]} {asked[1]}, and this process is {own[0]} {own[1]}: it "
                "cannot look into another machine. Ask there."
            )
        gpus = available_gpus()
        return {"GPU": gpus} if gpus else {}

    @property
    def knows_accelerators(self) -> bool:
        """Whether `num_accelerators` can tell of other tasks than this process's own."""
        return type(self).num_accelerators is not ClusterResolver.num_accelerators

    def _task(self) -> tuple[str | None, int | None]:
        """Which task this is, as far as it is known."""
        return self._task_type, self._task_id

    def _found(self, name: str) -> str | None:
        """What can be found out of "environment" or "rpc_layer"."""
        return None

    def _with_protocol(self, address: str, rpc_layer: str | None) -> str:
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{protocol}://{address}" if protocol and address else address

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def whole_number(value: Any, what: str) -> int:
    """A number from 0, also as text. Raises OptionError that begins with `what`."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{what}: a whole number from 0 is needed.")
    return value
