"""The table of replaced functions of other libraries, and no replacement outside it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import distnb
from distnb.compat import patches
from distnb.compat.versions import TESTED

ROOT = Path(distnb.__path__[0])

ELSEWHERE = {
    "cluster/local/script_replica.py": "sys.argv and sys.last_value, as the interpreter sets them for a script",
    "servers/coordinator/pickling.py": "a class of the notebook's, which a closure's pickle defines in __main__",
    "compat/ipython_internals.py": "linecache.checkcache, which IPython 7 has replaced, too; `sys` in ipykernel's module",
    "compat/torch_internals.py": "torch._dynamo, as the import of the module sets it",
    "engine/adapted_shell.py": "sys.stdout and sys.stderr of the engine",
    "engine/app.py": "sys.stdout, sys.stderr and sys.displayhook of the engine",
    "engine/debugging/debugger.py": "the latest debugger, which is data of pdb",
    "engine/guard.py": "sys.unraisablehook, which calls the one before",
    "cluster/local/zygote.py": "the key of this process, which it would share with the process that it was forked from",
    "engine/unattended.py": "sys.breakpointhook of the engine",
    "magics/extension.py": "sys.breakpointhook of the notebook",
    "magics/tracebacks.py": "sys.last_traceback, as IPython sets it",
    "objects/modes/torch_modes.py": "torch's modes, which are data",
    "runtime/scopes/made_objects.py": "within a scope only",
    "servers/variables/server_registration.py": "within a scope only",
    "wire/recycled_memory.py": "an option of an object of our own",
    "wire/shared_memory_buffer.py": "an option of an object of our own",
}
"""Files that assign to an attribute of another library's module or class, with the reason why it is no patch for the
table. A class that a file finds by a call, or gets as an argument, is not seen."""


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return the module of each name that a file imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name).partition(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: node.module or "" for each in node.names}
    return found


def _assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what a file assigns to: `X` of `X.name = …` and of `setattr(X, …)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield node.args[0]


def _held(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield variables with the modules or classes that they may hold: `x = X`, `for x in (X, …)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            names, values = node.targets if isinstance(node, ast.Assign) else [node.target], [node.value]
        elif isinstance(node, ast.For | ast.comprehension):
            names, values = [node.target], getattr(node.iter, "elts", [])
        else:
            continue
        yield from ((name.id, value) for name in names if isinstance(name, ast.Name) for value in values if value)


def _foreign(source: str) -> list[str]:
    """Return the attributes of other libraries that a file sets."""
    tree = ast.parse(source)
    foreign = {name for name, module in _imported(tree).items() if not module.startswith("distnb")}

    def is_foreign(value: ast.expr, through: tuple[type, ...]) -> bool:
        while isinstance(value, through):
            value = value.func if isinstance(value, ast.Call) else value.value  # type: ignore[attr-defined]
        return isinstance(value, ast.Name) and value.id in foreign

    # A call makes an instance, which a file may change, so no call is followed.
    foreign |= {name for name, value in _held(tree) if is_foreign(value, (ast.Attribute, ast.Subscript))}
    targets = _assigned(tree)
    return [ast.unparse(each) for each in targets if is_foreign(each, (ast.Attribute, ast.Subscript, ast.Call))]


def test_no_file_patches_another_library_outside_the_table() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if _foreign(path.read_text(encoding="utf-8"))}
    assert found == ELSEWHERE.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.Module.forward = print",
        "from torch.nn import Module\nModule.forward = print",
        "import torch.nn as nn\nsetattr(nn.Module, 'forward', print)",
        "import torch\ndel torch.nn.Module.forward",
        "import torch\ncls = torch.nn.Module\ncls.forward = print",
        "import torch\ncls: type = torch.nn.Module\nsetattr(cls, 'forward', print)",
        "from torch import nn\nfor cls in (nn.Linear, nn.Module):\n    cls.forward = print",
        "import sys\ncls = sys.modules['torch.nn'].Module\ncls.forward = print",
    ],
)
def test_a_patch_outside_the_table_is_detected(source: str) -> None:
    assert _foreign(source)


def test_a_target_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="missing from the table"):
        patches.replace("torch.nn:Module.forward", print)


def test_every_patch_has_a_reason_and_the_tested_versions_of_its_library() -> None:
    assert all(patch.reason for patch in patches.PATCHES.values())
    assert patches.PATCHES["keras:Sequential.add"].versions == TESTED["keras"]
    untested = {target.partition(":")[0].partition(".")[0] for target, patch in patches.PATCHES.items() if not patch[1]}
    assert untested - sys.stdlib_module_names == {"comm", "numpy"}


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Provide the target of a function that returns its arguments, and remove its replacement at the end."""
    library = types.ModuleType("some_library")
    library.function = lambda *args, **kwargs: (args, kwargs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", library)
    monkeypatch.setitem(patches.PATCHES, "some_library:function", patches.Patch("a test", ()))
    yield "some_library:function"
    patches.remove("some_library")


def called(*args: object) -> object:
    return sys.modules["some_library"].function(*args)


def test_wrappers_are_nested_once_each(function: str) -> None:
    def outer(plain: Callable[..., object], *args: object) -> object:
        return "outer", plain(*args)

    def inner(plain: Callable[..., object], *args: object) -> object:
        return "inner", plain(*args)

    for wrapper in (inner, outer, inner):
        patches.wrap(function, wrapper)
    assert called(1) == ("outer", ("inner", ((1,), {})))
    assert patches.installed("some_library") == [function]
    patches.remove("some_library")
    assert called(1) == ((1,), {})
    patches.wrap(function, inner)
    assert called(1) == ("inner", ((1,), {}))


@pytest.mark.features
def test_all_patches_are_installed_and_removed_together() -> None:
    """Use a separate process, because patches are installed once per process."""
    program = """
import functools, importlib
from types import SimpleNamespace
from distnb.compat import patches

def found():
    result = {}
    for target in patches.PATCHES:
        module, _, path = target.partition(":")
        *names, attribute = path.split(".")
        owner = functools.reduce(getattr, names, importlib.import_module(module))
        classes = getattr(owner, "__mro__", [owner])
        result[target] = [(attribute in vars(cls), vars(cls).get(attribute)) for cls in classes]
    return result

before = found()
from distnb.collectives.gradients import parameter_groups
from distnb.collectives.gradients.backward_passes import BackwardPasses
from distnb.collectives.group.torch_state import TorchDistributed
from distnb.compat import transformers_internals
from distnb.engine import launched_processes, unattended
from distnb.engine.output import widget_comms
from distnb.engine.programs import started_threads
from distnb.keras import replica_state
from distnb.notebook.handles import library_guards
from distnb.objects.code import spawned_processes
from distnb.objects.modes import environment
from distnb.runtime.consistency import loader_batches
from distnb.sharded import library_hooks, pretrained_models
from distnb.runtime.scopes import first_call, metric_binding, sync_batch_norm
from transformers import TrainingArguments

def accept(*args):
    pass

session = SimpleNamespace(msg=accept)
shell = SimpleNamespace(
    user_ns={},
    set_hook=accept,
    set_parent=accept,
    kernel=SimpleNamespace(session=session),
    magics_manager=SimpleNamespace(register_function=accept),
    extension_manager=None,
)
TorchDistributed().install()
parameter_groups.refuse_wrapping()
BackwardPasses().listen(object())
launched_processes.install()
started_threads.note_work_of_pools()
spawned_processes.install()
loader_batches.install()
first_call.install()
metric_binding.install()
sync_batch_norm.install()
replica_state.install()
library_guards.install()
library_hooks.install(SimpleNamespace(full_tensor=accept, add_param_group=accept, zero_grad=accept))
transformers_internals.open_arguments(TrainingArguments)
importlib.import_module("transformers.modeling_utils")
pretrained_models.install()
widget_comms.install(0, None, shell)
environment.watch_seeds()
unattended.install(shell, SimpleNamespace(input=accept, getpass=accept), accept)

installed = set(patches.installed())
assert all((found()[target] == before[target]) != (target in installed) for target in patches.PATCHES)
print(*sorted(set(patches.PATCHES) - installed))
patches.remove()
assert found() == before
assert patches.installed() == []
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {
        "pdb:Pdb.set_trace_async",  # since Python 3.14
        "torch.distributed.distributed_c10d:_new_process_group_helper",  # before torch 2.13
        "torch.distributed:Store.barrier",  # since torch 2.13
    }
