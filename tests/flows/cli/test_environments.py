"""Commands where the environment is not ours: few characters, few open files, a folder called kivi, a home that is not one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KIVI = str(Path(sys.executable).with_name("kivi"))


def ended(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    given = {**os.environ, "PYTHONPATH": "", **environment}
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, timeout=120)


PRINT = """
import io, sys
from flows import plain_output
from flows.cli.output import print_line, result_console, table
plain_output.allow()
with result_console(False) as console:
    print_line(console, "embedded × humaneval → 3 ± 1 … \\u65e5")
    console.print(table("t", ["cache"], [["ü"]]))
print("sélection", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("encoding", "line"),
    [
        ("ascii", b"embedded x humaneval -> 3 +- 1 ... ?"),
        ("latin-1", "embedded × humaneval -> 3 ± 1 ... ?".encode("latin-1")),
        ("utf-8", "embedded × humaneval → 3 ± 1 … 日".encode()),
    ],
)
def test_output_is_plain_where_its_encoding_lacks_characters(tmp_path, encoding, line):
    done = ended(sys.executable, "-c", PRINT, folder=tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, line), done.stderr
    assert done.stderr.decode(encoding).startswith("selection" if encoding == "ascii" else "sélection")


def test_the_doctor_speaks_ascii(tmp_path):
    done = ended(KIVI, "doctor", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b" -> needs a Mac" in done.stdout


def test_a_hard_limit_of_open_files_is_a_sentence(tmp_path):
    done = ended(
        "sh",
        "-c",
        f"ulimit -n 1024; exec setpriv --bounding-set -sys_resource --inh-caps -sys_resource {KIVI} doctor",
        folder=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"kivi: the hard limit of open files is 1024, and mlx-lm needs 4096: raise it"), done.stderr
    assert done.stderr.count(b"\n") == 1


def test_the_library_is_found_beside_a_folder_of_its_name(tmp_path):
    (tmp_path / "kivi" / "kivi").mkdir(parents=True)  # a checkout, from the folder that it lies in
    done = ended(sys.executable, "-c", "from kivi import CacheSpec", folder=tmp_path)
    assert done.returncode == 0, done.stderr


HOMELESS = """
import sys
from flows.serve.temporary_server import reachable
from prefect import flow
from tasks.config import PromptSetConfig
from tasks.prompts.prompt_sets import load_prompt_set

@flow
def read():
    return len(load_prompt_set(PromptSetConfig(source=sys.argv[1], column="text")).rows)

with reachable():
    sys.exit(read() != 1)
"""


def test_a_home_that_cannot_be_written_to_is_not_needed(tmp_path):
    home, rows = tmp_path / "home", tmp_path / "rows.jsonl"
    home.write_text("no folder, which stops root too")
    rows.write_text('{"text": "once"}\n')
    places = {"HOME": str(home), "KIVI_CACHE_DIR": str(tmp_path / "cache"), "PREFECT_HOME": str(home / ".prefect")}
    done = ended(sys.executable, "-c", HOMELESS, str(rows), folder=tmp_path, **places)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
