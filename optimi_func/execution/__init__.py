"""The engine: kernels, launches and plans; who imports nothing of the optimizers."""
