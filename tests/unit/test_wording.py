"""What the source text says about a call."""

from __future__ import annotations

import sys

import pytest

from distnb.collectives.verify import callsite, wording


def here(*args: object, **kwargs: object) -> str | None:
    frame = sys._getframe(1)
    return wording.words(frame.f_code, frame.f_lasti)


def test_the_words_of_a_call_are_the_call_alone():
    a = b = 1
    assert [here(a), here(b)] == ["here(a)", "here(b)"]
    long = here(
        "ä", a,
        b=b,
    )  # fmt: skip
    assert long == 'here( "ä", a, b=b, )'


def test_without_source_nothing_is_known():
    names = {"here": here}
    exec(compile("found = here(1)", "<no such file>", "exec"), names)
    assert names["found"] is None
    exec(compile("found = current()", "<no such cell>", "exec"), names | {"current": callsite.current}, names)
    assert names["found"].identity[16:] == bytes(16)
    assert callsite.find(names["found"].identity) is names["found"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('all_reduce("sum", a)', "context.all_reduce('sum',  a)"),
        ("all_reduce(a)", "all_reduce(a, async_op=True)"),
        ("all_reduce(a, group=part)", "all_reduce(a, op=dist.ReduceOp.SUM)"),
        ("f(x, y)", "f(value=y, out=x)"),
        ("a @ b", "a@b"),
        ("f(", "f("),
    ],
)
def test_alike(one, other):
    assert wording.subject(one) == wording.subject(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('all_reduce("sum", a)', 'all_reduce("sum", b)'),
        ("all_reduce(values['a'])", "all_reduce(values['b'])"),
        ("accuracy.compute()", "loss.compute()"),
        ("first.backward()", "second.backward()"),
        ("a @ b", "a @ c"),
    ],
)
def test_unlike(one, other):
    assert wording.subject(one) != wording.subject(other)
