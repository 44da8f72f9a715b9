"""Turns the configuration of other KV connectors of vLLM into kvagent's."""
