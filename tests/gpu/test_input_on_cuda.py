"""Batches sent to a GPU: they arrive complete and in order, whatever reads ahead."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distnb.input.distribute import distribute
from distnb.options import InputOptions
from distnb.topology import Device
from tests.support.batches import split_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("prefetch", [None, 0, 3])
@pytest.mark.parametrize("kind", ["arrays", "loader", "pinned", "workers", "iterable"])
def test_batches_arrive_unchanged_on_the_device(kind: str, prefetch: int | None) -> None:
    x, y = torch.randn(1000, 1000), torch.arange(1000)
    data = TensorDataset(x, y)
    plain = list(DataLoader(data, batch_size=64))
    source: Any = {
        "arrays": [x, y],
        "loader": DataLoader(data, batch_size=64),
        "pinned": DataLoader(data, batch_size=64, pin_memory=True),
        "workers": DataLoader(data, batch_size=64, num_workers=2),
        "iterable": plain,
    }[kind]
    for replica_id in range(2):
        dataset = distribute(
            source,
            num_replicas=2,
            replica_id=replica_id,
            device=Device("cuda"),
            batch_size=64 if kind == "arrays" else None,
            options=InputOptions(prefetch=prefetch),
            shared_randomness=nullcontext,
        )
        busy = torch.randn(4000, 4000, device="cuda")
        for _ in range(2):
            sums = []
            with torch.device("cuda"):
                for mine, batch in zip(dataset, plain, strict=True):
                    wanted = split_batch(batch, 2)[replica_id]
                    parts = [leaf.component(replica_id) for leaf in mine]
                    assert all(part.device == torch.device("cuda", 0) for part in parts)
                    busy = busy @ busy / 4000  # the device is still busy when the next batch is copied
                    sums.append((parts[0].double().sum(), wanted[0].double().sum(), parts[1].sum(), wanted[1].sum()))
                    del mine, parts  # their memory may be reused
            for found_x, wanted_x, found_y, wanted_y in sums:
                assert abs(found_x.item() - wanted_x.item()) < 1e-6
                assert found_y.item() == wanted_y.item()


def test_one_replica_gets_whole_batches_on_the_device() -> None:
    batches = [{"x": torch.arange(4), "names": ["a", "b", "c", "d"], "number": 3}]
    here: dict[str, Any] = {"num_replicas": 1, "replica_id": 0, "shared_randomness": nullcontext}
    [batch] = distribute(batches, device=Device("cuda"), **here)
    assert batch["x"].device.type == "cuda"
    assert (batch["names"], batch["number"]) == (["a", "b", "c", "d"], 3)
