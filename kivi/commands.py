"""mlx-lm's commands, with ``--cache SPEC`` beside their own options.

``mlx_lm.generate``, ``chat``, ``server`` and ``cache_prompt`` make their caches by ``make_prompt_cache(model)``, which asks the
model's ``make_cache``. So their mains run as they are, on names of their module that are bound anew in this process: ``load``
returns a model on which :func:`kivi.install` was called, ``argparse`` gives their parser one more option, and
``load_prompt_cache`` takes a file of the same cache only.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kivi.attention import AttentionError
from kivi.build import install, make_prompt_cache
from kivi.cache.single import KIVICache
from kivi.models import embedded
from kivi.models.loading import EMBEDDED, ModelError, in_dtype
from kivi.models.skeleton import build_skeleton
from kivi.spec import CacheSpec, SpecError

Command = Literal["generate", "chat", "server", "cache_prompt"]
LOADERS = ("load", "sharded_load")
FILES = (".yaml", ".yml", ".json")
HELP = (
    "The KV cache: KIND[:key=value,...] such as kivi:key_bits=4,value_bits=3,group=64,sinks=64,rotate=both, a YAML file, or "
    "SPEC@FILE. A draft model gets the same, settings by layer apart. Default: the model's own cache."
)
OF_OTHER_CACHES = {"kv_bits": "--kv-bits", "max_kv_size": "--max-kv-size"}


def run(command: Command) -> None:
    """Run the main of ``mlx_lm.<command>`` on this process's arguments.

    ``--model embedded`` and ``--draft-model embedded`` are the embedded model, in float32 on a CPU. A cache that the model
    cannot take ends the process with one sentence and exit code 2, before any weight is loaded.
    """
    module = importlib.import_module(f"mlx_lm.{command}")
    parser = functools.partial(_Parser, prog=f"kivi.{command}", module=module)
    module.argparse = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": parser})  # type: ignore[attr-defined]
    try:
        module.main()
    except (AttentionError, ModelError, SpecError) as error:
        sys.stderr.write(f"kivi.{command}: error: {error}\n")
        sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """The parser of one of mlx-lm's commands, which also reads the cache and has the module load models with it."""

    def __init__(self, *args: Any, module: types.ModuleType, **options: Any) -> None:
        super().__init__(*args, **options)
        self._module = module
        self.add_argument("--cache", metavar="SPEC", help=HELP)

    def parse_args(self, *args: Any, **options: Any) -> Any:
        parsed = super().parse_args(*args, **options)
        spec = None if parsed.cache is None else _read_spec(parsed.cache)
        if spec is not None:
            _check(parsed, spec)
        self._wrap(LOADERS, _loading, spec)
        if spec is not None:
            self._wrap(("load_prompt_cache",), _loading_cache, spec)
        return parsed

    def _wrap(self, names: Iterable[str], wrap: Callable[..., Any], spec: CacheSpec | None) -> None:
        for name in names:
            if hasattr(self._module, name):
                setattr(self._module, name, wrap(getattr(self._module, name), spec))


def _check(parsed: argparse.Namespace, spec: CacheSpec) -> None:
    """Refuse a cache that the models cannot have, or options that would have no effect on it.

    Raises:
        AttentionError, ModelError, SpecError: one sentence says why.
    """
    for name, option in OF_OTHER_CACHES.items():
        if getattr(parsed, name, None) is not None:
            raise SpecError(f"{option} is for mlx-lm's own caches: leave it out beside --cache")
    if parsed.model is not None:
        make_prompt_cache(build_skeleton(parsed.model).model, spec)
    if getattr(parsed, "draft_model", None) is not None:
        make_prompt_cache(build_skeleton(parsed.draft_model).model, _without_layers(spec))


def _loading(load: Callable[..., Any], spec: CacheSpec | None) -> Callable[..., Any]:
    """Return mlx-lm's ``load``, which also knows the embedded model and gives what it loaded the caches of ``spec``."""

    @functools.wraps(load)
    def loading(path: str, *args: Any, **options: Any) -> Any:
        is_embedded = path == EMBEDDED
        model, *others = load(str(embedded.provide()) if is_embedded else path, *args, **options)
        if is_embedded and mx.default_device() == mx.cpu:
            model = in_dtype(model, mx.float32)
        if spec is not None:
            is_draft = "tokenizer_config" not in options and not args  # mlx-lm gives a draft's path alone
            install(model, _without_layers(spec) if is_draft else spec)
        return model, *others

    return loading


def _loading_cache(load: Callable[..., Any], spec: CacheSpec) -> Callable[..., Any]:
    """Return mlx-lm's ``load_prompt_cache``, which refuses a file of another cache than that of ``spec``."""

    @functools.wraps(load)
    def loading(path: str, *args: Any, **options: Any) -> Any:
        caches, metadata = load(path, *args, **options)
        packed = {index: cache.spec for index, cache in enumerate(caches) if isinstance(cache, KIVICache)}
        if not packed and spec.kind == "kivi":
            raise SpecError(f"{path}: holds {type(caches[0]).__name__}, no packed cache; leave --cache out")
        for index, held in packed.items():
            if held != spec.for_layer(index, len(caches)):
                raise SpecError(f"{path}: layer {index} holds {held.slug}, not {spec.slug}; give --cache what it was made with")
        return caches, metadata

    return loading


def _without_layers(spec: CacheSpec) -> CacheSpec:
    """Return what a draft model gets: settings by layer are those of the large model's layers."""
    return spec.model_copy(update={"layers": {}})


def _read_spec(text: str) -> CacheSpec:
    return CacheSpec.load(text) if "@" not in text and Path(text).suffix in FILES else CacheSpec.parse(text)
