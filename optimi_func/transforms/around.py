"""Transforms around an optimizer: `every_k`, `apply_if_finite` and `ema`."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number, check_whole
from optimi_func.core.leaf import held_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import PureOptimizer, PyTree, check_pure
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.pure.tree import flatten_params, match_tree
from optimi_func.transforms._trees import Around, Trees, count_from, like

Reduction: TypeAlias = Literal["mean", "sum"]


class EveryState(NamedTuple):
    """The state of `every_k`."""

    calls: Tensor  # 0-d float32: those since the last step
    sums: PyTree  # of their gradients, at least float32
    inner: PyTree


@dataclass(frozen=True, eq=False)
class Every(Around[EveryState], state=EveryState, name="every_k"):
    """An optimizer that steps every k-th time: see `every_k`."""

    k: int
    reduction: Reduction

    def _around(self, params: PyTree, inner: PyTree) -> EveryState:
        tensors, spec = flatten_params(params)
        zeros = [torch.zeros_like(p, dtype=held_dtype(p.dtype)) for p in tensors]
        return EveryState(count_from(params), pytree.tree_unflatten(zeros, spec), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: EveryState, **extras: PyTree
    ) -> tuple[PyTree, EveryState]:
        """Add a gradient; every k-th call is an update, with its extras."""
        state = self.checked(state)
        trees = Trees.check(params, grads)
        before = match_tree("state.sums", state.sums, trees.spec, params)
        due = state.calls + 1.0 >= self.k
        share = self.k if self.reduction == "mean" else 1
        sums, whole = list(before), list(trees.grads)
        for i, g in enumerate(trees.grads):
            if g is not None:
                total = before[i] + g.to(before[i].dtype)
                whole[i] = total / share
                sums[i] = torch.where(due.to(g.device), 0.0, total)
        gradient = pytree.tree_unflatten(whole, trees.spec)
        moved, inner = self._step(params, gradient, state.inner, **extras)
        return choose_tree(due, moved, params), EveryState(
            torch.where(due, 0.0, state.calls + 1.0),
            pytree.tree_unflatten(sums, trees.spec),
            choose_tree(due, inner, state.inner),
        )


def every_k(optimizer: PureOptimizer, k: int, *, reduction: Reduction = "mean") -> Every:
    """Step once every k calls, along the mean or the sum of their gradients.

        s <- s + g
        every k-th call: step along s / k ("mean") or s ("sum"), then s <- 0

    Exact: k micro-batches of one size, each with the mean of its losses, make the step of
    the whole batch. Sums are float32, or float64 for float64 parameters. Between steps the
    parameters stay, and so does the optimizer's state, its count of steps included.

    Every call computes a step and all but the k-th discard it, because a graph has no
    branches; a loop in eager mode saves that by adding up gradients itself. A leaf whose
    k-th gradient is None does not move in that step and keeps its sum for the next. If
    it is None in another call, the mean is over k nevertheless.

    Args:
        optimizer: The optimizer.
        k: Calls a step, at least 1.
        reduction: "mean" divides the sum by k; "sum" is for losses divided already.

    Raises:
        ValueError: k is not a whole number from 1, or reduction is neither.

    >>> from optimi_func import sgd
    >>> opt = every_k(sgd(lr=1.0), 2)
    >>> p = torch.tensor(0.0)
    >>> p, state = opt.step(p, torch.tensor(1.0), opt.init(p))
    >>> p, state.calls
    (tensor(0.), tensor(1.))
    >>> p, state = opt.step(p, torch.tensor(3.0), state)
    >>> p, state.calls
    (tensor(-2.), tensor(0.))
    """
    check_whole("k", k, 1)
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}: allowed are {get_args(Reduction)}")
    return Every(check_pure("every_k", optimizer, ""), k, reduction)


class FiniteState(NamedTuple):
    """The state of `apply_if_finite`."""

    consecutive: Tensor  # 0-d float32: steps in a row up to now with an inf or a NaN
    skipped: Tensor  # 0-d float32: steps not taken, in all
    inner: PyTree


@dataclass(frozen=True, eq=False)
class Guard(Around[FiniteState], state=FiniteState, name="apply_if_finite"):
    """An optimizer that skips bad gradients: see `apply_if_finite`."""

    max_consecutive: int | None

    def _around(self, params: PyTree, inner: PyTree) -> FiniteState:
        return FiniteState(count_from(params), count_from(params), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: FiniteState, **extras: PyTree
    ) -> tuple[PyTree, FiniteState]:
        """Return the result of one update, or of none if a gradient is not finite."""
        state = self.checked(state)
        trees = Trees.check(params, grads)
        device = state.skipped.device
        finite = torch.ones((), dtype=torch.bool, device=device)
        for g in trees.grads:
            if g is not None:
                finite = finite & g.detach().isfinite().all().to(device)
        consecutive = torch.where(finite, 0.0, state.consecutive + 1.0)
        taken = finite
        if self.max_consecutive is not None:
            taken = finite | (consecutive > self.max_consecutive)
        # A NaN in the branch that is not taken would make the derivative NaN too.
        safe = [
            None if g is None else torch.where(taken.to(g.device), g, 0.0)
            for g in trees.grads
        ]
        safe = pytree.tree_unflatten(safe, trees.spec)
        moved, inner = self._step(params, safe, state.inner, **extras)
        skipped = state.skipped + (~taken).to(state.skipped.dtype)
        return (
            choose_tree(taken, moved, params),
            FiniteState(consecutive, skipped, choose_tree(taken, inner, state.inner)),
        )


def apply_if_finite(
    optimizer: PureOptimizer, *, max_consecutive: int | None = None
) -> Guard:
    """Skip a step any of whose gradients holds an inf or a NaN.

    A skipped step changes no parameter, no moment and no count of steps, only the counts
    of skips, `state.consecutive` and `state.skipped`. The choice is made on the device,
    without synchronizing.

    A graph cannot raise, so a run may skip for ever unnoticed. Either read
    `state.consecutive` on the host now and then, or give `max_consecutive`: after that many
    skips bad gradients are let through and the loss shows it, as in optax.

    Reverse mode through a skipped step is NaN if the loss itself overflowed (0 * inf);
    forward mode is right, and so is a detached gradient.

    Args:
        optimizer: The optimizer.
        max_consecutive: The most steps in a row to skip; 0 skips none. None: no limit.

    Raises:
        ValueError: max_consecutive is negative or no whole number.

    >>> from optimi_func import sgd
    >>> opt = apply_if_finite(sgd(lr=1.0))
    >>> p = torch.ones(2)
    >>> p, state = opt.step(p, torch.tensor([1.0, float("nan")]), opt.init(p))
    >>> p, state.skipped, state.inner.step
    (tensor([1., 1.]), tensor(1.), tensor(0.))
    """
    check_whole("max_consecutive", max_consecutive, 0, none=True)
    return Guard(check_pure("apply_if_finite", optimizer, ""), max_consecutive)


class EmaState(NamedTuple):
    """The state of `ema`."""

    step: Tensor  # 0-d float32: steps taken so far
    weight: Tensor  # 0-d: share of the mean that is of parameters, not of zeros
    average: PyTree  # the averaged parameters, at least float32
    inner: PyTree


@dataclass(frozen=True, eq=False)
class Averaged(Around[EmaState], state=EmaState, name="ema"):
    """An optimizer that averages the parameters it makes: see `ema`."""

    decay: Number
    debias: bool

    def _around(self, params: PyTree, inner: PyTree) -> EmaState:
        tensors, spec = flatten_params(params)
        # Not detached, because the mean depends on p_0 if a_0 is p_0.
        wide = [p.to(held_dtype(p.dtype), copy=True) for p in tensors]
        step = count_from(params)
        # float32 has too few digits for a decay of 0.99999.
        weight = torch.full_like(
            step, 0.0 if self.debias else 1.0, dtype=scalar_dtype(step.device)
        )
        return EmaState(step, weight, pytree.tree_unflatten(wide, spec), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: EmaState, **extras: PyTree
    ) -> tuple[PyTree, EmaState]:
        """Return the parameters after one update, and the state with their mean."""
        state = self.checked(state)
        params, inner = self._step(params, grads, state.inner, **extras)
        decay = resolve("decay", self.decay, state.step.detach().clone())
        check_number("averaging decay", "decay", decay, below=1.0)
        decay = like(decay, state.weight)
        weight = decay * state.weight + (1.0 - decay)
        fresh = (1.0 - decay) / weight
        tensors, spec = flatten_params(params)
        averages = match_tree("state.average", state.average, spec, params)
        average = [a + like(fresh, a) * (p - a) for a, p in zip(averages, tensors)]
        return params, EmaState(
            state.step + 1.0, weight, pytree.tree_unflatten(average, spec), inner
        )

    def eval_params(self, params: PyTree, state: EmaState) -> PyTree:
        """Raise, because both the mean and the optimizer's parameters could be meant.

        Raises:
            ValueError: Always; its message says how to ask for either.
        """
        del params, state
        raise ValueError(
            "ema keeps a mean in addition to the parameters that its optimizer evaluates "
            "at. Take state.average, or the optimizer's eval_params(params, state.inner)"
        )


def ema(optimizer: PureOptimizer, decay: Number, *, debias: bool = True) -> Averaged:
    """Keep an exponential moving average of the parameters, `state.average`.

        a_t <- decay * a_(t-1) + (1 - decay) * p_t

    with a_0 = 0 and a_t / (1 - decay^t) in the state (debias), or with a_0 = p_0, the
    parameters given to `init`. A debiased mean begins with p_1 and forgets p_0; the other
    holds on to it for some 1 / (1 - decay) steps. Means are float32, or float64 for
    float64 parameters, because a bfloat16 mean would not move.

    Put it inside `every_k` and `apply_if_finite`, so that only true steps count.

    Args:
        optimizer: The optimizer.
        decay: In [0, 1): how much of the mean a step keeps; a float, a 0-d tensor or a
            schedule. 0.999 averages over some thousand steps.
        debias: Divide by the sum of the weights instead of beginning with p_0.

    Raises:
        ValueError: decay is out of its range.

    References:
        Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging", SIAM
        J. Control Optim. 1992; Morales-Brotons et al., "Exponential Moving Average of
        Weights in Deep Learning", arXiv:2411.18704; the correction: Kingma & Ba,
        arXiv:1412.6980.

    >>> from optimi_func import sgd
    >>> opt = ema(sgd(lr=1.0), 0.5)
    >>> p = torch.tensor(0.0)
    >>> p, state = opt.step(p, torch.tensor(-1.0), opt.init(p))
    >>> p, state = opt.step(p, torch.tensor(-1.0), state)
    >>> p, state.average  # (0.25 * 1 + 0.5 * 2) / 0.75
    (tensor(2.), tensor(1.6667))
    """
    check_number("averaging decay", "decay", decay, below=1.0)
    return Averaged(check_pure("ema", optimizer, ""), decay, debias)


def choose_tree(ok: Tensor, yes: PyTree, no: PyTree) -> PyTree:
    """Return `yes` if ok, a 0-d bool, else `no`; tensors in both are not copied."""

    def pick(y: Tensor, n: Tensor) -> Tensor:
        return n if y is n else torch.where(ok.to(y.device), y, n)

    return pytree.tree_map(pick, yes, no)
