"""Hooks: changes of an update between the optimizer's rule and the write.

Every optimizer class and every pure function takes `hooks=[...]`. An optimizer computes a
direction d for a parameter x, and moves the parameter by -lr * d. Its hooks change d, one
after another, before d is multiplied by lr. Weight decay is not part of d, so no hook
changes it.

|x| is the norm of a parameter, by default of the whole tensor, also if it is sharded. The
hooks that compute norms have an option `over`. With over="matrix", each matrix of a stack,
and each part of Muon's `split`, has a norm of its own. With over="row", each row of a
matrix has one, which is the weights of one output of a layer.

To write a hook, decorate a NamedTuple of its numbers with `hook`. Its method `scale`
receives means over the tensor, n.xx of x * x, n.xd of x * d and n.dd of d * d, and the
learning rate. It returns a factor for d, or a pair (a, b) for the new direction
a * d + b * x.

>>> from typing import NamedTuple
>>> from optimi_func import SGD, hooks
>>> @hooks.hook
... class trust_ratio(NamedTuple):
...     most: float = 10.0
...
...     def scale(self, n, lr):
...         return (n.xx / n.dd).sqrt().clamp_max(self.most)
>>> w = torch.tensor([3.0, 4.0], requires_grad=True)
>>> optimizer = SGD([w], lr=0.1, hooks=[trust_ratio()], compile=False)
>>> optimizer.step((2 * w[0]).backward)
>>> w.detach()  # a step of length 0.1 * 5
tensor([2.5000, 4.0000])
"""

import math
from collections.abc import Generator
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.hooks import Norms, Reduction
from optimi_func.core.hooks import hook as hook
from optimi_func.core.math import is_zero, root
from optimi_func.core.rule import Scalar

__all__ = ["cautious", "clip_rms", "floor", "hook", "hyperball", "radial_brake", "relative"]

Over: TypeAlias = Reduction | Literal["tensor", "matrix", "row"]
Factors: TypeAlias = tuple[Tensor, Tensor]


@hook
class cautious(NamedTuple):
    """Move only the elements whose direction and gradient have the same sign.

        d <- d * m / max(mean(m), 0.001),   m = 1 if d * g > 0, else 0

    The moves are divided by the fraction of elements that move, so that steps do not become
    shorter. `cautious=True` is short for this hook before all others. Rules whose direction
    mixes the elements of a matrix (Muon, SOAP) raise an error, because the signs of d and g
    cannot be compared.

    References:
        Liang et al., "Cautious Optimizers: Improving Training with One Line of Code",
        arXiv:2411.16085.

    >>> from optimi_func import Lion
    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = Lion([w], lr=0.1, hooks=[cautious()], compile=False)
    >>> optimizer.step(w[0].backward)
    >>> w.detach()  # one of two elements moves, twice as far
    tensor([0.8000, 1.0000])
    """

    reads_gradient = True

    def update(
        self, d: Tensor, g: Tensor, x: Tensor
    ) -> Generator[list[Tensor] | Tensor, list[Tensor], None]:
        """Yield the agreement of signs, receive its mean, and yield the new direction."""
        # A product of signs, because the product of two values may underflow.
        agrees = (d.sign() * g.sign()).clamp_min(0.0)
        d = agrees * d
        (share,) = yield [agrees]
        yield d * (1.0 / share.clamp_min(1e-3))


@hook
class clip_rms(NamedTuple):
    """Shorten a direction whose root mean square is above a limit.

        d <- d / max(1, RMS(d) / limit)

    Attributes:
        limit: The largest root mean square, above 0.
        over: What the mean is taken over: "tensor", "matrix" or "row".

    References:
        Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
        arXiv:1804.04235, section 6.

    >>> from optimi_func import SGD
    >>> w = torch.zeros(2, requires_grad=True)
    >>> optimizer = SGD([w], lr=1.0, hooks=[clip_rms(1.0)], compile=False)
    >>> optimizer.step((3 * w.sum()).backward)
    >>> w.detach()
    tensor([-1., -1.])
    """

    bounds = {"limit": {"above": 0.0}}  # noqa: RUF012
    limit: float = 1.0
    over: Over = "tensor"

    def scale(self, n: Norms, lr: Scalar) -> Tensor:
        """Return the factor of d."""
        del lr
        return 1.0 / (root(n.dd) / self.limit).clamp_min(1.0)


@hook
class relative(NamedTuple):
    """Make lr the length of a step as a fraction of the parameter's norm.

        d <- ratio * |x| / |d| * d

    If x or d is 0, the parameter does not move, so a bias that begins at 0 stays 0. LAMB
    and LARS scale their steps in this way.

    Attributes:
        ratio: The norm of the new direction, as a fraction of the parameter's norm.
        over: What the norms are taken over: "tensor", "matrix" or "row".

    >>> from optimi_func import SGD
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> optimizer = SGD([w], lr=0.1, hooks=[relative()], compile=False)
    >>> optimizer.step((7 * w[0]).backward)
    >>> w.detach()  # a step of length 0.1 * 5
    tensor([2.5000, 4.0000])
    """

    bounds = {"ratio": {"least": 0.0}}  # noqa: RUF012
    ratio: float = 1.0
    over: Over = "tensor"

    def scale(self, n: Norms, lr: Scalar) -> Tensor:
        """Return the factor of d."""
        del lr
        return _ratio(self.ratio, n)


@hook
class floor(NamedTuple):
    """Lengthen a direction that is short beside the parameter.

        d <- max(1, ratio * |x| / |d|) * d

    So a step has at least lr * ratio of the parameter's norm. The speed runs of modded
    NanoGPT use this in place of weight decay, with ratios of 0.35 and 0.3825: weights
    grow until the moves, which are small beside them, balance the growth.

    Attributes:
        ratio: The least norm of a direction, as a fraction of the parameter's norm.
        over: What the norms are taken over: "tensor", "matrix" or "row".

    >>> from optimi_func import SGD
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> optimizer = SGD([w], lr=1.0, hooks=[floor(0.2)], compile=False)
    >>> optimizer.step((0.5 * w[0]).backward)
    >>> w.detach()  # a step of length 0.2 * 5
    tensor([2., 4.])
    """

    bounds = {"ratio": {"least": 0.0}}  # noqa: RUF012
    ratio: float = 0.35
    over: Over = "tensor"

    def scale(self, n: Norms, lr: Scalar) -> Tensor:
        """Return the factor of d."""
        del lr
        return _ratio(self.ratio, n).clamp_min(1.0)


@hook
class radial_brake(NamedTuple):
    """Let a step change the norm of the parameter only in part.

        y = x - lr * d,   |x'| = |x| + s * (|y| - |x|),   x' = |x'| / |y| * y

    s is `outward` if the step makes the parameter longer, and `inward` if the step makes it
    shorter. With outward=inward=0, the norm stays as it is.

    Attributes:
        outward: The fraction, up to 1, of a growth of the norm that remains.
        inward: The fraction, up to 1, of a decrease of the norm that remains.
        over: What the norms are taken over: "tensor", "matrix" or "row".

    >>> from optimi_func import SGD
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> optimizer = SGD([w], lr=1.0, hooks=[radial_brake(0.5)], compile=False)
    >>> loss = -3 * w[0] - 4 * w[1]
    >>> optimizer.step(loss.backward)  # from 5 to 10 without the brake
    >>> w.detach().norm()
    tensor(7.5000)
    """

    bounds = {name: {"least": 0.0, "most": 1.0} for name in ("outward", "inward")}  # noqa: RUF012
    outward: float = 0.5
    inward: float = 1.0
    over: Over = "tensor"

    def scale(self, n: Norms, lr: Scalar) -> Factors:
        """Return the factors of d and of x."""
        return _braked(n, lr, self.outward, self.inward)


@hook
class hyperball(NamedTuple):
    """Keep the norm R of a parameter, and move it by lr * R along the direction.

        y = x - lr * R * d / |d|,   x' = R / |y| * y

    Only the direction of the parameter is trained, and lr is about the angle of a step in
    radians. Weight decay would change the norm, so it has to be 0. R is the norm that the
    parameter has: a parameter of norm 0 does not move. Pass the weights of matrices, and
    train biases, gains and embeddings without it. AdamW with this hook is called AdamH,
    Muon with it MuonH, and SOAP with it SOAP-H.

    Attributes:
        over: What the norm is taken over: "tensor", "matrix" or "row". Muon's
            hyperball=True is short for hyperball("matrix").

    References:
        Wen et al., arXiv:2606.16899.

    >>> from optimi_func import AdamW
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> how = dict(weight_decay=0.0, hooks=[hyperball()], compile=False)
    >>> optimizer = AdamW([w], lr=0.1, **how)
    >>> optimizer.step(w[0].backward)
    >>> w.detach().norm()
    tensor(5.)
    """

    keeps_norms = True
    over: Over = "tensor"

    def scale(self, n: Norms, lr: Scalar) -> Factors:
        """Return the factors of d and of x."""
        a = _ratio(1.0, n)
        moved = Norms(n.xx, a * n.xd, a * a * n.dd)
        c, b = _braked(moved, lr, 0.0, 0.0)
        return a * c, b


def _ratio(ratio: Scalar, n: Norms) -> Tensor:
    """Return ratio * |x| / |d|, or 0 if x or d is 0."""
    none = is_zero(n.xx) | is_zero(n.dd)
    length = torch.where(none, math.inf, root(n.dd))
    return torch.where(none, 0.0, ratio * root(n.xx) / length)


def _braked(n: Norms, lr: Scalar, outward: Scalar, inward: Scalar) -> Factors:
    """Return a and b such that x - lr * (a * d + b * x) has the norm of a radial brake."""
    # (|y|^2 - |x|^2) / lr, for y = x - lr * d, computed without a division by lr.
    longer = lr * n.dd - 2.0 * n.xd
    square = n.xx + lr * longer
    x, y = root(n.xx), root(square)
    lost = torch.where(longer > 0.0, (1.0 - outward) * longer, (1.0 - inward) * longer)
    b = lost / ((x + y) * y)
    return 1.0 - lr * b, b
