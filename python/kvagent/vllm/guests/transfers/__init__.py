"""Prefill and decode engines apart (docs/PD.md)."""
