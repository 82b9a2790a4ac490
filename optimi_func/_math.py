"""Scalar calculus that reads the same for Python numbers and traced tensors."""

import math
from typing import Any

import torch
from torch import Tensor

from optimi_func._codes import is_eligible, moment_codes, second_moment_codes
from optimi_func._rule import MomentStorage, Scalar
from optimi_func._torch import differentiates


def power(base: Scalar, t: Scalar) -> Scalar:
    """base**t with a finite derivative at base = 0, where autograd's own has 0 * inf."""
    if not isinstance(base, Tensor):
        return base**t
    exponent = t.detach() if isinstance(t, Tensor) else t
    # t >= 1, so 0**t is 0; the derivative there is 1 at t = 1 and 0 after.
    safe = torch.where(base == 0, 1.0, base)
    return torch.where(base == 0, base * (exponent == 1), safe**exponent)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Float64, in which 1 - beta**t keeps its digits, or what the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def choose(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar:
    """The scalar `yes` where the condition holds, else `no`."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    wide = scalar_dtype(condition.device)
    # Of two numbers, torch.where would make a float32.
    if not isinstance(yes, Tensor):
        yes = torch.full((), yes, dtype=wide, device=condition.device)
    return torch.where(condition, yes.to(wide), no)


def sqrt(x: Scalar) -> Scalar:
    """Square root of a scalar."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def warmed(t: Scalar, warmup: Scalar) -> Scalar:
    """How much of a linear warmup is over at step t."""
    return choose(t < warmup, t / choose(warmup > 0, warmup, 1.0), 1.0)


def log(x: Scalar) -> Scalar:
    """Natural logarithm of a scalar."""
    return x.log() if isinstance(x, Tensor) else math.log(x)


def root(v: Tensor) -> Tensor:
    """Elementwise sqrt(v) whose derivative is finite where v = 0."""
    return v.clamp_min(torch.finfo(v.dtype).tiny).sqrt()


def is_differentiated(x: Tensor) -> bool:
    """Whether anybody may ask for the derivative of what is made of x."""
    return x.requires_grad or (not torch.compiler.is_compiling() and differentiates(x))


def moment(p: Tensor, kept: MomentStorage) -> Any:
    """Zeros to hold a first moment of p's gradients, in a dtype or in codes."""
    if kept == "8bit" and is_eligible(p):
        return moment_codes(p)
    return wide_moment(p, kept)


def second_moment(p: Tensor, kept: MomentStorage) -> Any:
    """Zeros to hold a mean of squares; never float16, where 1e-4 squared is 0."""
    if kept == "8bit" and is_eligible(p):
        return second_moment_codes(p)
    return wide_second_moment(p, kept)


# What codes would spoil: a maximum, a gradient that another is subtracted from.


def wide_moment(p: Tensor, kept: MomentStorage) -> Tensor:
    """As `moment`, never in codes."""
    return torch.zeros_like(p, dtype=p.dtype if kept == "8bit" else kept)


def wide_second_moment(p: Tensor, kept: MomentStorage) -> Tensor:
    """As `second_moment`, never in codes."""
    dtype = p.dtype if kept == "8bit" else kept
    return torch.zeros_like(p, dtype=torch.float32 if dtype == torch.float16 else dtype)


def slow_second_moment(p: Tensor, kept: MomentStorage) -> Any:
    """As `slow_moment`, or in codes, which are rounded so that they follow on the mean."""
    return second_moment_codes(p) if kept == "8bit" and is_eligible(p) else slow_moment(p)


def slow_moment(p: Tensor) -> Tensor:
    """Zeros for a mean that moves by less than bfloat16 can tell, whatever the storage."""
    return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
