"""Load a model: the embedded one, a folder in mlx-lm's form, or a pinned revision from Hugging Face.

Whatever the source, no code of the model's author is run, and what was loaded is recorded: the revision, and a digest of the
weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import mlx.core as mx
from filelock import FileLock
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, dequantize_model, load_config, load_tokenizer
from mlx_lm.utils import load_model as load_weights

from kivi.files import write_whole
from kivi.models import embedded
from kivi.quantize import dtype_name

EMBEDDED = "embedded"
Dtype = Literal["auto", "stored", "float32", "float16", "bfloat16"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]  # no *.py
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


class ModelError(RuntimeError):
    """A model that cannot be loaded; the message is one sentence that names it and the remedy."""


class Origin(NamedTuple):
    """What :func:`load_model` was given, so that another process can load the same."""

    name: str
    revision: str | None
    dtype: str


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and what it is.

    ``dtype`` is the dtype that activations and caches have, after ``4bit-`` or the like when weights are quantised;
    ``weights_digest`` is the SHA-256 over the safetensors files, whatever ``dtype`` they were turned into; ``origin`` is None
    for a model that was made in memory.
    """

    model: Module
    tokenizer: Any
    name: str
    revision: str
    weights_digest: str
    dtype: str
    config: dict[str, Any]
    origin: Origin | None = None

    @property
    def text_config(self) -> dict[str, Any]:
        """What the config says of the language model, which a model of several kinds of input has in a part of its own."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text


def load_model(name: str = EMBEDDED, *, revision: str | None = None, dtype: str = "auto") -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name: ``embedded``, the path of a folder in mlx-lm's form, or a Hugging Face id such as ``org/model``.
        revision: The commit, 40 hex digits, of a Hugging Face id. Folders have none.
        dtype: ``float32``, ``float16`` or ``bfloat16``: quantised weights are dequantised and all are cast. ``stored``: as
            they are. ``auto``: as stored on a GPU; float32 on a CPU, where MLX's 16-bit products are 10 to 40 times slower.

    Raises:
        ModelError: the model is unknown, incomplete, gated, wants to run code, or has no pinned revision.
    """
    if dtype not in get_args(Dtype):
        raise ModelError(f"dtype={dtype!r}: expected one of {', '.join(get_args(Dtype))}")
    origin = Origin(name, revision, dtype)
    check_model(name, revision)
    folder = _provide(name, revision)
    _check_folder(folder, name)
    loaded = [_version(path) for path in _weight_files(folder)]
    try:
        model, config = load_weights(folder, lazy=True)
        tokenizer = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # mlx-lm and transformers raise whatever their parsers do
        raise ModelError(f"model {name!r} cannot be loaded: {type(error).__name__}: {_one_line(error)}") from error
    if dtype == "auto":
        dtype = "stored" if mx.default_device() == mx.gpu else "float32"
    if dtype != "stored":
        model = in_dtype(model, getattr(mx, dtype))
    mx.eval(model.parameters())
    digest = weights_digest(folder)
    if loaded != [_version(path) for path in _weight_files(folder)]:
        raise ModelError(f"model {name!r}: its weights changed while they were loaded; load it again")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=_recorded_revision(name, revision),
        weights_digest=digest,
        dtype=_describe_dtype(model),
        config=config,
        origin=origin,
    )


def local_tokenizer(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a model that is on this machine; None where it would have to be downloaded first.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    try:
        hub = name != EMBEDDED and not Path(name).is_dir()
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True)) if hub else _provide(name, revision)
    except LocalEntryNotFoundError:
        return None
    try:
        return load_tokenizer(folder, {"trust_remote_code": False})
    except Exception as error:  # transformers raises whatever its parsers do
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {_one_line(error)}") from error


def check_model(name: str = EMBEDDED, revision: str | None = None) -> None:
    """Find out in a moment whether :func:`load_model` can succeed; nothing is downloaded or converted.

    Raises:
        ModelError: it cannot; one sentence says why and what to do.
    """
    _require_cache_dir()
    if name == EMBEDDED:
        _check_embedded(revision)
    elif Path(name).is_dir():
        if revision is not None:
            raise ModelError(f"revision={revision!r}: {name!r} is a folder, which has no revisions; leave it out")
        _check_folder(Path(name), name)
    else:
        _require_hub_id(name)
        _check_hub(name, revision)


def find_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a Hugging Face id at which a branch or tag is now; None for what has no commits.

    Without network it is that of the copy which was downloaded last.

    Args:
        name: As for :func:`load_model`.
        revision: A branch, tag or commit; None is the main branch.

    Raises:
        ModelError: there is no such model or revision, or nobody knows.
    """
    if name == EMBEDDED or Path(name).is_dir():
        return None
    _require_hub_id(name)
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    try:
        return HfApi().model_info(name, revision=revision, timeout=20).sha
    except Exception as error:  # the HTTP library's own errors come through
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True)).name
        except (LocalEntryNotFoundError, HFValidationError):
            raise _hub_error(name, revision, error) from error


def _require_cache_dir() -> None:
    """Make the project's cache folder, where models and digests are kept."""
    folder = embedded.cache_dir()
    remedy = "set KIVI_CACHE_DIR to a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder}: {error.strerror}; {remedy}") from None
    if not os.access(folder, os.W_OK):
        raise ModelError(f"{folder}: cannot be written; {remedy}")


def read_config(name: str = EMBEDDED, revision: str | None = None) -> dict[str, Any]:
    """Return the config of a model, which is all of it that is read, and downloaded if it is on Hugging Face.

    Args:
        name: As for :func:`load_model`.
        revision: A branch, tag or commit of a Hugging Face id; None is its main branch.

    Raises:
        ModelError: there is none, or mlx-lm does not know such a model.
    """
    folder = Path(name)
    if name == EMBEDDED:
        _check_embedded(revision)
        folder = embedded.provide()
    elif not folder.is_dir():
        _require_hub_id(name)
        try:
            folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
        except Exception as error:  # the HTTP library's own errors come through
            raise _hub_error(name, revision, error) from error
    _check_config(folder, name)
    config: dict[str, Any] = load_config(folder)
    return config


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the safetensors files in ``folder``.

    Hashing a large model takes seconds to minutes, so each file's digest is remembered by its path, size, times
    and inode, in the project's cache folder. The time of change cannot be set, so a file that was changed has another.
    """
    memory = embedded.cache_dir() / "digests.json"
    memory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(memory.with_suffix(".lock")):
        known = _known_digests(memory)
        total = hashlib.sha256()
        fresh = dict(known)
        for path in _weight_files(folder):
            key = _version(path)
            if key not in fresh:
                with path.open("rb") as file:
                    fresh[key] = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.name} {fresh[key]}\n".encode())
        if fresh != known:
            write_whole(memory, json.dumps(fresh, indent=0))
    return total.hexdigest()


def _known_digests(memory: Path) -> dict[str, str]:
    """Return what is remembered: nothing where the file is missing, empty or damaged, since hashing again mends it."""
    try:
        known = json.loads(memory.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _version(path: Path) -> str:
    """Return what changes whenever the file's content does."""
    stat = path.stat()
    return f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}"


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _provide(name: str, revision: str | None) -> Path:
    if name == EMBEDDED:
        return embedded.provide()
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the HTTP library's own errors come through
        raise _hub_error(name, revision, error) from error


def _recorded_revision(name: str, revision: str | None) -> str:
    if name == EMBEDDED:
        return embedded.revision()
    return revision or "folder"


def _check_embedded(revision: str | None) -> None:
    try:
        embedded.gguf_path()
        installed = embedded.revision()
    except embedded.EmbeddedModelError as error:
        raise ModelError(str(error)) from None
    if revision not in (None, installed):
        raise ModelError(f"revision={revision!r}: the embedded model is {installed!r}; leave it out")


def _require_hub_id(name: str) -> None:
    if not HUB_ID.fullmatch(name) or Path(name).exists():
        raise ModelError(
            f"model {name!r}: neither {EMBEDDED!r}, nor a folder that exists, nor a Hugging Face id such as org/model"
        )


def _check_hub(name: str, revision: str | None) -> None:
    if revision is None or not COMMIT.fullmatch(revision):
        raise ModelError(
            f"model {name!r}, revision={revision!r}: pin a commit (40 hex digits), so that it means the same weights next night"
        )
    try:
        snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, local_files_only=True)
        return
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not here yet, or not all of it: ask the hub
    try:
        HfApi().auth_check(name)
        HfApi().model_info(name, revision=revision, timeout=20)
    except Exception as error:  # the HTTP library's own errors come through
        raise _hub_error(name, revision, error) from error


def _hub_error(name: str, revision: str | None, error: Exception) -> ModelError:
    if isinstance(error, GatedRepoError):
        why = "is gated: accept its terms on Hugging Face and log in with `hf auth login`"
    elif isinstance(error, RevisionNotFoundError):
        why = f"has no revision {revision}"
    elif isinstance(error, RepositoryNotFoundError):
        why = "does not exist on Hugging Face, or is private: check the name, or log in with `hf auth login`"
    else:
        why = f"is not in the local cache and Hugging Face gave {type(error).__name__}: download it first, or give a folder"
    return ModelError(f"model {name!r} {why}")


def _check_folder(folder: Path, name: str) -> None:
    """Refuse what mlx-lm would stumble over later, would wait for without end, or would have to run code for."""
    for path in folder.iterdir():
        if not (path.is_file() or path.is_dir()):
            raise ModelError(f"model {name!r}: {path.name} is neither a file nor a folder, and reading it may never end")
    _check_config(folder, name)
    present = {path.name for path in _weight_files(folder)}
    if not present:
        raise ModelError(f"model {name!r} is incomplete: no model*.safetensors in {str(folder)!r}")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        missing = sorted(set(_read_json(index, name).get("weight_map", {}).values()) - present)
        if missing:
            raise ModelError(f"model {name!r} is incomplete: {missing[0]} is missing ({len(missing)} of its files are)")
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise ModelError(f"model {name!r} is incomplete: no tokenizer ({', '.join(TOKENIZER_FILES)})")


def _check_config(folder: Path, name: str) -> None:
    config = _read_json(folder / "config.json", name)
    if "model_file" in config:
        raise ModelError(f"model {name!r} wants to run code of its own, which is never done")
    kind = config.get("model_type")
    module = MODEL_REMAPPING.get(kind, kind) if isinstance(kind, str) else None
    if module is None or not re.fullmatch(r"[\w-]+", module) or importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
        raise ModelError(f"model {name!r}: mlx-lm knows no model_type {kind!r}")


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model {name!r} is incomplete: no {path.name} in {str(path.parent)!r}") from None
    except ValueError as error:
        raise ModelError(f"model {name!r}: {path.name} is not JSON: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model {name!r}: {path.name} holds no JSON object")
    return content


def in_dtype(model: Module, dtype: mx.Dtype) -> Module:
    """Return ``model`` with all weights in ``dtype``: dequantised in float32, so that none is rounded twice, then cast."""
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.set_dtype(dtype)
    return model


def _describe_dtype(model: Any) -> str:
    parameters = dict(tree_flatten(model.parameters())).values()
    dtype = dtype_name(next(p.dtype for p in parameters if mx.issubdtype(p.dtype, mx.floating)))
    bits = [module.bits for module in model.modules() if isinstance(module, QuantizedLinear)]
    return f"{max(set(bits), key=bits.count)}bit-{dtype}" if bits else dtype


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
