from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distnb import cli


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], list[str]]]:
    """Return the command and devices that would have been run."""
    calls: list[tuple[list[str], list[str]]] = []

    def run_script(command: list[str], devices: object, placement: object) -> int:
        assert placement is None  # there is no TF_CONFIG
        calls.append((list(command), [str(device) for device in devices]))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("distnb.cluster.local.script.run_script", run_script)
    monkeypatch.setattr("distnb.cluster.devices.available_gpus", lambda: 0)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "-n.py", "book.ipynb"):
        Path(name).write_text("")
    return calls


@pytest.mark.parametrize(
    ("words", "command", "devices"),
    [
        ("train.py", "train.py", 2),
        ("train.py -n 3", "train.py", 3),
        ("-n 3 train.py", "train.py", 3),
        ("-n3 train.py", "train.py", 3),
        ("train.py -n 3 --lr 0.1 -n 5 --help", "train.py --lr 0.1 -n 5 --help", 3),
        ("train.py --lr 0.1 -n 3", "train.py --lr 0.1 -n 3", 2),
        ("train.py data.csv -n 3", "train.py data.csv -n 3", 2),
        ("train.py -n 3 -- -n 5", "train.py -n 5", 3),
        ("train.py -h", "train.py -h", 2),
        ("-n 1 -- -n.py", "-n.py", 1),
        ("-m package.train -n 3 -m x", "-m package.train -m x", 3),
        ("-n 3 -m package.train --lr 1", "-m package.train --lr 1", 3),
        ("--devices cpu:0,cpu:1,cpu:2 train.py", "train.py", 3),
        ("train.py --devices=cpu,cpu --oversubscribe x", "train.py x", 2),
    ],
)
def test_options_of_distnb_go_before_the_script_or_right_after_its_name(
    launched: list[tuple[list[str], list[str]]],
    capsys: pytest.CaptureFixture[str],
    words: str,
    command: str,
    devices: int,
) -> None:
    assert run(capsys, "run", *words.split()) == (0, "", "")
    assert [(" ".join(given), len(places)) for given, places in launched] == [(command, devices)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "a script is missing: distnb run train.py -n 2"),
        ("-n 2", "a script is missing"),
        ("-n", "argument -n: expected one argument"),
        ("-n two train.py", "argument -n: invalid int value: 'two'"),
        ("-n 0 train.py", "n=0"),
        ("-n -3 train.py", "n=-3"),
        ("missing.py", "there is no file 'missing.py' in"),
        ("book.ipynb", "is a notebook. Open it in Jupyter and use %%distribute there"),
        ("--workers 3 train.py", "unrecognized arguments: --workers"),
        ("--devices cpu,cpu train.py", "cpu:0 appears more than once"),
        ("--devices nonsense! train.py", "'nonsense!' is not a device"),
        ("-m", "argument -m: expected one argument"),
    ],
)
def test_invalid_arguments_get_a_clear_error_and_run_nothing(
    launched: list[tuple[list[str], list[str]]], capsys: pytest.CaptureFixture[str], words: str, text: str
) -> None:
    code, out, err = run(capsys, "run", *words.split())
    assert (code, out) == (2, "")
    assert text in err
    assert launched == []


def test_missing_devices_are_refused(
    launched: list[tuple[list[str], list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "run", "--devices", "cuda:0", "train.py")
    assert code == 1
    assert err.startswith("distnb run: There is no cuda:0 on this machine. It has the CPU only")


def test_the_command_without_arguments_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "run a script on several replicas" in out


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["run", "--help"], ["run", "-h"], ["--version"]])
def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "distnb" in out


@pytest.mark.parametrize("words", [["fly"], ["--fast"], ["train.py", "-n", "2"]])
def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "error:" in err


def test_an_interrupt_gives_the_shells_exit_code(
    launched: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: object, devices: object, placement: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("distnb.cluster.local.script.run_script", interrupted)
    code, out, err = run(capsys, "run", "train.py")
    assert (code, out) == (130, "")
    assert err == "distnb run: interrupted; every replica was ended.\n"


def test_the_command_starts_without_torch_and_ipython() -> None:
    code = "import sys, distnb.cli as c; c.main([]); assert not {'torch', 'IPython', 'ipyparallel'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
