"""Diagnoses, from inside an engine's pod, why it cannot work with its agent: ``python -m
kvagent.doctor``.
"""
