"""Where replicas share no memory: what they tell each other through the store, and what they make of it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from distnb.collectives.verify import signature
from distnb.collectives.verify.collective_log import Record
from distnb.collectives.verify.replicated_log import ReplicatedLog
from distnb.collectives.verify.verifier import Verifier
from distnb.errors import CollectiveMismatchError

KEY = signature.of_tensors("all_reduce", 0, None, [])


class Told(HashStore):
    """A store that remembers everything that was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.packets.append(value)
        super().set(key, value)  # type: ignore[arg-type]


def all_reduce() -> Callable[..., Record]:
    """A collective of a library's: its own frame is left out of where it was called."""
    names: dict[str, Any] = {"signature": signature, "KEY": KEY}
    exec(compile("def all_reduce(*given, **settings):\n    return signature.record(KEY)", "<string>", "exec"), names)
    return names["all_reduce"]  # type: ignore[no-any-return]


def run(source: str, name: str, **names: Any) -> dict[str, Any]:
    """Run text as a file of the user's, which has its lines; the names that it binds."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names


@pytest.fixture
def pair() -> tuple[Told, list[Verifier], list[str]]:
    store, warned = Told(), []
    boards = [ReplicatedLog(store, rank, 2) for rank in range(2)]
    ledgers = [Verifier(board, range(2), lambda text, site: warned.append(text)) for board in boards]
    for ledger in ledgers:
        ledger.begin(1)
    return store, ledgers, warned


def exchange(ledgers: list[Verifier]) -> None:
    for _ in range(2):
        for ledger in ledgers:
            ledger.exchange()
            ledger.check()


SOURCE = """
def mine(record):
    return record(secret_weights)

def theirs(record):
    return record(
        [secret_data for _ in range(3)],
        op=0,
    )

mine(lambda *given: None)
"""


@pytest.mark.parametrize("visited", [False, True], ids=["of the source only", "of a place that it visited too"])
def test_arguments_are_compared_by_digests_and_told_from_the_own_source(
    pair: tuple[Told, list[Verifier], list[str]], visited: bool
) -> None:
    store, ledgers, warned = pair
    names = run(SOURCE, f"/tmp/program_{visited}.py", secret_weights=1, secret_data=2)
    mine, theirs = names["mine"](all_reduce()), names["theirs"](all_reduce())
    if not visited:
        _forget(theirs)
    ledgers[0].post(mine)
    ledgers[1].post(theirs)
    exchange(ledgers)
    assert len(warned) == 1
    assert "was called as `record(secret_weights)` on replica 0" in warned[0]
    assert "as `record( [secret_data for _ in range(3)], op=0, )` on replica 1" in warned[0]
    assert f"program_{visited}.py, line 6" in warned[0]
    ledgers[0].post(theirs)
    ledgers[1].post(mine)
    found = []
    for ledger in [*ledgers, *ledgers]:
        try:
            ledger.exchange()
            ledger.check()
        except CollectiveMismatchError as error:
            ledger.tell(error)
            found.append(str(error))
    assert "in a different order" in found[0]
    assert "called as `record(" in found[0]
    assert "secret_" in found[0]
    assert any(b"in a different order" in packet for packet in store.packets)
    assert not any(b"secret_" in packet for packet in store.packets)


def test_what_is_written_otherwise_in_the_own_source_is_not_told_as_the_others(
    pair: tuple[Told, list[Verifier], list[str]],
) -> None:
    _, ledgers, warned = pair
    names = run(SOURCE, "/tmp/program_other.py", secret_weights=1, secret_data=2)
    mine, theirs = names["mine"](all_reduce()), names["theirs"](all_reduce())
    _forget(theirs)
    run(SOURCE.replace("secret_data", "edited"), "/tmp/program_other.py", secret_weights=1, edited=2)
    ledgers[0].post(mine)
    ledgers[1].post(theirs)
    exchange(ledgers)
    assert "and on replica 1 (program_other.py, line 6)" in warned[0]


def test_what_is_taken_back_is_heard_of_where_the_first_word_was_read(
    pair: tuple[Told, list[Verifier], list[str]],
) -> None:
    _, ledgers, _ = pair
    record = run("def mine(record):\n    return record()", "/tmp/program_refused.py")["mine"](all_reduce())
    for ledger in ledgers:
        ledger.post(record)
    exchange(ledgers)
    assert all(ledger.agreed(1) for ledger in ledgers)
    ledgers[1].retract(1, ValueError("refused"))
    assert ledgers[1].untold
    exchange(ledgers)
    with pytest.raises(CollectiveMismatchError, match="failed with ValueError"):
        ledgers[0].check_departed(1)


def _forget(record: Record) -> None:
    """As on a replica that was never there."""
    from distnb.collectives.verify import callsite

    callsite._words_at.cache_clear()
    del callsite._by_identity[record.site]
