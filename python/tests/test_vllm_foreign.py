"""Options of other connectors: which are taken as ours, and what the error says of the others."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvagent.vllm.options import DEFAULTS, Foreign, OptionError, Options, parse, synonyms, table, text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"consumer_is_to_put": True}, {"consumer_saves": True}),
        ({"save_decode_cache": False}, {"save_decode": False}),
        ({"store_tp_size": 4}, {"share_tp": 4}),
        ({"cache_prefix": "team-a"}, {"tenant": "team-a"}),
        ({"lmcache.save_decode_cache": False}, {"save_decode": False}),
        ({"save_decode_cache": True, "save_decode": True}, {}),  # both say the same
        ({"use_layerwise": True}, {"layerwise": True, "load_mode": "auto", "sync_load_bytes": 64 << 20}),
        (
            {"lmcache.use_layerwise": True, "load_mode": "sync"},
            {"layerwise": True, "load_mode": "sync", "sync_load_bytes": 64 << 20},
        ),
    ],
)
def test_plain_synonyms_are_taken(given: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert parse(given) == Options(**becomes)
    assert set(synonyms(given)) == set(given) - set(DEFAULTS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load_async": True}, r"load_async: write load_mode: async \(an option of AscendStore, MooncakeStore\)"),
        ({"load_async": "False"}, "load_async: write load_mode: sync"),
        ({"lookup_rpc_port": "0"}, "lookup_rpc_port: leave it out: the agent names"),
        ({"offload_prompt_only": True}, "offload_prompt_only: write save_decode: false"),
        ({"consumer_is_to_load": True}, "consumer_is_to_load: leave it out"),
        ({"consumer_is_to_load": False}, "kv_consumer always loads"),
        ({"consumer_is_to_put": "yes"}, "^consumer_is_to_put: consumer_saves: 'yes', allowed is true or false"),
        ({"store_tp_size": 2.5}, "^store_tp_size: share_tp: 2.5, allowed is an integer 0 to 256"),
        ({"cpu_bytes_to_use": 1 << 30}, "is a setting of the agent: kvagent serve --pool SIZE"),
        ({"backends": ["UCX"], "xyzzy": 1}, "backends: no counterpart: .*; xyzzy: no such option"),
        ({"global_segment_size": "1GB"}, r"mooncake://HOST:PORT\?segment=SIZE"),
        ({"lmcache.mp.port": 5555}, "socket_dir"),
        ({"use_layerwise": False, "layerwise": True}, "use_layerwise: means layerwise, but layerwise is true"),
        (
            {"use_layerwise": True, "load_mode": "async"},
            "^use_layerwise: layerwise: true, allowed only where load_mode",
        ),
        ({"use_layerwise": True, "store_tp_size": 2}, "^use_layerwise, store_tp_size: layerwise: true, allowed only"),
        ({"tenamt": "a"}, "tenamt: no such option; did you mean tenant?"),
        ({"consumer_is_to_store": 3}, "did you mean consumer_saves or consumer_is_to_put"),
    ],
)
def test_others_end_the_start_and_say_what_to_write(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse(given)


@pytest.mark.parametrize("name", sorted(table()))
def test_every_entry_says_something_that_the_connector_takes(name: str) -> None:
    foreign = table()[name]
    assert name not in DEFAULTS, "it would be read as ours"
    assert foreign.of
    assert not foreign.option or foreign.option in DEFAULTS
    for means in foreign.values.values():
        parse(means)
    for value in (True, False, 0, 1, "x", None, [1], {"a": 1}):
        assert foreign.meaning(value) is not None or foreign.otherwise()
        assert foreign.advice(value)


def in_markdown(foreign: Foreign) -> str:
    """Return what an option means here."""
    values = [
        f"`{value}`: {', '.join(f'`{name}: {text(one)}`' for name, one in means.items()) or 'leave it out'}"
        for value, means in foreign.values.items()
    ]
    same = [f"the same as `{foreign.option}`"] if foreign.option else []
    agent = [f"`kvagent serve {foreign.agent}`".replace("|", "\\|")] if foreign.agent else []
    out = [f"leave it out: {foreign.leave_out}"] if foreign.leave_out else []
    rest = ", ".join([*out, *agent, *([foreign.here] if foreign.here else [])])
    return "; ".join([*same, *values, *([f"otherwise {rest}" if values else rest] if rest else [])])


def test_the_page_has_the_table() -> None:
    """Options that mean the same share a row. A page with the right table is left in build/."""
    page = (ROOT / "docs" / "MIGRATING.md").read_text()
    entries = [(", ".join(one.of), in_markdown(one), name) for name, one in table().items()]
    made = page.partition("| option |")[0] + "| option | of | here |\n|---|---|---|\n"
    groups = itertools.groupby(sorted(entries, key=lambda entry: entry[:2]), key=lambda entry: entry[:2])
    for (of, here), group in groups:
        made += f"| {', '.join(f'`{name}`' for *_, name in group)} | {of} | {here} |\n"
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "MIGRATING.md").write_text(made)
    assert made == page, "cp build/MIGRATING.md docs/"
