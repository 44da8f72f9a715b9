"""The cost of the vLLM connector in each step of an engine: ``python -m kvagent.bench``."""
