"""What the commands share: how a flow that was stopped becomes a sentence and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import prefect
import pytest
import typer
from mlflow.exceptions import MlflowException

from flows.cli.commands import INTERRUPTED, TERMINATED, USAGE, run_flow, sentences


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


@pytest.mark.parametrize("shown", ["console.print('x ' * 10**5)", "print('x' * 10**6)", "console.print('x')"])
def test_output_that_nobody_reads_changes_no_exit_code(shown):
    script = (
        f"from flows.cli import commands\nwith commands.result_console(False) as console:\n    {shown}\nraise SystemExit(7)"
    )
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    said = command.stderr.read()
    assert (command.wait(60), said) == (7, b"")


def test_a_name_that_is_too_long_is_usage_wherever_it_is_met(tmp_path, capfd):
    """Which calls of pathlib raise for it depends on Python's version, and a prompt set is opened within the flow."""
    with pytest.raises(typer.Exit) as ended, sentences():
        (tmp_path / ("x" * 256)).open()
    assert ended.value.exit_code == USAGE
    assert capfd.readouterr().err == f"kivi: {tmp_path / ('x' * 256)}: File name too long; choose a shorter name\n"


def test_another_error_of_the_system_keeps_its_traceback(tmp_path):
    with pytest.raises(FileNotFoundError), sentences():
        (tmp_path / "missing").open()


def test_an_error_in_answer_to_an_error_is_no_interruption():
    with pytest.raises(ValueError, match="second"), sentences():
        try:
            raise ValueError("first")
        except ValueError:
            raise ValueError("second")  # noqa: B904  its context is what is tested


@pytest.mark.parametrize(("code", "quiet"), [(INTERRUPTED, True), (TERMINATED, True), (1, False)])
def test_what_a_signal_found_half_built_says_nothing_more(code, quiet):
    """A lock of another library, interrupted in its own __init__, has a __del__ that fails when the command ends."""
    script = f"""
from flows.cli import app as cli

class Half:
    def __del__(self):
        self.never_set

def app():
    half = Half()
    raise SystemExit({code})

cli.app = app
cli.main()
"""
    command = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert command.returncode == code
    assert (command.stderr == "") == quiet, command.stderr


def test_a_full_disk_is_a_sentence(capfd):
    with pytest.raises(typer.Exit) as ended, sentences():
        raise MlflowException("(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs ...]")
    assert ended.value.exit_code == USAGE
    said = "kivi: MLflow's database: database or disk is full; mend it and run again: what is finished is kept\n"
    assert capfd.readouterr().err == said
