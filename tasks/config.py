"""What a night measures: the typed configuration of flows, read from YAML or from Prefect's form.

Every field has a description and bounds, because Prefect shows them in its form and refuses other values on the server.
"""

from __future__ import annotations

import fnmatch
import string
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kivi import fields
from kivi.measure.settings import AnswerSettings, MeasureSettings, ScoreSettings
from kivi.spec import BackendName, CacheSpec, reason

GENERATED = (  # prompt sets that are made from a seed
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "schema", "copying", "arithmetic"),
)
WITH_ANSWERS = ("humaneval", "retrieval", *GENERATED)
BUILT_IN = (*WITH_ANSWERS, "topics")  # prompt sets that need no network


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence that names the file and the field."""


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Config):
    """A model to measure. A string stands for its name, ``NAME@REVISION`` for a pinned one."""

    name: str = Field("embedded", min_length=1, description="embedded, a folder in mlx-lm's format, or a Hugging Face id")
    revision: str | None = Field(None, description="commit of a Hugging Face id, 40 hex digits; nothing else has one")
    dtype: Literal["auto", "stored", "float32", "float16", "bfloat16"] = Field(
        "auto", description="dtype to run in; stored: the weights as they are; auto: float32 on a CPU, stored on a GPU"
    )


class PromptSetConfig(Config):
    """Where prompts come from and how rows become texts. A string stands for a built-in set, a hub id or a local path.

    A row's text is ``column``, or ``template`` filled from several columns, or the chat in the column ``messages``.
    """

    name: str = Field("", description="name in tables and runs; by default the last part of the source")
    source: str = Field(
        min_length=1,
        description="humaneval, retrieval, topics, a generated task such as niah_single_2 (docs/measurements.md has them all), "
        "a Hugging Face id, or a local json, jsonl, gz, parquet file or folder",
    )
    config: str | None = Field(None, description="configuration (subset) of a Hugging Face id")
    split: str = Field("train", min_length=1, description="split; local files have the one split train")
    revision: str | None = Field(None, description="commit of a Hugging Face id, 40 hex digits; nothing else has one")
    column: str | None = Field(None, min_length=1, description="column that holds the text")
    template: str | None = Field(None, min_length=1, description="text from several columns, e.g. {question}\\n{answer}")
    messages: str | None = Field(None, min_length=1, description="column of chat messages: a list of role and content")
    limit: int | None = Field(None, ge=1, description="rows to take, from the first")
    length: int | None = Field(
        None, ge=64, le=1_048_576, description="tokens of each text of a generated task, at most; 2,048 by default"
    )
    seed: int | None = Field(None, ge=0, description="seed of a generated task; 0 by default")
    chat_template: bool = Field(False, description="wrap each text in the model's chat template")
    score: ScoreSettings | None = Field(None, description="what is scored on this set, where it differs from the night's")
    answer: str | None = Field(None, min_length=1, description="column that holds the right answer, which each text ends with")
    answers: AnswerSettings | None = Field(None, description="how its questions are asked; the built-in sets have answers")

    @model_validator(mode="before")
    @classmethod
    def _name_after_source(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and not fields.get("name") and isinstance(fields.get("source"), str):
            last = fields["source"].rstrip("/").split("/")[-1]
            return {**fields, "name": last.split(".")[0] or last}
        return fields

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if Path(self.source).name in {"", ".."}:
            raise ValueError(f"source={self.source!r}: give the folder or file of the rows by its own name")
        given = [name for name in ("column", "template", "messages") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: a row's text comes from one of them")
        if not given and self.source not in BUILT_IN:
            raise ValueError(f"source={self.source!r} needs column, template or messages, to say what a row's text is")
        if self.template is not None:
            template_columns(self.template)
        own = [name for name in ("length", "seed") if getattr(self, name) is not None]
        if own and self.source not in GENERATED:
            raise ValueError(f"{' and '.join(own)} cannot be chosen for {self.source!r}, which is not a generated task")
        if self.answers is not None and (self.messages or self.chat_template):
            raise ValueError("answers are cut off texts: give a column or template, and chat: true within answers")
        if self.answers is not None and self.answer is None and (given or self.source not in WITH_ANSWERS):
            raise ValueError("answers are to be scored: name the column that holds the right one, with answer")
        return self

    @property
    def built_in(self) -> bool:
        """Whether the set comes with the project and needs no network."""
        return self.source in BUILT_IN


def template_columns(template: str) -> list[str]:
    """Return the columns that ``template`` names, each as ``{column}``.

    Raises:
        ValueError: a brace stands alone, or a column comes with a conversion or a format.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template={template!r}: {error}; a brace that is meant is written twice") from None
    for _, name, form, conversion in parts:
        if form or conversion:
            raise ValueError(f"template={template!r}: {{{name}}} is filled in as it is, without a conversion or a format")
    return [name for _, name, _, _ in parts if name is not None]


TierMetric = Literal["kl_mean", "kl_p99", "flip_rate"]


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    good, marginal = bounds
    if not 0 <= good <= marginal:
        raise ValueError(f"[{good:g}, {marginal:g}]: expected two numbers that do not fall, neither below 0")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_check_bounds)]


class Thresholds(Config):
    """Absolute limits of one spec, a limit left out is not checked; and the bounds of its tiers, which fail nothing."""

    kl_mean: float | None = Field(None, ge=0, description="largest mean KL from the full cache, nats")
    kl_p99: float | None = Field(None, ge=0, description="largest 99th percentile of the KL, nats")
    flip_rate: float | None = Field(None, ge=0, le=1, description="largest share of positions whose top token changes")
    token_agreement: float | None = Field(None, ge=0, le=1, description="smallest share of generated tokens that agree")
    accuracy: float | None = Field(None, ge=0, le=1, description="smallest share of right answers")
    compression: float | None = Field(None, ge=0, description="smallest compression, full precision over resident bytes")
    prefill_ratio: float | None = Field(None, ge=0, description="smallest prefill speed over the full cache's")
    decode_ratio: float | None = Field(None, ge=0, description="smallest decode speed over the full cache's")
    tiers: dict[TierMetric, Bounds] = Field(
        default_factory=dict, description="good up to the first number, marginal up to the second, bad above; shown, not gated"
    )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, without the tiers."""
        return self.model_dump(exclude_none=True, exclude={"tiers"})

    def merged(self, other: Thresholds) -> Thresholds:
        """Return these limits and tiers, those that ``other`` sets replaced by its own."""
        return self.model_copy(update={**other.limits, "tiers": {**self.tiers, **other.tiers}})


class Tolerances(Config):
    """How much may change for the worse, as a share of what it was; bytes may not."""

    kl_mean: float = Field(0.10, ge=0, le=10, description="rise of the mean KL, of at least 1e-4 nats, that is tolerated")
    flip_rate: float = Field(0.15, ge=0, le=10, description="rise of the flip rate, of at least 2 %, that is tolerated")
    speed: float = Field(0.10, ge=0, le=10, description="fall of a ratio of speeds that is tolerated")
    false_discovery_rate: float = Field(0.01, gt=0, lt=1, description="chance of a false alarm in a night without a change")
    seed: int = Field(0, ge=0, description="seed of the signs and resamples that are drawn")


# From figures measured with the embedded model in float32, R=128, G=32, on 1,024 tokens of prose and of HumanEval: mean KL of
# KIVI at 2, 4 and 8 bits 0.198 and 0.122, 0.0027 and 0.0035, below 0.0001 and 0.00001; flips 24 and 13, 2.4 and 2.1, 0.5 and
# 0.4 %; keys at 4 and values at 2 bits 0.0225, 7.6 % (prose). mlx-lm's own at 2 and 4 bits 2.31 and 2.97, 0.057 and 0.053;
# 74 and 74, 15 and 9 %; at 8 bits 0.0002, 1.4 % (prose). Limits are two to three times as much: texts differ by about two,
# real defects by more. Near zero they leave room for the noise of 16-bit floats.
DEFAULT_THRESHOLDS: dict[str, Thresholds] = {
    "*": Thresholds(tiers={"kl_mean": (0.01, 0.10), "kl_p99": (0.10, 1.00), "flip_rate": (0.01, 0.05)}),
    "full": Thresholds(kl_mean=0.001, flip_rate=0.01),
    "kivi*-k2v2-*": Thresholds(kl_mean=0.4, flip_rate=0.35),
    "kivi*-k4v4-*": Thresholds(kl_mean=0.01, flip_rate=0.06),
    "kivi*-k3v2-*": Thresholds(kl_mean=0.1, flip_rate=0.2),
    "kivi*-k3v3-*": Thresholds(kl_mean=0.06, flip_rate=0.15),
    "kivi*-k4v3-*": Thresholds(kl_mean=0.02, flip_rate=0.08),
    "kivi*-k8v8-*": Thresholds(kl_mean=0.001, flip_rate=0.02),
    "kivi*-k4v2-*": Thresholds(kl_mean=0.06, flip_rate=0.15),
    "mlx-quantized-k2v2-*": Thresholds(kl_mean=6.0),
    "mlx-quantized-k3v3-*": Thresholds(kl_mean=1.0, flip_rate=0.60),
    "mlx-quantized-k4v4-*": Thresholds(kl_mean=0.2, flip_rate=0.30),
    "mlx-quantized-k8v8-*": Thresholds(kl_mean=0.001, flip_rate=0.04),
}


def split_model(text: str) -> tuple[str, str | None]:
    """Return name and revision of ``NAME@REVISION``; a folder that exists is a name, whatever its path holds."""
    if Path(text).is_dir():
        return text, None
    name, _, revision = text.partition("@")
    return name, revision or None


def _read_model(value: Any) -> Any:
    return dict(zip(("name", "revision"), split_model(value), strict=True)) if isinstance(value, str) else value


def _read_prompt_set(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def _read_spec(value: Any) -> Any:
    return CacheSpec.parse(value) if isinstance(value, str) else value


Model = Annotated[ModelConfig, BeforeValidator(_read_model, json_schema_input_type=str | ModelConfig)]
Prompts = Annotated[PromptSetConfig, BeforeValidator(_read_prompt_set, json_schema_input_type=str | PromptSetConfig)]
# What Prefect's server can check of a spec before any code of ours sees it.
SpecText = Annotated[str, Field(pattern=r"^(full|kivi|kivi-roundtrip|mlx-quantized)([:-].*)?$")]
Spec = Annotated[CacheSpec, BeforeValidator(_read_spec, json_schema_input_type=SpecText | CacheSpec)]


class NightlyConfig(Config):
    """The matrix of one night: models x prompt sets x specs x backends, how much is measured, and what passes."""

    name: str = Field("nightly", min_length=1, max_length=100, description="name of the matrix, in tables and runs")
    models: tuple[Model, ...] = Field((ModelConfig(),), min_length=1, description="models to measure")
    prompt_sets: tuple[Prompts, ...] = Field(
        (PromptSetConfig(source="humaneval"),), min_length=1, description="prompt sets to measure on"
    )
    specs: tuple[Spec, ...] = Field(
        min_length=1, description="caches, as KIND[:key=value,...], e.g. kivi:bits=2, or with all fields"
    )
    backends: tuple[BackendName, ...] = Field(
        (),
        description="run each KIVI cache on each of these, skipping those that this machine lacks; "
        "when empty each spec says itself, and what it names is required",
    )
    measure: MeasureSettings = Field(MeasureSettings(), description="how much is measured")
    fan_out: Literal["local", "workers"] = Field(
        "local", description="local: cells run one after another here; workers: each is a run of the deployment cell/cell"
    )
    queue: str | None = Field(
        None, min_length=1, description="with fan_out: workers, the work queue to use, e.g. of one class of device"
    )
    reference_gb: float = Field(
        8,
        ge=0,
        le=10_000,
        description="disk for the full cache's logits, so that cells share them; what does not fit is redone",
    )
    thresholds: dict[str, Thresholds] = Field(
        default_factory=dict, description="limits by spec: a slug, or a pattern such as kivi-k2v2-*; later ones win"
    )
    tolerances: Tolerances = Field(Tolerances(), description="what may change from the last good night and the pinned one")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.measure.answers is not None:
            raise ValueError("measure.answers: questions belong to a prompt set: give answers there")
        names = [prompts.name for prompts in self.prompt_sets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two prompt sets are called {name!r}: give each its own name")
        for model in self.models:
            if self.models.count(model) > 1:
                raise ValueError(f"models: {model.name!r} is there twice, with the same revision and dtype")
        return self

    def settings_for(self, prompts: PromptSetConfig) -> MeasureSettings:
        """Return how much is measured on a prompt set."""
        own = {"score": prompts.score, "answers": prompts.answers}
        return self.measure.model_copy(update={name: value for name, value in own.items() if value is not None})

    def thresholds_for(self, slug: str) -> Thresholds:
        """Return the limits of a spec: the defaults that match its slug, then this configuration's, field by field."""
        limits = Thresholds()
        for pattern, own in (*DEFAULT_THRESHOLDS.items(), *self.thresholds.items()):
            if fnmatch.fnmatchcase(slug, pattern):
                limits = limits.merged(own)
        return limits


def load_config(path: Path | str) -> NightlyConfig:
    """Read a matrix from a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, or has a field that cannot be used.
    """
    matrix = read_fields(Path(path), expected="a mapping with models, prompt_sets and specs")
    try:
        return NightlyConfig.model_validate(matrix)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_sentence(error)}") from None


def read_fields(path: Path, *, expected: str = "a mapping of fields") -> dict[str, Any]:
    """Read fields from a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, has a key twice, or holds something else than ``expected`` says.
    """
    try:
        return fields.read_fields(path, expected=expected)
    except fields.FieldsError as error:
        raise ConfigError(str(error)) from None


def first_sentence(error: ValidationError) -> str:
    """Return pydantic's first finding as ``field: what is wrong``."""
    first = error.errors()[0]
    # Positions are given as in Python, e.g. specs[1]; the member of a union that pydantic tried is of no use to a reader.
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return f"{where}: no such field"
    if first["type"] == "missing":
        return f"{where}: is missing"
    return f"{where}: {reason(first)}" if where else reason(first)
