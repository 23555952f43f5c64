"""Measure one cell with `kivi` alone, and write its typed result: for machines that have an accelerator and no tracker.

    python -m kivi.measure embedded --spec kivi:bits=2 --texts prompts.jsonl --out result.json

`kivi import result.json` logs it later, where the tracker is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kivi.attention import AttentionError
from kivi.backends import BackendError
from kivi.cache.overflow import NonFiniteError
from kivi.measure import MeasureError
from kivi.measure.answers.questions import Question
from kivi.measure.cell import measure_cell
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import CellResult
from kivi.measure.settings import MeasureSettings, read_settings
from kivi.measure.speed.throughput import measure_throughput
from kivi.models import EMBEDDED, LoadedModel, ModelError, check_model, load_model
from kivi.spec import CacheSpec, SpecError

REFERENCE_BYTES = 8 * 10**9  # of the temporary folder for the full cache's logits; beyond that they are computed again
USAGE_ERRORS = (ModelError, SpecError, MeasureError)
FAILURES = (AttentionError, BackendError, NonFiniteError, DeadlineError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if the measurement or its audit failed, or 2 if it could not begin."""
    options = _parser().parse_args(arguments)
    try:
        if not options.out.parent.is_dir():
            raise MeasureError(f"out {str(options.out)!r}: its folder is not there")
        texts = read_texts(options.texts)
        settings = read_settings(options.settings, MeasureSettings)
        spec = CacheSpec.parse(options.spec)
        check_model(options.model, options.revision)
        model = load_model(options.model, revision=options.revision, dtype=options.dtype)
        questions = read_questions(options.texts) if settings.answers else []
        result = measure(model, texts, spec, settings, prompt_set=options.texts.stem, questions=questions)
    except (*USAGE_ERRORS, *FAILURES) as error:
        print(f"kivi.measure: {error}", file=sys.stderr)  # noqa: T201  the command's answer
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    result.write(options.out)
    print(f"kivi.measure: wrote {options.out}", file=sys.stderr)  # noqa: T201  the command's answer
    return 0 if result.audit.passed else 1


def measure(
    model: LoadedModel,
    texts: Sequence[str],
    spec: CacheSpec,
    settings: MeasureSettings,
    *,
    prompt_set: str,
    questions: Sequence[Question] = (),
) -> CellResult:
    """Measure the cell, then its throughput beside the full cache, with one deadline for both.

    Raises:
        MeasureError: as :func:`~kivi.measure.cell.measure_cell`, or the spec's caches could not be timed.
    """
    digest = hashlib.sha256(json.dumps(list(texts), ensure_ascii=False).encode()).hexdigest()
    identity = [model.name, model.revision, model.weights_digest, model.dtype, digest, spec.model_dump(), settings.model_dump()]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    monitor = Monitor(_report if sys.stderr.isatty() else None, settings.deadline_s)
    with tempfile.TemporaryDirectory(prefix="kivi-") as folder:
        result = measure_cell(
            model,
            texts,
            spec,
            settings,
            cell_key=key,
            prompt_set=prompt_set,
            prompt_sha256=digest,
            references=ReferenceStore(Path(folder), REFERENCE_BYTES),
            monitor=monitor,
            questions=questions,
        )
    figures = measure_throughput(model, texts, [spec], settings.throughput, monitor=monitor, seed=settings.seed)[spec.slug]
    if isinstance(figures, str):
        raise MeasureError(f"{spec.slug}: cannot be timed: {figures}")
    return result.model_copy(update={"throughput": figures})


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: of JSON lines the field ``text``, of any other file all of it as one text.

    Raises:
        MeasureError: the file is missing, or a line is no JSON object with a text.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeasureError(f"texts {str(path)!r} cannot be read: {error}") from None
    if path.suffix != ".jsonl":
        return [content]
    texts = []
    for number, line in enumerate(json_lines(content), start=1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, KeyError, TypeError):
            raise MeasureError(f"{str(path)!r}, line {number}: expected a JSON object with a field text") from None
    return texts


def json_lines(content: str) -> list[str]:
    """Return the lines of JSON lines. Newlines alone end them: a JSON string may hold U+2028 and other line ends of Unicode."""
    return content.removesuffix("\n").split("\n") if content else []


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file of JSON lines: each ``text`` ends with its ``answer``; ``depth`` may be there.

    Raises:
        MeasureError: a line is no such object, or its text does not end with its answer.
    """
    questions = []
    for number, line in enumerate(json_lines(path.read_text(encoding="utf-8")), start=1):
        try:
            row = json.loads(line)
            questions.append(Question(str(row["text"]), str(row["answer"]), row.get("depth")))
        except (ValueError, KeyError, TypeError):
            raise MeasureError(f"{str(path)!r}, line {number}: expected a JSON object with text and answer") from None
    return questions


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kivi.measure", description="Measure one cache and write the result.")
    parser.add_argument("model", nargs="?", default=EMBEDDED, help="embedded, a folder in mlx-lm's form, or a Hugging Face id")
    parser.add_argument("--revision", help="commit of a Hugging Face id, 40 hex digits")
    parser.add_argument("--dtype", default="auto", help="auto, stored, float32, float16 or bfloat16")
    parser.add_argument("--spec", required=True, help="KIND[:key=value,...], e.g. kivi:bits=2,group=32")
    parser.add_argument(
        "--texts", required=True, type=Path, help="what the model reads: JSON lines with text (and answer), or a text file"
    )
    parser.add_argument("--settings", type=Path, help="JSON file of MeasureSettings: how much is measured")
    parser.add_argument("--out", required=True, type=Path, help="file for the result")
    return parser


def _report(stage: str, done: int, total: int) -> None:
    print(f"\r{stage}: {done} of {total}\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
