"""A program in the style of Accelerate's basic training loop: prepare, backward, gather_for_metrics."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(42)

    inputs = torch.randn(101, 8)
    targets = (inputs.sum(dim=1) > 0).long()
    dataset = TensorDataset(inputs, targets)
    train_dataloader = DataLoader(dataset, shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(dataset, shuffle=False, batch_size=16)

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    history = []
    for epoch in range(2):
        model.train()
        for source, target in train_dataloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(source), target)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()

        model.eval()
        correct, seen = 0, 0
        for source, target in eval_dataloader:
            with torch.no_grad():
                predictions = model(source).argmax(dim=-1)
            all_predictions, all_targets = accelerator.gather_for_metrics((predictions, target))
            correct += (all_predictions == all_targets).sum().item()
            seen += len(all_targets)
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.3f}")
        history.append((correct, seen))

    accelerator.wait_for_everyone()
    total = sum(p.double().sum().item() for p in accelerator.unwrap_model(model).parameters())
    processes = accelerator.num_processes
    accelerator.end_training()
    return processes, history, total


result = training_function()
