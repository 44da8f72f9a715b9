"""An engine over several nodes: where its ranks are, and its sessions with the nodes' agents.

To its agent, the ranks of one node are an engine of their own: a *part*. The scheduler has a
session with the agent of its own node; on each other node the part's first rank, its delegate, has
one, and does there what the scheduler orders in the step's plan (docs/decisions, several nodes).
"""
