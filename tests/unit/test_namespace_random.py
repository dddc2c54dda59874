"""Random sequences of cells that make, share, change and drop objects, compared with one IPython."""

from __future__ import annotations

import random

import pytest
import torch

from tests.worlds import Cell, DoubleWorld, PlainWorld, compare, run_all

_NAMES = "abcdef"
_SETUP = "import numpy as np, torch\nclass Box:\n    kind = 'box'\n    def __init__(self, v=None):\n        self.v = v"


def _statement(draw: random.Random) -> str:
    one, two, other = (draw.choice(_NAMES) for _ in range(3))
    number = draw.randrange(100)
    return draw.choice(
        [
            f"{one} = [{number}]",
            f"{one} = {{'k': {number}}}",
            f"{one} = {number}",
            f"{one} = Box()",
            f"{one} = np.arange(3) + {number}",
            f"{one} = torch.arange(3) * {number}",
            f"{one} = {two}",
            f"{one} = [{two}, {other}]",
            f"{one} = ({two}, {number})",
            f"{one} = {{'x': {two}, 'y': [{other}]}}",
            f"{one} = Box({two})",
            f"del {one}",
            f"{one}.append({two})",
            f"{one}.append({number})",
            f"{one}['k'] = {two}",
            f"{one}['k'].append({number})",
            f"{one}[0] = {two}",
            f"{one}[0].append({number})",
            f"{one}.v = {two}",
            f"{one}.v.append({number})",
            f"{one}.v[0] = {number}",
            f"{one} += [{two}]",
            f"{one} += {number}",
            f"{one}[1] = {number}",
            f"{one}.clear()",
            f"Box.kind = {one}",
            f"{one} = Box.kind",
            f"Box.kind.append({number})",
            f"{one} = lambda z={two}: (z, {other})",
            f"{one} = {two}()[0]",
            f"{one}()[0].append({number})",
        ]
    )


def _sequence(seed: int) -> list[Cell]:
    draw = random.Random(seed)
    cells = [Cell(_SETUP + "".join(f"\n{name} = None" for name in _NAMES), False)]
    for _ in range(draw.randrange(4, 12)):
        # A statement that makes no sense for what the name is at that moment does nothing.
        lines = [f"try:\n    {_statement(draw)}\nexcept Exception:\n    pass" for _ in range(draw.randrange(1, 6))]
        cells.append(Cell("\n".join(lines), draw.random() < 0.6))
    return cells


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(60))
def test_as_in_one_ipython(seed: int) -> None:
    torch.set_num_threads(1)
    cells = _sequence(seed)
    plain, double = PlainWorld(), DoubleWorld(2)
    run_all(plain, cells)
    run_all(double, cells)
    compare(plain.names(), double.names())
