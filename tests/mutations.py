"""Break the code on purpose in thirty places, one at a time, and say which breaks the tests catch.

    python tests/mutations.py               all of them, some minutes
    python tests/mutations.py cell_key      those whose name contains it

Each break replaces one fragment of text, which occurs once in the sources, and runs the tests of its room until one fails. The
files are put back, also after Ctrl-C. A break that survives means that a test is missing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = [path for room in ("kivi", "tasks", "flows") for path in (ROOT / room).rglob("*") if path.is_file()]


class Break(NamedTuple):
    """A fragment, what takes its place, and the tests that must notice, with how they are chosen."""

    name: str
    fragment: str
    broken: str
    tests: str


BREAKS = (
    # kivi: the definition, specs, caches
    Break("rounding", "mx.round(exact / scale.astype", "mx.floor(exact / scale.astype", "tests/kivi/test_quantize.py"),
    Break("frontier", "aged // self.group_size * self.group_size", "aged", "tests/kivi/test_spec.py tests/kivi/cache"),
    Break("growth", "full + full // GROWTH", "2 * full", "tests/kivi/cache"),
    Break("trim_zeros", "self.values[..., count : self.count, :] = 0", "pass", "tests/kivi/cache"),
    Break("dispatch", 'if hasattr(cache, "attend"):', "if False:", "tests/kivi/test_attention.py tests/kivi/cache"),
    Break("honest", "self.resident == self.accounted + self.spare", "True", "tests/kivi tests/cases"),
    Break("sink_multiple", "if self.sink_length % self.group_size:", "if False:", "tests/kivi/test_spec.py"),
    Break(
        "pipeline", 'getattr(module, "pipeline_size", 1) > 1', "False", "tests/kivi/test_build.py tests/kivi/test_install.py"
    ),
    Break("trim_bounds", "n = max(0, min(self.offset, operator.index(n)))", "n = operator.index(n)", "tests/kivi/cache"),
    # kivi: kernels, as host code
    Break(
        "kernel_rounding",
        "float(LEVELS)), ROUNDING)",
        "float(LEVELS)), ROUNDING + 1.0f)",
        "tests/kivi/backends/test_kernel_quantize.py",
    ),
    Break("kernel_limit", "SHARED_LIMIT = 32 * 1024", "SHARED_LIMIT = 64 * 1024", "tests/kivi/backends"),
    # kivi: models and measurements
    Break("pinned_commit", "if revision is None or not COMMIT.fullmatch(revision):", "if False:", "tests/kivi/models"),
    Break(
        "flips",
        '"flips": mx.argmax(full, axis=-1) != mx.argmax(cached',
        '"flips": mx.argmax(full, axis=-1) == mx.argmax(cached',
        "tests/kivi/measure/test_quality.py",
    ),
    Break(
        "divergence_step",
        "np.argmin(row) for row in same",
        "np.argmax(row) for row in same",
        "tests/kivi/measure/test_generation.py",
    ),
    Break("decode_ratio", "full.decode / run.decode", "run.decode / full.decode", "tests/kivi/measure/speed"),
    Break(
        "first_move",
        "spec.sink_length + spec.residual_length + spec.group_size - 1",
        "spec.sink_length + spec.residual_length",
        "tests/kivi/measure/test_schedule.py",
    ),
    Break("interval", "np.asarray(means),", "np.asarray(means) * 2,", "tests/kivi/measure"),
    # tasks
    Break(
        "cell_key",
        "model.config.name, model.revision, model.digest",
        "model.config.name, model.revision",
        "tests/tasks/run/test_plan.py tests/cases/test_o17_model_in_key.py",
    ),
    Break("limit", "value <= limit", "value < 2 * limit", "tests/tasks/judge"),
    Break("audit_limit", 'reason = "" if result.audit.passed else', 'reason = "" if True else', "tests/tasks/judge"),
    Break(
        "direction",
        "(estimate.change > 0) == field.higher_is_better",
        "(estimate.change > 0) != field.higher_is_better",
        "tests/tasks/judge",
    ),
    Break("false_alarms", "adjusted_p > rate", "adjusted_p > 1", "tests/tasks/judge"),
    Break("wrong_key", "result.cell_key != key", "False", "tests/tasks/run"),
    Break("last_night", 'run.data.params.get("matrix") not in AD_HOC', "True", "tests/tasks/tracking tests/flows"),
    Break(
        "failed_baseline",
        'if run.info.status != "FINISHED":\n        return f"it is',
        'if False:\n        return f"it is',
        "tests/tasks/tracking",
    ),
    Break("superseded", '"kivi.superseded" not in run.data.tags', "True", "tests/tasks/tracking"),
    Break("hidden_text", 'HIDDEN = {"Cc", "Cf", "Cs"}', 'HIDDEN = {"Cc", "Cs"}', "tests/tasks"),
    # flows
    Break("exit_code", "PASSED, FAILED, USAGE = 0, 1, 2", "PASSED, FAILED, USAGE = 0, 0, 2", "tests/flows"),
    Break("old_process", "process.create_time() == self.began", "True", "tests/operations/test_background.py"),
    Break("late_night", "other.auto_scheduled and", "", "tests/operations/test_missed_nights.py"),
    # tuning
    Break(
        "tune_frontier",
        "quantized_tokens(position + 1)",
        "quantized_tokens(position)",
        "tests/kivi/measure/test_sensitivity.py",
    ),
    Break(
        "tune_budget",
        "-np.inf], [*np.ones(len(slots)), budget]",
        "-np.inf], [*np.ones(len(slots)), np.inf]",
        "tests/tasks/tune",
    ),
    Break("tune_promise", "{name: end.high for", "{name: end.low for", "tests/tasks/tune"),
    Break("tune_nearest", "key=lambda at: (abs(at - bits), -at)", "key=lambda at: at", "tests/tasks/tune"),
    Break("tune_rows", "sorted(rows[used:])", "sorted(rows)", "tests/flows/test_tune.py"),
)


def find(fragment: str) -> Path:
    """Return the one source that contains ``fragment``."""
    found = [path for path in SOURCES if path.suffix in {".py", ".h", ".body"} and fragment in path.read_text()]
    if len(found) != 1:
        raise SystemExit(f"{fragment!r} is in {len(found)} sources: expected 1")
    return found[0]


def caught(change: Break) -> bool:
    """Return whether the tests fail with the change."""
    path = find(change.fragment)
    whole = path.read_text()
    path.write_text(whole.replace(change.fragment, change.broken))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *change.tests.split()]
    try:
        code = subprocess.run(command, cwd=ROOT, capture_output=True).returncode
    finally:
        path.write_text(whole)
    if code not in {0, 1}:
        raise SystemExit(f"{change.name}: pytest ended with {code}, so its tests did not run: {change.tests}")
    return code == 1


def main(names: list[str]) -> int:
    """Try the breaks whose name contains one of ``names``, all by default; return 1 when one survives."""
    chosen = [change for change in BREAKS if not names or any(name in change.name for name in names)]
    survivors = []
    for change in chosen:
        seen = caught(change)
        survivors += [] if seen else [change.name]
        print(f"{'caught  ' if seen else 'SURVIVED'} {change.name}", flush=True)  # noqa: T201  the result
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")  # noqa: T201
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
