"""GPU memory and events shared with another process of this machine.

Imports neither torch nor CUDA by itself.
"""
