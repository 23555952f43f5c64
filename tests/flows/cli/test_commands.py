"""What the commands share: how an error becomes a sentence and an exit code, and output that nobody reads."""

from __future__ import annotations

import re

import pytest
import typer
from mlflow.exceptions import MlflowException
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.cli.commands import USAGE, pinned, run_flow, sentences
from flows.serve.background import free_port


def test_a_name_that_is_too_long_is_usage_wherever_it_is_met(tmp_path, capfd):
    """Which calls of pathlib raise for it depends on Python's version, and a prompt set is opened within the flow."""
    with pytest.raises(typer.Exit) as ended, sentences():
        (tmp_path / ("x" * 256)).open()
    assert ended.value.exit_code == USAGE
    assert capfd.readouterr().err == f"kivi: {tmp_path / ('x' * 256)}: File name too long; choose a shorter name\n"


def test_another_error_of_the_system_keeps_its_traceback(tmp_path):
    with pytest.raises(FileNotFoundError), sentences():
        (tmp_path / "missing").open()


def test_a_full_disk_is_a_sentence(capfd):
    with pytest.raises(typer.Exit) as ended, sentences():
        raise MlflowException("(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs ...]")
    assert ended.value.exit_code == USAGE
    said = "kivi: MLflow's database: database or disk is full; mend it and run again: what is finished is kept\n"
    assert capfd.readouterr().err == said


def test_a_prefect_server_that_is_set_and_does_not_answer_is_a_sentence(capfd):
    dead = f"http://user:password@127.0.0.1:{free_port('127.0.0.1', 4300)}/api"
    with temporary_settings({PREFECT_API_URL: dead}), pytest.raises(typer.Exit) as ended, sentences():
        run_flow(lambda: pytest.fail("the flow was started"))
    assert ended.value.exit_code == USAGE
    (said,) = capfd.readouterr().err.splitlines()
    shown = re.escape(dead.replace("user:password", "[user]"))
    assert re.match(rf"kivi: PREFECT_API_URL={shown}: no Prefect server answers \(.*\); start it, or", said)


def test_a_model_without_a_commit_gets_one_that_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("kivi.models.find_commit", lambda _, revision: revision or "a" * 40)
    assert pinned("org/mine") == "org/mine@" + "a" * 40
    assert f"org/mine is at commit {'a' * 40}; org/mine@{'a' * 40} will be the same weights" in capsys.readouterr().err
    assert pinned("org/mine@" + "b" * 40) == "org/mine@" + "b" * 40
    assert capsys.readouterr().err == ""
