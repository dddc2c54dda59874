"""Seed 003, the text classifier: with `fit` and the chapter's callbacks, with a custom loop, and which is faster.

The chapter's questions are a download. The sentences here are those of NumPy's documentation and of torch's, which are
on every machine: which of the two says so?
"""

import inspect
import re
import time
from pathlib import Path

import keras
import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb
from distnb.metrics import BinaryAccuracy, Mean

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: not Keras's
# The chapter's global batch grows with the replicas. Curves can be compared where it stays, and a replica's gets smaller.
BATCH_SIZE_PER_REPLICA = 96 // strategy.num_replicas_in_sync
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
WORDS = 16  # of a sentence


def sentences_of(*modules):
    documented = [each for module in modules for _, each in sorted(module.__dict__.items()) if callable(each)]
    text = "\n".join(inspect.getdoc(each) or "" for each in documented)
    found = re.findall(r"^([A-Z][a-z]+ [\w ,'\n-]{30,150})\.$", text, re.MULTILINE)
    return list(dict.fromkeys(" ".join(each.lower().split()) for each in found))


def get_datasets():
    """Return sentences as numbers of words, and 1 for those of torch. Only whole batches train.

    They are shuffled here, once: Keras draws more random numbers than a loop does, and another order is another curve.
    """
    kinds = sentences_of(numpy, numpy.linalg, numpy.ndarray), sentences_of(torch, torch.nn, torch.nn.functional)
    labelled = [(sentence, float(kind)) for kind, sentences in enumerate(kinds) for sentence in sentences]
    order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(0)).tolist()
    words = [re.findall(r"[a-z]+", labelled[index][0])[:WORDS] for index in order]
    number = {word: i for i, word in enumerate(sorted({word for each in words[:500] for word in each}), start=2)}
    padded = torch.zeros(len(order), WORDS, dtype=torch.int64)  # 0: no word; 1: one that training does not know
    for row, each in zip(padded, words, strict=True):
        row[: len(each)] = torch.tensor([number.get(word, 1) for word in each])
    labels = torch.tensor([labelled[index][1] for index in order], dtype=torch.float64)[:, None]
    train, valid = TensorDataset(padded[:500], labels[:500]), TensorDataset(padded[500:], labels[500:])
    loaders = (
        DataLoader(train, batch_size=GLOBAL_BATCH_SIZE, drop_last=True),
        DataLoader(valid, batch_size=GLOBAL_BATCH_SIZE),
    )
    return *loaders, len(number) + 2


train_dataset, valid_dataset, vocabulary = get_datasets()


def create_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((WORDS,), dtype="int64"),
            keras.layers.Embedding(vocabulary, 16, mask_zero=True, dtype="float64"),
            keras.layers.GlobalAveragePooling1D(dtype="float64"),
            keras.layers.Dense(16, activation="tanh", dtype="float64"),
            keras.layers.Dense(1, activation="sigmoid", dtype="float64"),
        ]
    )


def train_and_evaluate(epochs, callbacks):
    model = create_model()
    model.compile(keras.optimizers.Adam(0.03), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(
        train_dataset, epochs=epochs, validation_data=valid_dataset, callbacks=callbacks, shuffle=False, verbose=0
    )
    return history.history


def train_by_loop(epochs):
    with strategy.scope():
        model = create_model()
        optimizer = keras.optimizers.Adam(0.03)
        loss_object = keras.losses.BinaryCrossentropy(reduction=None)
        metrics = {"loss": Mean(), "accuracy": BinaryAccuracy()}

    def forward(texts, labels):
        predictions = model(texts)
        per_example = loss_object(labels, predictions)
        metrics["loss"].update_state(per_example.detach())
        metrics["accuracy"].update_state(labels, predictions.detach())
        return per_example

    def train_step(texts, labels):
        assert len(labels) == BATCH_SIZE_PER_REPLICA
        model.zero_grad()
        loss = distnb.nn.compute_average_loss(forward(texts, labels), global_batch_size=GLOBAL_BATCH_SIZE)
        loss.backward()
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in model.trainable_variables], model.trainable_variables)

    @torch.no_grad()
    def valid_step(texts, labels):
        forward(texts, labels)

    history = {}
    train, valid = strategy.distribute_dataset(train_dataset), strategy.distribute_dataset(valid_dataset)
    for _epoch in range(epochs):
        for prefix, dataset, step in (("", train, train_step), ("val_", valid, valid_step)):
            for batch in dataset:
                strategy.run(step, args=tuple(batch))
            for name, metric in metrics.items():
                history.setdefault(prefix + name, []).append(float(metric.result()))
                metric.reset_state()
    strategy.assert_in_sync(model)
    return history


elapsed_ms = {}


def timed(name, train, *args):
    start = time.perf_counter()
    history = train(*args)
    elapsed_ms[name] = 1000 * (time.perf_counter() - start)
    return history


logs = Path(f"logs-{distnb.replica_id()}" if strategy.num_replicas_in_sync == 1 else "logs")
callbacks = [
    distnb.keras.EpochDots(report_every=4),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, mode="min"),
    distnb.keras.TensorBoard(logs / "embedding-bag"),
]
with strategy.scope():
    by_fit = timed("fit", train_and_evaluate, 20, callbacks)
epochs = len(by_fit["loss"])
assert epochs < 20
by_loop = timed("custom loop", train_by_loop, epochs)
alone = timed("fit on one device", distnb.on_chief(train_and_evaluate), epochs, [])
for other in (by_loop, alone) if distnb.is_chief() else (by_loop,):
    for name, curve in by_fit.items():
        assert torch.allclose(torch.tensor(other[name]), torch.tensor(curve), rtol=1e-5, atol=1e-5), name
assert by_fit["val_accuracy"][-1] > 0.8
assert sorted(path.name for path in (logs / "embedding-bag").iterdir()) == ["train", "validation"]

# Which is faster? On so few sentences one device may be.
if distnb.is_chief():
    print(f"{strategy.num_replicas_in_sync} replicas, {epochs} epochs")
    for name, elapsed in elapsed_ms.items():
        print(f"{name:20}{elapsed:8.0f} ms")
result = {"fit": by_fit, "loop": by_loop}
