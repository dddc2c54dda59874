"""The log of a cluster: a file for each process, shown by `%distnb logs`, and collected for a bug report."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.processes import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(engines=2, env={"DISTNB_LOG": "info"}) as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import distnb; from distnb.notebook import compose; cluster = compose.require()")
        yield made


def _directory(notebook: Notebook) -> Path:
    return Path(notebook.value("str(cluster.engines.cluster.directory)"))


def _log(notebook: Notebook, process: str) -> str:
    directory = _directory(notebook)
    return (directory / "log" / f"{directory.name}-{process}.log").read_text()


def test_every_process_writes_a_file_that_only_the_user_can_read(notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\nx = 1")
    folder = _directory(notebook) / "log"
    assert not (folder / "controller.log").exists()  # it starts when a client is wanted
    notebook.run("cluster.client_file")
    wanted = {"notebook", "engine-0", "engine-1", "guardian", "controller"}

    def there() -> set[str]:
        return {path.stem.split("-", 2)[2] for path in folder.glob("distnb-*.log")}

    wait_until(lambda: wanted <= there(), 60.0, f"not all of {wanted} are there")
    assert {oct(path.stat().st_mode & 0o777) for path in folder.glob("distnb-*.log")} == {"0o600"}
    assert re.search(r"engine 1 \(cpu:\d\) is process \d+", _log(notebook, "notebook"))
    assert "generation 1 of (0, 1) is formed: gloo" in _log(notebook, "engine-1")
    assert "received +" in _log(notebook, "guardian")


def test_the_logs_are_shown_in_the_order_of_time(notebook: Notebook) -> None:
    shown = notebook.run("%distnb logs --lines 1000").stdout
    assert "── engine 0 ──" in shown
    lines = [line for line in shown.partition("── log ──\n")[2].splitlines() if re.search(r"Z (INFO|DEBUG) ", line)]
    times = [line.split()[1] for line in lines]
    assert times == sorted(times)
    assert {"notebook", "engine-0", "engine-1"} <= {line.split()[0] for line in lines}
    only = notebook.run("%distnb logs 1").stdout.partition("── log")[2]
    assert {line.split()[0] for line in only.splitlines()[1:]} == {"engine-1"}
    assert "(the last 2 of " in notebook.run("%distnb logs --lines 2").stdout


def test_a_level_is_set_in_a_running_cluster(notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\ny = 2")
    assert "began: RunCell" not in _log(notebook, "engine-0")
    assert notebook.run("%distnb logs --level debug").stdout == "The log is at level debug.\n"
    ran = notebook.run(
        "%%distribute mirrored\nimport logging\nlogging.basicConfig(level=0)\nlogging.info('of the cell')"
    )
    assert "of the cell" in ran.text + ran.stderr
    assert "distnb." not in ran.text + ran.stderr, "no record of ours is in the cell's output"
    log = _log(notebook, "engine-0")
    assert "began: RunCell, replica 0" in log
    assert re.search(r"program \d+ ended: ok", log)
    notebook_log = _log(notebook, "notebook")
    assert re.search(r"ended\(\d, \d+, True, ''\): \[program \d+ on \d\] -> \[idle\]", notebook_log)
    assert "of the cell" not in log


def test_both_sides_log_a_failure(notebook: Notebook) -> None:
    ran = notebook.try_run(
        "%%distribute mirrored\nimport time\nif distnb.replica_id() == 1:\n    raise ValueError('no')\ntime.sleep(60)"
    )
    assert ran.error_name == "ValueError"
    assert "ordered: EndProgram(engine=0" in _log(notebook, "notebook")
    ended = _log(notebook, "engine-0")
    assert "aborting generation 1 of (0, 1): replica on engine 1 failed: ValueError: no" in ended
    notebook.run("%%distribute mirrored\nz = distnb.replica_id()")
    assert "the next programs form generation 2" in _log(notebook, "notebook")
    assert "generation 2 of (0, 1) is formed" in _log(notebook, "engine-0")


def test_a_replaced_engine_logs_at_the_current_level(notebook: Notebook) -> None:
    notebook.run("%distnb restart 1")
    notebook.run("%%distribute mirrored\nx = 1")
    assert _log(notebook, "engine-1").count("engine-1 is process") == 2
    assert "began: RunCell" in _log(notebook, "engine-1").rpartition("engine-1 is process")[2]


def test_an_archive_holds_the_logs_and_no_secret(notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "report.zip"
    notebook.run("cluster.client_file")
    said = notebook.run(f"%distnb logs --save {path}").stdout
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert f"{len(texts)} files written to {path}" in said
    assert {
        "versions.txt", "engines.txt", "stories/supervision.txt", "output/engine-0.log", "log/notebook.log",
        "log/engine-0.log", "log/engine-1.log", "log/guardian.log", "log/controller.log",
    } <= texts.keys()  # fmt: skip
    assert "torch " in texts["versions.txt"]
    assert "began(" in texts["stories/supervision.txt"]
    directory = _directory(notebook)
    connection = json.loads((directory / "connection.json").read_text())
    secrets = [connection["client_secret"], notebook.value("cluster.engines.keys.server_secret")]
    for path in directory.glob("security/*.json"):
        secrets += [value for name, value in json.loads(path.read_text()).items() if "key" in name and value]
    assert len(set(secrets)) > 2
    assert not [name for name, text in texts.items() for secret in secrets if secret in text]


def test_the_log_and_its_files_end_with_the_cluster(notebook: Notebook) -> None:
    notebook.run("%distnb logs --level off")
    before = _log(notebook, "engine-0")
    notebook.run("%%distribute mirrored\nx = 1")
    assert _log(notebook, "engine-0").removeprefix(before).count("\n") <= 1  # it was received
    directory = _directory(notebook)
    notebook.run("%distnb stop")
    assert not directory.exists()
    refused = notebook.try_run("%env DISTNB_LOG=loud\n%distnb start -n 1")
    assert refused.error_name == "OptionError"
    assert "DISTNB_LOG=loud" in refused.error_text
    assert not [name for name in os.listdir(directory.parent) if name.startswith("distnb-")]
