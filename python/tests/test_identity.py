from __future__ import annotations

import pytest

from kvagent.errors import Malformed
from kvagent.registration import identity_pairs

IDENTITY = {"model": "m", "dtype": "bf16", "tenant": ""}


def test_pairs_are_sorted_by_their_bytes() -> None:
    assert [key for key, _ in identity_pairs({**IDENTITY, "Z": "1", "ä": "2"})] == [
        "Z",
        "dtype",
        "model",
        "tenant",
        "ä",
    ]


@pytest.mark.parametrize("missing", ["model", "dtype", "tenant"])
def test_what_an_identity_cannot_do_without(missing: str) -> None:
    with pytest.raises(Malformed, match=missing):
        identity_pairs({key: value for key, value in IDENTITY.items() if key != missing})


def test_an_identity_is_bounded() -> None:
    with pytest.raises(Malformed, match="65 items"):
        identity_pairs({**IDENTITY, **{f"key{i}": "" for i in range(62)}})
    with pytest.raises(Malformed, match="bytes, at most 16384"):
        identity_pairs({**IDENTITY, "a": "x" * 16384})
