"""The engine as an ipyparallel engine, whose kernel and shell exist before the controller does.

ipyparallel's own engine creates its kernel only after the controller has answered. This one does not wait. The notebook
reaches the agent directly, so cells run without a controller, and ipyparallel's channel follows when one is started.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import zmq
import zmq.asyncio
from ipykernel.control import ControlThread
from ipykernel.iostream import IOPubThread, OutStream
from ipyparallel.controller.heartmonitor import Heart
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel
from jupyter_client.session import Session
from zmq.eventloop.zmqstream import ZMQStream

__all__ = ["EngineApp"]

_POLL_S = 0.5  # the interval at which the engine checks for the controller's connection file
_ANSWER_MS = 5000  # the time to wait for the controller's answer before the next request


class EngineApp(IPEngine):  # type: ignore[misc]
    """The application of an engine process.

    Attributes:
        prepare: Called with the shell when it exists, on the running event loop of the main thread.
        joins: True if there will be a controller.
    """

    name = "distnb-engine"
    prepare: Callable[[Any], None] = staticmethod(lambda shell: None)
    joins = True

    def init_engine(self) -> None:
        """Prepare the session and the keys, without ipyparallel's wait for the controller. `initialize` calls this."""
        self.session = Session(parent=self)
        self.session.metadata = {"engine": self.session.session}  # by which ipyparallel's clients identify engines
        self.curve_publickey, self.curve_secretkey = zmq.curve_keypair()
        self.find_connection_file()

    def init_signal(self) -> None:
        """Ignore SIGINT, since the agent ends programs, and end the engine on SIGTERM.

        The handler of SIGINT does nothing. Subprocesses would inherit SIG_IGN, and could not be interrupted.
        """
        signal.signal(signal.SIGINT, _ignore_interrupt)
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.loop.add_callback_from_signal(self._leave)
        raise SystemExit(0)  # leaves a running cell; if the cell swallows it, the event loop raises the next one

    def _leave(self) -> None:
        raise SystemExit(0)

    def start(self) -> None:
        """Run the engine until it ends. ipyparallel's own method would register with the controller first."""
        self.loop.run_sync(self._run)

    async def _run(self) -> None:
        self._build_kernel()
        self.prepare(self.kernel.shell)
        if self.joins:
            self._joining = asyncio.ensure_future(self._join_controller())
        started = self.kernel.start()
        if started is not None:
            await started
        await asyncio.Event().wait()

    # -- the kernel, on sockets that are not connected yet -----------------------------------------------------------

    def _build_kernel(self) -> None:
        self.shell_socket = self._socket(zmq.ROUTER)
        self.control_socket = self._socket(zmq.ROUTER)
        self.iopub_socket = self._socket(zmq.PUB)  # XPUB would send the controller a welcome that it does not know
        self.iopub_socket.SNDHWM = 0
        self._iopub = IOPubThread(self.iopub_socket)
        self._iopub.start()
        self._control_thread = ControlThread(daemon=True)
        self._control_thread.start()
        self.config.HistoryManager.hist_file = ":memory:"
        # As in a notebook, unless the user chose another: figures are displayed when a cell ends.
        os.environ["MPLBACKEND"] = os.environ.get("MPLBACKEND") or "module://matplotlib_inline.backend_inline"
        _leave_out_the_debugger()
        main = ModuleType("__main__")  # IPython 7 would make one of its own type, which pickle's errors name otherwise
        self.kernel = IPythonParallelKernel.instance(
            parent=self,
            engine_id=self.id,
            ident=self.ident,
            session=self.session,
            iopub_socket=self._iopub,
            user_module=main,
            user_ns=main.__dict__,
            log=self.log,
            control_thread=self._control_thread,
            control_stream=ZMQStream(self.control_socket, self._control_thread.io_loop),
            shell_streams=[ZMQStream(self.shell_socket)],
        )
        self.kernel.shell.display_pub.topic = f"engine.{self.id}.displaypub".encode()
        self.init_signal()
        sys.stdout = self._stream("stdout")
        sys.stderr = self._stream("stderr")
        hook = self.display_hook_factory(self.session, self._iopub)
        hook.topic = f"engine.{self.id}.execute_result".encode()
        sys.displayhook = hook

    def _stream(self, name: str) -> OutStream:
        """Return a stream to ipyparallel's clients. It leaves file descriptors 1 and 2 to the agent."""
        stream = OutStream(self.session, self._iopub, name, watchfd=False)
        stream.topic = f"engine.{self.id}.{name}".encode()
        return stream

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.identity = self.bident
        return socket

    # -- ipyparallel's channels --------------------------------------------------------------------------------------

    async def _join_controller(self) -> None:
        """Register with the controller once there is one: it starts when a client is wanted."""
        while True:
            if os.path.exists(self.url_file):
                info = self._read_connection_file()
                if await self._register(f"{info['interface']}:{info['registration']}"):
                    self._connect(info)
                    return
            await asyncio.sleep(_POLL_S)

    def _read_connection_file(self) -> dict[str, Any]:
        with open(self.url_file) as file:
            info: dict[str, Any] = json.load(file)
        self.session.key = info["key"].encode()
        self.session.signature_scheme = info["signature_scheme"]
        self.session.packer, self.session.unpacker = info["pack"], info["unpack"]
        self.curve_serverkey = info["curve_serverkey"].encode()
        return info

    async def _register(self, url: str) -> bool:
        """Ask the controller for our id, which an earlier engine may still have. Return whether we have it now."""
        with self._socket(zmq.DEALER) as socket:
            socket.linger = 0
            self._connect_socket(socket, url)
            self.session.send(socket, "unregistration_request", content={"id": self.id})
            self.session.send(socket, "registration_request", content={"uuid": self.ident, "id": self.id})
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            if not await poller.poll(_ANSWER_MS):
                return False
            _, signed = self.session.feed_identities(socket.recv_multipart())
            answer = self.session.deserialize(signed)["content"]
        if answer.get("status") == "ok" and answer["id"] == self.id:
            return True
        self.log.warning("ipyparallel's controller answered %r to engine %s.", answer, self.id)
        return False

    def _connect(self, info: dict[str, Any]) -> None:
        """Connect the kernel's sockets to the controller, each in the thread that owns it."""
        interface = info["interface"]
        leaves = info["broadcast"]
        for port in (info["mux"], info["task"], leaves[self.id % len(leaves)]):
            self._connect_socket(self.shell_socket, f"{interface}:{port}")
        control, iopub = self.control_socket, self.iopub_socket
        self._control_thread.io_loop.add_callback(self._connect_socket, control, f"{interface}:{info['control']}")
        self._iopub.schedule(partial(self._connect_socket, iopub, f"{interface}:{info['iopub']}"))
        Heart(
            f"{interface}:{info['hb_ping']}",
            f"{interface}:{info['hb_pong']}",
            None,
            heart_id=self.bident,
            curve_serverkey=self.curve_serverkey,
            curve_secretkey=self.curve_secretkey,
            curve_publickey=self.curve_publickey,
        ).start()

    def _connect_socket(self, socket: zmq.Socket[bytes], url: str) -> None:
        socket.curve_serverkey = self.curve_serverkey
        socket.curve_publickey, socket.curve_secretkey = self.curve_publickey, self.curve_secretkey
        socket.connect(url)


def _ignore_interrupt(number: int, frame: FrameType | None) -> None:
    """Ignore SIGINT in an engine."""


def _restore_interrupts() -> None:
    """Restore Python's handler of SIGINT in a forked process, such as a DataLoader's worker, which SIGINT ends."""
    if signal.getsignal(signal.SIGINT) is _ignore_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_restore_interrupts)


def _leave_out_the_debugger() -> None:
    """Hide debugpy from ipykernel while its debugger is imported.

    No client can attach to that debugger in an engine, and loading it costs each engine time and memory. A user's own
    `import debugpy` works later.
    """
    if "debugpy" in sys.modules:  # an IDE that debugs the notebook's children has loaded it in all of them
        return
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]
