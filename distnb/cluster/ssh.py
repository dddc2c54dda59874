"""Engines on other machines, through ipyparallel's ssh launcher.

ipyparallel starts an engine in the background of the other machine, and asks from time to time whether it still runs.
Here ssh stays: its process is the engine to this machine, its standard input is how the engine is let go, and its end
tells at once. What is secret goes over it too, never into an argument or a variable of any machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from ipyparallel.cluster.launcher import SSHEngineLauncher

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.ground import EngineOrder, Ground
from distnb.cluster.hosts import HostOptions
from distnb.cluster.keeper import KILLED, Assignment
from distnb.cluster.launchers import Watched
from distnb.cluster.lifeline import LOST_AFTER_S
from distnb.cluster.processes import Reaped, describe_status
from distnb.cluster.surroundings import hash_seed
from distnb.cluster.watcher import REPORT_PIPE, Watcher
from distnb.errors import DistnbError, StartError
from distnb.topology import Device

__all__ = ["Hosts", "SSHKeeperLauncher", "names_of", "plan_hosts", "probe"]

_PROBE_TIMEOUT_S = 90.0
_LOST = 255  # ssh's own exit status, when it is the connection that failed
_ALIVE_S = 2
_PYTHON = (sys.executable, "-P", "-m", "distnb.cluster.keeper")
_OPTIONS = {
    "BatchMode": "yes",  # nobody could answer a question
    "ServerAliveInterval": str(_ALIVE_S),
    "ServerAliveCountMax": str(int(LOST_AFTER_S / _ALIVE_S) - 1),
    # A connection that is shared with others would end with theirs, and be probed as they are.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
}


def _ssh_arguments(user_arguments: Sequence[str]) -> list[str]:
    """For ssh the first of several values counts: ours, since the promises rest on them."""
    ours = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [*ours, *user_arguments, "-o", "ConnectTimeout=20"]


class SSHKeeperLauncher(Watched, SSHEngineLauncher):  # type: ignore[misc]
    """Starts the keeper of one engine on another machine, and stays connected with it."""

    told = b""
    _input: IO[bytes]

    def find_args(self) -> list[str]:
        """The command line: no word of it is secret."""
        # By `exec`, so that no shell of that machine stands between.
        command = "exec " + shlex.join(self.program)
        return [*self.ssh_cmd, *self.ssh_args, self.location, command]

    def start(self) -> None:
        """Start ssh and tell the keeper what to do."""
        reports = os.path.join(self.profile_dir, REPORT_PIPE)
        with open(self.output_file, "ab") as log, open(reports, "wb", buffering=0) as ready:
            started = self._popen_process = subprocess.Popen(
                self.args, stdin=subprocess.PIPE, stdout=ready, stderr=log, start_new_session=True
            )
        self.pid = started.pid
        self.notify_start(self.pid)
        assert started.stdin is not None
        self._input = started.stdin
        try:
            self._input.write(self.told)
            self._input.flush()
        except BrokenPipeError:
            pass  # it has ended already, and its log says why
        self._start_waiting()

    def let_go(self) -> None:
        """Close the keeper's standard input, on which it ends its engine."""
        try:
            self._input.close()
        except BrokenPipeError:
            pass

    def _end(self, status: int | None) -> None:
        self.let_go()
        super()._end(status)


class Hosts(Ground):
    """Engines on machines that ssh reaches.

    Args:
        hosts: The machine of each engine, as ssh names it.
        connection: How engines reach the notebook.
        address: The address at which they do.
        ssh_args: More arguments for ssh.
    """

    has_controller = False
    patience_s = 10.0

    def __init__(self, hosts: Sequence[str], connection: Connection, address: str, ssh_args: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        # Shared memory and the notebook's pid mean nothing there, and ipyparallel's controller stays on loopback.
        self._connection = dataclasses.replace(
            connection, notebook_pid=0, harbour_name="", harbour_token="", controller=False
        )
        self._address = address
        self._ssh_args = tuple(ssh_args)
        self._launchers: dict[int, SSHKeeperLauncher] = {}

    def launch(self, order: EngineOrder, watcher: Watcher, ended: Reaped) -> int:
        """Start an engine's keeper by ssh."""
        host = self._hosts[order.engine]
        assignment = Assignment(
            self._connection,
            self._address,
            order.engine,
            str(order.device),
            self._hosts.count(host),
            order.agent,
            order.replaces,
            {"PYTHONHASHSEED": hash_seed()},
        )
        launcher = SSHKeeperLauncher(
            engine_cmd=[*_PYTHON, "serve"],
            hostname=host,
            identifier=str(order.engine),
            output_file=str(order.log),
            profile_dir=str(order.directory),
            ssh_args=_ssh_arguments(self._ssh_args),
        )
        launcher.told, launcher.watcher, launcher.ended = assignment.encode(), watcher, ended
        launcher.start()
        self._launchers[launcher.pid] = launcher
        return int(launcher.pid)

    def letting_go(self, pids: Sequence[int]) -> Callable[[], None] | None:
        """Tell the keepers that their engines are not wanted any more."""

        def let_go() -> None:
            for pid in pids:
                if pid in self._launchers:
                    self._launchers.pop(pid).let_go()

        return let_go

    def host(self, engine: int) -> str:
        """The machine, as it was named at the start."""
        return self._hosts[engine]

    def describe(self, engine: int, status: int | None, words: str) -> str:
        """How it ended, and where."""
        host = self._hosts[engine]
        if status == _LOST:
            return f"was lost: its machine {host} cannot be reached any more"
        if status is not None and KILLED < status < KILLED + signal.NSIG:
            words = describe_status(KILLED - status)
        return f"(on {host}) {words}"

    def lost_with(self, engine: int, status: int | None) -> tuple[int, ...]:
        """The others on its machine, when that is not reached any more: their ssh finds out a moment later."""
        if status != _LOST:
            return ()
        host = self._hosts[engine]
        return tuple(other for other, where in enumerate(self._hosts) if where == host and other != engine)


# -- before the start ------------------------------------------------------------------------------------------------


def probe(hosts: Sequence[str], ssh_args: Sequence[str] = ()) -> dict[str, int]:
    """Ask each machine, all at once, how many GPUs it has.

    Raises:
        StartError: One cannot be reached, or has not what engines need.
    """
    asked: dict[str, subprocess.Popen[str]] = {}
    try:
        for host in hosts:
            command = ["ssh", *_ssh_arguments(ssh_args), host, "exec " + shlex.join([*_PYTHON, "probe"])]
            asked[host] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        return {host: _answer(host, process, deadline) for host, process in asked.items()}
    except FileNotFoundError as error:
        raise StartError(f"There is no ssh on this machine ({error}). Install an OpenSSH client.") from error
    finally:
        for process in asked.values():
            process.kill()
            process.communicate()


def _answer(host: str, process: subprocess.Popen[str], deadline: float) -> int:
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise StartError(f"{host} did not answer within {_PROBE_TIMEOUT_S:.0f} s. Does `ssh {host}` work?") from None
    # The last line: what a shell of theirs prints at its start comes before.
    last = out.strip().rpartition("\n")[2]
    if process.returncode == 0 and last.startswith("{"):
        return _checked(host, json.loads(last))
    said = "\n".join(f"    {line}" for line in err.strip().splitlines()[-5:]) or "    (nothing)"
    if process.returncode == _LOST:
        raise StartError(
            f"ssh does not reach {host}. It has to work without a password (a key, or an agent). It says:\n{said}"
        )
    raise StartError(
        f"{host} has no distnb {__version__} for {sys.executable}: engines need the same Python environment at the "
        f"same path on every machine, from a shared file system or the same image. It says:\n{said}"
    )


def _checked(host: str, found: Mapping[str, Any]) -> int:
    theirs, ours = str(found["python"]).rpartition(".")[0], platform.python_version().rpartition(".")[0]
    if found["distnb"] != __version__ or theirs != ours:
        raise StartError(
            f"{host} has distnb {found['distnb']} on Python {found['python']}, and this is distnb {__version__} on "
            f"Python {platform.python_version()}. Functions travel between them: make them the same."
        )
    return int(found["gpus"])


def plan_hosts(
    options: HostOptions, devices: str | Sequence[str | Device] | None, *, oversubscribe: bool
) -> tuple[tuple[str, ...], tuple[Device, ...]]:
    """The machine and the device of each engine, in order. The same devices are asked of every machine.

    Raises:
        OptionError: The numbers or names make no sense.
        StartError: A machine cannot be reached, or does not have what was asked for.
    """
    hosts: list[str] = []
    planned: list[Device] = []
    for host, gpus in probe(options.hosts, options.ssh_args).items():
        try:
            there = plan_devices(options.per_host, devices, oversubscribe=oversubscribe, gpus=gpus)
        except DistnbError as error:
            raise type(error)(f"{host}: {error}") from None
        hosts += [host] * len(there)
        planned += there
    return tuple(hosts), tuple(planned)


def names_of(hosts: Sequence[str], ssh_args: Sequence[str]) -> list[str]:
    """What ssh's configuration makes of the hosts: names or addresses that the network knows.

    Raises:
        StartError: ssh does not understand its arguments.
    """
    names = []
    for host in hosts:
        done = subprocess.run(["ssh", "-G", *ssh_args, host], capture_output=True, text=True, check=False)
        found = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if done.returncode != 0 or not found:
            raise StartError(f"ssh cannot make anything of {host!r}: {done.stderr.strip()}")
        names.append(found[0])
    return names
