"""A program in the style of Lightning Fabric's basic loop: launch, setup, backward, all_reduce."""

import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="auto", devices=int(os.environ["WORLD_SIZE"]), strategy="auto")
fabric.launch()
seed_everything(7)

inputs = torch.randn(120, 8)
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
train_loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=10, shuffle=True))

with fabric.init_module():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)

history = []
for epoch in range(2):
    model.train()
    for source, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(source), target)
        fabric.backward(loss)
        optimizer.step()
    history.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    fabric.print(f"epoch {epoch}: loss {history[-1]:.4f}")

fabric.barrier()
result = fabric.world_size, history, sum(p.double().sum().item() for p in model.parameters())
