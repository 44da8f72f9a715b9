"""No error of the connector's own leaves a call of vLLM's (docs/VLLM.md, "Errors")."""
