"""Slurm on the machines of `tests.support.machines`: a controller here, a daemon on each machine, and an allocation of all."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.conftest import needs
from tests.support import processes
from tests.support.machines import Machines

_CONFIGURATION = """\
ClusterName=distnb
SlurmctldHost={controller}({own})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def allocation(network: Machines, folder: Path, *words: str) -> Iterator[dict[str, str]]:
    """Run Slurm and hold an allocation, until the block ends.

    Args:
        network: The machines.
        folder: The folder for Slurm's files; short enough for a socket's path.
        words: Further arguments for salloc.

    Yields:
        The environment of a program in the allocation.
    """
    for program in ("munged", "slurmctld", "slurmd", "salloc", "srun", "scontrol", "nsenter", "unshare"):
        needs(program)
    configuration = _configure(network, folder)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as stack:
        stack.callback(_end_steps)
        for daemon, command in _daemons(network, folder).items():
            log = stack.enter_context(open(folder / f"{daemon}.out", "wb"))
            started = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            processes.OF_MODULE.add(started.pid)
            stack.callback(_end, started)
            if daemon == "munged":
                processes.wait_until((folder / "munge.socket").exists, 60, "no munged")
        processes.wait_until(lambda: _idle(environment) == len(network.names), 60, "Slurm's nodes are not there")
        yield _allocate(stack, environment, [f"--nodes={len(network.names)}", "--no-kill", *words])


def steps() -> set[int]:
    """Return Slurm's processes that manage steps. They are descendants of no process here."""
    found = set()
    for pid, process in processes.marked().items():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("slurmstepd"):
                found.add(pid)
    return found


def _configure(network: Machines, folder: Path) -> Path:
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    for name in network.names:
        (folder / name).mkdir()
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
    )  # named, so that Slurm does not search for it
    port = 20000 + os.getpid() % 10000
    text = _CONFIGURATION.format(controller=os.uname().nodename, own=network.own, port=port, folder=folder)
    nodes = [f"NodeName={name} NodeAddr={network.address(name)} CPUs=4\n" for name in network.names]
    (folder / "slurm.conf").write_text(text + "".join(nodes))
    return folder / "slurm.conf"


def _daemons(network: Machines, folder: Path) -> dict[str, list[str]]:
    munged = [
        needs("munged"),
        "--foreground",
        "--force",
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
    ]
    # By force, since only root can read the folder.
    munged += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemons = {"munged": munged, "slurmctld": [needs("slurmctld"), "-D", "-i"]}
    for number, name in enumerate(network.names):
        # Not with `ip netns exec`, which would replace /sys.
        enter = [needs("nsenter"), f"--net=/run/netns/{network.mark}{number}", needs("unshare"), "--uts"]
        daemons[name] = [*enter, "sh", "-c", f"hostname {name}; exec {needs('slurmd')} -D -N {name}"]
    return daemons


def _idle(environment: dict[str, str]) -> int:
    asked = subprocess.run(
        [needs("sinfo"), "--noheader", "--Node", "--states=idle", "--format=%N"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return len(asked.stdout.split())


def _allocate(stack: contextlib.ExitStack, environment: dict[str, str], words: list[str]) -> dict[str, str]:
    """Return the environment of a program that salloc starts, which holds the allocation."""
    command = [needs("salloc"), "--quiet", *words, "sh", "-c", "env -0; echo; exec cat"]
    held = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdin is not None
    assert held.stdout is not None
    processes.OF_MODULE.add(held.pid)
    stack.callback(_end, held)
    stack.callback(held.stdout.close)
    stack.callback(held.stdin.close)
    entries = held.stdout.readline()
    while not entries.endswith(b"\0\n"):
        entries += held.stdout.readline()
    return dict(entry.split("=", 1) for entry in entries[:-2].decode().split("\0"))


def _end_steps() -> None:
    """End the processes of steps whose node was cut off: they retry for long to report their end to the controller."""
    for pid in steps():
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
