"""Every way to communicate from a cell, each as a line that the replicas repeat until they are ended."""

from __future__ import annotations

__all__ = ["SETUP", "STEPS"]

SETUP = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size
part, whole = torch.ones(COUNT), torch.ones(COUNT * size)
parts = [torch.ones(COUNT) for _ in range(size)]
others = [torch.ones(COUNT) for _ in range(size)]
objects = [None] * size

def on_chief(value, elsewhere=None):
    return value if rank == 0 else elsewhere

def pass_on(send, receive):
    sending = send(right)
    receive(left)
    sending.wait()

def in_turn(send, receive):
    # Who waits first for the others' messages is another one than who sends first.
    for each in (send, receive) if rank == 0 else (receive, send):
        each()

def coalesced(operation, *tensors):
    with dist._coalescing_manager(async_ops=True) as manager:
        operation(*tensors)
        operation(*tensors)
    manager.wait()
"""

_BATCH = "[dist.P2POp(dist.isend, part, right), dist.P2POp(dist.irecv, parts[0], left)]"

STEPS = {
    "all_reduce": "dist.all_reduce(part.fill_(1))",
    "all_reduce, async": "dist.all_reduce(part.fill_(1), async_op=True).wait()",
    "all_reduce, coalesced": "coalesced(dist.all_reduce, part.fill_(1))",
    "all_reduce, sparse": "dist.all_reduce(torch.eye(30).to_sparse())",
    "all_reduce, in a subgroup": "dist.all_reduce(part.fill_(1), group=everyone)",
    "broadcast": "dist.broadcast(part, size - 1)",
    "reduce": "dist.reduce(part.fill_(1), 0)",
    "reduce_scatter": "dist.reduce_scatter(part, parts)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(part, whole)",
    "reduce_scatter_tensor, async": "dist.reduce_scatter_tensor(part, whole, async_op=True).wait()",
    "reduce_scatter_tensor, coalesced": "coalesced(dist.reduce_scatter_tensor, part, whole)",
    "all_gather": "dist.all_gather(parts, part)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(whole, part)",
    "all_gather_into_tensor, coalesced": "coalesced(dist.all_gather_into_tensor, whole, part)",
    "gather": "dist.gather(part, on_chief(parts))",
    "scatter": "dist.scatter(part, on_chief(parts))",
    "all_to_all": "dist.all_to_all(others, parts)",
    "all_to_all_single": "dist.all_to_all_single(torch.empty_like(whole), whole)",
    "all_to_all_single, with splits": (
        "dist.all_to_all_single(torch.empty(size * (rank + 1)), torch.ones(sum(range(size + 1))), "
        "[rank + 1] * size, list(range(1, size + 1)))"
    ),
    "barrier": "dist.barrier()",
    "monitored_barrier": "dist.monitored_barrier()",
    "isend and recv": "pass_on(lambda to: dist.isend(part, to), lambda source: dist.recv(parts[0], source))",
    "send and recv": "in_turn(lambda: dist.send(part, right), lambda: dist.recv(parts[0], left))",
    "recv from anyone": "pass_on(lambda to: dist.isend(part, to), lambda source: dist.recv(parts[0]))",
    "batch_isend_irecv": f"[work.wait() for work in dist.batch_isend_irecv({_BATCH})]",
    "all_gather_object": "dist.all_gather_object(objects, 'x' * 1000 * rank)",
    "broadcast_object_list": "dist.broadcast_object_list(objects, 0)",
    "gather_object": "dist.gather_object(rank, on_chief(objects))",
    "scatter_object_list": "dist.scatter_object_list([None], on_chief(objects))",
    "send_object_list": (
        "in_turn(lambda: dist.send_object_list(['x', 1], right), lambda: dist.recv_object_list([None] * 2, left))"
    ),
    "functional all_reduce": "functional.all_reduce(part, 'sum', everyone) + 1",
    "functional reduce_scatter": "functional.reduce_scatter_tensor(whole, 'sum', 0, everyone) + 1",
    "functional all_gather": "functional.all_gather_tensor(part, 0, everyone) + 1",
    "functional all_to_all": "functional.all_to_all_single(whole, None, None, everyone) + 1",
    "differentiable reduce_scatter": "differentiable.reduce_scatter(part, parts)",
    "DTensor": "distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).full_tensor()",
    "DTensor, partial": "DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [Shard(0)])",
    "FSDP": "sharded(torch.ones(2, 64)).sum().backward()",
    "DistributedDataParallel": "replicated(torch.ones(2, 64)).sum().backward()",
    "strategy.run": "strategy.run(lambda: distnb.get_replica_context().all_reduce('sum', part))",
    "strategy.gather": "strategy.gather(strategy.run(lambda: part.clone()), 0)",
}
"""One step of each kind, in terms of the names from `SETUP` and from `preparation` of the step."""

_PREPARED = {
    "everyone": "everyone = dist.new_group()",
    "mesh": (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor\n"
        "mesh = init_device_mesh('cpu', (size,))"
    ),
    "sharded": ("from torch.distributed.fsdp import fully_shard\nsharded = fully_shard(torch.nn.Linear(64, 64))"),
    "replicated": "replicated = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))",
    "distnb": "import distnb",
}


def preparation(step: str, count: int) -> str:
    """Return the lines to run before a step is repeated: tensors of `count` numbers, and the step's other needs."""
    more = [lines for name, lines in _PREPARED.items() if name in step]
    return "\n".join([SETUP.replace("COUNT", str(count)), *more])
