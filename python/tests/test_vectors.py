"""Every vector of testdata/wire is decoded, compared, and encoded to the same bytes; every
malformed one is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvagent import messages as m
from kvagent.errors import Malformed
from kvagent.fields import pack, unpack
from kvagent.lookup import ANSWER_FORM, REQUEST_FORM, encode_request
from kvagent.wire import decode, encode
from tests import foreign

WIRE = Path(__file__).resolve().parents[2] / "testdata" / "wire"
SESSION: dict[str, list[dict[str, Any]]] = json.loads((WIRE / "session.json").read_text())
LOOKUP: dict[str, list[dict[str, Any]]] = json.loads((WIRE / "lookup.json").read_text())


def named(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


def fields_of(value: Any) -> Any:
    """A message in the vectors' notation."""
    if dataclasses.is_dataclass(value):
        return {field.name: fields_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return {"key": value[0], "value": value[1]}
    if isinstance(value, tuple):
        return [fields_of(one) for one in value]
    return value


def present(fields: dict[str, Any], vector: dict[str, Any]) -> dict[str, Any]:
    """The fields that the vector's version has."""
    return {name: value for name, value in fields.items() if name in vector["fields"]}


@named(SESSION["messages"])
def test_session_message(vector: dict[str, Any]) -> None:
    body = bytes.fromhex(vector["hex"])
    message = decode(body)
    assert present(fields_of(message), vector) == vector["fields"]
    assert encode(message) == body


@named(SESSION["malformed"])
def test_session_malformed(vector: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        decode(bytes.fromhex(vector["hex"]))


def test_session_vectors_name_every_message() -> None:
    known = {message.__name__.upper() for message in m.NUMBERS.values()}
    assert {vector["message"].replace("_", "") for vector in SESSION["messages"]} == known


@pytest.mark.parametrize("space", SESSION["spaces"], ids=[space["register"] for space in SESSION["spaces"]])
def test_space(space: dict[str, Any]) -> None:
    vector = next(one for one in SESSION["messages"] if one["name"] == space["register"])
    register = decode(bytes.fromhex(vector["hex"]))
    assert isinstance(register, m.Register)
    groups = [[group.block_tokens, group.window] for group in register.groups]
    canonical = pack([list(register.identity), register.shards, register.hash_tokens, groups])
    assert canonical.hex() == space["identity"]
    assert hashlib.sha256(canonical).digest()[:16].hex() == space["space"]


@named([vector for vector in LOOKUP["requests"] if vector["form"] == "own"])
def test_own_request(vector: dict[str, Any]) -> None:
    (frame,) = [bytes.fromhex(one) for one in vector["frames"]]
    request = REQUEST_FORM.read(unpack(frame), "Request")
    assert present(fields_of(request), vector) == vector["fields"]
    assert encode_request(request) == frame


@named([vector for vector in LOOKUP["replies"] if vector["form"] == "own"])
def test_own_answer(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["hex"])
    answer = ANSWER_FORM.read(unpack(frame), "Answer")
    assert fields_of(answer) == vector["fields"]
    assert pack(ANSWER_FORM.write(answer, "Answer")) == frame


@named([vector for vector in LOOKUP["malformed"] if vector["form"] == "own"])
def test_own_malformed(vector: dict[str, Any]) -> None:
    (frame,) = [bytes.fromhex(one) for one in vector["frames"]]
    with pytest.raises(Malformed):
        encode_request(REQUEST_FORM.read(unpack(frame), "Request"))


@named([vector for vector in LOOKUP["requests"] if vector["form"] not in ("own", "reset")])
def test_foreign_request(vector: dict[str, Any]) -> None:
    """The forms that tests/test_foreign.py sends are those of the vectors."""
    fields = vector["fields"]
    length, blob = fields["hash_len"], bytes.fromhex(fields["hashes"])
    hashes = [blob[i : i + length] for i in range(0, len(blob), length)] if length else []
    groups = list(bytes.fromhex(fields["groups"])) if "groups" in fields else None
    made = {
        "upstream": lambda: foreign.upstream(fields["tokens"], hashes, length),
        "simple": lambda: foreign.simple(fields["tokens"], hashes),
    }.get(vector["form"], lambda: foreign.ascend(fields["tokens"], hashes, groups, fields.get("hbm_tokens")))()
    assert [frame.hex() for frame in made] == vector["frames"]
