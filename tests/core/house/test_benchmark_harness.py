"""The benchmarks' arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks
from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, Target, compare, report


def test_contenders_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []

    def contender(name: str, seconds: float):
        def measure() -> float:
            calls.append(name)
            return seconds

        return measure

    comparison = compare({"a": contender("a", 2.0), "b": contender("b", 1.0)}, rounds=3, warmup=1)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert comparison.values == {"a": (2.0, 2.0, 2.0), "b": (1.0, 1.0, 1.0)}


def test_a_ratio_is_taken_within_a_round() -> None:
    """Make the machine ten times slower in the middle: the ratio does not change."""
    comparison = Comparison({"a": (2.0, 20.0, 2.0), "b": (1.0, 10.0, 1.0)})
    ratio = comparison.ratio("a", "b")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (Target("a", "b", at_most=2.0), "met"),
        (Target("a", "b", at_most=1.9), "LOST"),
        (Target("a", "b", at_most=1.9, known=2.0), "MISSED"),
        (Target("a", "b", at_most=1.8, known=1.9), "LOST"),
        (Target("a", "b", at_least=2.0), "met"),
        (Target("a", "b", at_least=2.1), "LOST"),
        (Target("a", "b", at_least=2.1, known=1.9), "MISSED"),
        (Target("a", "b", at_least=2.2, known=2.1), "LOST"),
        (Target("a", "c", at_most=1.0), "absent"),
    ],
)
def test_a_missed_target_is_reported(target: Target, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison({"a": (2.0, 2.0), "b": (1.0, 1.0)})
    assert report("title", comparison, baseline="b", targets=[target]) is (verdict in ("met", "absent"))
    assert f"{verdict}: {target}" in capsys.readouterr().out


def test_the_guard_runs_every_benchmark() -> None:
    folder = Path(benchmarks.__file__).parent
    with_main = [path for path in folder.rglob("*.py") if "def main() -> int" in path.read_text(encoding="utf-8")]
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in with_main}
    assert names - {"gpu", "guard"} == set(TARGETS)
