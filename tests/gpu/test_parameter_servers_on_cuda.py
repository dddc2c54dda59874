"""A worker on a GPU with servers in host memory, compared with a worker on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def train(devices: str) -> Any:
    distnb.start(workers=1, ps=2, devices=devices)
    try:
        strategy = distnb.ParameterServerStrategy()
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Embedding(20, 8), torch.nn.Flatten(), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 1)
            )
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            mean = distnb.metrics.Mean()

        def batches() -> Any:
            drawn = torch.Generator().manual_seed(0)
            while True:
                yield torch.randint(0, 20, (8, 3), generator=drawn), torch.randn(8, 1, generator=drawn)

        def step(iterator: Any) -> Any:
            def replica(ids: torch.Tensor, wanted: torch.Tensor) -> str:
                optimizer.zero_grad()
                loss = (model(ids) - wanted).pow(2).mean()
                loss.backward()
                optimizer.step()
                mean.update(loss.detach())
                return str(torch.ones(1).device)

            return strategy.run(replica, args=next(iterator))

        iterator = iter(coordinator.create_per_worker_dataset(batches))
        places = coordinator.fetch([coordinator.schedule(step, args=(iterator,)) for _ in range(10)])
        coordinator.join()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        return set(places), float(mean.compute()), state
    finally:
        distnb.stop()


def test_a_worker_on_a_gpu_trains_like_one_on_the_cpu() -> None:
    places, mean, state = train("cuda:0")
    _, expected, wanted = train("cpu:0")
    assert places == {"cuda:0"}
    assert mean == pytest.approx(expected, rel=1e-3)
    for name, value in wanted.items():
        assert torch.allclose(state[name], value, atol=1e-3), name
