"""Files that several replicas write and read."""

from __future__ import annotations

import os
import shutil

import torch

import distnb
from tests.conformance.prelude import strategy
from tests.conformance.program import program


@program(expected=lambda n: {"names": [[float(replica) for replica in range(n)]] * 2})
def one_folder_for_all():
    folder = distnb.shared_folder("distnb-conformance-")

    def write(step):
        with open(os.path.join(folder, f"{step}-{distnb.replica_id()}"), "w"):
            return torch.ones(())

    strategy.reduce("sum", strategy.run(write, args=(0,)), axis=None)  # from here on every replica has written
    strategy.reduce("sum", strategy.run(write, args=(1,)), axis=None)
    found = sorted(os.listdir(folder))
    names = [[float(name[2:]) for name in found if name[0] == step] for step in "01"]
    strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)  # every replica has read
    distnb.on_chief(shutil.rmtree)(folder)
    return {"names": names}
