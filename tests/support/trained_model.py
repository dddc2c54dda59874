"""A model that is trained step by step while kernels are killed, and what the next notebook must find of it."""

__all__ = ["FOUND", "MODEL", "STEP"]

MODEL = """%%distribute mirrored
import torch
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
def step():
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""
STEP = """%%distribute mirrored
strategy.run(step)
history.append(strategy.num_replicas_in_sync)
strategy.assert_in_sync([model, optimizer])
"""
FOUND = "([each.numpy().tolist() for each in model.state_dict().values()], history, type(step).__name__)"
