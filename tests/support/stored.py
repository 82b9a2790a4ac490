"""Parameters large enough to be kept in codes, and what they and their state are meant."""

from typing import Any

import torch
from cases import CLASSES, fitting
from torch import Tensor

from optimi_func.core.codes import widen
from optimi_func.core.rule import Storage
from optimi_func.core.storage import state_in

BF16 = torch.bfloat16
# By name: how parameters and moments are kept, and of which dtype the parameters are.
KEPT: dict[str, tuple[Any, torch.dtype]] = {
    "compact": ("compact", BF16),
    "kahan": (Storage("kahan", "8bit"), BF16),
    "exact": (Storage("exact", "8bit"), BF16),
    "float32": (Storage(None, "8bit"), torch.float32),
}
# Of a parameter in codes whether its fields are too. The others stay wide.
WIDE = {"max_exp_avg_sq", "prev_grad", "slow_param"}


def starts(dtype: torch.dtype = BF16) -> list[Tensor]:
    """Weights in every order of memory that codes take, and some too small for them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(0.5).to(dtype)

    return [
        draw(128, 64),
        draw(8200),  # its last group is not full
        draw(32, 64, 2, 2).contiguous(memory_format=torch.channels_last),
        draw(64, 192).t(),
        draw(7, 5),
        draw(3),
    ]


CODED = [True, True, True, True, False, False]


def gradients(steps: int, dtype: torch.dtype = BF16) -> list[list[Tensor]]:
    """For each step and parameter one of a size that differs by element."""
    generator = torch.Generator().manual_seed(1)
    like = starts()
    sizes = [torch.randn(p.shape, generator=generator).exp() for p in like]
    found: list[list[Tensor]] = []
    for _ in range(steps):
        some = [s * torch.randn(s.shape, generator=generator) for s in sizes]
        made = [torch.empty_like(p, dtype=dtype) for p in like]
        found.append([m.copy_(g) for m, g in zip(made, some)])
    return found


def made(
    name: str, storage: Any, dtype: torch.dtype, **options: Any
) -> tuple[list[Tensor], Any]:
    """Parameters and the optimizer of a rule with momentum."""
    ps = fitting(name, [p.requires_grad_() for p in starts(dtype)])
    if name == "sgd":
        options = {"momentum": 0.9, **options}
    options = {"lr": 0.01, "compile": False, **options}
    return ps, CLASSES[name](ps, storage=storage, **options)


def train(optimizer: Any, ps: list[Tensor], grads: list[list[Tensor]]) -> None:
    for some in grads:
        for p, g in zip(ps, some):
            p.grad = g if g.shape == p.shape else g.view(p.shape)
        optimizer.step()


def meant(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The parameter with what is kept beside it."""
    return widen(p.detach(), state.get("kahan_comp"), torch.float32)[1]


def kept_in_codes(optimizer: Any) -> list[bool]:
    """Of each parameter whether its moments are in codes."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [any(k.endswith("_q") for k in optimizer.state[p]) for p in params]


def decoded(rule: Any, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields of a rule's state in float32."""
    state, _ = state_in(rule, entry)
    pairs = state._asdict().items()
    return {
        k: x.float() if isinstance(x, Tensor) else x.decode(torch.float32) for k, x in pairs
    }


def assert_same_bits(one: Any, two: Any) -> None:
    """Of two optimizers with parameters alike: all that they keep."""
    for group, other in zip(one.param_groups, two.param_groups):
        for p, q in zip(group["params"], other["params"]):
            assert same_bits(p.detach(), q.detach())
            state, known = one.state[p], two.state[q]
            assert list(state) == list(known)
            for name, x in state.items():
                assert x.dtype == known[name].dtype and x.stride() == known[name].stride()
                assert same_bits(x, known[name]), name


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN where the other has one included."""
    return bool(torch.equal(a.isnan(), b.isnan())) and torch.equal(
        a.nan_to_num(), b.nan_to_num()
    )
