"""Tensors, arrays, lists, generators; reading ahead: errors at their place, and no leftovers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import distnb
from distnb.errors import OptionError, ProgramError, StructureError
from distnb.input import dataset as datasets
from distnb.input import reading
from distnb.input.dataset import DistributedDataset
from distnb.input.distribute import distribute
from distnb.input.sources import workers
from distnb.options import InputOptions
from distnb.topology import Device

CPU = Device("cpu")


def over(replica_id: int, data: Any, replicas: int = 2, **more: Any) -> DistributedDataset:
    return distribute(
        data, num_replicas=replicas, replica_id=replica_id, device=CPU, shared_randomness=nullcontext, **more
    )


def components(dataset: Any, replica_id: int) -> list[Any]:
    return [batch.component(replica_id) for batch in dataset]


def eventually(true: Callable[[], bool], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while True:
        late = time.monotonic() > until  # before checking: this process may be suspended in between
        if true():
            return True
        if late:
            return False
        time.sleep(0.01)


# -- data in memory ----------------------------------------------------------------------------------------------------


def test_structures_of_arrays_are_batched() -> None:
    data = {
        "x": torch.arange(5.0).reshape(5, 1),
        "y": np.arange(5, dtype=np.int16),
        "names": ["a", "b", "c", "d", "e"],
        "text": np.array(["a", "b", "c", "d", "e"]),
        "both": (torch.arange(5), None),
    }
    first, second = over(1, data, batch_size=3)
    assert first["x"].component(1).tolist() == [[2.0]]
    assert first["y"].component(1).dtype == torch.int16
    assert first["names"].component(1) == ["c"]
    assert first["text"].component(1).tolist() == ["c"]
    assert first["both"][1] is None
    assert second["both"][0].component(1).tolist() == [4]
    assert (first["x"].global_batch_size, second["x"].global_batch_size) == (3, 2)


def test_batches_are_copies_of_the_users_data() -> None:
    x = np.zeros((4, 2))
    for batch in over(0, x, batch_size=4):
        batch.component(0).fill_(1)
    assert not x.any()
    tensor = torch.zeros(4, 2)
    data = TensorDataset(tensor)
    for [batch] in over(0, data, batch_size=4):
        batch.component(0).fill_(1)
    assert not tensor.any()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4"),
        np.arange(12)[::-2],
        np.broadcast_to(np.float32(2), (6,)),
        np.arange(6) > 2,
        np.arange(6).astype(np.complex64),
    ],
    ids=str,
)
def test_arrays_unsupported_by_torch_are_converted_or_refused(array: Any) -> None:
    parts = [torch.cat([part.component(r) for part in over(r, array, batch_size=6)]) for r in range(2)]
    assert torch.cat(parts).tolist() == array.tolist()


def test_lists_are_fields_or_examples() -> None:
    x, y = torch.arange(6), torch.arange(6.0)
    [(mine, _)] = over(1, [x, y], batch_size=6)
    assert mine.component(1).tolist() == [3, 4, 5]
    examples = [(torch.tensor([i, i]), f"n{i}") for i in range(4)]
    [(mine, name)] = over(1, examples, batch_size=4)
    assert mine.component(1).tolist() == [[2, 2], [3, 3]]
    assert list(name.component(1)) == ["n2", "n3"]
    assert components(over(0, [1.0, 2.0, 3.0], batch_size=3), 0)[0].tolist() == [1.0, 2.0]


def test_datasets_accept_a_batch_size() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from torch.arange(5)

    assert [part.tolist() for part in components(over(1, Stream(), batch_size=3), 1)] == [[2], [4]]
    data = TensorDataset(torch.arange(5))
    assert [batch[0].component(1).tolist() for batch in over(1, data, batch_size=3)] == [[2], [4]]


def test_an_iterable_dataset_of_batches_is_read_as_under_default() -> None:
    class Batched(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from torch.arange(12).reshape(2, 6).split(1)

        def __len__(self) -> int:
            return 2

    whole = [batch.tolist() for batch in distnb.get_strategy().distribute_dataset(Batched())]
    with pytest.warns(UserWarning, match=r"elements of a Batched are treated as global batches.*batch_size=…"):
        parts = [over(r, Batched()) for r in range(2)]
    assert len(parts[0]) == 2
    assert [
        [*one.component(0).tolist(), *other.component(1).tolist()] for one, other in zip(*parts, strict=True)
    ] == whole
    alone = distnb.OneDeviceStrategy("cpu:0").distribute_dataset(Batched())
    assert [batch.tolist() for batch in alone] == whole


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, "4"])
def test_invalid_batch_sizes_are_refused(batch_size: Any) -> None:
    with pytest.raises(OptionError, match="whole number, 1 or more"):
        over(0, torch.arange(4), batch_size=batch_size)


@pytest.mark.parametrize(
    "data", [torch.arange(4), np.arange(4), {"x": torch.arange(4)}, (torch.arange(4),), TensorDataset(torch.arange(4))]
)
def test_unbatched_data_is_refused(data: Any) -> None:
    with pytest.raises(OptionError, match=r"not batched yet.*batch_size=…"):
        over(0, data)


def test_data_that_cannot_be_batched_is_refused() -> None:
    with pytest.raises(StructureError, match="has 3 entries along axis 0, while"):
        over(0, (torch.arange(4), torch.arange(3)), batch_size=2)
    with pytest.raises(OptionError, match="must yield global batches itself"):
        over(0, iter([1, 2]), batch_size=2)
    with pytest.raises(ProgramError, match="int cannot be distributed"):
        over(0, 3)


# -- iterables of batches ----------------------------------------------------------------------------------------------


def test_lists_of_batches_restart() -> None:
    dataset = over(1, [torch.arange(3), torch.arange(4)])
    for _ in range(2):
        assert [part.tolist() for part in components(dataset, 1)] == [[2], [2, 3]]


def make_batches() -> Iterator[Any]:
    yield torch.arange(3), ["a", "b", "c"]
    yield torch.arange(1), ["a"]


def test_generators_can_be_read_once_and_functions_again() -> None:
    once, again = over(1, make_batches()), over(1, make_batches)
    for dataset in (once, again):
        assert [(x.component(1).tolist(), y.component(1)) for x, y in dataset] == [([2], ["c"]), ([], [])]
    assert len(list(again)) == 2
    with pytest.raises(ProgramError, match=r"generator, which can be read only once.*function that makes"):
        iter(once)


def test_single_examples_are_not_batches() -> None:
    with pytest.raises(StructureError, match=r"batch is the int 1: .*never batched.*batch_size=…"):
        list(over(0, [1, 2, 3]))


def test_next_returns_batches_until_the_end() -> None:
    iterator = iter(over(0, torch.arange(4), batch_size=2))
    assert next(iterator).component(0).tolist() == [0]
    assert next(iterator).component(0).tolist() == [2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert iter(iterator) is iterator
    closed = iter(over(0, torch.arange(4), batch_size=2))
    closed.close()
    assert list(closed) == []


# -- reading ahead -----------------------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    def __init__(self, bad: int = -1, stuck: int = -1) -> None:
        self.bad, self.stuck = bad, stuck

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise LookupError(f"example {index}")
        if index == self.stuck:
            time.sleep(600)
        return torch.tensor(index)


def loaded_by_a_worker(data: Any, **more: Any) -> DistributedDataset:
    return over(0, DataLoader(data, batch_size=4, num_workers=1, **more))


@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}], ids=str)
def test_an_iteration_can_be_stopped_and_restarted(arguments: dict[str, Any]) -> None:
    dataset = loaded_by_a_worker(Slow(), **arguments)
    for _ in range(3):
        for batch in dataset:
            assert batch.component(0).tolist() == [0, 1]
            break
    del dataset, batch
    gc.collect()
    assert eventually(lambda: not multiprocessing.active_children())


def folders_of_workers() -> list[str]:
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("pymp-")]


def test_workers_transfer_tensors_without_a_temporary_folder() -> None:
    before = folders_of_workers()
    iterator = iter(loaded_by_a_worker(Slow()))
    assert next(iterator).component(0).tolist() == [0, 1]
    assert multiprocessing.active_children()
    assert folders_of_workers() == before
    iterator.close()


def test_a_failed_program_leaves_no_worker_even_if_its_iteration_is_referenced() -> None:
    datasets.program_began()
    iterator = iter(loaded_by_a_worker(Slow()))
    next(iterator)
    assert multiprocessing.active_children()
    datasets.program_failed()
    assert eventually(lambda: not multiprocessing.active_children())


def test_a_failed_program_ends_only_its_own_iterations() -> None:
    datasets.program_began()
    earlier, read_again = iter(loaded_by_a_worker(Slow())), iter(loaded_by_a_worker(Slow()))
    next(earlier)
    datasets.program_began()
    made = iter(loaded_by_a_worker(Slow()))
    next(read_again)
    datasets.program_failed()
    assert eventually(lambda: len(multiprocessing.active_children()) == 1)
    for iterator in (made, read_again):
        with pytest.raises(ProgramError, match="iterate over the dataset again"):
            next(iterator)
    assert next(earlier).component(0).tolist() == [4, 5]
    earlier.close()
    assert eventually(lambda: not multiprocessing.active_children())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failed_program_leaves_no_persistent_workers_and_a_usable_dataset(replicas: int) -> None:
    dataset = over(0, DataLoader(Slow(), batch_size=4, num_workers=1, persistent_workers=True), replicas)
    datasets.program_began()
    iterator = iter(dataset)
    next(iterator)
    datasets.program_failed()
    assert eventually(lambda: not multiprocessing.active_children())
    assert len(list(dataset)) == 10
    [worker] = multiprocessing.active_children()
    workers.end_processes([worker])  # as an engine ends those of an interrupted program
    worker.join()
    last = iter(dataset)
    next(last)
    last.cut_short()
    assert eventually(lambda: not multiprocessing.active_children())


def test_a_worker_reaped_by_another_thread_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Slow(), batch_size=4, num_workers=1, persistent_workers=True)
    list(loader)
    assert workers.has_workers(loader)
    [worker] = multiprocessing.active_children()
    workers.end_processes([worker])
    worker.join()

    def too_late(*_: object) -> None:
        raise ChildProcessError

    worker._popen.returncode = None  # the other thread has yet to say so
    with monkeypatch.context() as patched:
        patched.setattr(os, "waitpid", too_late)
        assert workers.has_lost_workers(loader)
    worker._popen.returncode = 0
    workers.forget_workers(loader)
    assert eventually(lambda: not multiprocessing.active_children())


def test_an_interrupt_during_a_wait_ends_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(loaded_by_a_worker(Slow()))
    next(iterator)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(iterator._reading.reader, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert eventually(lambda: not multiprocessing.active_children())
    with pytest.raises(ProgramError, match="ended with the program"):
        next(iterator)


class Pressing(threading.Thread):
    """Data that interrupts the main thread when it is read; earlier, an interrupt would end the whole test run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        reads = {reading.Reader.read.__code__}
        while not any(frame.f_code in reads for frame, _ in traceback.walk_stack(sys._current_frames()[main])):
            if self.over.wait(0.01):
                return
        signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("prefetch", [None, 0])
def test_an_interrupt_ends_the_wait_for_a_stuck_worker(prefetch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[threading.Thread] = []

    def noted(iterator: Any, shut_down: Callable[[Any], None] = workers._shut_down) -> None:
        waited.append(threading.current_thread())
        shut_down(iterator)

    monkeypatch.setattr(workers, "_shut_down", noted)
    iterator = iter(loaded_with(prefetch, Slow(stuck=4)))
    next(iterator)
    pressing = Pressing()
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    pressing.over.set()
    with pytest.raises(ProgramError, match="ended with the program"):
        next(iterator)
    assert eventually(lambda: not multiprocessing.active_children())
    assert waited
    assert threading.main_thread() not in waited


def loaded_with(prefetch: int | None, data: Any) -> DistributedDataset:
    return over(0, DataLoader(data, batch_size=4, num_workers=1), options=InputOptions(prefetch=prefetch))


def test_a_stuck_worker_is_ended() -> None:
    iterator = iter(loaded_by_a_worker(Slow(stuck=4)))
    assert next(iterator).component(0).tolist() == [0, 1]
    iterator.close()
    assert eventually(lambda: not multiprocessing.active_children())
    gc.collect()


@pytest.mark.parametrize(
    ("workers", "prefetch"), [(0, 0), (0, 3), (1, 0), (1, 2)], ids=["direct", "ahead", "workers", "workers-ahead"]
)
def test_errors_are_raised_at_their_batch(workers: int, prefetch: int | None) -> None:
    loader = DataLoader(Slow(bad=9), batch_size=4, num_workers=workers)
    iterator = iter(over(0, loader, options=InputOptions(prefetch=prefetch)))
    assert [next(iterator).component(0).tolist() for _ in range(2)] == [[0, 1], [4, 5]]
    with pytest.raises(LookupError, match="example 9"):
        next(iterator)
    if workers:
        with pytest.raises(ProgramError, match="iteration ended when"):
            next(iterator)
    else:
        assert next(iterator).component(0).tolist() == [12, 13]
    iterator.close()
    assert eventually(lambda: not multiprocessing.active_children())


def test_batches_are_read_ahead() -> None:
    asked: list[int] = []

    class Asked(Slow):
        def __getitem__(self, index: int) -> torch.Tensor:
            asked.append(index)
            return super().__getitem__(index)

    iterator = iter(over(0, DataLoader(Asked(), batch_size=4), options=InputOptions(prefetch=2)))
    next(iterator)
    assert asked == [0, 1, 4, 5, 8, 9]
    assert len(list(iterator)) == 9
    asked.clear()
    next(iter(over(0, DataLoader(Asked(), batch_size=4))))
    assert asked == [0, 1]


def test_two_iterations_can_run_at_once() -> None:
    dataset = loaded_by_a_worker(Slow())
    pairs = list(zip(dataset, dataset, strict=True))
    assert all(torch.equal(a.component(0), b.component(0)) for a, b in pairs)
    assert len(pairs) == 10
    assert eventually(lambda: not multiprocessing.active_children())


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_stays_on_the_host_and_batches_go_to_the_device(workers: int) -> None:
    """Use a scope on a GPU, whose default device samplers and datasets cannot handle."""

    class Made(Slow):
        def __getitem__(self, index: int) -> Any:
            made = torch.tensor([index])
            assert made.device.type == "cpu"
            return {"x": made, "name": "n"}

    loader = DataLoader(Made(), batch_size=4, shuffle=True, num_workers=workers)
    for replicas in (1, 2):
        dataset = distribute(
            loader, num_replicas=replicas, replica_id=0, device=Device("meta"), shared_randomness=nullcontext
        )
        with torch.device("meta"):
            batches = list(dataset)
        assert len(batches) == 10
        x, name = batches[0]["x"], batches[0]["name"]
        if replicas == 2:
            x, name = x.component(0), name.component(0)
        assert x.device.type == "meta"
        assert len(x) == len(name) == 4 // replicas
