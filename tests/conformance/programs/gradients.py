"""Gradients: of all, some and no replicas; sparse, hooked, accumulated; of several models and passes."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distnb
from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import EVERYWHERE, Refusal, program

warnings.filterwarnings("ignore", message="Sparse invariant checks")


@program(under=EVERYWHERE)
def one_model():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"losses": losses, "model": whole(model)}


class Branches(nn.Module):
    """Three layers, of which a pass uses some."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, uses):
        return sum(getattr(self, name)(x).square().sum() for name in uses)


@program()
def a_loader_that_shuffles():
    """Train for three epochs. The last batch has 4 rows."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch):
        x, labels = batch
        loss = distnb.nn.compute_average_loss(nn.functional.cross_entropy(model(x), labels, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = torch.utils.data.TensorDataset(rows(40, 8), rows(40, 4, seed=2).argmax(1))
    loader = strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=12, shuffle=True))
    losses = []
    for _ in range(3):
        for batch in loader:
            losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)))
    return {"losses": losses, "model": whole(model)}


@program(
    by_slices=True,
    cases={uses: {"first": ("left",), "others": tuple(uses.split("+"))} for uses in ("left+right", "right")},
)
def used_on_some_replicas(first, others):
    with strategy.scope():
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def step(x):
        loss = model(x, first if distnb.replica_id() == 0 else others) / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(12, 3), batch_size=6)
    return {"losses": losses, "model": whole(model)}


@program(by_slices=True)
def used_on_other_replicas_in_each_step():
    with strategy.scope():
        model = Branches()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x, turn):
        uses = [("left",), ("right",), ("left", "right")][(distnb.replica_id() + turn) % 3]
        loss = model(x, uses) / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for turn, batch in enumerate(strategy.distribute_dataset(rows(24, 3), batch_size=6)):
        strategy.run(step, args=(batch, turn))
    return {"model": whole(model)}


@program()
def used_by_no_replica():
    with strategy.scope():
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    def step(x):
        loss = model(x, ("left",)) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train(step, rows(8, 3))
    return {"model": whole(model)}


@program(
    by_slices=True,
    refused={"sharded": Refusal("CollectiveMismatchError", "sharded.md", "All replicas must use the same units")},
)
def a_second_model_on_some_replicas():
    with strategy.scope():
        first, second = nn.Linear(3, 1), nn.Linear(3, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(x, turn):
        loss = first(x).square().sum()
        if turn > 0 and distnb.replica_id() == 0:
            loss = loss + second(x).square().sum()
        optimizer.zero_grad()
        (loss / 6).backward()
        optimizer.step()

    for turn, batch in enumerate(strategy.distribute_dataset(rows(18, 3), batch_size=6)):
        strategy.run(step, args=(batch, turn))
    return {"model": whole(first, second)}


@program()
def two_models_and_optimizers():
    with strategy.scope():
        generator, critic = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.05)
        of_critic = torch.optim.Adam(critic.parameters(), lr=0.05)

    def step(batch):
        noise, real = batch
        loss = distnb.nn.compute_average_loss((critic(generator(noise).detach()) - critic(real)).squeeze(1))
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        distnb.nn.compute_average_loss(-critic(generator(noise)).squeeze(1)).backward()
        of_generator.step()
        return loss.detach()

    losses = train(step, rows(10, 3), rows(10, 3, seed=2))
    return {"losses": losses, "models": whole(generator, critic)}


@program()
def two_backward_passes():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        distnb.nn.compute_average_loss(model(2 * x).abs().sum(dim=1)).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def retained_graph():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        output = model(x)
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(output.square().sum(dim=1)).backward(retain_graph=True)
        distnb.nn.compute_average_loss(output.abs().sum(dim=1)).backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


@program(cases={"synchronised": {"locally": False}, "no_sync": {"locally": True}})
def accumulated(locally):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch, last):
        x, y = batch
        loss = mse(model(x), y) / 2
        if locally and not last:
            with strategy.no_sync():
                loss.backward()
        else:
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    batches = strategy.distribute_dataset((rows(14, 3), rows(14, 2, seed=2)), batch_size=4)
    for number, batch in enumerate(batches):
        strategy.run(step, args=(batch, number % 2 == 1))
    return {"model": whole(model)}


@program(
    options={"gradient_reduction": "'mean'"}, cases={"synchronised": {"locally": False}, "no_sync": {"locally": True}}
)
def mean_reduction(locally):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch, last):
        x, y = batch
        loss = F.mse_loss(model(x), y)
        if locally and not last:
            with strategy.no_sync():
                loss.backward()
        else:
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    batches = strategy.distribute_dataset((rows(12, 3), rows(12, 2, seed=2)), batch_size=6)
    for number, batch in enumerate(batches):
        strategy.run(step, args=(batch, number % 2 == 1))
    return {"model": whole(model)}


@program(options={"gradient_reduction": "'mean'"})
def mean_reduction_of_uneven_slices():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    train(step, rows(13, 3), rows(13, 2, seed=2), batch_size=5)
    return {"model": whole(model)}


@program()
def gradient_penalty_of_inputs():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        x = x.clone().requires_grad_()
        output = model(x)
        [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(output.squeeze(1) + (slope.norm(dim=1) - 1) ** 2).backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


class Blocks(nn.Module):
    """A model with two units, and a layer that its forward pass does not use."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x, sum(parameter.square().sum() for parameter in self.parameters())


_UNITS = {
    "one": {},
    "three": {"under": ("sharded",), "options": {"min_size": "0"}},
}


@program(cases=_UNITS)
def gradient_penalty_alone():
    with strategy.scope():
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        x = x.clone().requires_grad_()
        [slope] = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        [second] = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(slope.norm(dim=1)).backward(retain_graph=True)
        distnb.nn.compute_average_loss(second.norm(dim=1)).backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


@program(cases=_UNITS)
def penalty_of_units():
    with strategy.scope():
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        output, penalty = model(x)
        loss = distnb.nn.compute_average_loss(output.square().sum(dim=1))
        optimizer.zero_grad()
        (loss + distnb.nn.scale_regularization_loss(penalty)).backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


@program()
def penalty_of_parameters():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        optimizer.zero_grad()
        (mse(model(x), y) + 0.1 * distnb.nn.scale_regularization_loss(penalty)).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


class Scaled(nn.Module):
    """A layer with a parameter that no replica divides."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.layer(x)


@program(options={"gradient_reduction": "'mean'"}, under=("mirrored", "multi_worker", "sharded"))
def penalty_of_parameters_under_mean():
    with strategy.scope():
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        penalty = sum(parameter.sum() for parameter in model.parameters())
        ((model(x) - y).square().mean() + 0.1 * penalty.square()).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program(
    options={"gradient_reduction": "'mean'"},
    under=("mirrored", "multi_worker", "sharded"),
    refused={"sharded": Refusal("GradientError", "sharded.md", "a loss that is a shard raises an error", alone=True)},
)
def penalty_without_a_loss():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_):
        optimizer.zero_grad()
        model.weight.square().sum().backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


@program(
    options={"gradient_reduction": "'mean'"},
    under=("mirrored", "multi_worker", "sharded"),
    refused={
        "sharded": Refusal("ContextError", "sharded.md", "any other operation with both raises an error", alone=True)
    },
)
def parameters_with_a_mask():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.eye(2, 3)

    def step(x):
        optimizer.zero_grad()
        (model(x).square().mean() + (model.weight * mask).square().sum()).backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


class Penalised(nn.Module):
    """A layer whose forward pass returns a penalty of its weight, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x), self.layer.weight.square().sum()


@program()
def penalty_in_forward():
    with strategy.scope():
        model = Penalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        output, penalty = model(x)
        optimizer.zero_grad()
        (mse(output, y) + 0.1 * distnb.nn.scale_regularization_loss(penalty)).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


_WITHOUT_SPARSE_ADAM = Refusal(
    "OptionError", "sharded.md", "`LBFGS`, `Muon`, `Adafactor` and `SparseAdam` raise an error", alone=True
)


@program(
    cases={
        "SGD": {"optimizer_name": "SGD"},
        "Adagrad": {"optimizer_name": "Adagrad"},
        "SparseAdam": {"optimizer_name": "SparseAdam", "refused": {"sharded": _WITHOUT_SPARSE_ADAM}},
    }
)
def sparse_embedding(optimizer_name):
    with strategy.scope():
        words = nn.Embedding(10, 3, sparse=True)
        optimizer = getattr(torch.optim, optimizer_name)(words.parameters(), lr=0.1)

    def step(chosen):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(words(chosen).square().sum(dim=1)).backward()
        optimizer.step()

    train(step, torch.tensor([0, 3, 3, 1, 7, 7, 7, 9, 3, 0]))
    return {"words": whole(words)}


@program(
    cases={"padding": {"arguments": {"padding_idx": 0}}, "by_frequency": {"arguments": {"scale_grad_by_freq": False}}}
)
def dense_embedding(arguments):
    with strategy.scope():
        model = nn.Sequential(nn.Embedding(10, 3, **arguments), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(chosen):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(chosen).square().sum(dim=1)).backward()
        optimizer.step()

    train(step, torch.tensor([0, 3, 3, 1, 7, 7, 7, 9, 3, 0]))
    return {"model": whole(model)}


@program(
    refused={
        word: Refusal(
            "OptionError", "strategies.md", "An embedding with `max_norm` raises an error on several replicas"
        )
        for word in ("mirrored", "multi_worker", "central_storage", "sharded")
    }
)
def embedding_with_a_largest_norm():
    with strategy.scope():
        words = nn.Embedding(10, 3, max_norm=1.0)
        optimizer = torch.optim.SGD(words.parameters(), lr=0.1)

    def step(chosen):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(words(chosen).square().sum(dim=1)).backward()
        optimizer.step()

    train(step, torch.arange(10).repeat(2), batch_size=10)
    return {"words": whole(words)}


@program()
def hooks_of_parameters():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[0].weight.register_hook(lambda gradient: 2 * gradient)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def hooks_of_activations_and_modules():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))
        model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        output = model(x)
        output.register_hook(lambda gradient: 3 * gradient)
        optimizer.zero_grad()
        mse(output, y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def tied_weights():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 3, seed=2))
    return {"model": whole(model), "tied": model[2].weight is model[0].weight}


@program()
def tied_weights_of_two_models():
    with strategy.scope():
        encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        decoder.weight = encoder.weight
        parameters = list({id(each): each for each in (*encoder.parameters(), *decoder.parameters())}.values())
        optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(decoder(torch.tanh(encoder(x))), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 3, seed=2))
    return {"models": whole(encoder, decoder)}


class Recomputed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False).tanh()
        return x


@program()
def activation_checkpoints():
    with strategy.scope():
        model = Recomputed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 3, seed=2))
    return {"model": whole(model)}


@program()
def backward_in_cross_replica_context():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(rows(4, 3)).square().mean().backward()
        optimizer.step()
    return {"model": whole(model)}


@program()
def updates_by_hand():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def step(batch):
        x, y = batch
        model.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def gradients_changed_before_the_step():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5).sign_()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


_DIFFERENT = Refusal("UnsyncedGradientError", "strategies.md", "raises an error if they differ between the replicas")


@program(
    cases={
        "equal": {"grows": 0.0},
        "different": {
            "grows": 1.0,
            "refused": dict.fromkeys(("mirrored", "multi_worker", "central_storage", "sharded"), _DIFFERENT),
        },
    }
)
def gradients_made_by_hand(grows):
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 1 + grows * distnb.replica_id())
        try:
            optimizer.step()
        finally:
            optimizer.zero_grad()  # so that the next program has no replicas that have drifted apart

    strategy.run(step)
    strategy.run(step)
    return {"model": whole(model)}


_ROWS = Refusal("UnsyncedGradientError", "strategies.md", "gradients that differ raise an error")


@program(
    replicas=(1, 2, 3),
    refused=dict.fromkeys(("mirrored", "multi_worker", "central_storage"), _ROWS),
    under=("default", "one_device", "mirrored", "multi_worker", "central_storage"),
    modes=("cell", "script"),  # an ordinary cell has one replica_id, and passes the same row to all replicas
)
def same_values_in_other_rows_outside_run():
    with strategy.scope():
        table = nn.Embedding(6, 2)

    table(torch.tensor([distnb.replica_id()])).sum().backward()
    return {"gradient": table.weight.grad.tolist()}


@program(under=("mirrored", "multi_worker", "central_storage"), by_slices=False)
def gradients_aggregated_by_hand():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(mse(model(x), y), parameters)
        context = distnb.get_replica_context()
        for parameter, gradient in zip(parameters, context.all_reduce("sum", list(gradients)), strict=True):
            parameter.grad = gradient / 2
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def slices_without_rows():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(5, 3), rows(5, 2, seed=2), batch_size=4)
    return {"losses": losses, "model": whole(model)}


class Cube(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return 3 * x**2 * gradient


@program()
def own_autograd_function():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(Cube.apply(model(x)), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program(
    cases={
        "transformer": {"make": "nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)"},
        "attention": {"make": "SelfAttention()"},
        "gru": {"make": "Last(nn.GRU(4, 4, 2, batch_first=True))"},
        "lstm": {"make": "Last(nn.LSTM(4, 4, batch_first=True))"},
        "convolution": {"make": "nn.Conv1d(5, 5, 3, padding=1)"},
    }
)
def layers_of_torch(make):
    with strategy.scope():
        model = eval(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(x.unflatten(1, (5, 4))).square().sum(dim=(1, 2))).backward()
        optimizer.step()

    train(step, rows(10, 20))
    return {"model": whole(model)}


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Last(nn.Module):
    """A recurrent layer without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@program(
    refused={
        "sharded": Refusal(
            "ContextError",
            "sharded.md",
            "`torch.func.functional_call` cannot replace them: both raise an error",
            alone=True,
        )
    }
)
def functional_call():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
        optimizer.zero_grad()
        mse(torch.func.functional_call(model, doubled, (x,)), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}
