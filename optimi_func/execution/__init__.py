"""The engine: kernels, launches and plans. It imports no optimizer."""
