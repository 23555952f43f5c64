"""Caches that misreport, each in its own way: the audit names what each does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from kivi.accounting import CacheBytes, resident_bytes
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.measure.audit import AuditReport, AuditSettings, Subject, audit, audit_spec, subject_of
from kivi.quantize import group_roundtrip
from kivi.spec import CacheSpec

SPEC = CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx")
ROUNDTRIP = CacheSpec.parse("kivi-roundtrip:bits=2,residual=32,backend=mlx")
SETTINGS = AuditSettings(decode_steps=40, history=256)
HONEST = subject_of(SPEC, heads=SETTINGS.heads, head_dim=SETTINGS.head_dim)


def audited(cache: Any, spec: CacheSpec = SPEC, *names: str) -> AuditReport:
    subject = Subject(spec=spec, make=lambda: cache(spec), heads=SETTINGS.heads, head_dim=SETTINGS.head_dim)
    report = audit(subject, SETTINGS, names=names)
    assert not report.passed
    return report


def errors(report: AuditReport) -> dict[tuple[str, str], str]:
    return {(check, found.name): found.evidence for check, found in report.findings("error")}


class FullInDisguise(KVCache):
    """Stores full precision, accounts two bits."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec

    def bytes(self) -> CacheBytes:
        expected = HONEST.expected_bytes(self.offset)
        return expected.model_copy(update={"resident": expected.accounted})


def test_two_bits_accounted_and_full_precision_stored():
    found = errors(audited(FullInDisguise, SPEC, "bytes", "memory", "growth", "definition"))
    assert "live arrays hold" in found["bytes", "resident"] and "wrong at 40 of 40 decode steps" in found["bytes", "resident"]
    assert ("bytes", "total") in found and ("memory", "active memory") in found
    assert "the spec gives 192.0" in found["growth", "bytes a token"]
    assert found["definition", "lossy"].startswith("the quantiser never ran: 65,536 of 65,536 numbers")


class CallsItSpare(FullInDisguise):
    """The same, and calls the difference spare capacity."""

    def bytes(self) -> CacheBytes:
        live = resident_bytes((self.keys, self.values))
        expected = HONEST.expected_bytes(self.offset)
        return expected.model_copy(update={"resident": live, "spare": live - expected.accounted})


def test_full_precision_called_spare_capacity():
    found = errors(audited(CallsItSpare, SPEC, "bytes", "growth"))
    assert ("bytes", "resident") not in found and ("bytes", "total") not in found
    assert "as spare capacity, expected at most" in found["bytes", "spare"]
    assert ("growth", "bytes a token") in found


@pytest.mark.parametrize("text", ["kivi:bits=2,residual=32,backend=mlx", "kivi:bits=4,backend=mlx"])
def test_a_cache_that_grows_by_more_than_it_states(text, monkeypatch):
    """It grows by an eighth instead of a 32nd."""
    spec = CacheSpec.parse(text)
    assert audit_spec(spec, SETTINGS, names=["growth"]).passed
    monkeypatch.setattr("kivi.cache.storage.GROWTH", 8)
    found = errors(audit_spec(spec, SETTINGS, names=["growth"]))
    assert found.keys() == {("growth", "spare as it grows")}
    assert "its class states at most" in found["growth", "spare as it grows"]


class ForgetsWindow(KIVICache):
    """Leaves the residual window out of what it accounts."""

    def bytes(self) -> CacheBytes:
        return super().bytes().model_copy(update={"residual": 0})


class ForgetsWindowAltogether(KIVICache):
    """Leaves the residual window out of what it accounts and out of what it calls resident."""

    def bytes(self) -> CacheBytes:
        said = super().bytes()
        return said.model_copy(update={"residual": 0, "resident": said.resident - said.residual})


@pytest.mark.parametrize("cache", [ForgetsWindow, ForgetsWindowAltogether])
def test_a_residual_window_that_is_not_accounted(cache):
    found = errors(audited(cache, SPEC, "bytes"))
    assert "accounts 0 bytes for residual of" in found["bytes", "accounted residual"]
    assert "more than accounted and spare" in found["bytes", "total"]
    assert (("bytes", "resident") in found) == (cache is ForgetsWindowAltogether)


class Requantises(RoundTripKIVICache):
    """Quantises the whole history anew at each flush, as one group a channel."""

    def _roundtrip(self, start: int, stop: int) -> None:  # noqa: ARG002
        rules = {"bits": 2, "param_dtype": mx.float16}
        self.keys[..., :stop, :] = group_roundtrip(self.keys[..., :stop, :], group_size=stop, axis=-2, **rules)
        self.values[..., :stop, :] = group_roundtrip(self.values[..., :stop, :], group_size=32, axis=-1, **rules)


def test_old_codes_that_are_quantised_again_at_each_flush():
    found = errors(audited(Requantises, ROUNDTRIP, "append", "definition"))
    assert "of the first 32 tokens have changed" in found["append", "old codes"]
    assert ("append", "oldest group's error") in found
    assert "differ from the definition" in found["definition", "as defined"]


class SwapsInBatch(KIVICache):
    """Becomes a full cache when it is batched."""

    @classmethod
    def merge(cls, caches: list[KIVICache]) -> BatchKVCache:
        full = []
        for cache in caches:
            full.append(KVCache())
            full[-1].update_and_fetch(*cache.dequantized())
        return BatchKVCache.merge(full)


def test_a_packed_cache_that_is_swapped_for_a_full_one_in_a_batch():
    found = errors(audited(SwapsInBatch, SPEC, "batch"))
    assert "row 0 comes out of a BatchKVCache as KVCache" in found["batch", "rows"]
    assert "a BatchKVCache has no byte accounting" in found["batch", "byte accounting"]


class Box:
    def __init__(self) -> None:
        self.kept: list[mx.array] = []


class HidesInObject(KIVICache):
    """Keeps the exact keys in an object that its byte accounting does not look into."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._box = Box()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._box.kept.append(keys)
        return super().update_and_fetch(keys, values)


def test_an_array_hidden_from_the_accounting_in_an_object():
    found = errors(audited(HidesInObject, SPEC, "bytes", "memory"))
    assert {("bytes", "resident"), ("bytes", "total"), ("memory", "active memory")} <= set(found)


class HidesInClosure(KIVICache):
    """Keeps the exact keys where no walk over its attributes comes by."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        kept: list[mx.array] = []
        self._hide = lambda keys: kept.append(keys)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._hide(keys)
        return super().update_and_fetch(keys, values)


def test_an_array_hidden_in_a_closure_is_seen_in_active_memory_alone():
    found = errors(audited(HidesInClosure, SPEC, "bytes", "memory"))
    assert set(found) == {("memory", "active memory")}
    assert "MLX's active memory grew by" in found["memory", "active memory"]


ELSEWHERE: list[Any] = []


class HidesInModule(KIVICache):
    """Keeps the exact keys in its module, in MLX's memory or as numpy arrays outside it."""

    outside = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        ELSEWHERE.append(np.array(keys) if self.outside else keys)
        return super().update_and_fetch(keys, values)


def test_what_is_kept_in_a_module_is_seen_within_mlx_and_said_to_be_unseen_outside(monkeypatch: pytest.MonkeyPatch):
    inside = errors(audited(HidesInModule, SPEC, "bytes", "memory"))
    ELSEWHERE.clear()
    monkeypatch.setattr(HidesInModule, "outside", True)
    subject = Subject(SPEC, lambda: HidesInModule(SPEC), heads=SETTINGS.heads, head_dim=SETTINGS.head_dim)
    outside = audit(subject, SETTINGS, names=("memory",))
    ELSEWHERE.clear()
    assert set(inside) == {("memory", "active memory")}
    assert outside.passed
    assert "copies outside MLX, in numpy say, are not seen" in outside.checks[0].findings[0].evidence


class QuantisesEachCall(RoundTripKIVICache):
    """Quantises what a call brings as it comes, one token at a time when decoding: minimum is maximum, and keys stay exact."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rounded = [
            group_roundtrip(x, bits=2, group_size=32, axis=axis, param_dtype=mx.float32)
            for x, axis in ((keys, -2), (values, -1))
        ]
        return KVCache.update_and_fetch(self, *rounded)


def test_a_quantiser_that_depends_on_the_calls():
    found = errors(audited(QuantisesEachCall, ROUNDTRIP, "chunking", "definition"))
    assert "differ from one token a call" in found["chunking", "chunking"]
    assert ("definition", "as defined") in found


class TrimsTooMuch(KIVICache):
    """Forgets one token more than it says."""

    def trim(self, n: int) -> int:
        return super().trim(n + 1) - 1 if n > 0 else 0


class Stale(RoundTripKIVICache):
    """Moves its offset back at a trim and reads old rows when it grows again."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        room = 0 if self.keys is None else self.keys.shape[-2] - self.offset
        if getattr(self, "_trimmed", 0) and keys.shape[-2] <= room:
            self.offset += keys.shape[-2]
            return self.keys_and_values()
        return super().update_and_fetch(keys, values)

    def trim(self, n: int) -> int:
        self._trimmed = super().trim(n)
        return self._trimmed


@pytest.mark.parametrize(
    ("cache", "spec", "words"),
    [(TrimsTooMuch, SPEC, "stands at"), (Stale, ROUNDTRIP, "further from what was put in than one rounding explains")],
)
def test_a_trim_that_is_wrong(cache, spec, words):
    report = audited(cache, spec, "trim")
    assert any(words in found.evidence for _, found in report.findings("error"))


class LoadsAsAnother(KIVICache):
    """Is saved under the name of another class."""


LoadsAsAnother.__name__ = "KVCache"


class CannotBeSaved(KIVICache):
    @property
    def state(self) -> Any:
        raise TypeError("cannot be saved")

    @state.setter
    def state(self, state: Any) -> None:  # noqa: ARG002
        raise TypeError("cannot be loaded")


def test_a_cache_that_does_not_survive_saving():
    report = audited(CannotBeSaved, SPEC, "save", "growth")
    assert errors(report)["save", "raised"] == "the cache raised TypeError: cannot be saved"
    assert all("Traceback" in check.details for check in report.checks)
    assert audited(LoadsAsAnother, SPEC, "save").findings("error")


class NeverLooks(KIVICache):
    """Quantises what its scales and zeros cannot hold, and goes on."""

    def _check_due(self) -> None:
        self._unchecked.waiting.clear()

    _check = _check_due


class LooksWhenAsked(KIVICache):
    """Says so once it is asked for its state, and generates until then."""

    def _check_due(self) -> None:
        pass


def test_numbers_beyond_float16_that_are_answered_wrongly():
    found = errors(audited(NeverLooks, SPEC, "overflow"))
    assert found.keys() == {("overflow", f"{what} in {side}") for what in ("number", "range") for side in ("keys", "values")}
    assert all("and no call refused them" in evidence for evidence in found.values())
    assert errors(audited(LooksWhenAsked, SPEC, "overflow")).keys() == {("overflow", "raised")}


class SharesItsCopy(KIVICache):
    """Hands itself out for a copy, as a cache does whose arrays are written in place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharesItsCopy:
        return self


class StaleAfterTrim(KIVICache):
    """Takes trimmed tokens off its count and keeps them."""

    def trim(self, n: int) -> int:
        self.offset -= n
        return n


class ForgetsWhatWasPending(KIVICache):
    """Drops a token that came alone right before a longer call."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if keys.shape[-2] > 1 and self.offset > SPEC.residual_length:
            super().trim(1)
        return super().update_and_fetch(keys, values)


class KeepsTheWrongRow(KIVICache):
    """Drops the row next to the one that was to go."""

    @classmethod
    def merge(cls, caches: list[KIVICache]) -> Any:
        plain = [KIVICache(cache.spec) for cache in caches]
        for one, cache in zip(plain, caches, strict=True):
            one.update_and_fetch(*cache.keys_and_values())
        merged = KIVICache.merge(plain)
        whole = merged.filter
        merged.filter = lambda rows: whole(mx.array([1, 2]) if len(rows) == 2 else rows)
        return merged


@pytest.mark.parametrize(
    ("cache", "check", "name", "evidence"),
    [
        (SharesItsCopy, "prefix", "reused", "copied: "),
        (StaleAfterTrim, "prefix", "reused", "trimmed back: "),
        (StaleAfterTrim, "prefix", "reused", "from a longer prompt in the store: "),
        (StaleAfterTrim, "cancel", "drafts", "differ from a run without drafts"),
        (ForgetsWhatWasPending, "turns", "turns", "after turn 2, "),
        (ForgetsWhatWasPending, "cancel", "stopped", "differ from a run that was not stopped"),
        (KeepsTheWrongRow, "cancel", "dropped", "row 0: "),
    ],
)
def test_what_a_user_comes_back_to_is_not_what_was_left(cache: Any, check: str, name: str, evidence: str) -> None:
    assert evidence in errors(audited(cache, SPEC, check))[check, name]
