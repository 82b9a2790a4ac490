"""The table that the tests walk: every rule with every option, beside its reference.

A new optimizer is in it by itself, and its options are those beside its loop in
`reference.py`; what they are run through stands in the tests.
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
        return FACTORIES.get(self.name) or getattr(optimi_func, self.name)

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        return CLASSES[self.name]

    def functional(self, lr: Any = LR) -> optimi_func.FunctionalOptimizer:
        return self.factory(lr=lr, **self.options)

    def reference(self, p: Tensor, grads: list[Tensor], lr: Any = LR) -> list[Tensor]:
        usual = USUAL if self.name == "prodigy" else {}
        return getattr(reference, self.name)(p, grads, lr=lr, **{**usual, **self.ref})


# Prodigy's own defaults begin with steps that float32 rounds away.
USUAL = {"d0": 0.05, "d_coef": 4.0}


class Prodigy(optimi_func.Prodigy, name="prodigy"):
    """Prodigy with other defaults."""

    d0 = 0.05
    d_coef = 4.0


prodigy: Any = Prodigy.pure
FACTORIES: dict[str, Any] = {"prodigy": prodigy}
# The package's optimizers, by the names of their values: a new one is among them.
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    x.pure.__name__: x
    for x in vars(optimi_func).values()
    if isinstance(x, type) and hasattr(x, "pure")
}
CLASSES["prodigy"] = Prodigy
NAMES = list(CLASSES)
_VALUES: dict[str, Any] = {n: Case(n).functional() for n in NAMES}
_RULES: dict[str, Any] = {name: value.rule for name, value in _VALUES.items()}
# Four that differ in form: two moments, means, two kernels, running scalars. What takes a
# second a rule and depends on the form alone, `make test` asks of these.
SOME = ("adamw", "stableadamw", "ranger", "schedule_free_adamw")
# Those that map whole tensors, and the others; those that take matrices alone.
MAPPED = tuple(n for n, rule in _RULES.items() if rule.whole is not None)
ELEMENTWISE = [name for name in NAMES if name not in MAPPED]
MATRICES = tuple(
    n for n, rule in _RULES.items() if rule.refuses and rule.refuses(torch.ones(3))
)
# Those that iterate products of matrices, in bfloat16 where a device has it.
ITERATED = (*MATRICES, "scion")
# Those that average, and are evaluated elsewhere than they step; they have running numbers.
SCHEDULE_FREE = tuple(n for n, rule in _RULES.items() if rule.eval_point is not None)
# Those of torch.optim that optimi does not have.
TORCHS = ("rmsprop", "adagrad", "adadelta", "adamax", "nadam", "asgd", "rprop")
# Those that optimi has.
OPTIMI = ("sgd", "adam", "adamw", "stableadamw", "radam", "ranger", "adan", "lion")
# Those whose decay joins the gradient, unless they are told otherwise.
COUPLED = tuple(n for n, value in _VALUES.items() if value.decay == "l2")
# The rules that take means over a tensor.
MEASURED = tuple(
    n for n, rule in _RULES.items() if rule.sums or rule.measure or rule.after_means
)
# The rules whose state is no sum over a step's gradients.
REFUSE_STATES = tuple(n for n, rule in _RULES.items() if rule.accumulate is None)


_LOOPS = {name: getattr(reference, name) for name in NAMES}
# What is said beside the loops of an optimizer: see `reference._path_of`.
SENSITIVE = tuple(name for name, loop in _LOOPS.items() if getattr(loop, "sensitive", 0))
STILL = {name: loop.still for name, loop in _LOOPS.items() if getattr(loop, "still", 0)}


def _keeps_codes(value: Any) -> bool:
    """Whether a state has moments in codes, if it is told to."""
    try:
        value.init(torch.empty(64, 64), storage=optimi_func.Storage(moments="8bit"))
    except ValueError:
        return False
    return True


# Those that by default keep nothing in codes.
NO_CODES = tuple(n for n, value in _VALUES.items() if not _keeps_codes(value))
# Those that divide by nothing.
NO_EPS = tuple(n for n, value in _VALUES.items() if not hasattr(value, "eps"))


def count_betas(name: str) -> int:
    """How many betas a rule has."""
    return len(getattr(_VALUES[name], "betas", ()))


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
    if name in COUPLED:
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
    elif name in MATRICES:  # 0.1 is their default
        cases.append(Case(name, {"weight_decay": 0.2}, {**_DECOUPLED, "weight_decay": 0.2}))
    else:
        cases.append(Case(name, {"weight_decay": 0.1}, _DECOUPLED))
    cautious = {"cautious_decay": True}
    apart = [case for case in cases if case.ref.get("decay") != "l2"]
    # Of one kind: it is the same for all, but for the two that divide.
    some = apart if name == "adan" else apart[-1:]
    more = [Case(name, c.options | cautious, c.ref | cautious) for c in some]
    if name in ELEMENTWISE and name not in (*SCHEDULE_FREE, "prodigy"):
        # Together with what changes the signs, or is measured, once.
        # The signs of three never differ.
        once: dict[str, list[Case]] = {"rmsprop": [], "adagrad": [], "adadelta": []}
        once |= {
            "adam": cases[-2:],
            "adamw": [cases[-1], more[-1]],
            "lamb": [*cases, *more],
        }
        some, updates = once.get(name, cases[-1:]), {"cautious": True}
        more = more + [Case(name, c.options | updates, c.ref | updates) for c in some]
    return [*cases, *more]


def _same(name: str, **options: Any) -> Case:
    return Case(name, options, options)


_EPS = [n for n in NAMES if n not in (*NO_EPS, "adafactor", *ITERATED, "adopt")]
_BETAS = {n: (0.8, 0.95) for n in NAMES if count_betas(n)}
_BETAS["adan"] = (0.9, 0.8, 0.95)  # type: ignore[assignment]
_BETAS["ademamix"] = (0.9, 0.95, 0.99)  # type: ignore[assignment]

DEFAULTS = [Case(name) for name in NAMES]
DECAYS = [case for name in NAMES for case in _decays(name)]
OPTIONS = [
    *[_same(name, betas=betas) for name, betas in _BETAS.items()],
    *[_same(name, eps=1e-2) for name in _EPS],
    *[_same(name, maximize=True) for name in NAMES],
    *[Case(n, *x) for n in NAMES for x in getattr(getattr(reference, n), "tried", [])],
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
    grads[3:4] = [torch.zeros_like(p)][: max(0, steps - 3)]
    return p, grads


def fitting(name: str, ps: list[Any]) -> list[Any]:
    """Parameters, as matrices where the optimizer takes nothing less."""
    if name not in MATRICES:
        return ps
    return [p.detach().reshape(1, -1).requires_grad_() if p.dim() < 2 else p for p in ps]


def taken(cls: Any, model: torch.nn.Module) -> list[Any]:
    """A model's parameters that an optimizer takes; the others are frozen."""
    for p in model.parameters():
        p.requires_grad_(p.dim() > 1 or cls not in map(CLASSES.get, MATRICES))
    return [p for p in model.parameters() if p.requires_grad]


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
