"""GPU memory and events as another process of this machine reaches them. Imports neither torch nor CUDA by itself."""
