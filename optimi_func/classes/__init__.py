"""Optimizer classes: constructor arguments, param groups, the step, `train` and `eval`."""
