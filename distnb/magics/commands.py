"""The parsers of `%distnb` and `%%distribute`, from which help, errors and Tab completions are made."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from typing import NoReturn

from distnb import features
from distnb.cluster.start_options import ON_DISCONNECT
from distnb.errors import OptionError, closest
from distnb.options import DATA_LIMIT_NBYTES, nbytes_of, seconds_of
from distnb.process_log import LEVELS
from distnb.strategies import WORDS, class_of

__all__ = ["AUTODISTRIBUTE", "COMMANDS", "DISTRIBUTE", "LIVE_MODES", "asks_for_help", "distnb_help"]

LIVE_MODES = ("auto", "widget", "picture", "text", "off")


class LineParser(argparse.ArgumentParser):
    """An argparse parser for a line of a notebook. Its name is the magic as the user writes it ("%distnb start")."""

    def __init__(self, magic: str, about: str) -> None:
        super().__init__(
            prog=magic,
            description=about[0].upper() + about[1:] + ("" if about.endswith(".") else "."),
            add_help=False,
            allow_abbrev=False,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=26, width=84),
        )
        self.about = about

    @property
    def usage_line(self) -> str:
        """The arguments, in one line."""
        return " ".join(self.format_usage().split()).removeprefix("usage: ")

    def error(self, message: str) -> NoReturn:
        """Raise OptionError; argparse calls this for bad input."""
        usage = self.usage_line
        raise OptionError(
            f"{self.prog}: {message.removeprefix('argument ')}. "
            + (f"Usage: {usage}" if len(usage) < 160 else f"{self.prog} -h shows its options.")
        )

    def read(self, line: str) -> argparse.Namespace:
        """Parse a line. Raises OptionError if it is invalid."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{line.strip()!r} cannot be read ({str(error).lower()})")
        found, rest = self.parse_known_args(words)
        if rest:
            self.error(f"{rest[0]!r} is not understood{closest(rest[0], self.words())}")
        return found

    def words(self) -> list[str]:
        """Return the names of its options."""
        return [option for action in self._actions for option in action.option_strings]


def _whole(text: str, least: int = 0) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, {least} or more")
    return int(text)


_count = partial(_whole, least=1)


def _size(text: str) -> int:
    try:
        return nbytes_of(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def _duration(text: str) -> float:
    try:
        return seconds_of(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def asks_for_help(line: str) -> bool:
    """Return whether a magic's line contains -h or --help."""
    return not {"-h", "--help"}.isdisjoint(line.split())


def _commands() -> dict[str, LineParser]:
    about = {
        "start": "start engines: one per GPU, or two on the CPU",
        "stop": "end the engines",
        "connect": "connect to a detached cluster, whose engines stayed",
        "disconnect": "leave a detached cluster, whose engines stay for the next notebook",
        "list": "list your detached clusters on this machine",
        "restart": "replace all engines, or the given ones",
        "resize": "change the number of engines, or of workers",
        "status": "show each engine's role, device and state",
        "devices": "show the devices, their engines and their memory",
        "memory": "show the memory that each engine uses, and the free memory",
        "stacks": "show each engine's position in its program",
        "logs": "show the engines' output outside programs, and distnb's log",
        "history": "show the cells that ran on engines, their durations and results",
        "debug": "debug the latest failure on a replica",
        "interrupt": "end the running program, as the stop button does",
        "variables": "show where each variable is stored",
        "check": "check that the replicas' copies are equal bit by bit",
        "output": "show the complete output of the replicas",
        "live": "choose how training is drawn; also for TensorBoard",
        "curves": "draw the curves again, here or into a file",
        "timeline": "show how the latest steps spent their time, and the straggler",
    }
    commands = {name: LineParser(f"%distnb {name}", text) for name, text in about.items()}
    _start(commands["start"])
    add = commands["restart"].add_argument
    add("engines", metavar="ENGINE", nargs="*", type=_whole, help="engine numbers, as shown by %%distnb status")
    add("--missing", action="store_true", help="only ended engines; mirrored objects are restored to them")
    add = commands["connect"].add_argument
    add("name", metavar="NAME", help="the cluster's name, as shown by %%distnb list")
    add("--take", action="store_true", help="take the cluster over from another notebook")
    add = commands["resize"].add_argument
    add("n", metavar="N", nargs="?", type=_count, help="number of engines; of workers, if there are parameter servers")
    add("--workers", metavar="N", type=_count, help="number of workers")
    add("--ps", metavar="N", type=_count, help="number of parameter servers, which cannot be changed")
    commands["check"].add_argument("names", metavar="NAME", nargs="*", help="variables (default: all mirrored ones)")
    add = commands["logs"].add_argument
    add("engine", metavar="ENGINE", nargs="?", type=_whole, help="only this engine")
    add("--level", metavar="LEVEL", choices=LEVELS, help=f"set the level of the log: {', '.join(LEVELS)}")
    add("--lines", metavar="N", type=_count, default=100, help="number of lines to show (default: 100)")
    add("--save", metavar="FILE", help="write all logs to a .zip file, for a bug report")
    add = commands["debug"].add_argument
    add("--replica", metavar="N", type=_whole, help="the replica (default: the one that failed)")
    add("--here", action="store_true", help="debug the notebook's own frames instead")
    add = commands["output"].add_argument
    add(
        "replica",
        metavar="REPLICA",
        nargs="?",
        type=_whole,
        help="only this replica (default: all); the latest cell with output is shown",
    )
    add("--save", metavar="FILE", help="write the output to a file")
    add = commands["timeline"].add_argument
    add("--steps", metavar="N", type=_count, default=10, help="number of latest steps (default: 10)")
    add("--save", metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev")
    add = commands["live"].add_argument
    add(
        "mode",
        metavar="MODE",
        nargs="?",
        choices=LIVE_MODES,
        help=f"{', '.join(LIVE_MODES)}; auto chooses for the front end",
    )
    add("--tensorboard", metavar="DIR", help="also write event files for TensorBoard to this folder; off to stop")
    add = commands["curves"].add_argument
    add("names", metavar="NAME", nargs="*", help="curves (default: all)")
    add("--runs", metavar="A,B", help="runs to compare (default: the latest; if it has a name, all named runs)")
    add("--log", action="store_true", help="use a logarithmic scale")
    add("--smoothing", metavar="S", type=float, default=0.0, help="smoothing, from 0 to below 1 (0.9 is strong)")
    add("--save", metavar="FILE", help="write a .png, .svg or .pdf file, or the values to a .csv file")
    return commands


def _start(parser: LineParser) -> None:
    add = parser.add_argument
    add("-n", metavar="N", type=_count, help="number of engines")
    add("--workers", metavar="N", type=_count, help="number of workers, with --ps; replaces -n")
    add("--ps", metavar="N", type=_count, help="number of parameter servers")
    add("--replicas-per-worker", metavar="N", type=_count, help="number of engines, each with its device, per worker")
    add("--devices", metavar="NAMES", help="devices: cuda:0,cuda:1, or tpu for all TPU chips")
    add(
        "--oversubscribe",
        action="store_true",
        help="allow several engines per device, and more engines than the machine can hold",
    )
    for extension in features.every("options of %distnb start"):
        extension.add_options(add)
    add("--detach", action="store_true", help="let the engines stay when the notebook ends: %%distnb connect")
    add("--name", metavar="NAME", help="name of a detached cluster (default: cluster-1, cluster-2, …)")
    add("--hours", metavar="H", type=float, help="time limit of a detached cluster (default: 8; inf for none)")
    add(
        "--on-disconnect",
        metavar="WORD",
        choices=ON_DISCONNECT,
        help="what a running cell does when the notebook ends: continue (default) or end",
    )
    add(
        "--sync",
        metavar="A,B",
        nargs="?",
        const=True,
        default=False,
        help="folders of modules to send to other machines (default: the notebook's own folder)",
    )
    add(
        "--data-limit",
        metavar="SIZE",
        type=_size,
        default=DATA_LIMIT_NBYTES,
        help="size above which data stays on the engines, such as 2GB (default: 64MB)",
    )
    add("--idle-timeout", metavar="TIME", type=_duration, help="time without use after which the engines end: 20m, 2h")


def _distribute() -> LineParser:
    parser = LineParser(
        "%%distribute",
        "run the cell on every replica of a strategy. In the cell, `strategy` is the strategy. Strategies:\n"
        + "".join(f"\n  {word:<18}{class_of(word).about}" for word in WORDS)
        + "\n\nInstead of a word: the name of a strategy object, or MODULE:CLASS for a class in a module of yours.",
    )
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=84)
    add = parser.add_argument
    add("word", metavar="STRATEGY", nargs="?", default="", help="a word from above, or the name of a variable")
    add("-n", dest="replicas", metavar="N", type=_count, help="number of replicas (default: one per engine)")
    add("--devices", metavar="NAMES", help="devices of the replicas: cuda:0,cuda:1")
    add("--gradients", choices=("sum", "mean"), help="reduction of gradients (default: sum)")
    add("--oversubscribe", action="store_true", help="allow several replicas per device")
    add("--replicas", dest="only", metavar="0,2-3", type=_numbers, help="run the cell on these replicas only")
    add("--name", metavar="RUN", default="", help="name of the run, to compare its curves with other named runs")
    add("--quiet", action="store_true", help="draw no live view")
    add("--time", action="store_true", help="print a breakdown of the cell's time")
    add("--timeline", action="store_true", help="draw each wait of the latest steps, for every replica")
    add("--profile", metavar="DIR", help="folder for traces of torch.profiler, one per replica")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    """Parse replica numbers: (0, 2, 3) for "0,2-3"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit() and int(first) <= int(last or first)):
            raise argparse.ArgumentTypeError(f"{text} is not a list of replicas. Write 1, or 0,2-3")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _autodistribute() -> LineParser:
    parser = LineParser(
        "%autodistribute",
        "run the following cells as %%distribute cells, until %autodistribute off. Cells that begin with %, ! or ? run "
        "in the notebook",
    )
    parser.add_argument("line", metavar="STRATEGY", nargs="?", default="", help="as after %%%%distribute, or off")
    return parser


COMMANDS = _commands()
"""The parser of each command of `%distnb`, by name."""

DISTRIBUTE = _distribute()
"""The parser of `%%distribute`."""

AUTODISTRIBUTE = _autodistribute()
"""The parser of the first word of `%autodistribute`."""


def distnb_help() -> str:
    """Return the help text of `%distnb`, with all commands and their arguments."""
    width = 42
    lines = []
    for parser in COMMANDS.values():
        usage = parser.usage_line
        shown = usage if len(usage) < width else f"{' '.join(usage.split()[:4])} …"  # only the magic and one option
        lines.append(f"{shown:<{width}}{parser.about}")
    return "\n".join([*lines, "", "%distnb COMMAND -h describes a command.", "", COMMANDS["start"].format_help()])
