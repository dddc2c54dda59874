"""Machines for the tests: network namespaces on one bridge, each with its own host name and ssh server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.support import processes

_PORT = 2222
_REPOSITORY = Path(__file__).parents[2]


@dataclass
class Machines:
    """A group of machines, and this one on their network.

    Attributes:
        names: The names in `ssh -F config`, which are also their host names.
        folder: The folder with keys and configuration.
        own: This machine's address on their network.
        mark: The prefix of the names of their network devices.
        hidden: A folder of this machine that is empty on the others.
    """

    names: tuple[str, ...]
    folder: Path
    own: str
    mark: str
    hidden: Path

    @property
    def ssh_args(self) -> list[str]:
        return ["-F", str(self.folder / "ssh_config")]

    def address(self, name: str) -> str:
        return f"{self.own.rpartition('.')[0]}.{self.names.index(name) + 2}"

    def cut(self, name: str) -> None:
        _do("ip", "link", "set", f"{self.mark}{self.names.index(name)}", "down")

    def join(self, name: str) -> None:
        _do("ip", "link", "set", f"{self.mark}{self.names.index(name)}", "up")


def _do(program: str, *words: str) -> None:
    subprocess.run([needs(program), *words], check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def machines(folder: Path, *names: str) -> Iterator[Machines]:
    """Provide machines with these names until the block ends."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    for program in ("ip", "ssh", "sshd", "ssh-keygen", "unshare", "hostname", "mount"):
        needs(program)
    mark = f"dn{os.getpid() % 10**7}x"
    own = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.1"
    made = Machines(names, folder, own, mark, hidden=folder / "hidden")
    made.hidden.mkdir()
    try:
        _do("ip", "link", "add", f"{mark}b", "type", "bridge")
        _do("ip", "netns", "add", f"{mark}0")
    except subprocess.CalledProcessError as error:
        _undo("link", "del", f"{mark}b")
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    servers: list[subprocess.Popen[bytes]] = []
    try:
        _do("ip", "addr", "add", f"{made.own}/24", "dev", f"{mark}b")
        _do("ip", "link", "set", f"{mark}b", "up")
        _make_keys(made)
        for number, name in enumerate(names):
            _connect(made, number)
            servers.append(_serve(made, number, name))
        for name in names:
            processes.wait_until(lambda name=name: _answers(made.address(name)), 60, f"no sshd on {name}")  # type: ignore[misc]
        yield made
    finally:
        for server in servers:
            server.kill()
            server.wait()
        for number in range(len(names)):
            _undo("netns", "del", f"{mark}{number}")
            _undo("link", "del", f"{mark}{number}")
        _undo("link", "del", f"{mark}b")


def _undo(*words: str) -> None:
    subprocess.run([needs("ip"), *words], check=False, capture_output=True, timeout=30)


def _connect(made: Machines, number: int) -> None:
    name = f"{made.mark}{number}"
    if number:
        _do("ip", "netns", "add", name)
    _do("ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", name)
    _do("ip", "link", "set", name, "master", f"{made.mark}b", "up")
    _do("ip", "-n", name, "addr", "add", f"{made.address(made.names[number])}/24", "dev", "cable")
    for link in ("lo", "cable"):
        _do("ip", "-n", name, "link", "set", link, "up")


def _make_keys(made: Machines) -> None:
    for name in ("host", "user"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made.folder / name))
    public = (made.folder / "host.pub").read_text()
    known = [f"[{made.address(name)}]:{_PORT} {public}" for name in made.names]
    (made.folder / "known_hosts").write_text("".join(known))
    hosts = [f"Host {name}\n  HostName {made.address(name)}\n" for name in made.names]
    (made.folder / "ssh_config").write_text(
        "".join(hosts)
        + f"Host *\n  Port {_PORT}\n  IdentityFile {made.folder}/user\n  IdentitiesOnly yes\n"
        + f"  UserKnownHostsFile {made.folder}/known_hosts\n  StrictHostKeyChecking yes\n"
    )


def _serve(made: Machines, number: int, name: str) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(exist_ok=True)  # to which sshd confines its unprivileged part
    environment = {
        processes.MARK_NAME: processes.MARK,
        "PYTHONPATH": str(_REPOSITORY),
        "TMPDIR": os.environ["TMPDIR"],
        "OMP_NUM_THREADS": "1",
    }
    config = made.folder / f"sshd_config_{name}"
    config.write_text(
        f"Port {_PORT}\nListenAddress {made.address(name)}\nHostKey {made.folder}/host\n"
        f"AuthorizedKeysFile {made.folder}/user.pub\nStrictModes no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\nUsePAM no\nPidFile none\n"
        f"SetEnv {' '.join(f'{key}={value}' for key, value in environment.items())}\n"
    )
    # `exec` throughout, so that the known process is the server itself.
    script = f"hostname {name}; mount -t tmpfs none {made.hidden}; exec {needs('sshd')} -D -e -f {config}"
    namespaces = [needs("ip"), "netns", "exec", f"{made.mark}{number}", needs("unshare"), "--uts", "--mount"]
    command = [*namespaces, "sh", "-ec", script]
    with open(made.folder / f"sshd_{name}.log", "wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    processes.OF_MODULE.add(server.pid)
    return server


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, _PORT), timeout=1):
            return True
    except OSError:
        return False
