"""Every option of an optimizer with every option of the handle, beside the ordinary step.

The rows hold every pair of options that may go together. Both runs get the same gradients:
one adds them up in p.grad, clips and skips as a program does, and calls the ordinary step.
"""

from typing import Any

import pytest
import torch
from cases import CLASSES
from pairs import Row, pairwise
from torch import Tensor, nn

from optimi_func import hooks, prepare_for_gradient_release
from optimi_func.core.hooks import Reduction
from optimi_func.core.rule import Storage

STEPS, MICROBATCHES, F32 = 5, 3, torch.float32
LIMITS = {"clip_param_norm": 2.0, "clip_value": 0.5, "clip_global_norm": 3.0}
DECAY: dict[str, Any] = {"weight_decay": 0.1}
FULLY = {**DECAY, "decouple_lr": True, "max_lr": 0.05}
# How gradients are accumulated, and the number of backwards that ends a cycle.
CYCLES = [(None, None), ("buffer", MICROBATCHES), ("buffer", None)]
CYCLES += [("states", MICROBATCHES), ("states", None)]
OPTIONS: dict[str, list[Any]] = {
    "rule": ["adamw", "sgd", "stableadamw", "prodigy", "schedule_free_adamw", "muon"],
    "maximize": [False, True],
    "decay": [{}, DECAY, {**DECAY, "cautious_decay": True}, FULLY],
    "cautious": [False, True],
    "hooks": [(), (hooks.clip_rms(0.3), hooks.radial_brake()), (hooks.floor(0.4, "row"),)],
    "capturable": [False, True],
    "groups": [1, 2],
    "storage": [None, "compact", "exact", Storage("stochastic", seed=5), Storage("plain")],
    "cycle": CYCLES,
    "clip": [None, *LIMITS],
    "grad_norm": [False, True],
    "skip": [False, True, "step"],
}
# Matrices and vectors, small ones that wait for each other and a large one.
SHAPES = [(8, 6), (6,), (130, 64), (3, 4), (2,)]


def fits(row: Row) -> bool:
    """Whether options go together; what is refused has tests of its own."""
    known = {name: values[0] for name, values in OPTIONS.items()} | row
    get = known.__getitem__
    momentum = "rule" not in row or get("rule") == "sgd"
    accumulation, ends = get("cycle")
    if accumulation == "states":
        # Exact for SGD's momentum alone; parts are rounded, and not clipped.
        mixed = get("cautious") or get("hooks")
        exact = momentum and not (get("clip") or mixed or get("storage"))
        if not exact or get("skip") == "step" or (get("skip") and get("capturable")):
            return False
    if get("skip") == "step" and {"clip", "cycle"} <= {*row}:
        at_once = accumulation == "buffer" and ends is None
        if get("clip") != "clip_global_norm" and not at_once:
            return False
    if get("cautious") and get("rule") in ("prodigy", "schedule_free_adamw", "muon"):
        return False
    rows = get("hooks") and get("hooks")[0].over == Reduction("row")
    if get("hooks") and get("rule") == "prodigy":
        return False
    if rows and (get("cautious") or get("rule") == "stableadamw"):
        return False
    coupled = get("rule") == "sgd" and get("decay").get("cautious_decay")
    return not coupled


def named(row: Row) -> str:
    usual = {name: values[0] for name, values in OPTIONS.items()}
    return ", ".join([f"{k}={x}" for k, x in row.items() if x != usual[k]])


class Net(nn.Module):
    """Parameters whose gradients are what the loss says; a step leaves some out."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dtype = torch.float64 if row["storage"] is None else torch.bfloat16
        shapes = [s if len(s) > 1 or row["rule"] != "muon" else (1, *s) for s in SHAPES]
        self.weights = nn.ParameterList([torch.randn(s).to(self.dtype) for s in shapes])

    def loss(self, row: Row, step: int, part: int) -> Tensor:
        torch.manual_seed(100 * step + part)
        # They have a common part, along which Prodigy's estimate grows.
        grads = [0.5 + torch.randn_like(p) for p in self.weights]
        if row["skip"] and step == 2 and part == parts_of(row) - 1:
            grads[2].view(-1)[5] = torch.nan
        if row["skip"] and step == 3 and part == 0:
            # A program's clip_grad_value_ would make a finite number of inf.
            value = torch.nan if row["clip"] == "clip_value" else torch.inf
            grads[0].view(-1)[5] = value
        terms = [(p * g).sum() for p, g in zip(self.weights, grads)]
        # The last part of a step has no gradient of one, and of another no step but two.
        if part == parts_of(row) - 1 and step % 2:
            del terms[1]
        if step in (0, 3):
            del terms[-1]
        return torch.stack(terms).sum()


def parts_of(row: Row) -> int:
    return MICROBATCHES if row["cycle"][0] else 1


def made(row: Row, release: bool) -> tuple[Net, Any]:
    net = Net(row)
    every = [*net.weights]
    groups = [{"params": every}]
    if row["groups"] == 2:
        groups = [{"params": every[:2]}, {"params": every[2:], "lr": 0.01}]
    options = {"momentum": 0.9} if row["rule"] == "sgd" else {}
    if row["rule"] == "sgd" and row["decay"]:
        options["decouple_wd"] = True
    if row["rule"] == "prodigy":
        options |= {"lr": 1.0, "d0": 0.01, "d_coef": 4.0}
    optimizer = CLASSES[row["rule"]](
        groups,
        **{"lr": 0.03, **options, **row["decay"]},
        **{k: row[k] for k in ("maximize", "cautious", "hooks", "capturable", "storage")},
        skip_nonfinite="step" if row["skip"] == "step" else False,
        gradient_release=release,
        compile=False,
    )
    return net, optimizer


def ordinary(row: Row) -> tuple[Net, Any, Tensor]:
    net, optimizer = made(row, False)
    norm = torch.zeros(())
    for step in range(STEPS):
        for part in range(parts_of(row)):
            known = [None if p.grad is None else p.grad.clone() for p in net.weights]
            net.loss(row, step, part).backward()
            for p, g in zip(net.weights, known):
                bad = p.grad is not None and not p.grad.isfinite().all()
                if row["cycle"][0] == "states" and row["skip"] is True and bad:
                    p.grad = g  # that part alone is left out
        params = [p for p in net.weights if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in params])
        if row["skip"] is True:
            for p in params:
                p.grad = p.grad if p.grad.isfinite().all() else None
        for p in params if row["clip"] else ():
            # The handle scales gradients in float32, which p.grad would round.
            wide = (
                None if p.grad is None else p.grad.to(torch.promote_types(net.dtype, F32))
            )
            p.grad, p.grad_dtype = None, None
            p.grad = wide
        clip(row, [p for p in params if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        for p in params:
            p.grad_dtype = net.dtype
    return net, optimizer, norm


def clip(row: Row, params: list[Any]) -> None:
    limit = LIMITS.get(row["clip"], 0.0)
    if row["clip"] == "clip_param_norm":
        for p in params:
            nn.utils.clip_grad_norm_(p, limit)
    elif row["clip"] == "clip_value":
        nn.utils.clip_grad_value_(params, limit)
    elif row["clip"]:
        nn.utils.clip_grad_norm_(params, limit)


def released(row: Row) -> tuple[Net, Any, Any]:
    net, optimizer = made(row, True)
    accumulation, steps = row["cycle"]
    # Sums of bfloat16 as p.grad has them, so that the reference is exact.
    narrow = accumulation == "buffer" and net.dtype == torch.bfloat16
    handle = prepare_for_gradient_release(
        net,
        optimizer,
        accumulation=accumulation,
        accumulation_steps=steps,
        buffer_dtype=torch.bfloat16 if narrow else None,
        grad_norm=row["grad_norm"],
        skip_nonfinite=row["skip"],
        **({row["clip"]: LIMITS[row["clip"]]} if row["clip"] else {}),
    )
    for step in range(STEPS):
        for part in range(parts_of(row)):
            handle.backward(lambda: net.loss(row, step, part))  # noqa: B023
            assert all(p.grad is None for p in net.weights)
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer, handle


# A flag on the device takes a parameter's part out of sums that are joined.
SKIPPED_SUMS = {"rule": "prodigy", "capturable": True, "skip": True}
ROWS = [
    {name: values[0] for name, values in OPTIONS.items()} | SKIPPED_SUMS,
    *pairwise(OPTIONS, fits),
]


@pytest.mark.filterwarnings("ignore:weight_decay=", "ignore:max_lr=", "ignore:storage")
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_release_is_the_ordinary_step_with_every_two_options(row: Row) -> None:
    net, optimizer, norm = ordinary(row)
    other, its, handle = released(row)
    start = Net(row)
    # A scaled gradient that differs in float32's last bit may round a weight otherwise.
    tolerance = 1e-12 if net.dtype == torch.float64 else 3e-3 if row["clip"] else 0.0
    for p, q, x in zip(net.weights, other.weights, start.weights):
        want, got = (y.detach().double() - x.detach().double() for y in (p, q))
        assert (want - got).norm() <= tolerance * want.norm() > 0 or torch.equal(want, got)
        ours, theirs = optimizer.state[p], its.state[q]
        assert ours["step"] == theirs["step"] and ours.keys() == theirs.keys()
    if row["rule"] == "prodigy":
        d, its_d = (float(x.param_groups[0]["d"]) for x in (optimizer, its))
        assert d > 0.02 and its_d == pytest.approx(d, rel=max(tolerance, 1e-12))
    if row["skip"] == "step":
        assert its.skipped_steps == 0 and set(handle.skipped.values()) == {2}
        assert optimizer.skipped_steps == 2
    else:
        assert sum(handle.skipped.values()) == 2 * bool(row["skip"])
    if row["grad_norm"] and row["cycle"][0] != "states":
        torch.testing.assert_close(
            handle.grad_norm.double(), norm.double(), rtol=0.01, atol=0
        )


def test_the_rows_are_few_and_hold_every_pair() -> None:
    assert len(ROWS) < 60
    found = {
        (a, str(x), b, str(row[b])) for row in ROWS for a, x in row.items() for b in row
    }
    assert ("maximize", "True", "clip", "clip_global_norm") in found
    assert ("rule", "prodigy", "skip", "True") in found
    assert ("cycle", "('states', None)", "skip", "True") in found
    assert ("capturable", "True", "skip", "step") in found
