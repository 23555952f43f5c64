"""O1: a process that is killed while it holds the accelerator must not keep the next night from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tasks.run.accelerator import accelerator

HOLDER = """
import sys, time
from pathlib import Path
from tasks.run.accelerator import accelerator
with accelerator("the cell of last night", log=print, folder=Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_after_kill_9_the_next_run_proceeds_and_has_said_why_it_waited(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(holder.pid, signal.SIGKILL)

    timer = threading.Timer(1.0, kill)
    timer.start()
    heard: list[str] = []
    with accelerator("the cell of tonight", log=heard.append, folder=tmp_path) as waited:
        proceeded = time.monotonic() - killed[0]
    holder.wait(10)
    holder.stdout.close()
    assert proceeded < 5  # seconds; the promise is 60
    assert waited > 0.5
    assert f"process {holder.pid} has for the cell of last night" in heard[0]
