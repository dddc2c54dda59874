"""Variables on servers, with servers and a worker in this process: messages only go between objects."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import distnb
from distnb.errors import ServerLost
from distnb.partitioners import FixedShardsPartitioner
from distnb.servers.closure_messages import NO_FENCE, Fence
from distnb.servers.coordinator.packer import ClosurePacker
from distnb.servers.coordinator.per_worker import PerWorkerValues, ValueMaker
from distnb.servers.coordinator.pickling import open_value
from distnb.servers.coordinator.sent import Sent
from distnb.servers.engine.closure_runner import Runner
from distnb.servers.server_messages import Describe, ServerRequest
from distnb.servers.variables import roles
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.storage.store import ShardStore


class InHouse:
    """`Servers` that are stores of this process. Inputs and outputs are copied, as if they were sent."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stores = [ShardStore() for _ in range(count)]
        self.sent: list[tuple[int, Any]] = []
        self.lost: set[int] = set()
        self._generations = [0] * count
        self._thread = ThreadPoolExecutor(1)  # in which no scope is open

    def exchange(self, requests: Mapping[int, Sequence[Any]], fence: Fence = NO_FENCE) -> dict[int, tuple[Any, ...]]:
        found = {}
        for server, operations in requests.items():
            if server in self.lost:
                raise ServerLost(f"Parameter server {server} has ended.")
            self.sent += [(server, each) for each in operations]
            request = pickle.loads(pickle.dumps(ServerRequest(1, fence, tuple(operations))))
            answer = self._thread.submit(self.stores[server].handle, request).result()
            if answer.error is not None:
                raise answer.error
            found[server] = pickle.loads(pickle.dumps(answer.results))
        return found

    def generation(self, server: int) -> int:
        return self._generations[server]

    def replace(self, server: int) -> None:
        """Replace this server by an empty one."""
        self._generations[server] += 1
        self.stores[server] = ShardStore(first_version=100 * self._generations[server])
        self.lost.discard(server)


class Worker:
    """A worker with its own access to the servers, which takes this process's place while a closure runs."""

    def __init__(self, servers: Any, index: int) -> None:
        self.access = ServerAccess(servers, is_worker=True)
        self.runner = Runner(self.access, index)
        self.sent = Sent()

    def run(self, packer: ClosurePacker, number: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        closure = packer.pack(function, args, kwargs)
        message = self.sent.message(0, number, Fence(), closure, packer, lambda: 0)
        before = servers_here.access, dict(roles._runtimes)
        servers_here.access = self.access
        roles._runtimes.clear()
        try:
            self.runner.receive(message)
            result = self.runner.run(message, self.access.optimizers.pop_fresh())
        finally:
            servers_here.access = before[0]
            roles._runtimes.clear()
            roles._runtimes.update(before[1])
        packer.merge(result.contributions or {})
        return open_value(result.value)


@pytest.fixture
def servers() -> Iterator[InHouse]:
    house = InHouse(3)
    before = servers_here.link, servers_here.access, servers_here.require
    servers_here.link = lambda: SimpleNamespace(servers=house, replicas_per_worker=1)  # type: ignore[assignment,return-value]
    servers_here.access = None
    servers_here.require = lambda resolver: None
    roles._runtimes.clear()
    yield house
    servers_here.link, servers_here.access, servers_here.require = before
    roles._runtimes.clear()


@pytest.fixture
def strategy(servers: InHouse) -> Any:
    return distnb.ParameterServerStrategy()


def packer_of(strategy: Any) -> ClosurePacker:
    registration = strategy.runtime.registration
    return ClosurePacker(lambda: registration.roots, registration.access, registration.register_model)


def test_variables_are_placed_on_servers_in_turn(strategy: Any) -> None:
    with strategy.scope():
        made = [distnb.Variable(float(number)) for number in range(4)]
    first = [int(each.device.split("task:")[1][0]) for each in made]
    assert made[0].device.startswith("/job:ps/replica:0/task:")
    assert made[0].device.endswith("/device:CPU:0")
    assert first == [(first[0] + number) % 3 for number in range(4)]
    assert [float(each) for each in made] == [0, 1, 2, 3]


def test_a_variable_can_be_read_and_assigned(strategy: Any) -> None:
    with strategy.scope():
        v = distnb.Variable([1.0, 2.0], name="v")
    v.assign_add([1.0, 1.0])
    assert v.read_value().tolist() == [2, 3]
    assert (v * 2).tolist() == [4, 6]
    v -= 1
    assert v.numpy().tolist() == [1, 2]
    v.scatter_add([0, 0], [5.0, 5.0])
    assert v.tolist() == [11, 2]
    with torch.no_grad():
        v.copy_(torch.tensor([23.0, 15.0]))
    assert v.tolist() == [23, 15]
    assert v.shape == (2,)
    assert v.name == "v"
    with pytest.raises(ValueError, match="shape"):
        v.assign([1.0, 2.0, 3.0])


def test_a_sharded_variable_can_be_read_and_assigned(servers: InHouse) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(5))
    with strategy.scope():
        v = distnb.Variable(torch.arange(26.0).reshape(13, 2), name="emb")
    assert isinstance(v, distnb.ShardedVariable)
    assert [tuple(each.shape) for each in v.variables] == [(3, 2), (3, 2), (3, 2), (2, 2), (2, 2)]
    assert [each.name for each in v.variables] == [f"emb/part_{n}" for n in range(5)]
    assert len({each.device for each in v.variables}) == 3
    whole = torch.arange(26.0).reshape(13, 2)
    assert torch.equal(v.read_value(), whole)
    assert torch.equal(v + 0, whole)
    for index in (3, -1, slice(2, 11), slice(None, None, -3), slice(9, 2, -2), [1, 12, 1], (slice(1, 4), 1), (..., 0)):
        expected = torch.from_numpy(whole.numpy()[index].copy() if not isinstance(index, int) else whole.numpy()[index])
        assert torch.equal(v[index], expected), index
    mask = torch.arange(13) % 2 == 0
    assert torch.equal(v[mask], whole[mask])
    v.variables[1].assign(torch.zeros(3, 2))
    whole[3:6] = 0
    assert torch.equal(v.read_value(), whole)
    v.scatter_update([0, 12], torch.ones(2, 2))
    whole[[0, 12]] = 1
    assert torch.equal(v.read_value(), whole)
    with pytest.raises(ValueError, match="shape"):
        v.assign(torch.zeros(2))
    v.assign(torch.zeros(13, 2))
    assert not v.read_value().any()


def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_model_trains_on_the_coordinator_like_in_one_process(servers: InHouse) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))

    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    plain, its = build()
    with strategy.scope():
        model, optimizer = build()
    data = torch.Generator().manual_seed(0)
    for _ in range(5):
        x, y = torch.randn(6, 3, generator=data), torch.randn(6, 2, generator=data)
        expected = step(plain, its, x, y)
        assert step(model, optimizer, x, y) == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.allclose(value.double(), plain.state_dict()[name].double(), atol=1e-6), name
    assert optimizer.iterations == 5
    assert isinstance(optimizer, type(its))
    kept, wanted = optimizer.state_dict(), its.state_dict()
    for number, state in wanted["state"].items():
        for name, value in state.items():
            if value is not None:
                assert torch.allclose(torch.as_tensor(kept["state"][number][name]), torch.as_tensor(value), atol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_reads_and_sends_only_its_rows(servers: InHouse, sparse: bool) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(3))

    def build() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(20, 4, padding_idx=3, sparse=sparse), nn.Flatten(), nn.Linear(12, 1))
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        groups = [model[0].weight]
        return model, kind(groups, lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)

    plain = build()
    with strategy.scope():
        mine = build()
    model, *optimizers = mine
    assert torch.equal(model[0].weight.read_value(), plain[0][0].weight.detach()), "the same numbers were drawn"
    worker, packer = Worker(servers, 0), packer_of(strategy)

    def both(model: Any, optimizers: Any, ids: torch.Tensor) -> float:
        for each in optimizers:
            each.zero_grad()
        loss = model(ids).pow(2).sum()
        loss.backward()
        for each in optimizers:
            each.step()
        return float(loss.detach())

    for number in range(4):
        ids = torch.randint(0, 20, (5, 3), generator=torch.Generator().manual_seed(number))
        servers.sent.clear()
        found = worker.run(packer, number, lambda ids: both(model, optimizers, ids), ids)
        assert found == pytest.approx(both(plain[0], plain[1:], ids), rel=1e-5)
        read = sum(len(each.rows) for _, each in servers.sent if type(each).__name__ == "PullRows")
        assert read == len(ids.unique())
    assert torch.allclose(model[0].weight.read_value(), plain[0][0].weight.detach(), atol=1e-6)


def test_metrics_and_results_are_returned(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        mean = distnb.metrics.Mean()
        counter = distnb.Variable(0, name="counter")
    packer = packer_of(strategy)
    workers = [Worker(servers, index) for index in range(2)]

    def closure(values: Any) -> Any:
        mean.update(torch.tensor(values))
        counter.assign_add(1)
        return {"sum": sum(values), "seen": int(counter.read_value())}

    for number, values in enumerate([[1.0, 2.0], [6.0], [7.0, 8.0, 9.0]]):
        result = workers[number % 2].run(packer, number, closure, values)
        assert result == {"sum": sum(values), "seen": number + 1}
    assert float(mean.compute()) == pytest.approx(33 / 6)
    mean.reset()
    workers[0].run(packer, 3, closure, [4.0])
    assert float(mean.compute()) == 4


def test_a_closure_that_runs_again_elsewhere_changes_each_buffer_once(servers: InHouse) -> None:
    strategy = distnb.ParameterServerStrategy()
    with strategy.scope():
        models = [nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False)]
    packer, workers = packer_of(strategy), [Worker(servers, 0), Worker(servers, 1)]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for number, (worker, order) in enumerate([(0, (0, 1)), (1, (1, 0))]):  # they meet the models in different orders
        for place in order:
            model = models[place].eval()
            workers[worker].run(packer, 10 + 2 * number + place, lambda model=model: model(x) is None)

    def closure() -> None:
        for model in models:
            model(x)

    for model in models:
        model.train()
    plain = nn.BatchNorm1d(2, affine=False)
    plain(x)
    exchange = servers.exchange

    def dies(requests: Any, fence: Fence = NO_FENCE) -> Any:
        if any(type(each).__name__ == "WriteShard" for operations in requests.values() for each in operations):
            servers.lost.add(2)  # not lost: the worker dies before it sends the last message
        return exchange(requests, fence)

    workers[0].access.requests.servers = SimpleNamespace(exchange=dies)  # type: ignore[assignment]
    with pytest.raises(ServerLost):
        workers[0].run(packer, 20, closure)
    servers.lost.clear()
    workers[1].run(packer, 20, closure)
    for model in models:
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def test_changes_on_the_coordinator_reach_the_workers(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    packer = packer_of(strategy)
    worker = Worker(servers, 0)
    x = torch.ones(1, 2)
    for value in (1.0, 2.0):
        model.load_state_dict({"weight": torch.full((1, 2), value), "bias": torch.zeros(1)})
        strategy.runtime.access.copies.send_changes()
        assert worker.run(packer, 1, lambda: model(x).item()) == 2 * value
    for change in (lambda value: value + 1, lambda value: value.add_(1)):
        state = {name: change(value) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        strategy.runtime.access.copies.send_changes()
        assert worker.run(packer, 1, lambda: model(x).item()) == model(x).item()
    assert model(x).item() == 10, "two weights of 4, and a bias of 2"
    model.eval()
    assert worker.run(packer, 2, lambda: model.training) is False
    model.train()
    assert worker.run(packer, 3, lambda: model.training) is True


def test_variables_made_outside_the_scope_are_refused(strategy: Any, servers: InHouse) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"outside strategy\.scope"):
        packer_of(strategy).pack(lambda: model, (), {})
    with pytest.raises(distnb.errors.ContextError, match="in the scope"), strategy.scope():
        torch.optim.SGD(model.parameters(), lr=0.1)


def test_different_lambdas_leave_no_trace(strategy: Any, servers: InHouse) -> None:
    packer = packer_of(strategy)
    worker = Worker(servers, 0)
    for number in range(600):
        assert worker.run(packer, number, lambda number=number: number) == number
    assert len(packer._known) < 300
    assert len(worker.runner._resources) < 300


def test_memory_of_deleted_variables_is_freed(strategy: Any, servers: InHouse) -> None:
    def held() -> int:
        return sum(len(store.handle(ServerRequest(1, Fence(), (Describe(),))).results[0]) for store in servers.stores)

    with strategy.scope():
        kept = distnb.Variable(1.0)
        model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = distnb.Variable(2.0)
    assert held() == 5
    del model, optimizer, other
    gc.collect()
    strategy.runtime.access.copies.send_changes()
    assert held() == 1
    assert float(kept) == 1


def test_an_earlier_experiment_leaves_no_memory_anywhere(strategy: Any, servers: InHouse) -> None:
    packer, worker = packer_of(strategy), Worker(servers, 0)

    def experiment() -> list[weakref.ref[Any]]:
        with strategy.scope():
            model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.arange(4)).sum().backward()
            optimizer.step()

        for number in range(3):  # so that the function is known, too
            worker.run(packer, number, step)
        return [weakref.ref(copy.tensor) for copy in worker.access.copies._copies.values()] + [weakref.ref(model)]

    left = experiment()
    gc.collect()
    worker.run(packer, 4, lambda: None)
    gc.collect()
    worker.run(packer, 5, lambda: None)  # the first one freed the variables
    assert not any(each() is not None for each in left)
    assert not worker.access.requests.placement()


def test_a_changed_model_is_sent_again_and_a_new_worker_makes_values_that_use_it(
    strategy: Any, servers: InHouse
) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.LeakyReLU(0.5), nn.Linear(1, 1))
    with torch.no_grad():
        model[1].weight.fill_(1.0)
        model[1].bias.zero_()
    packer, x = packer_of(strategy), -torch.ones(1)
    value = PerWorkerValues(ValueMaker(lambda: [model]), "values")
    first, second = Worker(servers, 0), Worker(servers, 1)
    for number in range(3):
        assert first.run(packer, number, lambda value: float(value[0](x)), value) == -0.5
    model[0].negative_slope = 0.25
    assert first.run(packer, 4, lambda: float(model(x))) == -0.25
    assert first.run(packer, 5, lambda value: len(value), value) == 1, "it was made once"
    assert second.run(packer, 6, lambda value: len(value), value) == 1
    assert second.run(packer, 7, lambda: float(model(x))) == -0.25
    with strategy.scope():
        model[0] = nn.Identity()
    assert second.run(packer, 8, lambda: float(model(x))) == -1


def test_the_loss_of_a_server_does_not_keep_memory_on_the_others(servers: InHouse) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(3))
    with strategy.scope():
        table = distnb.Variable(torch.zeros(6, 2))
        kept = distnb.Variable(1.0, name="kept")
    access = strategy.runtime.access
    servers.lost.add(0)
    del table
    gc.collect()
    access.represented.free_unowned()
    servers.replace(0)
    access.recreate(0)
    assert [each.name for each in access.requests.placement()] == [kept.name]


def test_modes_and_options_are_sent_with_each_closure(strategy: Any, servers: InHouse) -> None:
    """Run the same two functions in turn: a worker does not reuse outdated modes."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    packer, worker = packer_of(strategy), Worker(servers, 0)
    for number in range(6):
        model.train(number % 2 == 0)
        optimizer.param_groups[0]["lr"] = float(number % 3)
        found = worker.run(packer, number, lambda: (model.training, model[1].training, optimizer.param_groups[0]["lr"]))
        assert found == (number % 2 == 0, number % 2 == 0, float(number % 3))


def test_a_step_within_a_closure_affects_its_next_pass(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        number = distnb.Variable(1.0)
    model.load_state_dict({"weight": torch.ones(1, 1)})
    packer, worker = packer_of(strategy), Worker(servers, 0)

    def closure() -> Any:
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            optimizer.step()
            number.assign_add(1)
            seen += [loss.item(), float((number + 0).detach())]
        return seen

    assert worker.run(packer, 1, closure) == [1, 2, 0.5, 3, 0, 4]


def test_initialisation_after_the_scope_reaches_the_servers(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        model = nn.Linear(2, 2)
    model.weight.data.fill_(7)  # torch does not count such changes
    model.bias.data.zero_()
    assert Worker(servers, 0).run(packer_of(strategy), 1, lambda: model(torch.ones(1, 2)).tolist()) == [[14, 14]]


@pytest.mark.parametrize("queued", [False, True])
def test_the_next_closure_reads_nothing_again_if_it_saw_the_last_step(
    strategy: Any, servers: InHouse, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distnb.servers.variables.optimizer_requests._MOMENT_S", 60.0)
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1))
        other = distnb.Variable(1.0)
        optimizer = torch.optim.SGD([weight], lr=1.0)
    packer, worker = packer_of(strategy), Worker(servers, 0)
    worker.access.optimizers.next_is_here = lambda: queued

    def closure() -> Any:
        seen = weight.item(), float((other + 0).detach())
        weight.grad = torch.ones(1)
        optimizer.step()
        other.assign_add(1)
        return seen

    found = []
    for number in range(3):
        servers.sent.clear()
        found.append(worker.run(packer, number, closure))
    assert found == [(0.0, 1.0), (-1.0, 2.0), (-2.0, 3.0)], "it sees what it changed itself after that"
    asked = [shard for _, each in servers.sent if type(each).__name__ == "Pull" for shard in each.known]
    stored = strategy.runtime.access.represented.stored_of(weight)
    assert asked.count((stored.number, 0)) == (1 if queued else 2), "with the step, and at the start"


def test_a_new_server_gets_no_deleted_optimizers(strategy: Any, servers: InHouse) -> None:
    """Run a cell that makes the model twice, and then lose a server."""
    for _ in range(2):
        with strategy.scope():
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
    strategy.runtime.access.copies.send_changes()  # as schedule does: the first model's variables are dropped
    for server in range(3):
        servers.replace(server)
    for server in range(3):
        strategy.runtime.access.recreate(server)
    step(model, optimizer, torch.ones(1, 2), torch.ones(1, 2))
    assert optimizer.iterations == 1


def test_reading_on_the_coordinator_changes_nothing(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        count = distnb.Variable(torch.zeros(3))
        model = nn.Linear(2, 1)
    packer, worker = packer_of(strategy), Worker(servers, 0)
    model.load_state_dict({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
    for number in range(1, 6):
        for read in (
            count.mean,
            lambda: count + 1,
            lambda: count[0],
            model.state_dict,
            lambda: model(torch.ones(1, 2)),
        ):
            read()
            servers.sent.clear()
            worker.run(packer, number, lambda: count.assign_add(torch.ones(3)) is None)
            written = [each.method for _, each in servers.sent if type(each).__name__ == "WriteShard"]
            assert written == ["assign_add"] if number > 1 else ["assign", "assign_add"]
        assert count.read_value().tolist() == [number] * 3, "the same closure changes it once"


def test_a_failed_function_leaves_nothing_to_the_next_one(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        model = nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        number = distnb.Variable(1.0)
    packer, worker = packer_of(strategy), Worker(servers, 0)
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))

    def closure(fails: bool) -> Any:
        (model(x).sum() * (number + 0)).backward()
        if fails:
            raise ValueError("between the passes and the step")
        found = model.num_batches_tracked.item(), model.bias.grad.tolist(), float(number.grad)
        optimizer.zero_grad()
        number.grad = None
        return found

    first = worker.run(packer, 1, closure, False)
    for again in (2, 4):
        with pytest.raises(ValueError, match="between"):
            worker.run(packer, again, closure, True)
        found = worker.run(packer, again + 1, closure, False)
        assert found[0] == first[0] + again // 2
        assert found[1:] == first[1:], "the failed function leaves no gradient"
    assert model.state_dict()["num_batches_tracked"] == 3


def test_a_changed_parameter_on_a_worker_is_an_error_once(strategy: Any, servers: InHouse) -> None:
    with strategy.scope():
        weight = nn.Parameter(torch.ones(2))
    packer, worker = packer_of(strategy), Worker(servers, 0)

    def closure() -> None:
        with torch.no_grad():
            weight.add_(1)

    def by_data() -> None:
        weight.data[0] = 5  # torch does not count it

    with pytest.raises(distnb.errors.ProgramError, match="in place on a worker"):
        worker.run(packer, 1, closure)
    assert worker.run(packer, 2, lambda: weight.tolist()) == [1, 1]
    with pytest.raises(distnb.errors.ProgramError, match="in place on a worker"):
        worker.run(packer, 3, by_data)
    assert worker.run(packer, 4, lambda: weight.tolist()) == [1, 1]
