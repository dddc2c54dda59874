"""A replica's debugger in IPython in a terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pexpect
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

CELL = """get_ipython().run_cell_magic("distribute", "mirrored", '''
x = distnb.replica_id()
if x:
    breakpoint()
strategy.assert_in_sync(1)
print("x is", x)
''')
"""


def test_the_debugger_prompts_in_the_terminal_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    (tmp_path / "cell.ipy").write_text(CELL)
    command = ["-m", "IPython", "--no-banner", "--simple-prompt", "--no-confirm-exit"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "CUDA_VISIBLE_DEVICES": ""}
    shell = pexpect.spawn(sys.executable, command, env=environment, timeout=120, encoding="utf8", cwd=str(tmp_path))
    try:
        for line in ("%load_ext distnb", "import distnb", "%distnb start -n 2", "%run -i cell.ipy"):
            shell.expect(r"In \[\d+\]: ")
            shell.sendline(line)
        shell.expect_exact("replica 1 (cpu:1)> ")
        shell.sendline("p ('x', x)")
        shell.expect_exact("('x', 1)")
        shell.expect_exact("replica 1 (cpu:1)> ")
        shell.sendline("c")
        shell.expect(r"In \[\d+\]: ")
        assert set(re.findall(r"\[\d\] x is \d", shell.before)) == {"[0] x is 0", "[1] x is 1"}
        shell.sendline("%run -i cell.ipy")
        shell.expect_exact("replica 1 (cpu:1)> ")
        shell.sendintr()
        shell.expect_exact("replicas 0-1 ended")
        shell.expect(r"In \[\d+\]: ")
        shell.sendline("exit")
        shell.expect_exact(pexpect.EOF)
    finally:
        shell.close(force=True)
