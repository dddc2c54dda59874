"""Data of every kind that replicas assign, in every kind of cell, changed on either side."""

from __future__ import annotations

import re

import pytest

from tests.support.data_values import SETUP, VALUES
from tests.support.kernel import Notebook

pytestmark = pytest.mark.processes

_SETTING = """
def wrong_ones(found, expected):
    return {name: (found.get(name), expected[name]) for name in expected if found.get(name) != expected[name]}
"""


def _text(template: str, name: str) -> str:
    """Return an expression of the table with a variable in the place of `v`."""
    return re.sub(r"\bv\b", name, template)


def _seen(prefix: str) -> str:
    """Return an expression that reads all values whose names have a prefix."""
    shown = (f"{name!r}: repr(({_text(each.seen, f'{prefix}{n}')}))" for n, (name, each) in enumerate(VALUES.items()))
    return "{" + ",\n".join(shown) + "}"


def _all(template: str, *, without: str = "") -> str:
    """Return a line of code for each value."""
    return "\n".join(template.format(n=n, made=each.made) for n, each in enumerate(VALUES.values()))


def _changed(prefix: str) -> str:
    lines = (_text(each.change, f"{prefix}{n}") for n, each in enumerate(VALUES.values()) if each.change)
    return "\n".join(lines)


def test_data_of_every_kind_becomes_a_value_of_the_notebook(notebook: Notebook) -> None:
    """Check that each value behaves like one from an ordinary cell, whoever changes it, and stays the same object."""
    notebook.run(f"%%distribute mirrored\n{SETUP}\n" + _all("v{n} = {made}"))
    notebook.run(_SETTING + _all("w{n} = {made}"))
    kinds = f"[n for n in range({len(VALUES)}) if type(globals()[f'v{{n}}']) is not type(globals()[f'w{{n}}'])]"
    assert notebook.value(kinds) == []
    mutable = [n for n, each in enumerate(VALUES.values()) if not each.immutable]
    notebook.run(f"before = {{n: id(globals()[f'v{{n}}']) for n in {mutable}}}")

    def check(place: str) -> None:
        assert notebook.value(f"wrong_ones({_seen('v')}, {_seen('w')})") == {}, place
        assert notebook.value("[n for n in before if id(globals()[f'v{n}']) != before[n]]") == [], place

    check("as it came")
    notebook.run(_changed("v") + "\n" + _changed("w"))
    notebook.run(f"%%distribute mirrored\nseen = {_seen('v')}\n{_changed('v')}")
    assert notebook.value(f"wrong_ones(seen, {_seen('w')})") == {}, "changed in the notebook, seen on the replicas"
    notebook.run(_changed("w"))
    check("changed there, seen here")
    notebook.run(f"%%distribute default\nseen = {_seen('v')}\n{_changed('v')}")
    assert notebook.value(f"wrong_ones(seen, {_seen('w')})") == {}, "seen in a default cell"
    notebook.run(_changed("w"))
    notebook.run(f"%%distribute mirrored\nseen = {_seen('v')}")
    assert notebook.value(f"wrong_ones(seen, {_seen('w')})") == {}, "changed in a default cell, seen on the replicas"
    check("at last")


def test_data_that_differs_or_is_on_one_replica_only_becomes_a_handle(notebook: Notebook) -> None:
    """Check that the name is a handle, which fetches each replica's whole value and works in the next cells."""
    differing = (
        _all("d{n} = [{made}, replica]") + "\nif not replica:\n    " + _all("o{n} = {made}; ").replace("\n", "\n    ")
    )
    notebook.run(f"%%distribute mirrored\n{SETUP}\nimport distnb\nreplica = distnb.replica_id()\n{differing}")
    notebook.run(f"import distnb\n{_SETTING}" + _all("w{n} = {made}"))
    count = len(VALUES)
    kinds = (
        f"[n for n in range({count}) for x in 'do' if type(globals()[f'{{x}}{{n}}']).__name__ != 'RemotePerReplica']"
    )
    assert notebook.value(kinds) == []
    notebook.run(f"fetched = [globals()[f'd{{n}}'].values for n in range({count})]")
    assert notebook.value("[n for n, (a, b) in enumerate(fetched) if (a[1], b[1]) != (0, 1)]") == []
    for replica in range(2):
        notebook.run(f"for n in range({count}): globals()[f'v{{n}}'] = fetched[n][{replica}][0]")
        assert notebook.value(f"wrong_ones({_seen('v')}, {_seen('w')})") == {}, replica
    notebook.run(f"for n in range({count}): globals()[f'v{{n}}'] = globals()[f'o{{n}}'].component(0)")
    assert notebook.value(f"wrong_ones({_seen('v')}, {_seen('w')})") == {}
    assert "only replicas [0] assigned it" in notebook.try_run("o0.component(1)").error_text
    lines = "\n".join(f"v{n} = d{n}[0]" for n in range(count))
    notebook.run(f"%%distribute mirrored\n{lines}\n{_changed('v')}")
    notebook.run(_changed("w"))
    assert notebook.value(f"wrong_ones({_seen('v')}, {_seen('w')})") == {}, "equal parts of different values"


def test_equal_sets_with_other_histories_are_one_value(notebook: Notebook) -> None:
    """Python iterates {0, 8} and {8, 0} in different orders."""
    notebook.run("""%%distribute mirrored
order = [0, 8, 16] if distnb.replica_id() == 0 else [16, 8, 0]
items, frozen, inside = set(order), frozenset(order), {"ids": [set(order)]}
""")
    assert notebook.value("[items, frozen, inside] == [{0, 8, 16}, frozenset({0, 8, 16}), {'ids': [{0, 8, 16}]}]")
    notebook.run("inside['ids'][0] = frozenset(inside['ids'][0])")
    notebook.run("%%distribute mirrored\nkind = type(inside['ids'][0]).__name__")
    assert notebook.value("kind") == "frozenset"
