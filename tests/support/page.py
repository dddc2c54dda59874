"""A page that was just loaded and has seen no earlier messages: the second client of a notebook's kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

from tests.support.kernel import Notebook

LIMIT_S = 60.0


class Page:
    """A page of a notebook.

    Args:
        notebook: The notebook, whose kernel has started.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._client = BlockingKernelClient(connection_file=notebook._manager.connection_file)
        self._client.load_connection_file()
        self._client.start_channels()

    def control(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request on the control channel, and return the reply's content."""
        message = self._client.session.msg(kind, content or {})
        self._client.control_channel.send(message)
        while True:
            reply = self._client.get_control_msg(timeout=LIMIT_S)
            if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
                assert reply["msg_type"] == kind.replace("request", "reply")
                return dict(reply["content"])

    def request(self, action: str, **more: Any) -> dict[str, Any]:
        """Send a request of the side panel, and return the reply."""
        return self.control("distnb_request", {"action": action, **more})

    def send(
        self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None, subshell: str | None = None
    ) -> str:
        """Send a message on the shell channel, and return its id."""
        message = self._client.session.msg(kind, content, metadata=metadata)
        message["header"].update({"subshell_id": subshell} if subshell else {})
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def received(self) -> Iterator[dict[str, Any]]:
        """Yield messages as they arrive; raise an AssertionError if none arrives any more."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            yield self._client.get_iopub_msg(timeout=LIMIT_S)
        raise AssertionError(f"not received in {LIMIT_S} s")

    def until_idle(self, message: str) -> list[dict[str, Any]]:
        """Return the messages that arrive until the kernel has handled a message."""
        got = []
        for each in self.received():
            got.append(each)
            if each["parent_header"].get("msg_id") == message and each["content"].get("execution_state") == "idle":
                break
        return got

    def snapshots(self) -> Iterator[dict[str, Any]]:
        """Yield the snapshots that the kernel sends unasked."""
        for message in self.received():
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == "distnb":
                assert message["parent_header"] == {}, "no message reaches the waiting cell's output"
                yield message["content"]["data"]["distnb"]

    def wait_for(self, kinds: list[str]) -> dict[str, Any]:
        """Wait until the engines' states are of these kinds, and return the snapshot."""
        for snapshot in self.snapshots():
            if [engine["kind"] for engine in snapshot["engines"] or ()] == kinds:
                return snapshot
        raise AssertionError

    def close(self) -> None:
        self._client.stop_channels()


@contextlib.contextmanager
def new_page(notebook: Notebook) -> Iterator[Page]:
    page = Page(notebook)
    yield page
    page.close()
