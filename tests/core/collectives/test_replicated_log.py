"""Replicas without shared memory: their messages through the store, and their conclusions."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from distnb.collectives.verify import signature
from distnb.collectives.verify.collective_log import CollectiveRecord
from distnb.collectives.verify.replicated_log import ReplicatedLog
from distnb.collectives.verify.verifier import Verifier
from distnb.errors import CollectiveMismatchError

KEY = signature.of_tensors("all_reduce", 0, None, [])


class RecordingStore(HashStore):
    """A store that records every entry."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.packets.append(value)
        super().set(key, value)  # type: ignore[arg-type]


def all_reduce() -> Callable[..., CollectiveRecord]:
    """Call a collective as a library does: its own frame is left out of the call site."""
    names: dict[str, Any] = {"signature": signature, "KEY": KEY}
    exec(compile("def all_reduce(*given, **settings):\n    return signature.record(KEY)", "<string>", "exec"), names)
    return names["all_reduce"]  # type: ignore[no-any-return]


def run(source: str, name: str, **names: Any) -> dict[str, Any]:
    """Run text as a user's file with its lines, and return its names."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names


Pair = tuple[RecordingStore, list[Verifier]]


@pytest.fixture
def pair() -> Pair:
    store = RecordingStore()
    verifiers = [Verifier(ReplicatedLog(store, rank, 2), range(2)) for rank in range(2)]
    for verifier in verifiers:
        verifier.begin(1)
    return store, verifiers


def exchange(verifiers: list[Verifier]) -> None:
    for _ in range(2):
        for verifier in verifiers:
            verifier.log.exchange()
            verifier.check()


SOURCE = """
def mine(record):
    return record(secret_weights)

def theirs(record):
    return record([secret_data for _ in range(3)], op=0)

mine(lambda *given: None)
"""


def test_texts_are_compared_by_digests_and_not_sent(pair: Pair) -> None:
    store, verifiers = pair
    names = run(SOURCE, "/tmp/program_texts.py", secret_weights=1, secret_data=2)
    mine, theirs = names["mine"](all_reduce()), names["theirs"](all_reduce())
    verifiers[0].post(mine)
    verifiers[1].post(theirs)
    with pytest.warns(UserWarning, match=r"program_texts.py, line 6 on replica 1") as warned:
        exchange(verifiers)
    assert len(warned) == 1
    verifiers[0].post(theirs)
    verifiers[1].post(mine)
    found = []
    for verifier in [*verifiers, *verifiers]:
        try:
            verifier.log.exchange()
            verifier.check()
        except CollectiveMismatchError as error:
            verifier.report_failure(error)
            found.append(str(error))
    assert "in a different order" in found[0]
    assert any(b"in a different order" in packet for packet in store.packets)
    assert not any(b"secret_" in packet for packet in store.packets)


def test_a_withdrawn_record_reaches_readers_of_its_first_version(
    pair: Pair,
) -> None:
    _, verifiers = pair
    record = run("def mine(record):\n    return record()", "/tmp/program_refused.py")["mine"](all_reduce())
    for verifier in verifiers:
        verifier.post(record)
    exchange(verifiers)
    assert all(verifier.agreed(1) for verifier in verifiers)
    verifiers[1].retract(1, ValueError("refused"))
    assert verifiers[1].log.has_unsent
    exchange(verifiers)
    with pytest.raises(CollectiveMismatchError, match="failed with ValueError"):
        verifiers[0].check_departed(1)
