"""Sequences of cells about ambient modes that are set in a cell of one kind and seen in a cell of the other."""

from __future__ import annotations

from tests.support.worlds import Cell, both, distributed, ordinary


def _set_and_seen(
    shown: str, *changes: str, setup: str = "import torch, numpy as np", comes_back: bool = True
) -> list[Cell]:
    """Return cells that set a mode here and (if it comes back) there in turn. After each change, both show it."""
    cells = [ordinary(f"{setup}\nseen = []")]
    for number, change in enumerate(changes):
        cells.append(Cell(change, distributed=bool(number % 2) and comes_back))
        cells += both(f"seen.append(str(({shown})))")[:2]
    return cells


MODES: dict[str, list[Cell]] = {
    "mode: inference, entered and left": [
        ordinary("import torch\nt = torch.ones(2)\nguard = torch.inference_mode()\nguard.__enter__()"),
        distributed("a = torch.is_inference_mode_enabled()\nu = t + 1\nt += 1"),
        ordinary("guard.__exit__(None, None, None)\nt += 1\ndel guard"),
        distributed("b = torch.is_inference_mode_enabled(), torch.is_grad_enabled()\nv = (u + t).sum().item()"),
        ordinary("t += 1"),
        distributed("w = t.sum().item()"),
    ],
    "mode: autocast": [
        ordinary(
            "import torch\nx = torch.ones(2, 2)\nguard = torch.autocast('cpu', dtype=torch.bfloat16)\nguard.__enter__()"
        ),
        distributed("a = str((x @ x).dtype)\nwith torch.autocast('cpu', enabled=False):\n    b = str((x @ x).dtype)"),
        distributed("c = str((x @ x).dtype)"),
        ordinary("guard.__exit__(None, None, None)\ndel guard\nd = str((x @ x).dtype)"),
        distributed("e = str((x @ x).dtype)\nf = str(torch.get_autocast_dtype('cpu'))"),
    ],
    "mode: default device": _set_and_seen(
        "torch.empty(1).device",
        "torch.set_default_device('meta')",
        "torch.set_default_device('cpu')",
        "torch.set_default_device('meta')",
        "torch.set_default_device(None)",
    ),
    "mode: objects under another default device": [
        ordinary("import torch\nt = torch.ones(3)\ntorch.set_default_device('meta')"),
        distributed("t += 1\nbig = torch.ones(3, device='cpu')\nbox = [t[1:], big]"),
        ordinary("t[0] = 5"),
        distributed("n = t.sum().item() + box[0].sum().item()"),
        ordinary("torch.set_default_device(None)"),
    ],
    "mode: deterministic algorithms": _set_and_seen(
        "(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(False)",
    ),
    "mode: log levels": _set_and_seen(
        "log.level, logging.getLogger('distnb_test.other').level, logging.getLogger('torch').level",
        "log.setLevel(10)",
        "log.setLevel(30)\nlogging.getLogger('distnb_test.other').setLevel(20)",
        "log.setLevel(0)",
        setup="import logging\nlog = logging.getLogger('distnb_test')",
    ),
    "mode: matmul precision": _set_and_seen(
        "torch.get_float32_matmul_precision()",
        "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('medium')",
        "torch.set_float32_matmul_precision('highest')",
    ),
    "mode: matmul precision of a backend": _set_and_seen(
        "torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.set_float32_matmul_precision('highest')",
    ),
    "mode: cudnn": _set_and_seen(
        "(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)",
        "torch.backends.cudnn.benchmark = True",
        "torch.backends.cudnn.deterministic = True",
        "torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False",
    ),
    "mode: printing": _set_and_seen(
        "torch.tensor([1 / 3]), np.array([1 / 3])",
        "torch.set_printoptions(precision=2)\nnp.set_printoptions(precision=3)",
        "torch.set_printoptions(precision=6)\nnp.set_printoptions(precision=5)",
        "torch.set_printoptions(profile='default')\nnp.set_printoptions(precision=8)",
        comes_back=False,
    ),
    "mode: warnings": _set_and_seen(
        "[each[:3:2] for each in warnings.filters[:2]]",
        "warnings.simplefilter('error', FutureWarning)",
        "warnings.filterwarnings('ignore', 'no.*', UserWarning)",
        "warnings.simplefilter('default')",
        setup="import warnings",
        comes_back=False,
    ),
    "mode: environment variables": _set_and_seen(
        "[os.environ.get(name) for name in ('MINE', 'OTHER', 'HOME')]",
        "home = os.environ['HOME']\nos.environ['MINE'] = '1'",
        "os.environ['OTHER'] = os.environ['MINE'] + '2'\ndel os.environ['HOME']",
        "os.environ['MINE'] = '3'\nos.environ['HOME'] = home",
        "del os.environ['MINE'], os.environ['OTHER']",
        setup="import os",
    ),
    "mode: random states": _set_and_seen(
        "(torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), "
        "np.random.randn())",
        "torch.manual_seed(1)\nrandom.seed(2)\nnp.random.seed(3)",
        "torch.manual_seed(4)\nrandom.seed(5)\nnp.random.seed(6)",
        "torch.rand(1)",
        "random.random()",
        "np.random.rand()",
        setup="import torch, random, numpy as np",
    ),
    "mode: where files and modules are": _set_and_seen(
        "(os.getcwd(), sys.path[-1])",
        "before = os.getcwd()\nos.chdir('/')\nsys.path.append('/mine')",
        "os.chdir(before)\nsys.path.remove('/mine')",
        setup="import os, sys",
    ),
}
