"""Speed by backend: operations over sizes, and prefill and decode of a model; arms interleaved, each round its own inputs.

All arms of a round get the same inputs, made and evaluated before the clock starts. A first round, on inputs of its own,
compiles and warms up and is not counted. Each round has an order of its own, drawn by chance, so that no arm always follows the
same one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
from pydantic import Field

from kivi.backends import Backend
from kivi.cache.single import KIVICache
from kivi.codec import Codec
from kivi.measure.arms import FULL, Arm
from kivi.measure.backends.skip_reason import failed_or_not_run
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.records import Record
from kivi.measure.results import Timing
from kivi.measure.settings import Settings
from kivi.measure.speed.timing import in_turns
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

Operation = Literal["round trip", "quantise and pack", "decode attention", "model prefill", "model decode"]
FULL_ARM = "full"  # full precision: MLX's fused attention on exact keys and values


class SpeedSettings(Settings):
    """Sizes and rounds of the timings. The defaults are those of one layer of an 8B model, for a GPU."""

    rounds: int = Field(5, ge=2, le=100, description="interleaved rounds that are counted, each with inputs of its own")
    calls: int = Field(10, ge=1, le=1000, description="calls of an operation that are timed together")
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float16", description="dtype of keys, values and queries")
    batch: int = Field(1, ge=1, le=1024, description="sequences at once")
    kv_heads: int = Field(8, ge=1, le=1024, description="heads of keys and values")
    query_heads: int = Field(32, ge=1, le=4096, description="a multiple of kv_heads")
    head_dim: int = Field(128, ge=8, le=1024, description="channels a head")
    flush_tokens: tuple[int, ...] = Field((32, 128, 512, 2048, 4096), description="tokens of a round trip or a packing")
    contexts: tuple[int, ...] = Field((512, 2048, 8192, 32768), description="tokens that one query attends to")
    model_context: int = Field(1024, ge=16, description="prompt tokens of the model's timing")
    model_steps: int = Field(64, ge=2, description="tokens that the model generates")


# What two cores can do in a minute or two; 16-bit arithmetic is 10 to 40 times slower than float32 there.
CPU_SETTINGS = SpeedSettings(
    rounds=5,
    calls=2,
    dtype="float32",
    kv_heads=2,
    query_heads=6,
    head_dim=64,
    flush_tokens=(32, 128, 512, 2048, 4096),
    contexts=(512, 2048, 8192),
    model_context=256,
    model_steps=16,
)


class ArmTiming(Record):
    """One arm of a timing."""

    arm: str = Field(description="a backend, or a baseline: full, mlx compiled, mx.quantize")
    seconds: Timing | None = Field(None, description="seconds a call, or a token")
    ratio: Timing | None = Field(None, description="the baseline's seconds over this arm's, same round: above 1 is faster")
    not_run: str = Field("", description="skip reason: MLX's message, where MLX rejects this shape on a GPU")
    failed: str = Field("", description="what the arm raised, a kernel of our own or anything else")


class SpeedCase(Record):
    """One operation at one size, all arms."""

    operation: Operation
    tokens: int = Field(description="tokens flushed, attended to, or prefilled")
    shape: str
    dtype: str
    baseline: str
    baseline_spread: float | None = Field(description="(max - min) / median of the baseline's own rounds; None: it did not run")
    arms: list[ArmTiming]


class Lane(NamedTuple):
    """An arm to be timed: ``prepare(round)`` makes the inputs and returns the work that is timed, which has ``units`` units.

    What an ``own`` lane raises is a failure; a shape that MLX's operations reject on a GPU was not run.
    """

    arm: str
    own: bool
    prepare: Callable[[int], Callable[[], Any]]
    units: int


def time_lanes(lanes: Sequence[Lane], rounds: int, baseline: str, **case: Any) -> SpeedCase:
    """Time ``lanes`` in turns.

    Args:
        lanes: The arms; all are warmed up first, and those that raise there are left out and say why.
        rounds: Rounds that are counted.
        baseline: The arm that others are compared with, round by round.
        case: The other fields of the :class:`SpeedCase`.
    """
    ready, left_out = [], []
    for lane in lanes:
        try:
            _run(lane, rounds)  # inputs that no counted round gets
            ready.append(lane)
        except DeadlineError:
            raise
        except (RuntimeError, ValueError) as error:
            left_out.append(ArmTiming(arm=lane.arm, **failed_or_not_run(error, own=lane.own)))
    seconds = in_turns({lane.arm: functools.partial(_run, lane) for lane in ready}, rounds)
    base = seconds.get(baseline)
    timed = {
        arm: ArmTiming(
            arm=arm,
            seconds=Timing.of(values),
            ratio=None if base is None else Timing.of([ours / theirs for ours, theirs in zip(base, values, strict=True)]),
        )
        for arm, values in seconds.items()
    }
    every = {**timed, **{arm.arm: arm for arm in left_out}}
    return SpeedCase(
        baseline=baseline,
        baseline_spread=None if base is None else Timing.of(base).spread,
        arms=[every[lane.arm] for lane in lanes],
        **case,
    )


def time_operations(
    backends: Sequence[Backend], spec: CacheSpec, settings: SpeedSettings, monitor: Monitor
) -> Iterator[SpeedCase]:
    """Time round trip, packing and, for the packed cache, decode attention at every size of ``settings``."""
    total = 2 * len(settings.flush_tokens) + len(settings.contexts)
    done = 0
    for tokens in settings.flush_tokens:
        monitor.step(f"speed of {spec.slug}", done, total)
        yield _time_flush("round trip", _roundtrip_lanes(backends, spec), settings, tokens)
        whole = tokens // spec.group_size * spec.group_size
        if spec.kind == "kivi" and whole:
            yield _time_flush("quantise and pack", _packing_lanes(backends, spec), settings, whole)
        done += 2
    for context in settings.contexts if spec.kind == "kivi" else ():
        monitor.step(f"speed of {spec.slug}", done, total)
        yield _time_attention(backends, spec, settings, context)
        done += 1


Flush = Callable[[mx.array, mx.array], Any]  # keys and values to whatever is to be evaluated


def _roundtrip_lanes(backends: Sequence[Backend], spec: CacheSpec) -> dict[str, tuple[bool, Flush]]:
    codecs = spec.codecs

    def flush(roundtrip: Callable[[mx.array, Codec], mx.array]) -> Flush:
        return lambda keys, values: (roundtrip(keys, codecs.keys), roundtrip(values, codecs.values))

    lanes: dict[str, tuple[bool, Flush]] = {
        backend.name: (backend.name != "mlx", flush(backend.group_roundtrip)) for backend in backends
    }
    return {**lanes, "mlx compiled": (False, mx.compile(flush(lambda x, codec: codec.roundtrip(x))))}


def _packing_lanes(backends: Sequence[Backend], spec: CacheSpec) -> dict[str, tuple[bool, Flush]]:
    codecs = spec.codecs

    def flush(backend: Backend, keys: mx.array, values: mx.array) -> Any:
        return backend.quantize(keys, codecs.keys), backend.quantize(values, codecs.values)

    def mlx_quantize(keys: mx.array, values: mx.array) -> Any:
        # MLX's own rule for codes, not KIVI's: a measure of what one pass may cost.
        return (
            mx.quantize(keys.swapaxes(-1, -2), group_size=spec.group_size, bits=spec.key_bits),
            mx.quantize(values, group_size=spec.group_size, bits=spec.value_bits),
        )

    lanes: dict[str, tuple[bool, Flush]] = {
        backend.name: (backend.name != "mlx", functools.partial(flush, backend)) for backend in backends
    }
    return {**lanes, "mx.quantize": (False, mlx_quantize)}


def _time_flush(
    operation: Operation, arms: Mapping[str, tuple[bool, Flush]], settings: SpeedSettings, tokens: int
) -> SpeedCase:
    shape = (settings.batch, settings.kv_heads, tokens, settings.head_dim)

    def prepare(flush: Flush, index: int) -> Callable[[], Any]:
        parts = [_normal(shape, settings, index, part) for part in range(2 * settings.calls)]
        inputs = list(zip(parts[::2], parts[1::2], strict=True))
        mx.eval(inputs)
        return lambda: [flush(keys, values) for keys, values in inputs]

    lanes = [Lane(arm, own, functools.partial(prepare, flush), settings.calls) for arm, (own, flush) in arms.items()]
    return time_lanes(
        lanes,
        settings.rounds,
        "mlx",
        operation=operation,
        tokens=tokens,
        shape=f"keys and values {_show(shape)}",
        dtype=settings.dtype,
    )


def _time_attention(backends: Sequence[Backend], spec: CacheSpec, settings: SpeedSettings, context: int) -> SpeedCase:
    shape = (settings.batch, settings.kv_heads, context, settings.head_dim)
    query_shape = (settings.batch, settings.query_heads, 1, settings.head_dim)
    scale = settings.head_dim**-0.5

    def inputs(index: int) -> tuple[mx.array, mx.array, mx.array]:
        keys, values = _normal(shape, settings, index, 0), _normal(shape, settings, index, 1)
        return _normal(query_shape, settings, index, 2), keys, values

    def chain(attend: Callable[[mx.array], mx.array], queries: mx.array) -> Callable[[], mx.array]:
        """Make each call's output the next call's queries: calls then run one after the other, as decode steps do."""
        return lambda: functools.reduce(lambda q, _: attend(q), range(settings.calls), queries)

    def on_codes(name: str, index: int) -> Callable[[], mx.array]:
        queries, keys, values = inputs(index)
        cache = KIVICache(spec.model_copy(update={"backend": name}))
        cache.update_and_fetch(keys, values)
        mx.eval(queries, cache.state)
        return chain(functools.partial(cache.attend, scale=scale), queries)

    def in_full(index: int) -> Callable[[], mx.array]:
        queries, keys, values = inputs(index)
        mx.eval(queries, keys, values)
        return chain(lambda q: mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale), queries)

    lanes = [Lane(FULL_ARM, False, in_full, settings.calls)]
    lanes += [
        Lane(backend.name, backend.name != "mlx", functools.partial(on_codes, backend.name), settings.calls)
        for backend in backends
    ]
    shapes = f"queries {_show(query_shape)} on {_show(shape)}"
    return time_lanes(
        lanes, settings.rounds, FULL_ARM, operation="decode attention", tokens=context, shape=shapes, dtype=settings.dtype
    )


Tokens = np.ndarray[Any, np.dtype[np.int64]]


class ModelTiming(NamedTuple):
    """Prefill and decode of a model, and the tokens ``[rounds, steps]`` that each arm generated."""

    prefill: SpeedCase
    decode: SpeedCase
    tokens: dict[str, Tokens]


def time_model(
    model: LoadedModel,
    backends: Sequence[Backend],
    spec: CacheSpec,
    prompts: Sequence[Sequence[int]],
    settings: SpeedSettings,
    monitor: Monitor,
) -> ModelTiming:
    """Time the model with its full cache and with ``spec`` on each backend, and keep the tokens that come out.

    Args:
        model: The model.
        backends: The backends.
        spec: The cache.
        prompts: One prompt of ``settings.model_context`` tokens a round, and one more for the warm-up.
        settings: Rounds and steps.
        monitor: Told of each prompt.
    """
    specs: dict[str, CacheSpec] = {FULL_ARM: FULL}
    for backend in backends:
        specs[backend.name] = spec.model_copy(update={"backend": backend.name})
    arms: dict[int, dict[str, Arm]] = {}
    tokens: dict[str, dict[int, list[int]]] = {arm: {} for arm in specs}

    def prefill(name: str, index: int) -> Callable[[], None]:
        monitor.step(f"model with {spec.slug}", index % settings.rounds, settings.rounds)
        prompt = mx.array([list(prompts[index])])
        arm = Arm(model, specs[name])
        mx.eval(prompt)

        def run() -> None:
            tokens[name][index] = [_greedy(arm.prefill(prompt))]

        arms.setdefault(index, {})[name] = arm
        return run

    def decode(name: str, index: int) -> Callable[[], None]:
        arm = arms[index].pop(name)
        written = tokens[name][index]

        def run() -> None:
            for _ in range(settings.model_steps):
                written.append(_greedy(arm.decode(mx.array([[written[-1]]]))))

        return run

    context = len(prompts[0])
    shared: dict[str, Any] = {
        "tokens": context,
        "shape": f"{model.name}, {context} prompt tokens, {settings.model_steps} generated",
        "dtype": model.dtype,
    }
    own = {name: name not in {FULL_ARM, "mlx"} for name in specs}
    lanes = [Lane(name, own[name], functools.partial(prefill, name), context) for name in specs]
    first = time_lanes(lanes, settings.rounds, FULL_ARM, operation="model prefill", **shared)
    ran = [arm.arm for arm in first.arms if arm.seconds is not None]
    lanes = [Lane(name, own[name], functools.partial(decode, name), settings.model_steps) for name in ran]
    second = time_lanes(lanes, settings.rounds, FULL_ARM, operation="model decode", **shared)
    counted = {
        arm.arm: np.array([tokens[arm.arm][index] for index in range(settings.rounds)])
        for arm in second.arms
        if arm.seconds is not None
    }
    return ModelTiming(first, second, counted)


def _run(lane: Lane, index: int) -> float:
    """Return the seconds of one unit in round ``index``."""
    run = lane.prepare(index)
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(run())
    mx.synchronize()
    return (time.perf_counter() - start) / lane.units


def _greedy(logits: mx.array) -> int:
    token: Any = mx.argmax(logits[0]).item()
    return int(token)


def _normal(shape: tuple[int, ...], settings: SpeedSettings, index: int, part: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(1000 * index + part)).astype(getattr(mx, settings.dtype))


def _show(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
