"""The part of the connector that runs in the process of vLLM's scheduler."""
