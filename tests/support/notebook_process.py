"""A notebook process for tests that end it: it starts a cluster, prints a line of JSON, and ends as requested."""

from __future__ import annotations

import json
import os
import sys
import time

from tests.support.clusters import make_cluster


def main(n: int, ending: str) -> None:
    cluster = make_cluster(n)
    cluster.start()
    while not cluster.client_file.exists():
        time.sleep(0.05)
    pids = [process.pid for process in cluster.engines.values()]
    print(json.dumps({"engines": pids, "directory": str(cluster.directory)}), flush=True)
    if ending == "wait":
        time.sleep(1000)
    if ending == "return":
        return
    if ending == "raise":
        raise RuntimeError("the notebook fails")
    if ending == "_exit":
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
