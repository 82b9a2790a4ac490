"""`chain` and its gradient transforms: clipping, noise, centralization."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number
from optimi_func.core.distributed import distribute_like
from optimi_func.core.math import norm, total_norm
from optimi_func.core.rule import PureOptimizer, PyTree, Scalar, check_pure
from optimi_func.core.torch_private import clip_factor
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.pure.tree import flatten_params, tensor_of
from optimi_func.transforms._trees import Around, Trees, count_from, like
from optimi_func.transforms.philox import normals

Grads: TypeAlias = list[Tensor | None]
Rewritten: TypeAlias = tuple[Grads, Any]


@dataclass(frozen=True, eq=False)
class GradientTransform:
    """A rewrite of gradients before an optimizer, for `chain`.

    Attributes:
        init: `params -> state`, a pytree of tensors; `()` if there is nothing to keep.
        rewrite: `(grads, state, step) -> (grads, state)`: the flat gradients, each at
            least float32 or None, and the 0-based step, a 0-d tensor.
    """

    init: Callable[[PyTree], Any]
    rewrite: Callable[[Grads, Any, Tensor], Rewritten]


class ChainState(NamedTuple):
    """The state of `chain`."""

    step: Tensor  # 0-d float32: steps taken so far
    transforms: tuple[Any, ...]  # a state for each gradient transform; () if it has none
    inner: Any


@dataclass(frozen=True, eq=False)
class Chain(Around[ChainState], state=ChainState, name="chain"):
    """Gradient transforms before an optimizer: see `chain`."""

    transforms: tuple[GradientTransform, ...]

    def _around(self, params: PyTree, inner: Any) -> ChainState:
        states = tuple(transform.init(params) for transform in self.transforms)
        return ChainState(count_from(params), states, inner)

    def step(
        self, params: PyTree, grads: PyTree, state: ChainState
    ) -> tuple[PyTree, ChainState]:
        """Return the result of one update along the rewritten gradients."""
        state = self.checked(state)
        if len(state.transforms) != len(self.transforms):
            raise ValueError(
                f"state holds {len(state.transforms)} gradient transforms, chain has "
                f"{len(self.transforms)}: make it with this optimizer's init"
            )
        trees = Trees.check(params, grads)
        now, states = trees.wide_grads(), list(state.transforms)
        for i, transform in enumerate(self.transforms):
            now, states[i] = transform.rewrite(now, states[i], state.step.detach().clone())
        rewritten = pytree.tree_unflatten(now, trees.spec)
        params, inner = self.optimizer.step(params, rewritten, state.inner)
        return params, ChainState(state.step + 1.0, tuple(states), inner)


def chain(*parts: GradientTransform | PureOptimizer) -> Chain:
    """Let gradients go through transforms, from left to right, into an optimizer.

        g <- t_n(...t_2(t_1(g))),   (params, state) <- step(params, g, state)

    There gradients are float32, or float64 for float64 parameters.

    Args:
        *parts: One or more gradient transforms (`clip_global_norm(1.0)` and the like), and
            last the optimizer.

    Raises:
        TypeError: The last part is no optimizer, or another is no gradient transform.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_global_norm(1.0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> p, state = opt.step(p, torch.tensor([3.0, 4.0]), opt.init(p))
    >>> p
    tensor([-0.6000, -0.8000])
    """
    *transforms, optimizer = parts or (None,)
    if isinstance(optimizer, GradientTransform) or not transforms:
        raise TypeError(
            f"chain got {len(parts)} parts, of which the last is {optimizer!r}: allowed "
            "are one gradient transform or more, and last an optimizer"
        )
    before: list[GradientTransform] = []
    for i, transform in enumerate(transforms):
        if not isinstance(transform, GradientTransform):
            raise TypeError(
                f"chain's part {i} is {transform!r}: allowed before the last are gradient "
                "transforms, such as clip_global_norm(1.0)"
            )
        before.append(transform)
    return Chain(check_pure("chain", optimizer, ""), tuple(before))


# A chain can be pickled, because these are functions of the module and partials of them.


def _stateless(rewrite: Callable[[Grads, Tensor], Grads]) -> GradientTransform:
    return GradientTransform(_no_state, partial(_keep_state, rewrite))


def _no_state(params: PyTree) -> tuple[()]:
    del params
    return ()


def _keep_state(
    rewrite: Callable[[Grads, Tensor], Grads], grads: Grads, state: Any, step: Tensor
) -> Rewritten:
    return rewrite(grads, step), state


def _by(
    name: str, number: Number, change: Callable[..., Tensor], grads: Grads, step: Tensor
) -> Grads:
    """Change each gradient by a limit of that name."""
    now = resolve(name, number, step, most=math.inf)
    return [None if g is None else change(g, now) for g in grads]


def clip_value(limit: Number) -> GradientTransform:
    """Clip each element of each gradient to [-limit, limit].

    Args:
        limit: Above 0; a float, a 0-d tensor or a schedule.

    Raises:
        ValueError: limit is not above 0.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_value(1.0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> opt.step(p, torch.tensor([0.5, -3.0]), opt.init(p))[0]
    tensor([-0.5000,  1.0000])
    """
    check_number("clipping limit", "limit", limit, above=0.0)
    return _stateless(partial(_by, "limit", limit, _clip_value))


def _clip_value(g: Tensor, limit: Scalar) -> Tensor:
    high = tensor_of(limit, g.dtype, g.device)
    return g.clamp(-high, high)


def clip_param_norm(max_norm: Number) -> GradientTransform:
    """Scale each gradient down to a Euclidean norm of max_norm, independently of others.

        g <- g * min(1, max_norm / (|g| + 1e-6))

    Args:
        max_norm: Above 0; a float, a 0-d tensor or a schedule.

    Raises:
        ValueError: max_norm is not above 0.

    >>> from optimi_func import sgd
    >>> opt = chain(clip_param_norm(1.0), sgd(lr=1.0))
    >>> p = torch.zeros(2)
    >>> opt.step(p, torch.tensor([3.0, 4.0]), opt.init(p))[0]
    tensor([-0.6000, -0.8000])
    """
    check_number("clipping norm", "max_norm", max_norm, above=0.0)
    return _stateless(partial(_by, "max_norm", max_norm, _clip_param_norm))


def _clip_param_norm(g: Tensor, max_norm: Scalar) -> Tensor:
    return clip_factor(like(max_norm, g), norm(g)) * g


def clip_global_norm(max_norm: Number) -> GradientTransform:
    """Scale all gradients by one factor, down to a joint Euclidean norm of max_norm.

        g_i <- g_i * min(1, max_norm / (sqrt(sum_i |g_i|^2) + 1e-6))

    as in torch.nn.utils.clip_grad_norm_. A leaf without a gradient does not count.

    Args:
        max_norm: Above 0; a float, a 0-d tensor or a schedule.

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
    return _stateless(partial(_clip_global_norm, max_norm))


def _clip_global_norm(max_norm: Number, grads: Grads, step: Tensor) -> Grads:
    norms = [norm(g) for g in grads if g is not None]
    if not norms:
        return grads
    total = total_norm(norms)
    limit = resolve("max_norm", max_norm, step, most=math.inf)
    factor = clip_factor(like(limit, total), total)
    return [None if g is None else like(factor, g) * g for g in grads]


def centralize() -> GradientTransform:
    """Subtract from each gradient of a weight its mean over every output unit.

        g[i] <- g[i] - mean(g[i])    for gradients of two dimensions or more

    where i runs over the first dimension, which is the output in torch's layers. Other
    gradients do not change.

    References:
        Yong, Huang, Hua & Zhang, "Gradient Centralization: A New Optimization Technique
        for Deep Neural Networks", arXiv:2004.01461.

    >>> from optimi_func import sgd
    >>> opt = chain(centralize(), sgd(lr=1.0))
    >>> p = torch.zeros(1, 2)
    >>> opt.step(p, torch.tensor([[1.0, 3.0]]), opt.init(p))[0]
    tensor([[ 1., -1.]])
    """
    return _stateless(_centralize)


def _centralize(grads: Grads, step: Tensor) -> Grads:
    del step
    return [
        g if g is None or g.dim() < 2 else g - g.mean([*range(1, g.dim())], keepdim=True)
        for g in grads
    ]


class NoiseState(NamedTuple):
    """The state of `add_noise`: the place of the next random numbers."""

    seed: Tensor  # 0-d int64
    step: Tensor  # 0-d int64: steps taken so far


def add_noise(std: Number, *, seed: int | Tensor) -> GradientTransform:
    """Add normal noise to every gradient, drawn from a seed in the state.

        g <- g + std * z,   z ~ N(0, 1)

    z is a function of (seed, step, leaf, element) alone. No generator is read or advanced,
    so that a step repeats, resumes, compiles, and needs no `randomness` under vmap. Members
    of a population draw the same numbers unless their seeds differ.

    Args:
        std: Above 0; a float, a 0-d tensor or a schedule. The paper's is
            `lambda t: (eta / (1 + t) ** 0.55) ** 0.5`, eta of 0.01 to 1.
        seed: From 0 to 2^63 - 1, or a 0-d integer tensor (vmapped: a seed a member).

    Raises:
        ValueError: std is not above 0, or seed is negative.
        TypeError: seed is no whole number.

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
    check_number("noise", "std", std, above=0.0)
    _check_seed(seed)
    return GradientTransform(partial(_init_noise, seed), partial(_add_noise, std))


def _init_noise(seed: int | Tensor, params: PyTree) -> NoiseState:
    tensors, _ = flatten_params(params)
    start = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    return NoiseState(start + seed, start)


def _add_noise(std: Number, grads: Grads, state: NoiseState, step: Tensor) -> Rewritten:
    scale = resolve("std", std, step)
    noisy = [
        None if g is None or z is None else g + like(scale, g) * distribute_like(g, z)
        for g, z in zip(grads, normals(*state, grads))
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
