"""The command `distnb`: it examines the machine, runs scripts, shows what is running, and has commands of features."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from distnb import __version__, features
from distnb.errors import DistnbError, OptionError

__all__ = ["main"]

_USAGE_ERROR = 2
_INTERRUPTED = 128 + signal.SIGINT
_WITH_VALUE = ("-n", "--devices")
_NUMBER = re.compile(r"-n-?[0-9]+")

_RUN_TEXT = """\
Runs SCRIPT once per replica, as torchrun does on one machine: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are set, and every connection stays on this machine. Each output line names its replica.
When a replica fails, distnb ends the others and exits with its exit code. Ctrl-C ends all of them.

With TF_CONFIG in the environment this machine is one worker of a cluster: start the same command, with the same
number of replicas, on each of its machines. They communicate over the addresses in TF_CONFIG, unencrypted: use a
network you trust.

Put distnb's options before SCRIPT or right after it. Everything from the first other word on belongs to the script.
`--` ends distnb's options, too.

examples:
  distnb run train.py -n 2
  distnb run train.py -n 2 --lr 0.1 --epochs 5       --lr and --epochs go to train.py
  distnb run --devices cuda:0,cuda:1 train.py
  distnb run -n 2 -m package.train --lr 0.1
"""


_STACKS_TEXT = """\
Shows what each replica is doing, for each of your notebooks on this machine, even while a cell hangs. The command asks
each notebook's process through a socket in the private directory of its cluster.
"""


_CHECK_TEXT = """\
Shows whether this machine and this environment can run engines: one line for each resource, with the cure if it is
missing. The exit status is 1 if anything is.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 2 for invalid arguments, else the failing replica's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not words:
        parser.print_help()
        return 0
    if words[0] == "run":
        return _run(words[1:])
    if words[0] == "stacks":
        return _stacks(words[1:])
    if words[0] == "check":
        return _check(words[1:])
    for command in features.every("commands"):
        if words[0] == command.name:
            code: int = command.run(words[1:])
            return code
    parser.parse_args(words)  # --help, --version, or an error that lists the commands
    parser.print_help()
    return _USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distnb",
        description="Distributed training from notebooks: one cell, any strategy. In a notebook: %load_ext distnb",
    )
    parser.add_argument("--version", action="version", version=f"distnb {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands.add_parser("run", help="run a script on several replicas of this machine", add_help=False)
    commands.add_parser("stacks", help="show what each replica of your notebooks is doing", add_help=False)
    commands.add_parser("check", help="examine whether this machine can run engines", add_help=False)
    for command in features.every("commands"):
        commands.add_parser(command.name, help=command.about, add_help=False)
    return parser


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distnb run",
        usage="distnb run [-n N] [--devices LIST] [--oversubscribe] SCRIPT|-m MODULE [ARGUMENT …]",
        description=_RUN_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", dest="n", type=int, metavar="N", help="number of replicas (default: one per GPU, or 2 on the CPU)"
    )
    parser.add_argument(
        "--devices", metavar="LIST", help="the replicas' devices, separated by commas: cuda:0,cuda:1 or cpu:0,cpu:1"
    )
    parser.add_argument(
        "--oversubscribe",
        action="store_true",
        help="allow several replicas per device, and more replicas than the machine can hold",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a file, as python -m does")
    return parser


def _run(words: list[str]) -> int:
    parser = _run_parser()
    ours, command = _split(words)
    options = parser.parse_args(ours)
    if not command:
        parser.error("a script is missing: distnb run train.py -n 2")
    try:
        if command[0] != "-m":
            _check_script(command[0])
        # Imported late, so that `distnb --help` answers at once.
        from distnb.cluster.devices import plan_devices
        from distnb.cluster.local.capacity import check_capacity, this_machine
        from distnb.cluster.local.script import run_script
        from distnb.cluster.resolvers import TFConfigClusterResolver
        from distnb.cluster.worker_placement import placement_of

        devices = plan_devices(options.n, options.devices, oversubscribe=options.oversubscribe)
        check_capacity(len(devices), this_machine(), oversubscribe=options.oversubscribe)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, _end)
        return run_script(command, devices, placement_of(TFConfigClusterResolver()))
    except OptionError as error:
        parser.error(str(error))
    except DistnbError as error:
        print(f"distnb run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("distnb run: interrupted; every replica was ended.", file=sys.stderr)
        return _INTERRUPTED


def _stacks(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="distnb stacks", description=_STACKS_TEXT)
    parser.add_argument("pid", type=int, nargs="?", metavar="PID", help="only the notebook with this process id")
    chosen = parser.parse_args(words).pid
    from distnb.cluster.local.terminal_socket import ask, places, running

    found = 0
    for path in running():
        try:
            process = ask(path, "process")
            if process is None or (chosen is not None and not process.startswith(f"process {chosen} ")):
                continue
            print(f"{process}{ask(path, 'stacks') or 'The process has ended.'}")
        except TimeoutError:
            print(f"The process that made {path.parent} does not answer: native code holds Python's lock.\n")
        found += 1
    if not found:
        whose = f"The process {chosen} has no cluster" if chosen is not None else "No cluster of yours runs"
        print(
            f"distnb stacks: {whose} on this machine: none is in {', '.join(places())}. To find a notebook whose "
            "environment has another XDG_RUNTIME_DIR or TMPDIR, set the same one here.",
            file=sys.stderr,
        )
    return 0 if found else 1


def _check(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="distnb check", description=_CHECK_TEXT)
    parser.add_argument("-n", dest="n", type=int, metavar="N", help="number of engines (default: as %%distnb start)")
    n = parser.parse_args(words).n
    if n is not None and n < 1:
        parser.error("-n: give 1 or more engines")
    from distnb.cluster.local.machine_check import examine

    colour = sys.stdout.isatty()
    missing = 0
    for finding in examine(n):
        mark = "✗" if finding.cure else "✓"
        if colour:
            mark = f"\x1b[{31 if finding.cure else 32}m{mark}\x1b[0m"
        print(f"{mark} {finding.what:<11}{'. '.join(filter(None, finding[1:]))}")
        missing += bool(finding.cure)
    return 1 if missing else 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Separate distnb's options from the script's command.

    distnb's options come before the script or directly after it. The first word that is not one of them belongs to the
    script. With -m the module takes the script's place.
    """
    ours: list[str] = []
    command: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            break
        if word in _WITH_VALUE and left:
            ours += [word, left.pop(0)]
        elif word == "--oversubscribe" or word.startswith("--devices=") or _NUMBER.fullmatch(word):
            ours.append(word)
        elif command:
            left.insert(0, word)
            break
        elif word == "-m" and left:
            command = ["-m", left.pop(0)]
        elif word.startswith("-") and word != "-":
            ours.append(word)  # --help or an unknown option: the parser reports it
        else:
            command = [word]
    return ours, command + left


def _check_script(script: str) -> None:
    if not os.path.exists(script):
        raise OptionError(f"there is no file {script!r} in {os.getcwd()}.")
    if script.endswith(".ipynb"):
        raise OptionError(
            f"{script!r} is a notebook. Open it in Jupyter and use %%distribute there, or convert it first: "
            f"jupyter nbconvert --to script {script}"
        )


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGPIPE:
        signal.signal(number, signal.SIG_IGN)  # further lines would raise it again during clean-up
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
