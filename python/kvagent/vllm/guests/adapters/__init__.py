"""LoRA adapters: which content their blocks are keyed by."""
