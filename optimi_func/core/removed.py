"""Names and arguments that version 0.3 has no more, and what to use instead."""

REMOVED = {
    "divide_state": "torch.distributed.optim.ZeroRedundancyOptimizer around the class",
    "modulus": "none: both parts of a number have second moments, as in torch.optim",
}


def instead_of(name: str) -> str:
    """Return what an error says of a removed name or argument, or nothing."""
    use = REMOVED.get(name, "")
    return use and f", removed in 0.3: use {use}"
