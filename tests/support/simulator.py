"""One parameter's optimizer in plain float64: what a step should make of it.

The steps are those of `reference.py`, from whatever state there is, so that programs may
change anything in between.
"""

from functools import partial
from typing import Any

import reference
import torch
from torch import Tensor

MU = B1 = 0.9
ADAM = {"exp_avg": "m", "exp_avg_sq": "v"}

# Of the rules that average the numbers of a parameter, and all that is theirs.
RUNNING = {"weight_sum": "W", "lr_max": "top", "beta1": "b1"}
AVERAGING = {"z": "z", **RUNNING}

# The fields of each rule's state, with the letters that the references have for them.
FIELDS = {
    "sgd": {"momentum_buffer": "buf"},
    "adam": ADAM,
    "adamw": ADAM,
    "stableadamw": ADAM,
    "radam": ADAM,
    "ranger": {**ADAM, "slow_param": "slow"},
    "adan": {"exp_avg": "m", "exp_avg_diff": "v", "exp_avg_sq": "n", "prev_grad": "g_prev"},
    "lion": {"exp_avg": "m"},
    "ademamix": {"exp_avg": "m1", "exp_avg_slow": "m2", "exp_avg_sq": "v"},
    "adopt": ADAM,
    "schedule_free_adamw": {**AVERAGING, "exp_avg_sq": "v"},
    "schedule_free_sgd": AVERAGING,
    "schedule_free_radam": {**AVERAGING, "exp_avg_sq": "v"},
    "lamb": ADAM,
}
MOVES: dict[str, reference.Move] = {
    "sgd": partial(reference.sgd_move, momentum=MU),
    "adam": reference.adam_move,
    "adamw": reference.adam_move,
    "stableadamw": reference.stableadamw_move,
    "radam": reference.radam_move,
    "ranger": reference.ranger_move,
    "adan": reference.adan_move,
    "lion": reference.lion_move,
    "ademamix": reference.ademamix_move,
    "adopt": reference.adopt_move,
    "schedule_free_adamw": reference.schedule_free_adamw_move,
    "schedule_free_sgd": reference.schedule_free_sgd_move,
    "schedule_free_radam": reference.schedule_free_radam_move,
    "lamb": reference.lamb_move,
}


def fresh(name: str, p: Tensor) -> dict[str, Tensor]:
    """State of a parameter that has not stepped, in the dtypes that it should have."""
    made = {field: torch.zeros_like(p) for field in FIELDS[name]}
    if name in ("ademamix", "adopt", "lamb") or "z" in made:
        wide = torch.promote_types(p.dtype, torch.float32)
        slow = {"exp_avg_slow", "exp_avg_sq", "z"} & {*made}
        made |= {field: made[field].to(wide) for field in slow}
    numbers = {*RUNNING} & {*made}
    made |= {field: torch.zeros((), dtype=torch.float64) for field in numbers}
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
        wd: Weight decay: L2 for sgd, adam, radam, adopt, else decoupled; adan's proximal.
    """
    raw, l2 = g, wd if name in ("sgd", "adam", "radam", "adopt") else 0.0
    g = raw + l2 * p  # also by 0: what is not finite stays so
    lam = lr * wd if l2 == 0.0 else 0.0
    # What is left of two that cancel is rounding, which Adam makes a whole step of.
    unsure = (l2 * p != 0) & (g.abs() < 1e-2 * raw.abs())
    betas: dict[str, tuple[float, ...]] = {
        "adan": (0.98, 0.92, 0.99),
        "ademamix": (0.9, 0.999, 0.9999),
        "adopt": (0.9, 0.9999),
        "schedule_free_adamw": (0.9, 0.999),
        "schedule_free_radam": (0.9, 0.999),
        "lamb": (0.9, 0.999),
    }
    at = reference.At(t, lr, lam, betas.get(name, (0.9, 0.99)))
    letters = {letter: s[field] for field, letter in FIELDS[name].items()}
    if "z" in letters:
        # x is not stored, and there is no z before the first weight.
        letters["z"] = letters["z"] if letters["W"] else p.clone()
        b1 = letters["b1"] if letters["b1"] else B1  # that made p of z and x
        letters["x"] = p + (1 - b1) / b1 * (p - letters["z"])  # exactly p where z is
    u, new = MOVES[name](p, letters, g, at)
    if name == "lion":
        c = reference.lion_average(letters, g, at)
        unsure = (c != 0) & (c.abs() < 1e-6 * (letters["m"].abs() + g.abs()))
    if name == "lamb":
        # The norm of a sum is made of norms of its terms: rounding, if they cancel.
        m, v = reference._corrected(new["m"], new["v"], t, *betas["lamb"])
        moved, decayed = lr * m / (v.sqrt() + 1e-6), lam * p
        unsure = unsure | ((moved + decayed).norm() < 0.1 * decayed.norm())
    return u, {field: new[letter] for field, letter in FIELDS[name].items()}, unsure


def options(name: str) -> dict[str, Any]:
    """What makes our class the rule above."""
    return {"momentum": MU} if name == "sgd" else {}
