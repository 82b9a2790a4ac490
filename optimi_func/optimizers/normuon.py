"""NorMuon (Li et al. 2025): Muon with rows of one length."""

from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.classes.forms import init_function, step_function
from optimi_func.core.checks import check_number
from optimi_func.core.distributed import whole_field
from optimi_func.core.math import norm, root
from optimi_func.core.rule import MomentStorage, Rule, Scalar
from optimi_func.optimizers import _sgd as sgd
from optimi_func.optimizers import muon as muons
from optimi_func.pure.functional import Number, derived
from optimi_func.state.convert import Counterparts

__all__ = ["NorMuon", "normuon", "normuon_init", "normuon_step"]


class State(NamedTuple):
    momentum_buffer: Tensor  # b
    second_momentum_buffer: Tensor  # r, one number a row


class Coeffs(NamedTuple):
    momentum: Scalar
    one_minus_dampening: Scalar
    nesterov_momentum: Scalar
    eps: Scalar
    row_beta: Scalar
    one_minus_row_beta: Scalar


def init(p: Tensor, kept: MomentStorage) -> State:
    shape = p.shape[:1] if p.dim() > 3 else p.shape[:-1]
    return State(*sgd.init(p, kept), whole_field(p, (*shape, 1)))


def coeffs(t: Scalar, *, momentum: Scalar, eps: Scalar, row_beta: Scalar) -> Coeffs:
    own = muons.coeffs(t, momentum=momentum, eps=eps)
    return Coeffs(*own, row_beta, 1.0 - row_beta)


def whole(
    d: Tensor, x: Any, fields: tuple[Tensor], c: Coeffs, how: muons.Iteration
) -> tuple[Tensor, tuple[Tensor]]:
    moved: list[Tensor] = []
    kept: list[Tensor] = []
    parts = (muons.matrices(y, how.split) for y in (d, *fields))
    for y, rows in zip(*parts):
        o = muons.orthogonalized(y, c.eps, how)
        means = o.square().sum(-1, keepdim=True) / max(1, o.shape[-1])
        kept.append(c.row_beta * rows + c.one_minus_row_beta * means)
        even = o / (root(kept[-1]) + 1e-10)
        before, after = (norm(z, dim=(-2, -1), keepdim=True) for z in (o, even))
        moved.append(muons.scaled(even * (before / (after + 1e-10)), how))
    return muons.joined(moved, d), (muons.joined(kept, *fields),)


def normuon_rule(nesterov: bool, how: muons.Iteration) -> Rule[State, Coeffs]:
    key = nesterov, *how
    if key not in _rules:  # Dynamo does not trace into functools.cache
        _rules[key] = Rule(
            *("normuon", State, init, coeffs),
            muons.look_ahead if nesterov else sgd.direction,
            accumulate=sgd.accumulate,
            whole=partial(whole, how=how),
            whole_fields=State._fields[1:],
            refuses=partial(muons.refuses, split=how.split),
        )
    return _rules[key]


_rules: dict[Any, Rule[State, Coeffs]] = {}


@dataclass(frozen=True, kw_only=True, repr=False)
class normuon(muons.muon):
    """`NorMuon` as a value: `init` and `step` over a tree of parameters."""

    counterparts = Counterparts()

    row_beta: Number = 0.95

    @derived
    def rule(self) -> Rule[Any, Any]:
        return normuon_rule(self.nesterov, self.iteration)

    def check(self) -> None:
        super().check()
        check_number("row beta", "row_beta", self.row_beta, below=1.0)


normuon_init = init_function(normuon(lr=0.0).rule)
normuon_step = step_function(normuon)


class NorMuon(muons.Muon):
    """NorMuon: Muon with the rows of its step divided by their usual lengths.

        O  = X of Muon, before s
        r <- row_beta * r + (1 - row_beta) * mean over columns of O^2
        N  = O / (sqrt(r) + 1e-10)
        p <- p - lr * s * N * ||O|| / (||N|| + 1e-10) - lr * weight_decay * p

    Muon makes singular values equal, but some rows, which are the neurons of a layer, move
    far more than others. Here all move about alike, and the whole as far as Muon's. r is
    one number a row, float32 at least, and starts at 0: the norms take out its bias. The
    norms are those of each matrix, also if it is one of a stack, a part of a `split`, or
    sharded.

    Args:
        row_beta: Share of r kept, in [0, 1).

    Arguments not named here are those of `Muon` and of every optimizer: see
    `BaseOptimizer`.

    References:
        Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491.

    >>> w = torch.eye(2, requires_grad=True)
    >>> optimizer = NorMuon([w], lr=0.1, weight_decay=0.0, compile=False)
    >>> (w * torch.tensor([[3.0, 0.0], [3.0, 1.0]])).sum().backward()
    >>> optimizer.step()
    >>> (w.detach() - torch.eye(2)).norm(dim=1)  # of both rows
    tensor([0.0250, 0.0250])
    """

    factory = normuon

    row_beta: InitVar[float] = 0.95
