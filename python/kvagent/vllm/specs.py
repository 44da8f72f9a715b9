"""What vLLM's KV cache specifications mean to the connector: which are served, and which blocks a
hit needs.

Workers see the specifications of all layers of a group (UniformTypeKVCacheSpecs), the scheduler
that of one of them. Both take the first one's, so that they register the same groups.

Importing it imports no vllm: specifications are known by the names of their classes.
"""

from __future__ import annotations

from typing import Any

from kvagent.limits import CHUNKED

MLA = "MLAAttentionSpec"
FULL = ("FullAttentionSpec", MLA, "SinkFullAttentionSpec")
WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
CHUNKED_LOCAL = "ChunkedLocalAttentionSpec"
STATE = "MambaSpec"
SERVED = (*FULL, *WINDOW, CHUNKED_LOCAL, STATE)
_STATE_WINDOW = 2  # tokens: the next token needs the one before it, so that a hit needs the last block
_UNIFORM = "UniformTypeKVCacheSpecs"


def layer_specs(spec: Any) -> list[Any]:
    """Return the different specifications of a group's layers; the first is the scheduler's."""
    if type(spec).__name__ != _UNIFORM:
        return [spec]
    found: list[Any] = []
    for one in spec.kv_cache_specs.values():
        if one not in found:
            found.append(one)
    return found


def group_spec(spec: Any) -> Any:
    """Return the specification that a group is known by, in the scheduler and in the workers."""
    if type(spec).__name__ != _UNIFORM:
        return spec
    return next(iter(spec.kv_cache_specs.values()))


def kind(spec: Any) -> str:
    """Return the name of the specification that a group is known by."""
    return type(group_spec(spec)).__name__


def window(spec: Any) -> int:
    """Return a group's window as the agent is told of it (messages.Group).

    A state is the last block of what it stands for.
    """
    one = group_spec(spec)
    name = type(one).__name__
    if name in WINDOW:
        return int(one.sliding_window)
    if name == STATE:
        return _STATE_WINDOW
    return CHUNKED + int(one.attention_chunk_size) if name == CHUNKED_LOCAL else 0


def is_state(spec: Any) -> bool:
    """Return whether the blocks of a group are states: each stands for all tokens before its
    end.
    """
    return kind(spec) == STATE


def replicated(spec: Any) -> bool:
    """Return whether all tensor-parallel ranks hold the same KV of a group."""
    return _replicated(group_spec(spec))


def refusal(group: Any) -> str:
    """Return why a group cannot be served, as the end of a sentence about it, or an empty
    string.
    """
    specs = layer_specs(group.kv_cache_spec)
    first = specs[0]
    for one in specs:
        if reason := _refusal(one):
            return reason
        if (window(one), one.block_size, _replicated(one)) != (window(first), first.block_size, _replicated(first)):
            return (
                f"has layers of {type(first).__name__} and {type(one).__name__} that differ in window, block size or "
                "replication"
            )
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        return "is one that vLLM keeps from connectors (enable_kv_transfer, host_resident)"
    return ""


def canvas_refusal(model: Any) -> str:
    """Return why no group of vLLM's ModelConfig can be served, or an empty string: the KV of tokens
    that were made on a canvas depends on later ones until it is computed again, which a client may
    leave out (diffusion_read_only).
    """
    if not getattr(model, "is_diffusion", False):
        return ""
    return "the model generates by diffusion: the KV of its tokens may depend on later ones, which hashes do not cover"


def _refusal(spec: Any) -> str:
    name = type(spec).__name__
    if name == STATE:
        return _state_refusal(spec)
    if name not in SERVED:
        return f"is of {name}; served are {', '.join(SERVED)}"
    if getattr(spec, "non_causal", False):
        return "has layers that attend to later tokens (non_causal), which its block hashes do not cover"
    if getattr(spec, "bounded_replay", False):
        return "is computed again after each hit (bounded_replay), which the connector cannot ask vLLM for"
    return ""


def _state_refusal(spec: Any) -> str:
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        return (
            f"has states of mamba_cache_mode {mode}, allowed is align: vLLM keeps none otherwise; start it with prefix "
            "caching"
        )
    if drafts := int(getattr(spec, "num_speculative_blocks", 0)):
        return f"has {drafts} blocks of states for draft tokens, allowed are 0: start vLLM without speculative_config"
    return ""


def _replicated(spec: Any) -> bool:
    return type(spec).__name__ == MLA or getattr(spec, "max_tp_shards", None) == 1
