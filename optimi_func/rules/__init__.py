"""Your own optimizer: a class body with the update of one tensor.

`Optimizer` turns the class body into an optimizer with param groups, a pure step, compiled
kernels, gradient release and all storage modes. docs/own_rule.md contains examples, and
explains the annotations of a State's fields, what a method cannot contain, and which
methods can be combined.
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
from optimi_func.rules.arithmetic import is_zero as is_zero
from optimi_func.rules.arithmetic import maximum as maximum
from optimi_func.rules.arithmetic import minimum as minimum
from optimi_func.rules.arithmetic import root as root
from optimi_func.rules.arithmetic import rounded as rounded
from optimi_func.rules.arithmetic import where as where
from optimi_func.rules.body import Body as Body
from optimi_func.rules.body import Coupled as Coupled
from optimi_func.rules.body import choice as choice
from optimi_func.rules.body import functions as functions

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
    """Base class for your own optimizer, whose method `direction` handles one tensor.

        class SignSGD(Optimizer):
            momentum: float = 0.9

            class State(NamedTuple):
                exp_avg: Tensor

            def direction(self, g: Tensor, s: State):
                m = self.momentum * s.exp_avg + (1 - self.momentum) * g
                return m.sign(), self.State(m)

    A step adds -lr times the direction to the parameter. Your methods need no code for
    weight decay, precision and storage. The fields of the class become arguments of the
    constructor. Floats and tuples of floats are hyperparameters, which may be scheduled.
    All other fields (bools, strings, ints) are static, so that methods may branch on them.
    `SignSGD.pure(lr=1e-3)` is the same optimizer in its pure form, with the methods `init`
    and `step`. Methods are traced once, when the class is defined, and global variables are
    read at that time. Only `direction` is required. Each method receives the arguments that
    it names: t is the step number, which starts at 1, and x is the parameter. The first two
    arguments of `direction` are the gradient and the state, whatever their names are.

    - `direction(self, g, s, ...) -> (d, State)` may also have the arguments t, x and, if
      the class has a field `seed`, standard normal random numbers z. An argument with any
      other name is an extra, whose value you pass to `step`. If the class has a `Running`,
      a NamedTuple of floats, `direction` receives it as r, and returns the new `Running` as
      its third result. `accumulate`, `after`, `measure` and `sums` may have the same
      extras, and `whole` and `join` may have extras that are 0-d. An extra may have a
      number as its default. The extra `loss` is the loss that a closure returned, unless
      you pass a different value to `step`.
    - `accumulate(self, g, s, ...) -> (d, State)` replaces `direction` for the second and
      all later micro-batches of a step.
    - `after(self, mean, top, x, u, s, t, r) -> (u, State)` rewrites the finished update u,
      which includes lr and weight decay. It may return u alone if the state does not
      change. If the class has a method `due(self, t)`, `after` only runs in steps for which
      `due` returns True.
    - `measure(self, mean, top, numel, g, s, x, t, r)` returns a dict of numbers, which are
      computed before the step from means (`mean(x * x)`) and maxima (`top(g.abs())`) over
      the parameter. `direction` receives these numbers as arguments with the same names. A
      number with the name of a `Number` field of State is stored in this field. In
      `measure`, the field has its value from the previous step, and in all other methods
      its new value.
    - `whole(self, d, t, x) -> d` maps the direction of a whole tensor, as Muon does. If
      State has fields that are `Shaped`, `whole` also receives s and returns (d, State), as
      in SOAP. `whole` and `init` may have an argument `normal`. `normal(shape)` returns
      random numbers like z. `refuses(self, p)` returns the reason why the rule does not
      accept a parameter, or None.
    - `sums(self, g, s, x, t, r)` returns tensors that are summed over all parameters, where
      s is the new state. `join(self, r, sums)` computes the next Running from these sums.
    - `eval_point(self, x, s, t, r) -> x` returns the parameter to evaluate the model with.
      To get the methods `eval()` and `train()`, write `class Mine(Optimizer, Evaluated)`.
    - `coeffs(self, t, r, lr, weight_decay)` returns scalars in every step, which the other
      methods receive as c.
    - `init(self, p) -> State` returns the initial values, in which None means zeros. For a
      field that is `Shaped`, `init` returns the shape or the values.
    - `check(self)` raises an error if a hyperparameter is out of range. If the class has
      this method, fields that are plain floats have no other bounds.

    The class line may set the kind of weight decay, as in
    `class Mine(Optimizer, decay="l2")`. The kinds are "decoupled" (the default), "l2"
    (weight decay is added to the gradient), "proximal" (weight decay is applied after the
    step) and "own" (your methods read self.weight_decay and apply it). The class line may
    also contain `lr="inside"`. In that case the direction is not multiplied by lr, so your
    methods have to multiply by self.lr. Weight decay still subtracts lr * weight_decay * x.

    Args:
        params: Parameters, named parameters, or param groups.
        weight_decay: Coefficient of weight decay.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    Raises:
        TypeError: The class is not valid: a method cannot be traced, is not elementwise or
            returns wrong results, or a field has the name of an option. The error is raised
            when the class is defined.

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
