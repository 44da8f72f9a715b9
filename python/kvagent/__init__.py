"""The client of kvagent, the KV cache agent of a GPU node.

Its contract is docs/PROTOCOL.md in the repository.
"""

from kvagent.errors import KVAgentError

__all__ = ["KVAgentError"]
