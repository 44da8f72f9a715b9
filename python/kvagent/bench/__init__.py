"""What the vLLM connector costs in each step of an engine: ``python -m kvagent.bench``."""
