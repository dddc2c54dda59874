"""KubernetesClusterResolver and Kubernetes' own client, against a replacement API server."""

from __future__ import annotations

import http.server
import json
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from distnb.cluster_resolver import KubernetesClusterResolver
from distnb.errors import ClusterError, OptionError


class ApiServer(http.server.ThreadingHTTPServer):
    """A server that answers with lists of pods. `pods` holds (namespace, label, name, ip, phase), `asked` the queries."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pods: list[tuple[str, str, str, str, str]] = []
        self.asked: list[tuple[str, str]] = []
        self.refuse = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        selector = parse_qs(parts.query).get("labelSelector", [""])[0]
        self.server.asked.append((parts.path, selector))
        if self.server.refuse:
            self.answer(403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403})
            return
        *_, namespace = parts.path.removesuffix("/pods").split("/")
        items = [
            {"metadata": {"name": name, "namespace": where}, "status": {"phase": phase, "podIP": ip or None}}
            for where, label, name, ip, phase in self.server.pods
            if label == selector and namespace in ("v1", where)
        ]
        self.answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})

    def answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    pytest.importorskip("kubernetes")
    server = ApiServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    # The client reads the variable once, when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def worker(number: int, ip: str, phase: str = "Running") -> tuple[str, str, str, str, str]:
    return "ml", "job-name=train", f"train-{number}", ip, phase


MAPPING = {"worker": ["job-name=train"]}


def test_running_pods_are_the_cluster_in_numeric_order(api: ApiServer):
    api.pods = [worker(10, "10.0.0.3"), worker(2, "10.0.0.2"), ("other", "job-name=ps", "ps-0", "fd00::1", "Running")]
    resolver = KubernetesClusterResolver({**MAPPING, "ps": ["job-name=ps"]}, port=2222, rpc_layer="grpc")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"], "ps": ["[fd00::1]:2222"]}
    assert api.asked == [("/api/v1/pods", "job-name=train"), ("/api/v1/pods", "job-name=ps")]
    assert resolver.master("worker", 1) == "grpc://10.0.0.3:2222"
    assert (resolver.task_type, resolver.task_id) == (None, None)
    with pytest.raises(OptionError, match="does not know which task"):
        resolver.master()
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.0.0.2:2222"
    api.pods.append(worker(3, "10.0.0.9"))
    assert resolver.cluster_spec().num_tasks("worker") == 3
    # As part of a strategy it goes to engines, where another client is made.
    assert pickle.loads(pickle.dumps(resolver)).master() == "grpc://10.0.0.2:2222"


def test_a_pod_finds_its_task_by_its_name(api: ApiServer, monkeypatch: pytest.MonkeyPatch):
    from kubernetes import client

    api.pods = [worker(0, "10.0.0.1"), worker(1, "10.0.0.2")]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("HOSTNAME", "train-1")
    override = client.CoreV1Api(client.ApiClient(client.Configuration(host=api.url)))
    resolver = KubernetesClusterResolver(MAPPING, override_client=override, namespace="ml")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "10.0.0.2:8470")
    assert api.asked[0] == ("/api/v1/namespaces/ml/pods", "job-name=train")


def test_wrong_arguments_and_answers_are_reported(api: ApiServer):
    resolver = KubernetesClusterResolver(MAPPING)
    with pytest.raises(ClusterError, match=r"no pods with the labels 'job-name=train' .* in any namespace"):
        resolver.cluster_spec()
    api.pods = [worker(0, "10.0.0.1"), worker(1, "", "Pending")]
    with pytest.raises(ClusterError, match=r"train-1 .* is Pending, not Running"):
        resolver.cluster_spec()
    api.refuse = True
    with pytest.raises(ClusterError, match="403 Forbidden"):
        resolver.cluster_spec()


def test_defaults_and_names_match_tf_distribute(api: ApiServer):
    api.pods = [("ml", "job-name=tensorflow", "train-0", "10.0.0.1", "Running")]
    assert KubernetesClusterResolver().cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}
    assert KubernetesClusterResolver(tf_server_port=99).cluster_spec().as_dict() == {"worker": ["10.0.0.1:99"]}
    with pytest.raises(OptionError, match="the same option"):
        KubernetesClusterResolver(port=1, tf_server_port=2)


def test_an_unresponsive_server_is_an_error():
    client = pytest.importorskip("kubernetes").client
    configuration = client.Configuration(host="http://127.0.0.1:9", retries=0)
    resolver = KubernetesClusterResolver(MAPPING, override_client=client.CoreV1Api(client.ApiClient(configuration)))
    with pytest.raises(ClusterError, match="does not answer"):
        resolver.cluster_spec()


def test_the_error_without_the_client_names_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(OptionError, match=r"pip install 'distnb\[kubernetes\]'"):
        KubernetesClusterResolver(MAPPING).cluster_spec()


@pytest.mark.parametrize("mapping", [{}, ["x"], {"worker": "job-name=train"}, {"worker": []}, {"worker": [""]}])
def test_a_malformed_mapping_is_refused(mapping: Any):
    with pytest.raises(OptionError, match="job_to_label_mapping"):
        KubernetesClusterResolver(mapping)
