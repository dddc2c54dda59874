"""The table of replaced functions of other libraries, and no replacement outside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distnb
from distnb.compat import patches

ROOT = Path(distnb.__path__[0])

ELSEWHERE = {
    "cluster/local/script_replica.py": "sys.argv and sys.last_value, as the interpreter sets them for a script",
    "compat/ipykernel_internals.py": "the application of this engine's kernel, in IPython's own slot for it",
    "compat/torchmetrics_internals.py": "installed with methods of metrics and of their subclasses, by `metric_binding`",
    "engine/agent.py": "sys.stdout and sys.stderr of the engine",
    "engine/debugging/debugger.py": "the debugger of a replica, in place of the terminal's",
    "engine/guard.py": "sys.unraisablehook, which calls the one before",
    "engine/output/widget_comms.py": "the maker of comms, which the package `comm` has its users set",
    "engine/template.py": "the key of this process, which it would share with the process that it was forked from",
    "engine/unattended.py": "input, getpass and breakpoint, which ask in the notebook",
    "keras/replica_state.py": "Keras's property of a variable's value, installed with methods of subclasses",
    "magics/extension.py": "sys.breakpointhook of the notebook",
    "magics/tracebacks.py": "sys.last_traceback, as IPython sets it",
    "objects/modes.py": "torch's modes, which are data",
    "runtime/scopes/made_objects.py": "within a scope only",
    "runtime/scopes/metric_names.py": "the name of a metric, installed with Keras's names of a metric's methods",
    "runtime/servers/server_registration.py": "within a scope only",
    "wire/recycled_memory.py": "an option of an object of our own",
    "wire/shared_memory_buffer.py": "an option of an object of our own",
}
"""Files that assign to an attribute of another library's module or class, with the reason why it is no patch for the
table. A class that a file holds in a variable is not found: `runtime/scopes/metric_binding.py`, `keras/scope_checks.py`,
`collectives/group/stores.py`, `compat/transformers_internals.py` and `notebook/handles/library_guards.py` each replace
methods of a class and of its subclasses together."""


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


def _foreign(source: str) -> list[str]:
    """Return the attributes of other libraries that a file sets."""
    tree = ast.parse(source)
    imported = _imported(tree)
    found = []
    for target in _assigned(tree):
        root = target
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and not imported.get(root.id, "distnb").startswith("distnb"):
            found.append(ast.unparse(target))
    return found


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
    ],
)
def test_a_patch_outside_the_table_is_detected(source: str) -> None:
    assert _foreign(source)


def test_a_target_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="missing from the table"):
        patches.replace("torch.nn:Module.forward", print)


def test_all_patches_are_installed_and_removed_together() -> None:
    """Use a separate process, because patches are installed once per process."""
    program = """
import importlib, multiprocessing.reduction
import torchmetrics
from distnb.compat import patches

def found():
    result = {}
    for target in patches.PATCHES:
        module, _, path = target.partition(":")
        owner = importlib.import_module(module)
        *names, attribute = path.split(".")
        for name in names:
            owner = getattr(owner, name)
        result[target] = attribute in vars(owner), vars(owner).get(attribute)
    return result

before = found()
from distnb.collectives.group.world import TorchDistributed
from distnb.collectives.gradients import backward_passes, parameter_groups
from distnb.engine import launched_processes
from distnb.objects.code import spawned_processes
from distnb.runtime.consistency import loader_batches
from distnb.runtime.scopes import metric_binding, sync_batch_norm
TorchDistributed().install()
parameter_groups.refuse_wrapping()
launched_processes.install()
spawned_processes.install()
loader_batches.install()
metric_binding.install()
sync_batch_norm.install()
installed = set(patches.installed())
assert all((found()[target] == before[target]) != (target in installed) for target in patches.PATCHES)
print(*sorted(set(patches.PATCHES) - installed))
patches.remove()
assert found() == before
assert patches.installed() == ()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {
        "torch.autograd:_engine_run_backward",
        "torch.distributed.distributed_c10d:_new_process_group_helper",
    }
