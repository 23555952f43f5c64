"""What commands print when nobody reads it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("shown", ["console.print('x ' * 10**5)", "print('x' * 10**6)", "console.print('x')"])
def test_output_that_nobody_reads_changes_no_exit_code(shown):
    script = (
        f"from flows.cli.output import result_console\nwith result_console(False) as console:\n    {shown}\nraise SystemExit(7)"
    )
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    said = command.stderr.read()
    assert (command.wait(60), said) == (7, b"")
