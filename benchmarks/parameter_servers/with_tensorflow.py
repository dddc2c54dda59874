"""TensorFlow's ParameterServerStrategy and ClusterCoordinator, on processes that each run a `tf.distribute.Server`.

The loop is that of TensorFlow's documentation. The optimizers are TensorFlow's own operations on variables, which
Keras's optimizers would call: Keras 3 does not support parameter servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.parameter_servers.work import (
    LEARNING_RATE,
    Cluster,
    batches,
    free_ports,
    initial,
    start_process,
)

__all__ = ["connect"]


def _act_as_task(addresses: dict[str, list[str]], job: str, index: int) -> Any:
    # With fewer threads between operations, functions that wait for those of others can block each other.
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=len(addresses["worker"]) + 1
    )
    spec = tf.train.ClusterSpec(addresses)
    return tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=config)


def connect(cluster: Cluster) -> Callable[[str], Callable[[int], object]]:
    """Start a cluster. Return a function that makes, for a kind of work, a function that runs closures or steps."""
    ports = [f"localhost:{port}" for port in free_ports(sum(cluster))]
    addresses = {"worker": ports[: cluster.workers], "ps": ports[cluster.workers :]}
    for job, urls in addresses.items():
        for index in range(len(urls)):
            start_process(_act_as_task, addresses, job, index)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(addresses), rpc_layer="grpc")
    # A table has a shard on each server. The MLP's variables, all smaller, are assigned to servers whole.
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(1 << 20, cluster.servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def prepared(work: str) -> Callable[[int], object]:
        function, args = _closure(work, strategy, coordinator)

        def do(count: int) -> None:
            for _ in range(count):
                coordinator.schedule(function, args=args)
            coordinator.join()

        return do

    return prepared


def _closure(work: str, strategy: Any, coordinator: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
    if work == "closures":
        return tf.function(lambda: None), ()
    dataset = coordinator.create_per_worker_dataset(
        lambda: tf.data.Dataset.from_tensor_slices(batches(work)).repeat().prefetch(2)
    )
    with strategy.scope():
        variables = [tf.Variable(value) for value in initial(work)]
        train = _mlp(variables) if work == "mlp" else _embedding(variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> None:
        strategy.run(train, args=next(iterator))

    return step, (iter(dataset),)


def _mlp(variables: list[Any]) -> Callable[[Any, Any], None]:
    def train(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = inputs
            for weights, biases in zip(variables[:-2:2], variables[1:-2:2], strict=True):
                hidden = tf.nn.relu(hidden @ weights + biases)
            logits = hidden @ variables[-2] + variables[-1]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=LEARNING_RATE, delta=gradient, use_locking=True
            )

    return train


def _embedding(variables: list[Any]) -> Callable[[Any, Any], None]:
    table, weights, bias = variables
    parts = _shards(variables)
    squares = _shards([tf.Variable(tf.fill(variable.shape, 0.1)) for variable in variables])

    def train(ids: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            summed = tf.reduce_sum(tf.nn.embedding_lookup(table, ids), axis=1)
            loss = tf.reduce_mean((summed @ weights + bias - targets) ** 2)
        for part, square, gradient in zip(parts, squares, tape.gradient(loss, parts), strict=True):
            options = {"var": part.handle, "accum": square.handle, "lr": LEARNING_RATE, "use_locking": True}
            if isinstance(gradient, tf.IndexedSlices):
                rows, places = tf.unique(gradient.indices)
                summed_rows = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
                tf.raw_ops.ResourceSparseApplyAdagradV2(epsilon=1e-7, grad=summed_rows, indices=rows, **options)
            else:
                tf.raw_ops.ResourceApplyAdagradV2(epsilon=1e-7, grad=gradient, **options)

    return train


def _shards(variables: list[Any]) -> list[Any]:
    return [shard for variable in variables for shard in getattr(variable, "variables", [variable])]
