"""A parameter server's state changes as in plain torch, once per token, and completely or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

from distnb.errors import ClosureCancelled, DistributedValueError, OptionError, StaleHandleError, StructureError
from distnb.servers.closure_messages import NO_FENCE, Fence
from distnb.servers.server_messages import (
    Create,
    Describe,
    Drop,
    GetOptimizer,
    MakeOptimizer,
    Pull,
    PullRows,
    RowsGradient,
    ServerReply,
    ServerRequest,
    SetOptimizer,
    ShardInfo,
    StepDone,
    StepOptimizer,
    WriteShard,
)
from distnb.servers.variables.storage.store import ShardStore

W, B, TABLE = (0, 0), (1, 0), (2, 3)
FIRST = 100


@pytest.fixture
def store() -> ShardStore:
    return ShardStore(first_version=FIRST)


def answer(store: ShardStore, *operations: Any, fence: Fence = NO_FENCE) -> ServerReply:
    return store.handle(ServerRequest(7, fence, operations))


def ask(store: ShardStore, *operations: Any, fence: Fence = NO_FENCE) -> Any:
    """Return the last operation's result."""
    given = answer(store, *operations, fence=fence)
    assert given.number == 7
    if given.error is not None:
        raise given.error
    return given.results[-1]


def value(store: ShardStore, shard: tuple[int, int]) -> torch.Tensor:
    pulled: torch.Tensor = ask(store, Pull({shard: -1}))[shard][1]
    return pulled.clone()


def version(store: ShardStore, shard: tuple[int, int]) -> int:
    return int(ask(store, Pull({shard: -1}))[shard][0])


def packed(make: Callable[..., Any], **options: Any) -> bytes:
    """Return a factory as clients send it: by value."""
    dumped: bytes = cloudpickle.dumps(lambda groups: make([{"params": group} for group in groups], **options))
    return dumped


# -- shards ------------------------------------------------------------------------------------------------------------


def test_a_shard_is_created_from_a_copy_and_pulled_by_clients_with_another_version(store: ShardStore) -> None:
    given = torch.arange(6.0).view(2, 3)
    assert ask(store, Create(shard=W, name="w", value=given)) == FIRST
    given.zero_()
    ask(store, Create(shard=B, name="b", value=None, shape=(3,), dtype=torch.bfloat16))
    pulled = ask(store, Pull({W: -1, B: FIRST}))
    assert list(pulled) == [W]
    assert pulled[W][0] == FIRST
    assert torch.equal(pulled[W][1], torch.arange(6.0).view(2, 3))
    assert not pulled[W][1].requires_grad
    zeros = value(store, B)
    assert zeros.dtype is torch.bfloat16
    assert torch.equal(zeros, torch.zeros(3, dtype=torch.bfloat16))
    ask(store, WriteShard(shard=W, method="assign_add", value=1.0))
    assert list(ask(store, Pull({W: FIRST, B: FIRST}))) == [W]
    assert ask(store, Pull({W: FIRST + 1})) == {}


def test_a_shard_created_again_is_a_new_one(store: ShardStore) -> None:
    ask(
        store,
        Create(shard=W, name="w", value=torch.ones(2)),
        MakeOptimizer(optimizer=0, factory=packed(torch.optim.SGD), groups=((W,),)),
    )
    assert ask(store, Create(shard=W, name="w", value=torch.zeros(5))) == FIRST + 1
    assert value(store, W).shape == (5,)
    with pytest.raises(StaleHandleError, match="no optimizer 0"):
        ask(store, StepOptimizer(optimizer=0, gradients={W: torch.ones(5)}, options=({},), seen={}))


def test_only_requested_rows_are_pulled(store: ShardStore) -> None:
    table = torch.randn(10, 4)
    ask(store, Create(shard=TABLE, name="t", value=table))
    number, rows = ask(store, PullRows(TABLE, torch.tensor([7, 0, 7])))
    assert number == FIRST
    assert torch.equal(rows, table[[7, 0, 7]])
    with pytest.raises(IndexError):
        ask(store, PullRows(TABLE, torch.tensor([10])))


def test_a_dropped_shard_is_gone_and_its_optimizer_is_dropped_with_its_last_shard(store: ShardStore) -> None:
    ask(store, Create(shard=W, name="w", value=torch.ones(2)), Create(shard=B, name="b", value=torch.ones(2)))
    ask(store, MakeOptimizer(optimizer=0, factory=packed(torch.optim.Adam), groups=((W,), (B,))))
    ask(store, Drop((W, (99, 0))))
    with pytest.raises(StaleHandleError, match=r"no shard \(0, 0\).*last checkpoint"):
        ask(store, Pull({W: -1}))
    assert ask(store, StepOptimizer(optimizer=0, gradients={B: torch.ones(2)}, options=({}, {}), seen={})).applied
    assert list(ask(store, GetOptimizer(0))["state"]) == [B]
    ask(store, Drop((B,)))
    with pytest.raises(StaleHandleError, match="no optimizer 0"):
        ask(store, GetOptimizer(0))


def test_shards_and_optimizers_are_described(store: ShardStore) -> None:
    assert ask(store, Describe()) == ()
    ask(
        store,
        Create(shard=W, name="w", value=torch.ones(2, 3)),
        Create(shard=B, name="b/part_1", value=None, shape=(4,), dtype=torch.int64, trainable=False),
    )
    ask(store, WriteShard(shard=W, method="assign", value=2.0), WriteShard(shard=W, method="assign", value=2.0))
    assert ask(store, Describe()) == (
        ShardInfo(shard=W, name="w", shape=(2, 3), dtype=torch.float32, nbytes=24, version=FIRST + 2, updates=2),
        ShardInfo(shard=B, name="b/part_1", shape=(4,), dtype=torch.int64, nbytes=32, version=FIRST, updates=0),
    )


@pytest.mark.parametrize(
    ("method", "given", "rows", "expected"),
    [
        ("assign", [[1, 2], [3, 4], [5, 6]], None, [[1, 2], [3, 4], [5, 6]]),
        ("assign_add", 1, None, [[11, 21], [31, 41], [51, 61]]),
        ("assign_sub", torch.tensor([0.0, 20.0]), None, [[10, 0], [30, 20], [50, 40]]),
        ("assign_rows", [[1, 2], [3, 4]], 1, [[10, 20], [1, 2], [3, 4]]),
        ("scatter_add", [[1, 1], [2, 2]], [2, 2], [[10, 20], [30, 40], [53, 63]]),
        ("scatter_sub", [[1, 1]], [0], [[9, 19], [30, 40], [50, 60]]),
        ("scatter_update", [[1, 1], [2, 2]], [1, 1], [[10, 20], [2, 2], [50, 60]]),
        ("scatter_update", [[1, 1], [2, 2]], [2, 0], [[2, 2], [30, 40], [1, 1]]),
        ("scatter_min", [[25, 25]], [0], [[10, 20], [30, 40], [50, 60]]),
        ("scatter_max", [[15, 15]], [0], [[15, 20], [30, 40], [50, 60]]),
        ("scatter_mul", [[2, 3], [2, 3]], [0, 0], [[40, 180], [30, 40], [50, 60]]),
        ("scatter_div", [[2, 4], [5, 5]], [0, 1], [[5, 5], [6, 8], [50, 60]]),
    ],
)
def test_every_way_to_change_a_shard_works(
    store: ShardStore, method: str, given: Any, rows: Any, expected: Any
) -> None:
    ask(store, Create(shard=W, name="w", value=torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])))
    assert ask(store, WriteShard(shard=W, method=method, value=given, rows=rows)) == FIRST + 1
    assert torch.equal(value(store, W), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        (WriteShard(shard=W, method="assign", value=torch.ones(3, 3)), StructureError, "shape"),
        (WriteShard(shard=W, method="assign", value="text"), DistributedValueError, "must be a number"),
        (
            WriteShard(shard=W, method="assign_rows", value=torch.ones(2, 2), rows=2),
            OptionError,
            "rows 2 to 3 are outside its 3",
        ),
        (WriteShard(shard=W, method="scatter_add", value=torch.ones(1, 2), rows=[3]), OptionError, "0 to 2"),
        (WriteShard(shard=W, method="assign_mul", value=2.0), OptionError, "no method 'assign_mul'"),
        (WriteShard(shard=(9, 9), method="assign", value=2.0), StaleHandleError, "no shard"),
    ],
)
def test_an_invalid_change_has_no_effect_and_leaves_its_token(
    store: ShardStore, asked: WriteShard, error: type[Exception], match: str
) -> None:
    ask(store, Create(shard=W, name="variable", value=torch.ones(3, 2)))
    given = answer(
        store,
        WriteShard(shard=W, method="assign", value=5.0),
        asked._replace(token=(3, W, 0)),
        WriteShard(shard=W, method="assign", value=6.0),
    )
    assert given.results == (FIRST + 1,)
    with pytest.raises(error, match=match):
        raise given.error or AssertionError
    assert torch.equal(value(store, W), torch.full((3, 2), 5.0))
    assert (
        ask(store, WriteShard(shard=W, method="assign_add", value=1.0, token=(3, W, 0))) == FIRST + 2
    )  # the token was not used


# -- exactly once ------------------------------------------------------------------------------------------------------


def test_a_repeated_change_is_acknowledged_and_not_applied_again(store: ShardStore) -> None:
    ask(
        store,
        Create(shard=W, name="w", value=torch.zeros(1)),
        MakeOptimizer(optimizer=0, factory=packed(torch.optim.SGD, lr=1.0), groups=((W,),)),
    )
    add, step = (
        WriteShard(shard=W, method="assign_add", value=1.0, token=(5, W, 0)),
        StepOptimizer(optimizer=0, gradients={W: -torch.ones(1)}, options=({},), seen={}, token=(5, 0, 1)),
    )
    for _ in range(2):
        assert ask(store, add) == FIRST + 1
    assert ask(store, step) == StepDone({W: FIRST + 2}, 0, applied=True)
    assert ask(store, step) == StepDone({W: FIRST + 2}, 0, applied=False)
    assert ask(store, add) == FIRST + 2
    assert ask(store, GetOptimizer(0))["steps"] == 1
    assert value(store, W) == 2
    # A part of a closure's changes was made, in any order, when its worker died.
    ask(store, add._replace(token=(5, W, 3)))
    for change in range(5):
        ask(store, add._replace(token=(5, W, change)))
    ask(store, add._replace(token=(6, W, 0)))
    ask(store, add._replace(token=None))
    assert value(store, W) == 8


def test_a_late_change_of_an_ended_closure_is_refused(store: ShardStore) -> None:
    ask(
        store,
        Create(shard=W, name="w", value=torch.zeros(1)),
        MakeOptimizer(optimizer=0, factory=packed(torch.optim.SGD, lr=1.0), groups=((W,),)),
    )
    add = WriteShard(shard=W, method="assign_add", value=1.0, token=(5, W, 0))
    ask(store, add, add._replace(token=(7, W, 0)), add._replace(token=(8, W, 0)))
    ask(store, Describe(), fence=Fence(6, (8,)))
    assert store._applied == {7: {(7, W, 0)}}, "only necessary tokens are kept"
    ask(store, Describe(), fence=Fence(2))  # for a client with less knowledge
    ask(store, add._replace(token=(7, W, 0)))
    late = [
        add,
        add._replace(token=(5, W, 1)),
        add._replace(token=(8, W, 1)),
        StepOptimizer(optimizer=0, gradients={W: torch.ones(1)}, options=({},), seen={}, token=(8, 0, 2)),
    ]
    for each in late:
        with pytest.raises(ClosureCancelled, match="refused a change of a function that has ended"):
            ask(store, each)
    assert value(store, W) == 3
    ask(store, add._replace(token=(9, W, 0)), fence=Fence(9))
    assert not store._astray
    with pytest.raises(ClosureCancelled):
        ask(store, add._replace(token=(8, W, 3)))
    assert value(store, W) == 4


def test_a_value_is_written_if_nothing_has_changed_since_it_was_computed(store: ShardStore) -> None:
    ask(store, Create(shard=W, name="w", value=torch.zeros(2)))
    assert ask(store, WriteShard(shard=W, method="assign", value=5.0, seen=FIRST)) == FIRST + 1
    assert ask(store, WriteShard(shard=W, method="assign", value=7.0, seen=FIRST)) is None
    assert value(store, W).tolist() == [5, 5]
    again = WriteShard(shard=W, method="assign", value=9.0, token=(1, W, 0), seen=FIRST)
    assert ask(store, again) is None, "its token is not used"
    again = again._replace(seen=FIRST + 1)
    assert [ask(store, again), ask(store, again)] == [FIRST + 2, FIRST + 2], "the second time it is a repeated change"


# -- optimizers --------------------------------------------------------------------------------------------------------


SPARSE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SparseAdam, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize(("make", "options"), SPARSE)
def test_sparse_gradients_remain_sparse(store: ShardStore, make: Any, options: dict[str, Any]) -> None:
    table = torch.nn.Embedding(20, 4, sparse=True)
    reference = make(table.parameters(), **options)
    ask(store, Create(shard=TABLE, name="t", value=table.weight))
    ask(store, MakeOptimizer(optimizer=0, factory=packed(make, **options), groups=((TABLE,),)))
    for rows in ([3, 7, 3], [7], [0, 19, 1]):
        reference.zero_grad()
        (table(torch.tensor(rows)) * torch.randn(len(rows), 4)).sum().backward()
        gradient = table.weight.grad
        assert gradient is not None
        whole = gradient.clone()
        table.weight.grad = gradient.coalesce()
        reference.step()
        ask(
            store,
            StepOptimizer(
                optimizer=0,
                gradients={TABLE: RowsGradient(whole._indices()[0], whole._values(), sparse=True)},
                options=({},),
                seen={},
            ),
        )
        assert torch.equal(value(store, TABLE), table.weight)


def test_only_parameters_with_gradients_are_stepped_and_gradients_are_dropped(store: ShardStore) -> None:
    ask(store, Create(shard=W, name="w", value=torch.ones(2)), Create(shard=B, name="b", value=torch.ones(2)))
    ask(store, MakeOptimizer(optimizer=0, factory=packed(torch.optim.SGD, lr=1.0, momentum=0.9), groups=((W, B), ())))
    assert list(
        ask(store, StepOptimizer(optimizer=0, gradients={W: torch.ones(2)}, options=({}, {}), seen={})).versions
    ) == [W]
    ask(store, StepOptimizer(optimizer=0, gradients={B: torch.ones(2)}, options=({}, {}), seen={}))
    assert torch.equal(value(store, W), torch.zeros(2))
    assert version(store, W) == FIRST + 1


def test_staleness_is_the_maximum_number_of_changes_since_the_gradients(store: ShardStore) -> None:
    ask(store, Create(shard=W, name="w", value=torch.ones(2)), Create(shard=B, name="b", value=torch.ones(2)))
    ask(store, MakeOptimizer(optimizer=0, factory=packed(torch.optim.SGD), groups=((W, B),)))
    ask(store, *[WriteShard(shard=B, method="assign", value=1.0)] * 3, WriteShard(shard=W, method="assign", value=1.0))
    both = {W: torch.ones(2), B: torch.ones(2)}
    done = ask(store, StepOptimizer(optimizer=0, gradients=both, options=({},), seen={W: FIRST, B: FIRST}))
    assert done == StepDone({W: FIRST + 2, B: FIRST + 4}, 3, applied=True)
    assert ask(store, StepOptimizer(optimizer=0, gradients=both, options=({},), seen=done.versions)).staleness == 0


@pytest.mark.parametrize(
    ("step", "error", "match"),
    [
        (
            StepOptimizer(optimizer=0, gradients={W: torch.ones(3)}, options=({"lr": 9.0},), seen={}),
            StructureError,
            r"takes torch.float32 of shape \[2\]",
        ),
        (
            StepOptimizer(optimizer=0, gradients={W: torch.ones(2).double()}, options=({"lr": 9.0},), seen={}),
            StructureError,
            "is torch.float64",
        ),
        (
            StepOptimizer(optimizer=0, gradients={W: torch.ones(2)}, options=({}, {}), seen={}),
            StructureError,
            "has 1 groups .* options of 2",
        ),
        (
            StepOptimizer(optimizer=0, gradients={W: torch.ones(2), B: torch.ones(2)}, options=({"lr": 9.0},), seen={}),
            StaleHandleError,
            r"no parameter \(1, 0\)",
        ),
        (
            StepOptimizer(optimizer=1, gradients={W: torch.ones(2)}, options=({},), seen={}),
            StaleHandleError,
            "no optimizer 1",
        ),
        (
            StepOptimizer(
                optimizer=0,
                gradients={W: RowsGradient(torch.tensor([2]), torch.ones(1), sparse=True)},
                options=({"lr": 9.0},),
                seen={},
            ),
            StructureError,
            "names rows outside its 2",
        ),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(
    store: ShardStore, step: StepOptimizer, error: type[Exception], match: str
) -> None:
    ask(store, Create(shard=W, name="w", value=torch.ones(2)), Create(shard=B, name="b", value=torch.ones(2)))
    ask(store, MakeOptimizer(optimizer=0, factory=packed(torch.optim.SGD, lr=1.0), groups=((W,),)))
    with pytest.raises(error, match=match):
        ask(store, step._replace(token=(1, 0, 1)))
    assert version(store, W) == FIRST
    assert ask(
        store, StepOptimizer(optimizer=0, gradients={W: torch.ones(2)}, options=({},), seen={}, token=(1, 0, 1))
    ).applied
    assert torch.equal(value(store, W), torch.zeros(2))  # with the learning rate that it had


def test_a_partial_step_is_visible_and_its_token_unused(store: ShardStore) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if len(parameter) == 2:
                        raise FloatingPointError("here it ends")
                    parameter.data.sub_(parameter.grad)

    ask(store, Create(shard=W, name="w", value=torch.ones(3)), Create(shard=B, name="b", value=torch.ones(2)))
    ask(store, MakeOptimizer(optimizer=0, factory=packed(Breaks), groups=((W, B),)))
    with pytest.raises(FloatingPointError):
        ask(
            store,
            StepOptimizer(
                optimizer=0, gradients={W: torch.ones(3), B: torch.ones(2)}, options=({},), seen={}, token=(1, 0, 1)
            ),
        )
    assert not store._was_applied((1, 1))
    assert torch.equal(value(store, W), torch.zeros(3))
    assert (version(store, W), version(store, B)) == (FIRST + 1, FIRST + 1)


def test_an_optimizer_that_computes_gradients_itself_is_refused_at_creation(store: ShardStore) -> None:
    ask(store, Create(shard=W, name="w", value=torch.ones(2)))
    with pytest.raises(OptionError, match=r"LBFGS computes the loss .* only gets gradients"):
        ask(
            store,
            MakeOptimizer(
                optimizer=0, factory=cloudpickle.dumps(lambda groups: torch.optim.LBFGS(groups[0])), groups=((W,),)
            ),
        )
    with pytest.raises(OptionError, match="makes a int for 1 groups"):
        ask(store, MakeOptimizer(optimizer=0, factory=cloudpickle.dumps(lambda groups: 3), groups=((W,),)))


def test_a_state_can_be_reverted(store: ShardStore) -> None:
    ask(
        store,
        Create(shard=W, name="w", value=torch.ones(2)),
        MakeOptimizer(optimizer=0, factory=packed(torch.optim.Adam), groups=((W,),)),
    )
    ask(store, StepOptimizer(optimizer=0, gradients={W: torch.ones(2)}, options=({},), seen={}))
    ask(store, SetOptimizer(0, {W: {}}, 0))
    assert ask(store, GetOptimizer(0)) == {"state": {}, "steps": 0}
    assert ask(store, StepOptimizer(optimizer=0, gradients={W: torch.ones(2)}, options=({},), seen={})).applied
    with pytest.raises(StaleHandleError, match="no parameter"):
        ask(store, SetOptimizer(0, {B: {}}, 0))
