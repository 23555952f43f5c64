"""What the commands share: how a flow that was stopped becomes a sentence and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import prefect
import pytest
import typer

from flows.commands import INTERRUPTED, TERMINATED, run_flow, sentences


class Interrupting(dict):
    """Arguments at which Ctrl-C arrives while Prefect looks through them, before it has made the task run."""

    def items(self):
        raise KeyboardInterrupt


@prefect.task
def cell(arguments):
    return len(arguments)


@prefect.flow
def night():
    return cell(Interrupting(a=1), return_state=True)


def test_ctrl_c_before_prefect_has_made_a_task_run_is_a_sentence(prefect_server, capfd):
    with pytest.raises(typer.Exit) as ended, sentences():
        run_flow(lambda: night(return_state=True))
    assert ended.value.exit_code == INTERRUPTED
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith("kivi: interrupted; what is finished is kept")
    assert "Traceback" not in said


def test_sigterm_is_a_sentence_and_its_handler_goes_with_the_command(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, sentences():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.exit_code == TERMINATED
    assert capfd.readouterr().err.startswith("kivi: interrupted; what is finished is kept")
    assert signal.getsignal(signal.SIGTERM) is before


def test_output_that_nobody_reads_changes_no_exit_code():
    script = (
        "from flows.commands import readers_may_leave\nwith readers_may_leave():\n    print('x' * 10**6)\nraise SystemExit(7)"
    )
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    said = command.stderr.read()
    assert (command.wait(60), said) == (7, b"")


def test_an_error_in_answer_to_an_error_is_no_interruption():
    with pytest.raises(ValueError, match="second"), sentences():
        try:
            raise ValueError("first")
        except ValueError:
            raise ValueError("second")  # noqa: B904  its context is what is tested
