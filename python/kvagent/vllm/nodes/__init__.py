"""An engine whose ranks are on several nodes: where they are, and its sessions with their agents."""
