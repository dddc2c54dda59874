"""`distnb.elastic` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from distnb.errors import OptionError


def _training(folder: Path, fail_at: int) -> tuple[distnb.Checkpoint, Any]:
    step = distnb.Variable(0)

    def train(commit: Any) -> str:
        while int(step) < 6:
            step.assign_add(1)
            if int(step) == fail_at:
                raise RuntimeError("a failure")
            commit()
        return "trained"

    return distnb.Checkpoint(step=step), train


def test_a_later_start_continues_from_the_last_saved_commit(tmp_path: Path) -> None:
    checkpoint, train = _training(tmp_path, fail_at=4)
    with pytest.raises(RuntimeError, match="a failure"):
        distnb.elastic(train, checkpoint, directory=tmp_path)
    seen: list[int] = []
    checkpoint, train = _training(tmp_path, fail_at=0)

    def again(commit: Any) -> Any:
        seen.append(int(checkpoint._objects["step"]))
        return train(commit)

    assert distnb.elastic(again, checkpoint, directory=tmp_path) == "trained"
    assert seen == [3]


def test_only_every_nth_commit_is_saved(tmp_path: Path) -> None:
    checkpoint, train = _training(tmp_path, fail_at=0)
    distnb.elastic(train, checkpoint, directory=tmp_path, save_every=4)
    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-1"]


def test_a_restarted_script_without_a_directory_says_that_it_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    checkpoint, train = _training(tmp_path, fail_at=0)
    distnb.elastic(train, checkpoint)
    assert "the training starts from the beginning. Give it one" in capsys.readouterr().err


def test_wrong_arguments(tmp_path: Path) -> None:
    checkpoint, train = _training(tmp_path, fail_at=0)
    with pytest.raises(OptionError, match=r"takes a distnb\.Checkpoint and got a Linear"):
        distnb.elastic(train, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes a function"):
        distnb.elastic("train", checkpoint)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="save_every=0"):
        distnb.elastic(train, checkpoint, save_every=0)
