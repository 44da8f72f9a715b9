"""Names of transfers, which the engines of both sides make from what a proxy gives them.

A name needs nothing that a proxy would have to know: it is the proxy's own where it gives one to
both sides, else made of the prefill engine's identifiers, or, where the proxy asks both engines at
once, of the request ID that both of them get.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_PEER_ADDRESS, MAX_TRANSFER_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")  # vLLM makes request IDs unique with it
_PART = re.compile(r"(?:(\d{1,4})_)?(?:cmpl-.*-(\d{1,4})\Z)?")  # of several samples, or several prompts


@dataclass(frozen=True, slots=True)
class Wanted:
    """The transfer that a request is to receive.

    ``peer`` is the address of the prefill engine's agent, and ``early`` whether that engine may not
    have seen its request yet.
    """

    name: bytes
    peer: str
    early: bool


def base(request_id: str) -> str:
    """Return a request ID without what vLLM appended to make it unique."""
    return _SUFFIX.sub("", request_id)


def offered_name(params: Mapping[str, Any], engine_id: str, request_id: str) -> bytes:
    """Return the name of the transfer that a prefill request opens."""
    given = params.get("transfer_id")
    return _given(given, request_id) if is_name(given) else _made(engine_id, base(request_id))


def wanted(params: Mapping[str, Any], request_id: str) -> Wanted | None:
    """Return the transfer that a decode request names; None if it names none."""
    early = not isinstance(params.get("remote_num_tokens"), int)
    given = params.get("transfer_id")
    engine_id, remote = params.get("remote_engine_id"), params.get("remote_request_id")
    if is_name(given):
        name = _given(given, request_id)
    elif is_name(engine_id) and is_name(remote):
        own = base(request_id)
        name = _made(str(engine_id), own if early and str(remote) in own else base(str(remote)))
    else:
        return None
    return Wanted(name, _peer(params), early)


def is_name(value: object) -> bool:
    """Return whether a value that a client sent names something."""
    return isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""


def _given(name: object, request_id: str) -> bytes:
    """Return the name for one of the requests of a proxy's request, which may have several prompts
    or samples.
    """
    matched = _PART.match(base(request_id))
    sample, prompt = matched.groups() if matched else (None, None)
    part = f"#{sample or 0}.{prompt or 0}" if sample or prompt not in (None, "0") else ""
    return _short(f"t/{name}{part}")


def _made(engine_id: str, request_id: str) -> bytes:
    return _short(f"r/{engine_id}/{request_id}")


def _short(name: str) -> bytes:
    encoded = name.encode(errors="replace")
    return encoded if len(encoded) <= MAX_TRANSFER_NAME else b"h/" + hashlib.sha256(encoded).hexdigest().encode()


def _peer(params: Mapping[str, Any]) -> str:
    """Return host:port of the prefill engine's agent, or nothing.

    Mooncake's proxy forwards no address, but the identifier in which the agent's /query has put it.
    """
    host, port = params.get("remote_host"), params.get("remote_port")
    engine_id = params.get("remote_engine_id")
    address = ""
    if isinstance(host, str) and host and isinstance(port, int) and 0 < port < 65536:
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    elif "remote_bootstrap_addr" in params and isinstance(engine_id, str) and "@" in engine_id:
        address = engine_id.rpartition("@")[2]
    return address if address.isascii() and len(address) <= MAX_PEER_ADDRESS else ""


def split(peer: str) -> tuple[str, int]:
    """Return host and port of an agent's address; empty and 0 if it has none."""
    host, _, port = peer.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else ("", 0)
