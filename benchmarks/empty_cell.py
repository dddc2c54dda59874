"""An empty `%%distribute mirrored` cell against an empty `%%px` cell of ipyparallel, both on 2 engines.

python -m benchmarks.empty_cell [--rounds 7] [--cells 20]
"""

from __future__ import annotations

import ipyparallel

from benchmarks.cell_shell import Cells
from benchmarks.guard import TARGETS
from benchmarks.harness import compare, options, report, timed


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, rounds=7, cells=20)

    cells = Cells("distnb")
    cluster = ipyparallel.Cluster(n=2, log_level=40)
    client = cluster.start_and_connect_sync()
    try:
        client[:].activate()
        cells.run("%distnb start -n 2")
        comparison = compare(
            {
                "%%distribute mirrored": timed(lambda: cells.run("%%distribute mirrored\npass"), given.cells),
                "%%px --block": timed(lambda: cells.run("%%px --block\npass"), given.cells),
            },
            rounds=given.rounds,
        )
        cells.run("%distnb stop")
    finally:
        client.close()
        cluster.stop_cluster_sync()
    title = "an empty cell on 2 engines, until the prompt is back"
    kept = report(title, comparison, baseline="%%px --block", targets=TARGETS["empty_cell"]["cell"])
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
