"""The full-precision cache's logits and continuations: computed once a sequence, kept on disk while there is room."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kivi import BLAS, machine
from kivi.files import write_whole
from kivi.measure.arms import FULL, Arm, batch
from kivi.measure.schedule import reference_blocks
from kivi.models import LoadedModel

LAYOUT = 2  # raise it when what is stored, or how it is computed, changes
FLOAT32 = 4  # bytes
ABANDONED_S = 86_400
DIGESTS = "digests.json"  # of an entry: the SHA-256 of each of its other files, by name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trajectory:
    """Greedy decoding with the full cache: tokens ``[B, steps]``, and the logits ``[steps, B, vocabulary]`` behind each."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    logits: np.ndarray[Any, np.dtype[np.float32]]


class Reply(NamedTuple):
    """The greedy continuation of a prompt, at least one token, and the log-probability of the right answer there, in nats."""

    tokens: list[int]
    logprob: float


class ReferenceStore:
    """What every cell of a model is measured against.

    An entry is found by content: weights, dtype, tokens, versions, device and BLAS. It appears by one rename, so that a
    process that is killed leaves no half of one; its digests are looked at each time, and what is damaged is computed anew.
    Logits are 4 bytes x vocabulary a position (SmolLM2: 201 MB for 1,024 tokens); an entry that does not fit into
    ``max_bytes`` after the oldest entries are gone is computed anew each time.

    Args:
        folder: Where entries are kept.
        max_bytes: The most that all entries may take.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._used: set[str] = set()  # entries of this run are never evicted by it: the next cell wants them again

    def logits(self, model: LoadedModel, tokens: Sequence[int]) -> Iterator[mx.array]:
        """Yield the logits of ``tokens`` under the full cache, float32 ``[positions, vocabulary]``.

        The parts are those of :func:`~kivi.measure.schedule.reference_blocks`, one in memory at a time.
        """
        entry = self._entry("logits", model, np.asarray(tokens))
        if self._has(entry):
            for path in sorted(entry.glob("*.safetensors")):
                yield _load(path)["logits"]
            return
        keep = self._make_room(len(tokens) * _vocabulary(model) * FLOAT32)
        with _Draft(entry) as draft:
            arm = Arm(model, FULL)
            for index, (start, stop) in enumerate(blocks := reference_blocks(len(tokens))):
                logits = arm.feed(tokens, [(start, stop)])
                if keep:
                    mx.save_safetensors(str(draft.folder / f"{index:06d}.safetensors"), {"logits": logits})
                draft.finished = keep and index == len(blocks) - 1  # before the last one goes out: a reader may not come back
                yield logits

    def trajectory(
        self, model: LoadedModel, prompts: Sequence[Sequence[int]], steps: int, step: Callable[[int], None]
    ) -> Trajectory:
        """Return the greedy continuations of ``prompts`` under the full cache.

        Args:
            model: The model.
            prompts: Prompts of equal length.
            steps: Tokens to generate for each.
            step: Called with the number of each decode step that is done.
        """
        entry = self._entry(f"trajectory-{steps}", model, np.asarray(prompts))
        if self._has(entry):
            stored = _load(entry / "trajectory.safetensors")
            return Trajectory(np.array(stored["tokens"], dtype=np.int64), np.array(stored["logits"]))
        arm = Arm(model, FULL)
        logits = [arm.prefill(batch(prompts)).astype(mx.float32)]
        tokens = [mx.argmax(logits[0], axis=-1)]
        for index in range(1, steps):
            step(index)
            logits.append(arm.decode(tokens[-1][:, None]).astype(mx.float32))
            tokens.append(mx.argmax(logits[-1], axis=-1))
        result = {"tokens": mx.stack(tokens, axis=1).astype(mx.int32), "logits": mx.stack(logits)}
        if self._make_room(result["logits"].nbytes):
            with _Draft(entry) as draft:
                mx.save_safetensors(str(draft.folder / "trajectory.safetensors"), result)
                draft.finished = True
        return Trajectory(np.array(result["tokens"], dtype=np.int64), np.array(result["logits"]))

    def replies(
        self,
        model: LoadedModel,
        prompts: Sequence[Sequence[int]],
        rules: Sequence[object],
        proceed: Callable[[], list[Reply]],
    ) -> list[Reply]:
        """Return the full cache's reply to each prompt, found or made by ``proceed``.

        Args:
            model: The model.
            prompts: Prompts of equal length.
            rules: What else decides of replies, as JSON: where continuations end, and the right answers.
            proceed: Makes the replies.
        """
        entry = self._entry(f"replies-{json.dumps(list(rules))}", model, np.asarray(prompts))
        if self._has(entry):
            stored = _load(entry / "replies.safetensors")
            logprobs: Any = stored["logprobs"].tolist()
            return [Reply(stored[f"{row:06d}"].tolist(), logprob) for row, logprob in enumerate(logprobs)]  # type: ignore[arg-type]
        replies = proceed()
        if self._make_room(sum(FLOAT32 * (len(reply.tokens) + 1) for reply in replies)):
            with _Draft(entry) as draft:
                arrays = {f"{row:06d}": mx.array(reply.tokens, dtype=mx.int32) for row, reply in enumerate(replies)}
                arrays["logprobs"] = mx.array([reply.logprob for reply in replies], dtype=mx.float32)
                mx.save_safetensors(str(draft.folder / "replies.safetensors"), arrays)
                draft.finished = True
        return replies

    def _entry(self, what: str, model: LoadedModel, tokens: np.ndarray[Any, Any]) -> Path:
        identity = {
            "layout": LAYOUT,
            "what": what,
            "weights": model.weights_digest,
            "dtype": model.dtype,
            "shape": tokens.shape,
            "tokens": hashlib.sha256(tokens.astype(np.int64).tobytes()).hexdigest(),
            "packages": machine.packages(),
            "device": machine.device(),
            "blas": BLAS,
        }
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        self._used.add(name)
        return self._folder / name

    def _has(self, entry: Path) -> bool:
        """Return whether ``entry`` is there as it was written, used now; one that is damaged is removed."""
        if not entry.is_dir():
            return False
        try:
            written = json.loads((entry / DIGESTS).read_bytes())
        except (OSError, ValueError):
            written = None
        if written != _digests(entry):
            logger.warning("%s is damaged, its reference is computed anew", entry)
            shutil.rmtree(entry, ignore_errors=True)
            return False
        os.utime(entry)
        return True

    def _make_room(self, size: int) -> bool:
        """Remove the entries that were not used for longest until ``size`` bytes fit; return whether they do."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        entries = [path for path in self._folder.iterdir() if path.is_dir() and "." not in path.name]
        weights = {path: sum(file.stat().st_size for file in path.iterdir()) for path in entries}
        free = self._max_bytes - sum(weights.values())
        for path in sorted((path for path in entries if path.name not in self._used), key=lambda path: path.stat().st_mtime):
            if free >= size:
                break
            shutil.rmtree(path, ignore_errors=True)
            free += weights[path]
        return free >= size

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left: drafts that nobody wrote to for a day."""
        for draft in self._folder.glob("*.*"):
            if draft.is_dir() and time.time() - draft.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(draft, ignore_errors=True)


class _Draft:
    """A temporary folder that becomes ``entry`` by a rename, if it was finished, and is removed if not."""

    def __init__(self, entry: Path) -> None:
        self._entry = entry
        self.finished = False
        entry.parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, *error: object) -> None:
        if self.finished and not self._entry.exists():
            for path in self.folder.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            write_whole(self.folder / DIGESTS, json.dumps(_digests(self.folder)))
            try:
                self.folder.rename(self._entry)
                return
            except OSError:  # another process was first with the same content
                pass
        shutil.rmtree(self.folder, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in ``folder`` but the digests themselves, by name."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != DIGESTS:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _load(path: Path) -> dict[str, mx.array]:
    arrays: Any = mx.load(str(path))
    mx.eval(arrays)
    return dict(arrays)


def _vocabulary(model: LoadedModel) -> int:
    return int(model.text_config["vocab_size"])
