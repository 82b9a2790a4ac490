"""SGD's momentum for optimizers that are not class bodies yet."""

from typing import Any

from torch import Tensor

from optimi_func.core.math import moment
from optimi_func.core.rule import Direction, MomentStorage
from optimi_func.optimizers.sgd import State as State


def init(p: Tensor, kept: MomentStorage) -> State:
    return State(moment(p, kept))


def accumulate(c: Any) -> Any:
    # In Nesterov's g + momentum * b, b has the whole gradient and g is the last microbatch.
    return c._replace(momentum=1.0)


def direction(g: Tensor, s: State, c: Any) -> Direction:
    b = c.momentum * s.momentum_buffer + c.one_minus_dampening * g
    return Direction(b, State(b))
