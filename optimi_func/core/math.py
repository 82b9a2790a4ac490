"""Scalar functions for Python numbers and tensors, and initial values of moments."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed

from optimi_func.core.codes import MOMENTS, Codes, is_eligible
from optimi_func.core.distributed import ShardSpec
from optimi_func.core.rule import MomentStorage, Scalar
from optimi_func.core.torch_private import differentiates, multiplies_bfloat16


def power(base: Any, t: Any) -> Any:
    """Return base**t, with the derivative 0 at base = 0 where it would be infinite."""
    simple = not isinstance(base, Tensor) or (isinstance(t, float | int) and not 0 < t < 1)
    if simple or not may_be_differentiated(base):
        return base**t
    zero = (base == 0) & (t > 0) & (t < 1)
    return torch.where(zero, 0, torch.where(zero, 1, base) ** t)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Return float64, so that 1 - beta**t keeps its digits, or float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def times(factor: Scalar | None, x: Tensor) -> Tensor:
    """Return factor * x, or x itself if the factor is None, which means 1."""
    return x if factor is None else factor * x


def plus(x: Tensor, factor: Scalar | None, y: Tensor) -> Tensor:
    """Return x + factor * y, in one operation if the factor is None, which means 0."""
    return torch.add(x, y, alpha=0.0) if factor is None else x + factor * y


def choose(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar:
    """Return the scalar `yes` if the condition holds, else `no`."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    wide = scalar_dtype(condition.device)
    # torch.where makes a float32 of two Python numbers.
    if not isinstance(yes, Tensor):
        yes = torch.full((), yes, dtype=wide, device=condition.device)
    return torch.where(condition, yes.to(wide), no)


def rounded(x: Scalar) -> Scalar:
    """Return a scalar. A rule's trace leaves work with the result to its kernels."""
    return x


def sqrt(x: Scalar) -> Scalar:
    """Return the square root of a scalar."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def root(v: Tensor) -> Tensor:
    """Return sqrt(v), elementwise, with a finite derivative at 0."""
    return v.clamp_min(torch.finfo(v.dtype).tiny).sqrt()


def is_zero(v: Tensor) -> Tensor:
    """Return True where `root` takes v for 0, or less."""
    return v < torch.finfo(v.dtype).tiny


def norm(x: Tensor, **over: object) -> Tensor:
    """Return the Euclidean norm, with finite second derivatives at 0."""
    length = torch.linalg.vector_norm(x, **over)
    if not is_differentiated(x):
        return length
    # The backward of vector_norm at 0 is finite, but its own backward is 0 * inf.
    zero = length.detach() == 0.0
    length = torch.linalg.vector_norm(torch.where(zero, 1.0, x), **over)
    return torch.where(zero, 0.0, length)


def total_norm(norms: list[Tensor], order: float = 2) -> Tensor:
    """Return the norm of all gradients from the norm of each, as torch.nn.utils does."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    first = norms[0].device
    wide = reduce(torch.promote_types, [x.dtype for x in norms])
    return norm(torch.stack([x.to(first, wide) for x in norms]), ord=order)


def norm_of_shards(
    norms: Sequence[tuple[Tensor, ShardSpec | None]],
    order: float,
    groups: Sequence["distributed.ProcessGroup"],
) -> Tensor:
    """Return the norm of all tensors together, on any meshes, from those of local shards.

    `groups` have tensors of their own in each process, as pipeline stages. A message is for
    all tensors that end with one group of processes, whose sum goes on to the next group.
    """
    parts: dict[tuple[distributed.ProcessGroup, ...], list[Tensor]] = {tuple(groups): []}
    for x, shard in norms:
        own = () if shard is None else map(shard.mesh.get_group, shard.dims)
        parts.setdefault((*groups, *own), []).append(x)
    totals = {path: total_norm(x, order) for path, x in parts.items()}
    result = total_norm([x for x, _ in norms], order)
    if [*totals] == [()]:
        return result
    op, join, power = distributed.ReduceOp.SUM, torch.add, order
    if order == math.inf:
        op, join, power = distributed.ReduceOp.MAX, torch.maximum, 1.0
    # The mesh's device, which is another one for an offloaded tensor.
    device = next((x.mesh.device_type for _, x in norms if x), result.device)
    sums = {path: x.to(device, torch.float64) ** power for path, x in totals.items()}
    # The dict is in the order of the parameters, which all processes have.
    while path := max(sums, key=len):
        ended = [other for other in sums if other[-1:] == path[-1:]]
        flat = torch.stack([sums.pop(other) for other in ended])
        distributed.all_reduce(flat, op, group=path[-1])
        for other, x in zip(ended, flat.unbind()):
            rest = other[:-1]
            sums[rest] = join(sums[rest], x) if rest in sums else x
    return (sums[()] ** (1 / power)).to(result.device, result.dtype)


def iterated_in(device: torch.device, wide: torch.dtype) -> torch.dtype:
    """Return the dtype in which many products of a matrix are computed by default.

    A plan of memory, on meta tensors, counts those of this CPU: no fewer bytes.
    """
    narrow = device.type not in ("cpu", "meta") or multiplies_bfloat16()
    return torch.bfloat16 if narrow and wide != torch.float64 else wide


def product(x: Tensor, y: Tensor, z: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """Return alpha xy + beta z of matrices or stacks of them."""
    add = torch.baddbmm if x.dim() > 2 else torch.addmm
    return add(z, x, y, beta=beta, alpha=alpha)


def symmetric(
    x: Tensor, y: Tensor, z: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Return xy, or alpha xy + beta z, if that is symmetric: half of it on CPU."""
    size = x.shape[-2]
    if size < _PANELS or x.device.type != "cpu":
        return x @ y if z is None else product(x, y, z, beta, alpha)
    out = x.new_empty((*x.shape[:-1], size))
    for i in range(4):
        lo, hi = size * i // 4, size * (i + 1) // 4
        a, b = x[..., lo:hi, :], y[..., :hi]
        panel = a @ b if z is None else product(a, b, z[..., lo:hi, :hi], beta, alpha)
        out[..., lo:hi, :hi] = panel
        # Dense before and after: else torch transposes element by element.
        out[..., :lo, lo:hi] = panel[..., :lo].contiguous().mT.contiguous()
    return out


_PANELS = 512  # rows from which on four panels are faster than the whole


def is_differentiated(x: Tensor) -> bool:
    """Return True if x may be differentiated."""
    return x.requires_grad or (not torch.compiler.is_compiling() and differentiates(x))


def may_be_differentiated(x: object) -> bool:
    """Return True also in a graph, in which nobody knows."""
    if not isinstance(x, Tensor):
        return False
    return torch.compiler.is_compiling() or is_differentiated(x)


def in_codes(p: Tensor, kept: MomentStorage) -> bool:
    """Return True if moments of p are kept in codes."""
    return isinstance(kept, str) and is_eligible(p)


def dtype_in(p: Tensor, kept: MomentStorage) -> torch.dtype:
    """Return the dtype of moments of p that are in no codes."""
    return p.dtype if isinstance(kept, str) else kept


def moment(p: Tensor, kept: MomentStorage) -> Tensor | Codes:
    """Return zeros for a first moment of p's gradients, in a dtype or in codes."""
    return MOMENTS[kept][0].zeros(p) if in_codes(p, kept) else wide_moment(p, kept)


def second_moment(p: Tensor, kept: MomentStorage) -> Tensor | Codes:
    """Return zeros for a mean of squares; never float16, where 1e-4 squared is 0.

    Beside codes it is float32, for a beta of 0.999: the tensors without codes are small.
    """
    make = slow_second_moment if isinstance(kept, str) else wide_second_moment
    return make(p, kept)


def wide_moment(p: Tensor, kept: MomentStorage) -> Tensor:
    """Return zeros for a first moment that must not be in codes, as a former gradient."""
    return torch.zeros_like(p, dtype=dtype_in(p, kept))


def wide_second_moment(p: Tensor, kept: MomentStorage) -> Tensor:
    """Return zeros for a mean of squares that must not be in codes, as a maximum."""
    dtype = dtype_in(p, kept)
    return torch.zeros_like(p, dtype=torch.float32 if dtype == torch.float16 else dtype)


def slow_second_moment(p: Tensor, kept: MomentStorage) -> Tensor | Codes:
    """Return `slow_moment(p)`, or codes, whose dithered rounding is right on average."""
    return MOMENTS[kept][1].zeros(p) if in_codes(p, kept) else slow_moment(p)


def slow_moment(p: Tensor, kept: MomentStorage | None = None) -> Tensor:
    """Return zeros for a mean with moves too small for bfloat16.

    They are as wide in all storages, and at least float32.
    """
    return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
