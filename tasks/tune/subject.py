"""What a tuning measures: the model, its layers, and two texts that share no row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from kivi.footprint import KeyValues
from kivi.measure import MeasureError
from kivi.measure.candidate import layer_shapes, quantized_layers
from kivi.measure.schedule import first_visible
from kivi.measure.sensitivity import SIDES, Side
from kivi.measure.sequences import TokenStream
from kivi.models import LoadedModel
from kivi.spec import CacheSpec, SpecError
from tasks.config import ConfigError
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.run.cells import loaded_model
from tasks.run.plan import ModelIdentity, identify
from tasks.tune.config import EFFORTS, TuneConfig

WINDOW, SINKS = 128, 64  # tokens that stay exact, of candidates by layer
CALIBRATION_WINDOW = 32  # a text of some hundred tokens has few that see codes beyond a longer one


@dataclass(frozen=True)
class Subject:
    """One model and its texts as tokens.

    ``start`` is the first position at which every candidate sees codes: all are judged from there on.
    """

    model: LoadedModel
    identity: ModelIdentity
    layers: tuple[int, ...]
    shapes: dict[int, KeyValues]
    group: int
    rotatable: tuple[Side, ...]
    calibration: list[int]
    judged: list[list[int]]
    texts: list[str]
    start: int

    def base(self, window: int = WINDOW) -> CacheSpec:
        """Return the cache that allocations by layer begin with."""
        return CacheSpec(group_size=self.group, sink_length=SINKS, residual_length=window)

    @property
    def rotate_both(self) -> bool:
        return len(self.rotatable) == len(SIDES)


def read_subject(config: TuneConfig) -> Subject:
    """Load model and texts.

    Raises:
        ConfigError: the texts are too short, or the model was made for fewer tokens than are judged.
        AttentionError: no layer of the model can take a packed cache.
        PromptSetError, ModelError: they cannot be read.
    """
    model = loaded_model(config.model)
    shapes = layer_shapes(model)
    dims = {dim for shape in shapes.values() for dim in (shape.key_dim, shape.value_dim)}
    group = 64 if all(dim % 64 == 0 for dim in dims) else 32
    base = CacheSpec(group_size=group, sink_length=SINKS, residual_length=WINDOW)
    layers = quantized_layers(model, base)
    calibration, judged, texts = _tokens(config, model)
    return Subject(
        model=model,
        identity=identify(config.model, model),
        layers=layers,
        shapes=shapes,
        group=group,
        rotatable=tuple(side for side in SIDES if _can_rotate(model, base, side)),
        calibration=calibration,
        judged=judged,
        texts=texts,
        start=first_visible([base]),
    )


def _can_rotate(model: LoadedModel, base: CacheSpec, side: Side) -> bool:
    try:
        quantized_layers(model, base.model_copy(update={"rotate": side}))
    except SpecError:
        return False
    return True


def _tokens(config: TuneConfig, model: LoadedModel) -> tuple[list[int], list[list[int]], list[str]]:
    """Return the calibration text, the judged sequences, and the texts that these are of."""
    effort = EFFORTS[config.effort]
    limit = model.text_config.get("max_position_embeddings")
    if limit is not None and effort.score.length > limit:
        raise ConfigError(f"{effort.score.length} tokens are judged, and {model.name!r} was made for {limit}: lower the effort")
    texts = load_prompt_set(config.judged).texts(model.tokenizer)
    rows = list(range(len(texts)))
    if config.calibration == config.judged:
        rows = _shuffled(len(texts), config.seed)
        calibration = [texts[row] for row in rows]
        used = _rows_for(model, calibration, effort.tokens)
        calibration, rows = calibration[:used], sorted(rows[used:])
    else:
        other = load_prompt_set(config.calibration).texts(model.tokenizer)
        calibration = [other[row] for row in _shuffled(len(other), config.seed)]
        calibration = calibration[: _rows_for(model, calibration, effort.tokens)]
    held_out = [texts[row] for row in rows]
    try:
        calibrating = TokenStream(model.tokenizer, calibration).pack(1, effort.tokens)[0]
        return (
            calibrating,
            TokenStream(model.tokenizer, held_out).pack(effort.score.sequences, effort.score.length + 1),
            held_out,
        )
    except MeasureError as error:
        raise ConfigError(
            f"too little text: calibration takes {effort.tokens} tokens of {config.calibration.name!r}, and judging "
            f"{effort.score.sequences} × {effort.score.length + 1} of the rows of {config.judged.name!r} that are left: {error}"
        ) from None


def _shuffled(count: int, seed: int) -> list[int]:
    return [int(row) for row in np.random.default_rng(seed).permutation(count)]


def _rows_for(model: LoadedModel, texts: Sequence[str], tokens: int) -> int:
    """Return how many of ``texts``, from the first, have ``tokens`` tokens together; all of them where they have fewer."""
    total = 0
    for count, text in enumerate(texts, 1):
        total += len(TokenStream(model.tokenizer, [text]))
        if total >= tokens:
            return count
    return len(texts)


def weights_bytes(model: LoadedModel) -> int:
    """Return the bytes of the model's weights as they are in memory."""
    parameters: Any = tree_flatten(model.model.parameters())  # type: ignore[no-untyped-call]
    return sum(array.nbytes for _, array in parameters)
