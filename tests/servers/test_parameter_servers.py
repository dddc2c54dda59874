"""A parameter server in its own process, with clients: no change is lost or applied twice, whichever process dies."""

from __future__ import annotations

import dis
import functools
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import zmq

from distnb.cluster.connection import Keys, make_keys
from distnb.errors import MessageError, ServerLost, StructureError
from distnb.servers import client as clients
from distnb.servers.client import ServerConnections
from distnb.servers.server_messages import (
    Address,
    Create,
    Describe,
    MakeOptimizer,
    Pull,
    PullRows,
    WriteShard,
)
from distnb.servers.variables.storage.service import Service
from distnb.wire import recycled_memory, unix_socket
from distnb.wire.codec import encode
from tests.support import warm_python
from tests.support.processes import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ROOT = str(Path(__file__).parents[2])
W, TABLE = (0, 0), (1, 0)
LARGE = 3_000_000  # numbers: more than a socket's buffer holds
_WITHIN_S = 60.0

SERVER = """
import json, os, sys
from distnb.servers.variables.storage.service import Service

settings = json.loads(os.environ["SETTINGS"])
service = Service(settings["directory"], client_public=settings["public"], host=settings["host"])
service.start()
with open(settings["file"] + "~", "w") as file:
    json.dump(service.address, file)
os.rename(settings["file"] + "~", settings["file"])
service._thread.join()
"""

PUSHER = """
import json, os, sys
import torch
from distnb.cluster.connection import Keys
from distnb.servers.client import ServerConnections
from distnb.servers.server_messages import Address, StepOptimizer, WriteShard

settings = json.loads(os.environ["SETTINGS"])
servers = ServerConnections({0: Address(*settings["address"])}, settings["number"], Keys(*settings["keys"]))
gradient = torch.full((settings["size"],), -1.0)
for n in range(settings["count"]):
    token = (settings["number"], (0, 0), n)
    servers.exchange({0: [WriteShard((0, 0), "assign_add", 1.0, token=token)]})
    servers.exchange({0: [StepOptimizer(0, {(0, 0): gradient}, ({},), {}, (settings["number"], 0, n))]})
"""


class Cluster:
    """The processes of one test.

    Args:
        folder: The folder for their files.
        host: The address of its servers, also for clients; None for UNIX sockets only.
    """

    def __init__(self, folder: Path, host: str | None) -> None:
        self.keys = make_keys()
        self.host = host
        self._folder = folder
        self._directory = tempfile.TemporaryDirectory()  # pytest's own is too deep for a socket's path
        self.processes: list[warm_python.Forked] = []

    def run(self, text: str, **settings: Any) -> warm_python.Forked:
        name = f"process{len(self.processes)}"
        script = self._folder / f"{name}.py"
        script.write_text(text)
        environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "SETTINGS": json.dumps(settings)}
        out, err = self._folder / f"{name}.out", self._folder / f"{name}.err"
        self.processes.append(warm_python.start(script, 0, env=environment, out=out, err=err))
        return self.processes[-1]

    def serve(self) -> tuple[Address, warm_python.Forked]:
        """Start a server, and return its address and process."""
        file = self._folder / f"address{len(self.processes)}"
        settings = {"public": self.keys.client_public, "host": self.host, "directory": self._directory.name}
        process = self.run(SERVER, **settings, file=str(file))
        wait_until(file.exists, _WITHIN_S)
        address = Address(*json.loads(file.read_text()))
        assert (address.url == "") is (self.host is None)
        return (address if self.host is None else address._replace(path="")), process

    def push(self, address: Address, number: int, count: int, size: int) -> warm_python.Forked:
        """Start a client that adds 1 to a shard many times, by hand and by steps."""
        keys = list(vars(self.keys).values())
        return self.run(PUSHER, address=address, number=number, keys=keys, count=count, size=size)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._directory.cleanup()


@pytest.fixture(params=[None, "127.0.0.1"], ids=["of this host", "of another"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, request.param)
    yield cluster
    cluster.end()


@pytest.fixture
def service() -> Iterator[tuple[Service, Keys]]:
    """Provide a service in this process, for clients of its host."""
    keys = make_keys()
    with tempfile.TemporaryDirectory() as directory:
        service = Service(directory, client_public=keys.client_public, host=None)
        service.start()
        yield service, keys
        service.close()


def sgd(groups: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": group} for group in groups], lr=1.0)


sgd.__module__ = "__main__"  # pickled by value


def make(size: int) -> list[Any]:
    """Operations that make a shard of zeros, and an optimizer for it."""
    return [
        Create(shard=W, name="w", value=None, shape=(size,)),
        MakeOptimizer(optimizer=0, factory=cloudpickle.dumps(sgd), groups=((W,),)),
    ]


def value(servers: ServerConnections, server: int = 0) -> torch.Tensor:
    pulled: torch.Tensor = servers.exchange({server: [Pull({W: -1})]})[server][0][W][1]
    return pulled


# -- exchanges ---------------------------------------------------------------------------------------------------------


def test_requests_to_several_servers_run_at_once_and_carry_large_tensors(cluster: Cluster) -> None:
    addresses = {server: cluster.serve()[0] for server in (0, 1)}
    with closing(ServerConnections(addresses, 5, cluster.keys)) as servers:
        tensors = {server: torch.randn(LARGE) for server in addresses}
        servers.exchange({server: [Create(shard=W, name="w", value=tensor)] for server, tensor in tensors.items()})
        pulled = servers.exchange(
            {server: [Pull({W: -1}), PullRows(W, torch.arange(0, LARGE, 3))] for server in (0, 1)}
        )
        for server, tensor in tensors.items():
            (whole, (_, rows)) = pulled[server]
            assert torch.equal(whole[W][1], tensor)
            assert torch.equal(rows, tensor[::3])
            whole[W][1].zero_()  # the client's own copy
            assert torch.equal(value(servers, server), tensor)
        assert servers.exchange({}) == {}


def test_simultaneous_changes_of_two_clients_are_each_applied_once(cluster: Cluster) -> None:
    address, _ = cluster.serve()
    with closing(ServerConnections({0: address}, 5, cluster.keys)) as servers:
        servers.exchange({0: make(50_000)})
        pushers = [cluster.push(address, number, 150, 50_000) for number in (1, 2)]
        while any(pusher.poll() is None for pusher in pushers):
            whole = value(servers)
            assert whole.min() == whole.max()  # atomic: half a change is never visible
        assert [pusher.wait() for pusher in pushers] == [0, 0]
        assert torch.equal(value(servers), torch.full((50_000,), 600.0))
        assert servers.exchange({0: [Describe()]})[0][0][0].updates == 600


def test_a_killed_client_leaves_complete_changes_and_can_be_rerun(cluster: Cluster) -> None:
    address, _ = cluster.serve()
    with closing(ServerConnections({0: address}, 5, cluster.keys)) as servers:
        servers.exchange({0: make(LARGE)})
        for least in (1, 2, 4):  # the client is somewhere in a message of 12 MB
            pusher = cluster.push(address, 1, 5, LARGE)
            while value(servers).max() < least:
                assert pusher.poll() is None
            pusher.kill()
            pusher.wait()
            whole = value(servers)
            assert whole.min() == whole.max()
        assert cluster.push(address, 1, 5, LARGE).wait() == 0  # another client starts over and completes
        assert torch.equal(value(servers), torch.full((LARGE,), 10.0))


def test_an_error_is_raised_at_the_client_and_names_the_server(cluster: Cluster) -> None:
    addresses = {server: cluster.serve()[0] for server in (0, 1)}
    with closing(ServerConnections(addresses, 5, cluster.keys)) as servers:
        servers.exchange({server: make(2) for server in addresses})
        wrong = WriteShard(shard=W, method="assign", value=torch.ones(3))
        with pytest.raises(StructureError, match="shape") as caught:
            servers.exchange({0: [Describe()], 1: [wrong]})
        assert caught.value.__notes__ == ["It was raised by parameter server 1."]
        with pytest.raises(StructureError) as caught:
            servers.exchange({0: [wrong], 1: [wrong]})
        assert [note.partition(":")[0] for note in caught.value.__notes__] == [
            "It was raised by parameter server 0.",
            "There was another error",
        ]
        assert torch.equal(value(servers, 1), torch.zeros(2))


class _Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_unreadable_request_is_an_error_and_the_server_continues(cluster: Cluster) -> None:
    with closing(ServerConnections({0: cluster.serve()[0]}, 5, cluster.keys)) as servers:
        with pytest.raises(MessageError, match="no number"):
            servers.exchange({0: [WriteShard(shard=W, method="assign", value=_Unreadable())]})
        assert servers.exchange({0: [Describe()]}) == {0: ((),)}


def test_threads_of_one_client_take_turns(cluster: Cluster) -> None:
    with closing(ServerConnections({0: cluster.serve()[0]}, 5, cluster.keys)) as servers:
        servers.exchange({0: make(3)})

        def add() -> None:
            for _ in range(100):
                servers.exchange({0: [WriteShard(shard=W, method="assign_add", value=1.0)]})

        threads = [threading.Thread(target=add) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(value(servers), torch.full((3,), 300.0))


# -- ends --------------------------------------------------------------------------------------------------------------


@contextmanager
def frozen(process: warm_python.Forked) -> Iterator[None]:
    """Stop a process in a block, so that it answers nothing."""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, _WITHIN_S)
    yield
    process.send_signal(signal.SIGCONT)


def in_exchange() -> bool:
    """Return whether the main thread waits for an answer."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code is ServerConnections._wait.__code__


def meanwhile(act: Callable[[], object]) -> threading.Thread:
    """Do something in a thread as soon as the main thread waits for an answer."""

    def run() -> None:
        wait_until(in_exchange, _WITHIN_S)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_killed_server_ends_exchanges_until_it_is_replaced(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, None)
    (first, process), (second, _) = cluster.serve(), cluster.serve()
    with closing(ServerConnections({0: first, 1: second}, 5, cluster.keys)) as servers:
        servers.exchange({0: make(3), 1: make(3)})
        known = servers.exchange({0: [Pull({W: -1})]})[0][0][W][0]
        with frozen(process):
            thread = meanwhile(process.kill)
            with pytest.raises(ServerLost, match=r"server 0 has ended\. .*last checkpoint"):
                servers.exchange({0: [Describe()], 1: [WriteShard(shard=W, method="assign", value=2.0)]})
            thread.join()
        with pytest.raises(ServerLost):
            servers.exchange({0: [Describe()]})
        assert torch.equal(value(servers, 1), torch.full((3,), 2.0))  # others continue, and late answers have no effect
        servers.replace(0, cluster.serve()[0])
        assert servers.exchange({0: [Describe()]}) == {0: ((),)}
        servers.exchange({0: make(3)})
        assert W in servers.exchange({0: [Pull({W: known})]})[0][0]  # no version is mistaken for one of the lost server
    cluster.end()


def test_a_server_can_be_marked_lost_from_outside(cluster: Cluster) -> None:
    address, process = cluster.serve()
    with closing(ServerConnections({0: address}, 5, cluster.keys)) as servers:
        with frozen(process):
            thread = meanwhile(lambda: servers.lost(0, "its machine is silent"))
            with pytest.raises(ServerLost, match="its machine is silent"):
                servers.exchange({0: [Describe()]})
            thread.join()
            with pytest.raises(ServerLost, match="its machine is silent"):
                servers.exchange({0: [Describe()]})
        servers.replace(0, address)
        assert servers.exchange({0: [Describe()]}) == {0: ((),)}


def test_an_address_without_a_server_is_an_error() -> None:
    with (
        closing(ServerConnections({0: Address("/nowhere/distnb-of-one-that-is-gone")}, 5, make_keys())) as servers,
        pytest.raises(ServerLost, match=r"cannot be reached: .*No such file"),
    ):
        servers.exchange({0: [Describe()]})


def test_a_waiting_request_can_be_interrupted_and_repeated(cluster: Cluster) -> None:
    address, process = cluster.serve()
    with closing(ServerConnections({0: address}, 5, cluster.keys)) as servers:
        servers.exchange({0: make(3)})
        with frozen(process):
            for _ in range(3):
                thread = meanwhile(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    servers.exchange(
                        {0: [WriteShard(shard=W, method="assign_add", value=1.0, token=(1, W, 0)), Pull({W: -1})]}
                    )
                thread.join()
        assert servers.exchange({0: [Describe()]})[0][0][0].updates == 1  # and no late answer is mistaken for it


@functools.cache
def _moments(code: CodeType) -> frozenset[int]:
    """Return where Python handles signals: before and after calls, except for those that end a `with`."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL")]
    pairs = itertools.pairwise(instructions)
    before = {two.offset for one, two in pairs if two.opname == "CALL" and one.opname != "LOAD_CONST"}
    pairs = itertools.pairwise(instructions)
    return frozenset(before | {two.offset for one, two in pairs if one.opname == "CALL" and two.opname != "LOAD_CONST"})


def interrupting(files: set[str], moment: int) -> tuple[Callable[[FrameType, str, Any], Any], list[int]]:
    """Return a trace function that interrupts at one of the moments in some files, and a list that says if it did."""
    count, interrupted = 0, []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files or frame.f_code is recycled_memory._release.__code__:
            return None  # Python itself loses what is raised when an object is freed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            count += 1
            if count == moment:
                interrupted.append(moment)
                raise KeyboardInterrupt
        return trace

    return trace, interrupted


def test_an_interrupt_at_any_moment_leaves_the_client_usable(service: tuple[Service, Keys]) -> None:
    files = {clients.__file__, unix_socket.__file__, recycled_memory.__file__}
    with closing(ServerConnections({0: service[0].address}, 5, service[1])) as servers:
        servers.exchange({0: make(100_000)})
        ran_through, moment = False, 0
        while not ran_through:
            moment += 1
            trace, interrupted = interrupting(files, moment)
            change = WriteShard(shard=W, method="assign_add", value=torch.ones(100_000), token=(1, W, moment))
            before = sys.gettrace()
            sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes only if one frame asks before settrace
            sys.settrace(trace)
            try:
                servers.exchange({0: [change, Pull({W: -1})]})
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            ran_through = not interrupted
            servers.exchange({0: [change]})  # as by a closure that runs again
        assert moment > 50
        assert torch.equal(value(servers), torch.full((100_000,), float(moment)))


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_a_silent_client_does_not_block_others(service: tuple[Service, Keys]) -> None:
    address = service[0].address
    assert not [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert os.stat(os.path.dirname(address.path)).st_mode & 0o077 == 0
    with closing(ServerConnections({0: address}, 5, service[1])) as servers:
        servers.exchange({0: make(3)})
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as silent:
            silent.connect(address.path)
            assert torch.equal(value(servers), torch.zeros(3))


def test_a_stranger_on_another_host_is_refused() -> None:
    keys = make_keys()
    directory = tempfile.TemporaryDirectory()
    service = Service(directory.name, client_public=keys.client_public, host="127.0.0.1")
    service.start()
    address = service.address._replace(path="")
    assert address.url.startswith("tcp://127.0.0.1:")
    with directory, closing(service), closing(ServerConnections({0: address}, 5, keys)) as servers:
        servers.exchange({0: make(3)})
        stranger = ServerConnections({0: address}, 6, make_keys())
        plain: Any = zmq.Context()
        dealer = plain.socket(zmq.DEALER)
        dealer.connect(address.url)
        dealer.send_multipart(encode("run this"))
        other = ServerConnections({0: address._replace(public=zmq.curve_keypair()[0].decode())}, 7, keys)
        for each in (stranger, other):
            ended = threading.Timer(0.5, each.lost, (0, "no answer came"))
            ended.start()
            with closing(each), pytest.raises(ServerLost, match="no answer came"):
                each.exchange({0: [WriteShard(shard=W, method="assign", value=7.0)]})
        assert not dealer.poll(0)
        plain.destroy(linger=0)
        assert torch.equal(value(servers), torch.zeros(3))
