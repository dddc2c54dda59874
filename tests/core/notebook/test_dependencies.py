"""The comparison of packages between the notebook and other machines, and the cure for a missing local module."""

from __future__ import annotations

from pathlib import Path

import pytest

from distnb.cluster.package_versions import differs, installed_packages, package_of, version_here
from distnb.machines.modules.local_modules import LocalModules
from distnb.notebook.dependencies import Dependencies, cure_for_missing
from distnb.runtime.this_process import this_process


def test_installed_packages_are_listed_by_normalised_names() -> None:
    found = installed_packages()
    assert found["ipython"] == version_here("ipython")
    assert {"scikit-learn", "cloudpickle", "typing-extensions"} <= found.keys()


def test_modules_are_mapped_to_packages() -> None:
    modules = ("numpy", "sklearn", "PIL", "typing_extensions", "json", "no_such_module")
    assert [*map(package_of, modules)] == ["numpy", "scikit-learn", "pillow", "typing-extensions", None, None]


def test_builds_of_one_version_are_equal() -> None:
    here = str(version_here("torch")).partition("+")[0]
    assert not differs("torch", {"torch": f"{here}+cu999"})
    assert differs("torch", {"torch": "1.0"})
    assert differs("torch", {})
    assert not differs("not-installed-here", {})


def test_each_difference_is_reported_once() -> None:
    same, notices = installed_packages(), list[str]()
    packages = {"a": {**same, "numpy": "1.0"}, "b": {name: same[name] for name in same if name != "pillow"}}
    found = Dependencies({0: "a", 1: "a", 2: "b"}, packages, notices.append, sync=False)
    found.begin({"np": __import__("numpy"), "x": 1})
    here = version_here("numpy")
    assert notices == [
        f"distnb: engines 0-1 on a have numpy 1.0, this notebook has {here}. To install the same there: pip install "
        f"numpy=={here}."
    ]
    found.need(["numpy.linalg", "PIL.Image", "json"])
    assert notices[1:] == [
        f"distnb: engine 2 on b has no pillow, this notebook has {version_here('pillow')}. To install the same there: "
        f"pip install pillow=={version_here('pillow')}."
    ]
    found.need(["PIL", "numpy"])
    assert len(notices) == 2


def test_another_version_of_torch_is_explained() -> None:
    notices: list[str] = []
    Dependencies({0: "a"}, {"a": {**installed_packages(), "torch": "2.0"}}, notices.append, sync=False).begin({})
    assert notices[0].endswith("Tensors and collectives may fail between versions of torch.")


def test_a_missing_local_module_has_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "distnb_only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    error = ModuleNotFoundError("No module named 'distnb_only_here'", name="distnb_only_here")
    assert cure_for_missing(error) == ""  # the engines are on this machine
    monkeypatch.setattr(this_process, "machines", lambda: ("a",))
    assert "Start the engines with --sync" in cure_for_missing(error)
    assert cure_for_missing(ModuleNotFoundError("No module named 'x_y'", name="x_y")) == ""
    monkeypatch.setattr(this_process, "local_modules", LocalModules(print))
    assert "no import statement names it" in cure_for_missing(error)
