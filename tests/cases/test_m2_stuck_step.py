"""M2: a step that never ends, and lets no other thread run, must not keep the accelerator past its deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tasks.run.accelerator import accelerator

STUCK = """
import re
from tasks.run import cells
cells.LEAST_GRACE_S = 0.5
with cells.holding("stuck", 0.5):
    print("held", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # for years, with Python's lock held
"""


def test_a_step_that_never_ends_frees_the_accelerator(tmp_path: Path) -> None:
    environment = {**os.environ, "KIVI_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "held\n")
    assert "Timeout" in ran.stderr
    with accelerator("next", log=print, folder=tmp_path) as waited:
        assert waited == 0
