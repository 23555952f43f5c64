"""O3: short cells must not wait between each other."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

from tasks.run.accelerator import accelerator

CELLS = 20
IDLE_S = 2.0  # in all: far above 20 looks at the lock on a busy machine, far below a second a cell


def test_twenty_waiting_cells_follow_each_other_with_little_idle_time(tmp_path: Path) -> None:
    spans: list[tuple[float, float]] = []
    ready = threading.Barrier(CELLS)

    def run(number: int) -> None:
        ready.wait()
        with accelerator(f"cell {number}", log=lambda _: None, folder=tmp_path):
            started = time.monotonic()
            time.sleep(0.05)
            spans.append((started, time.monotonic()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CELLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans) == CELLS
    gaps = [following[0] - before[1] for before, following in itertools.pairwise(sorted(spans))]
    assert min(gaps) >= 0  # never two at once
    assert sum(gaps) < IDLE_S
