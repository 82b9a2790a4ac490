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
    """Raise an error if a group uses an option that torch.optim.Adafactor lacks."""
    for name, only in (("torch_form", True), ("flatten", False), ("beta1", None)):
        if group[name] is not only and group[name] != {}:  # optim.Adafactor's default
            why = f"cannot go on with {name}={group[name]!r}"
            raise ValueError(f"torch.optim.Adafactor {why}")
    return {}


def our_options(group: Group) -> Group:
    """Return the options that let this class continue a torch.optim.Adafactor run."""
    options = {"torch_form": True, "flatten": False, "beta1": None}
    return options if "beta2_decay" in group and group.get("torch_form", {}) == {} else {}


class Epsilons(Floats[tuple[Scalar, Scalar], tuple[Number | None, Number]]):
    """The pair (eps1, eps2), in which eps1 may be None if torch_form=True."""

    def check_item(self, i: int, x: object, bound: bool) -> None:
        if x is not None or i == 1:
            check_number("epsilon", f"eps[{i}]", x)


class Adafactor(Body, name="adafactor"):
    """Adafactor: Adam without momentum, with a second moment factored into two vectors.

        b = 1 - t^decay_rate
        R <- b R + (1 - b) mean over columns of (g^2 + eps1)
        C <- b C + (1 - b) mean over rows of (g^2 + eps1)
        U = g / sqrt(R C / mean(R))
        p <- p - lr * U / max(1, RMS(U) / clip_threshold) - lr * weight_decay * p

    Together, R and C approximate the second moment of a matrix. For a vector, U = g /
    sqrt(V), where V is a moving average of g^2 + eps1 with the same shape as g.

    For a matrix, Adafactor's state takes only a few thousandths of the memory that the
    matrix itself takes. With Kahan summation, each element of a bfloat16 matrix therefore
    takes 4 bytes in total. R, C and V are always stored in float32 or wider, and
    state_dtype has no effect on them. The defaults are the settings that transformers
    recommends for finetuning with Adafactor. With these settings, you choose lr yourself,
    as for AdamW. If you used transformers' warmup_init, use a learning-rate schedule with a
    warmup instead.

    As in transformers and torch, a tensor with more than two dimensions is treated as a
    stack of matrices. The last two dimensions of the tensor are the rows and columns of
    these matrices. As in torch, weight decay subtracts lr * weight_decay * p from p. With
    scale_parameter=True, transformers also multiplies weight decay by RMS(p), but this
    package does not.

    Args:
        eps: The pair (eps1, eps2). eps1 is added to the squared gradients, and eps2 is a
            lower bound for RMS(p) if scale_parameter=True.
        clip_threshold: The largest RMS that a direction U may have. Directions with a
            larger RMS are scaled down. Pass inf to turn off this clipping.
        decay_rate: Exponent of t in the formula for b, at most 0, for example -0.8.
        beta1: If beta1 is a number in [0, 1), each step uses a moving average of the
            directions U instead of the current U. beta1 is the fraction of this average
            that carries over from one step to the next. The average takes 4 bytes per
            element of the parameter. None turns off averaging.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True.
        scale_parameter: Multiply U by max(eps2, RMS(p)), so that lr is relative to the size
            of the parameter.
        relative_step: Multiply U by min(lr, 1 / sqrt(t)) instead of by lr. Where you would
            pass lr=None to transformers, pass lr=1e-2.
        torch_form: Use the formulas of torch.optim.Adafactor: scale_parameter and
            relative_step are turned on, and eps1 is not added to the squared gradients.
            Instead, eps1 is the smallest value that mean(R) and the divisor of the gradient
            (a square root) can have. torch's defaults are lr=1e-2 and eps=(None, 1e-3). If
            eps1 is None, it is replaced by the machine epsilon of the dtype in which the
            step is computed. For float32 and bfloat16 parameters, this machine epsilon is
            1.2e-7. For bfloat16 parameters, torch uses 0.0078 instead, which is larger than
            most gradients.
        flatten: Treat a tensor with three or more dimensions as one matrix, with one row
            for each index of the first dimension. Use flatten=True for convolutions,
            because their last two dimensions are a kernel of only a few elements.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    If you use gradient release with accumulation="states", Adafactor raises an error,
    because its state cannot be computed from one micro-batch at a time.

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
        """The state of one parameter. Fields that the parameter does not need are empty."""

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
        """True if beta1 is set, so that directions are averaged."""
        return self.beta1 is not None

    @choice
    def machine_eps(self) -> bool:
        """True if eps1 is None. The machine epsilon of the dtype then replaces eps1."""
        return isinstance(self.eps, tuple | list) and (*self.eps[:1],) == (None,)

    def check(self) -> None:
        if self.machine_eps and not self.torch_form:
            check_number("epsilon", "eps[0]", self.eps[0])

    def shape(self, p: Tensor) -> list[int]:
        """Return the shape of p when p is viewed as a matrix or a stack of matrices."""
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
        """The method that scales a direction. It takes p only if it needs RMS(p)."""
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
        """Return the factor (at most 1) by which relative_step multiplies lr."""
        most = lr if self.relative_step or self.torch_form else 0.0
        longer = most * sqrt(t)
        return 1.0 / choose(longer > 1.0, longer, 1.0)


def mean(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, keepdim=True) / max(1, x.shape[dim])


def rms(x: Tensor) -> Tensor:
    return norm(x) / math.sqrt(max(1, x.numel()))


adafactor, adafactor_init, adafactor_step = functions(Adafactor)
