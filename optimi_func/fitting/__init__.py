"""Minimization of losses without noise: a pure L-BFGS and implicit derivatives."""
