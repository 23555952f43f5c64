"""``make up`` on what it cannot use: a sentence, exit code 2 for usage and 1 for a server, and nothing started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.serve import servers
from flows.serve.background import Background, Process, ServerError, free_port
from flows.serve.doctor import examine
from flows.servers import main

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a server would be started."""

    def refuse(*_: object) -> Process:
        raise AssertionError("started")

    monkeypatch.setattr(Background, "start", refuse)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", ["PREFECT_SERVER_API_PORT", "MLFLOW_PORT"])
@pytest.mark.parametrize("port", ["abc", "", "0", "70000", "-1", "9" * 5000])
def test_a_port_that_is_none_is_usage_before_anything_starts(
    name: str, port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, port)
    monkeypatch.chdir(PROJECT)
    assert main(["up", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kivi: {name}=") and "expected a port, 1 to 65535" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("PREFECT_SERVER_API_PORT", "abc", "PREFECT_SERVER_API_PORT='abc': expected a port"),
        ("PREFECT_API_ENABLE_HTTP2", "perhaps", "PREFECT_API_ENABLE_HTTP2='perhaps': expected a valid boolean"),
        ("PREFECT_CLIENT_CUSTOM_HEADERS", "{", "Prefect's settings: error parsing value for field"),
    ],
)
def test_a_setting_that_prefect_refuses_is_named(name: str, value: str, sentence: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.servers", "up", str(tmp_path)]
    done = subprocess.run(
        command, cwd=PROJECT, env={**os.environ, name: value}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"kivi: {sentence}")


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", [["up"], ["down"], ["run", "prefect"], ["run", "cells"]], ids=" ".join)
@pytest.mark.parametrize("folder", ["file", "file/within", "x" * 256, "what?"], ids=["file", "within", "long", "query"])
def test_a_folder_that_cannot_be_used_is_usage(
    command: list[str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(servers.os, "execve", lambda *_: pytest.fail("started"))
    assert main([*command, str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kivi: {tmp_path / folder}: ") and "choose another" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("nothing_starts")
def test_up_from_elsewhere_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up", "mlruns"]) == 2
    assert "no prefect.yaml to deploy; start from the project's folder" in capsys.readouterr().err


RECORD = '{"name": "prefect", "pid": 1, "began": 0, "address": "%s"}'


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "record",
    ["", '{"name": "pre', "[]", RECORD % "nowhere", RECORD.replace("1", "-1") % "", RECORD.replace("1", "9" * 30) % ""],
)
@pytest.mark.parametrize("command", ["up", "down"])
def test_a_damaged_record_is_a_sentence_and_is_not_passed_over(
    command: str, record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT)
    path = tmp_path / "servers" / "prefect.json"
    path.parent.mkdir()
    path.write_text(record)
    assert main([command, str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert (
        said == f"kivi: {path}: damaged, so prefect cannot be found: end it by hand if it still runs, then remove this file\n"
    )
    assert path.read_text() == record
    assert str(path) in next(found.text for found in examine(tmp_path) if found.name == "make up")


def test_a_log_that_cannot_be_written_is_a_server_that_failed(tmp_path: Path) -> None:
    (tmp_path / "one.log").mkdir()
    with pytest.raises(ServerError, match=r"one cannot be started: .*one.log: Is a directory"):
        Background(tmp_path).start("one", ["sleep", "600"], dict(os.environ))


def test_no_port_is_looked_for_beyond_the_last() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 65535))
        taken.listen()
        with pytest.raises(ServerError, match="no port from 65535 to 65535 can be used"):
            free_port("127.0.0.1", 65535)
