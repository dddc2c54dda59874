"""The cluster in the environment variable TF_CONFIG, as set by Kubeflow, Vertex AI and others."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

from distnb.cluster.resolvers.base import ClusterResolver, whole_number
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError

__all__ = ["TFConfigClusterResolver"]

_VARIABLE = "TF_CONFIG"
_KEYS = ("cluster", "task", "environment", "rpc_layer")
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in TF_CONFIG. It is read at each access, so you can set the variable after creating the resolver.

    The variable contains JSON: `{"cluster": {"worker": ["host0:2222", …]}, "task": {"type": "worker", "index": 0}}`. If
    it is unset or `{}`, there is no cluster. distnb ignores keys other than "cluster", "task", "environment" and
    "rpc_layer", and a warning names them. ("session_master" is ignored, too, because distnb has no sessions.)

    Args:
        task_type, task_id: The task of this process, in place of TF_CONFIG's.
        rpc_layer, environment: The protocol and the environment, in place of TF_CONFIG's.

    Raises:
        OptionError: At access, if TF_CONFIG is malformed, or this process's task is not in the cluster. The message
            shows the wrong part.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type = task_type
        self.task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and addresses in TF_CONFIG."""
        return _cluster_of(_read())

    def _found(self, name: str) -> str | None:
        return _text(_read(), name)

    def _task(self) -> tuple[str | None, int | None]:
        config = _read()
        spec = _cluster_of(config)
        task = _part(config, "task", 'such as {"type": "worker", "index": 0}')
        if not task and self._task_type is None:
            return None, self._task_id
        kind = self._task_type if self._task_type is not None else task.get("type")
        if not isinstance(kind, str) or not kind:
            raise OptionError(f'TF_CONFIG\'s "task" is {json.dumps(task)} and lacks a "type", such as "worker".')
        index = self._task_id if self._task_id is not None else task.get("index")
        if index is None:
            raise OptionError(f'TF_CONFIG\'s "task" is {json.dumps(task)} and lacks an "index". Add the {kind}\'s.')
        number = whole_number(index, f'TF_CONFIG\'s "task" has the index {index!r}')
        _check_member(spec, kind, number)
        return kind, number

    def __repr__(self) -> str:
        names = ("task_type", "task_id", "rpc_layer", "environment")
        given = (self._task_type, self._task_id, self._rpc_layer, self._environment)
        arguments = [f"{name}={value!r}" for name, value in zip(names, given, strict=True) if value is not None]
        return f"TFConfigClusterResolver({', '.join(arguments)})"


def _read() -> dict[str, Any]:
    text = os.environ.get(_VARIABLE, "{}")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise OptionError(
            f"TF_CONFIG is not JSON ({error}): {_short(text) if text.strip() else 'it is empty'}. It should look like "
            f"{_EXAMPLE}; without a cluster leave it unset."
        ) from None
    if not isinstance(config, dict):
        raise OptionError(f"TF_CONFIG is {_short(text)}, but must be a JSON object, such as {_EXAMPLE}.")
    if unknown := [name for name in config if name not in _KEYS]:
        warnings.warn(
            f"TF_CONFIG has {', '.join(map(repr, unknown))}, which distnb ignores. It uses {', '.join(_KEYS)}.",
            stacklevel=4,
        )
    return config


def _part(config: dict[str, Any], name: str, example: str) -> dict[str, Any]:
    part = config.get(name, {})
    if not isinstance(part, dict):
        raise OptionError(f'TF_CONFIG\'s "{name}" is {_short(json.dumps(part))}, but must be an object, {example}.')
    return part


def _text(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise OptionError(f'TF_CONFIG\'s "{name}" is {_short(json.dumps(value))}, but must be text.')
    return value


def _cluster_of(config: dict[str, Any]) -> ClusterSpec:
    try:
        return ClusterSpec(_part(config, "cluster", 'such as {"worker": ["host0:2222", "host1:2222"]}'))
    except OptionError as error:
        raise OptionError(f"TF_CONFIG is malformed. {error}") from None


def _check_member(spec: ClusterSpec, kind: str, index: int) -> None:
    if kind == "evaluator" and kind not in spec.jobs:
        return  # an evaluator belongs to no group, so most clusters do not list it
    try:
        spec.task_address(kind, index)
    except OptionError as error:
        raise OptionError(
            f"TF_CONFIG says that this is {kind} {index}. {error} It should look like {_EXAMPLE}"
        ) from None


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
