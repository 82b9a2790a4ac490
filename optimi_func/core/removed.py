"""Names and arguments that version 0.3 has no more, and what to use instead."""

REMOVED = {
    "stats": "optimi_func.Stats(optimizer).stats(by)",
    "track": "optimi_func.Stats(optimizer).track(on)",
    "divide_state": "torch.distributed.optim.ZeroRedundancyOptimizer around the class",
}


def instead_of(name: str) -> str:
    """Return what an error says of a removed name or argument, or nothing."""
    use = REMOVED.get(name, "")
    return use and f", removed in 0.3: use {use}"
