"""The verifier's comparison without processes: replicas are verifiers on one collective log."""

from __future__ import annotations

import warnings

import pytest

from distnb import activity
from distnb.collectives.verify.collective_log import KEY_NBYTES, RING, CollectiveLog, CollectiveRecord, Trouble
from distnb.collectives.verify.program_calls import ProgramCalls
from distnb.collectives.verify.verifier import Verifier
from distnb.errors import CollectiveError, CollectiveMismatchError, ProgramAborted


def record(operation: str, line: int = 1, chain: str = "", text: str = "", chain_text: str = "") -> CollectiveRecord:
    def digest(text: str) -> bytes:
        return hash(text).to_bytes(8, "little", signed=True)

    parts = [operation, f"line {line}", f"line {line}{chain}", text, text + chain_text]
    return CollectiveRecord(b"".join(map(digest, parts)), operation, f"cell, line {line}")


def replicas(size: int = 2) -> list[Verifier]:
    memory = bytearray(CollectiveLog.nbytes(size))
    made = [Verifier(CollectiveLog(memory, rank, size), range(size)) for rank in range(size)]
    for each in made:
        each.begin(1)
    return made


def test_equal_collectives_pass():
    verifiers = replicas(3)
    for _ in range(3 * RING):
        for verifier in verifiers:
            verifier.post(record("all_reduce(float32[3], sum)"))
    for verifier in verifiers:
        verifier.check()
        verifier.end(failed=False)


def test_the_later_replica_raises_before_it_enters_and_the_earlier_one_at_its_check():
    first, second = replicas()
    first.post(record("all_reduce(float32[3], sum)", 4))
    with pytest.raises(CollectiveMismatchError) as caught:
        second.post(record("broadcast(float32[3], root=0)", 7))
    assert "replica 0 called all_reduce(float32[3], sum) at cell, line 4" in str(caught.value)
    assert "replica 1 called broadcast(float32[3], root=0) at cell, line 7" in str(caught.value)
    with pytest.raises(CollectiveMismatchError, match="collective number 1"):
        first.check()


def test_a_replica_that_returned_early_is_named():
    first, second = replicas()
    first.post(record("all_reduce(float32[3], sum)", 4))
    with pytest.raises(CollectiveMismatchError) as caught:
        second.post(record("strategy.run's result()", 7))
    assert "replica 0 called all_reduce(float32[3], sum) at cell, line 4; replica 1 has returned from the " in str(
        caught.value
    )
    assert "function of strategy.run at cell, line 7" in str(caught.value)
    assert "result()" not in str(caught.value)
    assert "Return early from the function on all replicas" in str(caught.value)


def test_a_replica_without_more_batches_is_named():
    first, second = replicas()
    first.post(record("all_reduce", 4))
    activity.data_ended(1)
    with pytest.raises(
        CollectiveMismatchError, match=r"replica 1 has no more batches \(its data ended after 1\)"
    ) as caught:
        second.post(record("all_gather", 7))
    assert "Give all replicas equally many batches" in str(caught.value)
    for ends in ((3, 3), (None, None), (3, None)):
        first, second = replicas()
        for each, batches in zip((first, second), ends, strict=True):
            each.post(record("all_reduce", 4))
            if batches is not None:
                activity.data_ended(batches)
                activity.data_ended(batches)
                if None in ends:
                    activity.data_goes_on()  # another loop has begun
            each.post(record("equal"))
        first.post(record("a"))
        with pytest.raises(CollectiveMismatchError) as caught:
            second.post(record("b"))
        assert "batches" not in str(caught.value)


def test_a_replica_that_ended_its_program_without_more_batches_is_named():
    first, second = replicas()
    activity.data_ended(0)
    second.end(failed=False)
    first.post(record("all_reduce", 4))
    with pytest.raises(
        CollectiveMismatchError, match=r"replica 1 has no more batches \(its data ended after 0\), and finish"
    ):
        first.check_departed(1)


def test_an_earlier_difference_is_detected_later():
    first, second = replicas()
    first.post(record("a"))
    first.post(record("b"))
    first.post(record("c"))
    second.post(record("a"))
    with pytest.raises(CollectiveMismatchError, match="number 2"):
        second.post(record("x"))


def test_different_lines_are_allowed():
    first, second = replicas()
    for _ in range(10):
        first.post(record("broadcast", 1))
        second.post(record("broadcast", 2))
        first.post(record("all_reduce", 3))
        second.post(record("all_reduce", 3))
    first.check()


@pytest.mark.parametrize(("here", "there"), [((1, ""), (2, "")), ((1, "from a"), (1, "from b"))])
def test_swapped_lines_or_callers_are_refused(here, there):
    first, second = replicas()
    first.post(record("all_reduce", *here))
    second.post(record("all_reduce", *there))
    first.post(record("all_reduce", *there))
    with pytest.raises(
        CollectiveMismatchError, match="different order: all_reduce at cell, line 1 was collective number 1"
    ):
        second.post(record("all_reduce", *here))


@pytest.mark.parametrize(("one", "other"), [("barrier()", "barrier()"), ("broadcast(root=0)", "broadcast(root=1)")])
def test_taking_turns_is_allowed(one, other):
    first, second = replicas()
    first.post(record(one, 1))
    second.post(record(one, 2))
    first.post(record(other, 2))
    second.post(record(other, 1))
    first.check()


def test_different_calls_in_one_place_cause_one_warning():
    verifiers = replicas(4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            for rank, verifier in enumerate(verifiers):
                verifier.post(record("all_reduce", rank and 2, text="b" if rank else "a"))
        for verifier in verifiers:
            verifier.end(failed=False)
    assert len(warned) == 1
    assert "at cell, line 0 on replica 0 and at cell, line 2 on replica 1" in str(warned[0].message)


def test_the_last_collective_is_compared_at_the_end():
    first, second = replicas()
    first.post(record("all_reduce", 1, text="a"))
    second.post(record("all_reduce", 2, text="b"))
    with pytest.warns(UserWarning, match="One collective"):
        first.end(failed=False)


@pytest.mark.parametrize("operation", ["barrier()", "new_group(cpu)", "broadcast(float32[1], root=0)"])
def test_permitted_differences_of_texts_cause_no_warning(operation):
    first, second = replicas()
    first.post(record(operation, 1, text="a"))
    second.post(record(operation, 2, text="b"))
    first.check()


@pytest.mark.filterwarnings("ignore:One collective")
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast(float32[1], root=0)"])
def test_exchanged_texts_are_a_different_order(operation):
    first, second = replicas()
    first.post(record(operation, 1, text="a"))
    second.post(record(operation, 3, text="b"))
    first.post(record(operation, 2, text="b"))
    with pytest.raises(CollectiveMismatchError) as caught:
        second.post(record(operation, 4, text="a"))
    assert "at cell, line 4" in str(caught.value)
    assert "number 1 on replica 0 and number 2 on replica 1" in str(caught.value)
    with pytest.raises(CollectiveMismatchError, match="different order"):
        first.check()


def test_exchanged_texts_of_callers_are_a_different_order():
    first, second = replicas()
    first.post(record("all_reduce", 1, "from 2", "x", "a"))
    second.post(record("all_reduce", 1, "from 4", "x", "b"))
    first.post(record("all_reduce", 1, "from 3", "x", "b"))
    with pytest.raises(CollectiveMismatchError, match="different order"):
        second.post(record("all_reduce", 1, "from 5", "x", "a"))


@pytest.mark.filterwarnings("ignore:One collective")
def test_names_are_reset_in_the_next_program():
    first, second = replicas()
    first.post(record("all_reduce", 1, text="a"))
    second.post(record("all_reduce", 3, text="b"))
    for verifier in (first, second):
        verifier.end(failed=False)
        verifier.begin(2)
    first.post(record("all_reduce", 12, text="b"))
    second.post(record("all_reduce", 14, text="a"))
    first.check()


def test_no_replica_runs_ahead_of_the_comparison():
    first, second = replicas()
    while first.room():
        first.post(record("broadcast"))
    assert RING // 2 < first.number < RING
    second.post(record("broadcast"))
    first.check()
    assert first.room()


def test_a_replica_that_ended_is_missed_by_a_waiting_one():
    first, second = replicas()
    first.post(record("a"))
    second.post(record("a"))
    number = first.post(record("b", 9))
    assert first.check_departed(number) == []
    second.end(failed=False)
    with pytest.raises(
        CollectiveMismatchError, match=r"called b at cell, line 9 .*replica 1 finished its program after 1"
    ):
        first.check_departed(number)


@pytest.mark.parametrize(("error", "is_cause"), [(KeyError("mine"), True), (ProgramAborted("replica 0 failed"), False)])
def test_an_error_that_skips_a_collective_is_the_cause_unlike_the_order_to_end(
    error: BaseException, is_cause: bool
) -> None:
    memory = bytearray(CollectiveLog.nbytes(2))
    calls = ProgramCalls()
    first, second = (
        Verifier(CollectiveLog(memory, 0, 2), range(2)),
        Verifier(CollectiveLog(memory, 1, 2), range(2), calls),
    )
    first.begin(1)
    second.begin(1)
    first.post(record("all_reduce(float32[3], sum)", 4))
    calls.cross()
    calls.fail("strategy.run", error)
    calls.cross()
    left = second.error_left()
    assert (left is not None and left[0] is error) == is_cause


def test_a_failed_replica_is_not_a_mismatch():
    first, second = replicas()
    number = first.post(record("a"))
    second.end(failed=True)
    assert first.check_departed(number) == [1]


def test_a_replica_in_the_next_program_is_missed_too():
    first, second = replicas()
    number = first.post(record("a"))
    second.begin(2)
    with pytest.raises(CollectiveMismatchError, match="replica 1 finished"):
        first.check_departed(number)


@pytest.mark.parametrize("calls_there", [False, True])
def test_a_replica_that_failed_and_began_the_next_program_is_not_a_mismatch(calls_there: bool) -> None:
    first, second = replicas()
    number = first.post(record("a"))
    second.end(failed=True)
    for program in (2, 3):  # calls that were sent before the notebook knew of the error
        second.begin(program)
        second.end(failed=program == 3)
    second.begin(4)
    assert first.check_departed(number) == [1]
    assert first.check_coming([1]) == [1]
    if calls_there:
        for each in (lambda: second.post(record("b")), first.check):
            with pytest.raises(CollectiveError, match="Replica 1 ended a program with an error") as caught:
                each()
            assert type(caught.value) is CollectiveError
        assert first.check_departed(number) == [1]


def test_a_replica_that_completed_this_program_and_failed_the_next_is_missed():
    first, second = replicas()
    number = first.post(record("a"))
    second.end(failed=False)
    second.begin(2)
    second.end(failed=True)
    with pytest.raises(CollectiveMismatchError, match="replica 1 finished"):
        first.check_departed(number)


def test_the_last_replica_to_end_compares_the_counts():
    first, second = replicas()
    first.post(record("a"))
    first.end(failed=False)
    with pytest.raises(CollectiveMismatchError, match=r"Replica 0 called a .* but replica 1 finished"):
        second.end(failed=False)


def test_collectives_of_different_programs_do_not_match():
    first, second = replicas()
    second.begin(2)
    first.post(record("a"))
    with pytest.raises(CollectiveMismatchError, match="different cells"):
        second.post(record("a"))


def test_a_refused_collective_is_reported():
    first, second = replicas()
    first.post(record("a"))
    number = second.post(record("a"))
    second.retract(number, ValueError("bad shape"))
    with pytest.raises(CollectiveMismatchError, match="which failed with ValueError"):
        first.check()


def test_a_refused_collective_is_reported_after_the_comparison():
    first, second = replicas()
    first.post(record("a"))
    number = second.post(record("a"))
    first.check()
    second.retract(number, ValueError("bad shape"))
    with pytest.raises(CollectiveMismatchError, match="which failed with ValueError"):
        first.check_departed(number)


def test_all_replicas_get_the_error_that_one_finds():
    verifiers = replicas(3)
    verifiers[0].report_failure(CollectiveMismatchError("something is wrong"))
    with pytest.raises(CollectiveMismatchError, match="something is wrong"):
        verifiers[2].check()
    with pytest.raises(
        CollectiveMismatchError, match="something is wrong"
    ):  # also a replica that has passed it, and ends
        verifiers[1].end(failed=False)


def test_long_texts_are_truncated():
    log = CollectiveLog(bytearray(CollectiveLog.nbytes(2)), 0, 2)
    long = CollectiveRecord(bytes(KEY_NBYTES), "x" * 1000, "y" * 1000)
    log.write(1, long, 5)
    found = log.read(0, 1)
    assert found is not None
    assert found[0].operation.startswith("xxx")
    assert found[1] == 5
    log.set_trouble(Trouble("failed", "z" * 5000))
    found_trouble = log.trouble_of(0)
    assert found_trouble is not None
    assert set(found_trouble.text) == {"z"}


def counted(size: int = 2) -> list[tuple[Verifier, ProgramCalls]]:
    memory = bytearray(CollectiveLog.nbytes(size))
    made = []
    for rank in range(size):
        calls = ProgramCalls()
        made.append((Verifier(CollectiveLog(memory, rank, size), range(size), calls), calls))
        made[-1][0].begin(1)
    return made


def run(calls: ProgramCalls, error: BaseException | None = None) -> None:
    """Go through one call of `strategy.run`, which an error may leave."""
    calls.cross()
    if error is not None:
        calls.fail("strategy.run", error)
    calls.cross()


def test_an_error_that_leaves_others_waiting_is_reported_at_its_origin():
    (first, its), (second, others) = counted()
    its.cross()
    error = ValueError("mine")
    run(others, error)
    assert second.error_left() is None  # no replica waits yet
    first.post(record("a"))
    left = second.error_left()
    assert left is not None
    assert left[0] is error
    assert "Replica 0 waits in a at cell, line 1" in left[1]
    assert first.error_left() is None
    second.report_failure(*left)
    with pytest.raises(CollectiveError, match=r"Replica 1 raised ValueError in strategy.run") as caught:
        first.check()
    assert not isinstance(caught.value, CollectiveMismatchError)


def test_an_error_that_skips_a_collective_is_found_at_a_later_equal_one():
    (first, its), (second, others) = counted()
    its.cross()
    first.post(record("a"))
    run(others, ValueError("mine"))
    others.cross()
    with pytest.raises(CollectiveMismatchError, match="An error took a replica to a later call"):
        second.post(record("a"))
    assert second.error_left() is not None
    with pytest.raises(CollectiveMismatchError, match=r"^Replica 1 raised ValueError in strategy.run, and so left a"):
        first.check()


def test_an_error_after_which_no_collective_is_missed_ends_nothing():
    (first, its), (second, others) = counted()
    run(its)
    run(others, ValueError("mine"))
    for verifier in (first, second):
        verifier.post(record("a"))
    second.check()
    assert second.error_left() is None
    assert second.pending_error is None  # all replicas have met since
    for verifier, calls in ((first, its), (second, others)):
        run(calls)
        verifier.post(record("b"))
    for verifier in (first, second):
        verifier.end(failed=False)


def test_an_error_caught_by_all_replicas_ends_nothing_and_causes_no_later_mismatch():
    (first, its), (second, others) = counted()
    for calls in (its, others):
        run(calls, ValueError("all"))
    first.post(record("a"))
    with pytest.raises(CollectiveMismatchError, match=r"^The replicas called different collectives"):
        second.post(record("b"))
    assert second.error_left() is None
    with pytest.raises(CollectiveMismatchError, match=r"^The replicas called different collectives"):
        first.check()


def test_refused_arguments_are_an_error_that_leaves_a_collective_undone():
    (first, _), (second, others) = counted()
    first.post(record("a"))
    error = ValueError("bad shape")
    second.retract(second.post(record("a")), error)
    assert second.error_left() is None  # the other's arguments may yet be refused, too
    assert not second.room()
    with pytest.raises(CollectiveMismatchError, match="which failed with ValueError") as caught:
        first.check()
    first.report_failure(caught.value)
    left = second.error_left()
    assert left is not None
    assert left[0] is error
    assert others.place == "a"


def test_arguments_refused_on_all_replicas_end_nothing():
    (first, its), (second, others) = counted()
    second.retract(second.post(record("a")), ValueError("bad shape"))
    number = first.post(record("a"))  # sees itself whether its arguments are refused
    assert not second.room()
    first.retract(number, ValueError("bad shape"))
    for verifier in (first, second):
        verifier.check()
        assert verifier.room()
        verifier.post(record("b"))
    second.check()
    assert its.errors == others.errors == 1


def test_a_replica_that_ends_after_an_error_is_named_with_it():
    (first, its), (second, others) = counted()
    its.cross()
    run(others, ValueError("mine"))
    second.end(failed=False)
    assert not second.others_ended()
    number = first.post(record("a"))
    with pytest.raises(CollectiveMismatchError, match=r"^Replica 1 raised ValueError in strategy.run, .*finished its"):
        first.check_departed(number)
    assert second.error_left() is not None
    first.end(failed=True)
    assert second.others_ended()
