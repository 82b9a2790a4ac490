"""Complex parameters in the classes: steps, states, storages, loading, refusals."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, MAPPED, assert_moved_alike
from refusals import Scene, refuses
from torch import Tensor, nn

import optimi_func
from optimi_func import SGD, AdamW, MuonAdamW, Prodigy, ScheduleFreeAdamW, Storage

EAGER: dict[str, Any] = {"compile": False}
HOW: list[dict[str, Any]] = [EAGER, {"foreach": True}]
STORAGES: dict[str, dict[str, Any]] = {
    "usual": {},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "float64": {"state_dtype": torch.float64},
    "8bit": {"storage": Storage(moments="8bit")},
}
SHAPE = (16, 8, 64)


def pairs(x: Tensor) -> Tensor:
    """A copy of a parameter, as real numbers."""
    x = x.detach()
    return (torch.view_as_real(x) if x.is_complex() else x).clone()


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = torch.complex64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def trained(make: Any, params: list[Tensor], steps: int = 4, **how: Any) -> tuple[Any, Any]:
    """Parameters and their optimizer after some steps, with gradients of a seed each."""
    ps = [nn.Parameter(p.clone()) for p in params]
    optimizer = make(ps, lr=0.02, **how)
    go_on(optimizer, ps, range(steps))
    return ps, optimizer


def go_on(optimizer: Any, ps: list[Any], steps: Any) -> None:
    for i in steps:
        for j, p in enumerate(ps):
            drawn = numbers((*p.shape, 2) if p.is_complex() else tuple(p.shape), 9 * i + j)
            drawn = drawn.real.contiguous().to(pairs(p).dtype)
            p.grad = torch.view_as_complex(drawn) if p.is_complex() else drawn
        optimizer.step()


def assert_same(ps: list[Tensor], qs: list[Tensor]) -> None:
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(pairs(p), pairs(q))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_mixed_parameters_step_as_real_pairs_bit_for_bit(name: str, how: Any) -> None:
    """Complex ones beside real ones of the same shape, and of other memory orders."""
    cls, real = CLASSES[name], numbers((6, 4)).real.contiguous()
    given = [
        numbers((6, 4)),
        real,
        numbers((4, 6), 1).t(),
        numbers((3,), 2),
        numbers((), 3),
    ]
    given.append(numbers((2, 3), 4, torch.complex128))
    ps, ours = trained(cls, given, **how)
    qs, theirs = trained(cls, list(map(pairs, given)), **how)
    assert_same(ps, qs)
    for p, q in zip(ps, qs):
        for key, x in theirs.state[q].items():
            assert torch.equal(pairs(ours.state[p][key]), x), key
    p = ps[0]
    assert all([x.is_complex() for x in ours.state[p].values() if x.shape == p.shape])


@pytest.mark.parametrize("kept", STORAGES)
def test_moments_in_every_storage_are_those_of_real_pairs(kept: str) -> None:
    how = {**STORAGES[kept], **EAGER}
    given = [numbers(SHAPE), numbers((3,)).real.contiguous()]
    ps, ours = trained(AdamW, given, **how)
    qs, theirs = trained(AdamW, list(map(pairs, given)), **how)
    assert_same(ps, qs)
    entry, wanted = ours.state[ps[0]], theirs.state[qs[0]]
    assert entry.keys() == wanted.keys()
    for key, x in wanted.items():
        assert torch.equal(pairs(entry[key]), x), key
    wide = {"usual": torch.complex64, "float64": torch.complex128}
    first = {"8bit": "exp_avg_q"}.get(kept, "exp_avg")
    assert entry[first].dtype == wide.get(kept, wanted[first].dtype)
    assert entry[first].shape == (SHAPE if kept in wide else (*SHAPE, 2))
    assert ("8bit" in ours.describe()) == (kept == "8bit")


@pytest.mark.parametrize("kept", STORAGES)
@pytest.mark.parametrize("into", STORAGES)
def test_states_are_saved_and_loaded_into_every_storage(kept: str, into: str) -> None:
    given = [numbers(SHAPE), numbers((3,)).real.contiguous()]
    ps, first = trained(AdamW, given, **STORAGES[kept], **EAGER)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    second = AdamW(qs, lr=0.02, **STORAGES[into], **EAGER)
    second.load_state_dict(torch.load(file, weights_only=True))
    ours, theirs = (x.decoded_state_dict()["state"][0] for x in (first, second))
    for key in ("exp_avg", "exp_avg_sq"):
        assert theirs[key].is_complex()
        largest = ours[key].abs().max().item()
        torch.testing.assert_close(
            *(pairs(x[key]).double() for x in (theirs, ours)), rtol=0, atol=0.02 * largest
        )
    # torch, which has none of these storages, goes on too.
    theirs = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in ps])
    theirs.load_state_dict(first.torch_state_dict())
    for optimizer, some in ((first, ps), (second, qs)):
        go_on(optimizer, some, range(4, 6))
    if kept == into:
        assert_same(ps, qs)


def test_a_group_changes_its_storage() -> None:
    ps, optimizer = trained(AdamW, [numbers(SHAPE)], **EAGER)
    before = pairs(optimizer.state[ps[0]]["exp_avg"])
    for how, name in (("8bit", "exp_avg_q"), (None, "exp_avg")):
        optimizer.param_groups[0]["storage"] = None if how is None else Storage(moments=how)
        optimizer.init_state()
        ps[0].grad = torch.zeros_like(ps[0])
        optimizer.step()
        assert name in optimizer.state[ps[0]]
    now = pairs(optimizer.state[ps[0]]["exp_avg"])
    torch.testing.assert_close(now, 0.9**2 * before, rtol=0.05, atol=1e-3)
    assert now.dtype == torch.float32


@pytest.mark.parametrize("param", ["kahan8", "exact"])
def test_a_compensation_is_for_16_bits_as_of_float32(param: Any) -> None:
    ps, optimizer = trained(
        AdamW, [numbers((3,)), torch.ones(3).bfloat16()], storage=Storage(param), **EAGER
    )
    assert ["kahan_comp" in optimizer.state[p] for p in ps] == [False, True]


def test_reset_begins_anew_in_rows_and_in_all() -> None:
    for how in STORAGES.values():
        ps, optimizer = trained(AdamW, [numbers(SHAPE)], **how, **EAGER)
        before = optimizer.decoded_state_dict()["state"][0]["exp_avg"].clone()
        optimizer.reset(ps, rows=[0, 3])
        after = optimizer.decoded_state_dict()["state"][0]["exp_avg"]
        assert after[[0, 3]].abs().max() == 0
        assert torch.equal(after[1:3], before[1:3]) and before[0].abs().min() > 0
        optimizer.reset()
        assert optimizer.decoded_state_dict()["state"][0]["exp_avg_sq"].abs().max() == 0


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(numbers((4, 3)))
        self.b = nn.Parameter(numbers((4, 3), 1).real.contiguous())


@pytest.mark.parametrize("name", ["schedule_free_adamw", "prodigy", "ranger", "adamw"])
def test_modes_masters_and_pure_states(name: str) -> None:
    model = Weights()
    optimizer: Any = CLASSES[name](model.named_parameters(), lr=0.1, **EAGER)
    go_on(optimizer, [*model.parameters()], range(3))
    if name == "schedule_free_adamw":
        before = model.w.detach().clone()
        optimizer.eval()
        shown = model.w.detach().clone()
        assert torch.equal(optimizer.master_state_dict(model)["w"], shown)
        assert not torch.equal(shown, before)
        twin = copy.deepcopy(model)
        other: Any = CLASSES[name](twin.named_parameters(), lr=0.1, **EAGER)
        other.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            model.w[0] = 5 + 1j
        with pytest.warns(UserWarning, match="written to in eval mode"):
            optimizer.train()
        assert (model.w[0] == 5 + 1j).all() and torch.equal(model.w[1:], before[1:])
        other.train()
        assert torch.equal(twin.w, before)
    value, state = optimizer.functional()
    params = {k: p.detach() for k, p in model.named_parameters()}
    grads = {k: numbers((4, 3), 7) if p.is_complex() else p for k, p in params.items()}
    params, state = value.step(params, grads, state)
    optimizer.load_functional(state, params)
    assert torch.equal(model.w, params["w"])
    masters = {k: x + 1 for k, x in optimizer.master_state_dict(model).items()}
    optimizer.load_master_state_dict(model, masters)
    assert torch.equal(model.w, masters["w"])
    with pytest.raises(
        ValueError, match=r"'w'\] has shape \(4, 3\), its parameter \(4, 3, 2"
    ):
        optimizer.load_master_state_dict(model, {**masters, "w": model.b.detach()})


def test_lazily_conjugated_gradients_and_views() -> None:
    start, g = numbers((3, 2)), numbers((3, 2), 1)
    found: list[Tensor] = []
    for grad in (g.conj(), g.conj().resolve_conj(), g.conj().t().contiguous().t()):
        p = nn.Parameter(start.clone())
        optimizer = AdamW([p], lr=0.1, **EAGER)
        p.grad = grad
        version = p._version
        optimizer.step()
        assert p._version > version
        found.append(p.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_step_is_noticed_by_autograd() -> None:
    p = nn.Parameter(numbers((3,)))
    optimizer = AdamW([p], lr=0.1, **EAGER)
    loss = (p * p).abs().sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


STEPS = {
    "optimizer.update([p], [real], [WHOLE_BATCH], True, True)": (
        r"TypeError: grads\[0\] has dtype torch.float32: .* complex"
    ),
    "AdamW([real]).update([real], [p.detach()], [WHOLE_BATCH], True, True)": (
        r"TypeError: grads\[0\] has dtype torch.complex64: .* floating"
    ),
    "optimizer.state[p]['exp_avg'] = torch.zeros(4, 4); optimizer.step()": (
        r"exp_avg'\] has shape \(4, 4\): allowed .* \(4, 4, 2"
    ),
    "MuonAdamW(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 2)))": (
        r"TypeError: 0.weight'\] has dtype torch.complex64: muon"
    ),
    **{
        f"CLASSES[{name!r}]([p], lr=0.1)": (
            r"TypeError: params\[0\] has dtype torch.complex64: .* maps"
        )
        for name in MAPPED
    },
}


@refuses(STEPS)
def test_what_a_step_cannot_take_is_refused_before_it_writes() -> Scene:
    p = nn.Parameter(numbers((4, 4)))
    real, optimizer = nn.Parameter(torch.ones(4, 4)), AdamW([p], lr=0.1, **EAGER)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return locals() | {"WHOLE_BATCH": optimi_func.core.rule.WHOLE_BATCH}


def test_a_matrix_for_adamw_may_be_complex_and_one_for_muon_not() -> None:
    class Net(nn.Module):
        def __init__(self, hidden: Any) -> None:
            super().__init__()
            self.hidden = nn.Linear(4, 4, dtype=hidden)
            self.filter = nn.Parameter(numbers((4,)))
            self.head = nn.Linear(4, 2)

    net = Net(torch.float32)
    optimizer = MuonAdamW(net, lr=0.1, **EAGER)
    go_on(optimizer, [*net.parameters()], range(2))
    assert optimizer.state[net.filter]["exp_avg"].is_complex()


@pytest.mark.kernels
def test_kernels_are_those_of_real_parameters() -> None:
    """No kernel is compiled besides: what AdamW has for float32 steps the pairs."""
    given = [numbers((70, 33)), numbers((70, 33), 1).real.contiguous(), numbers((5,), 2)]
    ps, ours = trained(AdamW, given, compile=True)
    qs, _ = trained(AdamW, list(map(pairs, given)), compile=True)
    assert_same(ps, qs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version = ps[0]._version
        go_on(ours, ps, range(4, 6))
    assert ps[0]._version > version
    rs, _ = trained(AdamW, given, **EAGER)
    qs, _ = trained(AdamW, given, compile=True)
    for p, q, r in zip(rs, qs, given):
        assert_moved_alike(pairs(r), pairs(q), pairs(p), 1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("cls", [ScheduleFreeAdamW, Prodigy], ids=lambda c: c.__name__)
def test_scalars_that_are_summed_or_kept(cls: Any) -> None:
    how = EAGER if cls is Prodigy else {"compile": True}
    given = [numbers((9, 5)), numbers((9, 5), 1).real.contiguous()]
    ps, ours = trained(cls, given, **how)
    qs, theirs = trained(cls, list(map(pairs, given)), **how)
    assert_same(ps, qs)
    shown = [g.get("d") for x in (ours, theirs) for g in x.param_groups]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("lazily", [False, True])
def test_a_scaler_divides_conjugated_gradients_too(lazily: bool) -> None:
    """A lazily conjugated gradient is copied for the step, before the scaler's division."""
    w = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    g = torch.full((3,), 4.0 + 4.0j)
    w.grad = g.conj() if lazily else g.conj().resolve_conj()
    assert w.grad.is_conj() == lazily
    optimizer = SGD([w], lr=1.0, compile=False)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    assert torch.equal(w.detach(), torch.full((3,), -1.0 + 1.0j))
    assert torch.equal(w.grad.resolve_conj(), torch.full((3,), 1.0 - 1.0j))
