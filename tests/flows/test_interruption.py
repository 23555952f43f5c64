"""Signals end a command with one sentence and exit code 130 or 143, whatever the code that they meet makes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from prefect.settings import PREFECT_API_URL

from flows.interruption import SENTENCE

HUNG_S = 60
# What a signal meets, in a command that would otherwise end with 0.
CODE = {
    "nothing that catches it": "time.sleep(60)",
    "code that tries again for ever": """
while True:
    try:
        time.sleep(60)
    except BaseException:
        print("EventsWorker failed", file=sys.stderr)
""",
    "a handler of Prefect's, whose exception becomes another": """
def handler(*_):
    raise ValueError("Task run is not set")
signal.signal(signal.SIGTERM, handler)
signal.signal(signal.SIGINT, handler)
time.sleep(60)
""",
    "an object half built": """
class Half:
    def __del__(self):
        self.never_set
half = Half()
try:
    time.sleep(60)
finally:
    del half
""",
    "code that takes it for its own": """
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass
""",
}
SCRIPT = """
import signal, sys, time
from flows import interruption
signal.signal(signal.SIGINT, signal.default_int_handler)
interruption.listen()
from flows.cli.commands import sentences
print("ready", flush=True)
with sentences():
    exec(sys.argv[1])
print("went on")
"""


def interrupted(script: str, sent: signal.Signals, *arguments: str, **environment: str) -> tuple[int, bytes, bytes, float]:
    """Send a signal to a script that is ready; return its exit code, what it printed, and how long it took to end."""
    command = [sys.executable, "-c", script, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        started = time.monotonic()
        process.send_signal(sent)
        printed, said = process.communicate(timeout=HUNG_S)
    return process.returncode, printed, said, time.monotonic() - started


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_a_signal_is_a_sentence_whatever_it_meets(code, sent):
    returncode, printed, said, took = interrupted(SCRIPT, sent, code)
    assert (returncode, printed, said) == (128 + sent, b"", SENTENCE)
    assert took < 10


FLOW = """
import os, signal
import prefect
from flows import interruption

signal.signal(signal.SIGINT, signal.default_int_handler)
interruption.listen()
from flows.cli.commands import run_flow, sentences

class Interrupting(dict):
    '''Arguments at which a signal arrives while Prefect looks through them, before it has made the task run.'''
    def items(self):
        print("ready", flush=True)
        signal.pause()
        return super().items()

@prefect.task
def cell(arguments):
    return len(arguments)

@prefect.flow
def night():
    return cell(Interrupting(a=1), return_state=True)

with sentences():
    run_flow(lambda: night(return_state=True))
print("went on")
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_while_prefect_makes_a_task_run_is_a_sentence(prefect_server, sent):
    api = str(PREFECT_API_URL.value())
    returncode, printed, said, _ = interrupted(
        FLOW, sent, PREFECT_API_URL=api, PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="CRITICAL"
    )
    assert (returncode, printed, said) == (128 + sent, b"", SENTENCE)


def test_without_a_signal_an_object_half_built_is_told_of():
    script = SCRIPT.replace("sys.argv[1]", repr(CODE["an object half built"].replace("60", "0")))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\nwent on\n")
    assert "never_set" in done.stderr
