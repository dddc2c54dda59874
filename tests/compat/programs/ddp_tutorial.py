"""A program in the style of PyTorch's "Getting Started with DistributedDataParallel", its torchrun version."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim

from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = PORT
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def demo_basic(rank, world_size):
    print(f"Running basic DDP example on rank {rank}.")
    torch.manual_seed(5)
    ddp_model = DDP(ToyModel())

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        inputs = torch.randn(20, 10, generator=generator)
        labels = torch.randn(20, 5, generator=generator)
        loss = loss_fn(ddp_model(inputs), labels)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        losses.append(loss.item())
    return losses


def demo_checkpoint(rank, world_size):
    print(f"Running DDP checkpoint example on rank {rank}.")
    torch.manual_seed(6 + rank)
    ddp_model = DDP(ToyModel())

    path = tempfile.gettempdir() + f"/model-{PORT}.checkpoint"
    if rank == 0:
        # All processes start from the same parameters, so saving in one is enough.
        torch.save(ddp_model.state_dict(), path)
    # Process 0 must have saved before the others load.
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    nn.MSELoss()(ddp_model(torch.ones(20, 10)), torch.ones(20, 5)).backward()
    optimizer.step()

    dist.barrier()
    if rank == 0:
        os.remove(path)
    total = sum(parameter.sum().item() for parameter in ddp_model.parameters())
    return total


PORT = os.environ.get("MASTER_PORT", "29500")
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
setup(RANK, WORLD_SIZE)
result = demo_basic(RANK, WORLD_SIZE) + [demo_checkpoint(RANK, WORLD_SIZE)]
cleanup()
