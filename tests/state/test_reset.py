"""`optimizer.reset()`, and what is written in eval mode: state after surgery on weights."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from cases import CLASSES
from torch import Tensor, nn

import optimi_func as T
from optimi_func.rules import Optimizer

EAGER: dict[str, Any] = {"compile": False}
BF16 = torch.bfloat16


def trained(cls: Any, storage: Any = None, dtype: Any = BF16, **options: Any) -> Any:
    """A matrix, a vector and their optimizer after three steps."""
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(s).to(dtype)) for s in ((96, 128), (7, 4))]
    optimizer = cls(ps, lr=0.01, storage=storage, **EAGER, **options)
    step(optimizer, ps)
    return optimizer, ps


def step(optimizer: Any, ps: list[Any], count: int = 3) -> None:
    for i in range(count):
        for p in ps:
            generator = torch.Generator().manual_seed(i)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def fresh(optimizer: Any, ps: list[Any]) -> Any:
    """An optimizer of the same kind over copies of the parameters, without any step."""
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    twin = type(optimizer)(qs, **{"lr": 0.01, **optimizer.defaults})
    return twin, qs


@pytest.mark.parametrize("name", CLASSES)
def test_a_reset_optimizer_steps_as_a_new_one(name: str) -> None:
    optimizer, ps = trained(CLASSES[name], dtype=torch.float32)
    kept = {p: {k: x.data_ptr() for k, x in optimizer.state[p].items()} for p in ps}
    optimizer.reset()
    twin, qs = fresh(optimizer, ps)
    step(optimizer, ps)
    step(twin, qs)
    assert all(map(torch.equal, ps, qs))
    for p, places in kept.items():  # in the tensors that were there
        assert {k: x.data_ptr() for k, x in optimizer.state[p].items()} == places


class Prior(Optimizer):
    """An own rule whose first state is a hyperparameter."""

    lr: float
    prior: float = 2.0

    class State(NamedTuple):
        v: Tensor

    def init(self, p: Tensor) -> State:
        return self.State(torch.full_like(p, self.prior))

    def direction(self, g: Tensor, s: State) -> tuple[Tensor, State]:
        v = s.v + g * g
        return g / v, self.State(v)


@pytest.mark.parametrize(
    ("cls", "option", "field"),
    [(T.Adagrad, "initial_accumulator_value", "sum"), (Prior, "prior", "v")],
)
def test_first_values_are_those_of_the_group(cls: Any, option: str, field: str) -> None:
    p, q = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = cls([{"params": [p], option: 0.5}, {"params": [q]}], lr=0.1, compile=False)
    optimizer.init_state()
    first = [optimizer.state[x][field].clone() for x in (p, q)]
    assert (first[0] == 0.5).all() and (first[1] != 0.5).all()
    for rows in (None, [0]):
        p.grad = q.grad = torch.ones(3)
        optimizer.step()
        optimizer.reset([p, q], rows=rows)
        for x, want in zip((p, q), first):
            assert torch.equal(optimizer.state[x][field][:1], want[:1])


@pytest.mark.parametrize("storage", [None, "exact", "compact"])
@pytest.mark.parametrize("cls", [T.AdamW, T.ScheduleFreeAdamW, T.Prodigy, T.Ranger])
def test_in_every_storage(cls: Any, storage: Any) -> None:
    optimizer, ps = trained(cls, storage)
    state = {k: x.clone() for k, x in optimizer.state[ps[0]].items()}
    optimizer.reset(ps[1])
    for k, x in optimizer.state[ps[0]].items():
        assert torch.equal(x, state[k]), k
    optimizer.reset(iter(ps))
    twin, qs = fresh(optimizer, ps)
    twin.init_state()
    for p, q in zip(ps, qs):
        mine, new = optimizer.state[p], twin.state[q]
        assert list(mine) == list(new) and all(
            map(torch.equal, mine.values(), new.values())
        )
    step(optimizer, ps)
    step(twin, qs)
    assert all(map(torch.equal, ps, qs))


@pytest.mark.parametrize("storage", [None, "exact", "compact"])
@pytest.mark.parametrize("cls", [T.AdamW, T.ScheduleFreeAdamW, T.Ranger])
def test_rows_begin_anew(cls: Any, storage: Any) -> None:
    optimizer, ps = trained(cls, storage)
    before = copy.deepcopy({k: x for k, x in optimizer.state[ps[0]].items()})
    optimizer.reset(ps[0], rows=[3, -1])
    new = optimizer.state[ps[0]]
    again = torch.zeros(96, dtype=torch.bool)
    again[[3, 95]] = True
    for k, x in new.items():
        if x.dim() == 0:
            assert torch.equal(x, before[k]), k
            continue
        assert torch.equal(x[~again], before[k][~again]), k
        first = ps[0][again] if k in ("z", "slow_param") else torch.zeros_like(x[again])
        first = torch.ones_like(x[again]) if k == "exp_avg_sq_q" else first
        assert torch.equal(x[again], first.to(x.dtype)), k
        assert not torch.equal(before[k][again], x[again]), k
    flags = copy.deepcopy(before)
    for k, x in flags.items():
        new[k].copy_(x)
    optimizer.reset(ps[0], rows=again)
    assert all(torch.equal(new[k][~again], before[k][~again]) for k in new if new[k].dim())
    step(optimizer, ps)
    assert ps[0].isfinite().all()


def test_elements_of_a_vector_in_codes() -> None:
    """A group of 64 elements shares a scale, which others need."""
    w = nn.Parameter(torch.randn(1 << 13))
    optimizer = T.AdamW([w], lr=0.1, storage=T.Storage(moments="8bit"), **EAGER)
    step(optimizer, [w])
    entry = optimizer.state[w]
    scale, q = entry["exp_avg_scale"].clone(), entry["exp_avg_q"].clone()
    optimizer.reset(w, rows=torch.tensor([5]))
    assert torch.equal(entry["exp_avg_scale"], scale) and entry["exp_avg_q"][5] == 0
    q[5] = 0
    assert torch.equal(entry["exp_avg_q"], q) and entry["exp_avg_sq_q"][5] == 1


def test_what_parameters_share() -> None:
    ps = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = T.Prodigy(ps, **EAGER)

    def run() -> float:
        for _ in range(9):
            for p in ps:
                p.grad = p.detach().clone()
            optimizer.step()
        return optimizer.param_groups[0]["d"]

    assert (d := run()) > 1e-5
    optimizer.reset(ps[0])
    assert optimizer.param_groups[0]["d"] == d == optimizer.state[ps[0]]["d"].item()
    assert optimizer.state[ps[0]]["step"] == 0 < optimizer.state[ps[1]]["step"]
    optimizer.reset()
    assert optimizer.param_groups[0]["d"] == 1e-6
    assert run() > 1e-5
    optimizer.state.clear()
    with pytest.raises(ValueError, match=r"reset\(\) begins anew, also after state.clear"):
        optimizer.step()
    optimizer.reset()
    assert run() > 1e-5 and optimizer.state[ps[0]]["step"] == 9


def test_parts_of_mixed_and_others_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = T.MuonAdamW(model, lr=0.01, **EAGER)
    ps = list(model.parameters())
    step(optimizer, ps)
    optimizer.state[ps[0]]["mine"] = torch.ones(2)
    optimizer.reset()
    assert optimizer.state[ps[0]].pop("mine").tolist() == [1.0, 1.0]
    for state in optimizer.state.values():
        assert all(x.count_nonzero() == 0 for x in state.values())


def test_not_within_a_cycle_of_release() -> None:
    model = nn.Linear(4, 2)
    optimizer = T.AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    options: dict[str, Any] = {"accumulation": "buffer", "accumulation_steps": 2}
    T.prepare_for_gradient_release(model, optimizer, **options)
    for i in range(3):
        model(torch.ones(1, 4)).sum().backward()
        if i == 1:
            optimizer.reset()
            assert optimizer.state[model.weight]["step"] == 0


# Written in eval mode


@pytest.mark.parametrize("storage", [None, "exact", T.Storage("kahan8")], ids=str)
def test_what_is_written_in_eval_mode_is_kept(storage: Any) -> None:
    optimizer, ps = trained(T.ScheduleFreeAdamW, storage)
    before = ps[0].detach().clone()
    optimizer.eval()
    with torch.no_grad():
        ps[0][2] = 5.0
    shown = ps[0].detach().clone()
    with pytest.warns(UserWarning, match=r"train\(\): params\[0\] were written to in eval"):
        optimizer.train()
    entry, rest = optimizer.state[ps[0]], torch.arange(96) != 2
    assert torch.equal(ps[0][rest], before[rest]) and (ps[0][2] == 5.0).all()
    assert (entry["z"][2] == 5.0).all() and entry["exp_avg_sq"][2].count_nonzero() == 128
    assert entry["kahan_comp"][2].count_nonzero() == 0
    optimizer.eval()  # the average is what was written
    assert torch.equal(ps[0], shown)
    optimizer.train()


def test_weights_that_are_loaded_in_eval_mode_are_kept() -> None:
    optimizer, ps = trained(T.ScheduleFreeAdamW, dtype=torch.float32)
    optimizer.eval()
    model, other = nn.ParameterList(ps), nn.ParameterList([torch.randn_like(p) for p in ps])
    model.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match=r"params\[0\], \[1\] were written"):
        optimizer.train()
    assert all(map(torch.equal, ps, other))
    # Together with the optimizer's state, in either order, it is a checkpoint.
    step(optimizer, ps)
    kept = [p.detach().clone() for p in ps]
    optimizer.eval()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for order in (1, -1):
        twin, qs = trained(T.ScheduleFreeAdamW, dtype=torch.float32)
        loads = [
            lambda qs=qs: nn.ParameterList(qs).load_state_dict(saved[0]),
            lambda twin=twin: twin.load_state_dict(saved[1]),
        ]
        for load in loads[::order]:
            load()
        twin.train()
        assert all(map(torch.equal, qs, kept))
    twin, qs = trained(T.ScheduleFreeAdamW, dtype=torch.float32)
    twin.load_state_dict(saved[1])  # alone: train() sets the parameters
    twin.train()
    assert all(map(torch.equal, qs, kept))


def test_copies_of_the_same_weights_are_no_writes() -> None:
    """As of an average that is swapped in and out, or sent to processes."""
    optimizer, ps = trained(T.ScheduleFreeSGD, dtype=torch.float32)
    before: list[Tensor] = [p.detach().clone() for p in ps]
    optimizer.eval()
    with torch.no_grad():
        for p in ps:
            kept = p.clone()
            p.zero_()
            p.copy_(kept)
    optimizer.train()
    assert all(map(torch.equal, ps, before))
