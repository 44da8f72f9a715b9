"""The client of kvagent, the KV cache agent of a GPU node. docs/PROTOCOL.md of the repository is its contract."""

from kvagent.errors import KVAgentError

__all__ = ["KVAgentError"]
