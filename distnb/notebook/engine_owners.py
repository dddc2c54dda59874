"""The choice of the owner of a session's engines: this process, or one that a feature adds.

Engines that stay when the notebook ends have another owner. The extension point "clusters that stay" has these names:

    start      makes the owner of a new cluster, given its options, its planner and a function that shows progress
    connect    makes the owner of a cluster that another notebook has started, given its name
    resume     takes up the engines where that notebook has left them, binds its names, and returns a description of
               these, given the engines, the namespace, a function that runs a program, and one that shows progress
    list       has `rows()` and HEADER, the table of the user's clusters
    absence    the engine's behaviour while no notebook is connected: see `distnb.engine.absence`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from distnb import features
from distnb.cluster.engine_owner import EngineOwner
from distnb.cluster.engine_plan import planner_of
from distnb.cluster.lifecycle import Cluster
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import StartOptions

__all__ = ["plan_owner"]


def plan_owner(options: StartOptions, on_progress: Callable[[str], None]) -> EngineOwner:
    """Plan a cluster, print the notices about it, and return the owner of its engines, which are not started yet."""
    planner = planner_of(options)
    owner: EngineOwner
    if options.detach:
        owner = features.require("clusters that stay", "start")(options, planner, on_progress)
    else:
        processes = Processes()
        with ExitStack() as planned:
            planned.callback(processes.close)
            plan = planner(options, processes, on_progress)
            planned.pop_all()
        owner = Cluster(plan, processes)
    for notice in owner.facts.notices:
        print(f"distnb: {notice}", file=sys.stderr)
    return owner
