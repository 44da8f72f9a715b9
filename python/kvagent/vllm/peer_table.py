"""The options that other connectors read in ``kv_connector_extra_config``, and the rule of each."""

from __future__ import annotations

import math
from typing import Any

from kvagent.vllm.peer_rules import (
    Given,
    Meaning,
    PeerOption,
    Rule,
    agent,
    as_here,
    becomes,
    none,
    only,
    only_zero,
    refused,
    said,
    set_to,
    sets,
    switch,
)


def _consumer_loads(value: Any, given: Given) -> Meaning:
    if value or given.role in ("kv_both", "kv_producer"):
        return Meaning("needs nothing: kv_consumer loads, and other roles do not depend on it")
    return Meaning("false differs: kv_consumer always loads here; use kv_producer, or no connector", refused=True)


def _no_lookups(_: Any, given: Given) -> Meaning:
    if given.role == "kv_producer":
        return set_to("producer_loads", False, given)
    return Meaning("false differs: only kv_producer can be kept from loading (producer_loads: false)", refused=True)


def _sync_budget(value: Any, given: Given) -> Meaning:
    if value in (0, "0"):
        return set_to("load_mode", "async", given)
    return Meaning("differs: set load_mode: sync, and sync_load_bytes, which is for each rank", refused=True)


def _common_tp(_: Any, given: Given) -> Meaning:
    sizes = given.options.get("prefill_tp_sizes")
    if not (isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes)):
        return Meaning("needs prefill_tp_sizes: a list of positive integers", refused=True)
    return set_to("share_tp", math.lcm(*sizes), given)


ASCEND, STORE, MOONCAKE, NIXL = "AscendStore", "MooncakeStore", "MooncakeConnector", "NIXL"
OFFLOADING, SIMPLE, LMCACHE, LMCACHE_MP = "Offloading", "SimpleCPUOffload", "LMCache", "LMCache MP"

_POOL = "--pool SIZE: the memory is the node's, and all its engines share it"
_CHUNKS = "a block is the engine's own (--block-size); adjacent blocks travel together"
_NO_PORT = "the agent names the look-up socket of each engine"
_TRANSPORT = "how the agent reaches a Mooncake store is in the URL of its tier (docs/TIERS.md)"
_FULL_BLOCKS = as_here("only full blocks are saved")
_NO_PARTIAL = said("only full blocks are saved all the same; the tokens after them are computed again")
_LAYERWISE = switch(sets("layerwise"), sets("layerwise"))

PEER_OPTIONS: dict[str, PeerOption] = {
    # AscendStore and MooncakeStore
    "consumer_is_to_load": PeerOption(ASCEND, switch(_consumer_loads, _consumer_loads)),
    "consumer_is_to_put": PeerOption(ASCEND, switch(sets("consumer_saves"), sets("consumer_saves"))),
    "load_async": PeerOption(
        f"{ASCEND}, {STORE}",
        switch(
            becomes("load_mode", "async"),
            becomes("load_mode", "sync"),
        ),
    ),
    "discard_partial_chunks": PeerOption(f"{ASCEND}, {LMCACHE}", switch(_FULL_BLOCKS, _NO_PARTIAL)),
    "lookup_rpc_port": PeerOption(f"{ASCEND}, {STORE}", as_here(_NO_PORT)),
    "mooncake_rpc_port": PeerOption(ASCEND, as_here(_NO_PORT)),
    "save_decode_cache": PeerOption(f"{ASCEND}, {STORE}", switch(sets("save_decode"), sets("save_decode"))),
    "use_layerwise": PeerOption(f"{ASCEND}, {LMCACHE}", _LAYERWISE),
    "backend": PeerOption(ASCEND, agent("--tier URL, such as mooncake://HOST:PORT")),
    "layerwise_prefetch_layers": PeerOption(ASCEND, none("the look-ahead of layers is not counted alike")),
    "layerwise_max_transfer_blocks": PeerOption(ASCEND, only_zero(none("the agent batches"), "unlimited")),
    "layerwise_max_transfer_bytes": PeerOption(ASCEND, only_zero(none("the agent batches"), "unlimited")),
    "layerwise_num_shared_buffers": PeerOption(ASCEND, none("KV buffers are not shared between layers")),
    "layerwise_independent_layers": PeerOption(ASCEND, none("KV buffers are not shared between layers")),
    "h2d_stagger_us": PeerOption(ASCEND, only_zero(none("the agent orders the copies of all ranks"), "no delay")),
    "prefill_tp_size": PeerOption(ASCEND, refused("differs: give all engines share_tp, the least common multiple")),
    "decode_tp_size": PeerOption(ASCEND, refused("differs: give all engines share_tp, the least common multiple")),
    "prefill_pp_size": PeerOption(ASCEND, refused("differs: give all engines share_pp, the least common multiple")),
    "prefill_pp_layer_partition": PeerOption(ASCEND, none("stages must begin where ranges of share_pp begin")),
    "lookup_async": PeerOption(
        STORE,
        switch(
            as_here("no look-up blocks a step longer than lookup_wait_ms"),
            refused("false differs: a step waits at most lookup_wait_ms for an answer, a request lookup_grace_ms"),
        ),
    ),
    "enable_lookup": PeerOption(STORE, switch(as_here("prompts are looked up"), _no_lookups)),
    "store_tp_size": PeerOption(STORE, sets("share_tp")),
    "enable_store_tp_lcm": PeerOption(STORE, switch(_common_tp, as_here("sizes do not share by default"))),
    "prefill_tp_sizes": PeerOption(STORE, as_here("enable_store_tp_lcm reads it")),
    "cache_prefix": PeerOption(STORE, sets("tenant")),
    "enable_cross_layers_blocks": PeerOption(
        f"{STORE}, {NIXL}", switch(becomes("layout", "auto"), becomes("layout", "none"))
    ),
    "preferred_segment": PeerOption(STORE, agent("--tier mooncake://HOST:PORT?preferred=NAME")),
    "custom_mem_pool": PeerOption(STORE, none("engines keep their own allocator")),
    "enable_group_semantics": PeerOption(STORE, switch(none(_TRANSPORT), as_here(_TRANSPORT))),
    # prefill and decode apart
    "mooncake_protocol": PeerOption(MOONCAKE, none("blocks travel between the agents (docs/PD.md)")),
    "device_name": PeerOption(MOONCAKE, none("blocks travel between the agents (docs/PD.md)")),
    "num_workers": PeerOption(MOONCAKE, agent("--peer-streams NUMBER")),
    "bootstrap_server_address": PeerOption(MOONCAKE, agent("--peer-listen ADDRESS:PORT")),
    "backends": PeerOption(NIXL, none("blocks travel between the agents (docs/PD.md)")),
    "num_threads": PeerOption(NIXL, agent("--peer-streams NUMBER")),
    "kv_lease_duration": PeerOption(NIXL, refused("differs: transfer_ttl_ms is since the prefill engine's last word")),
    "decoder_kv_blocks_ttl": PeerOption(NIXL, none("blocks of a decode engine are in the pool until evicted")),
    "bidirectional_kv_xfer": PeerOption(
        NIXL, switch(refused("differs: set consumer_saves; blocks then go through the pool"), as_here("it is off"))
    ),
    "kv_recompute_threshold": PeerOption(NIXL, refused("differs: min_load_tokens holds for all loads from the pool")),
    "push_registration_timeout": PeerOption(NIXL, refused("differs: remote_wait_ms is the decode engine's wait")),
    "engine_ttl": PeerOption(NIXL, none("the agent drops an engine when its session ends")),
    "enforce_handshake_compat": PeerOption(
        NIXL, switch(as_here("engines share only with the same identity"), none("the identity is always compared"))
    ),
    # offloading to host memory and disk
    "cpu_bytes_to_use": PeerOption(f"{OFFLOADING}, {SIMPLE}", agent(_POOL)),
    "num_cpu_blocks": PeerOption(f"{OFFLOADING}, {SIMPLE}", agent(_POOL)),
    "lazy_offload": PeerOption(
        SIMPLE,
        switch(becomes("offload", "lazy"), becomes("offload", "eager")),
    ),
    "kv_offload_backend": PeerOption(SIMPLE, only("cpu", agent("--tier disk:/PATH?capacity=SIZE"), "it is memory")),
    "disk_path": PeerOption(SIMPLE, agent("--tier disk:/PATH?capacity=SIZE")),
    "disk_capacity_bytes": PeerOption(SIMPLE, agent("--tier disk:/PATH?capacity=SIZE")),
    "disk_buffer_slots": PeerOption(SIMPLE, agent("--tier disk:/PATH?write-depth=NUMBER")),
    "use_page_cache": PeerOption(SIMPLE, switch(none("the disk tier avoids it"), as_here("the tier avoids it"))),
    "block_size": PeerOption(OFFLOADING, none(_CHUNKS)),
    "blocks_per_chunk": PeerOption(OFFLOADING, only(1, none(_CHUNKS), "a chunk is one block")),
    "spec_name": PeerOption(OFFLOADING, none("tiers are the agent's: kvagent serve --tier URL")),
    "spec_module_path": PeerOption(OFFLOADING, none("tiers are the agent's: kvagent serve --tier URL")),
    "eviction_policy": PeerOption(OFFLOADING, agent("--eviction hazard|lru")),
    "cache_policy_module_path": PeerOption(OFFLOADING, agent("--eviction hazard|lru")),
    "store_threshold": PeerOption(OFFLOADING, only_zero(agent("--tier disk:/PATH?admit=again"), "it is off")),
    "max_tracker_size": PeerOption(OFFLOADING, none("only store_threshold needs it")),
    "offload_prompt_only": PeerOption(OFFLOADING, switch(becomes("save_decode", False), becomes("save_decode", True))),
    "self_describing_kv_events": PeerOption(OFFLOADING, switch(none("events are vLLM's"), as_here("it is off"))),
    "canonical_layout": PeerOption(
        OFFLOADING,
        switch(refused("differs: give all engines share_tp, the least common multiple"), as_here("it is off")),
    ),
    "secondary_tiers": PeerOption(OFFLOADING, agent("--tier URL, once for each, nearest first")),
    "tier_poll_interval_s": PeerOption(OFFLOADING, none("the agent does not poll its tiers")),
    "backpressure": PeerOption(OFFLOADING, none("the agent's tiers have limits of their own (docs/TIERS.md)")),
    "sync_load_budget_bytes": PeerOption(OFFLOADING, _sync_budget),
    # LMCache
    "use_native": PeerOption(LMCACHE, as_here("there is one implementation")),
    "skip_last_n_tokens": PeerOption(LMCACHE, only_zero(none("all full blocks are saved"), "none are skipped")),
    "lmcache_rpc_port": PeerOption(LMCACHE, as_here(_NO_PORT)),
    "lmcache.mp.host": PeerOption(LMCACHE_MP, refused("differs: the agent is on the same node; set socket_dir")),
    "lmcache.mp.port": PeerOption(LMCACHE_MP, refused("differs: the agent is on the same node; set socket_dir")),
    "lmcache.mp.mq_timeout": PeerOption(LMCACHE_MP, refused("differs: see load_deadline_ms and lookup_age_ms")),
    "lmcache.mp.heartbeat_interval": PeerOption(LMCACHE_MP, as_here("a session's end is noticed at once")),
    "lmcache.mp.nonblocking_lookup_status": PeerOption(LMCACHE_MP, as_here("no look-up blocks a step for long")),
    "lmcache.mp.eager_prefetch": PeerOption(
        LMCACHE_MP,
        switch(as_here("a request's arrival starts it"), none("a request's arrival always starts prefetching")),
    ),
}


def _same(rule: Rule, *names: str) -> dict[str, PeerOption]:
    """Return options of LMCache that have the same rule."""
    return {name: PeerOption(LMCACHE, rule) for name in names}


_P2P = "--peer-listen ADDRESS:PORT, for blocks that a decode engine wants (docs/PD.md)"
_STATUS = "--http ADDRESS:PORT; kvagent status says more"
_NO_BLENDING = "blocks are reused after their own prefix only (docs/decisions)"

LMCACHE_OPTIONS: dict[str, PeerOption] = {
    **_same(none(_CHUNKS), "chunk_size"),
    **_same(switch(as_here("the pool is in memory"), none("the pool is in memory")), "local_cpu"),
    **_same(agent(_POOL), "max_local_cpu_size", "maru_pool_size"),
    **_same(as_here("the agent takes --pool and no more"), "reserve_local_cpu_size"),
    **_same(switch(agent("--huge-pages auto"), as_here("it is off")), "local_cpu_use_hugepages"),
    **_same(agent("--tier disk:/PATH?capacity=SIZE"), "local_disk", "max_local_disk_size", "gds_path", "maru_path"),
    **_same(agent("--tier URL, such as redis://HOST:PORT or s3://BUCKET"), "remote_url", "remote_storage_plugins"),
    **_same(only("naive", none("values are stored as they are"), "values are stored as they are"), "remote_serde"),
    **_same(_LAYERWISE, "use_layerwise"),
    **_same(PEER_OPTIONS["save_decode_cache"].rule, "save_decode_cache"),
    **_same(none("hashes are vLLM's: --prefix-caching-hash-algo"), "pre_caching_hash_algorithm"),
    **_same(switch(none(_NO_BLENDING), as_here(_NO_BLENDING)), "enable_blending"),
    **_same(
        none(_NO_BLENDING),
        "blend_recompute_ratios", "blend_thresholds", "blend_check_layers", "blend_min_tokens", "blend_special_str",
    ),
    **_same(switch(_NO_PARTIAL, _FULL_BLOCKS), "save_unfull_chunk"),
    **_same(PEER_OPTIONS["load_async"].rule, "enable_async_loading"),
    **_same(lambda value, given: set_to("min_load_tokens", value or 1, given), "min_retrieve_tokens"),
    **_same(sets("lookup_age_ms"), "lookup_timeout_ms"),
    **_same(refused("differs: load_deadline_ms is for one load"), "blocking_timeout_secs"),
    **_same(agent("--eviction hazard|lru"), "cache_policy", "cost_aware_half_life_seconds", "cost_aware_ewma_alpha"),
    **_same(as_here("the pool is on the NUMA nodes of the GPUs first"), "numa_mode"),
    **_same(none("kv_role and the request say what is transferred (docs/PD.md)"), "enable_pd", "pd_role"),
    **_same(
        agent(_P2P),
        "enable_p2p", "p2p_host", "p2p_init_ports", "p2p_lookup_ports", "transfer_channel", "pd_peer_host",
        "pd_peer_init_port", "pd_peer_alloc_port", "pd_peer_query_port", "pd_proxy_host", "pd_proxy_port",
        "pd_buffer_size", "pd_buffer_device", "nixl_backends", "nixl_buffer_size", "nixl_buffer_device",
    ),
    **_same(
        agent(_STATUS),
        "internal_api_server_enabled", "internal_api_server_host", "internal_api_server_port_start",
        "internal_api_server_include_index_list", "internal_api_server_socket_path_prefix",
    ),
    **_same(
        none("there is no controller: agents need none"),
        "enable_controller", "controller_pull_url", "controller_reply_url", "lmcache_worker_ports",
        "lmcache_worker_ids", "lmcache_worker_heartbeat_time", "lmcache_worker_heartbeat_delay_time",
    ),
    **_same(as_here("an engine is named by its engine_id"), "lmcache_instance_id"),
    **_same(none("leases end with their session"), "pin_timeout_sec", "pin_check_interval_sec"),
    **_same(
        as_here("the pool's memory is taken at the start"),
        "enable_lazy_memory_allocator", "lazy_memory_initial_ratio", "lazy_memory_expand_trigger_ratio",
        "lazy_memory_step_ratio", "lazy_memory_safe_size",
    ),
    **_same(as_here("the agent runs no Python"), "py_enable_gc"),
    **_same(switch(none("events are vLLM's"), as_here("it is off")), "enable_kv_events"),
    **_same(none("the agent answers look-ups"), "external_lookup_client", "lookup_server_worker_ids"),
    **_same(none("plug-ins run in no process of the agent"), "runtime_plugin_locations", "storage_plugins"),
}  # fmt: skip
"""The options of LMCache's configuration: of its file, ``LMCACHE_NAME`` in the environment, and
``lmcache.NAME`` in ``kv_connector_extra_config``.
"""

PEER_OPTIONS |= {f"lmcache.{name}": option for name, option in LMCACHE_OPTIONS.items()}
