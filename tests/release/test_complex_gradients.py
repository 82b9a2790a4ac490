"""Gradient release of complex parameters: sums, norms, clipping, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimi_func import AdamW, adamw, prepare_for_gradient_release

MODES: list[dict[str, Any]] = [
    {},
    {"accumulation": "buffer", "accumulation_steps": 2},
    {"accumulation": "buffer", "accumulation_steps": 2, "buffer_dtype": torch.float32},
    {"accumulation": "buffer", "accumulation_steps": 2, "buffer_dtype": torch.float64},
    {"accumulation": "states", "accumulation_steps": 2},
    {"clip_param_norm": 0.1},
    {"clip_global_norm": 0.1},
    {"grad_norm": True, "skip_nonfinite": True},
]


class Filter(nn.Module):
    """Two complex weights, one of them large, and a real one."""

    def __init__(self, as_pairs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = torch.randn(96, 48, 2), torch.randn(5, 48, 2)
        made = own if as_pairs else map(torch.view_as_complex, own)
        self.large, self.small = map(nn.Parameter, made)
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        large, small = self.large, self.small
        if not large.is_complex():
            large, small = torch.view_as_complex(large), torch.view_as_complex(small)
        # The gradient of a conjugate may come lazily.
        return ((x @ large + self.bias) @ small.conj().T).abs().square().mean()


def batch(i: int) -> Tensor:
    made = torch.Generator().manual_seed(i)
    return torch.randn(7, 96, dtype=torch.complex64, generator=made)


def pairs(model: nn.Module) -> list[Tensor]:
    every = [p.detach() for p in model.parameters()]
    return [torch.view_as_real(p) if p.is_complex() else p for p in every]


def released(model: Filter, pure: bool, **how: Any) -> Any:
    optimizer: Any = adamw(lr=0.02)
    if not pure:
        optimizer = AdamW(model.parameters(), lr=0.02, compile=False, gradient_release=True)
    found: list[Tensor] = []
    with prepare_for_gradient_release(model, optimizer, **how) as handle:
        for i in range(4):
            if "clip_global_norm" in how:
                handle.backward(lambda i=i: model(batch(i)))
            else:
                model(batch(i)).backward()
            found += [handle.grad_norm] if how.get("grad_norm") else []
    return pairs(model), found


@pytest.mark.parametrize("how", MODES, ids=str)
@pytest.mark.parametrize("pure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_release_is_that_of_real_pairs_bit_for_bit(how: Any, pure: bool) -> None:
    (ours, norms), (theirs, wanted) = (
        released(Filter(as_pairs), pure, **how) for as_pairs in (False, True)
    )
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
    # torch adds up squares of complex numbers in another order.
    torch.testing.assert_close(norms, wanted, rtol=1e-6, atol=0.0)


def test_norms_are_of_moduli_as_torchs() -> None:
    model, twin = Filter(False), Filter(False)
    _, (norm, *_) = released(model, False, grad_norm=True)
    twin(batch(0)).backward()
    grads = [p.grad.resolve_conj() for p in twin.parameters()]
    torch.testing.assert_close(norm, nn.utils.get_total_norm(grads))


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    model = Filter(False)
    optimizer = AdamW(model.parameters(), lr=0.1, compile=False, gradient_release=True)
    before = pairs(model)
    with prepare_for_gradient_release(model, optimizer, skip_nonfinite=True) as handle:
        (model(batch(0)) * float("inf")).backward()
        assert sum(handle.skipped.values()) == 3
    for p, q in zip(pairs(model), before):
        assert torch.equal(p, q)
