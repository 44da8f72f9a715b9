"""Options of other connectors: which become which of ours, and which end the start."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvagent.vllm.options import OptionError, Options, parse, translation
from kvagent.vllm.peer_options import translate
from kvagent.vllm.peer_table import LMCACHE_OPTIONS, PEER_OPTIONS

OWN = frozenset(field.name for field in fields(Options))


@pytest.mark.parametrize(
    ("given", "role", "becomes"),
    [
        ({"consumer_is_to_put": True}, "kv_consumer", {"consumer_saves": True}),
        ({"consumer_is_to_load": True}, "kv_consumer", {}),
        ({"consumer_is_to_load": False}, "kv_producer", {}),
        ({"save_decode_cache": False}, "kv_both", {"save_decode": False}),
        ({"discard_partial_chunks": False}, "kv_both", {}),
        ({"lookup_rpc_port": "3", "mooncake_rpc_port": 4}, "kv_both", {}),
        ({"store_tp_size": 4}, "kv_both", {"share_tp": 4}),
        ({"enable_store_tp_lcm": True, "prefill_tp_sizes": [4, 6]}, "kv_both", {"share_tp": 12}),
        ({"enable_lookup": False}, "kv_producer", {"producer_loads": False}),
        ({"enable_cross_layers_blocks": "False"}, "kv_both", {"layout": "none"}),
        ({"cache_prefix": "team-a"}, "kv_both", {"tenant": "team-a"}),
        ({"offload_prompt_only": True}, "kv_both", {"save_decode": False}),
        ({"lmcache.min_retrieve_tokens": 0}, "kv_both", {"min_load_tokens": 1}),
        ({"lmcache.lookup_timeout_ms": 900}, "kv_both", {"lookup_age_ms": 900}),
        ({"sync_load_budget_bytes": 0, "load_async": True, "lazy_offload": False}, "kv_both", {}),
        ({"save_decode_cache": True, "save_decode": True}, "kv_both", {}),  # both say the same
        ({"use_layerwise": True, "load_async": False}, "kv_both", {"layerwise": True, "load_mode": "sync"}),
    ],
)
def test_same_meanings_are_understood(given: dict[str, Any], role: str, becomes: dict[str, Any]) -> None:
    assert parse(given, role) == Options(**becomes)
    assert set(translation(given, role).accepted) == set(given) - OWN


@pytest.mark.parametrize(
    ("given", "role", "said"),
    [
        ({"consumer_is_to_load": False}, "kv_consumer", "consumer_is_to_load: false differs: kv_consumer always"),
        ({"consumer_is_to_put": "yes"}, "kv_consumer", "consumer_is_to_put: 'yes', allowed is true or false"),
        ({"store_tp_size": 2.5}, "kv_both", "store_tp_size: share_tp: 2.5, allowed is an integer 0 to 256"),
        ({"enable_store_tp_lcm": True}, "kv_both", "needs prefill_tp_sizes"),
        ({"enable_lookup": False}, "kv_both", "enable_lookup: false differs"),
        ({"cpu_bytes_to_use": 1 << 30}, "kv_both", "setting of the agent: kvagent serve --pool"),
        ({"sync_load_budget_bytes": 1}, "kv_both", "differs: set load_mode: sync, and sync_load_bytes"),
        ({"sync_load_budget_bytes": 0, "load_mode": "sync"}, "kv_both", "means load_mode: async, but load_mode is"),
        ({"use_layerwise": False, "layerwise": True}, "kv_both", "means layerwise: false, but layerwise is True"),
        ({"backend": "mooncake"}, "kv_both", "kvagent serve --tier"),
        ({"lmcache.mp.port": 5555}, "kv_both", "set socket_dir"),
        ({"save_decode_cache": False, "save_decode": True}, "kv_both", "means save_decode: false, but save_decode is"),
        ({"save_decode_cache": False, "offload_prompt_only": False}, "kv_both", "offload_prompt_only: means"),
        ({"use_layerwise": True}, "kv_both", "^use_layerwise: layerwise: true, allowed only where load_mode is sync"),
        ({"use_layerwise": True, "load_async": True}, "kv_both", "^use_layerwise, load_async: layerwise: true"),
        ({"lazy_offload": True, "pin_percent": 0}, "kv_both", "^lazy_offload: offload: lazy, allowed only where"),
        ({"pin_procent": 3}, "kv_both", "pin_procent: no such option; did you mean pin_percent?"),
        ({"consumer_is_to_store": 3}, "kv_both", "did you mean consumer_saves or consumer_is_to_put"),
        ({"xyzzy": 1}, "kv_both", "xyzzy: no such option; there are agent, consumer_saves, "),
        ({"backends": ["UCX"], "xyzzy": 1}, "kv_both", "backends: has no counterpart: .*; xyzzy: no such option"),
    ],
)
def test_other_meanings_end_the_start(given: dict[str, Any], role: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse(given, role)


def test_modes_that_a_version_lacks_are_refused_and_others_are_set() -> None:
    sync, lazy, layers = {"load_async": False}, {"lazy_offload": True}, {"use_layerwise": True}
    for given in (sync, lazy, layers):
        assert list(translate(given, "kv_both", frozenset({"tenant"})).refused) == list(given)
    modes = frozenset({"load_mode", "offload", "layerwise"})
    assert translate(sync, "kv_both", modes).options == {"load_mode": "sync"}
    assert translate(lazy, "kv_both", modes).options == {"offload": "lazy"}
    assert translate(layers, "kv_both", modes).options == {"layerwise": True}


SAMPLES = (True, False, 0, 1, 7, 2.5, "x", "disk", "", None, [1, 2], {"a": 1})


@pytest.mark.parametrize("name", sorted(PEER_OPTIONS))
def test_every_option_has_a_meaning_for_every_value(name: str) -> None:
    for value in SAMPLES:
        for role in ("kv_both", "kv_producer", "kv_consumer"):
            result = translation({name: value}, role)
            assert list(result.accepted) + list(result.refused) == ([] if name in OWN else [name])
            assert set(result.options) <= OWN


def test_no_name_of_ours_is_also_taken_from_others() -> None:
    """A name of both would be read as ours: the table would never be asked."""
    assert not OWN & set(PEER_OPTIONS)
    assert all(f"lmcache.{name}" in PEER_OPTIONS for name in LMCACHE_OPTIONS)
