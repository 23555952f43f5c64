"""The command line: exit codes, one sentence for what a user can mend, JSON alone on stdout."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import metadata

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.errors import USAGE
from flows.import_results import read_result
from tasks.config import ConfigError
from tasks.tracking.nights import find_nights
from tasks.tracking.store import writer

LONG = "x" * 256  # a name of more bytes than a file's can have


BOMB = "\n".join(
    ["a0: &a0 [full, full]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(7)), "specs: *a7"]
)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def matrix(tmp_path):
    """Write a matrix and return its path."""

    def write(text):
        path = tmp_path / "matrix.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def result_file(tmp_path, make_result):
    """Write a result and return its path."""

    def write(**options):
        path = tmp_path / "result.json"
        path.write_text(make_result(**options).model_dump_json())
        return path

    return write


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("specs: [full", "matrix.yaml: not YAML"),
        ("specs: []", "matrix.yaml: specs"),
        ("specs: [full]\nprompt_sets: [{source: p.json, template: '{'}]", "template='{': Single '{' encountered"),
        ("specs: [full]\nprompt_sets: [{source: p.json, template: '{a:d}'}]", "{a} is filled in as it is"),
        ("specs: [full]\nprompt_sets: [{source: p.json, column: ''}]", "prompt_sets[0].column"),
        ("specs: ['kivi:bits=2']\nthresholds: {'kivi:bits=2': {kl_mean: 0}}", "'kivi:bits=2' matches no cache of this matrix"),
        ("specs: ['kivi:bits=2']\nthresholds: {'kivi-*-auto': {kl_mean: 0}}", "'kivi-*-auto' matches no cache of this matrix"),
        ("spec: [full]\nspecs: [full]", "matrix.yaml: spec: no such field"),
        ("specs: [kivi:bits=5]", "KIVI codes have 2, 3, 4 or 8 bits"),
        ("specs: ['kivi:bits=2,backend=metal', 'kivi:bits=2,backend=cuda']", "use backend=auto or backend=mlx"),
        ("specs: [full]\nmodels: [/no/such/folder]", "model '/no/such/folder': neither"),
        ("specs: [full]\nmodels: [org/name]", "pin a commit"),
        ("specs: [full]\nprompt_sets: [{source: rows.jsonl}]", "needs column, template or messages"),
        (BOMB, "not YAML: more than 100,000 values, aliases written out"),
        ("specs: [full]\nprompt_sets: [{source: rows.jsonl, column: text}]", "'rows.jsonl' does not exist"),
        ("specs: [full]\nprompt_sets: [{source: /dev/null/rows.jsonl, column: text}]", "does not exist"),
        ("specs: [full]\nprompt_sets: [{source: retrieval, column: prompt}]", "no column 'prompt'; there are"),
        (
            "specs: [full]\nprompt_sets: [{source: humaneval, limit: 1}]\nmeasure: {score: {length: 2048}}",
            "prompt set 'humaneval' with model 'embedded': 1 sequences of 2049 tokens need",
        ),
    ],
)
def test_a_bad_matrix_is_one_sentence_and_exit_code_2(matrix, tmp_path, text, sentence):
    done = call("nightly", "--config", matrix(text), "--tracking-dir", tmp_path / "mlruns")
    assert done.exit_code == 2
    assert done.stderr.startswith("kivi: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("evaluate", "embedded", "humaneval", "kivi:bits"), "expected key=value"),
        (("evaluate", "embedded", "humaneval", "kiwi:bits=2"), "'kiwi'"),
        (("evaluate", "embedded", "rows.jsonl", "full"), "needs column"),
        (
            ("evaluate", "embedded", "/", "full", "--column", "text"),
            "source='/': give the folder or file of the rows by its own",
        ),
        (
            ("evaluate", "embedded", ".", "full", "--column", "text"),
            "source='.': give the folder or file of the rows by its own",
        ),
        (("evaluate", "embedded", "a/..", "full", "--column", "text"), "source='a/..': give the folder or file of the rows"),
        (("evaluate", LONG, "humaneval", "full"), f"{LONG}: File name too long; choose a shorter name"),
        (("audit", "kivi:bits=2", "--model", LONG), f"{LONG}: File name too long; choose a shorter name"),
        (("baseline", "show", "--tracking-dir", LONG), "File name too long; choose a shorter name"),
        (("store", "backup", "--tracking-dir", LONG), "File name too long; choose a shorter name"),
        (("store", "restore", LONG), "File name too long; choose a shorter name"),
        (("doctor", "--tracking-dir", LONG), "File name too long; choose a shorter name"),
        (("evaluate", "embedded", "humaneval", "full", "--limit", "0"), "greater than or equal to 1"),
        (("import", "no.json"), "no.json: cannot be read"),
        (("nightly", "--config", "no.yaml"), "no.yaml: cannot be read"),
        (("nightly", "--tracking-dir", "what?"), "a database's address cannot hold '?'"),
        (("evaluate", "embedded", "humaneval", "full", "--tracking-dir", "a%41"), "a database's address cannot hold"),
        (("baseline", "set", "--tracking-dir", "what?"), "what?"),
        (("baseline", "pin", "one", "--remove"), "--remove takes off all pins: leave 'one' out"),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_code_2(arguments, sentence):
    done = call(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_imports_nothing_that_takes_time():
    """Half a second is what a person takes for at once; any of these would take longer."""
    script = "import sys; from flows.cli.app import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert {"mlx", "prefect", "mlflow", "pydantic", "matplotlib", "datasets"}.isdisjoint(shown.split())


@pytest.mark.parametrize("command", [command for command in app.registered_commands if command.callback])
def test_the_help_of_every_command_has_an_example(command):
    assert re.search(r"^    Example: kivi ", command.callback.__doc__, re.MULTILINE), command.callback.__name__


@pytest.mark.parametrize("arguments", [("nightly", "--no-such"), ("no-such",), ("evaluate", "embedded")])
def test_unknown_usage_is_exit_code_2(arguments):
    assert call(*arguments).exit_code == 2


def test_a_sentence_moves_no_cursor(matrix):
    done = call("nightly", "--config", matrix('specs: [full]\nmodels: ["\\e[2J"]'))
    assert done.exit_code == 2
    assert "\x1b" not in done.stderr


def test_the_version_is_that_of_the_package():
    done = call("--version")
    assert (done.exit_code, done.stdout) == (0, f"kivi {metadata.version('kivi-mlx')}\n")


def test_help_and_a_bad_path_need_nothing_slow():
    script = (
        "import sys; from flows.cli.app import app\ntry:\n app(sys.argv[1:])\nfinally:\n print(*sys.modules, file=sys.stderr)"
    )
    for arguments in (["--help"], ["nightly", "--config", "no.yaml"]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
        assert not {"mlflow", "prefect", "datasets", "matplotlib"} & set(done.stderr.split())


def test_errors_that_are_usage_exist():
    for name in USAGE:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def test_import_logs_a_passing_result_and_finds_it_again(tmp_path, result_file):
    path, store = result_file(), tmp_path / "mlruns"
    for _ in range(2):
        done = call("import", path, "--tracking-dir", store)
        assert done.exit_code == 0, done.stderr
    assert "passed: " in done.stdout
    with writer(store) as tracking:
        assert len(find_nights(tracking)) == 1
        assert len(tracking.client.search_runs([tracking.experiment_id])) == 2
    assert len(list((store / "reports").glob("*.html"))) == 1


def test_import_of_a_regression_is_exit_code_1(tmp_path, result_file):
    done = call("import", result_file(kl_mean=0.5), "--tracking-dir", tmp_path / "mlruns", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["passed"] is False
    assert "quality.kl_mean is 0.5 nats, above the limit" in done.stderr


def test_import_of_something_else_is_one_sentence(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    done = call("import", tmp_path / "other.json")
    assert done.exit_code == 2
    assert "other.json: not a cell's result" in done.stderr


def test_a_tracking_folder_that_cannot_be_used_is_one_sentence(tmp_path, result_file):
    (tmp_path / "file").write_text("")
    for folder in ("file", "what?", "a%41"):
        done = call("import", result_file(), "--tracking-dir", tmp_path / folder)
        assert done.exit_code == 2
        assert "choose another --tracking-dir" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("file", "result.json")] == []


def test_doctor_says_what_there_is_with_a_remedy(tmp_path):
    done = call("doctor", "--tracking-dir", tmp_path / "mlruns")
    assert done.exit_code == 0
    for name in ("device", "backend metal", "backend cuda", "backend mlx", "BLAS", "model", "tracking store", "Prefect server"):
        assert f"{name}: " in done.stdout
    for line in done.stdout.splitlines():
        if line.startswith("no"):
            assert "→" in line
    assert not (tmp_path / "mlruns").exists()  # looking changes nothing
    assert socket.gethostname() not in done.stdout.split()


def test_doctor_fails_when_nothing_could_be_logged(tmp_path):
    (tmp_path / "file").write_text("")
    done = call("doctor", "--tracking-dir", tmp_path / "file", "--json")
    assert done.exit_code == 1
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["name"] == "tracking store"]
    assert finding["ok"] is False
    assert "--tracking-dir" in finding["remedy"]


@pytest.mark.parametrize("command", [("nightly",), ("compare", "kivi"), ("audit", "kivi"), ("doctor",)], ids=" ".join)
def test_a_store_that_could_not_be_logged_to_is_refused_before_anything_is_measured(tmp_path, monkeypatch, command):
    folder = tmp_path / "mlruns"
    folder.mkdir()
    (folder / "mlflow.db").write_text("no database")
    refused = 1 if command == ("doctor",) else 2
    done = call(*command, "--tracking-dir", folder)
    assert done.exit_code == refused
    assert "mlflow.db" in done.output
    monkeypatch.setenv("KIVI_TRACKING_URI", "lab:5050")
    done = call(*command, "--tracking-dir", tmp_path / "other")
    assert done.exit_code == refused
    assert "KIVI_TRACKING_URI=lab:5050: expected an address such as http://lab:5050" in done.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 0), (signal.SIGHUP, 0), (signal.SIGKILL, -9)], ids=["Ctrl-C", "hangup", "kill -9"]
)
def test_ui_serves_the_store_and_prints_links(tmp_path, result_file, kivi_command, sent, code):
    assert call("import", result_file(), "--tracking-dir", tmp_path / "mlruns").exit_code == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*kivi_command, "ui", "--tracking-dir", tmp_path / "mlruns", "--port", str(port), "--open", "--json"]
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > "{opened}"\n')
    browser.chmod(0o755)
    # As a terminal has it: the command and what it starts are one group, which Ctrl-C and the end of the terminal go to.
    environment = {**os.environ, "BROWSER": str(browser)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        links = json.loads(process.stdout.readline())
        with urllib.request.urlopen(links["nights"].partition("#")[0], timeout=60) as answer:  # noqa: S310  http, and ours
            page = answer.read().decode()  # links are printed when the server answers, not before
        while not opened.exists():
            assert process.poll() is None
            time.sleep(0.05)
        (server,) = [child for child in psutil.Process(process.pid).children() if "mlflow" in child.cmdline()]
        assert os.getpgid(server.pid) != process.pid
    finally:
        os.killpg(process.pid, sent)
        rest, said = process.communicate(timeout=60)  # the server holds these pipes, too
    assert (process.returncode, rest) == (code, "")  # the server's own lines are not on stdout
    assert "Traceback" not in said
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert "<title>MLflow</title>" in page
    assert "/#/compare-runs?runs=" in links["compare"]
    assert opened.read_text().strip() == links["latest"]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # the server has ended with the command


def test_ui_names_a_port_that_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = call("ui", "--tracking-dir", tmp_path / "mlruns", "--port", taken.getsockname()[1])
    assert done.exit_code == 2
    assert "choose another --port" in done.stderr


def test_a_result_of_brackets_without_end_is_one_sentence(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not a cell's result"):
        read_result(path)
