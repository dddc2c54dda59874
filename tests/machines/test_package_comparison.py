"""The comparison of packages between the notebook and other machines, and the cure for a missing local module."""

from __future__ import annotations

from pathlib import Path

import pytest

from distnb.cluster.package_versions import differs, installed_packages, package_of, version_here
from distnb.machines.users_code.package_comparison import PackageComparison
from distnb.machines.users_code.preparation import cure_for_missing


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
    found = PackageComparison({0: "a", 1: "a", 2: "b"}, packages, notices.append)
    found.compare(["numpy"])
    here = version_here("numpy")
    assert notices == [
        f"distnb: engines 0-1 on a have numpy 1.0, this notebook has {here}. To install the same there: pip install "
        f"numpy=={here}."
    ]
    found.compare(["numpy.linalg", "PIL.Image", "json"])
    assert notices[1:] == [
        f"distnb: engine 2 on b has no pillow, this notebook has {version_here('pillow')}. To install the same there: "
        f"pip install pillow=={version_here('pillow')}."
    ]
    found.compare(["PIL", "numpy"])
    assert len(notices) == 2


def test_another_version_of_torch_is_explained() -> None:
    notices: list[str] = []
    PackageComparison({0: "a"}, {"a": {**installed_packages(), "torch": "2.0"}}, notices.append).compare(["torch"])
    assert notices[0].endswith("Tensors and collectives may fail between versions of torch.")


def test_packages_in_sent_folders_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "distnb_only_here.py").touch()
    (tmp_path / "distnb_only_here-1.0.dist-info").mkdir()
    (tmp_path / "distnb_only_here-1.0.dist-info/METADATA").write_text("Name: distnb-only-here\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    version_here.cache_clear()
    notices: list[str] = []
    PackageComparison({0: "a"}, {"a": {}}, notices.append, [str(tmp_path)]).compare(["distnb_only_here"])
    assert notices == []
    PackageComparison({0: "a"}, {"a": {}}, notices.append).compare(["distnb_only_here"])
    assert "`distnb-only-here` is local: %distnb start --sync FOLDER sends" in notices[0]


def test_a_missing_local_module_has_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "distnb_only_here.py").touch()
    (tmp_path / "distnb_space/part").mkdir(parents=True)
    (tmp_path / "distnb_space/part/__init__.py").touch()
    (tmp_path / "distnb_compiled.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def cure(module: str, *folders: str) -> str:
        return cure_for_missing(ModuleNotFoundError(f"No module named {module!r}", name=module), folders)

    assert "Start the engines with --sync" in cure("distnb_only_here")
    assert f"{tmp_path}/distnb_space/part/__init__.py. Start" in cure("distnb_space.part.module")
    assert "not in a folder that --sync sends (/elsewhere)" in cure("distnb_only_here", "/elsewhere")
    assert "Only Python code and data are sent" in cure("distnb_compiled", str(tmp_path))
    assert "Run the cell again" in cure("distnb_only_here", str(tmp_path))
    assert cure("x_y") == cure("numpy") == cure("json") == ""
    assert cure_for_missing(ValueError("x"), ()) == ""
