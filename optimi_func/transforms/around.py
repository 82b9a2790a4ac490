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
from optimi_func.core.tree import flatten_params, match_tree
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.transforms._trees import Around, Trees, count_from, like

Reduction: TypeAlias = Literal["mean", "sum"]


class EveryState(NamedTuple):
    """The state of `every_k`."""

    calls: Tensor  # 0-d float32: those since the last step
    sums: PyTree  # of their gradients, at least float32
    inner: PyTree


@dataclass(frozen=True, eq=False)
class Every(Around[EveryState], state=EveryState, name="every_k"):
    """An optimizer that takes a step every k calls: see `every_k`."""

    k: int
    reduction: Reduction

    def _around(self, params: PyTree, inner: PyTree) -> EveryState:
        tensors, spec = flatten_params(params)
        zeros = [torch.zeros_like(p, dtype=held_dtype(p.dtype)) for p in tensors]
        return EveryState(count_from(params), pytree.tree_unflatten(zeros, spec), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: EveryState, **extras: PyTree
    ) -> tuple[PyTree, EveryState]:
        """Add a gradient to the sum. Every k-th call takes a step, with its extras."""
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
    """Take one step every k calls, with the mean or the sum of their gradients.

        s <- s + g
        every k-th call: step along s / k ("mean") or s ("sum"), then s <- 0

    The result is exact: k micro-batches of the same size, each with the mean of its losses,
    give the same step as the whole batch. Gradients are summed in float32, or in float64
    for float64 parameters. A call that does not complete a step changes neither the
    parameters nor the optimizer's state, including its step count.

    Every call computes a step, and all calls but the k-th discard this step, because a
    graph has no branches. In eager mode, you can save this time by summing the gradients in
    a loop of your own. If the k-th gradient of a leaf is None, the leaf does not move in
    this step, and its sum is kept for the next step. If a gradient in another call is None,
    the mean still divides the sum by k.

    Args:
        optimizer: The optimizer.
        k: The number of calls per step, at least 1.
        reduction: "mean" divides the sum by k. "sum" does not, for losses that you have
            already divided.

    Raises:
        ValueError: k is not a whole number of at least 1, or reduction is neither "mean"
            nor "sum".

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
        """Return the result of an update, or no change if a gradient is not finite."""
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
    """Skip each step in which a gradient contains an inf or a NaN.

    A skipped step changes no parameter, no moment and no step count. It changes only
    `state.consecutive` and `state.skipped`, which count skipped steps. The decision is made
    on the device, without synchronizing with the host.

    A compiled graph cannot raise an error, so a run may skip all further steps unnoticed.
    Either read `state.consecutive` on the host from time to time, or pass
    `max_consecutive`. After this number of skipped steps in a row, gradients with an inf or
    a NaN are applied, so that you can see the failure in the loss. optax's function of the
    same name does the same.

    If you differentiate through a skipped step in reverse mode, the derivative is NaN if
    the loss itself has overflowed (0 * inf). Derivatives in forward mode are correct.
    Derivatives in reverse mode are correct if the gradient is detached.

    Args:
        optimizer: The optimizer.
        max_consecutive: The largest number of steps in a row that are skipped. 0 skips no
            step, and None means that there is no limit.

    Raises:
        ValueError: max_consecutive is negative or not a whole number.

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
    """An optimizer that averages the parameters after its steps: see `ema`."""

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
        """Return the parameters after one update, and the state with their average."""
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
        """Raise an error, because there are two kinds of parameters to evaluate with.

        Raises:
            ValueError: This error is always raised. Its message says how to get the average
                or the parameters with which the inner optimizer evaluates.
        """
        raise ValueError(
            "ema keeps a mean in addition to the parameters that its optimizer evaluates "
            "at. Take state.average, or the optimizer's eval_params(params, state.inner)"
        )


def ema(optimizer: PureOptimizer, decay: Number, *, debias: bool = True) -> Averaged:
    """Store an exponential moving average of the parameters in `state.average`.

        a_t <- decay * a_(t-1) + (1 - decay) * p_t

    With debias=True, a_0 is 0, and `state.average` is a_t / (1 - decay^t), which begins
    with p_1 and does not depend on p_0, the parameters that are passed to `init`. With
    debias=False, a_0 is p_0, which influences the average for about 1 / (1 - decay) steps.
    Averages are stored in float32, or in float64 for float64 parameters, because a bfloat16
    average would not change: rounding would discard its small updates.

    If you also use `every_k` or `apply_if_finite`, put `ema` inside of them, so that only
    the steps that change the parameters count.

    Args:
        optimizer: The optimizer.
        decay: The fraction of the average that a step keeps, in [0, 1): a float, a 0-d
            tensor or a schedule. A decay of 0.999 averages over about a thousand steps.
        debias: True divides the average by the sum of its weights. False begins the average
            with p_0.

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
