"""From a configuration to cells: what runs, under which key, and what is skipped and why."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field

import kivi
from kivi import machine
from kivi.backends import available, resolve
from kivi.measure.settings import MeasureSettings
from kivi.models import LoadedModel
from kivi.spec import BackendName, CacheSpec
from tasks.config import Config, ConfigError, ModelConfig, NightlyConfig
from tasks.prompts.prompt_sets import PromptSet

KINDS_WITH_BACKEND = ("kivi", "kivi-roundtrip")


class ModelIdentity(Config):
    """What a loaded model is, without the model: enough to plan and to key its cells."""

    config: ModelConfig
    revision: str
    weights_digest: str
    dtype: str
    layers: int = Field(description="entries of its prompt cache, which a spec's settings by layer count")
    chat_template: str
    digest: str = Field(description="SHA-256 over configuration, tokenizer and weights digest")


class Cell(Config):
    """One model, one prompt set, one spec: all that it takes to measure it, and the key of its result."""

    key: str = Field(description="content hash of everything that changes the result")
    label: str = Field(description="what a person reads, e.g. kivi-k2v2-g32-r128-mlx on embedded × humaneval")
    model: ModelConfig
    prompt_set: str
    prompt_sha256: str
    spec: CacheSpec = Field(description="its backend resolved, never auto")
    settings: MeasureSettings


class Circumstances(Config):
    """What a cell's key holds beside the cell: who measures with what."""

    device: tuple[str, str] = Field(description="class of device, and its BLAS")
    packages: dict[str, str] = Field(description="versions")
    code: str = Field(description="hash of the sources that can change a result")


def circumstances() -> Circumstances:
    """Return what this machine would measure with."""
    return Circumstances(device=(machine.device(), kivi.BLAS), packages=machine.packages(), code=code_version())


class Skipped(Config):
    """A cell that is left out, and why."""

    what: str
    why: str


class Plan(Config):
    """What a night will do, cells of one model and prompt set in a row."""

    cells: tuple[Cell, ...]
    skipped: tuple[Skipped, ...] = ()

    @property
    def groups(self) -> list[tuple[Cell, ...]]:
        """Cells of the same model and prompt set: those that are timed interleaved."""
        grouped: dict[tuple[ModelConfig, str], list[Cell]] = {}
        for cell in self.cells:
            grouped.setdefault((cell.model, cell.prompt_set), []).append(cell)
        return [tuple(cells) for cells in grouped.values()]


def identify(config: ModelConfig, loaded: LoadedModel) -> ModelIdentity:
    """Return what ``loaded`` is. The weights digest does not cover configuration and tokenizer, so they are added."""
    tokenizer = loaded.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have none
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return ModelIdentity(
        config=config,
        revision=loaded.revision,
        weights_digest=loaded.weights_digest,
        dtype=loaded.dtype,
        layers=len(kivi.make_prompt_cache(loaded.model, CacheSpec(kind="full"))),
        chat_template=str(getattr(tokenizer, "chat_template", None) or ""),
        digest=content_hash([loaded.weights_digest, loaded.config, rules]),
    )


def resolve_specs(config: NightlyConfig) -> tuple[tuple[CacheSpec, ...], tuple[Skipped, ...]]:
    """Return the specs with their backends chosen, and what this machine cannot run. Needs no model.

    A backend that a spec itself names is required; one of ``config.backends`` is run where it can be.

    Raises:
        BackendError: a required backend is not available.
    """
    chosen: dict[str, CacheSpec] = {}
    skipped = []
    for spec in config.specs:
        for candidate in _on_backends(spec, config):
            if config.backends and candidate.kind in KINDS_WITH_BACKEND and candidate.backend != "auto":
                availability = available(candidate.backend)
                if not availability.ok:
                    skipped.append(Skipped(what=candidate.slug, why=f"backend {candidate.backend}: {availability.reason}"))
                    continue
            resolved = resolve_spec(candidate)
            if resolved.slug in chosen:
                skipped.append(Skipped(what=candidate.slug, why=f"the same cache as {resolved.slug}, which is planned already"))
                continue
            chosen[resolved.slug] = resolved
    return tuple(chosen.values()), tuple(skipped)


def resolve_spec(spec: CacheSpec) -> CacheSpec:
    """Return ``spec`` with the backend that ``auto`` takes on this machine.

    Raises:
        BackendError: the backend that it names is not available.
    """
    if spec.kind not in KINDS_WITH_BACKEND:
        return spec
    return _with_backend(spec, resolve(spec.backend).name)


def check_thresholds(config: NightlyConfig) -> None:
    """Refuse limits that no cache of the matrix has, whatever the backend: nothing would be held to them. Needs no model.

    An evaluation is not asked: the limits of a whole matrix may be given to it.

    Raises:
        ConfigError: a pattern of ``thresholds`` matches none of the slugs.
        BackendError: one matches none, and a required backend is not available.
    """
    backends = [name for name in get_args(BackendName) if name != "auto"]
    slugs = [spec.model_copy(update={"backend": name}).slug for spec in config.specs for name in backends]
    for pattern in config.thresholds:
        if not any(fnmatch.fnmatchcase(slug, pattern) for slug in slugs):
            here = ", ".join(spec.slug for spec in resolve_specs(config)[0])
            raise ConfigError(f"thresholds: {pattern!r} matches no cache of this matrix; they go by their slugs, here {here}")


def _on_backends(spec: CacheSpec, config: NightlyConfig) -> list[CacheSpec]:
    if not config.backends or spec.kind not in KINDS_WITH_BACKEND:
        return [spec]
    return [_with_backend(spec, backend) for backend in config.backends]


def _with_backend(spec: CacheSpec, backend: str) -> CacheSpec:
    return CacheSpec.model_validate({**spec.model_dump(), "backend": backend})


def plan(config: NightlyConfig, prompt_sets: Sequence[PromptSet], models: Sequence[ModelIdentity], *, night: str = "") -> Plan:
    """Return the cells of a night: every model with every prompt set, spec and backend.

    Args:
        config: The matrix.
        prompt_sets: The loaded prompt sets.
        models: The models, identified.
        night: The scheduled start of the night, or another name for it; the same name finds the same results again.

    Raises:
        BackendError: a required backend is not available.
        SpecError: a spec names a layer that a model does not have.
    """
    specs, skipped = resolve_specs(config)
    for spec in specs:
        for model in models:
            spec.for_layer(0, model.layers)
    settings = {prompts.name: config.settings_for(prompts) for prompts in config.prompt_sets}
    cells = [
        Cell(
            key=cell_key(model, prompts, spec, settings[prompts.name], night=night),
            label=f"{spec.slug} on {_model_label(model)} × {prompts.name}",
            model=model.config,
            prompt_set=prompts.name,
            prompt_sha256=prompts.sha256,
            spec=spec,
            settings=settings[prompts.name],
        )
        for model in models
        for prompts in prompt_sets
        for spec in specs
    ]
    chosen: dict[str, Cell] = {}
    for cell in cells:
        if (first := chosen.setdefault(cell.key, cell)) is not cell:
            skipped += (Skipped(what=cell.label, why=f"the same as {first.label}, which is planned already"),)
    return Plan(cells=tuple(chosen.values()), skipped=skipped)


def _model_label(model: ModelIdentity) -> str:
    given = model.config.dtype
    return model.config.name if given == "auto" else f"{model.config.name} ({given})"


def cell_key(model: ModelIdentity, prompts: PromptSet, spec: CacheSpec, settings: MeasureSettings, *, night: str = "") -> str:
    """Return the content hash, 32 hexadecimal digits, of everything that changes a cell's result.

    The model (name, revision, weights, configuration, tokenizer, dtype), the prompts' rows (and the chat template that chats
    go through), the spec with its backend, what is measured, the versions of packages and code, device and BLAS, and the
    night. Not the clock, and not the deadline, which decides only whether there is a result.
    """
    chats = prompts.chats or (settings.answers is not None and settings.answers.chat)
    return content_hash(
        {
            "model": [model.config.name, model.revision, model.digest, model.dtype],
            "prompts": [prompts.name, prompts.sha256, model.chat_template if chats else ""],
            "spec": spec.model_dump(mode="json"),
            "measure": settings.model_dump(mode="json", exclude={"deadline_s"}),
            **circumstances().model_dump(mode="json"),
            "night": night,
        }
    )


def content_hash(content: Any) -> str:
    """Return 32 hexadecimal digits of the SHA-256 of ``content`` as canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def code_version() -> str:
    """Return a hash of the sources that can change a result: the library, kernels included, and the steps up to a result."""
    library = Path(kivi.__file__).parent
    sources = sorted(path for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    sources += [Path(__file__).with_name("cells.py"), Path(inspect.getfile(PromptSet))]
    total = hashlib.sha256()
    for path in sources:
        total.update(f"{path.relative_to(library.parent)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
