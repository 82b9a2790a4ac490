"""Pure optimizers over pytrees, and the differentiable training loop."""
