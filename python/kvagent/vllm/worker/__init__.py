"""The part of the connector that runs in the processes of vLLM's workers."""
