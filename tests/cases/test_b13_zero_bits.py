"""B13: bits=0 was accepted, and NaN came out much later."""

from __future__ import annotations

import pytest

from kivi.spec import CacheSpec, SpecError


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -2, True, 2.0, "2"])
@pytest.mark.parametrize("field", ["key_bits", "value_bits"])
def test_bits_that_kivi_has_not_are_refused_at_construction(field, bits):
    with pytest.raises(SpecError, match=f"{field}=.*KIVI codes have 2, 3, 4 or 8 bits"):
        CacheSpec.checked({"kind": "kivi-roundtrip", field: bits})
