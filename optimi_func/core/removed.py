"""Names and arguments that version 0.3 has no more, and what to use instead."""

REMOVED = {
    "divide_state": "torch.distributed.optim.ZeroRedundancyOptimizer around the class",
    "from_class": "population.init, with copies of the state of optimizer.functional()",
    "load_member": "optimizer.load_functional(state, params) with row i of every tensor",
    "state_dicts": "{name: p[i] for name, p in members.params.items()}",
    "unstack": "pytree.tree_map_only(Tensor, lambda x: x[i], members)",
}


def instead_of(name: str) -> str:
    """Return what an error says of a removed name or argument, or nothing."""
    use = REMOVED.get(name, "")
    return use and f", removed in 0.3: use {use}"
