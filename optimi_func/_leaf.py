"""The pipeline on one tensor: widen, direct, decay, look ahead, add. Its only home.

Pure: nothing passed in is written. Executors differ in where they run this function and
where they put what it returns, never in what it computes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optimi_func._codes import narrow, remainder_dtype, round_to, to, widen
from optimi_func._distributed import on_whole
from optimi_func._rule import (
    WHOLE_BATCH,
    DecayKind,
    Leaf,
    Microbatch,
    Rates,
    Rule,
    Scalar,
    Scalars,
)
from optimi_func._storage import Storage, decode, encode, tensors_of


def whole_mean(x: Tensor) -> Tensor:
    """The mean over a leaf that is one whole tensor."""
    return x.mean()


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 where anything is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def leaf_dtype(leaf: Leaf, g: Tensor) -> torch.dtype:
    """The dtype of one leaf's arithmetic."""
    fields = [x.dtype for field in leaf.state for x in tensors_of(field)]
    return compute_dtype(leaf.p.dtype, g.dtype, *fields)


def leaf_step(
    rule: Rule[Any, Any],
    leaf: Leaf,
    g: Tensor,
    scalars: Scalars,
    write: bool,
    mean: Callable[[Tensor], Tensor],
) -> Leaf:
    """One step of one parameter.

    With state and x, the parameter as it is meant (p + comp where there is one), decoded
    from how they are kept, and both encoded again at the end:

        g <- grad_scale * g + l2 * x
        d, state <- direction(g, state)
        d <- whole(d)
        u <- -(lr * d + decay * x) / max(1, sqrt(mean(spread)))
        u, state <- after(x, u, state)
        p <- round(p + (comp + u)),   comp <- what that rounding lost

    Decay is part of the delta: a bfloat16 parameter times 1 - 1e-5 is itself, but its
    compensation remembers the 1e-5. Cautious decay (arXiv:2510.12402) leaves out decay * x,
    and a proximal kind's division, where d and x have unlike signs.

    Args:
        rule: The mathematics.
        leaf: Parameter, state and compensation, of one shape.
        g: Gradient, same shape.
        scalars: Numbers for this step.
        write: False moves the state alone (accumulating) and leaves p and comp as they
            are.
        mean: Takes the mean of an elementwise quantity over the whole parameter.
    """
    p, state, comp = leaf
    wide = leaf_dtype(leaf, g)
    c, r, dither = scalars
    p32, x = widen(p, comp, wide)
    old = [decode(s, wide) for s in state]
    g = r.grad_scale * to(g, wide) + r.l2 * x
    d, new, spread = rule.direction(g, type(state)(*old), c)
    if write:
        if rule.whole is not None:
            d = on_whole(rule.whole, d, c)
        u = _delta(d, x, r)
        if spread is not None:
            u = u / mean(spread).clamp_min(1.0).sqrt()
        if rule.after is not None:
            u, new = rule.after(x, u, new, c)
        p, comp = _add(p, p32, x, comp, u)
    # What a rule leaves alone stays the object that it is.
    fields = [s if n is o else encode(n, s, dither) for n, o, s in zip(new, old, state)]
    return Leaf(p, type(state)(*fields), comp)


def leaf_eval_point(rule: Rule[Any, Any], leaf: Leaf, coeffs: Any) -> Tensor:
    """Where to evaluate in place of the parameter, in the dtype of the arithmetic.

    Args:
        rule: The mathematics; it has an `eval_point`.
        leaf: Parameter, state and compensation.
        coeffs: Of the step to come.
    """
    p, state, comp = leaf
    wide = leaf_dtype(leaf, p)
    _, x = widen(p, comp, wide)
    assert rule.eval_point is not None
    return rule.eval_point(x, type(state)(*[decode(s, wide) for s in state]), coeffs)


def _delta(d: Tensor, x: Tensor, r: Rates) -> Tensor:
    """The move of a direction, with decay."""
    if not r.undecayed_lr:
        return -(r.lr * d + r.decay * x)
    (undecayed_lr,) = r.undecayed_lr
    # 0 where signs are unlike, else 1. Signs: the product of d and x may underflow.
    decays = (d.sign() * x.sign()).clamp_max(0.0) + 1.0
    lr = undecayed_lr + decays * (r.lr - undecayed_lr)
    return -(lr * d + r.decay * (decays * x))


def leaf_mean(rule: Rule[Any, Any], leaf: Leaf, g: Tensor, scalars: Scalars) -> Tensor:
    """The mean that a step of this leaf takes; a trace drops what comes after it."""
    means: list[Tensor] = []

    def mean(x: Tensor) -> Tensor:
        means.append(whole_mean(x))
        return means[-1]

    leaf_step(rule, leaf, g, scalars, True, mean)
    return means[0]


def _add(
    p: Tensor, p32: Tensor, x: Tensor, comp: Tensor | None, u: Tensor
) -> tuple[Tensor, Tensor | None]:
    """P + u in p's dtype, with what the rounding lost where it is kept (Kahan 1965)."""
    if comp is None:
        return to(p32 + u, p.dtype), None
    if not comp.is_floating_point():
        return narrow(x + u, p, comp)
    u = u + to(comp, u.dtype)
    new = round_to(p32 + u, p.dtype)
    return to(new, p.dtype), to(u - (new - p32), comp.dtype)


def init_leaf(rule: Rule[Any, Any], p: Tensor, storage: Storage) -> Leaf:
    """Fresh state for p."""
    dtype = remainder_dtype(p, storage.param)
    comp = None if dtype is None else torch.zeros_like(p, dtype=dtype)
    return Leaf(p, rule.init(p, storage.moments or p.dtype), comp)


def microbatch_scalars(
    rule: Rule[Any, Any], scalars: Scalars, microbatch: Microbatch, write: bool
) -> Scalars:
    """A step's numbers for a gradient that is a part of it, or scaled.

    Args:
        rule: The mathematics; it has a `accumulate` wherever `microbatch.accumulate`.
        scalars: The numbers of the whole step.
        microbatch: What the gradient is to it.
        write: Whether the parameter moves now. Decay, also that within the gradient,
            belongs to the moment that it does.
    """
    coeffs, r, _ = scalars
    if microbatch.accumulate:
        assert rule.accumulate is not None
        coeffs = rule.accumulate(coeffs)
    if microbatch.grad_scale is not WHOLE_BATCH.grad_scale:
        r = r._replace(grad_scale=microbatch.grad_scale * r.grad_scale)
    return Scalars(coeffs, r if write else r._replace(l2=0.0), scalars.dither)


def rates(
    lr: Scalar,
    weight_decay: Scalar,
    kind: DecayKind,
    max_lr: Scalar | None,
    maximize: bool,
    cautious: bool,
) -> Rates:
    """Every kind of decay as numbers.

    | kind        | the parameter loses, per step                          |
    |-------------|--------------------------------------------------------|
    | l2          | nothing by itself: weight_decay * p joins the gradient |
    | decoupled   | lr * weight_decay * p                                  |
    | fully       | lr / max_lr * weight_decay * p                         |
    | corrected   | lr^2 / max_lr * weight_decay * p (arXiv:2506.02285)    |
    | proximal    | as the three above, applied implicitly, after the move:|
    |             | p <- (p - lr * d) / (1 + share)                        |

    Args:
        lr: Learning rate of this step.
        weight_decay: Its coefficient.
        kind: One of the table's.
        max_lr: The largest scheduled lr; used by the fully and corrected kinds alone.
        maximize: Climb instead of descend.
        cautious: Decay only what moves towards 0 anyway; of no use with l2.
    """
    grad_scale = -1.0 if maximize else 1.0
    if kind == "l2":
        return Rates(lr, 0.0, weight_decay, grad_scale)
    scheduled = lr
    if kind.startswith("fully") and max_lr is not None:
        scheduled = lr / max_lr
    elif kind.startswith("corrected") and max_lr is not None:
        scheduled = lr * (lr / max_lr)
    undecayed = (lr,) if cautious else ()
    share = scheduled * weight_decay
    if kind.endswith("proximal"):
        # (p - lr*d) / (1 + share) = p - (lr*d + share*p) / (1 + share)
        shrunk = 1.0 + share
        return Rates(lr / shrunk, share / shrunk, 0.0, grad_scale, undecayed)
    return Rates(lr, share, 0.0, grad_scale, undecayed)
