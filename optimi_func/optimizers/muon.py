"""Muon (Jordan et al. 2024)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from optimi_func.classes.fields import FloatOrNone
from optimi_func.core import storage
from optimi_func.core.layout import GivenSplit, Layout, as_layout, sides
from optimi_func.core.math import is_differentiated, iterated_in, norm, product, symmetric
from optimi_func.core.rule import Scalar
from optimi_func.hooks import hyperball
from optimi_func.rules import (
    Body,
    Field,
    Float,
    Moment,
    Shaped,
    choice,
    functions,
    root,
    rounded,
)
from optimi_func.state.convert import Counterparts, Group

Triple: TypeAlias = tuple[float, float, float]
# One triple for all iterations, one for each, or the name of a table.
Coefficients: TypeAlias = str | Sequence[float] | Sequence[Sequence[float]]

# The coefficients of each iteration, by name.
TABLES: dict[str, tuple[Triple, ...]] = {
    "standard": ((3.4445, -4.7750, 2.0315),) * 5,
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "deepseek": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # It was made for a matrix divided by 1.02, which the first triple does here.
    "polar_express": (
        (
            8.156554524902461 / 1.02,
            -22.48329292557795 / 1.02**3,
            15.878769915207462 / 1.02**5,
        ),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# The factor on an update with m rows and n columns.
SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "rms_to_rms": lambda m, n: math.sqrt(m / n),
    "spectral_unclamped": lambda m, n: math.sqrt(m / n),
}
NUCLEAR = "nuclear"  # a scale that depends on the values

__all__ = ["Muon", "muon", "muon_init", "muon_step"]


def as_table(coefficients: object, steps: object) -> tuple[Triple, ...]:
    """Check the coefficients, and return three of them for each step of the iteration."""
    if steps is not None and (type(steps) is not int or not 0 < steps < 100):
        raise ValueError(
            f"Invalid ns_steps: ns_steps={steps!r}: allowed are integers from 1 to 99, and "
            "None for 5 or as many as ns_coefficients lists"
        )
    named = isinstance(coefficients, str)
    rows = TABLES.get(coefficients, ()) if named else coefficients
    if is_triple(rows):
        return (as_triple(rows),) * (5 if steps is None else steps)
    if not isinstance(rows, tuple | list) or not rows or not all(map(is_triple, rows)):
        raise ValueError(
            f"Invalid ns_coefficients: ns_coefficients={coefficients!r}: allowed are three "
            f"finite numbers, a list with three for each step, and {sorted(TABLES)}"
        )
    if steps is not None:
        raise ValueError(
            f"ns_steps={steps} with ns_coefficients={coefficients!r}, which has the "
            f"coefficients of {len(rows)} steps: leave ns_steps out"
        )
    return tuple(map(as_triple, rows))


def is_triple(x: object) -> TypeGuard[Sequence[float]]:
    if not isinstance(x, tuple | list) or len(x) != 3:
        return False
    return all(isinstance(y, float | int) and math.isfinite(y) for y in x)


def as_triple(x: Sequence[float]) -> Triple:
    a, b, c = map(float, x)
    return a, b, c


def as_dtype(x: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of the iteration, given a dtype or its name."""
    dtype = storage.as_dtype(x)
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(
            f"Invalid ns_dtype: ns_dtype={x!r}: allowed are floating torch dtypes, their "
            "names, and None"
        )
    return dtype


def torchs_options(group: Group) -> Group:
    """Return options for torch.optim.Muon, or raise an error if torch lacks one."""
    table = as_table(group["ns_coefficients"], group["ns_steps"])
    refused = {
        "ns_coefficients": len(set(table)) > 1,
        "adjust_lr_fn": group["adjust_lr_fn"] in ("rms_to_rms", NUCLEAR),
        "element_beta": group["element_beta"] is not None,
        "hyperball": group["hyperball"],
        "split": bool(group["split"]),
        "transposed": group["transposed"],
        "maximize": group["maximize"],
    }
    for name, unknown in refused.items():
        if unknown:
            raise ValueError(f"torch.optim.Muon cannot go on with {name}={group[name]!r}")
    return {"ns_coefficients": table[0], "ns_steps": len(table)}


class Muon(Body, name="muon"):
    """Muon: step along the momentum after setting its singular values to about 1.

        b <- momentum * b + (1 - momentum) * g
        N  = (1 - momentum) * g + momentum * b      with Nesterov, else b
        X  = N / max(||N||, eps)
        X <- a X + (b XX^T + c (XX^T)^2) X          ns_steps times
        p <- p - lr * s * X - lr * weight_decay * p

    Muon is made for the matrices of a network's hidden layers. `MuonAdamW` and `Mixed`
    combine Muon with a different optimizer for embeddings, output layers and vectors. A
    parameter with three dimensions is treated as a stack of matrices. A parameter with four
    or more dimensions is flattened into one matrix. For a convolution, each row of the
    flattened matrix corresponds to one output channel. The steps are the same as in
    torch.optim.Muon, but adjust_lr_fn has a different default.

    Args:
        params: Parameters with at least two dimensions, named parameters, or param groups.
        weight_decay: Coefficient of weight decay. Each step multiplies weight_decay by lr,
            or by lr / max_lr if decouple_lr=True. The scale s has no effect on weight
            decay.
        momentum: Fraction of b that carries over from one step to the next, in [0, 1).
        nesterov: Use Nesterov momentum, which gives the current gradient more weight in N.
        ns_coefficients: The coefficients a, b and c of the iteration. Pass three
            numbers to use them in all steps of the iteration, or a list with three
            numbers for each step. The names "standard", "quintic" and "polar_express"
            select lists for five steps, and "deepseek" selects a list for ten steps.
            The iteration maps singular values of at least 0.01 to these ranges: 0.68 to
            1.13 with "standard", 0.98 to 1.03 with "quintic", and 0.86 to 1.14 with
            "polar_express". With "deepseek", all singular values of at least 0.01
            become 1.
        eps: Lower bound of the norm by which N is divided.
        ns_steps: Number of steps of the iteration, if all steps use the same coefficients.
            None means one step for each triple of numbers in ns_coefficients, or 5 steps if
            ns_coefficients is a single triple.
        adjust_lr_fn: Selects the scale s for an m x n matrix. With "match_rms_adamw", s is
            0.2 sqrt(max(m, n)), so that you can use AdamW's lr and weight decay. With
            "original" or None (torch's default), s is sqrt(max(1, m / n)). With
            "rms_to_rms", which torch 2.15 calls "spectral_unclamped", s is sqrt(m / n).
            With "nuclear" (PolarGrad), s is the sum of the elements of N * X. This sum is
            close to the nuclear norm of N, so steps become smaller when gradients do.
        ns_dtype: Dtype in which the iteration is computed. None selects float64 for float64
            parameters, float32 on a CPU without AVX512_BF16, and bfloat16 in all other
            cases. `describe()` prints the dtype. If you differentiate through a step,
            the iteration is computed in float32 or wider.
        split: The parts of a parameter that are separate matrices, for example query, key
            and value. A number divides the rows into this many equal parts, and a list
            contains the number of rows of each part. {"rows": 3} means the same as 3.
            {"columns": 12} divides the columns, for example into the 12 heads of an output
            projection. {"rows": 3, "repeats": 12} is for parameters in which a sequence of
            3 parts repeats 12 times. In GPT-NeoX, for example, the sequence of query, key
            and value repeats for each of 12 heads. For each of the 3 parts, the rows from
            all 12 repeats then form one matrix.
        transposed: Pass True if the parameters are stored as (inputs, outputs), as in
            transformers' Conv1D. Muon then orthogonalizes the transposed matrices. In the
            formula for s and in options such as split, rows are therefore outputs.
        element_beta: A number in [0, 1) turns on AdaMuon. AdaMuon computes X from the signs
            of N, and v is a moving average of X^2. The step is X / sqrt(v), scaled to the
            norm of an orthogonal matrix. element_beta is the fraction of v that carries
            over from one step to the next. v is stored in float32 or wider. None turns
            AdaMuon off.
        hyperball: Keep the norm R of each matrix constant: each step moves the matrix by lr
            * R along X, and then scales the matrix back to the norm R. With hyperball=True,
            lr is a fraction of R, s has no effect, and weight_decay has to be 0. A matrix
            of zeros does not change. 16-bit parameters need Kahan summation, because R
            drifts otherwise.

    Arguments not named here are shared by all optimizers: see `BaseOptimizer`.

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024;
        Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982; Zhang et al.,
        "Gram Newton-Schulz: A Fast, Hardware-Aware Newton-Schulz Algorithm for Muon", 2026;
        Lau et al., "PolarGrad", arXiv:2505.21799; Si et al., "AdaMuon: Adaptive Muon
        Optimizer", arXiv:2507.11005; Wen et al., "Fantastic Pretraining Optimizers and
        Where to Find Them II: Hyperball Optimization", arXiv:2606.16899.

    >>> w = torch.eye(2, requires_grad=True)
    >>> options = {"weight_decay": 0.0, "ns_dtype": "float32", "compile": False}
    >>> optimizer = Muon([w], lr=0.1, **options)
    >>> (3 * w).trace().backward()
    >>> optimizer.step()
    >>> w.detach()
    tensor([[0.9687, 0.0000],
            [0.0000, 0.9687]])
    """

    _positional = ()
    maps_matrices = True

    lr: Float = Float(1e-3)
    weight_decay: Float = Float(0.1)
    momentum: Float = Float(0.95, "momentum", below=1.0)
    nesterov: bool = True
    ns_coefficients: Field[Coefficients, Coefficients] = Field(
        TABLES["standard"][0], Coefficients, Coefficients
    )
    eps: Float = Float(1e-7, "epsilon")
    ns_steps: int | None = None
    adjust_lr_fn: str | None = "match_rms_adamw"
    _: KW_ONLY
    ns_dtype: torch.dtype | str | None = None
    split: Field[GivenSplit, GivenSplit] = Field(None, GivenSplit, GivenSplit)
    transposed: bool = False
    element_beta: FloatOrNone = FloatOrNone(
        None, "element beta", type(None), argument=float | None, below=1.0
    )
    hyperball: bool = False

    counterparts = Counterparts(
        in_torch=torch.optim.Muon, torch_counts_steps=False, torch_options=torchs_options
    )

    class Momentum(NamedTuple):
        momentum_buffer: Moment  # b

    class WithSquares(NamedTuple):
        momentum_buffer: Moment
        second_momentum_buffer: Shaped  # v

    @property
    def State(self) -> type[Momentum | WithSquares]:
        return self.Momentum if self.element_beta is None else self.WithSquares

    @choice
    def table(self) -> tuple[Triple, ...]:
        """The coefficients for each step of the iteration."""
        return as_table(self.ns_coefficients, self.ns_steps)

    @choice
    def dtype(self) -> torch.dtype | None:
        """The dtype of the iteration."""
        return as_dtype(self.ns_dtype)

    @choice
    def layout(self) -> Layout:
        """Return the layout of the matrices that a parameter consists of."""
        return as_layout(self.split, self.transposed)

    @property
    def layout_of_squares(self) -> Layout:
        """Return the layout of the averages of squares, one for each matrix."""
        return self.layout

    def check(self) -> None:
        check_options(self)

    def direction(self, g: Tensor, s: Any):
        return self.averaged(g, s, self.momentum)

    def accumulate(self, g: Tensor, s: Any):
        # In Nesterov's g + momentum * b, b has the whole gradient and g is the last part.
        return self.averaged(g, s, 1.0)

    def averaged(self, g: Tensor, s: Any, kept: Scalar):
        b = kept * s.momentum_buffer + (1 - self.momentum) * g
        new = s._replace(momentum_buffer=b)
        if not self.nesterov:
            return b, new
        return (1 - self.momentum) * g + self.momentum * b, new

    def own_hooks(self) -> tuple[Any, ...]:
        """Return the hook that hyperball=True is short for, and those of all classes."""
        own = super().own_hooks()
        return (*own, hyperball("matrix")) if self.hyperball else own

    def whole(self, d: Tensor, s: Any) -> Any:
        """Return the direction, and also the state if it contains averages of squares."""
        squares = self.layout_of_squares.matrices(s[1]) if len(s) > 1 else repeat(None)
        pairs = [self.scaled(y, v) for y, v in zip(self.matrices(d), squares)]
        move = self.joined([x for x, _ in pairs], d)
        averages = [v for _, v in pairs if v is not None]
        if not averages:
            return move
        squares = self.layout_of_squares.joined(averages, s[1])
        return move, s._replace(second_momentum_buffer=squares)

    def scaled(self, y: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the update for N, and the new average of squares if there is one."""
        if v is None and self.adjust_lr_fn != NUCLEAR:
            return self.orthogonalized(y, self.scale(y)), v
        o = self.orthogonalized(y if v is None else y.sign())
        scale = self.scale(y, o)
        if v is not None and self.element_beta is not None:
            v = self.element_beta * v + (1 - self.element_beta) * o.square()
            o = o / (root(v) + 1e-8)
            length = norm(o, dim=(-2, -1), keepdim=True) + 1e-8
            scale = scale * min(o.shape[-2:]) ** 0.5 / length
        return o * scale, v

    def matrices(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layout.matrices(x)

    def joined(self, parts: list[Tensor], like: Tensor) -> Tensor:
        return self.layout.joined(parts, like)

    def orthogonalized(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale * U f(S) V^T for each matrix U S V^T, where f(S) is about 1."""
        wide, shape = x.dtype, x.shape
        dtype, (m, n) = self.dtype or iterated_in(x.device, wide), shape[-2:]
        if dtype.itemsize < wide.itemsize and is_differentiated(x):
            dtype = wide  # else the derivative would be noise
        length = norm(x, dim=(-2, -1), keepdim=True)
        x = x / length.clamp_min(rounded(self.eps, x)).clamp_min(torch.finfo(wide).tiny)
        x = (x.mT if m > n else x).to(dtype)
        x = x.flatten(0, -3) if x.dim() > 2 else x
        table = self.table
        while table:
            # From this ratio of the sides on, several at once take fewer multiplications.
            count = 1 if 2 * max(m, n) < 3 * min(m, n) else 2 if dtype.itemsize < 4 else 3
            q, factor = moved_by(x, table[:count])
            table = table[count:]
            last = 1.0 if table else scale
            x = product(factor, x, x, last * q, last)
        return (x.mT if m > n else x).to(wide).reshape(shape)

    def scale(self, x: Tensor, o: Tensor | None = None) -> Any:
        """Return the scale s. `o` is the orthogonal matrix, which only "nuclear" needs."""
        if self.adjust_lr_fn == NUCLEAR and o is not None:
            return (x * o).sum((-2, -1), keepdim=True)
        m, n = x.shape[-2:]
        return SCALES[self.adjust_lr_fn or "original"](m, max(n, 1))

    def refuses(self, p: Tensor) -> str | None:
        if p.dim() < 2:
            return (
                "Muon takes matrices, stacks of them and convolutions. Give vectors and "
                "scalars to another optimizer, as optimi_func.Mixed does"
            )
        return self.layout.refuses(*sides(p.shape, self.transposed))


def check_options(given: Muon) -> None:
    """Raise an error for unknown options, and for options that exclude each other."""
    if given.adjust_lr_fn not in (None, NUCLEAR, *SCALES):
        raise ValueError(
            f"Invalid adjust_lr_fn: adjust_lr_fn={given.adjust_lr_fn!r}: allowed are "
            f"{[*SCALES, NUCLEAR]} and None, which is 'original'"
        )


def moved_by(x: Tensor, table: tuple[Triple, ...]) -> tuple[float, Tensor]:
    """Return q and Q such that several steps of the iteration turn x into (q + Q) x.

    q and Q are computed from powers of x's Gram matrix, which is small (Zhang et al. 2026).
    The rounding errors of these powers grow by a factor of a^2 in each step. q is not
    added to Q, because q is much larger and the last digits of Q would be lost.
    """
    gram = symmetric(x, x.mT)
    (q, b, c), *rest = table
    factor = power = symmetric(gram, gram, gram, b, c)
    for i, (a, b, c) in enumerate(rest):
        half = symmetric(gram, power, gram, table[i][0])
        gram = symmetric(half, power, half, table[i][0])
        power = symmetric(gram, gram, gram, b, c)
        factor = symmetric(factor, power, factor, a) + q * power
        q = q * a
    return q, factor


State = Muon.Momentum  # the name of this class in saved files
muon, muon_init, muon_step = functions(Muon)
