"""What the commands share: how a flow that was stopped becomes a sentence and an exit code."""

from __future__ import annotations

import prefect
import pytest
import typer

from flows.commands import INTERRUPTED, run_flow, sentences


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


def test_an_error_in_answer_to_an_error_is_no_interruption():
    with pytest.raises(ValueError, match="second"), sentences():
        try:
            raise ValueError("first")
        except ValueError:
            raise ValueError("second")  # noqa: B904  its context is what is tested
