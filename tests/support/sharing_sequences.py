"""Sequences of cells about shared objects: memory under several arrays and tensors, and tuples with their items."""

from __future__ import annotations

from tests.support.worlds import Cell, distributed, ordinary

_IMPORTS = "import torch, numpy as np, array, functools, dataclasses"


def _shared(made: str, *names: str, apart: bool = False) -> list[Cell]:
    """Return cells that change shared memory through each name in turn, here and there, and show it through all.

    Args:
        made: The statements that make the names, each with at least two elements.
        names: The names.
        apart: Send the names one by one.
    """
    total = " + ".join(f"float(sum({name}))" for name in names)
    cells = [ordinary(f"{_IMPORTS}\n{made}")]
    if apart:
        cells += [distributed(f"n = len({name})") for name in names]
    for number, name in enumerate(names):
        cells += [
            distributed(f"{name}[0] = {number + 3}\na{number} = {total}"),
            ordinary(f"b{number} = {total}\n{name}[1] = {number + 5}"),
            distributed(f"c{number} = {total}"),
        ]
    return cells


def _together(made: str, *names: str) -> list[Cell]:
    """Return cells as `_shared` does, each of which reads all names: read separately, they may become two."""
    read = f"({', '.join(names)})"
    return [
        Cell(f"{cell.text}\n_ = {read}" if cell.distributed else cell.text, cell.distributed)
        for cell in _shared(made, *names)
    ]


SHARING: dict[str, list[Cell]] = {
    "memory: numpy() of a tensor": _shared("t = torch.zeros(4)\na = t.numpy()", "t", "a"),
    "memory: numpy() of a tensor, sent apart": _shared("t = torch.zeros(4)\na = t.numpy()", "a", "t", apart=True),
    "memory: from_numpy": _shared("a = np.zeros(4)\nt = torch.from_numpy(a)", "t", "a"),
    "memory: from_numpy, sent apart": _shared("a = np.zeros(4)\nt = torch.from_numpy(a)", "t", "a", apart=True),
    "memory: a slice, as a tensor, read together": _together("a = np.zeros(6)\nt = torch.from_numpy(a[2:])", "t", "a"),
    "memory: a slice of numpy(), read together": _together("t = torch.zeros(6)\na = t.numpy()[1:3]", "a", "t"),
    "memory: views of NumPy, read together": _together(
        "f = np.arange(12.)\nv = f[2:6]\nw = f[4:8]\nu = f[::2]\ndel f", "v", "w", "u"
    ),
    "memory: views of torch, read together": _together(
        "t = torch.arange(12.)\nr = t[2:]\nv = t.view(3, 4)[1]\ns = t.as_strided((2,), (3,), 1)", "s", "v", "t", "r"
    ),
    "memory: a parameter's data": [
        ordinary(f"{_IMPORTS}\np = torch.ones(3, requires_grad=True)\nd = p.detach()\na = d.numpy()"),
        distributed("d += 1\nm = p.sum().item() + float(a.sum())"),
        ordinary("a[0] = 7\nn = p.sum().item()"),
        distributed("k = p.sum().item()"),
    ],
    "memory: made there of what is here": [
        ordinary(f"{_IMPORTS}\nxs = []\nt = torch.zeros(4)\na = np.zeros(3)"),
        distributed("xs += [t.numpy(), torch.from_numpy(a), t.view(2, 2), a[1:]]\nv = t.numpy()"),
        ordinary("t[0] = 1\na[1] = 2\nm = sum(float(x.sum()) for x in xs)"),
        distributed(
            "xs[0][1] = 3\nxs[1][1] = 7\nv[3] = 4\nn = float(t.sum() + a.sum()) + sum(float(x.sum()) for x in xs)"
        ),
        ordinary("k = float(t.sum() + a.sum()) + sum(float(x.sum()) for x in xs)\nt[2] = 9"),
        distributed("h = float(v.sum())"),
    ],
    "memory: made there, in a list of the notebook": [
        ordinary(f"{_IMPORTS}\nxs = []"),
        distributed("t = torch.zeros(4)\nxs.append(t.numpy())"),
        distributed("xs[0][0] = 1\nn = float(t.sum())"),
        ordinary("xs[0][1] = 3"),
        distributed("m = float(t.sum())"),
    ],
    "one tuple under several names": [
        ordinary("t = ([1], 2)\nu = t\nbox = [t]"),
        distributed("i = u is t\nj = box[0] is t\nv = t\nt[0].append(2)"),
        ordinary("k = str((u is t, v is t, box[0] is t))\nt[0].append(3)"),
        distributed("m = str((u is t, v is t, box[0] is t))\nw = ([5],)\nx = w"),
        ordinary("n = w is x"),
        distributed("w[0].append(1)\nh = w is x"),
        ordinary("o = w is x"),
    ],
    "tuples that Python's collector untracks": [
        ordinary(
            f"{_IMPORTS}\nimport gc\nt = (np.zeros(3), 1)\nu = t\n"
            "def outer(n):\n    def inner():\n        return n\n    return inner\nf = outer(1)"
        ),
        distributed("i = u is t\nk = f()\nt[0][0] = 1"),
        ordinary("gc.collect()\nt[0][1] = 2\nf = outer(2)"),
        distributed("gc.collect()\nj = u is t\nm = f()\ng = outer(3)\nv = t"),
        ordinary("gc.collect()\nh = str((u is t, v is t, g(), float(t[0].sum())))\nf = outer(4)"),
        distributed("n = f()\no = v is u"),
    ],
    "a tuple that is read apart": [
        ordinary("t = ([1], 2)\nu = t"),
        distributed("i = len(u)"),
        distributed("k = u is t"),
        ordinary("t[0].append(3)"),
        distributed("n = len(t[0])"),
        distributed("m = u is t"),
    ],
    "tuples in tuples, with what lives there": [
        distributed("m = set()\nt = (m, [1])\nu = t"),
        distributed("i = u is t\nt[1].append(1)"),
        ordinary("j = u is t"),
        distributed("k = u is t\nv = (t,)"),
        ordinary("box = [t, u, v]"),
        distributed("n = str((box[0] is t, box[2][0] is t))"),
    ],
    "one method under several names": [
        ordinary("class C:\n    def up(self):\n        return self\nc = C()\nm = c.up\nn = m\nbox = [m]"),
        distributed("i = m is n\nj = box[0] is m\nk = m"),
        ordinary("h = str((k is m, box[0] is n))"),
        distributed("o = str((k is m, box[0] is n, m() is c))"),
    ],
    "immutable things that hold mutable ones": [
        ordinary(
            f"{_IMPORTS}\n@dataclasses.dataclass(frozen=True)\nclass F:\n    v: object\nf = F([1])\ng = f\n"
            "s = slice([1], 2)\nr = s\np = functools.partial(len, [1])\nq = p"
        ),
        distributed("i = str((f is g, s is r, p is q))\nf.v.append(2)\nh = f"),
        ordinary("j = str((f is g, s is r, p is q, h is f))\ns.start.append(4)"),
        distributed("k = str((f is g, s is r, p is q, h is f, len(s.start)))"),
    ],
}
