"""Names and arguments that version 0.3 has no more, and what to use instead."""

_SEARCH = 'LBFGS(line_search_fn="strong_wolfe"), or the value lbfgs'

REMOVED = {
    "Backtracking": _SEARCH,
    "BacktrackingState": _SEARCH,
    "LookaheadState": "a tree of the slow parameters",
    "SamState": "transforms.ascent, which has no state",
    "backtracking": _SEARCH,
    "checkpoint_every": "torch.utils.checkpoint around the run of some steps",
    "divide_state": "torch.distributed.optim.ZeroRedundancyOptimizer around the class",
    "inject": "0-d tensors for numbers, in an optimizer that the compiled function makes: "
    "adamw(lr=lr, betas=(beta1, beta2)).step(params, grads, state)",
    "InjectState": "the optimizer's own state, and 0-d tensors for numbers",
    "lookahead": "torch.lerp after every k-th step, or the class Lookahead",
    "sam": "transforms.ascent between two evaluations, or the class SAM",
}


def instead_of(name: str) -> str:
    """Return what an error says of a removed name or argument, or nothing."""
    use = REMOVED.get(name, "")
    return use and f", removed in 0.3: use {use}"
