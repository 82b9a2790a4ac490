"""Transforms that look around: `sam`, `backtracking` and `lookahead`, as the classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_flag, check_number, check_whole, shown
from optimi_func.core.codes import is_low
from optimi_func.core.distributed import whole
from optimi_func.core.leaf import held_dtype
from optimi_func.core.math import norm, scalar_dtype, total_norm
from optimi_func.core.rule import PyTree, Rule, Scalar, check_pure
from optimi_func.core.torch_private import is_unwatched, level_of, transform_level
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import flatten_params, match_tree
from optimi_func.transforms._trees import Around, S, Trees, count_from, like
from optimi_func.transforms.gradients import Grads

ValueAndGrad: TypeAlias = Callable[[PyTree], tuple[Tensor, PyTree]]

_BOUNDS: dict[str, dict[str, float]] = {
    "rho": {},
    "alpha": {"above": 0.0, "most": 1.0},
    "decrease": {"below": 1.0},
    "shrink": {"above": 0.0, "below": 1.0},
}


def check_options(given: Mapping[str, object]) -> None:
    """Raise for options of these transforms and classes out of their ranges."""
    for name, x in given.items():
        if name == "adaptive":
            check_flag(name, x)
        elif name not in _BOUNDS:
            check_whole(name, x, 1)
        elif callable(x):
            raise TypeError(f"{name}={x!r}: allowed are numbers and 0-d tensors")
        else:
            check_number("number", name, x, **_BOUNDS[name])


def check_wrapped(owner: str, rules: list[Rule], maximizes: bool) -> None:
    """Raise for an optimizer of these rules that `owner` cannot wrap."""
    if owner.lower() != "sam" and any([rule.eval_point for rule in rules]):
        raise ValueError(
            f"{owner} writes parameters, and the point that {rules[0].name} evaluates at "
            "would not follow: allowed are optimizers without train() and eval()"
        )
    if owner.lower() != "lookahead" and maximizes:
        raise ValueError(f"{owner} with maximize=True: let the loss be its negative")


def ascent(ps: list[Tensor], gs: Grads, rho: Scalar, adaptive: bool) -> list[Any]:
    """Return SAM's moves rho * T^2 g / |T g|, T being |p| + 0.01 if adaptive, else 1."""
    sizes = [p.abs() + 0.01 if adaptive else 1.0 for p in ps]
    scaled = [None if g is None else t * g for g, t in zip(gs, sizes)]
    size = total_norm([whole(norm(x)) for x in scaled if x is not None])
    factor = rho / size.clamp_min(1e-12)
    return [None if x is None else like(factor, x) * t * x for x, t in zip(scaled, sizes)]


def slope_of(grads: Grads, moves: list[Tensor]) -> Tensor:
    """Return the derivative of the loss along moves, or 0 if it rises."""
    total = torch.zeros((), dtype=(wide := scalar_dtype(moves[0].device)))
    for g, u in zip(grads, moves):
        if g is not None:
            total = total.to(u.device) + (g.conj() * u).real.sum(dtype=wide)
    return total.clamp_max(0.0)


def _values_in(one: object) -> list[FunctionalOptimizer]:
    """Return the optimizers of factories that a transform is made of."""
    if isinstance(one, FunctionalOptimizer):
        return [one]
    parts = [getattr(one, "optimizer", None), *getattr(one, "optimizers", ())]
    return [x for part in parts if part is not None for x in _values_in(part)]


@dataclass(frozen=True, eq=False)
class Wrapping(Around[S], state=tuple, name=""):
    """Base class of these transforms."""

    takes_loss: ClassVar[bool] = True  # step(params, state, value_and_grad); unroll asks

    def __init_subclass__(cls, state: type[S], name: str) -> None:
        super().__init_subclass__(state, name)

    def __post_init__(self) -> None:
        """Check the options and the optimizer."""
        check_options({k: x for k, x in vars(self).items() if k != "optimizer"})
        values = _values_in(check_pure(self.name, self.optimizer, ""))
        maximizes = any([x.maximize for x in values])
        check_wrapped(self.name, [x.rule for x in values], maximizes)
        super().__post_init__()

    def _start(self, params: PyTree) -> tuple[list[Tensor], pytree.TreeSpec, Tensor]:
        """Return flat parameters and a float64 0; raise for parameters in low precision."""
        tensors, spec = flatten_params(params)
        for dtype in [p.dtype for p in tensors if is_low(p.dtype) and self.name != "sam"]:
            raise TypeError(
                f"{self.name} writes parameters, and a compensation of {dtype} would not "
                "follow: allowed are wider ones, and the class"
            )
        device = tensors[0].device
        return tensors, spec, torch.zeros((), dtype=scalar_dtype(device), device=device)

    def _evaluated(
        self, params: PyTree, state: PyTree, evaluate: ValueAndGrad
    ) -> tuple[PyTree, Tensor, Trees]:
        """Return the checked state, the loss and the gradients at params."""
        if not callable(evaluate):
            raise TypeError(
                f"{self.name}.step(params, state, value_and_grad): value_and_grad is "
                f"{shown(evaluate)}: allowed is a function, params -> (loss, gradients). "
                f"What gives gradients goes inside, as in {self.name}(every_k(...))"
            )
        state = self.checked(state)
        f, grads = evaluate(params)
        return state, f.to(state.f.dtype), Trees.check(params, grads)


class SamState(NamedTuple):
    """The state of `sam`."""

    f: Tensor  # 0-d float64: the loss that the last step began with
    inner: PyTree


@dataclass(frozen=True, eq=False)
class sam(Wrapping[SamState], state=SamState, name="sam"):
    """Step along the gradient at the worst point nearby: `SAM` as a value.

    `step(params, state, value_and_grad)`, as that of `lbfgs`, evaluates `params -> (loss,
    gradients)` twice.

    >>> from optimi_func import sgd
    >>> opt = sam(sgd(lr=0.25), rho=1.0)
    >>> p = torch.tensor([3.0, 4.0])
    >>> opt.step(p, opt.init(p), lambda p: ((p * p).sum() / 2, p))[0]  # p - (p + p / 5) / 4
    tensor([2.1000, 2.8000])
    """

    rho: Scalar = 0.05
    adaptive: bool = False

    def _around(self, params: PyTree, inner: PyTree) -> SamState:
        return SamState(self._start(params)[2], inner)

    def step(
        self,
        params: PyTree,
        state: SamState,
        value_and_grad: ValueAndGrad,
        **extras: PyTree,
    ) -> tuple[PyTree, SamState]:
        """Return the result of one update."""
        state, f, trees = self._evaluated(params, state, value_and_grad)
        ups = ascent(trees.params, trees.wide_grads(), self.rho, self.adaptive)
        near = [p if u is None else (p + u).to(p.dtype) for p, u in zip(trees.params, ups)]
        _, grads = value_and_grad(pytree.tree_unflatten(near, trees.spec))
        params, inner = self._step(params, grads, state.inner, **extras)
        return params, SamState(f, inner)


class BacktrackingState(NamedTuple):
    """The state of `backtracking`."""

    f: Tensor  # 0-d float64: the loss that the last step began with
    t: Tensor  # 0-d float64: the share of the optimizer's move that it took
    inner: PyTree


@dataclass(frozen=True, eq=False)
class backtracking(
    Wrapping[BacktrackingState], state=BacktrackingState, name="backtracking"
):
    """Shorten each move until the loss falls enough: `Backtracking` as a value.

    `step(params, state, value_and_grad)`, as that of `lbfgs`, evaluates `params -> (loss,
    gradients)` max_ls + 1 times in graphs and under torch.func, and else until it ends.

    >>> from optimi_func import sgd
    >>> opt = backtracking(sgd(lr=4.0))
    >>> p = torch.tensor([3.0, 4.0])
    >>> p, state = opt.step(p, opt.init(p), lambda p: ((p * p).sum() / 2, p))
    >>> p, state.t
    (tensor([0., 0.]), tensor(0.2500, dtype=torch.float64))
    """

    decrease: Scalar = 1e-4
    shrink: Scalar = 0.5
    max_ls: int = 20

    def _around(self, params: PyTree, inner: PyTree) -> BacktrackingState:
        zero = self._start(params)[2]
        return BacktrackingState(zero, zero.clone(), inner)

    def step(
        self,
        params: PyTree,
        state: BacktrackingState,
        value_and_grad: ValueAndGrad,
        **extras: PyTree,
    ) -> tuple[PyTree, BacktrackingState]:
        """Return the result of one update."""
        state, f, trees = self._evaluated(params, state, value_and_grad)
        grads = pytree.tree_unflatten(trees.grads, trees.spec)
        moved, inner = self._step(params, grads, state.inner, **extras)
        new = match_tree("params", moved, trees.spec, params)
        moves = [q - p for p, q in zip(trees.params, new)]
        slope, best = slope_of(trees.grads, moves).to(f.device), trees.params
        t, share, ended = torch.zeros_like(f), torch.ones_like(f), torch.zeros_like(f) > 0
        for i in range(self.max_ls):
            if i:
                new = [p + like(share, u) * u for p, u in zip(trees.params, moves)]
            value, _ = value_and_grad(pytree.tree_unflatten(new, trees.spec))
            good = ~ended & (value.to(f.dtype) <= f + self.decrease * share * slope)
            best = [torch.where(good.to(x.device), x, y) for x, y in zip(new, best)]
            t, ended = torch.where(good, share, t), ended | good
            if is_unwatched() and transform_level() == 0 > level_of(ended) and ended:
                break
            share = share * self.shrink
        return pytree.tree_unflatten(best, trees.spec), BacktrackingState(f, t, inner)


class LookaheadState(NamedTuple):
    """The state of `lookahead`."""

    calls: Tensor  # 0-d float32: steps since the slow parameters moved
    slow: PyTree  # at least float32
    inner: PyTree


@dataclass(frozen=True, eq=False)
class lookahead(Wrapping[LookaheadState], state=LookaheadState, name="lookahead"):
    """Go back a part of the way after every k steps: `Lookahead` as a value.

    >>> from optimi_func import sgd
    >>> opt = lookahead(sgd(lr=1.0), k=1, alpha=0.25)
    >>> p = torch.tensor(0.0)
    >>> opt.step(p, torch.tensor(-1.0), opt.init(p))[0]
    tensor(0.2500)
    """

    takes_loss: ClassVar[bool] = False

    k: int = 5
    alpha: Scalar = 0.5

    def _around(self, params: PyTree, inner: PyTree) -> LookaheadState:
        tensors, spec, _ = self._start(params)
        slow = [p.to(held_dtype(p.dtype), copy=True) for p in tensors]
        return LookaheadState(count_from(params), pytree.tree_unflatten(slow, spec), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: LookaheadState, **extras: PyTree
    ) -> tuple[PyTree, LookaheadState]:
        """Return the result of one update."""
        state = self.checked(state)
        moved, inner = self._step(params, grads, state.inner, **extras)
        new, spec = flatten_params(moved)
        slow = match_tree("state.slow", state.slow, spec, params)
        due = state.calls + 1.0 >= self.k
        for i, (p, x) in enumerate(zip(new, slow)):
            at = due.to(p.device)
            slow[i] = torch.where(at, x + like(self.alpha, x) * (p - x), x)
            new[i] = torch.where(at, slow[i], p)
        calls = torch.where(due, 0.0, state.calls + 1.0)
        trees = [pytree.tree_unflatten(xs, spec) for xs in (new, slow)]
        return trees[0], LookaheadState(calls, trees[1], inner)
