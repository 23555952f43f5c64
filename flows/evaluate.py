"""The ad-hoc evaluation: a night of one model, one prompt set and a few caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from pydantic import TypeAdapter

from flows.matrix import run_matrix
from flows.results import NightResult
from kivi.build import make_prompt_cache
from kivi.measure.settings import MeasureSettings
from kivi.models.skeleton import build_skeleton
from kivi.spec import CacheSpec, SpecError
from tasks.config import Model, ModelConfig, NightlyConfig, Prompts, Spec, Thresholds
from tasks.run.night import EVALUATE


def run_name() -> str:
    """Return what a person reads, e.g. ``kivi-k2v2-g32-r128-auto on embedded``."""
    given = runtime.flow_run.parameters  # as they were given, not as they were validated
    spec, model = TypeAdapter(Spec).validate_python(given["spec"]), TypeAdapter(Model).validate_python(given["model"])
    return f"{spec.slug} on {model.name}"


MLX_BITS = (2, 4, 8)  # mlx-lm's quantised cache takes these for every model whose heads it can divide into groups
MLX_PARAMS = 1  # bits a number of scale and bias, in 16 bits and groups of 32


def compared(specs: Sequence[CacheSpec], model: ModelConfig) -> tuple[list[CacheSpec], list[str]]:
    """Return the full cache, mlx-lm's nearest to each of ``specs``, and these, each once; and sentences on what is left out.

    Nearest is the one of the fewest bits a number, scales included, that has no fewer than the spec's codes. It is left out
    where the model's head dimension is no multiple of its groups.

    Raises:
        ModelError: the model cannot be built from its config.
    """
    skeleton = build_skeleton(model.name, revision=model.revision).model
    taken, left_out = [], dict[str, str]()
    for nearest in (_nearest(spec) for spec in specs if spec.kind.startswith("kivi")):
        try:
            make_prompt_cache(skeleton, nearest)
            taken.append(nearest)
        except SpecError as error:
            left_out[nearest.slug] = f"{nearest.text} is left out: {error}"
    return list({spec.slug: spec for spec in (CacheSpec(kind="full"), *taken, *specs)}.values()), list(left_out.values())


def _nearest(spec: CacheSpec) -> CacheSpec:
    tokens = channels = 128
    stored = sum(codec.code_bytes(tokens, channels) + codec.param_bytes(tokens, channels) for codec in spec.codecs)
    wanted = 8 * stored / (2 * tokens * channels)
    bits = next((bits for bits in MLX_BITS if bits + MLX_PARAMS >= wanted), MLX_BITS[-1])
    return CacheSpec(kind="mlx-quantized", key_bits=bits, value_bits=bits)


@flow(name=EVALUATE, flow_run_name=run_name, persist_result=False)
def evaluate(
    model: Model,
    prompts: Prompts,
    spec: Spec,
    measure: MeasureSettings = MeasureSettings(),  # noqa: B008  frozen
    thresholds: dict[str, Thresholds] | None = None,
    tracking_dir: Path = Path("mlruns"),
    refresh: bool = False,
    others: tuple[Spec, ...] = (),
) -> State[NightResult]:
    """Measure one cache of one model on one prompt set, and others beside it, as a night would.

    Args:
        model: embedded, a folder in mlx-lm's format, or a Hugging Face id.
        prompts: humaneval, retrieval, or a source with its column.
        spec: The cache, as KIND[:key=value,...].
        measure: How much is measured.
        thresholds: Limits beside the default ones.
        tracking_dir: Folder of the MLflow store, of finished results and of reports.
        refresh: Measure anew.
        others: Further caches.
    """
    one = {"models": (model,), "prompt_sets": (prompts,), "specs": (spec, *others)}
    config = NightlyConfig(name=EVALUATE, **one, measure=measure, thresholds=thresholds or {})
    return run_matrix(config, tracking_dir, refresh)
