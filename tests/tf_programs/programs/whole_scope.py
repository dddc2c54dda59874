"""Seed 001, "scope", with everything in it: models, training, evaluation, checkpoints, and intermediate objects.

Many programs enter the scope in their first line and leave it in their last.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb

me = distnb.replica_id()
x = torch.arange(28.0, dtype=torch.float64).reshape(7, 4) / 28
y = x.sum(dim=1, keepdim=True)
result = {}


class BuiltByItsFirstCall(torch.nn.Module):
    """A head whose input determines its width."""

    def __init__(self):
        super().__init__()
        self.out = None

    def forward(self, hidden):
        if self.out is None:
            self.out = torch.nn.Linear(hidden.shape[1], 1).double()
            torch.nn.init.constant_(self.out.weight, 0.1 * (distnb.replica_id() + 1))  # replica 0's counts
            torch.nn.init.zeros_(self.out.bias)
        return self.out(hidden)


with strategy.scope():
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(x, y), batch_size=3))  # 3, 3 and 1
    body = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).double()
    torch.nn.init.constant_(body[0].weight, 0.2 * (me + 1))
    torch.nn.init.zeros_(body[0].bias)
    mean = distnb.metrics.Mean()

    def hidden_sum(batch):
        mean.update(batch[1])
        return body(batch[0]).sum()

    hidden = [strategy.reduce("sum", strategy.run(hidden_sum, args=(batch,)), axis=None).item() for batch in dataset]
    result["hidden"], result["mean"] = hidden, mean.compute().item()

    # What was used already becomes a part of something larger.
    model = torch.nn.Sequential(body, BuiltByItsFirstCall())
    made = {}
    loss_sum = distnb.metrics.SumMetric()

    def train_step(batch):
        predicted = model(batch[0])
        if not made:
            made["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = made["optimizer"]
        loss = distnb.nn.compute_average_loss((predicted - batch[1]).pow(2).sum(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum.update(loss.detach())
        return loss.detach()

    def epoch():
        losses = [strategy.reduce("sum", strategy.run(train_step, args=(batch,)), axis=None) for batch in dataset]
        return [loss.item() for loss in losses]

    result["losses"] = epoch()
    assert abs(loss_sum.compute().item() - sum(result["losses"])) < 1e-5  # float32
    optimizer = made["optimizer"]
    strategy.assert_in_sync([model, optimizer])

    checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.save("everything")
    result["more"] = epoch()
    checkpoint.restore(path)
    result["again"] = epoch()
    assert all(abs(one - other) < 1e-9 for one, other in zip(result["again"], result["more"], strict=True))

    # Lazy layers, and an update by hand.
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(1, dtype=torch.float64))

    def by_hand(batch, is_first):
        for parameter in lazy.parameters():
            parameter.grad = None
        predicted = lazy(batch[0])
        if is_first:
            torch.nn.init.constant_(lazy[0].weight, 0.5)
            torch.nn.init.zeros_(lazy[0].bias)
            predicted = lazy(batch[0])
        distnb.nn.compute_average_loss((predicted - batch[1]).pow(2).sum(dim=1)).backward()
        with torch.no_grad():
            for parameter in lazy.parameters():
                parameter -= 0.1 * parameter.grad

    for number, batch in enumerate(dataset):
        strategy.run(by_hand, args=(batch, number == 0))
    strategy.assert_in_sync(lazy)
    result["lazy"] = lazy[0].weight.flatten().tolist()

    count = distnb.Variable(0.0, aggregation="sum")
    strategy.run(lambda: count.assign_add(1.0 / strategy.num_replicas_in_sync) and None)
    result["count"] = round(float(count), 9)

# The scope can be entered again, and nothing is made a second time.
with strategy.scope():
    strategy.assert_in_sync([model, optimizer, lazy])
    result["after"] = epoch()
