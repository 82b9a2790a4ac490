"""Names and arguments that are gone, and what to use instead, for one release."""

from typing import NoReturn

_SEARCH = 'LBFGS(line_search_fn="strong_wolfe"), or the value lbfgs'
_TWO_PASSES = "clip_global_norm alone, which takes two passes by handle.backward(loss_fn)"

# By name, or by function and argument; an argument without a function is of all of them.
REMOVED = {
    "Backtracking": _SEARCH,
    "backtracking": _SEARCH,
    "BacktrackingState": _SEARCH,
    "unroll(checkpoint_every)": "torch.utils.checkpoint around the run of some steps",
    "CLIPPING": "the table of clipping in docs/release.md",
    "(divide_state)": "torch.distributed.optim.ZeroRedundancyOptimizer around the class",
    "from_class": "population.init, with copies of the state of optimizer.functional()",
    "backward(how)": _TWO_PASSES,
    "prepare_for_gradient_release(how)": _TWO_PASSES,
    "inject": "0-d tensors for numbers, in an optimizer that the compiled function makes: "
    "adamw(lr=lr, betas=(beta1, beta2)).step(params, grads, state)",
    "InjectState": "the optimizer's own state, and 0-d tensors for numbers",
    "load_member": "optimizer.load_functional(state, params) with row i of every tensor",
    "lookahead": "torch.lerp after every k-th step, or the class Lookahead",
    "LookaheadState": "a tree of the slow parameters",
    "(modulus)": "no argument: complex second moments are those of both parts, as in torch",
    "perturb(noise)": "p + scale * torch.randn_like(p) of the weights: docs/populations.md",
    "prepare_for_gradient_release(pending_bytes)": "no argument: small gradients wait for "
    "up to 1 MiB",
    "sam": "transforms.ascent between two evaluations, or the class SAM",
    "SamState": "transforms.ascent, which has no state",
    "state_dicts": "{name: p[i] for name, p in members.params.items()}",
    "stats": "optimi_func.Stats(optimizer).stats(by)",
    "track": "optimi_func.Stats(optimizer).track(on)",
    "unstack": "pytree.tree_map_only(Tensor, lambda x: x[i], members)",
}


def instead_of(name: str, function: str = "") -> str:
    """Return what an error says of a removed name or a function's argument, or nothing."""
    keys = (f"{function}({name})", f"({name})") if function else (name,)
    uses = [REMOVED[key] for key in keys if key in REMOVED]
    return f", which was removed: use {uses[0]}" if uses else ""


class Removed:
    """The attributes of a class that were removed."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        """Raise and say what to use."""
        text = f"{owner.__name__!r} has no attribute {self._name!r}"
        raise AttributeError(text + instead_of(self._name), name=self._name, obj=instance)
