"""Names and arguments that version 0.3 has no more, and what to use instead."""

REMOVED = {
    "CLIPPING": "the table of clipping in docs/release.md",
    "divide_state": "torch.distributed.optim.ZeroRedundancyOptimizer around the class",
    "how": "clip_global_norm alone, which takes two passes by handle.backward(loss_fn)",
    "pending_bytes": "no argument, because small gradients wait for up to 1 MiB",
}


def instead_of(name: str) -> str:
    """Return what an error says of a removed name or argument, or nothing."""
    use = REMOVED.get(name, "")
    return use and f", removed in 0.3: use {use}"
