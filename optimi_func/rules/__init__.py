"""Your own optimizer: a class body with the update of one tensor.

`Optimizer` turns it into a class with param groups, the pure step, compiled kernels,
gradient release and all storages. docs/own_rule.md has examples, the annotations of a
State's fields, what a method cannot contain, and which methods combine.
"""

from dataclasses import KW_ONLY, InitVar
from typing import Annotated, ClassVar, TypeAlias

from torch import Tensor

from optimi_func.classes.evaluation import Evaluated as Evaluated
from optimi_func.classes.fields import Betas as Betas
from optimi_func.classes.fields import Field as Field
from optimi_func.classes.fields import Float as Float
from optimi_func.classes.fields import ThreeBetas as ThreeBetas
from optimi_func.core import math
from optimi_func.core.checks import check_number as check_number
from optimi_func.core.distributed import number_field, whole_field
from optimi_func.rules.body import Body as Body
from optimi_func.rules.body import Coupled as Coupled
from optimi_func.rules.body import OwnRule as OwnRule
from optimi_func.rules.body import choice as choice
from optimi_func.rules.body import functions as functions
from optimi_func.rules.lifting import is_zero as is_zero
from optimi_func.rules.lifting import maximum as maximum
from optimi_func.rules.lifting import minimum as minimum
from optimi_func.rules.lifting import root as root
from optimi_func.rules.lifting import rounded as rounded
from optimi_func.rules.lifting import where as where
from optimi_func.rules.making import Move as Move

# The storage of a State's fields. A Tensor is a Moment.
Moment: TypeAlias = Annotated[Tensor, math.moment]
SecondMoment: TypeAlias = Annotated[Tensor, math.second_moment]
Wide: TypeAlias = Annotated[Tensor, math.slow_moment]
# In codes, with a rounding that is right on average, or wide.
SlowSecondMoment: TypeAlias = Annotated[Tensor, math.slow_second_moment]
# Never in codes: a former gradient, and a maximum of squares.
Former: TypeAlias = Annotated[Tensor, math.wide_moment]
Largest: TypeAlias = Annotated[Tensor, math.wide_second_moment]
# Of the shape that `init` gives, float32 or wider, for `whole` alone. These come last.
Shaped: TypeAlias = Annotated[Tensor, whole_field]
# A number of the tensor that lasts, float32 or wider, for `measure`. These come last.
Number: TypeAlias = Annotated[Tensor, number_field]


class Optimizer(Body):
    """Base class of an optimizer that its user writes: `direction`, for one tensor.

        class SignSGD(Optimizer):
            momentum: float = 0.9

            class State(NamedTuple):
                exp_avg: Tensor

            def direction(self, g: Tensor, s: State):
                m = self.momentum * s.exp_avg + (1 - self.momentum) * g
                return m.sign(), self.State(m)

    The parameter moves by -lr times the direction; decay, precision and storage are not its
    business. Fields are the constructor's arguments. Floats and tuples of floats are
    hyperparameters, which may be scheduled. Others (bools, strings, ints) are static, so
    that methods may branch on them. `SignSGD.pure(lr=1e-3)` is the same as a value, with
    `init` and `step`. Methods are traced once, at the definition, and read globals then.
    Only `direction` is needed. Arguments go by name (direction's g and s are the first two,
    whatever their names): t is the 1-based step, x the parameter.

    - `direction(self, g, s, ...) -> (d, State)` may take t, x, standard normal z if there
      is a field `seed`, and extras under other names, which `step` is given. With a
      `Running` of floats it takes r, and returns one as third result. `accumulate`,
      `after`, `measure`, `divisor` and `sums` may take the same extras, and `whole` and
      `join` 0-d ones. An extra may have a number as its default. `loss` is a closure's, if
      `step` is given no other.
    - `accumulate(self, g, s, ...) -> (d, State)`: for a further part of a step's gradient.
    - `after(self, mean, top, x, u, s, t, r) -> (u, State)` rewrites the finished delta u,
      at the steps for which `due(self, t)`, if there is one, is True.
    - `measure(self, mean, top, numel, g, s, x, t, r)` returns a dict of numbers, which are
      made of means (`mean(x * x)`) and maxima (`top(g.abs())`) over the parameter before
      the step, and which direction takes by name. Those with the name of a `Number`
      field of State last: s has that of the step before here, and the new one elsewhere.
    - `divisor(self, mean, top, g, s, x, d, t)` returns what d is divided by. If it takes
      `decay`, what decay adds to d, it divides their sum. With `move`, it divides the whole
      move (see `Move`). s is the new state.
    - `whole(self, d, t, x) -> d` maps the direction of a whole tensor, as Muon does. With
      fields that are `Shaped`, it takes s and returns (d, State), as SOAP does. It and
      `init` may take `normal`: see `z`, and `normal(shape)` returns such numbers.
      `refuses(self, p)` returns why it does not take a parameter, or None.
    - `sums(self, g, s, x, t, r)` returns tensors, s being the new state. `join(self, r,
      sums)` makes the next Running of their sums over all parameters.
    - `eval_point(self, x, s, t, r) -> x` returns the parameter to evaluate with. The class
      has `eval()` and `train()` if it is written `class Mine(Optimizer, Evaluated)`.
    - `coeffs(self, t, r, lr, weight_decay)` returns scalars at every step, c for others.
    - `init(self, p) -> State` returns the first values, None for zeros, and for a field
      that is `Shaped` its shape or its values.
    - `check(self)` raises for hyperparameters out of range, and sets all bounds.

    The class line takes `decay`: "decoupled", "l2" (it joins the gradient), "proximal" or
    "own" (none is added, and the methods read self.weight_decay), and `lr="inside"`: the
    parameter moves by the direction itself, into which the methods have multiplied self.lr
    as they like. Decay stays lr * weight_decay * x.

    Args:
        params: Parameters, named parameters, or param groups.
        weight_decay: Decay coefficient.

    Arguments not named here are those of every optimizer: see `BaseOptimizer`.

    Raises:
        TypeError: At the definition of the class: a method that cannot be traced or is not
            elementwise, other results, a field that has the name of an option.

    >>> class SignSGD(Optimizer):
    ...     def direction(self, g: Tensor):
    ...         return g.sign()
    >>> w = torch.ones(2, requires_grad=True)
    >>> SignSGD([w], lr=0.1, compile=False).step((3 * w).sum().backward)
    >>> w.detach()
    tensor([0.9000, 0.9000])
    >>> SignSGD.pure(lr=0.1, weight_decay=0.5)
    SignSGD.pure(lr=0.1, weight_decay=0.5)
    """

    at_definition: ClassVar[bool] = True
    _positional = ()

    _: KW_ONLY
    weight_decay: InitVar[float] = 0.0
