"""A rule whose map of whole tensors reads parameters and moments, with two fields."""

from typing import Any, NamedTuple

from torch import Tensor

from optimi_func.core.distributed import whole_field
from optimi_func.core.math import moment
from optimi_func.core.rule import Direction, MomentStorage, Rule, Scalar, Whole
from optimi_func.rules import Body, Float


class State(NamedTuple):
    exp_avg: Tensor
    row_avg: Tensor  # of the squares in each row
    sides: Tensor  # of a shape that has nothing of the parameter's


class Coeffs(NamedTuple):
    beta: Scalar


def init(p: Tensor, kept: MomentStorage, numbers: object) -> State:
    del numbers
    sides = whole_field(p, (3, 2))
    return State(moment(p, kept), whole_field(p, (*p.shape[:-1], 1)), sides)


def direction(g: Tensor, s: State, c: Coeffs, x: Tensor) -> Direction:
    assert s[1:] == (None, None)
    m = c.beta * s.exp_avg + g
    return Direction(m + 0.1 * x, s._replace(exp_avg=m))


def whole(d: Tensor, read: Any, fields: Any, c: Coeffs, r: Any) -> Any:
    (x, m), (rows, sides) = read, fields
    rows = c.beta * rows + d.square().mean(-1, keepdim=True)
    sides = sides + 0.1 * x.square().sum() / max(1, x.numel())
    return (d - d.mean() + m) / (rows.sqrt() + sides.sum()), (rows, sides)


mapped_rule: Rule = Rule(
    name="mapped",
    state=State,
    init=init,
    coeffs=lambda t: Coeffs(0.9),
    direction=direction,
    whole=Whole(whole, ("row_avg", "sides"), reads=("x", "exp_avg")),
    accumulate=lambda c: c._replace(beta=1.0),
    reads_param=True,
)


class Mapped(Body, name="mapped"):
    """Its class, with the rule in the place of the one that is traced from `direction`."""

    _positional = ()
    lr: Float = Float(0.1)
    weight_decay: Float = Float(0.01)

    def direction(self, g: Tensor) -> Tensor:
        return g


mapped: Any = Mapped.pure
mapped.rule = mapped_rule
