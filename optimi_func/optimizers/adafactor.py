"""Adafactor (Shazeer and Stern 2018)."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from optimi_func.classes.fields import FloatOrNone, Floats
from optimi_func.core.checks import check_number
from optimi_func.core.math import choose, norm, sqrt
from optimi_func.core.rule import Scalar
from optimi_func.pure.functional import Number
from optimi_func.rules import Body, Float, Shaped, choice, functions, root, rounded
from optimi_func.state.convert import Counterparts, Group

__all__ = ["Adafactor", "adafactor", "adafactor_init", "adafactor_step"]


def torchs_options(group: Group) -> Group:
    """Raise if torch.optim.Adafactor lacks an option of a group."""
    for name, only in (("torch_form", True), ("flatten", False), ("beta1", None)):
        if group[name] is not only and group[name] != {}:  # optim.Adafactor's default
            why = f"cannot go on with {name}={group[name]!r}"
            raise ValueError(f"torch.optim.Adafactor {why}")
    return {}


def our_options(group: Group) -> Group:
    """Return what a group of torch.optim.Adafactor is here."""
    options = {"torch_form": True, "flatten": False, "beta1": None}
    return options if "beta2_decay" in group and group.get("torch_form", {}) == {} else {}


class Epsilons(Floats[tuple[Scalar, Scalar], tuple[Number | None, Number]]):
    """eps1, which may be None for torch's form, and eps2."""

    def check_item(self, i: int, x: object, bound: bool) -> None:
        del bound
        if x is not None or i == 1:
            check_number("epsilon", f"eps[{i}]", x)


class Adafactor(Body, name="adafactor"):
    """Adafactor: Adam without momentum, with a second moment factored into two vectors.

        b = 1 - t^decay_rate
        R <- b R + (1 - b) mean over columns of (g^2 + eps1)
        C <- b C + (1 - b) mean over rows of (g^2 + eps1)
        U = g / sqrt(R C / mean(R))
        p <- p - lr * U / max(1, RMS(U) / clip_threshold) - lr * weight_decay * p

    R and C approximate the second moment of a matrix. For a vector, U = g / sqrt(V), where
    V is a moving average of g^2 + eps1 in the shape of g.

    Adafactor's state takes only a few thousandths of the memory of the matrix. A bfloat16
    parameter with Kahan summation therefore takes 4 bytes in total. R, C and V are stored
    in float32 or wider, whatever state_dtype is. The defaults are those that transformers
    recommends for finetuning with Adafactor: you set lr, as for AdamW. Instead of
    transformers' warmup_init, use a schedule with a warmup.

    A tensor with more than two dimensions is treated as a stack of matrices, which are its
    last two dimensions, as in transformers and torch. Weight decay subtracts lr *
    weight_decay * p, as in torch. With scale_parameter, transformers also multiplies decay
    by RMS(p).

    Args:
        eps: eps1, which is added to squared gradients, and eps2, the smallest RMS(p).
        clip_threshold: The largest RMS of a direction U; inf turns it off.
        decay_rate: Exponent of t, at most 0, for example -0.8.
        beta1: Fraction that a step keeps of a moving average of the directions U, in [0,
            1). The average replaces U and takes 4 bytes per parameter. None: no average.
        weight_decay: Decay coefficient. It is multiplied by lr, or by lr / max_lr with
            decouple_lr=True.
        scale_parameter: Multiply U by max(eps2, RMS(p)), so that lr is relative.
        relative_step: Multiply by min(lr, 1 / sqrt(t)) instead of lr. For transformers'
            lr=None pass lr=1e-2.
        torch_form: Compute the same as torch.optim.Adafactor: scale_parameter and
            relative_step are on, and eps1 is not added to squared gradients but is the
            lower bound of mean(R) and of the root. torch's defaults are lr=1e-2, eps=(None,
            1e-3). eps1=None is the machine epsilon of the dtype in which the step is
            computed, 1.2e-7. This is also the case for bfloat16 parameters, for which torch
            uses 0.0078, a value that is larger than most gradients.
        flatten: Factor a tensor with 3 or more dimensions as one matrix, with the first
            dimension as its rows. Set this for convolutions, whose last two dimensions are
            a kernel of only a few elements.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    Gradient release with accumulation="states" raises an error, because the state cannot be
    computed from parts of a gradient.

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

    lr: Float = Float(1e-3)
    eps: Epsilons = Epsilons(
        1e-30, 1e-3, argument=tuple[float | None, float], value=tuple[Number | None, Number]
    )
    clip_threshold: Float = Float(1.0, "clipping threshold", above=0.0, most=math.inf)
    decay_rate: Float = Float(-0.8, "decay rate", least=-math.inf, most=0.0)
    beta1: FloatOrNone = FloatOrNone(
        None, "beta1 parameter", type(None), argument=float | None, below=1.0
    )
    weight_decay: Float = Float(0.0)
    scale_parameter: bool = False
    relative_step: bool = False
    _: KW_ONLY
    torch_form: bool = False
    flatten: bool = False

    class State(NamedTuple):
        """Fields that a parameter does not need have no elements."""

        row_var: Shaped  # R, of a matrix
        col_var: Shaped  # C
        variance: Shaped  # V, of a vector
        exp_avg: Shaped  # with beta1

    counterparts = Counterparts(
        in_torch=torch.optim.Adafactor,
        torch_names={"d": "clip_threshold", "beta2_decay": "decay_rate"},
        torch_options=torchs_options,
        our_options=our_options,
        unused=State._fields,
    )
    compiles_whole = True

    @choice
    def averages(self) -> bool:
        """True if directions are averaged, by beta1."""
        return self.beta1 is not None

    @choice
    def machine_eps(self) -> bool:
        """True if eps1 is the arithmetic's."""
        return isinstance(self.eps, tuple | list) and (*self.eps[:1],) == (None,)

    def check(self) -> None:
        if self.machine_eps and not self.torch_form:
            check_number("epsilon", "eps[0]", self.eps[0])

    def shape(self, p: Tensor) -> list[int]:
        """Return the shape of the matrices that a tensor is."""
        first, *rest = p.shape
        return [first, math.prod(rest)] if self.flatten else [first, *rest]

    def init(self, p: Tensor):
        every, none = list(p.shape), [0]
        shapes = [none, none, every]
        if p.dim() > 1:
            *stack, m, n = self.shape(p)
            shapes = [[*stack, m, 1], [*stack, 1, n], none]
        shapes.append(every if self.averages else none)
        return self.State._make(shapes)

    def direction(self, g: Tensor):
        return g

    @property
    def whole(self) -> Callable[..., tuple[Tensor, State]]:
        """The map, which takes the parameter if that scales the direction."""
        return self.scaled if self.scale_parameter or self.torch_form else self.alone

    def alone(self, d: Tensor, s: State, t: Scalar, lr: Scalar):
        return self.scaled(d, s, t, None, lr)

    def scaled(self, d: Tensor, s: State, t: Scalar, x: Tensor | None, lr: Scalar):
        outside, (row, col, var, avg) = self.torch_form, s
        info, (eps1, eps2) = torch.finfo(d.dtype), self.eps
        eps1 = info.eps if self.machine_eps else eps1
        least, eps1 = rounded(eps1 * eps1, d), rounded(eps1, d)
        share = t**self.decay_rate
        kept, rest = rounded(1.0 - share, d), rounded(share, d)
        u = d.reshape(self.shape(d)) if d.dim() > 1 else d
        squares = u * u if outside else u * u + eps1
        if d.dim() > 1:
            row = kept * row + rest * mean(squares, -1)
            col = kept * col + rest * mean(squares, -2)
            total = mean(row, -2)
            total = total.clamp_min(eps1) if outside else total
            parts = [row / total.clamp_min(info.tiny), col]
            # Without a least value their product may underflow.
            parts = [parts[0] * col] if outside else parts
        else:
            var = kept * var + rest * squares
            parts = [var]
        for v in parts:
            u = u / root(v.clamp_min(least) if outside else v)
        longer = (rms(u) / rounded(self.clip_threshold, d)).clamp_min(1.0)
        relative = rounded(self.relative(t, lr), d)
        if isinstance(relative, float) and relative != 1.0:
            # A number over a tensor would be the number times the tensor's reciprocal.
            relative = longer.new_full((), relative)
        length = relative / longer
        if x is not None:
            length = length * rms(x).clamp_min(rounded(eps2, d))
        u = u.reshape(d.shape) * length
        if self.beta1 is not None:
            share, rest = rounded(self.beta1, d), rounded(1.0 - self.beta1, d)
            u = avg = share * avg + rest * u
        return u, self.State(row, col, var, avg)

    def relative(self, t: Scalar, lr: Scalar) -> Scalar:
        """Return the step's length, as a share of lr."""
        most = lr if self.relative_step or self.torch_form else 0.0
        longer = most * sqrt(t)
        return 1.0 / choose(longer > 1.0, longer, 1.0)


def mean(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, keepdim=True) / max(1, x.shape[dim])


def rms(x: Tensor) -> Tensor:
    return norm(x) / math.sqrt(max(1, x.numel()))


adafactor, adafactor_init, adafactor_step = functions(Adafactor)
