"""The typed, versioned result of one cell: JSON both ways, NaN and infinity refused.

Every number carries its unit and whether higher is better in its field's schema, so that tables, MLflow and the gate read
them from one place (:func:`metric_fields`). Its type says what it can be at all, so that no share of 3 is read from a file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import AwareDatetime, Field, NonNegativeFloat, PositiveFloat

from kivi.accounting import CacheBytes
from kivi.measure.answers.scorers import ScorerName
from kivi.measure.perplexity import PerplexityStatistics
from kivi.measure.records import Cosine, Count, Divergence, Interval, Record, Several, Share, Text, metric, optional_metric
from kivi.measure.settings import MeasureSettings
from kivi.spec import CacheSpec


class DepthBucket(Record):
    """Quality of the scored positions ``start <= position < stop``."""

    start: Count
    stop: Several
    positions: Several
    kl_mean: Divergence
    flip_rate: Share


class StepCheck(Record):
    """The same positions of the first sequence, scored one token a call as decoding does, and in chunks."""

    positions: Several
    kl_mean_steps: Divergence
    kl_mean_chunks: Divergence
    largest_difference: NonNegativeFloat = Field(description="of the two KLs at one position, nats")


class Quality(Record):
    """Distance from the full-precision cache, teacher-forced on the same tokens.

    Over the scored positions whose query can see at least one quantised key; for a cache that never quantises, over all.
    """

    kl_mean: Divergence = metric("mean KL divergence from the full cache", "nats", higher_is_better=False)
    kl_median: Divergence = metric("median KL divergence", "nats", higher_is_better=False)
    kl_p99: Divergence = metric("99th percentile of the KL divergence", "nats", higher_is_better=False)
    kl_max: Divergence = metric("largest KL divergence", "nats", higher_is_better=False)
    flip_rate: Share = metric("share of positions whose top token changes", "1", higher_is_better=False)
    perplexity: PositiveFloat = metric("perplexity with this cache", "1", higher_is_better=False)
    perplexity_full: PositiveFloat = metric("perplexity with the full cache on the same positions", "1", higher_is_better=None)
    coverage: Share = metric("share of scored positions that see a quantised key", "1", higher_is_better=None)
    positions: Several = metric("positions that the figures are over", "tokens", higher_is_better=None)
    sequences: Several = metric("sequences scored", "1", higher_is_better=None)
    kl_interval: Interval | None = None
    flip_interval: Interval | None = None
    by_depth: list[DepthBucket] = Field([])
    sequence_kl: list[Divergence] = Field(
        [], description="mean KL of each sequence or block, in order: the gate's paired samples"
    )
    sequence_flips: list[Share] = Field([], description="flip rate of each sequence or block, in order")
    step_check: StepCheck | None = None
    statistics: PerplexityStatistics | None = Field(None, description="over the same positions, as llama-perplexity has them")
    control_kl_mean: Divergence | None = optional_metric(
        "mean KL from the full cache of the same codes, dequantised: the quantiser's error", "nats", higher_is_better=False
    )
    control_flip_rate: Share | None = optional_metric(
        "share of positions whose top token changes, same codes dequantised", "1", higher_is_better=False
    )
    kernel_kl_mean: Divergence | None = optional_metric(
        "mean KL from the dequantised codes to attention on codes: the kernels' error", "nats", higher_is_better=False
    )


class Continuation(Record):
    """One prompt continued by both caches, greedily."""

    prompt_tail: str
    reference: str
    text: str
    agreement: Share
    first_divergence: Count | None


class Generation(Record):
    """Free-running trajectories, and logits on the reference's trajectory. Trajectories are not a measure of cache error."""

    token_agreement: Share = metric("share of generated tokens equal to the full cache's", "1", higher_is_better=True)
    first_divergence: NonNegativeFloat = metric(
        "mean step of the first different token (steps, if none)", "steps", higher_is_better=True
    )
    repetition_rate: Share = metric("share of generated 4-grams that repeat an earlier one", "1", higher_is_better=False)
    steps: Several = metric("tokens generated a prompt", "tokens", higher_is_better=None)
    context: Several = metric("prompt tokens", "tokens", higher_is_better=None)
    logit_cosine: list[Cosine] = Field([], description="cosine to the full cache's logits by decode step, teacher-forced")
    logit_cosine_free: list[Cosine] = Field([], description="the same, free-running: cache error and divergence together")
    step_kl: list[Divergence] = Field([], description="KL by decode step, teacher-forced")
    continuations: list[Continuation] = Field([])


class Timing(Record):
    """Rates over rounds: median, extremes, and each round's value in order."""

    median: PositiveFloat
    minimum: PositiveFloat
    maximum: PositiveFloat
    rounds: list[PositiveFloat]

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Timing:
        """Return that of at least one round."""
        return cls(median=statistics.median(rounds), minimum=min(rounds), maximum=max(rounds), rounds=list(rounds))

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (self.maximum - self.minimum) / self.median


class ContextThroughput(Record):
    """Timings at one context length; ratios pair each round with the full cache's round."""

    context: Several
    prefill_tps: Timing
    decode_tps: Timing
    time_to_first_token_s: Timing
    prefill_ratio: Timing
    decode_ratio: Timing
    prefill_ratio_interval: Interval | None = Field(None, description="95 % interval of the rounds' geometric mean")
    decode_ratio_interval: Interval | None = Field(None, description="95 % interval of the rounds' geometric mean")


class Throughput(Record):
    """Speed beside the full cache, arms interleaved. The scalar figures are medians at the longest context."""

    prefill_tps: PositiveFloat = metric("prompt tokens a second", "tokens/s", higher_is_better=True)
    decode_tps: PositiveFloat = metric("generated tokens a second", "tokens/s", higher_is_better=True)
    prefill_ratio: PositiveFloat = metric("prefill speed over the full cache's, same round", "1", higher_is_better=True)
    decode_ratio: PositiveFloat = metric("decode speed over the full cache's, same round", "1", higher_is_better=True)
    baseline_spread: NonNegativeFloat = metric(
        "(max - min) / median of the full cache's own decode", "1", higher_is_better=None
    )
    host_ms: PositiveFloat | None = optional_metric(
        "Python's part of a decode step, building its graph", "ms", higher_is_better=False
    )
    host_ms_full: PositiveFloat | None = optional_metric("the same with the full cache", "ms", higher_is_better=None)
    peak_bytes: Count | None = optional_metric("MLX's peak in a process of this cache alone", "bytes", higher_is_better=False)
    process_peak_bytes: Count | None = optional_metric(
        "largest resident set of a process of this cache alone, model and loading included", "bytes", higher_is_better=None
    )
    contexts: list[ContextThroughput] = Field([])


class Answer(Record):
    """One question, what each cache went on with up to where the scorer cuts, and how right that is."""

    prompt_tail: str
    expected: str
    text: str
    text_full: str
    score: Share
    score_full: Share
    logprob: float | None = Field(None, description="log-probability of the right answer, fed token by token, nats")
    logprob_full: float | None = Field(None, description="the same with the full cache")
    tokens: Several = Field(description="of the prompt, examples included")
    depth: Share | None = Field(None, description="where in the text the fact stands, as a share")


class AnswerBucket(Record):
    """The questions of one depth whose prompt has at most ``length`` tokens and more than half of that."""

    length: Several
    depth: Share | None
    questions: Several
    accuracy: Share
    accuracy_full: Share
    logprob_difference: float | None = None


class Answers(Record):
    """Questions with right answers, and all that decides how they were asked."""

    accuracy: Share = metric("mean score of the answers with this cache", "1", higher_is_better=True)
    accuracy_full: Share = metric("mean score with the full cache, same questions", "1", higher_is_better=True)
    questions: Several = metric("questions asked", "1", higher_is_better=None)
    difference_interval: Interval | None = Field(None, description="of accuracy - accuracy_full, over the same questions")
    logprob_difference: float | None = optional_metric(
        "mean log-probability of the right answer, with this cache minus with the full one", "nats", higher_is_better=True
    )
    logprob_worst: float | None = optional_metric("the same of the question that lost most", "nats", higher_is_better=True)
    logprob_interval: Interval | None = Field(None, description="of logprob_difference, over the same questions")
    scorer: ScorerName
    tokens: Several = Field(description="most tokens of an answer")
    examples: list[str] = Field([], description="few-shot examples before each question, as they were given")
    chat_template: str | None = Field(None, description="the template, where questions went through one")
    prompts_sha256: str = Field(description="digest of all prompts as tokens, in order")
    by_depth_and_length: list[AnswerBucket] = Field([])
    answers: list[Answer] = Field([])


class Memory(Record):
    """Bytes of the cache after the generation context and steps, and peaks of the process."""

    resident_bytes: Several = metric("bytes of live cache arrays", "bytes", higher_is_better=False)
    accounted_bytes: Count = metric("bytes that the cache accounts for", "bytes", higher_is_better=False)
    full_bytes: Count = metric("bytes of the same tokens in full precision", "bytes", higher_is_better=None)
    compression: PositiveFloat = metric("full precision over resident", "1", higher_is_better=True)
    bytes_per_token: PositiveFloat = metric("resident bytes a token, all layers", "bytes", higher_is_better=False)
    bytes_per_token_4096: PositiveFloat | None = optional_metric(
        "bytes a token, all layers, of one sequence of 4,096 tokens: counted", "bytes", higher_is_better=False
    )
    bytes_per_token_32768: PositiveFloat | None = optional_metric(
        "bytes a token, all layers, of one sequence of 32,768 tokens: counted", "bytes", higher_is_better=False
    )
    peak_prefill_bytes: Count = metric("MLX's peak during prefill", "bytes", higher_is_better=False)
    peak_decode_bytes: Count = metric("MLX's peak during decode", "bytes", higher_is_better=False)
    process_peak_bytes: Count = metric("largest resident set of the process so far", "bytes", higher_is_better=None)
    tokens: Several = metric("tokens in the cache, over all rows", "tokens", higher_is_better=None)
    growth_bytes: int | None = optional_metric(
        "growth of MLX's active memory since before the caches were made", "bytes", higher_is_better=None
    )
    held_bytes: Count | None = optional_metric(
        "bytes of every array reachable from the caches, found without asking them", "bytes", higher_is_better=None
    )
    layer_bytes: list[Count] = Field([], description="resident bytes of each layer, in order")


class Accounting(Record):
    """The seven figures of the cache's byte accounting, from token counts."""

    compressed_key_bytes: Count = metric("quantised keys: codes, scales and zeros", "bytes", higher_is_better=False)
    full_key_bytes: Count = metric("all keys in full precision", "bytes", higher_is_better=None)
    compressed_value_bytes: Count = metric("quantised values: codes, scales and zeros", "bytes", higher_is_better=False)
    full_value_bytes: Count = metric("all values in full precision", "bytes", higher_is_better=None)
    residual_bytes: Count = metric("tokens kept in full precision", "bytes", higher_is_better=False)
    average_bits: PositiveFloat = metric(
        "bits of a number in the quantised region, parameters included", "bits", higher_is_better=False
    )
    compression_ratio: PositiveFloat = metric("full precision over accounted bytes", "1", higher_is_better=True)


class Finding(Record):
    """Something an audit saw."""

    name: str
    severity: Literal["info", "warning", "error"]
    evidence: str
    command: str = ""


class Audit(Record):
    """Whether the cell's caches hold what they report, and what was found."""

    passed: bool
    findings: list[Finding] = Field([])
    bytes: CacheBytes


class Provenance(Record):
    """What produced the result; hardware by kind, never by host name."""

    started: AwareDatetime
    seconds: dict[str, NonNegativeFloat]
    model: Text
    model_revision: str
    weights_digest: str
    model_dtype: str
    prompt_set: Text
    prompt_sha256: str
    settings: MeasureSettings
    spec: CacheSpec
    backend: str
    backend_reason: str
    device: str
    blas: str
    packages: dict[str, str]
    git_sha: str
    git_dirty: bool
    layers_quantized: Count
    layers_kept: dict[str, str] = Field({}, description="layers that keep their own cache, and why")
    coverage_note: str = Field(description="what the cell covered, in a sentence")


class CellResult(Record):
    """One cell: one model, one prompt set, one spec."""

    schema_version: Literal[1] = 1
    cell_key: str
    quality: Quality
    generation: Generation
    throughput: Throughput | None = Field(None, description="None until the interleaved timing of all caches has run")
    answers: Answers | None = Field(None, description="None where no questions are asked")
    memory: Memory
    accounting: Accounting
    audit: Audit
    provenance: Provenance

    @property
    def spec(self) -> CacheSpec:
        return self.provenance.spec


class MetricField(NamedTuple):
    """A measured number's name, e.g. ``quality.kl_mean``, with what its schema says."""

    name: str
    description: str
    unit: str
    higher_is_better: bool | None


FAMILIES: dict[str, type[Record]] = {
    "quality": Quality,
    "generation": Generation,
    "answers": Answers,
    "throughput": Throughput,
    "memory": Memory,
    "accounting": Accounting,
}


def metric_fields() -> list[MetricField]:
    """Return every metric of the schema, in the order of the schema."""
    fields = []
    for family, record in FAMILIES.items():
        for name, field in record.model_fields.items():
            extra: Any = field.json_schema_extra
            if extra:
                fields.append(
                    MetricField(f"{family}.{name}", field.description or "", extra["unit"], extra["higher_is_better"])
                )
    return fields


def metric_values(result: CellResult) -> Iterator[tuple[str, float]]:
    """Yield the name and value of every metric that ``result`` holds, and ``audit.passed`` as 0 or 1."""
    for field in metric_fields():
        family, name = field.name.split(".")
        value = getattr(getattr(result, family), name, None)
        if value is not None:
            yield field.name, float(value)
    yield "audit.passed", float(result.audit.passed)
