"""CacheSpec: what a cache is, validated once."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import mlx.core as mx
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from kivi.codec import Codecs, Rotate
from kivi.fields import FieldsError, read_fields

Kind = Literal["full", "kivi", "kivi-roundtrip", "mlx-quantized"]
BackendName = Literal["auto", "metal", "cuda", "mlx"]
ParamDtype = Literal["float16", "float32"]

KIVI_BITS = (2, 3, 4, 8)
MLX_BITS = (2, 3, 4, 5, 6, 8)  # what mx.quantize takes
GROUP_SIZES = (32, 64, 128)  # what MLX's quantised matmul takes
MLX_QUANTIZED_FIELDS = ("key_bits", "value_bits", "group_size")
NUMBER = re.compile(r"-?[0-9]{1,18}")
LONGEST_QUOTE = 80  # characters of a wrong value that a message repeats
ROTATE_SLUGS: dict[Rotate, str] = {"none": "", "keys": "hk", "values": "hv", "both": "hkv"}  # h: Hadamard
COMPACT = (  # options of a slug, with the fields that their groups give
    (re.compile(r"k([0-9]+)v([0-9]+)"), ("key_bits", "value_bits")),
    (re.compile(r"g([0-9]+)"), ("group_size",)),
    (re.compile(r"r([0-9]+)"), ("residual_length",)),
    (re.compile(r"s([0-9]+)"), ("sink_length",)),
)
COMPACT_WORDS = {
    **{slug: ("rotate", value) for value, slug in ROTATE_SLUGS.items() if slug},
    "p32": ("param_dtype", "float32"),
    **{name: ("backend", name) for name in get_args(BackendName)},
}
SHORT_NAMES = {
    "bits": ("key_bits", "value_bits"),
    "group": ("group_size",),
    "residual": ("residual_length",),
    "sinks": ("sink_length",),
    "params": ("param_dtype",),
}


class SpecError(ValueError):
    """A cache spec that cannot be built; the message is one sentence that names the value and the remedy."""


def _check_bits(bits: Any) -> Any:
    if isinstance(bits, list | tuple):
        raise ValueError(f"{bits!r}: one cache has one number of bits; give layers their own under `layers`")
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in MLX_BITS:
        raise ValueError(f"{bits!r}: KIVI codes have 2, 3, 4 or 8 bits, those of mlx-lm's quantised cache 2, 3, 4, 5, 6 or 8")
    return bits


def _check_group_size(group_size: Any) -> Any:
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size not in GROUP_SIZES:
        raise ValueError(f"{group_size!r}: MLX packs groups of 32, 64 or 128")
    return group_size


Bits = Annotated[int, BeforeValidator(_check_bits, json_schema_input_type=int)]
GroupSize = Annotated[int, BeforeValidator(_check_group_size, json_schema_input_type=int)]
MAX_TOKENS = 1 << 24  # in one cache: MLX counts an array's elements along an axis in 32 bits, and rows have many
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS, strict=True)]


class LayerSpec(BaseModel):
    """What one layer does differently; fields left out are those of the whole spec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["full", "kivi", "kivi-roundtrip"] | None = Field(None, description="kind of this layer's cache")
    key_bits: Bits | None = Field(None, description="bits a key code")
    value_bits: Bits | None = Field(None, description="bits a value code")
    rotate: Rotate | None = Field(None, description="what is rotated before it is quantised")
    group_size: GroupSize | None = Field(None, description="elements that share a scale and a zero")
    residual_length: TokenCount | None = Field(None, description="newest tokens kept in full precision")
    sink_length: TokenCount | None = Field(None, description="first tokens kept in full precision")
    param_dtype: ParamDtype | None = Field(None, description="dtype of scales and zeros")


class CacheSpec(BaseModel):
    """A KV cache, in the terms of the KIVI paper (arXiv:2402.02750, section 3).

    Lengths count tokens. A spec is frozen; two specs with the same ``slug`` build the same cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = Field(
        "kivi", description="full, kivi (packed), kivi-roundtrip (rounded, stored in full), mlx-quantized (mlx-lm's own)"
    )
    key_bits: Bits = Field(2, description="bits a key code: 2, 3, 4 or 8")
    value_bits: Bits = Field(2, description="bits a value code: 2, 3, 4 or 8")
    rotate: Rotate = Field("none", description="what is rotated along channels before it is quantised: keys, values, both")
    group_size: GroupSize = Field(32, description="elements that share a scale and a zero: 32, 64 or 128")
    residual_length: TokenCount = Field(128, description="newest tokens kept in full precision")
    sink_length: TokenCount = Field(0, description="first tokens kept in full precision, a multiple of group_size")
    param_dtype: ParamDtype = Field("float16", description="dtype of scales and zeros")
    backend: BackendName = Field("auto", description="who runs the kernels; auto takes the best that is available")
    layers: dict[int, LayerSpec] = Field(
        default_factory=dict,
        description="what single layers do differently; negative indices count from the last layer",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_short_names(cls, fields: Any) -> Any:
        short = next((name for name in SHORT_NAMES if isinstance(fields, dict) and name in fields), None)
        if short is not None:
            raise ValueError(f"{short} is short for {' and '.join(SHORT_NAMES[short])}, in CacheSpec.parse only")
        return fields

    @field_validator("param_dtype", mode="before")
    @classmethod
    def _no_bfloat16(cls, dtype: Any) -> Any:
        if dtype == "bfloat16":
            raise ValueError("'bfloat16': its 8-bit mantissa ruins the zeros of large channels; use float16 or float32")
        return dtype

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        given = self.model_fields_set - {"kind"}
        if self.kind == "full" and given:
            raise ValueError(f"a full cache takes no options, got {', '.join(sorted(given))}")
        if self.kind == "mlx-quantized":
            self._check_mlx_quantized(given)
        else:
            for name in ("key_bits", "value_bits"):
                if getattr(self, name) not in KIVI_BITS:
                    raise ValueError(f"{name}={getattr(self, name)}: KIVI codes have 2, 3, 4 or 8 bits")
        for index, layer in self.layers.items():
            self._check_layer(index, layer)
        return self

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if self.sink_length % self.group_size:
            raise ValueError(f"sink_length={self.sink_length}: must be a multiple of group_size={self.group_size}")
        return self

    @model_serializer(mode="wrap")
    def _only_what_applies(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the fields that the kind does not take, so that what is written can be read again."""
        fields: dict[str, Any] = dump(self)
        applies = {"full": {"kind"}, "mlx-quantized": {"kind", *MLX_QUANTIZED_FIELDS}}.get(self.kind, set(fields))
        if self.rotate == "none":  # as versions wrote it that had no rotation: results and nights are found by what is written
            applies = applies - {"rotate"}
        return {name: value for name, value in fields.items() if name in applies}

    def _check_mlx_quantized(self, given: set[str]) -> None:
        foreign = given - set(MLX_QUANTIZED_FIELDS)
        if foreign:
            raise ValueError(f"mlx-lm's quantised cache takes bits and group_size only, got {', '.join(sorted(foreign))}")
        if self.key_bits != self.value_bits:
            raise ValueError(f"key_bits={self.key_bits}, value_bits={self.value_bits}: mlx-lm's quantised cache has one number")

    def _check_layer(self, index: int, layer: LayerSpec) -> None:
        if not self.kind.startswith("kivi"):
            raise ValueError(f"kind={self.kind!r}: only KIVI caches differ by layer")
        try:
            self._merge(layer)
        except ValidationError as error:
            raise ValueError(f"layers[{index}]: {_first_sentence(error)}") from None

    def _merge(self, layer: LayerSpec) -> CacheSpec:
        changes = layer.model_dump(exclude_none=True)
        if changes.get("kind") == "full":
            return CacheSpec(**changes)
        return CacheSpec(**{**self.model_dump(exclude={"layers"}), **changes})

    def for_layer(self, index: int, count: int) -> CacheSpec:
        """Return the spec of layer ``index`` of ``count``, its own settings applied.

        Raises:
            SpecError: ``layers`` names a layer that a model of ``count`` layers does not have, or one layer twice.
        """
        for named in self.layers:
            if not -count <= named < count:
                raise SpecError(f"layers[{named}]: the model has {count} layers, 0 to {count - 1}")
            if named < 0 and named + count in self.layers:
                raise SpecError(f"layers[{named}] and layers[{named + count}]: the same of {count} layers; name it once")
        for named, layer in self.layers.items():
            if named % count == index:
                return self._merge(layer)
        return self.model_copy(update={"layers": {}})

    def quantized_tokens(self, offset: int) -> int:
        """Return how many of ``offset`` tokens are quantised, in a cache that was never trimmed.

        Tokens leave the residual window (algorithm 1 of the paper) in whole groups counted from the end of the sinks.
        """
        aged = max(0, offset - self.sink_length - self.residual_length)
        return aged // self.group_size * self.group_size

    @property
    def params(self) -> mx.Dtype:
        """MLX's dtype of scales and zeros."""
        return mx.float16 if self.param_dtype == "float16" else mx.float32

    @property
    def codecs(self) -> Codecs:
        """How keys and values become codes."""
        return Codecs.of(
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            group_size=self.group_size,
            param_dtype=self.params,
            rotate=self.rotate,
        )

    @property
    def slug(self) -> str:
        """A short name for tables, file names and run names, e.g. ``kivi-k2v2-g32-r128-mlx``."""
        if self.kind == "full":
            return "full"
        name = f"{self.kind}-k{self.key_bits}v{self.value_bits}-g{self.group_size}"
        if self.kind == "mlx-quantized":
            return name
        return "-".join([name, f"r{self.residual_length}", *self._further(), self.backend])

    @property
    def text(self) -> str:
        """The shortest text that :meth:`parse` reads this spec from, e.g. ``kivi:k4v3,g64,s64,hkv``; defaults are left out.

        Settings by layer have no short form: their digest stands for them, which :meth:`parse` refuses.
        """
        if self.kind == "full":
            return "full"
        plain = CacheSpec(kind=self.kind)
        options = [f"k{self.key_bits}v{self.value_bits}"]
        options += [f"g{self.group_size}"] if self.group_size != plain.group_size else []
        options += [f"r{self.residual_length}"] if self.residual_length != plain.residual_length else []
        options += [*self._further(), *([self.backend] if self.backend != plain.backend else [])]
        return f"{self.kind}:{','.join(options)}"

    def _further(self) -> list[str]:
        """Return the options that most specs leave at their defaults, as a slug has them."""
        options = [f"s{self.sink_length}"] if self.sink_length else []
        options += [ROTATE_SLUGS[self.rotate]] if self.rotate != "none" else []
        options += ["p32"] if self.param_dtype != "float16" else []
        if self.layers:
            layers = {index: layer.model_dump(exclude_none=True) for index, layer in sorted(self.layers.items())}
            options += ["L" + hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()[:6]]
        return options

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """Read ``KIND[:key=value,...][@FILE]``, e.g. ``kivi:key_bits=4,value_bits=2,group=32,residual=128,backend=mlx``.

        Short names: bits (both), group, residual, sinks, params; shorter still, as :attr:`text` has them: k4v3, g64, r32, s64,
        hkv. A :attr:`slug` is read, too. ``bits=8,value_bits=2`` sets one of both anew; an option that
        is given again, or that would undo one before it, is refused. FILE is YAML as a matrix takes it, or JSON: the fields of
        a spec, so also settings by layer, which have no short form. What the text says itself goes before what FILE says;
        ``@FILE`` alone is what FILE says.

        Raises:
            SpecError: the text names no cache; one sentence says why.
        """
        own, at, path = text.partition("@")
        kind, _, options = _from_slug(own).partition(":")
        fields = _read_file(Path(path)) if at else {}
        if kind or not at:
            fields["kind"] = kind
        given = {"kind"}
        for option in filter(None, options.split(",")):
            if compact := _read_compact(option.strip()):
                names, values = {*compact}, compact
                names |= {"bits"} if "key_bits" in compact else set()
            else:
                name, equals, value = option.partition("=")
                if not equals:
                    raise SpecError(f"{option!r} in {text!r}: expected key=value")
                long = SHORT_NAMES.get(name.strip(), (name.strip(),))
                names = {name.strip()} if len(long) > 1 else {name.strip(), *long}
                values = dict.fromkeys(long, _read_value(value.strip()))
            if not given.isdisjoint({*names, *values}):
                raise SpecError(f"{option!r} in {text!r}: this was given before; give each option once")
            given |= names
            fields |= values
        return cls.checked(fields)

    @classmethod
    def load(cls, path: Path | str) -> CacheSpec:
        """Read the fields of a spec from a YAML or JSON file, e.g. what :meth:`dump` returned.

        Raises:
            SpecError: the file holds no spec; one sentence says why.
        """
        return cls.parse(f"@{path}")

    def dump(self) -> str:
        """Return the spec as YAML, for :meth:`load` and for a matrix."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)

    @classmethod
    def from_json(cls, text: str) -> CacheSpec:
        """Read what ``model_dump_json`` wrote, in a file of unknown age.

        Raises:
            SpecError: it is no spec of this version; one sentence says why.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SpecError(f"a spec that this version cannot read: {_first_sentence(error)}") from None

    @classmethod
    def required(cls, spec: object) -> CacheSpec:
        """Return ``spec``, which must be one.

        Raises:
            SpecError: it is something else, its text for example.
        """
        if not isinstance(spec, CacheSpec):
            raise SpecError(f"{spec!r}: expected a CacheSpec; CacheSpec.parse reads one from text such as 'kivi:bits=2'")
        return spec

    @classmethod
    def checked(cls, fields: dict[str, Any]) -> CacheSpec:
        """Build a spec, turning pydantic's report into one sentence.

        Raises:
            SpecError: some field is wrong.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise SpecError(_first_sentence(error)) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return read_fields(path, expected="the fields of a cache spec")
    except FieldsError as error:
        raise SpecError(str(error)) from None


def _from_slug(text: str) -> str:
    """Return a slug as a spec with compact options, and every other text as it is."""
    kinds = [kind for kind in get_args(Kind) if text.startswith(f"{kind}-k")]
    if not kinds:
        return text
    if digest := re.search(r"-L[0-9a-f]{6}\b", text):
        raise SpecError(f"{digest.group()[1:]!r} in {text!r}: settings by layer are read from a file, as SPEC@FILE")
    return f"{kinds[0]}:{text.removeprefix(kinds[0] + '-').replace('-', ',')}"


def _read_compact(option: str) -> dict[str, int | str]:
    """Return the fields that an option such as ``k4v3`` gives; none where it is no compact one."""
    if option in COMPACT_WORDS:
        name, value = COMPACT_WORDS[option]
        return {name: value}
    for pattern, names in COMPACT:
        if found := pattern.fullmatch(option):
            return dict(zip(names, map(_read_value, found.groups()), strict=True))
    return {}


def _read_value(text: str) -> int | str:
    return int(text) if NUMBER.fullmatch(text) else text


def _first_sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{where}: no such option; known are {', '.join([*SHORT_NAMES, *CacheSpec.model_fields])}"
    return f"{where}={reason(first)}" if where else reason(first)


def reason(finding: ErrorDetails) -> str:
    """Return what pydantic found wrong in a few words: the value, shortened where it is long, and what was expected."""
    if finding["type"] == "value_error":
        return finding["msg"].removeprefix("Value error, ")
    given = repr(finding["input"])
    if len(given) > LONGEST_QUOTE:
        given = f"{given[: LONGEST_QUOTE - 3]}..."
    return f"{given}: {finding['msg'].replace('Input should be', 'expected')}"
