"""An evaluator's loop without a chief: which files count as checkpoints, their order, and its end."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from distnb import errors


def save(folder: Path, name: str, text: str, at: int) -> None:
    """Save a complete checkpoint with its own time."""
    folder.mkdir(exist_ok=True)
    part = folder / f".{name}"
    part.write_text(text)
    os.utime(part, ns=(at * 10**9, at * 10**9))
    os.replace(part, folder / name)


def number(path: Path) -> dict[str, float]:
    return {"value": float(path.read_text())}


def values(lines: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(line["checkpoint"], line["results"]["value"]) for line in lines]


def test_the_newest_checkpoint_is_evaluated_until_the_last_step(tmp_path: Path):
    folder = tmp_path / "later"
    save_now = threading.Thread(target=lambda: [save(folder, "1.pt", "1", 1), save(folder, "2.pt", "2", 2)])

    def evaluate(path: Path) -> dict[str, float]:
        found = number(path)
        if path.name == "2.pt":  # while this one is evaluated two others come
            save(folder, "3.pt", "3", 3)
            save(folder, "final.pt", "4", 4)
        return found

    save_now.start()
    save_now.join()
    lines = distnb.evaluate_checkpoints(folder, evaluate, pattern="*.pt", last="final.pt", poll_s=0.01)
    assert values(lines) == [("2.pt", 2.0), ("final.pt", 4.0)]
    logged = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert logged == lines
    assert logged[0]["saved"] == 2.0
    assert logged[0]["seconds"] >= 0


def test_a_directory_may_appear_later_and_a_file_may_be_rewritten(tmp_path: Path):
    folder = tmp_path / "later"
    seen: list[float] = []
    came = threading.Event()

    def evaluate(path: Path) -> float:
        seen.append(float(path.read_text()))
        came.set()
        return seen[-1]

    def chief() -> None:
        save(folder, "latest", "1", 1)
        came.wait()
        save(folder, "latest", "2", 2)

    thread = threading.Thread(target=chief, daemon=True)
    thread.start()
    lines = distnb.evaluate_checkpoints(folder, evaluate, last=lambda path: path.read_text() == "2", poll_s=0.01)
    thread.join()
    assert seen == [1.0, 2.0]
    assert [line["results"] for line in lines] == [{"result": 1.0}, {"result": 2.0}]


def test_logged_checkpoints_are_not_evaluated_again(tmp_path: Path):
    save(tmp_path, "1.pt", "1", 1)
    log = tmp_path / "logs" / "eval.jsonl"
    arguments: dict[str, Any] = {"pattern": "*.pt", "log": log, "timeout_s": 0.05, "poll_s": 0.01}
    assert values(distnb.evaluate_checkpoints(tmp_path, number, **arguments)) == [("1.pt", 1.0)]
    assert distnb.evaluate_checkpoints(tmp_path, number, **arguments) == []
    assert distnb.evaluate_checkpoints(tmp_path, number, last="1.pt", **{**arguments, "timeout_s": None}) == []
    with log.open("a") as file:
        file.write('{"checkpoint": "2.pt", "sav')  # left by a failed machine
    save(tmp_path, "2.pt", "2", 2)
    assert values(distnb.evaluate_checkpoints(tmp_path, number, **arguments)) == [("2.pt", 2.0)]
    assert json.loads(log.read_text().splitlines()[-1])["checkpoint"] == "2.pt"


def test_hidden_and_unfinished_names_are_skipped_and_folders_are_not(tmp_path: Path):
    for name in (".hidden", "a.tmp", "b.part", "c~", "other.txt"):
        (tmp_path / name).write_text("7")
    (tmp_path / "step-1").mkdir()
    lines = distnb.evaluate_checkpoints(tmp_path, lambda path: path.is_dir(), pattern="step-*", last="step-1")
    assert [(line["checkpoint"], line["results"]) for line in lines] == [("step-1", {"result": True})]
    with pytest.raises(errors.ClusterError, match="No checkpoint appeared"):
        distnb.evaluate_checkpoints(tmp_path, number, pattern="[!os]*", timeout_s=0.03, poll_s=0.01)


def test_an_archive_is_skipped_until_it_is_complete(tmp_path: Path):
    torch.save({"value": 3.0}, tmp_path / "whole")
    written = (tmp_path / "whole").read_bytes()
    for size in (0, 4, len(written) - 1):
        (tmp_path / "1.pt").write_bytes(written[:size])
        with pytest.raises(errors.ClusterError, match="No checkpoint appeared"):
            distnb.evaluate_checkpoints(tmp_path, torch.load, pattern="*.pt", timeout_s=0.03, poll_s=0.01)
    (tmp_path / "1.pt").write_bytes(written)
    lines = distnb.evaluate_checkpoints(tmp_path, torch.load, pattern="*.pt", last="1.pt", poll_s=0.01)
    assert values(lines) == [("1.pt", 3.0)]


def test_a_checkpoint_deleted_by_the_chief_is_skipped(tmp_path: Path):
    save(tmp_path, "1.pt", "1", 1)
    save(tmp_path, "2.pt", "2", 2)

    def evaluate(path: Path) -> dict[str, float]:
        if path.name == "2.pt":
            path.unlink()
            save(tmp_path, "3.pt", "3", 3)
        return number(path)

    lines = distnb.evaluate_checkpoints(tmp_path, evaluate, pattern="*.pt", last="3.pt", poll_s=0.01)
    assert values(lines) == [("3.pt", 3.0)]


def test_numbers_of_every_kind_are_logged(tmp_path: Path):
    save(tmp_path, "1", "1", 1)
    results = {"t": torch.tensor(2.5), "i": 3, "nan": float("nan"), "one": torch.ones(1)}
    (line,) = distnb.evaluate_checkpoints(tmp_path, lambda path: results, last="1")
    assert line["results"] == {"t": 2.5, "i": 3, "nan": "nan", "one": 1.0}


def test_invalid_arguments_are_errors(tmp_path: Path):
    save(tmp_path, "1", "1", 1)
    for arguments, message in [
        ({"evaluate": 5}, "evaluate=5"),
        ({"last": 5}, "last=5"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": "1"}, "timeout_s='1'"),
        ({"pattern": 5}, "pattern=5"),
        ({"poll_s": 0}, "poll_s=0"),
        ({"evaluate": lambda path: torch.ones(2)}, "Return a number"),
        ({"evaluate": lambda path: None}, "Return a number"),
    ]:
        with pytest.raises(errors.OptionError, match=message):
            distnb.evaluate_checkpoints(tmp_path, **{"evaluate": number, **arguments})  # type: ignore[arg-type]
    for directory in (5, tmp_path / "1"):
        with pytest.raises(errors.OptionError, match="give the path of the directory where the chief saves"):
            distnb.evaluate_checkpoints(directory, number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="could not convert"):
        distnb.evaluate_checkpoints(tmp_path, lambda path: float("x"))
