"""A secondary tier of vLLM's own offloading: vLLM copies between GPU and its host memory, the agent
takes chunks from there and brings them back (docs/VLLM.md, "As a tier of vLLM's own offloading").

``KVAgentTier`` is imported on first use. Only ``manager`` imports vllm.

    vLLM's scheduler thread                         the tier's thread (courier)
    ┌────────────────────────────┐     orders      ┌──────────────────────────────────────┐
    │ manager: lookup, jobs      │────────────────▶│ questions: look-ups and their leases │
    │ verdicts: what is stored   │                 │ saves: rows ──▶ agent                │
    │                            │◀────────────────│ loads: agent ──▶ staging ──▶ rows    │
    └────────────────────────────┘     results     └──────────────────────────────────────┘
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVAgentTier"]


def __getattr__(name: str) -> Any:
    if name != "KVAgentTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvagent.vllm.tier.manager import KVAgentTier

    return KVAgentTier
