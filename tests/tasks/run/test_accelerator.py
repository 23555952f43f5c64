"""The host's accelerator lock: one holder at a time, free when it dies, and quick from hand to hand."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tasks.run.accelerator import accelerator


def test_one_holder_at_a_time_and_the_waiting_one_says_why(tmp_path: Path) -> None:
    inside: list[str] = []
    heard: list[str] = []
    held = threading.Event()

    def first() -> None:
        with accelerator("first", log=heard.append, folder=tmp_path) as waited:
            assert waited == 0.0
            held.set()
            time.sleep(0.5)
            inside.append("first")

    holder = threading.Thread(target=first)
    holder.start()
    held.wait(10)
    with accelerator("second", log=heard.append, folder=tmp_path) as waited:
        inside.append("second")
    holder.join()
    assert inside == ["first", "second"]
    assert 0.3 < waited < 5
    assert "second: waits for the accelerator, which process" in heard[0] and "has for first since" in heard[0]
    assert heard[1].startswith("second: has the accelerator after waiting")


def test_a_failure_inside_frees_the_accelerator(tmp_path: Path) -> None:
    heard: list[str] = []
    try:
        with accelerator("fails", log=heard.append, folder=tmp_path):
            raise ValueError("inside")
    except ValueError:
        pass
    with accelerator("next", log=heard.append, folder=tmp_path) as waited:
        assert waited == 0.0
    assert not heard


def test_a_note_that_nobody_can_read_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "accelerator.json").write_text("[")
    with accelerator("cell", log=lambda _: None, folder=tmp_path) as waited:
        assert waited == 0.0
