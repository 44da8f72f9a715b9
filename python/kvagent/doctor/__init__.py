"""Says from inside an engine's pod what keeps it from its agent: ``python -m kvagent.doctor``."""
