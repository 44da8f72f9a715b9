"""The helper reads or writes every frame of testdata/wire/mooncake.json, and refuses malformed
ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvagent.errors import Malformed
from kvagent.fields import Record, pack, unpack
from kvagent.mooncake import VERSION, Settings, read_request

FILE = Path(__file__).resolve().parents[2] / "testdata" / "wire" / "mooncake.json"
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())


def named(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


@named(VECTORS["frames"])
def test_frame(vector: dict[str, Any]) -> None:
    body = bytes.fromhex(vector["hex"])
    assert unpack(body) == vector["value"]
    assert pack(vector["value"]) == body


@named([vector for vector in VECTORS["frames"] if vector["from"] == "agent"])
def test_frame_of_the_agent(vector: dict[str, Any]) -> None:
    frame = unpack(bytes.fromhex(vector["hex"]))
    if vector["name"].startswith("hello"):
        assert frame[0] == VERSION
        settings = Record(Settings).read(frame[1], "settings")
        assert [settings.host, settings.master, settings.threads] == [frame[1][0], frame[1][6], frame[1][8]]
        return
    assert list(read_request(frame)) == vector["value"]


@named([vector for vector in VECTORS["malformed"] if vector["from"] == "agent"])
def test_malformed_request(vector: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_request(unpack(bytes.fromhex(vector["hex"])))
