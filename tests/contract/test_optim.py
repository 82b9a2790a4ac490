"""`optimi_func.optim` beside torch.optim: inputs of torch's own tests, and programs."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from cases import assert_moved_alike
from tiers import built, row
from torch import Tensor
from torch.testing._internal.common_optimizers import optim_db

import optimi_func
from optimi_func import Storage, optim

EAGER = {"compile": False}
NAMES = sorted({info.optim_cls.__name__ for info in optim_db} - {"SparseAdam", "LBFGS"})
# Torch takes no complex parameters in these, and says so in `supports_complex`.
DTYPES = (torch.float64, torch.complex128, torch.float32)
# Iterations in bfloat16 differ where a sum is rounded in another order.
TOLERANCE = {"Muon": 0.05}


@pytest.fixture(autouse=True)
def double() -> Any:
    """Torch keeps its running products in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs() -> list[Any]:
    """A row for each class, its inputs and a dtype; of float32 the default alone."""
    rows: list[Any] = []
    for info in optim_db:
        name = info.optim_cls.__name__
        for dtype in DTYPES:
            if name not in NAMES or (dtype.is_complex and not info.supports_complex):
                continue
            given = info.optim_inputs_func(device="cpu")
            for one in given if dtype != torch.float32 else given[:1]:
                label = f"{name}-{one.desc}-{str(dtype)[6:]}"
                rows.append(row(name, one.kwargs, dtype, id=label))
    return built(rows)


def trained(cls: Any, kwargs: Any, dtype: torch.dtype, **more: Any) -> list[Tensor]:
    """Movements of two matrices in 40 steps with a scheduler."""
    random = torch.Generator().manual_seed(0)
    ps = [torch.randn(n, 4, dtype=dtype, generator=random) for n in (5, 4)]
    starts = [p.clone() for p in ps]
    optimizer = cls([p.requires_grad_() for p in ps], **copy.deepcopy(kwargs), **more)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10)
    for _ in range(40):
        gs = [torch.randn(p.shape, dtype=dtype, generator=random) for p in ps]
        optimizer.zero_grad()
        sum([(p * g.conj()).real.sum() for p, g in zip(ps, gs)]).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() - start for p, start in zip(ps, starts)]


@pytest.mark.parametrize(("name", "kwargs", "dtype"), inputs())
def test_inputs_of_torchs_own_tests(name: str, kwargs: Any, dtype: torch.dtype) -> None:
    usual = 1e-11 if dtype != torch.float32 else 2e-4
    theirs = trained(getattr(torch.optim, name), kwargs, dtype)
    hows = [EAGER]
    if dtype == torch.float32:
        hows.append({"foreach": True} if name != "Muon" else EAGER)
    for more in hows:
        given = {**kwargs, **more}
        ours = trained(getattr(optim, name), given, dtype)
        for got, want in zip(ours, theirs):
            pair = [torch.view_as_real(x) if dtype.is_complex else x for x in (got, want)]
            zero = torch.zeros_like(pair[0])
            assert_moved_alike(zero, *pair, TOLERANCE.get(name, usual))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_torchs_and_then_ours(name: str) -> None:
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    assert issubclass(ours, getattr(optimi_func, name)) and ours.__name__ == name
    found = inspect.signature(ours).parameters
    known = inspect.signature(theirs).parameters
    assert [*found][: len(known)] == [*known]
    for key, p in known.items():
        assert (found[key].default, found[key].kind) == (p.default, p.kind)
    rest = [*found.values()][len(known) :]
    assert {p.kind for p in rest} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match=f"{name} has no argument 'lrr': did you mean 'lr'"):
        ours([torch.ones(2, 2)], lrr=0.1)


@pytest.mark.filterwarnings("ignore:betas")
@pytest.mark.parametrize("name", NAMES)
def test_what_torch_takes_besides(name: str) -> None:
    known = inspect.signature(getattr(torch.optim, name)).parameters
    w = torch.ones(2, 2, requires_grad=True)
    for key in {"fused", "capturable", "foreach"} & {*known}:
        for x in (None, False, True):
            given = {key: x} if (key, x) != ("capturable", None) else {}
            assert getattr(optim, name)([w], **given).param_groups[0]["lr"] > 0
    if "differentiable" in known:
        with pytest.raises(ValueError, match="differentiable=True: allowed is False"):
            getattr(optim, name)([w], differentiable=True)
    low = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    made = getattr(optim, name)([low], storage=Storage("exact"))
    assert made.param_groups[0]["storage"].param == "exact"
    w.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(TypeError, match=r"torch\.optim\.SparseAdam"):
        getattr(optim, name)([w], **EAGER).step()


def test_all_else_is_torchs() -> None:
    assert {*optim.__all__} == {*torch.optim.__all__}
    for name in ("LBFGS", "SparseAdam", "Optimizer", "lr_scheduler", "swa_utils"):
        assert getattr(optim, name) is getattr(torch.optim, name)
    assert optimi_func.LBFGS is torch.optim.LBFGS
    space: dict[str, Any] = {}
    exec("from optimi_func.optim import *", space)
    assert space["SparseAdam"] is torch.optim.SparseAdam and space["SGD"] is optim.SGD
    with pytest.raises(AttributeError, match="Rmsprop"):
        _ = optim.Rmsprop


def test_torchs_names_in_a_group() -> None:
    w, v = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    groups = [{"params": [w], "d": 0.5, "beta2_decay": -0.6}, {"params": [v]}]
    made = optim.Adafactor(groups, d=2.0, **EAGER)
    assert [g["clip_threshold"] for g in made.param_groups] == [0.5, 2.0]
    assert [g["decay_rate"] for g in made.param_groups] == [-0.6, -0.8]
    assert "d" not in made.param_groups[0]


def test_copies_and_pickles() -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = optim.NAdam([w], **EAGER)
    optimizer.step(w.sum().backward)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is optim.NAdam
        (p,) = other.param_groups[0]["params"]
        assert other.state[p]["mu_product"] == optimizer.state[w]["mu_product"]


PROGRAM = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
x, y = torch.randn(32, 4), torch.randint(3, (32,))
no_decay = [p for p in model.parameters() if p.dim() == 1]
decay = [p for p in model.parameters() if p.dim() > 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "lr": 0.02}]
"""
LOOP = """
average = optim.swa_utils.AveragedModel(model)
losses = []
for i in range(12):
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    average.update_parameters(model)
    losses.append(loss.item())
    if i == 5:
        saved = optimizer.state_dict()
        optimizer = make()
        optimizer.load_state_dict(saved)
        scheduler.optimizer = optimizer
losses.append(nn.functional.cross_entropy(average(x), y).item())
"""
ONE_CYCLE = "optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)"
MAKERS = {
    "optim.SGD(groups, 0.1, 0.9, 0.1, 0.01, **more)": ONE_CYCLE,
    "optim.Adam(groups, 1e-2, (0.8, 0.99), 1e-3, 0.01, True, **more)": ONE_CYCLE,
    "optim.RMSprop(groups, 1e-2, 0.9, 1e-6, 0, 0.5, True, **more)": ONE_CYCLE,
    "optim.Adagrad(groups, 0.1, 0.01, 0.0, 0.3, **more)": (
        "optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)"
    ),
    "optim.ASGD(groups, 0.1, 1e-2, 0.6, 3, **more)": (
        "optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 8)"
    ),
    "optim.Rprop(model.parameters(), 0.01, (0.4, 1.3), (1e-5, 1.0), **more)": (
        "optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 8)"
    ),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step", "ignore:max_lr=")
def test_a_program_runs_unchanged(make: str) -> None:
    """Groups, a scheduler, which may end at lr = 0, clipping, an average, a resumed run."""
    made = f"make = lambda: {make}\noptimizer = make()\nscheduler = {MAKERS[make]}\n"
    found: list[list[float]] = []
    for module, more in ((torch.optim, {}), (optim, EAGER)):
        space = {"torch": torch, "nn": torch.nn, "optim": module, "more": more}
        exec(PROGRAM + made + LOOP, space)
        found.append(space["losses"])
    assert found[1] == pytest.approx(found[0], rel=1e-10) and found[0][0] > found[0][-2]


OPTIONS = {"t0": 4, "lambd": 0.1, "alpha": 0.6}


def test_the_numbers_of_asgd_and_nadam_are_torchs() -> None:
    for name, options in (("ASGD", OPTIONS), ("NAdam", {"momentum_decay": 0.1})):
        states: list[Any] = []
        for module, more in ((torch.optim, {}), (optim, EAGER)):
            w = torch.linspace(-1.0, 1.0, 5).requires_grad_()
            optimizer = getattr(module, name)([w], lr=0.1, **options, **more)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for _ in range(9):
                optimizer.zero_grad()
                optimizer.step((w**2).sum().backward)
                scheduler.step()
            states.append(optimizer.state[w])
        assert states[0].keys() == states[1].keys()
        for key, x in states[0].items():
            torch.testing.assert_close(states[1][key].double(), x, rtol=1e-12, atol=1e-14)
        assert name == "NAdam" or 0 < states[0]["mu"] < 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"])
def test_compiled_steps_are_torchs(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        kwargs = {"lr": 0.1}
        theirs = trained(getattr(torch.optim, name), kwargs, dtype)
        ours = trained(getattr(optim, name), kwargs, dtype, compile=True)
        for got, want in zip(ours, theirs):
            tolerance = 1e-11 if dtype == torch.float64 else 2e-4
            assert_moved_alike(torch.zeros_like(got), got, want, tolerance)
