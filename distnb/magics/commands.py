"""The parsers of `%distnb` and `%%distribute`, from which help, errors and Tab completions are made."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from typing import NoReturn

from distnb.errors import OptionError, closest
from distnb.options import DATA_LIMIT_NBYTES, nbytes_of
from distnb.process_log import LEVELS
from distnb.strategies import WORDS, class_of

__all__ = ["AUTODISTRIBUTE", "COMMANDS", "DISTRIBUTE", "LIVE_MODES", "asks_for_help", "distnb_help"]

LIVE_MODES = ("auto", "widget", "picture", "text", "off")


class LineParser(argparse.ArgumentParser):
    """An argparse parser for a line of a notebook, named as its magic is written ("%distnb start")."""

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


def asks_for_help(line: str) -> bool:
    """Return whether a magic's line contains -h or --help."""
    return not {"-h", "--help"}.isdisjoint(line.split())


def _commands() -> dict[str, LineParser]:
    about = {
        "start": "start engines: one for each GPU, else two on the CPU",
        "stop": "end the engines",
        "restart": "replace all engines, or those named",
        "status": "what each engine is, and does",
        "devices": "the devices, who uses them, and their memory now",
        "memory": "how much memory each engine takes, and what is free",
        "stacks": "where each engine is in its program",
        "logs": "what each engine wrote outside programs, and the log of distnb",
        "history": "the cells that ran on engines: how long, and how they ended",
        "debug": "open a debugger where the latest cell or call failed, on a replica",
        "interrupt": "end the program, as the stop button does",
        "variables": "where each variable lives",
        "check": "whether replicas hold the same bits",
        "output": "all that the replicas wrote",
        "live": "how curves and replicas are drawn; also to TensorBoard's files",
        "curves": "charts of what was drawn, here or in a file",
        "timeline": "where the time of the latest steps went, and who is the straggler",
    }
    commands = {name: LineParser(f"%distnb {name}", text) for name, text in about.items()}
    _start(commands["start"])
    add = commands["restart"].add_argument
    add("engines", metavar="ENGINE", nargs="*", type=_whole, help="their numbers, as %%distnb status shows them")
    add("--missing", action="store_true", help="those that have ended; what is mirrored is restored to them")
    commands["check"].add_argument("names", metavar="NAME", nargs="*", help="variables; without one, all mirrored ones")
    add = commands["logs"].add_argument
    add("engine", metavar="ENGINE", nargs="?", type=_whole, help="of this engine alone")
    add("--level", metavar="LEVEL", choices=LEVELS, help=f"log from now on, in all processes: {', '.join(LEVELS)}")
    add("--lines", metavar="N", type=_count, default=100, help="the latest lines of the log; without it, 100")
    add("--save", metavar="FILE", help="collect all logs in a .zip file for a bug report")
    add = commands["debug"].add_argument
    add("--replica", metavar="N", type=_whole, help="which; without it, the one that failed")
    add("--here", action="store_true", help="in the notebook instead, where its cell called the replicas")
    add = commands["output"].add_argument
    add(
        "replica",
        metavar="REPLICA",
        nargs="?",
        type=_whole,
        help="of this replica; without it, of all, in the latest cell where one wrote",
    )
    add("--save", metavar="FILE", help="write it to a file")
    add = commands["timeline"].add_argument
    add("--steps", metavar="N", type=_count, default=10, help="of so many steps, the latest; without it, of 10")
    add("--save", metavar="FILE", help="write it as a Chrome trace, which ui.perfetto.dev opens")
    add = commands["live"].add_argument
    add("mode", metavar="MODE", nargs="?", choices=LIVE_MODES, help=f"{', '.join(LIVE_MODES)}; auto chooses")
    add("--tensorboard", metavar="DIR", help="write what is drawn from now on to event files there; off ends it")
    add = commands["curves"].add_argument
    add("names", metavar="NAME", nargs="*", help="curves; without one, all")
    add("--runs", metavar="A,B", help="which runs; without it, the latest, and if that has a name, all that have one")
    add("--log", action="store_true", help="a log scale")
    add("--smoothing", metavar="S", type=float, default=0.0, help="from 0 to below 1: 0.9 smooths much")
    add("--save", metavar="FILE", help="write it to a file: .png, .svg, .pdf; or the values, .csv")
    return commands


def _start(parser: LineParser) -> None:
    add = parser.add_argument
    add("-n", metavar="N", type=_count, help="how many")
    add("--workers", metavar="N", type=_count, help="in place of -n, with --ps: how many that compute")
    add("--ps", metavar="N", type=_count, help="how many parameter servers, which keep the variables")
    add("--replicas-per-worker", metavar="N", type=_count, help="how many engines, and devices, each worker has")
    add("--devices", metavar="NAMES", help="where they compute: cuda:0,cuda:1, or tpu for all TPU chips")
    add(
        "--oversubscribe",
        action="store_true",
        help="let several share a device, or more start than the machine can take",
    )
    add("--hosts", metavar="A,B", help="the machines where they run, reached by ssh; without it, this one")
    add("--per-host", metavar="N", type=_count, help="how many on each machine")
    add("--interface", metavar="NAME", help="the network interface that leads to the machines: eth0")
    add("--ssh-args", metavar="TEXT", default="", type=shlex.split, help='arguments for ssh: "-p 2222"')
    add("--launcher", metavar="WORD", help="what starts them: ssh, slurm, mpi, or server")
    add("--launcher-args", metavar="TEXT", default="", type=shlex.split, help="arguments for srun or mpiexec")
    add("--resolver", metavar="WORD", help="what names the machines: slurm, tfconfig, kubernetes, or a variable")
    add("--secret", metavar="FILE", help="the secret of the servers that wait for the notebook")
    add(
        "--data-limit",
        metavar="SIZE",
        type=_size,
        default=DATA_LIMIT_NBYTES,
        help="larger data stays on the engines: 2GB; without it, 64MB",
    )


def _distribute() -> LineParser:
    parser = LineParser(
        "%%distribute",
        "run the cell on every replica of a strategy. In the cell, `strategy` is the strategy. Strategies:\n"
        + "".join(f"\n  {word:<18}{class_of(word).about}" for word in WORDS)
        + "\n\nInstead of a word: the name of a strategy object, or MODULE:CLASS for a class in a module of yours.",
    )
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=84)
    add = parser.add_argument
    add("word", metavar="STRATEGY", nargs="?", default="", help="one of these words, or the name of a variable")
    add("-n", dest="replicas", metavar="N", type=_count, help="how many replicas; without it, one on each engine")
    add("--devices", metavar="NAMES", help="where they compute: cuda:0,cuda:1")
    add("--gradients", choices=("sum", "mean"), help="how gradients are combined; without it, their sum")
    add("--oversubscribe", action="store_true", help="several replicas may share a device")
    add("--replicas", dest="only", metavar="0,2-3", type=_numbers, help="only these run it; the others do nothing")
    add("--name", metavar="RUN", default="", help="its curves are those of this run, compared with other named ones")
    add("--quiet", action="store_true", help="draw no live view")
    add("--time", action="store_true", help="tell where its time went")
    add("--timeline", action="store_true", help="draw each wait of the latest steps, replica by replica")
    add("--profile", metavar="DIR", help="run torch.profiler on every replica; each one's trace is put there")
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
        "run the cells that follow as %%distribute cells, until %autodistribute off. Those that begin with %, ! or ? "
        "run in the notebook",
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
    """Return the text of all commands of `%distnb` with their arguments."""
    width = 42
    lines = []
    for parser in COMMANDS.values():
        usage = parser.usage_line
        shown = usage if len(usage) < width else f"{' '.join(usage.split()[:4])} …"  # only the magic and one option
        lines.append(f"{shown:<{width}}{parser.about}")
    return "\n".join([*lines, "", "%distnb COMMAND -h tells more of a command.", "", COMMANDS["start"].format_help()])
