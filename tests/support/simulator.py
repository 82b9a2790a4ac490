"""One parameter's optimizer in plain float64: what a step should make of it.

The references in `reference.py` run from a start to an end. This takes single steps from
whatever state it finds, so that programs may change anything in between.
"""

import math
from typing import Any

import torch
from reference import _rectification
from torch import Tensor

EPS = 1e-6
MU = 0.9
BETAS = {"adan": (0.98, 0.92, 0.99)}
K, ALPHA = 6, 0.5  # Ranger's

# The fields of each rule's state, under the names of the papers' letters below.
FIELDS = {
    "sgd": ["momentum_buffer"],
    "adam": ["exp_avg", "exp_avg_sq"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "stableadamw": ["exp_avg", "exp_avg_sq"],
    "radam": ["exp_avg", "exp_avg_sq"],
    "ranger": ["exp_avg", "exp_avg_sq", "slow_param"],
    "adan": ["exp_avg", "exp_avg_diff", "exp_avg_sq", "prev_grad"],
    "lion": ["exp_avg"],
}


def fresh(name: str, p: Tensor) -> dict[str, Tensor]:
    """State of a parameter that has not stepped, in the dtypes that it should have."""
    made = {field: torch.zeros_like(p) for field in FIELDS[name]}
    if name == "ranger":
        made["slow_param"] = p.to(torch.promote_types(p.dtype, torch.float32), copy=True)
    return made


def one_step(
    name: str, p: Tensor, s: dict[str, Tensor], t: int, g: Tensor, lr: float, wd: float
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The move of p, the new state, and where rounding may turn the move around.

    Args:
        name: The rule.
        p: Parameter, float64.
        s: Its state before, float64.
        t: The number of this step, from 1.
        g: Gradient, float64.
        lr: Learning rate.
        wd: Weight decay: L2 for sgd, adam and radam, else decoupled; adan's proximal.
    """
    raw, l2 = g, wd if name in ("sgd", "adam", "radam") else 0.0
    g = raw + l2 * p  # also by 0: what is not finite stays so
    wd = wd if l2 == 0.0 else 0.0
    # What is left of two that cancel is rounding, which Adam makes a whole step of.
    unsure = (l2 * p != 0) & (g.abs() < 1e-2 * raw.abs())
    if name == "sgd":
        b = MU * s["momentum_buffer"] + g
        return -lr * b, {"momentum_buffer": b}, unsure
    b1, b2, *rest = BETAS.get(name, (0.9, 0.99))
    m = s["exp_avg"]
    if name == "lion":
        c = b1 * m + (1 - b1) * g
        tie = (c != 0) & (c.abs() < 1e-6 * (m.abs() + g.abs()))
        return -lr * c.sign() - lr * wd * p, {"exp_avg": b2 * m + (1 - b2) * g}, tie
    if name == "adan":
        (b3,) = rest
        diff = (t > 1) * (g - s["prev_grad"])  # a first NaN is in every field
        m = b1 * m + (1 - b1) * g
        w = b2 * s["exp_avg_diff"] + (1 - b2) * diff
        n = b3 * s["exp_avg_sq"] + (1 - b3) * (g + b2 * diff) ** 2
        d = m / (1 - b1**t) + b2 * w / (1 - b2**t)
        d = d / ((n / (1 - b3**t)).sqrt() + EPS)
        new = {"exp_avg": m, "exp_avg_diff": w, "exp_avg_sq": n, "prev_grad": g}
        return (p - lr * d) / (1 + lr * wd) - p, new, unsure
    m = b1 * m + (1 - b1) * g
    v = b2 * s["exp_avg_sq"] + (1 - b2) * g**2
    new = {"exp_avg": m, "exp_avg_sq": v}
    m_hat, root = m / (1 - b1**t), (v / (1 - b2**t)).sqrt()
    d = m_hat / (root + EPS)
    if name in ("radam", "ranger"):
        r = _rectification(t, b2)
        d = m_hat if r is None else r * d
    u = -lr * d - lr * wd * p
    if name == "stableadamw" and p.numel():
        rms = (g / root.clamp(min=EPS)).square().mean().sqrt().item()
        u = u / (rms if rms > 1 or math.isnan(rms) else 1.0)
    if name == "ranger":
        slow = s["slow_param"]
        if t % K == 0:
            slow = slow + ALPHA * (p + u - slow)
            u = slow - p
        new["slow_param"] = slow
    return u, new, unsure


def options(name: str) -> dict[str, Any]:
    """What makes our class the rule above."""
    return {"momentum": MU} if name == "sgd" else {}
