"""Distributed cells: the text of a cell runs on every replica, and the names that it assigned are bound here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from distnb.notebook.engines import Engines
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.output.profiles import write_profiles
from distnb.notebook.programs.failures import warn_of_drift
from distnb.notebook.running.calls import Calls
from distnb.notebook.running.program_runs import ProgramRuns
from distnb.notebook.teams import check_replicas
from distnb.options import StrategySpec
from distnb.runtime.program_ends import program_ended
from distnb.wire.messages import RunCell, Status, UsersFunction

__all__ = ["OUTPUT_PATIENCE_S", "CellTimes", "Cells"]

OUTPUT_PATIENCE_S = 1.0
"""The time in seconds to wait for the output of engines that are too busy to answer."""


class CellTimes(NamedTuple):
    """The parts of a cell's time, in seconds.

    Attributes:
        packing: From the beginning until the cell was sent, with the values that it reads.
        running: The time on each replica, in replica order.
        merging: From the last reply until the cell's results were merged.
        total: From the beginning to the end.
    """

    packing: float
    running: tuple[float, ...]
    merging: float
    total: float


class Cells:
    """The distributed cells of a session.

    Attributes:
        latest_times: The times of the latest cell that ended.
        received_until: The latest program until whose end all events of all engines were received.
    """

    def __init__(self, engines: Engines, namespace: NotebookNamespace, runs: ProgramRuns, calls: Calls) -> None:
        self._engines = engines
        self._dispatch = engines.dispatch
        self._namespace = namespace
        self._runs = runs
        self._calls = calls
        self.latest_times: CellTimes | None = None
        self.received_until = 0

    def run(
        self,
        source: str,
        spec: StrategySpec,
        *,
        filename: str,
        label: str = "",
        in_scope: bool = False,
        function: UsersFunction | None = None,
        only: tuple[int, ...] | None = None,
        detailed: bool = False,
        profile: Path | None = None,
    ) -> None:
        """Run a cell on every replica of a strategy, and bind the names that it assigned.

        Args:
            source: The cell's text, padded with empty lines so that line numbers are those of the notebook cell.
            filename: The file name of the cell's code objects.
            label: The cell's name in tracebacks, such as "Cell In[3]".
            in_scope: Whether to run the cell within `strategy.scope()`.
            function: The user's function that contains the source as a block; None if there is none (see `RunCell`).
            only: The replicas that run the cell; None for all.
            detailed: Whether events report each wait of the replicas.
            profile: A folder for the records of torch.profiler on each replica.

        Raises:
            OptionError: There is no such replica.
            BaseException: The failing replica's own exception; KeyboardInterrupt if the user ended the cell.
        """
        began = time.monotonic()
        supervisor, namespace = self._engines.supervisor, self._namespace
        with self._dispatch.turn:
            self._calls.send_deferred()
            self._calls.finish()  # the cell reads the effects of earlier calls
            team = self._engines.team(spec)
            self._engines.teams.used.add(spec)
            check_replicas(only, team.size)
            self._dispatch.require_ready(team.engines)
            program = self._dispatch.number()
            self._runs.failure, self._calls.latest_strategy = None, spec.kind
            with self._dispatch.interrupts as interrupts:
                with interrupts.brief():
                    snapshot = namespace.outgoing(source, team, filename, label)
                    namespace.operations.changes += 1
                message = RunCell(
                    program=program,
                    team=team,
                    strategy=spec,
                    source=source,
                    filename=filename,
                    function=function,
                    in_scope=in_scope,
                    snapshot=snapshot,
                    only=only,
                    detailed=detailed,
                    profiled=profile is not None,
                )
                supervisor.publish(Status(program=program, state="started", team=team))
                program_ended()  # the cell may save where this process has saved
                outcome = self._dispatch.post(program, team.engines, message, quiet=False)
                sent = time.monotonic()
                self._runs.wait(outcome, team)
                ended = time.monotonic()
                # An engine reports a cell's end after all of its earlier events.
                if supervisor.wait_ended(program, OUTPUT_PATIENCE_S) and {*self._engines.left} <= {*team.engines}:
                    self.received_until = program
                supervisor.publish(
                    Status(program=program, state="ended", team=team, text="" if outcome.ok else "failed")
                )
                with interrupts.brief():
                    namespace.incoming(team, outcome.results(team))
                    if outcome.stuck:
                        namespace.failed(snapshot)
        self._engines.save_names()
        running = tuple(outcome.replies[each].seconds for each in team.engines if each in outcome.replies)
        now = time.monotonic()
        self.latest_times = CellTimes(packing=sent - began, running=running, merging=now - ended, total=now - began)
        if profile is not None:
            write_profiles(profile, {team.rank_of(engine): reply.profile for engine, reply in outcome.replies.items()})
        warn_of_drift(outcome, label)
        self._runs.raise_failure(outcome, team)
