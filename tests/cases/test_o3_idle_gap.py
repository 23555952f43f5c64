"""O3: short cells must not wait between each other."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

CELLS = """
import sys, time
from pathlib import Path
from tasks.accelerator import accelerator
print("ready", flush=True)
sys.stdin.readline()
for cell in range(10):
    with accelerator(f"cell {cell}", log=lambda line: None, folder=Path(sys.argv[1])):
        start = time.monotonic()
        time.sleep(0.1)
        print(start, time.monotonic(), flush=True)
"""
GAP_S = 0.25  # far below a second, far above a poll, on a busy machine too


def test_twenty_short_cells_of_two_processes_leave_small_gaps(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CELLS, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    spans = sorted(tuple(map(float, line.split())) for output in outputs for line in output.splitlines())
    assert len(spans) == 20
    gaps = [following[0] - before[1] for before, following in itertools.pairwise(spans)]
    assert min(gaps) >= 0  # never two at once
    assert sorted(gaps)[len(gaps) // 2] < GAP_S
    assert sum(gaps) < 20 * GAP_S
