"""Loads that a step waits for, as a whole or layer by layer (load_mode, layerwise)."""
