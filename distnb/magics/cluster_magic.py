"""The `%distnb` line magic, which starts, stops and shows the cluster."""

from __future__ import annotations

import contextlib
import io
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distnb import features
from distnb.cluster import tpu_chips
from distnb.cluster.devices import available_gpus, plan_devices
from distnb.cluster.start_options import StartOptions
from distnb.errors import NoClusterError, OptionError, closest
from distnb.magics.cell_history import HEADER
from distnb.magics.commands import COMMANDS, LIVE_MODES, asks_for_help, distnb_help
from distnb.magics.engine_tables import STATUS_COLUMNS, ready_text, status_rows
from distnb.magics.tracebacks import presented
from distnb.notebook import bug_report, value_placement
from distnb.notebook import compose as sessions
from distnb.notebook.reports import stacks_text
from distnb.notebook.teams import check_replicas
from distnb.notebook.variable_placement import COLUMNS, drift_reports, variables
from distnb.options import StrategySpec
from distnb.strategies import resolve
from distnb.views.event_files import EventFiles
from distnb.views.wording import filled, html_table, human_bytes, text_table
from distnb.widgets import exports
from distnb.widgets.publisher import publisher_for
from distnb.widgets.timeline import timeline
from distnb.widgets.value_views.devices_html import devices_html, devices_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.magics.cell_history import CellHistory
    from distnb.notebook.session import Session
    from distnb.widgets.front import Front

__all__ = ["ClusterMagic"]

_ANY = StrategySpec(kind="mirrored")
_PROGRESS = 300  # the most characters of a line of progress, which may name every engine


class ClusterMagic:
    """The subcommands of `%distnb`."""

    def __init__(self, shell: InteractiveShell, front: Front, history: CellHistory) -> None:
        self._shell = shell
        self._front = front
        self._history = history

    def distnb(self, line: str) -> None:
        """Run a line of `%distnb COMMAND …`."""
        command, _, rest = line.strip().partition(" ")
        with presented():
            if command in ("", "help", "-h", "--help"):
                print(distnb_help())
            elif command not in COMMANDS:
                raise OptionError(
                    f"%distnb {command}: there is no such command{closest(command, COMMANDS)}. The commands are "
                    f"{', '.join(COMMANDS)}; %distnb -h explains them."
                )
            elif asks_for_help(rest):
                print(COMMANDS[command].format_help())
            else:
                getattr(self, command)(COMMANDS[command].read(rest))

    def ensure(self, spec: StrategySpec = _ANY, only: Sequence[int] | None = None) -> Session:
        """Return the running session. Without one, start a cluster that suits a strategy, and print a line about it.

        If the side panel is starting engines, wait for them.

        Args:
            spec: The strategy.
            only: The replicas that will run the program; None for all.

        Raises:
            NoClusterError: The notebook has left or lost a detached cluster, whose objects the program may need.
            OptionError: The cluster to start would have no such replicas.
        """
        waits = "Waiting for the engines that are being started or stopped."
        session = sessions.current() or sessions.settled(on_wait=lambda: print(waits, flush=True))
        strategy = resolve(spec)
        if session is None and sessions.lost():
            raise NoClusterError(sessions.lost())
        if session is None:
            options = StartOptions(**strategy.start_options())
            if not options.tasks:
                devices = plan_devices(options.n, options.devices, oversubscribe=options.oversubscribe)
                check_replicas(only, len(devices))
            print(f"No cluster is running: starting {_described(options)}.", flush=True)
            session = self._start(options)
        strategy.check_cluster()
        return session

    # -- commands --------------------------------------------------------------------------------------------------

    def start(self, found: Namespace) -> None:
        """Run `%distnb start [-n N | --workers N --ps N] [--devices …] [--oversubscribe] [--hosts a,b …] …`."""
        given = vars(found)
        read = [each.read_options(given, self._shell.user_ns) for each in features.every("options of %distnb start")]
        on = next((machines for machines in read if machines is not None), None)
        self._start(StartOptions(on=on, **given))

    def _start(self, options: StartOptions) -> Session:
        with _progress(self._shell) as show:
            session = sessions.start_with(options, show)
        rows = session.status()
        print(f"{_count(len(rows), 'engine')} ready: {ready_text(rows)}.")
        if session.name:
            print(
                f"They stay when this notebook ends. Continue in another one, or after a restart of the kernel, with "
                f"%distnb connect {session.name}"
            )
        return session

    def connect(self, found: Namespace) -> None:
        """Run `%distnb connect NAME [--take]`."""
        with _progress(self._shell) as show:
            session = sessions.connect(found.name, take=found.take, on_progress=show)
        rows = session.status()
        print(f"Connected to {session.name}: {_count(len(rows), 'engine')}.")

    def disconnect(self, found: Namespace) -> None:
        """Run `%distnb disconnect`."""
        name = sessions.require().name
        sessions.disconnect()
        print(f"Disconnected from {name}. Its engines stay: %distnb connect {name}")

    def list(self, found: Namespace) -> None:
        """Run `%distnb list`."""
        listing = features.require("clusters that stay", "list")
        if rows := listing.rows():
            self._table(listing.HEADER, rows)
        else:
            print("You have no detached cluster on this machine. %distnb start --detach starts one.")

    def stop(self, found: Namespace) -> None:
        """Run `%distnb stop`."""
        running = sessions.current() is not None
        sessions.stop()
        print("The cluster has ended." if running else "No cluster is running.")

    def restart(self, found: Namespace) -> None:
        """Run `%distnb restart [ENGINE …] [--missing]`."""
        if found.engines and found.missing:
            raise OptionError("%distnb restart: give the engines' numbers, or --missing, not both.")
        session = sessions.require()
        with _progress(self._shell) as show:
            replaced = session.restart(tuple(found.engines) or None, missing=found.missing, on_progress=show)
        engines = ", ".join(map(str, replaced))
        print(f"{_count(len(replaced), 'engine')} replaced: {engines}." if replaced else "No engine is missing.")

    def resize(self, found: Namespace) -> None:
        """Run `%distnb resize [N] [--workers N] [--ps N]`."""
        session = sessions.require()
        with _progress(self._shell) as show:
            resized = session.resize(found.n, workers=found.workers, ps=found.ps, on_progress=show)
        changes = [
            f"{_count(len(engines), 'engine')} {what} ({', '.join(map(str, engines))})"
            for what, engines in (("added", resized.added), ("removed", resized.removed))
            if engines
        ]
        size = _count(len(session.status()), "engine")
        print(f"{', '.join(changes)}. The cluster has {size} now." if changes else f"The cluster has {size} already.")

    def status(self, found: Namespace) -> None:
        """Run `%distnb status`."""
        if sessions.current() is None:
            print(sessions.lost() or "No cluster is running. Start one with %distnb start.")
            return
        session = sessions.require()
        header, rows = filled(STATUS_COLUMNS, status_rows(session.status(), session.work()))
        self._table(tuple(header), [tuple(row) for row in rows], numeric=("engine", "pid"))

    def devices(self, found: Namespace) -> None:
        """Run `%distnb devices`."""
        gpus = [f"cuda:{index}" for index in range(available_gpus())]
        devices = gpus + [f"tpu:{index}" for index in range(tpu_chips.chips())] or ["cpu:0"]
        model = value_placement.devices_model(self._shell.user_ns, devices)
        self._shell.display_pub.publish({"text/plain": devices_text(model), "text/html": devices_html(model)})

    def stacks(self, found: Namespace) -> None:
        """Run `%distnb stacks`."""
        print(stacks_text(sessions.require()), end="")

    def memory(self, found: Namespace) -> None:
        """Run `%distnb memory`."""
        session = sessions.require()
        measured = session.memory()
        rows = []
        for row in session.status():
            use = measured.get(row.engine)
            sizes = (None,) * 4 if use is None else (use.rss, use.allocated, use.device_free, use.host_free)
            name = row.task or f"engine {row.engine}"
            rows.append([name, row.device, *map(human_bytes, sizes), "" if use else f"{row.state}: no answer"])
        header = ["engine", "device", "resident", "on device", "free on device", "free on host", "state"]
        header, rows = filled(header, rows)
        self._table(
            tuple(header),
            [tuple(row) for row in rows],
            numeric=("resident", "on device", "free on device", "free on host"),
        )

    def logs(self, found: Namespace) -> None:
        """Run `%distnb logs [ENGINE] [--level LEVEL] [--lines N] [--save FILE]`."""
        session = sessions.require()
        if found.level is not None:
            session.engines.set_log_level(found.level)
            print("The log is off." if found.level == "off" else f"The log is at level {found.level}.")
            return
        if found.save:
            count = bug_report.save(session, Path(found.save).expanduser())
            print(f"{_count(count, 'file')} written to {found.save}. Read them before you attach it to a report.")
            return
        logs = session.logs()
        if found.engine is not None and found.engine not in logs:
            raise OptionError(f"There is no engine {found.engine}. The engines are {', '.join(map(str, logs))}.")
        for engine, text in logs.items():
            if found.engine in (None, engine):
                print(f"── engine {engine} ──\n{text}")
        print(bug_report.log_text(session, found.engine, found.lines), end="")

    def history(self, found: Namespace) -> None:
        """Run `%distnb history`."""
        rows = self._history.rows()
        if rows:
            self._table(HEADER, rows, numeric=("cell", "replicas", "seconds"))
        else:
            print("No cell has run on engines.")

    def debug(self, found: Namespace) -> None:
        """Run `%distnb debug [--replica N | --here]`."""
        if found.here and found.replica is not None:
            raise OptionError("%distnb debug: give --replica, or --here, not both.")
        if found.here:
            self._shell.InteractiveTB.debugger(force=True)
        else:
            sessions.require().programs.debug(found.replica)

    def interrupt(self, found: Namespace) -> None:
        """Run `%distnb interrupt`."""
        session = sessions.require()
        if session.interrupt():
            print("The program is being ended.")
        elif session.stuck:
            engines = " ".join(map(str, session.stuck))
            print(
                f"Engine {engines}: still busy with a program that was ended. The order to end is repeated each "
                f"second. %distnb stacks shows where it is; if it never ends, replace it with %distnb restart "
                f"{engines}."
            )
        else:
            print("No program is running.")

    def variables(self, found: Namespace) -> None:
        """Run `%distnb variables`."""
        session = sessions.current()
        status = session.status() if session is not None else ()
        rows = variables(self._shell.user_ns, {row.engine: row.device for row in status})
        if rows:
            self._table(COLUMNS, rows)
        else:
            print("No variable of the notebook lives on the engines.")

    def check(self, found: Namespace) -> None:
        """Run `%distnb check [NAME …]`."""
        sessions.require()
        reports = drift_reports(self._shell.user_ns, found.names)
        print("\n".join(f"{name}: {text}" for name, text in reports.items()) or "Nothing is mirrored.")

    def output(self, found: Namespace) -> None:
        """Run `%distnb output [REPLICA] [--save FILE]`."""
        written, session = self._front.written(), sessions.current()
        role = "worker" if session is not None and session.tasks else "replica"
        if found.replica is not None:
            if found.replica not in written:
                known = ", ".join(map(str, written)) or "none"
                raise OptionError(
                    f"%distnb output {found.replica}: this {role} wrote nothing in the latest cell with output. "
                    f"The {role}s with output: {known}."
                )
            written = {found.replica: written[found.replica]}
        text = "".join(
            f"── {role} {replica} ──\n{part}{'' if part.endswith(chr(10)) else chr(10)}"
            for replica, part in written.items()
        )
        if found.save:
            Path(found.save).expanduser().write_text(text)
            print(f"{text.count(chr(10)):,} lines written to {found.save}.")
        else:
            print(text or f"No {role} has written anything.")

    def timeline(self, found: Namespace) -> None:
        """Run `%distnb timeline [--steps N] [--save FILE]`."""
        made = timeline(found.steps)
        if found.save:
            print(f"{len(made.rows):,} intervals written to {made.save(found.save)}. {made.text}")
        else:
            self._shell.display_pub.publish({"text/plain": repr(made), "text/html": made._repr_html_()})

    def live(self, found: Namespace) -> None:
        """Run `%distnb live [auto|widget|picture|text|off] [--tensorboard DIR]`."""
        if found.tensorboard is not None:
            self._front.write_events(None if found.tensorboard == "off" else EventFiles(found.tensorboard))
        elif found.mode is None:
            raise OptionError(f"%distnb live: give one of {', '.join(LIVE_MODES)}, or --tensorboard DIR.")
        self._front.mode = found.mode or self._front.mode

    def curves(self, found: Namespace) -> None:
        """Run `%distnb curves [NAME …] [--runs A,B] [--log] [--smoothing S] [--save FILE]`."""
        runs = [name.strip() for name in found.runs.split(",")] if found.runs else []
        path = Path(found.save).expanduser() if found.save else None
        if path is not None and path.suffix == ".csv":
            table = exports.history(*runs)
            table = table[table["name"].isin(found.names)] if found.names else table
            table.to_csv(path, index=False)
            print(f"{len(table):,} values written to {found.save}.")
            return
        figure = exports.live_figure(*found.names, runs=runs, log=found.log, smoothing=found.smoothing)
        if path is not None:
            figure.savefig(path)
            print(f"The charts are in {found.save}.")
            return
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        titles = ", ".join(axes.get_title() for axes in figure.axes)
        text = f"Charts of {titles}. If no pictures are shown here, write them to a file with --save FILE."
        self._shell.display_pub.publish({"image/png": picture.getvalue(), "text/plain": text})

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _table(self, header: tuple[str, ...], rows: Sequence[tuple[Any, ...]], numeric: tuple[str, ...] = ()) -> None:
        text = "\n".join(text_table(header, rows))
        self._shell.display_pub.publish({"text/plain": text, "text/html": html_table(header, rows, numeric=numeric)})


ClusterMagic.distnb.__doc__ = distnb_help()  # shown by `%distnb?`


@contextlib.contextmanager
def _progress(shell: InteractiveShell) -> Iterator[Callable[[str], None]]:
    """Show a line of progress while engines start, and remove it afterwards.

    The result is printed below the line, so that it comes last even in a front end that cannot update a display.
    """
    publisher = publisher_for(shell)
    try:
        yield lambda text: publisher.area((textwrap.shorten(text[:1].upper() + text[1:], _PROGRESS, placeholder=" …"),))
    finally:
        publisher.area(())


def _described(options: StartOptions) -> str:
    """Describe the cluster that these options start."""
    if options.workers and options.ps:
        roles = f"{_count(options.workers, 'worker')} and {_count(options.ps, 'parameter server')}"
        return f"one of {roles}. %distnb start --workers N --ps N chooses another size"
    if options.devices:
        return f"one on {', '.join(map(str, options.devices))}"
    if options.n:
        return f"one with {options.n} engines"
    return "the default one. %distnb start -n N chooses another size"


def _count(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"
