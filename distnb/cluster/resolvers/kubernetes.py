"""The cluster of a set of Kubernetes pods, queried from the API server through its official client."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distnb.cluster.resolvers.base import ClusterResolver, whole_number
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import ClusterError, OptionError

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

__all__ = ["KubernetesClusterResolver"]

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PORT = 8470
_DEFAULT = {"worker": ("job-name=tensorflow",)}
_ANSWER_S = 30.0


class KubernetesClusterResolver(ClusterResolver):
    """The cluster of the running pods, queried at each call. Needs `pip install 'distnb[kubernetes]'`.

    In a pod, the resolver authenticates with the pod's service account, which must be allowed to list pods. Elsewhere,
    it uses the user's kubeconfig. Pods are numbered in the order of their names, `worker-2` before `worker-10`. In a
    pod, the resolver finds the task of this process by the pod's name (HOSTNAME). Elsewhere, assign `task_type` and
    `task_id`.

    Args:
        job_to_label_mapping: Label selectors of pods by job name; None for `{"worker": ["job-name=tensorflow"]}`.
        port: The port on which each task listens; 8470 by default.
        rpc_layer: See `ClusterResolver.rpc_layer`.
        override_client: A configured `kubernetes.client.CoreV1Api`.
        namespace: The namespace of the pods. None means this pod's own or, outside of a cluster, all namespaces.
        tf_server_port: tf.distribute's name of `port`.

    Raises:
        OptionError: An argument is malformed, or the client is not installed.
        ClusterError: At access: the API server does not answer or refuses, or pods are missing or not running.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        port: int | None = None,
        rpc_layer: str | None = None,
        override_client: CoreV1Api | None = None,
        namespace: str | None = None,
        *,
        tf_server_port: int | None = None,
    ) -> None:
        if port is not None and tf_server_port is not None:
            raise OptionError(
                f"port={port!r} and tf_server_port={tf_server_port!r} are the same option. Give only one of them."
            )
        port = port if port is not None else tf_server_port if tf_server_port is not None else _PORT
        self._selectors = _DEFAULT if job_to_label_mapping is None else _checked(job_to_label_mapping)
        self._port = whole_number(port, f"port={port!r}")
        self._rpc_layer = rpc_layer
        self._client = override_client
        self._namespace = namespace

    def __getstate__(self) -> dict[str, Any]:
        # A client contains connections and locks. Another process, such as an engine, creates a new one when needed.
        return {**self.__dict__, "_client": None}

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the running pods."""
        found = self._pods()
        return ClusterSpec({job: [f"{_bracketed(ip)}:{self._port}" for _, ip in pods] for job, pods in found.items()})

    def _task(self) -> tuple[str | None, int | None]:
        if self._task_type is not None and self._task_id is not None:
            return self._task_type, self._task_id
        name = os.environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in os.environ else ""
        if name:
            for job, pods in self._pods().items():
                for index, (pod, _) in enumerate(pods):
                    if pod == name:
                        return self._task_type or job, index if self._task_id is None else self._task_id
        return self._task_type, self._task_id

    def _pods(self) -> dict[str, list[tuple[str, str]]]:
        """Return the name and the address of each pod, by job, in the order of the names."""
        found: dict[str, list[tuple[str, str]]] = {}
        for job, selectors in self._selectors.items():
            pods: dict[str, str] = {}
            for selector in selectors:
                listed = self._list(selector)
                if not listed:
                    raise ClusterError(
                        f"Kubernetes has no pods with the labels {selector!r} (job {job!r}){self._where()}. Start "
                        "them, or correct job_to_label_mapping."
                    )
                for pod in listed:
                    pods[pod.metadata.name] = _address(pod, job)
            found[job] = sorted(pods.items(), key=lambda pod: _natural(pod[0]))
        return found

    def _list(self, selector: str) -> list[Any]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        api, namespace = self._api(), self._namespace_asked()
        words: dict[str, Any] = {"label_selector": selector, "_request_timeout": _ANSWER_S}
        try:
            if namespace is None:
                answer: Any = api.list_pod_for_all_namespaces(**words)
            else:
                answer = api.list_namespaced_pod(namespace, **words)
        except ApiException as error:
            raise ClusterError(
                f"Kubernetes refused to list the pods with the labels {selector!r}{self._where()}: {error.status} "
                f"{error.reason}. Check that this account may list pods there."
            ) from error
        except HTTPError as error:
            raise ClusterError(
                f"Kubernetes' API server does not answer: {error}. Check that it is reachable from here."
            ) from error
        return list(answer.items)

    def _api(self) -> CoreV1Api:
        if self._client is None:
            try:
                from kubernetes import client, config
            except ImportError as error:
                raise OptionError(
                    "KubernetesClusterResolver needs Kubernetes' Python client. Install it: pip install "
                    "'distnb[kubernetes]'"
                ) from error
            try:
                if "KUBERNETES_SERVICE_HOST" in os.environ:
                    config.load_incluster_config()  # type: ignore[no-untyped-call]
                else:
                    config.load_kube_config()  # type: ignore[no-untyped-call]
            except config.ConfigException as error:
                raise ClusterError(
                    f"Kubernetes cannot be reached from here: {str(error).rstrip('.')}. Run in a pod, or set "
                    "KUBECONFIG to the file that kubectl uses."
                ) from error
            self._client = client.CoreV1Api()
        return self._client

    def _namespace_asked(self) -> str | None:
        if self._namespace is None and "KUBERNETES_SERVICE_HOST" in os.environ and _NAMESPACE.exists():
            return _NAMESPACE.read_text().strip()
        return self._namespace

    def _where(self) -> str:
        namespace = self._namespace_asked()
        return f" in the namespace {namespace!r}" if namespace is not None else " in any namespace"


def _checked(mapping: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    checked: dict[str, tuple[str, ...]] = {}
    if not isinstance(mapping, Mapping) or not mapping:
        raise OptionError(f"job_to_label_mapping={mapping!r}: give a dict such as {{'worker': ['job-name=train']}}.")
    for job, selectors in mapping.items():
        if isinstance(selectors, str) or not selectors or not all(isinstance(each, str) and each for each in selectors):
            raise OptionError(f"job_to_label_mapping[{job!r}]={selectors!r}: give a list such as ['job-name=train'].")
        checked[job] = tuple(selectors)
    return checked


def _address(pod: Any, job: str) -> str:
    if pod.status.phase != "Running" or not pod.status.pod_ip:
        raise ClusterError(
            f"The pod {pod.metadata.name} (job {job!r}) is {pod.status.phase or 'of unknown state'}, not Running, so "
            "the cluster is incomplete. Try again when it is running."
        )
    return str(pod.status.pod_ip)


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
