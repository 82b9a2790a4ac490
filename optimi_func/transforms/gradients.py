"""`chain` and its gradient transforms: clipping, noise, centralization."""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number, shown, value_of
from optimi_func.core.distributed import distribute_like
from optimi_func.core.leaf import held_dtype
from optimi_func.core.math import norm, scalar_dtype, total_norm
from optimi_func.core.pairs import as_complex, as_real
from optimi_func.core.philox import normals
from optimi_func.core.rule import PureOptimizer, PyTree, Scalar, check_pure
from optimi_func.core.torch_private import clip_factor
from optimi_func.core.tree import check_pair, flatten_params, tensor_of
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.transforms._trees import (
    Around,
    Trees,
    count_from,
    dotted_paths,
    extras_of,
    like,
)

Grads: TypeAlias = list[Tensor | None]
Rewritten: TypeAlias = tuple[Grads, PyTree]


@dataclass(frozen=True, eq=False)
class GradientTransform:
    """A part of `chain` that rewrites the gradients before the optimizer gets them.

    The function `rewrite` receives the flat list of gradients, its own state, and the
    0-based step as a 0-d float64 tensor. `rewrite` must not write to its arguments
    (use `g * 0`, not `g.mul_(0)`), because they may be the caller's own tensors. `rewrite`
    may have further arguments, whose names decide what they receive:

        params: the flat parameters, as wide as the gradients
        paths: the keys of each parameter, joined by dots, as "body.0.weight"
        those of `numbers`: their values at this step
        any other: an extra of the caller's, as step(..., state, loss=loss)

    Attributes:
        init: A function `params -> state`. The state is a pytree of tensors, or `()` if
            there is nothing to store.
        rewrite: A function `(grads, state, step, ...) -> (grads, state)`. Each gradient is
            None, or a tensor in float32 or a wider dtype.
        numbers: A dict of hyperparameters by name: floats, 0-d tensors and schedules, at
            least 0. Hyperparameters named limit or max_norm may be inf.
        takes: The further arguments of rewrite, as a dict from their names to bools. True
            means that the argument has no default.
    """

    init: Callable[[PyTree], PyTree]
    rewrite: Callable[..., Rewritten]
    numbers: Mapping[str, Number] = field(default_factory=dict)
    takes: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        """Read the names of the further arguments, and check those of the numbers."""
        args = [*inspect.signature(self.rewrite).parameters.values()][3:]
        args = [x for x in args if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
        takes = {x.name: x.default is x.empty for x in args}
        object.__setattr__(self, "takes", takes)
        for name in self.numbers:
            if name in ("grads", "state", "step", "params", "paths"):
                text = f"numbers has {name!r}, which chain gives to rewrite"
                raise TypeError(f"{text}: allowed are other names")
            if name not in takes:
                raise TypeError(f"numbers has {name!r}, but rewrite takes {[*takes]}")

    def run(
        self,
        place: int,
        grads: Grads,
        state: PyTree,
        step: Tensor,
        known: dict[str, PyTree],
    ) -> Rewritten:
        """Return the result of `rewrite`, checked; `place` is that in the chain."""
        part = (
            f"chain's part {place}, {getattr(self.rewrite, '__qualname__', self.rewrite)},"
        )
        numbers = {k: _number_at(k, x, step) for k, x in self.numbers.items()}
        known = {**known, **numbers}
        now = {name: known[name] for name in self.takes if name in known}
        for name, required in self.takes.items():
            if required and name not in now:
                raise TypeError(
                    f"{part} takes {name!r}: pass it to the step of chain, as "
                    f"step(params, grads, state, {name}=...)"
                )
        t = step.to(scalar_dtype(step.device), copy=True)
        result = self.rewrite([*grads], state, t, **now)
        check_pair(part, "grads", result, state)
        new, params = result[0], known["params"]
        if not isinstance(new, list | tuple) or len(new) != len(params):
            raise ValueError(
                f"{part} returned {shown(new)} in the place of {len(params)} gradients: "
                "allowed is a list of as many"
            )
        for i, (p, x) in enumerate(zip(params, new)):
            if x is not None and not (isinstance(x, Tensor) and x.shape == p.shape):
                text = f"{part} returned {shown(x)} for leaf {i}, whose parameter is"
                raise ValueError(f"{text} {shown(p)}: allowed are its shape and None")
        # A 0-d gradient or state divided by a number of t would be float64.
        new = [x if g is None or x is None else x.to(g.dtype) for g, x in zip(grads, new)]

        def cast(x: object, old: Tensor) -> object:
            return x.to(old.dtype) if isinstance(x, Tensor) else x

        return new, pytree.tree_map(cast, result[1], state)


def _number_at(name: str, number: Number, step: Tensor) -> Scalar:
    most = math.inf if name in ("limit", "max_norm") else sys.float_info.max
    now = resolve(name, number, step.clone(), most=most)
    if isinstance(number, Tensor) and value_of(number) != most:
        check_number(name, name, number)
    return now


class ChainState(NamedTuple):
    """The state of `chain`."""

    step: Tensor  # 0-d float32: steps taken so far
    transforms: tuple[PyTree, ...]  # a state for each transform; () if it has none
    inner: PyTree


@dataclass(frozen=True, eq=False)
class Chain(Around[ChainState], state=ChainState, name="chain"):
    """Transforms of the gradients of an optimizer: see `chain`."""

    transforms: tuple[GradientTransform, ...]

    def _around(self, params: PyTree, inner: PyTree) -> ChainState:
        states = tuple(transform.init(params) for transform in self.transforms)
        return ChainState(count_from(params), states, inner)

    def step(
        self, params: PyTree, grads: PyTree, state: ChainState, **extras: PyTree
    ) -> tuple[PyTree, ChainState]:
        """Return the result of one update. Extras go to the parts that accept them."""
        state = self.checked(state)
        if len(state.transforms) != len(self.transforms):
            raise ValueError(
                f"state holds {len(state.transforms)} gradient transforms, chain has "
                f"{len(self.transforms)}: make it with this optimizer's init"
            )
        trees = Trees.check(params, grads)
        now, states = trees.wide_grads(), list(state.transforms)
        names = {name for transform in self.transforms for name in transform.takes}
        known = {**extras, "params": trees.params}
        if "params" in names:
            known["params"] = [p.to(held_dtype(p.dtype)) for p in trees.params]
        if "paths" in names:
            known["paths"] = dotted_paths(params)
        names -= extras_of(self.optimizer) or set()
        inner_extras = {name: x for name, x in extras.items() if name not in names}
        step = state.step.detach()
        for i, transform in enumerate(self.transforms):
            now, states[i] = transform.run(i, now, states[i], step, known)
        rewritten = pytree.tree_unflatten(now, trees.spec)
        params, inner = self._step(params, rewritten, state.inner, **inner_extras)
        return params, ChainState(state.step + 1.0, tuple(states), inner)


def chain(*parts: GradientTransform | PureOptimizer) -> Chain:
    """Apply transforms to the gradients before an optimizer gets them.

        g <- t_n(...t_2(t_1(g)))

    Here t_1 to t_n are the transforms, in the order in which they are passed. They receive
    the gradients in float32, or in float64 if the parameters are float64. To change the
    update that an optimizer computes from the gradients, pass `hooks=[...]` to the
    optimizer.

    Args:
        *parts: One or more transforms such as `clip_global_norm(1.0)`, and an optimizer as
            the last part.

    Raises:
        TypeError: The parts are not at least one transform and then one optimizer.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_global_norm(1.0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> p, state = opt.step(p, torch.tensor([3.0, 4.0]), opt.init(p))
    >>> p
    tensor([-0.6000, -0.8000])
    """
    at = [i for i, x in enumerate(parts) if not isinstance(x, GradientTransform)]
    if len(at) != 1 or len(parts) < 2:
        raise TypeError(
            f"chain got {len(parts)} parts, of which {len(at)} are no gradient transforms"
            f" ({', '.join([repr(parts[i]) for i in at])}): allowed are one optimizer, and "
            "before it one gradient transform or more, such as clip_global_norm(1.0)"
        )
    optimizer = check_pure("chain", parts[at[0]], "")
    if (after := len(parts) - 1 - at[0]) > 0:
        raise TypeError(
            f"chain got {after} of its gradient transforms after {optimizer!r}: the "
            "optimizer has to be the last part. What changes the update goes to the "
            "optimizer's own argument hooks=[...]"
        )
    return Chain(optimizer, tuple(x for x in parts if isinstance(x, GradientTransform)))


# A chain can be pickled, because these are functions of the module and partials of them.


def _no_state(_: PyTree) -> tuple[()]:
    return ()


def clip_value(limit: Number) -> GradientTransform:
    """Clip each element of each gradient to [-limit, limit].

    Args:
        limit: The largest absolute value, above 0: a float, a 0-d tensor or a schedule.

    Raises:
        ValueError: limit is not above 0.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_value(1.0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> opt.step(p, torch.tensor([0.5, -3.0]), opt.init(p))[0]
    tensor([-0.5000,  1.0000])
    """
    check_number("clipping limit", "limit", limit, above=0.0)
    numbers = {"limit": limit}
    return GradientTransform(_no_state, _clip_value, numbers)


def _clip_value(grads: Grads, state: PyTree, _: Tensor, limit: Scalar) -> Rewritten:

    def clip(g: Tensor) -> Tensor:
        if g.is_complex():
            text = "clip_value of a complex gradient: allowed are clip_param_norm and "
            raise TypeError(f"{text}clip_global_norm, of moduli")
        high = tensor_of(limit, g.dtype, g.device)
        return g.clamp(-high, high)

    return [None if g is None else clip(g) for g in grads], state


def clip_param_norm(max_norm: Number) -> GradientTransform:
    """Scale each gradient separately, so that its Euclidean norm is at most max_norm.

        g <- g * min(1, max_norm / (|g| + 1e-6))

    Args:
        max_norm: The largest norm, above 0: a float, a 0-d tensor or a schedule.

    Raises:
        ValueError: max_norm is not above 0.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_param_norm(1.0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> opt.step(p, torch.tensor([3.0, 4.0]), opt.init(p))[0]
    tensor([-0.6000, -0.8000])
    """
    check_number("clipping norm", "max_norm", max_norm, above=0.0)
    numbers = {"max_norm": max_norm}
    return GradientTransform(_no_state, _clip_param_norm, numbers)


def _clip_param_norm(grads: Grads, state: PyTree, _: Tensor, max_norm: Scalar) -> Rewritten:
    return [
        None if g is None else clip_factor(like(max_norm, n := norm(g)), n) * g
        for g in grads
    ], state


def clip_global_norm(max_norm: Number) -> GradientTransform:
    """Scale all gradients by one factor, so that their joint norm is at most max_norm.

        g_i <- g_i * min(1, max_norm / (sqrt(sum_i |g_i|^2) + 1e-6))

    torch.nn.utils.clip_grad_norm_ uses the same formula. Leaves without a gradient do not
    contribute to the norm.

    Args:
        max_norm: The largest norm, above 0: a float, a 0-d tensor or a schedule.

    Raises:
        ValueError: max_norm is not above 0.

    References:
        Pascanu, Mikolov & Bengio, "On the difficulty of training Recurrent Neural
        Networks", arXiv:1211.5063.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_global_norm(1.0), sgd(lr=1.0))
    >>> p = [torch.zeros(1), torch.zeros(1)]
    >>> opt.step(p, [torch.tensor([3.0]), torch.tensor([4.0])], opt.init(p))[0]
    [tensor([-0.6000]), tensor([-0.8000])]
    """
    check_number("clipping norm", "max_norm", max_norm, above=0.0)
    return GradientTransform(_no_state, _clip_global_norm, {"max_norm": max_norm})


def _clip_global_norm(
    grads: Grads, state: PyTree, _: Tensor, max_norm: Scalar
) -> Rewritten:
    norms = [norm(g) for g in grads if g is not None]
    if not norms:
        return grads, state
    total = total_norm(norms)
    factor = clip_factor(like(max_norm, total), total)
    return [None if g is None else like(factor, g) * g for g in grads], state


def centralize() -> GradientTransform:
    """Subtract the mean over each output unit from the gradients of weights.

        g[i] <- g[i] - mean(g[i])    for gradients of two dimensions or more

    Here i is the index of an output unit, which is the index of the first dimension in
    torch's layers. Gradients with fewer than two dimensions do not change.

    References:
        Yong, Huang, Hua & Zhang, "Gradient Centralization: A New Optimization Technique
        for Deep Neural Networks", arXiv:2004.01461.

    >>> from optimi_func import sgd
    >>> opt = chain(centralize(), sgd(lr=1.0))
    >>> p = torch.zeros(1, 2)
    >>> opt.step(p, torch.tensor([[1.0, 3.0]]), opt.init(p))[0]
    tensor([[ 1., -1.]])
    """
    return GradientTransform(_no_state, _centralize)


def _centralize(grads: Grads, state: PyTree, _: Tensor) -> Rewritten:
    return [
        g if g is None or g.dim() < 2 else g - g.mean([*range(1, g.dim())], keepdim=True)
        for g in grads
    ], state


class NoiseState(NamedTuple):
    """The state of `add_noise`: the seed and the step for the next random numbers."""

    seed: Tensor  # 0-d int64
    step: Tensor  # 0-d int64: steps taken so far


def add_noise(std: Number, *, seed: int | Tensor) -> GradientTransform:
    """Add normally distributed noise to every gradient, drawn from a seed in the state.

        g <- g + std * z,   z ~ N(0, 1)

    z depends only on the seed, the step, the leaf and the element. No torch generator is
    read or advanced, so you can repeat, resume and compile a step, and vmap needs no
    `randomness` argument. The members of a population draw the same numbers unless they
    have different seeds.

    Args:
        std: Standard deviation of the noise, at least 0: a float, a 0-d tensor or a
            schedule. The paper uses `lambda t: (eta / (1 + t) ** 0.55) ** 0.5` with eta
            between 0.01 and 1.
        seed: A whole number from 0 to 2^63 - 1, or a 0-d integer tensor. Under vmap, each
            member can have a different seed.

    Raises:
        ValueError: std or seed is negative.
        TypeError: seed is not a whole number.

    References:
        Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep
        Networks", arXiv:1511.06807; the generator, Philox: Salmon et al., "Parallel
        random numbers: as easy as 1, 2, 3", SC 2011.

    >>> from optimi_func import sgd
    >>> opt = chain(add_noise(0.1, seed=0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> first, _ = opt.step(p, torch.zeros(2), opt.init(p))
    >>> again, _ = opt.step(p, torch.zeros(2), opt.init(p))
    >>> torch.equal(first, again)
    True
    """
    check_number("noise", "std", std)
    _check_seed(seed)
    return GradientTransform(partial(_init_noise, seed), _add_noise, {"std": std})


def _init_noise(seed: int | Tensor, params: PyTree) -> NoiseState:
    tensors, _ = flatten_params(params)
    start = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    return NoiseState(start + seed, start)


def _add_noise(grads: Grads, state: NoiseState, _: Tensor, std: Scalar) -> Rewritten:
    noisy = [
        None
        if g is None or z is None
        else g + like(std, g) * distribute_like(g, as_complex(z, g))
        for g, z in zip(grads, normals(*state, list(map(as_real, grads))))
    ]
    return noisy, NoiseState(state.seed.clone(), state.step + 1)


def _check_seed(seed: object) -> None:
    if isinstance(seed, Tensor):
        if seed.dim() != 0 or seed.is_floating_point():
            raise TypeError(
                f"seed is a tensor of shape {tuple(seed.shape)} and {seed.dtype}: allowed "
                "are 0-d integer tensors"
            )
    elif type(seed) is not int:
        raise TypeError(f"seed={seed!r}: allowed are whole numbers and 0-d tensors of them")
    elif not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: allowed are whole numbers from 0 to 2^63 - 1")
