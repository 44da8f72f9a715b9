"""What clients may send: JSON of every type, under the names that the connector reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

NAMES = (
    "kvagent", "kvagent.save", "kvagent.load", "kvagent.max_load_tokens", "kvagent.hints", "kvagent.session",
    "do_remote_decode", "do_remote_prefill", "transfer_id", "remote_engine_id", "remote_request_id", "remote_host",
    "remote_port", "remote_num_tokens", "remote_bootstrap_addr", "remote_kv_source",
)  # fmt: skip
NESTED = (
    "save", "load", "max_load_tokens", "hints", "session", "kv_transfer_params", "", "\ud800", "actions", "action",
    "id", "priority", "seconds", "lease_until", "from", "action_type", "action_id", "action_version", "payload",
)  # fmt: skip
ACTIONS = ("kv.retain", "kv.pin", "kv.demote", "kv.drop", "kv.prefetch", "kv.fetch", "kv.other")
SCALARS = (
    None, True, False, 0, -1, 8080, 1 << 63, 1 << 200, 1.5, math.nan, math.inf, "", "x", "a@b:1", "\ud800", "\0",
    "y" * 9999, "9" * 9999,
)  # fmt: skip


def some_json(dice: random.Random, depth: int = 2) -> Any:
    """Return a scalar, or a list or mapping of at most this depth."""
    kind = dice.randrange(4) if depth else 0
    if kind == 1:
        return [some_json(dice, depth - 1) for _ in range(dice.randrange(3))]
    if kind == 2:
        return {dice.choice((*NAMES, *NESTED)): some_json(dice, depth - 1) for _ in range(dice.randrange(4))}
    return dice.choice(SCALARS)


def some_params(dice: random.Random, number: int) -> Any:
    """Return ``kv_transfer_params`` of request ``number``: sane ones with random values among them,
    or anything.
    """
    if dice.random() < 0.2:
        return some_json(dice)
    sane = {dice.choice(("do_remote_decode", "do_remote_prefill")): True, "transfer_id": f"t{number}"}
    sane["remote_kv_source"] = {"remote_host": "h", "remote_port": dice.choice(SCALARS)}
    sane |= {"remote_port": 8080, "kvagent.hints": [some_action(dice) for _ in range(dice.randrange(3))]}
    return sane | {name: some_json(dice, dice.randrange(3)) for name in dice.sample(NAMES, dice.randrange(5))}


def some_action(dice: random.Random) -> dict[str, Any]:
    """Return an action on blocks: a sane one, or one with a random value."""
    sane = {"action": dice.choice(ACTIONS), "id": "a", "seconds": dice.choice((0, 0.001, 60)), "from": "127.0.0.1:9"}
    return sane | ({dice.choice((*sane, "priority")): some_json(dice, 1)} if dice.random() < 0.5 else {})
