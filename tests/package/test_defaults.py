"""torch's default dtype and device, which are the user's, change nothing that is computed.

The package never creates a tensor in them: a step count in bfloat16 stops at 256, and a
number on another device cannot meet a parameter on this one.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, CLASSES, MATRICES, Case
from tiers import built, row
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

import optimi_func
from optimi_func import population, schedules, transforms
from optimi_func.core.runtime import runtime
from optimi_func.execution import guards

pytestmark = pytest.mark.filterwarnings(
    "ignore:eps=", "ignore:weight_decay=", "ignore:max_lr=", "ignore:.*hardly moves"
)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ROOT = Path(optimi_func.__file__).parent


@contextmanager
def default(dtype: torch.dtype, device: str = "") -> Iterator[None]:
    """Within, tensors are created in another dtype, and on another device."""
    with ExitStack() as stack:
        torch.set_default_dtype(dtype)
        stack.callback(torch.set_default_dtype, F32)
        if device:
            stack.enter_context(torch.device(device))
        yield


WITHIN = {
    "bfloat16": partial(default, BF16),
    "float64": partial(default, F64),
    # Where an operation on a tensor of the CPU and one of this device raises.
    "meta": partial(default, F32, "meta"),
    "both": partial(default, BF16, "meta"),
}
within = pytest.mark.parametrize("context", [pytest.param(x, id=x) for x in WITHIN])


# The sources


def factories() -> set[str]:
    """Return the names of torch's functions that create tensors on the default device."""
    return {f.__name__ for f in _device_constructors() if hasattr(torch, f.__name__)}


# Calls whose dtype is that of their argument: indices, as integers or bools.
INDICES = {"torch.as_tensor(rows, device='cpu')"}
INDICES |= {
    "torch.as_tensor(index if isinstance(index, Tensor) else list(index), device=device)"
}


def leaks(source: str) -> list[str]:
    """Return the calls of a module that create a tensor in a default dtype or device."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id == "torch"):
            continue
        names, text = {x.arg for x in node.keywords}, ast.unparse(node)
        lacks = {"device"} if text in INDICES else {"dtype", "device"}
        # `**how` is looked up by hand: it has both.
        if name in factories() and None not in names and not lacks <= names:
            found.append(f"{node.lineno}: {text}")
    return found


def test_leaks_are_found() -> None:
    assert leaks("x = torch.zeros(3, device='cpu')\ny = torch.empty_like(x)") == [
        "1: torch.zeros(3, device='cpu')"
    ]
    assert leaks("torch.full((), n, dtype=d)") and leaks("f(torch.as_tensor(x))")
    assert not leaks("torch.ones(3, dtype=d, device='cpu')")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: p.stem)
def test_no_call_leaves_dtype_or_device_to_the_default(path: Path) -> None:
    """Write both: the user may have set another default."""
    assert leaks(path.read_text()) == []


# Steps


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing was traced, recorded or tried out yet."""
    for cls in {*CLASSES.values()}:
        for name, x in ("_rules", {}), ("_known", []):
            monkeypatch.setattr(cls, name, x)
        monkeypatch.setattr(cls.pure, "_made", {})  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "programs", type(runtime.programs)())
    monkeypatch.setattr(runtime, "inits", type(runtime.inits)())
    monkeypatch.setattr(runtime, "exact_codecs", {})
    guards._guards_work.cache_clear()


def params(name: str = "adamw", dtype: torch.dtype = F32) -> list[Tensor]:
    """Return two parameters, which the default dtype and device do not change."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 3) if name in MATRICES else (5,)]
    how: dict[str, Any] = {"dtype": F32, "device": "cpu"}
    return [torch.randn(x, generator=generator, **how).to(dtype) for x in shapes]


def tensors(*trees: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(trees) if isinstance(x, Tensor)]


def by_class(case: Case, **how: Any) -> list[Tensor]:
    ps = [nn.Parameter(p) for p in params(case.name)]
    optimizer: Any = case.cls(ps, lr=0.02, **{"compile": False, **case.options, **how})
    for i in range(4):
        for p in ps:
            p.grad = torch.cos(p.detach() + i)
        optimizer.step()
    return tensors(ps, [optimizer.state[p] for p in ps])


def by_step(case: Case) -> list[Tensor]:
    ps, value = params(case.name), case.functional()
    state: Any = value.init(ps)
    for i in range(4):
        ps, state = value.step(ps, [torch.cos(p + i) for p in ps], state)
    return tensors(ps, state, value.eval_params(ps, state))


def check(make: Callable[[], list[Tensor]], context: str) -> None:
    """Within another default, the results are the same tensors, bit for bit."""
    with WITHIN[context]():
        got = make()
    want = make()
    assert len(got) == len(want) and want
    for x, y in zip(got, want):
        assert (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape)
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def rows() -> list[Any]:
    """Every rule with every option: without options within all defaults at once."""
    tried = [case for case in CASES if "split" not in case.options]
    pairs = [
        row(case, context, id=f"{case.id}-{context}", tier="full" if case.options else "")
        for case in tried
        for context in ("both", "float64")
    ]
    return built(pairs)


@pytest.mark.parametrize(("case", "context"), rows())
def test_classes_step_alike(case: Case, context: str, untried: None) -> None:
    check(partial(by_class, case), context)


@pytest.mark.parametrize(("case", "context"), rows())
def test_pure_steps_are_alike(case: Case, context: str, untried: None) -> None:
    check(partial(by_step, case), context)


@pytest.mark.kernels
@within
def test_compiled_steps_are_alike(context: str, untried: None, monkeypatch: Any) -> None:
    """Also where the kernel is compiled within."""
    monkeypatch.setattr(runtime, "kernels", {})
    check(partial(by_class, Case("adamw"), compile=True), context)


# What surrounds a step


def trained(**options: Any) -> tuple[Any, list[nn.Parameter]]:
    """Return AdamW after three steps."""
    ps = [nn.Parameter(p) for p in params()]
    named = list(zip("ab", ps))
    optimizer = optimi_func.AdamW(named, lr=0.1, **{"compile": False, **options})
    step(optimizer, ps, 3)
    return optimizer, ps


def step(optimizer: Any, ps: list[Any], times: int) -> None:
    for i in range(times):
        for p in ps:
            p.grad = torch.cos(p.detach().float() + i).to(p.dtype)
        optimizer.step()


def states(optimizer: Any) -> list[Tensor]:
    return tensors([{**x} for x in optimizer.state.values()])


def saved_and_loaded() -> list[Tensor]:
    optimizer, ps = trained()
    other, qs = trained()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(other, qs, 1)
    optimizer.load_state_dict(optimizer.decoded_state_dict())
    optimizer.reset(ps[0])
    optimizer.reset(ps[1], rows=[1, 2])
    step(optimizer, ps, 1)
    return [*ps, *qs, *states(other), *states(optimizer)]


def of_torch() -> list[Tensor]:
    """To torch.optim and back, also from entries with numbers for tensors."""
    optimizer, ps = trained()
    theirs = torch.optim.AdamW(ps, lr=0.1)
    theirs.load_state_dict(optimizer.torch_state_dict())
    plain = theirs.state_dict()
    for entry in plain["state"].values():
        entry["step"] = int(entry["step"])
    optimizer.load_state_dict(plain)
    step(optimizer, ps, 1)
    sgd = optimi_func.SGD(ps, lr=0.1, momentum=0.9, compile=False)
    sgd.load_state_dict(torch.optim.SGD(ps, lr=0.1, momentum=0.9).state_dict())
    step(sgd, ps, 2)
    return [*ps, *states(optimizer), *states(sgd)]


def of_optimi() -> list[Tensor]:
    optimizer, ps = trained()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group |= {"setup": True, "beta1": 0.9, "beta2": 0.99, "step": 3}
        del group["betas"]
    for entry in saved["state"].values():
        entry["kahan_comp"] = None
        del entry["step"]
    optimizer.load_state_dict(saved)
    step(optimizer, ps, 1)
    return [*ps, *states(optimizer)]


def of_masters() -> list[Tensor]:
    how: dict[str, Any] = {"device": "cpu", "dtype": BF16}
    model = nn.Linear(4, 3, **how)
    with torch.no_grad():
        for p, x in zip(model.parameters(), params()):
            p.copy_(x[: p.shape[0]] if p.dim() > 1 else x[:3])
    optimizer = optimi_func.AdamW(model.parameters(), lr=0.1, compile=False)
    ps = list(model.parameters())
    step(optimizer, ps, 3)
    masters = optimizer.master_state_dict(model)
    optimizer.load_master_state_dict(model, masters)
    step(optimizer, ps, 1)
    return [*ps, *states(optimizer), *masters.values()]


def functional_and_back() -> list[Tensor]:
    optimizer, ps = trained()
    value, state = optimizer.functional()
    tree = dict(zip("ab", [p.detach().clone() for p in ps]))
    state = state._replace(step=state.step + 300.0)
    for _ in range(2):
        tree, state = value.step(tree, {k: torch.cos(p) for k, p in tree.items()}, state)
    optimizer.load_functional(state)
    step(optimizer, ps, 1)
    return [*tensors(tree, state), *ps, *states(optimizer)]


def released(**how: Any) -> list[Tensor]:
    ps = nn.ParameterList([nn.Parameter(p) for p in params()])
    options: dict[str, Any] = {"lr": 0.1, "gradient_release": True, "compile": False}
    optimizer = optimi_func.AdamW(ps.parameters(), **options)
    with optimi_func.prepare_for_gradient_release(ps, optimizer, **how) as handle:
        for _ in range(3):
            total = sum([torch.sin(p).sum() for p in ps])
            assert isinstance(total, Tensor)
            total.backward()
            optimizer.step()
            handle.load_state_dict(handle.state_dict())
        norm = handle.grad_norm if "grad_norm" in how else None
    return [*ps, *states(optimizer), *tensors(norm)]


def averaged() -> list[Tensor]:
    optimizer, ps = trained()
    ema = optimi_func.EMA(optimizer, schedules.linear(0.5, 0.9, 300))
    for _ in range(3):
        step(optimizer, ps, 1)
        ema.update()
    again = optimi_func.EMA(optimizer, 0.9)
    again.load_state_dict(ema.state_dict())
    again.update()
    return tensors(ema.averages, again.averages, ema.state_dict())


def of_a_population() -> list[Tensor]:
    lrs = torch.linspace(0.1, 0.3, 3, dtype=F32, device="cpu")
    first = dict(zip("ab", params()))
    members = population.init(optimi_func.adamw, first, {"lr": lrs, "eps": 1e-3}, n=3)
    for _ in range(2):
        grads = {k: torch.cos(p) for k, p in members.params.items()}
        members = population.step(optimi_func.adamw, members, grads)
        members = population.clone(members, [0], [2])
        members = population.select(members, [1, 2, 0])
    losses, grads = population.loss_and_grad(lambda p: p["a"].sum(), members)
    return tensors(members.params, members.state, members.hyper, losses, grads)


def transformed() -> list[Tensor]:
    value: Any = transforms.chain(
        transforms.clip_global_norm(schedules.linear(1.0, 0.5, 300)),
        transforms.clip_param_norm(1.0),
        transforms.clip_value(0.5),
        transforms.centralize(),
        transforms.add_noise(0.1, seed=0),
        transforms.ema(transforms.apply_if_finite(optimi_func.adamw(lr=0.1)), 0.9),
    )
    value = transforms.every_k(value, 2)
    value = transforms.masked(value, lambda path, p: path == "a")
    tree = dict(zip("ab", params()))
    state = value.init(tree)
    for i in range(6):
        tree, state = value.step(
            tree, {k: torch.cos(p + i) for k, p in tree.items()}, state
        )
    return tensors(tree, state, transforms.ascent(tree, tree, 0.1))


def steps_of(state: Any) -> list[Tensor]:
    return [state.step, *(steps_of(state.inner) if hasattr(state, "inner") else [])]


def later(state: Any) -> Any:
    """Return the state with 255 more steps, in all of its counts."""
    inner = {"inner": later(state.inner)} if hasattr(state, "inner") else {}
    return state._replace(step=state.step + 255.0, **inner)


def counted_past_256() -> list[Tensor]:
    """Each count of a pure step: bfloat16 has no 257."""
    value: Any = optimi_func.adamw(lr=schedules.warmup_cosine(0.1, 10, 600))
    value = transforms.ema(value, schedules.linear(0.5, 0.99, 600))
    value = transforms.chain(transforms.clip_global_norm(lambda t: 2.0 - t / 400), value)
    p, g = [x.new_ones(2) for x in params()]
    state = value.init(p)
    state = later(state)
    for _ in range(4):
        p, state = value.step(p, g, state)
    assert {float(x) for x in steps_of(state)} == {259.0}
    return tensors(p, state)


def scheduled() -> list[Tensor]:
    found: list[Tensor] = []
    for schedule in (
        schedules.linear(0.0, 0.1, 10),
        schedules.cosine(0.1, 0.0, 10),
        schedules.warmup_cosine(0.1, 2, 10),
        schedules.wsd(0.1, warmup=2, total=9, decay=4),
        schedules.one_cycle(0.1, 10),
    ):
        value = optimi_func.adamw(lr=schedule, eps=schedules.linear(1e-8, 1e-3, 10))
        ps = params()
        state = value.init(ps)
        for _ in range(4):
            ps, state = value.step(ps, ps, state)
        found += tensors(ps, state)
    return found


def scheduled_class() -> list[Tensor]:
    optimizer, ps = trained()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules.cosine(1.0, 0.0, 9))
    for _ in range(4):
        step(optimizer, ps, 1)
        schedule.step()
    return [*ps, *states(optimizer)]


def fitted() -> list[Tensor]:
    fit, at = optimi_func.lbfgs(), params()[1].requires_grad_()
    found, state = fit.solve(lambda p, at: ((p - at) ** 4).sum(), params()[1] + 1.0, at)
    (slope,) = torch.autograd.grad(found.sum(), at)
    a = at.detach().abs().requires_grad_()
    root = optimi_func.implicit_root(lambda x, a: x**3 - a, a.detach() ** (1 / 3), a)
    return [*tensors(found, state), slope, *torch.autograd.grad(root.sum(), a)]


def unrolled() -> list[Tensor]:
    ps = dict(zip("ab", params()))
    lr = params()[1][0].abs().requires_grad_()
    run = optimi_func.unroll(
        optimi_func.adamw,
        lambda p, i: sum([torch.sin(x + i).sum() for x in p.values()]),
        ps,
        None,
        [0, 1, 2],
        hyper={"lr": lr},
    )
    total = sum([x.sum() for x in run.params.values()])
    assert isinstance(total, Tensor)
    return [*tensors(run), *torch.autograd.grad(total, lr)]


def skipped() -> list[Tensor]:
    optimizer, ps = trained(skip_nonfinite="step")
    for i in range(3):
        for p in ps:
            p.grad = torch.full_like(p, float("nan") if i == 1 else 1.0)
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    total = scaler.scale(sum([torch.sin(p).sum() for p in ps]))
    total.backward()
    optimizer.zero_grad()
    return [*ps, *states(optimizer)]


def clipped() -> list[Tensor]:
    ps = [nn.Parameter(p) for p in params()]
    ps[0].grad = torch.cos(ps[0].detach())
    norm = optimi_func.clip_grad_norm_(ps, 0.1)
    none = optimi_func.clip_grad_norm_([nn.Parameter(params()[0])], 0.1)
    return [norm, none, ps[0].grad]


def mixed() -> list[Tensor]:
    how: dict[str, Any] = {"device": "cpu", "dtype": F32}
    model = nn.Sequential(nn.Linear(4, 4, **how), nn.Linear(4, 4, **how))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.cos(p.new_ones(p.shape).cumsum(-1) + i))
    optimizer = optimi_func.MuonAdamW(model, lr=0.1, compile=False)
    step(optimizer, list(model.parameters()), 3)
    return [*model.parameters(), *states(optimizer)]


def stored_in(dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Moments in 8 bits, compensations, and noise."""
    ps = [nn.Parameter(torch.cos(p.new_ones(64, 128).to(dtype))) for p in params()]
    optimizer = optimi_func.AdamW(ps, lr=0.1, compile=False, **options)
    step(optimizer, ps, 3)
    return [*ps, *states(optimizer)]


SCENES: dict[str, Callable[[], list[Tensor]]] = {
    "saved": saved_and_loaded,
    "of torch": of_torch,
    "of optimi": of_optimi,
    "of masters": of_masters,
    "functional": functional_and_back,
    "released": released,
    "released with sums": partial(
        released,
        accumulation="buffer",
        accumulation_steps=2,
        clip_global_norm=0.5,
        grad_norm=True,
    ),
    "released and skipped": partial(released, skip_nonfinite=True),
    "EMA": averaged,
    "population": of_a_population,
    "transforms": transformed,
    "256 steps": counted_past_256,
    "schedules": scheduled,
    "schedule of a class": scheduled_class,
    "fitting": fitted,
    "unroll": unrolled,
    "skipped": skipped,
    "clipped": clipped,
    "mixed": mixed,
    "compact": partial(stored_in, BF16, storage="compact"),
    "exact": partial(stored_in, BF16, storage="exact"),
    "stochastic": partial(stored_in, BF16, storage=optimi_func.Storage(param="stochastic")),
    "capturable": partial(by_class, Case("adamw"), capturable=True),
    "foreach": partial(by_class, Case("adamw"), compile=None, foreach=True),
}


@within
@pytest.mark.parametrize("scene", SCENES)
def test_what_surrounds_a_step_is_alike(scene: str, context: str, untried: None) -> None:
    check(SCENES[scene], context)
