"""A CacheSpec is checked once, and says in one sentence what is wrong."""

from __future__ import annotations

import pytest

from kivi.spec import CacheSpec, LayerSpec, SpecError


def test_short_names_are_for_text_and_the_message_has_the_long_ones():
    with pytest.raises(ValueError, match=r"bits is short for key_bits and value_bits, in CacheSpec\.parse only"):
        CacheSpec(bits=4)
    with pytest.raises(SpecError, match="bit: no such option; known are bits, group, residual, sinks, params, kind, key_bits"):
        CacheSpec.parse("kivi:bit=4")


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("full", "full"),
        ("kivi", "kivi-k2v2-g32-r128-auto"),
        ("kivi:bits=4", "kivi-k4v4-g32-r128-auto"),
        ("kivi:key_bits=4,value_bits=2,group=32,residual=128,backend=mlx", "kivi-k4v2-g32-r128-mlx"),
        ("kivi:bits=8,value_bits=2,sinks=64,params=float32", "kivi-k8v2-g32-r128-s64-p32-auto"),
        ("kivi:key_bits=3,group=64,sinks=64,rotate=both,backend=mlx", "kivi-k3v2-g64-r128-s64-hkv-mlx"),
        ("kivi:rotate=keys,params=float32", "kivi-k2v2-g32-r128-hk-p32-auto"),
        ("kivi-roundtrip:rotate=values", "kivi-roundtrip-k2v2-g32-r128-hv-auto"),
        ("kivi:rotate=none", "kivi-k2v2-g32-r128-auto"),
        ("kivi-roundtrip:bits=2,residual=0,backend=mlx", "kivi-roundtrip-k2v2-g32-r0-mlx"),
        ("mlx-quantized:bits=3", "mlx-quantized-k3v3-g32"),
    ],
)
def test_parse_and_slug(text, slug):
    spec = CacheSpec.parse(text)
    assert spec.slug == slug
    assert CacheSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("long", "text"),
    [
        ("full", "full"),
        ("kivi", "kivi:k2v2"),
        ("kivi:key_bits=4,value_bits=3,group=64,sinks=64,rotate=both", "kivi:k4v3,g64,s64,hkv"),
        ("kivi-roundtrip:bits=8,residual=0,rotate=keys,params=float32,backend=mlx", "kivi-roundtrip:k8v8,r0,hk,p32,mlx"),
        ("mlx-quantized:bits=4,group=64", "mlx-quantized:k4v4,g64"),
    ],
)
def test_the_shortest_text_and_the_slug_are_read_back(long, text):
    spec = CacheSpec.parse(long)
    assert spec.text == text
    assert spec == CacheSpec.parse(text) == CacheSpec.parse(spec.slug)


def test_settings_by_layer_are_not_read_from_a_slug():
    slug = CacheSpec(layers={0: {"key_bits": 8}}, backend="mlx").slug
    with pytest.raises(SpecError, match="settings by layer are read from a file, as SPEC@FILE"):
        CacheSpec.parse(slug)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kivi:k4v3,bits=2", "'bits=2' in 'kivi:k4v3,bits=2': this was given before"),
        ("kivi:bits=2,k4v3", "'k4v3' in 'kivi:bits=2,k4v3': this was given before"),
        ("kivi:k5v5", "key_bits=5: KIVI codes have 2, 3, 4 or 8 bits"),
        ("kivi-k4v3-q7", "'q7' in 'kivi-k4v3-q7': expected key=value"),
        ("kivi:bits=0", "key_bits=0: KIVI codes have 2, 3, 4 or 8 bits"),
        ("kivi:bits=5", "key_bits=5: KIVI codes have 2, 3, 4 or 8 bits"),
        ("kivi:bits=two", "key_bits='two': KIVI codes have 2, 3, 4 or 8 bits"),
        ("kivi:group=48", "group_size=48: MLX packs groups of 32, 64 or 128"),
        ("kivi:residual=-1", "residual_length=-1"),
        ("kivi:sinks=33", "sink_length=33: must be a multiple of group_size=32"),
        ("kivi:params=bfloat16", "param_dtype='bfloat16': its 8-bit mantissa ruins"),
        ("kivi:backend=tpu", "backend='tpu'"),
        ("kivi:rotate=queries", "rotate='queries': expected 'none', 'keys', 'values' or 'both'"),
        ("mlx-quantized:rotate=keys", "takes bits and group_size only, got rotate"),
        ("kivi:bits=--4", "key_bits='--4'"),
        ("kivi:bits=\N{SUPERSCRIPT TWO}", "key_bits="),
        ("kivi:bits=\N{FULLWIDTH DIGIT TWO}", "key_bits="),
        ("kivi:residual=" + "9" * 5000, "residual_length='999"),
        ("kivi:residual=16777217", "residual_length=16777217: expected less than or equal to 16777216"),
        ("kivi:bits=2,bits=4", "'bits=4' in 'kivi:bits=2,bits=4': this was given before"),
        ("kivi:value_bits=2,bits=4", "'bits=4' in 'kivi:value_bits=2,bits=4': this was given before"),
        ("kivi:group=32,group_size=64", "'group_size=64'"),
        ("kivi:kind=full", "'kind=full' in 'kivi:kind=full': this was given before"),
        ("kivi:colour=red", "colour: no such option; known are"),
        ("kivi:bits", "'bits' in 'kivi:bits': expected key=value"),
        ("kiwi", "kind='kiwi'"),
        ("", "kind=''"),
        (":bits=4", "kind=''"),
        ("full:bits=2", "a full cache takes no options"),
        ("mlx-quantized:bits=7", "7: KIVI codes have 2, 3, 4 or 8 bits, those of mlx-lm's quantised cache 2, 3, 4, 5, 6 or 8"),
        ("kivi:bits=7", "7: KIVI codes have 2, 3, 4 or 8 bits, those of mlx-lm's quantised cache 2, 3, 4, 5, 6 or 8"),
        ("mlx-quantized:residual=3", "takes bits and group_size only, got residual_length"),
        ("mlx-quantized:key_bits=4,value_bits=2", "key_bits=4, value_bits=2: mlx-lm's quantised cache has one number"),
    ],
)
def test_a_bad_spec_is_refused_in_one_sentence(text, says):
    with pytest.raises(SpecError, match=r"^[^\n]*$") as raised:
        CacheSpec.parse(text)
    assert says in str(raised.value)


def test_layers_differ_through_the_spec():
    spec = CacheSpec(key_bits=2, layers={0: {"key_bits": 8}, -1: {"kind": "full"}})
    assert [spec.for_layer(index, 4).key_bits for index in range(3)] == [8, 2, 2]
    assert spec.for_layer(3, 4).kind == "full"
    assert spec.slug != CacheSpec(key_bits=2).slug
    assert CacheSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"key_bits": [2, 4]}, "one cache has one number of bits"),
        ({"layers": {0: {"key_bits": 6}}}, "layers[0]: key_bits=6"),
        ({"layers": {1: {"group_size": 128}}, "sink_length": 32}, "layers[1]: sink_length=32"),
        ({"kind": "full", "layers": {0: {"key_bits": 2}}}, "a full cache takes no options"),
        ({"layers": {0: {"kind": "full", "key_bits": 2}}}, "layers[0]: a full cache takes no options, got key_bits"),
    ],
)
def test_bad_layers_are_refused(fields, says):
    with pytest.raises(SpecError) as raised:
        CacheSpec.checked(fields)
    assert says in str(raised.value)


def test_a_layer_is_rotated_on_its_own():
    spec = CacheSpec(rotate="both", layers={0: {"rotate": "none"}, -1: {"rotate": "values", "value_bits": 3}})
    rotated = [[codec.rotated for codec in spec.for_layer(index, 3).codecs] for index in range(3)]
    assert rotated == [[False, False], [True, True], [False, True]]


MIXED = """
kind: kivi
key_bits: 4
rotate: both
layers:
  0: {key_bits: 8}
  -1: {kind: full}
"""


def test_a_spec_is_read_from_a_file_and_the_text_before_it_goes_first(tmp_path):
    path = tmp_path / "mixed@home.yaml"
    path.write_text(MIXED)
    layers = {0: LayerSpec(key_bits=8), -1: LayerSpec(kind="full")}
    whole = CacheSpec(key_bits=4, rotate="both", layers=layers)
    assert CacheSpec.load(path) == CacheSpec.parse(f"@{path}") == CacheSpec.parse(f"kivi@{path}") == whole
    other = CacheSpec.parse(f"kivi-roundtrip:key_bits=3,residual=32@{path}")
    assert other == CacheSpec(kind="kivi-roundtrip", key_bits=3, residual_length=32, rotate="both", layers=layers)
    assert CacheSpec.parse(f":sinks=64@{path}") == whole.model_copy(update={"sink_length": 64})


@pytest.mark.parametrize("text", ["full", "mlx-quantized:bits=6", "kivi:key_bits=3,rotate=keys,params=float32"])
def test_what_is_dumped_and_the_json_of_a_result_are_files_to_load(text, tmp_path):
    spec = CacheSpec.parse(text)
    if spec.kind == "kivi":
        spec = CacheSpec(**{**spec.model_dump(), "layers": {0: {"value_bits": 8}, -2: {"rotate": "both"}}})
    for written in (spec.dump(), spec.model_dump_json(), spec.model_dump_json(indent=2)):
        (tmp_path / "spec").write_text(written)
        assert CacheSpec.load(tmp_path / "spec") == spec


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[1, 2]", "expected the fields of a cache spec, got list"),
        ("layers: {0: {key_bits: 4}, 0: {key_bits: 8}}", "not YAML: '0' is there twice"),
        ("kind: [", "not YAML"),
        ("bits: 4", "bits is short for key_bits and value_bits, in CacheSpec.parse only"),
        ("layers: {0: {key_bits: 5}}", "layers[0]: key_bits=5"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(written, says, tmp_path):
    path = tmp_path / "spec.yaml"
    if written is not None:
        path.write_text(written)
    with pytest.raises(SpecError, match=r"^[^\n]*$") as raised:
        CacheSpec.load(path)
    assert says in str(raised.value)


def test_a_layer_that_the_model_does_not_have_is_refused():
    with pytest.raises(SpecError, match=r"layers\[7\]: the model has 4 layers, 0 to 3"):
        CacheSpec(layers={7: {"key_bits": 8}}).for_layer(0, 4)


def test_a_layer_that_is_named_twice_is_refused():
    spec = CacheSpec(layers={0: LayerSpec(key_bits=8), -3: LayerSpec(key_bits=4)})
    with pytest.raises(SpecError, match=r"layers\[-3\] and layers\[0\]: the same of 3 layers; name it once"):
        spec.for_layer(1, 3)
    assert spec.for_layer(0, 4).key_bits == 8
