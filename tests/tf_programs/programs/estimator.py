"""Seed 004: a model function that learns a simple function, with an Estimator that trains, evaluates and predicts.

The document's batches are one replica's each (its first caveat), which RunConfig can say; here they are global, too.
What was trained under the strategy goes on under none, and the reverse.
"""

import os

import torch

import distnb
from distnb.estimator import Estimator, EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec, train_and_evaluate


def model_fn(features, labels, mode, params):
    torch.manual_seed(1)
    layer = torch.nn.Linear(features.shape[1], 1).double()
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, layer, predictions=lambda logits: {"logits": logits, "half": logits / 2})
    loss = torch.nn.MSELoss(reduction="none")
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, layer, loss=loss, eval_metric_ops={"error": distnb.metrics.MeanAbsoluteError()})
    optimizer = torch.optim.SGD(layer.parameters(), params["learning_rate"], momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    return EstimatorSpec(mode, layer, loss=loss, optimizer=optimizer, scheduler=schedule)


x = torch.linspace(-1, 1, 22, dtype=torch.float64)[:, None]


def input_fn():
    return [(part, 3 * part + 1) for part in x.split(5)] * 4  # the last of them is smaller


def of_rows(rows):
    return lambda: [x[:rows]]


def estimator(folder, of, **options):
    return Estimator(model_fn, folder, RunConfig(train_distribute=of, **options), {"learning_rate": 0.1})


def learned(trained):
    return [[each["logits"].item(), each["half"].item()] for each in trained.predict(of_rows(7))]


classifier = estimator("through", strategy, save_checkpoints_steps=8, keep_checkpoint_max=2)
assert classifier.train(input_fn) is classifier
assert classifier.latest_checkpoint() == os.path.join(classifier.model_dir, "ckpt-20")
classifier.train(input_fn, max_steps=20)  # it is there already
through, rows = classifier.evaluate(input_fn), learned(classifier)
assert through["global_step"] == 20
assert len(rows) == 7
assert abs(rows[0][0] / 2 - rows[0][1]) < 1e-12
assert through["loss"] < 0.5

none = distnb.get_strategy()
result = {"through": through, "rows": rows}
for name, first, second in (("same", strategy, strategy), ("to none", strategy, none), ("from none", none, strategy)):
    half = estimator(name, first).train(input_fn, steps=10)
    part = input_fn()[10:]
    result[name] = estimator(name, second).train(lambda part=part: part, steps=10).evaluate(input_fn)
    for key, value in through.items():
        assert abs(result[name][key] - value) < 1e-6, (name, key)

# One row has one replica.
tiny = Estimator(model_fn, "tiny", RunConfig(train_distribute=strategy), {"learning_rate": 0.2})
tiny.train(lambda: [(torch.ones(1, 1).double(), torch.ones(1, 1).double())] * 50)
result["tiny"] = learned(tiny)[-1]

results = train_and_evaluate(
    estimator("by turns", strategy, save_checkpoints_steps=6), TrainSpec(input_fn, 15), EvalSpec(input_fn, steps=2)
)
result["by turns"] = results or estimator("by turns", strategy).evaluate(input_fn, steps=2)
assert result["by turns"]["global_step"] == 15


# One batch for each replica: what n replicas do with batches of b, one does with batches of n * b.
def by_replica(input_context=None):
    pipelines = (
        (1, 0) if input_context is None else (input_context.num_input_pipelines, input_context.input_pipeline_id)
    )
    part = x[:12].split(1)[pipelines[1] :: pipelines[0]]
    return [(each, 3 * each + 1) for each in part]


replicas = strategy.num_replicas_in_sync
per_replica = RunConfig(train_distribute=strategy, batch_is_per_replica=True)
each = Estimator(model_fn, "per replica", per_replica, {"learning_rate": 0.1}).train(by_replica)
together = estimator("together", none).train(lambda: [(part, 3 * part + 1) for part in x[:12].split(replicas)])
got, expected = (one.evaluate(of_all) for one, of_all in ((each, by_replica), (together, by_replica)))
assert got["global_step"] == 12 // replicas
assert all(abs(got[name] - expected[name]) < 1e-6 for name in expected)
