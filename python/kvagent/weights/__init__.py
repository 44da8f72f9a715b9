"""Digests of a model's weights that cover every tensor and take seconds to compute."""
