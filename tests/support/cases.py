"""The table that the tests walk: every rule with every option, beside its reference.

A new optimizer is rows here; what they are run through stands in the tests.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import reference
import torch
from torch import Tensor

import optimi_func

LR = 0.02
# Of a movement, by the dtype of the parameter: between executors, or runs gone on with.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    # A moment that differs in float32's last bit may round to its bfloat16 neighbour.
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}


def shown(x: Any) -> str:
    """As str, without addresses: two runs give a test the same name."""
    return re.sub(r" at 0x\w+", "", str(x))


@dataclass(frozen=True)
class Case:
    """One optimizer with one choice of options.

    `options` are the functional factory's, `ref` the reference's where they are called
    something else; an option that is in neither is the default of both.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    ref: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        chosen = [f"{k}={v}" for k, v in self.options.items()]
        return "-".join([self.name, *chosen])

    @property
    def factory(self) -> Callable[..., optimi_func.FunctionalOptimizer]:
        return getattr(optimi_func, self.name)

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        return CLASSES[self.name]

    def functional(self, lr: Any = LR) -> optimi_func.FunctionalOptimizer:
        return self.factory(lr=lr, **self.options)

    def reference(self, p: Tensor, grads: list[Tensor], lr: Any = LR) -> list[Tensor]:
        return getattr(reference, self.name)(p, grads, lr=lr, **self.ref)


CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": optimi_func.SGD,
    "adam": optimi_func.Adam,
    "adamw": optimi_func.AdamW,
    "stableadamw": optimi_func.StableAdamW,
    "radam": optimi_func.RAdam,
    "ranger": optimi_func.Ranger,
    "adan": optimi_func.Adan,
    "lion": optimi_func.Lion,
    "ademamix": optimi_func.AdEMAMix,
    "adopt": optimi_func.ADOPT,
}
NAMES = list(CLASSES)
# The rules whose state is no sum over a step's gradients.
REFUSE_STATES = ("sgd", "adan", "adopt")


def count_betas(name: str) -> int:
    """How many betas a rule has."""
    return {"sgd": 0, "adan": 3, "ademamix": 3}.get(name, 2)


# Where decay goes, as the factory and as the reference say it. Large enough to show.
_L2 = ({"weight_decay": 0.1}, {"weight_decay": 0.1, "decay": "l2"})
_DECOUPLED = {"weight_decay": 0.1, "decay": "decoupled"}
_FULLY = {"weight_decay": 0.03, "decay": "fully", "max_lr": 0.04}
_CORRECTED = {"weight_decay": 0.3, "decay": "corrected", "max_lr": 0.04}
_CORRECTED_OPTIONS = {"weight_decay": 0.3, "corrected_decay": True, "max_lr": 0.04}
_FULLY_OPTIONS = {"weight_decay": 0.03, "decouple_lr": True, "max_lr": 0.04}


def _decays(name: str) -> list[Case]:
    """The decay kinds that a factory offers."""
    cases = [
        Case(name, _FULLY_OPTIONS, _FULLY),
        Case(name, _CORRECTED_OPTIONS, _CORRECTED),
    ]
    if name in ("sgd", "adam", "radam", "adopt"):
        # Without momentum, SGD's L2 and decoupled decay are one and the same.
        more = {"momentum": 0.9} if name == "sgd" else {}
        cases.append(Case(name, {**_L2[0], **more}, {**_L2[1], **more}))
        on = {"weight_decay": 0.1, "decouple_wd": True}
        cases.append(Case(name, {**on, **more}, {**_DECOUPLED, **more}))
    elif name == "ranger":
        cases.append(Case(name, {"weight_decay": 0.1}, _DECOUPLED))
        off = {"weight_decay": 0.1, "decouple_wd": False}
        cases.append(Case(name, off, _L2[1]))
    elif name == "adan":
        wd = {"weight_decay": 0.1}
        cases = [
            Case(name, wd, {**wd, "decay": "proximal"}),
            Case(name, {**wd, "adam_wd": True}, {**wd, "adam_wd": True}),
            Case(name, _FULLY_OPTIONS, {**_FULLY, "decay": "fully_proximal"}),
            Case(name, {**_FULLY_OPTIONS, "adam_wd": True}, _FULLY),
            Case(name, _CORRECTED_OPTIONS, {**_CORRECTED, "decay": "corrected_proximal"}),
        ]
    else:
        cases.append(Case(name, {"weight_decay": 0.1}, _DECOUPLED))
    cautious = {"cautious_decay": True}
    apart = [case for case in cases if case.ref.get("decay") != "l2"]
    # Of one kind: it is the same for all, but for the two that divide.
    some = apart if name == "adan" else apart[-1:]
    more = [Case(name, c.options | cautious, c.ref | cautious) for c in some]
    return [*cases, *more]


def _same(name: str, **options: Any) -> Case:
    return Case(name, options, options)


_EPS = [n for n in NAMES if n not in ("sgd", "lion", "adopt")]
_BETAS = {n: (0.8, 0.95) for n in NAMES if n != "sgd"}
_BETAS["adan"] = (0.9, 0.8, 0.95)  # type: ignore[assignment]
_BETAS["ademamix"] = (0.9, 0.95, 0.99)  # type: ignore[assignment]

DEFAULTS = [Case(name) for name in NAMES]
DECAYS = [case for name in NAMES for case in _decays(name)]
OPTIONS = [
    *[_same(name, betas=betas) for name, betas in _BETAS.items()],
    *[_same(name, eps=1e-2) for name in _EPS],
    *[_same(name, maximize=True) for name in NAMES],
    _same("adam", amsgrad=True),
    _same("adamw", amsgrad=True),
    _same("adopt", eps=2.0),
    _same("ademamix", alpha=2.0),
    _same("ademamix", alpha_warmup=40),
    _same("ademamix", beta3_warmup=40),
    _same("ranger", k=4),
    _same("ranger", alpha=0.8),
    _same("sgd", momentum=0.9),
    _same("sgd", momentum=0.9, nesterov=True),
    _same("sgd", momentum=0.9, dampening=True),
    _same("sgd", momentum=0.9, dampening=0.4),
    _same("sgd", momentum=0.9, dampening=True, torch_init=True),
]
CASES = [*DEFAULTS, *DECAYS, *OPTIONS]


def problem(
    shape: tuple[int, ...] = (7, 5), steps: int = 60, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """A float64 parameter near 1 and gradients that shrink and turn, with exact zeros."""
    torch.manual_seed(seed)
    p = 1.0 + 0.5 * torch.randn(shape, dtype=torch.float64)
    drift = torch.randn(shape, dtype=torch.float64)
    grads = [
        (drift + torch.randn(shape, dtype=torch.float64)) * 0.97**i for i in range(steps)
    ]
    grads[3] = torch.zeros_like(p)
    return p, grads


def schedule(steps: int = 60) -> list[float]:
    """A warmup and a decay."""
    return [LR * min((i + 1) / 10, (steps - i) / steps) for i in range(steps)]


def assert_moved_alike(
    start: Tensor, ours: Tensor, theirs: Tensor, tolerance: float
) -> None:
    """Compare movements, relative to the largest: where p is large, p hides errors."""
    want = theirs.double() - start.double()
    got = ours.double() - start.double()
    largest = want.abs().max().item() if want.numel() else 0.0
    assert largest > 0.0 or want.numel() == 0, "the reference did not move"
    error = (got - want).abs().max().item() if want.numel() else 0.0
    assert error <= tolerance * largest, f"{error / largest:.3g} > {tolerance}"
