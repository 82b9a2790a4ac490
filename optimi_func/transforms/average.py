"""`ema`: a running mean of the parameters."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import PureOptimizer, PyTree, check_pure
from optimi_func.pure.casts import resolve
from optimi_func.pure.functional import Number
from optimi_func.pure.tree import flatten_params, match_tree
from optimi_func.transforms._trees import Around, count_from, like


class EmaState(NamedTuple):
    """The state of `ema`."""

    step: Tensor  # 0-d float32: steps taken so far
    weight: Tensor  # 0-d: share of the mean that is of parameters, not of zeros
    average: PyTree  # the averaged parameters, at least float32
    inner: Any


@dataclass(frozen=True, eq=False)
class Averaged(Around[EmaState], state=EmaState, name="ema"):
    """An optimizer that averages the parameters it makes: see `ema`."""

    decay: Number
    debias: bool

    def _around(self, params: PyTree, inner: Any) -> EmaState:
        tensors, spec = flatten_params(params)
        # Not detached, because the mean depends on p_0 if a_0 is p_0.
        wide = [p.to(compute_dtype(p.dtype), copy=True) for p in tensors]
        step = count_from(params)
        # float32 has too few digits for a decay of 0.99999.
        weight = torch.full_like(
            step, 0.0 if self.debias else 1.0, dtype=scalar_dtype(step.device)
        )
        return EmaState(step, weight, pytree.tree_unflatten(wide, spec), inner)

    def step(
        self, params: PyTree, grads: PyTree, state: EmaState, **extras: Any
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
