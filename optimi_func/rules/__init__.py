"""Your own optimizer: a class body with the update of one tensor.

`Optimizer` makes of it a class with param groups, the pure step, compiled kernels, gradient
release and all storages.

**Fields** are arguments of the constructor. Floats and tuples of floats are
hyperparameters: schedules, tensors, another number for each group or member. All else
(bools, strings, ints) is static, and may differ by group: methods are traced for each
combination, and 1 and True are two. A field whose default is None is static too. `clip:
float = math.inf` is not. A subclass may write `beta = 0.5` for another default. The class's
`check` sets the bounds of all fields: then any number but NaN is allowed that it does not
refuse. Without `check` a hyperparameter is finite and at least 0, and `betas` are below 1.
A default of inf allows inf, and a negative one negative numbers. `mistakes(self)` returns
warnings, a list of sentences, of values that are allowed but probably wrong.

**State** is a NamedTuple of tensors in the parameter's shape, whose annotations say how
each is stored:

- `Tensor`: a first moment, as `storage=` says.
- `SecondMoment`: a mean of squares, never in float16.
- `SlowSecondMoment`: one with a beta above 0.996. float32 or 8-bit codes, never bfloat16,
  where it would stand still.
- `Wide`: float32 or wider, whatever the storage.
- `Number`: one number of the tensor, 0-d, float32 or wider. These come last.
- `Shaped`: of a shape that `init` gives, float32 or wider, for `whole` alone. These come
  last.

A field of the new state may be any tensor of the step, such as the gradient or x. Names of
fields are not those of `Running`, nor `step`, `kahan_comp` and others of an entry. If an
option changes the state, `State` is a property that returns one of several classes, or
makes one: `NamedTuple("State", [(f"v{i}", Tensor) for i in range(len(self.betas))])`.
`pickle` finds no class that is made so. `init` may read hyperparameters, as in
`torch.zeros_like(p) + self.start`. A schedule is read at step 0.

**Tracing.** Work with hyperparameters and t alone is done on the host, in double precision.
There a division by 0 and an overflow give inf or nan, as they do for tensors: `0**0` is 1,
and the root of -4 is nan. Derivatives of roots, and of powers between 0 and 1, are 0 at 0.
A method reads globals and what it closes over when the class is defined. To change a global
number, define the class again, or make it a field. A subclass is traced with what it
changes and what a mixin adds. A class decorator may assign to the class. Once the class is
used or has a subclass, an assignment raises.

**Refused** with a `TypeError` that names the class, the method and its line:

- `if`, `max` and `while` over tensors, hyperparameters or t: write `torch.where(t < 10,
  0.0, 1.0)`, or `(t / 10).clamp_max(1.0)`. `maximum`, `minimum` and `where` of this module
  take scalars and tensors alike.
- `math.sqrt(self.beta)`: write `self.beta ** 0.5`. `torch.exp(self.beta)` takes scalars
  too.
- `g / g.norm()` and other norms: `divisor` or `measure`. A mean of a mean: another formula,
  because all are taken at once.
- `g.flatten()`, `g.shape` and all that is not elementwise, because g may be flat, or a
  shard: `whole`.
- `g.mul_(2)` and `out=`: `g * 2`.
- A tensor that the method closes over: a field of `State` that `init` fills, or an extra.
- `torch.randn_like(g)` and other random numbers: `z`, or `normal`.
- `direction(self, g, s, lr)`: `self.lr`. `coeffs`, `whole` take lr and weight_decay by
  name.
- A State's field with a default: `init`. One that is no tensor: a field of `Running`.
- A field with the name of an option, a method or a method's argument: another name.

**Extras** are what `direction` takes besides, by name: tensors in the shape of their
parameter, 0-d, or floats. The pure step takes trees or prefixes of them. `population.step`
takes them with the members along their first axis, or 0-d for all. The class's `step` and
`give` take a dict by parameter or by its name, a list with one for each parameter, or a
number for all. Compiled functions refuse extras, and so does the release of a pure
optimizer.

**Noise.** z is a function of the field `seed`, the step, the parameter's place in the
optimizer or the tree, and the element. So a resumed run goes on with the same numbers, and
shards draw those of the whole tensor. Members of a population draw the same, unless they
have seeds of their own by `seed: float = 0.0`. On a CPU the draw takes most of the step.
`normal(shape)` draws such numbers for `whole`, other ones at each call of a step. `init`
draws the same for all parameters: where these have to differ, draw in `whole` at `t == 1`.

**`measure`** gets the gradient with `maximize`, clipping and the decay of `decay="l2"` in
it. It goes with neither `sums`, `whole` nor `cautious=True`. With `accumulation="states"`
each part of a gradient is measured by itself. It costs one more pass of the kernels, and
one message a step if parameters are sharded. So does `divisor` beside it, and `after` with
means.

**`Number`** fields begin at 0, unless `init` returns a 0-d tensor. The new value is
computed of at least one mean or maximum: one of the loss alone takes `mean(loss)`, and any
other 0-d extra goes into it as `mean(extra)`. The last value does not stand inside of a
`mean`. Complex parameters are refused. Steps that a `GradScaler` skips leave it, and a part
of a gradient that is accumulated in the state does not count.

**`divisor`**, if it takes `decay`, goes with every kind of decay, but not with
`cautious=True`. With `move` it does.

**`whole`** is called at every step and not traced. t and hyperparameters are floats, or 0-d
float64 tensors under `vmap`, derivatives and `torch.compile`, where `torch.where` takes the
place of `if`. d and x are float32 or wider, and it writes to neither. Fields of `State`
that are not `Shaped` are None in s. It may take them by name, decoded from their storage,
and returns None for them. It is tried on the shape of each parameter when an optimizer or
its state is made, on meta tensors: where it raises, the parameter is refused. Sharded
matrices are brought together for it by their owners. A field of the shape `()` is in every
process. It does not go with `divisor`.

**`after`**: what it returns replaces the whole move, and so the decay. Where u is not in
it, `weight_decay` raises unless a method reads it or the class line has `decay="l2"`, and
`cautious`, `cautious_decay`, `corrected_decay` and `decouple_lr` raise. With `decay="own"`,
or where a method reads `self.weight_decay`, the last three raise. Its means do not go with
`sums`. Division by `self.lr` in `direction` is NaN at the first step of a warmup from 0.

**`coeffs`** is for scalars that a trace cannot compute: a table, a loop, an `if` over t. It
is called before every step and returns a NamedTuple or a dict of scalars.

**`sums`** returns a tensor, a tuple or a dict; `join` gets the sums in the same form. A
parameter without a gradient is summed with g = 0 and extras of 0. A class leaves out frozen
ones. `after` and `sums` get the Running from before the step. The class shows its first
scalar in the param group. `cautious=True` is refused.

**`eval_point`**: t is the step to come, so `1 - beta ** (t - 1)` corrects a mean of the
steps taken.

The class's `torch_state_dict` raises, because torch.optim has no such class.
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
