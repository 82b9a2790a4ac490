"""Minimization of losses without noise: L-BFGS as a value, implicit derivatives."""
