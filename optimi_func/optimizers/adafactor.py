"""Adafactor (Shazeer and Stern 2018): the rule, the pure optimizer and the class."""

import math
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import Float
from optimi_func.classes.forms import step_function, with_options
from optimi_func.core.checks import check_number
from optimi_func.core.distributed import whole_field
from optimi_func.core.math import choose, norm, root, sqrt
from optimi_func.core.rule import Direction, MomentStorage, PyTree, Rule, Scalar
from optimi_func.pure.functional import FunctionalOptimizer, Number, derived
from optimi_func.pure.tree import TreeState
from optimi_func.state.convert import Counterparts

__all__ = ["Adafactor", "adafactor", "adafactor_init", "adafactor_step"]


class State(NamedTuple):
    """Fields that a parameter does not need have no elements."""

    row_var: Tensor  # R, of a matrix
    col_var: Tensor  # C
    variance: Tensor  # V, of a vector
    exp_avg: Tensor  # with beta1


class Coeffs(NamedTuple):
    kept: Scalar  # share of R, C and V
    one_minus_kept: Scalar
    eps1: Scalar
    eps1_squared: Scalar
    eps2: Scalar
    clip_threshold: Scalar
    relative: Scalar  # the step's length, as a share of lr
    beta1: Scalar
    one_minus_beta1: Scalar


class Form(NamedTuple):
    """The options that choose a rule."""

    averages: bool  # by beta1
    scales: bool  # by the parameter's RMS
    relative: bool  # lr is the most
    outside: bool  # eps1 is not added to squares
    machine_eps: bool
    flatten: bool

    def shape(self, p: Tensor) -> list[int]:
        """Return the shape of the matrices that a tensor is."""
        first, *rest = p.shape
        return [first, math.prod(rest)] if self.flatten else [first, *rest]


def init(p: Tensor, kept: MomentStorage, form: Form) -> State:
    del kept  # all are float32 at least
    every, none = list(p.shape), [0]
    shapes = [none, none, every]
    if p.dim() > 1:
        *stack, m, n = form.shape(p)
        shapes = [[*stack, m, 1], [*stack, 1, n], none]
    shapes.append(every if form.averages else none)
    return State(*[whole_field(p, shape) for shape in shapes])


def coeffs(
    t: Scalar,
    *,
    eps: tuple[Scalar | None, Scalar],
    clip_threshold: Scalar,
    decay_rate: Scalar,
    lr: Scalar = 0.0,
    beta1: Scalar = 0.0,
) -> Coeffs:
    eps1 = 0.0 if eps[0] is None else eps[0]
    share, longer = t**decay_rate, lr * sqrt(t)
    relative = 1.0 / choose(longer > 1.0, longer, 1.0)
    numbers = eps1, eps1 * eps1, eps[1], clip_threshold, relative, beta1, 1.0 - beta1
    return Coeffs(1.0 - share, share, *numbers)


def mean(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, keepdim=True) / max(1, x.shape[dim])


def rms(x: Tensor) -> Tensor:
    return norm(x) / math.sqrt(max(1, x.numel()))


def whole(
    d: Tensor, x: Tensor, fields: tuple[Tensor, ...], c: Coeffs, form: Form
) -> tuple[Tensor, tuple[Tensor, ...]]:
    row, col, var, avg = fields
    found, (eps1, eps1_squared) = torch.finfo(d.dtype), c[2:4]
    if form.machine_eps:
        eps1, eps1_squared = found.eps, found.eps**2
    u = d.reshape(form.shape(d)) if d.dim() > 1 else d
    squares = u * u if form.outside else u * u + eps1
    if d.dim() > 1:
        row = c.kept * row + c.one_minus_kept * mean(squares, -1)
        col = c.kept * col + c.one_minus_kept * mean(squares, -2)
        total = mean(row, -2)
        total = total.clamp_min(eps1) if form.outside else total
        parts = [row / total.clamp_min(found.tiny), col]
        # Without a least value their product may underflow.
        parts = [parts[0] * col] if form.outside else parts
    else:
        var = c.kept * var + c.one_minus_kept * squares
        parts = [var]
    for v in parts:
        u = u / root(v.clamp_min(eps1_squared) if form.outside else v)
    length = c.relative / (rms(u) / c.clip_threshold).clamp_min(1.0)
    if form.scales:
        length = length * rms(x).clamp_min(c.eps2)
    u = u.reshape(d.shape) * length.to(d.dtype)
    if form.averages:
        u = avg = c.beta1 * avg + c.one_minus_beta1 * u
    return u, (row, col, var, avg)


def direction(g: Tensor, s: State, c: Coeffs, *x: Tensor) -> Direction:
    return Direction(g, s)


def adafactor_rule(form: Form) -> Rule[State, Coeffs]:
    if form not in _rules:  # Dynamo does not trace into functools.cache
        used = ["lr"] * form.relative + ["beta1"] * form.averages
        _rules[form] = Rule(
            *("adafactor", State, partial(init, form=form), coeffs, direction),
            whole=partial(whole, form=form),
            whole_fields=State._fields,
            reads_param=form.scales,
            numbers=("eps", "clip_threshold", "decay_rate", *used),
        )
    return _rules[form]


_rules: dict[Form, Rule[State, Coeffs]] = {}


def torchs_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options as torch.optim.Adafactor's; raise if it lacks one."""
    for name, only in (("torch_form", True), ("flatten", False), ("beta1", None)):
        if group[name] is not only:
            why = f"cannot go on with {name}={group[name]!r}"
            raise ValueError(f"torch.optim.Adafactor {why}")
    return {"beta2_decay": group["decay_rate"], "d": group["clip_threshold"]}


def our_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group of torch.optim.Adafactor is here."""
    if "beta2_decay" not in group:
        return {}
    own = {"decay_rate": group["beta2_decay"], "clip_threshold": group["d"]}
    return {**own, "torch_form": True, "flatten": False, "beta1": None}


@dataclass(frozen=True, kw_only=True, repr=False)
class adafactor(FunctionalOptimizer):
    """`Adafactor` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts(
        in_torch=torch.optim.Adafactor,
        torch_options=torchs_options,
        our_options=our_options,
        unused=State._fields,
    )
    choices: ClassVar[tuple[str, ...]] = ("beta1",)

    lr: Number = 1e-3
    eps: tuple[Number | None, Number] = (1e-30, 1e-3)
    clip_threshold: Number = 1.0
    decay_rate: Number = -0.8
    beta1: Number | None = None
    weight_decay: Number = 0.0
    scale_parameter: bool = False
    relative_step: bool = False
    torch_form: bool = False
    flatten: bool = False

    @derived
    def rule(self) -> Rule[Any, Any]:
        torchs, averages = self.torch_form, self.beta1 is not None
        scales, relative = self.scale_parameter or torchs, self.relative_step or torchs
        machine_eps = self.eps[0] is None
        form = Form(averages, scales, relative, torchs, machine_eps, self.flatten)
        return adafactor_rule(form)

    def check(self) -> None:
        eps = self.eps
        if not isinstance(eps, tuple | list) or len(eps) != 2:
            raise ValueError(f"Invalid eps: eps={eps!r}: allowed are two numbers")
        for i, x in enumerate(eps):
            if x is not None or i == 1 or not self.torch_form:
                check_number("epsilon", f"eps[{i}]", x)
        super().check()
        check_number("clipping threshold", "clip_threshold", self.clip_threshold, above=0.0)
        check_number("decay rate", "decay_rate", self.decay_rate, least=-1.0, below=0.0)
        if self.beta1 is not None:
            check_number("beta1 parameter", "beta1", self.beta1, below=1.0)


@with_options
def adafactor_init(
    params: PyTree, *, beta1: Any = None, flatten: bool = False, **options: Any
) -> TreeState:
    """Fresh state for params. Raise ValueError for a beta1 out of its range.

    beta1 and flatten are those of the steps, which have to be known here. The other options
    are those of `FunctionalOptimizer.init`.
    """
    return adafactor(lr=0.0, beta1=beta1, flatten=flatten).init(params, **options)


adafactor_step = step_function(adafactor)


class Adafactor(BaseOptimizer):
    """Adafactor: a second moment that is two vectors for each matrix.

        b = 1 - t^decay_rate
        R <- b R + (1 - b) mean over columns of (g^2 + eps1)
        C <- b C + (1 - b) mean over rows of (g^2 + eps1)
        U = g / sqrt(R C / mean(R))          for a vector g / sqrt(V), V like R without mean
        p <- p - lr * U / max(1, RMS(U) / clip_threshold) - lr * weight_decay * p

    Its state is some thousandths of a matrix. A bfloat16 parameter with Kahan summation
    takes 4 bytes in all, and with gradient release no gradient more. R, C and V are float32
    at least, whatever state_dtype. The defaults are those with which transformers'
    Adafactor fine-tunes: lr comes from outside, as in AdamW. A schedule warms up, in place
    of transformers' warmup_init.

    The last two dimensions are factored, and the others are a stack of matrices, as in
    transformers and torch. Decay is lr * weight_decay * p, as everywhere here and in torch.
    With scale_parameter, transformers multiplies it by RMS(p) too.

    Args:
        eps: eps1, added to squared gradients, and eps2, the least RMS(p).
        clip_threshold: The largest RMS of a direction U.
        decay_rate: Exponent of t, in [-1, 0).
        beta1: Share kept of a mean of directions, in [0, 1), which then replaces U and
            takes 4 bytes a parameter. None: none.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr.
        scale_parameter: Multiply U by max(eps2, RMS(p)), so that lr is relative.
        relative_step: Step by min(lr, 1 / sqrt(t)) instead of lr. For transformers' lr=None
            give lr=1e-2.
        torch_form: torch.optim.Adafactor's mathematics: both options above are on, and
            eps1 is added to no square, but mean(R) and the root are at least eps1. torch's
            defaults are lr=1e-2, eps=(None, 1e-3). None is the arithmetic's: 1.2e-7 for
            bfloat16 too, where torch's own 0.0078 is larger than most gradients.
        flatten: Factor a tensor of 3 dimensions or more as the first x the rest. Set it for
            convolutions, whose last two are a kernel of a few elements.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    Parts of a gradient are not added up in its state (accumulation="states" raises).

    References:
        Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
        arXiv:1804.04235.

    >>> w = torch.ones(2, 3, requires_grad=True)
    >>> optimizer = Adafactor([w], lr=0.1, compile=False)
    >>> (w * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    >>> optimizer.step()
    >>> w.detach()[0], optimizer.state[w]["col_var"].shape
    (tensor([0.9000, 0.9000, 0.9000]), torch.Size([1, 3]))
    """

    factory = adafactor

    lr: Float = Float(1e-3)
    eps: InitVar[tuple[float | None, float]] = (1e-30, 1e-3)
    clip_threshold: InitVar[float] = 1.0
    decay_rate: InitVar[float] = -0.8
    beta1: InitVar[float | None] = None
    weight_decay: InitVar[float] = 0.0
    scale_parameter: InitVar[bool] = False
    relative_step: InitVar[bool] = False
    _: KW_ONLY
    torch_form: InitVar[bool] = False
    flatten: InitVar[bool] = False
