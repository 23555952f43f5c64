"""A model that is all shapes: built from its config alone, its weights never made.

MLX is lazy: an array has a shape and a dtype before it has numbers. A model of mlx-lm whose weights nobody evaluates takes
milliseconds whatever its size, tells its bytes, and shows what its layers give to their caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from kivi.models.loading import ModelError, read_config

DTYPES = ("float32", "float16", "bfloat16")
SkeletonDtype = Literal["stored", "float32", "float16", "bfloat16"]


class Skeleton(NamedTuple):
    """A model without numbers, and its config. Evaluating its weights draws them at random."""

    model: Module
    config: dict[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        weights: dict[str, mx.array] = dict(tree_flatten(self.model.parameters()))  # type: ignore[no-untyped-call]
        return sum(weight.nbytes for weight in weights.values())


def build_skeleton(name: str, *, revision: str | None = None, dtype: SkeletonDtype | None = None) -> Skeleton:
    """Build a model from its config.

    Args:
        name: ``embedded``, a folder in mlx-lm's form, or a Hugging Face id, of which the config alone is downloaded.
        revision: A branch, tag or commit of a Hugging Face id.
        dtype: ``stored``: as the config says, quantised if it is; else dequantised and in that dtype. None: as mlx-lm's
            classes make it, in float32, for those who ask for shapes only.

    Raises:
        ModelError: there is no such model, mlx-lm cannot build it, or its config does not say how weights are stored.
    """
    config = read_config(name, revision)
    try:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
    except Exception as error:  # mlx-lm's classes raise whatever a field makes them raise
        raise ModelError(f"model {name!r} cannot be built from its config: {type(error).__name__}: {error}") from error
    if dtype == "stored":
        model.set_dtype(getattr(mx, _stored_dtype(name, config)))
        _quantize(name, model, config)
    elif dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    return Skeleton(model, config)


def _stored_dtype(name: str, config: dict[str, Any]) -> str:
    text = config.get("text_config", {})
    named = [part.get(field) for part in (config, text) for field in ("dtype", "torch_dtype")]
    dtype = next((str(value).removeprefix("torch.") for value in named if value), None)
    if dtype not in DTYPES:
        said = "names no dtype" if dtype is None else f"names dtype {dtype!r}"
        raise ModelError(f"model {name!r}: its config {said}; say which its weights have: {', '.join(DTYPES)}")
    return dtype


def _quantize(name: str, model: Module, config: dict[str, Any]) -> None:
    """Give the layers that mlx-lm's converter quantises their packed shapes."""
    quantization = config.get("quantization")
    if quantization is None:
        foreign = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
        if foreign is not None:
            raise ModelError(
                f"model {name!r}: its config does not say which weights {foreign.get('quant_method')!r} quantised; convert the "
                "model with mlx_lm.convert, or give the dtype that it is loaded in"
            )
        return
    own: Callable[[str, Module], bool | dict[str, Any]] = getattr(model, "quant_predicate", None) or (lambda *_: True)

    def predicate(path: str, module: Module) -> bool | dict[str, Any]:
        if path in quantization:
            return quantization[path]  # type: ignore[no-any-return]
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % quantization["group_size"]:
            return False
        return own(path, module)

    quantize(
        model,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=predicate,
    )
