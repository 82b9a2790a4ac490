"""`optimi_func.optim` beside torch.optim: inputs of torch's own tests, and programs."""

import copy
import importlib
import inspect
import pickle
import pkgutil
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


def test_public_names_mean_what_they_mean_in_torch() -> None:
    """All that torch.optim has, in any version, and nothing beside it."""
    public = [name for name in dir(torch.optim) if not name.startswith("_")]
    assert {*optim.__all__} == {*torch.optim.__all__} <= {*public}
    assert {name for name in dir(optim) if not name.startswith("_")} == {*public}
    for name in public:
        theirs, found = getattr(torch.optim, name), getattr(optim, name)
        if name in NAMES:
            assert issubclass(found, getattr(optimi_func, name)) and found is not theirs
        else:
            assert found is theirs, name
    space: dict[str, Any] = {}
    exec("from optimi_func.optim import *", space)
    assert {*space} - {"__builtins__"} == {*torch.optim.__all__}
    for name in torch.optim.__all__:
        assert space[name] is getattr(optim, name)
    assert issubclass(optim.AdamW, optim.Adam)
    assert optimi_func.LBFGS is torch.optim.LBFGS
    with pytest.raises(AttributeError, match="Rmsprop"):
        _ = optim.Rmsprop


def test_modules_are_torchs_with_our_classes() -> None:
    """In both ways to reach them: as an attribute, and by an import."""
    for info in pkgutil.iter_modules(torch.optim.__path__):
        theirs = importlib.import_module(f"torch.optim.{info.name}")
        found = importlib.import_module(f"optimi_func.optim.{info.name}")
        if hasattr(torch.optim, info.name):
            assert getattr(optim, info.name) is found
        for name, x in vars(theirs).items():
            ours = isinstance(x, type) and name in NAMES
            want = getattr(optim, name) if ours else x
            assert _undisabled(getattr(found, name)) is _undisabled(want)
        assert {*vars(found)} == {*vars(theirs)}


def _undisabled(x: Any) -> Any:
    """Return a function of torch as it was before Dynamo, once imported, replaced it."""
    return getattr(x, "_torchdynamo_orig_callable", x)


def test_torchs_functions_are_not_ours() -> None:
    """Torch's write to lists of tensors; before 2.15 the error says where ours are."""
    if torch.__version__ < "2.15":
        with pytest.raises(AttributeError, match=r"torch 2\.15.*optimi_func\.functional"):
            _ = optim.functional
        return
    assert optim.functional is torch.optim.functional
    p, g = torch.ones(2), torch.full((2,), 0.5)
    optim.functional.sgd(
        [p],
        [g],
        [None],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    assert torch.equal(p, torch.full((2,), 0.95))


def pair(name: str, **options: Any) -> Any:
    """An optimizer of torch's and one of ours, each with a matrix and a vector."""
    dims = [2] if name == "Muon" else [2, 1]
    both: list[Any] = []
    for module, more in ((torch.optim, {}), (optim, EAGER)):
        ps = [torch.linspace(-1, 1, 3**n).reshape([3] * n) for n in dims]
        ps = [p.requires_grad_() for p in ps]
        both.append((getattr(module, name)(ps, **options, **more), ps))
    return both


def stepped(both: Any, steps: int = 3) -> None:
    """Step all, and compare their parameters."""
    for i in range(steps):
        for optimizer, ps in both:
            for p in ps:
                p.grad = torch.arange(p.numel()).sub(3.0 - i).cos().reshape(p.shape)
            optimizer.step()
    # bfloat16 is slow and rough on most CPUs.
    rough = type(both[0][0]).__name__ == "Muon"
    for got, want in zip(both[1][1], both[0][1]):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-3 if rough else 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_torchs_keys(name: str) -> None:
    (theirs, _), (ours, _) = pair(name)
    known = {k: x for k, x in theirs.param_groups[0].items() if k != "params"}
    for found in (
        ours.param_groups[0],
        ours.defaults,
        ours.state_dict()["param_groups"][0],
    ):
        assert {k: found[k] for k in known} == known
    replaced = {"Adafactor": {"clip_threshold", "decay_rate"}}.get(name, set())
    replaced |= {"decouple_wd"} if "decoupled_weight_decay" in known else set()
    assert not replaced & {*ours.param_groups[0]}


def test_torchs_swap_of_parameters_and_state() -> None:
    """Steps on other tensors, which its context takes, and then on its own again."""
    both = pair("AdamW", lr=0.1)
    stepped(both)
    swapped: list[Any] = []
    states: list[Any] = []
    for optimizer, ps in both:
        qs = {str(i): p.detach().add(1.0).requires_grad_() for i, p in enumerate(ps)}
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.05
        with optim.swap_in_optimizer_params_and_state(optimizer, qs, saved):
            for q in qs.values():
                q.grad = q.detach().cos()
            optimizer.step()
            optimizer.step()
        swapped.append((optimizer, [*qs.values()]))
        states.append([entry["exp_avg"] for entry in saved["state"].values()])
    stepped(swapped, 0)
    for got, want in zip(*states):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    stepped(both)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *[(name, "decoupled_weight_decay", True) for name in ("Adam", "NAdam", "RAdam")],
        ("AdamW", "decoupled_weight_decay", False),
        ("Adafactor", "d", 0.5),
        ("Adafactor", "beta2_decay", -0.3),
        ("SGD", "nesterov", True),
        ("RMSprop", "centered", True),
        ("Adam", "maximize", True),
    ],
)
def test_what_is_written_to_a_group_is_read_at_the_next_step(
    name: str, key: str, value: Any
) -> None:
    usual = {"momentum": 0.9} if name == "SGD" else {}
    usual |= {"lr": 0.3} if name == "Adafactor" else {"weight_decay": 0.3}
    both = pair(name, **usual)
    others = pair(name, **usual)
    for optimizer, _ in both:
        assert optimizer.param_groups[0][key] != value
        optimizer.param_groups[0][key] = value
    stepped(both, 7)
    stepped(others, 7)
    assert (both[1][1][0] - others[1][1][0]).abs().max() > 1e-4
    # A group that is added has it too.
    w = torch.ones(3, 3, requires_grad=True)
    both[1][0].add_param_group({"params": [w], key: value})
    assert both[1][0].param_groups[1][key] == value


@pytest.mark.parametrize("name", NAMES)
def test_plain_states_go_to_torch_and_back(name: str) -> None:
    given: dict[str, Any] = {"Adafactor": {"d": 1.5, "beta2_decay": -0.5}}.get(name, {})
    if name in ("Adam", "NAdam", "RAdam"):
        given = {"decoupled_weight_decay": True, "weight_decay": 0.3}
    if name == "SGD":
        given = {"momentum": 0.9, "nesterov": True}
    first, (theirs, others) = pair(name, **given), pair(name)
    stepped(first)
    for (old, ps), (new, qs) in zip(first, [others, theirs]):  # torch's to ours, and ours
        with torch.no_grad():
            [q.copy_(p) for p, q in zip(ps, qs)]
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for key, value in given.items():
        assert theirs[0].param_groups[0][key] == others[0].param_groups[0][key] == value
    stepped([theirs, others])
    stepped(first)
    stepped([first[0], theirs], 0)


def test_states_of_the_package_itself_load_too() -> None:
    for name, ours, theirs in (
        ("Adam", {"decouple_wd": True}, {"decoupled_weight_decay": True}),
        (
            "RAdam",
            {"decouple_wd": True, "torch_form": True},
            {"decoupled_weight_decay": True},
        ),
        (
            "Adafactor",
            {"clip_threshold": 1.5, "decay_rate": -0.5, "torch_form": True},
            {"d": 1.5, "beta2_decay": -0.5},
        ),
    ):
        w = torch.ones(3, 3, requires_grad=True)
        package, torchs = getattr(optimi_func, name), getattr(optim, name)
        one, two = package([w], lr=0.1, **ours, **EAGER), torchs([w], **EAGER)
        two.load_state_dict(one.state_dict())
        assert {k: two.param_groups[0][k] for k in theirs} == theirs
        assert {*ours} & {*two.param_groups[0]} <= {"torch_form"}
        three = package([w], lr=0.1, **EAGER)
        three.load_state_dict(two.state_dict())
        assert {k: three.param_groups[0][k] for k in ours} == ours
        assert not {*theirs} & {*three.param_groups[0]}
        # What is written after that is kept too.
        (key, _), *_ = ours.items()
        three.param_groups[0][key] = value = 3.0 if name == "Adafactor" else False
        three.load_state_dict(three.state_dict())
        assert three.param_groups[0][key] == value
        (group,) = two.torch_state_dict()["param_groups"]
        assert {k: group[k] for k in theirs} == theirs and not {*ours} & {*group}


def test_decay_of_adamw_stays_decoupled() -> None:
    w = torch.ones(3, requires_grad=True)
    for cls in (torch.optim.Adam, optim.Adam):
        saved = cls([w], weight_decay=0.1).state_dict()
        made = optim.AdamW([w], **EAGER)
        with pytest.warns(UserWarning, match="decay changes its kind"):
            made.load_state_dict(saved)
        assert made.param_groups[0]["decoupled_weight_decay"] is True


def test_options_of_how_a_step_runs_are_read_at_every_step() -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = optim.Adam([w], **EAGER)
    w.grad = torch.ones(3)
    (group,) = optimizer.param_groups
    assert (group["fused"], group["differentiable"]) == (None, False)
    group["differentiable"] = True
    with pytest.raises(ValueError, match="differentiable=True: allowed is False"):
        optimizer.step()
    assert "differentiable: True" in repr(optimizer) and (w == 1).all()
    group |= {"differentiable": False, "compile": None, "fused": True}
    assert "runs: compiled\n" in repr(optimizer)
    optimizer.load_state_dict(torch.optim.Adam([w], foreach=True).state_dict())
    assert group is not optimizer.param_groups[0]
    assert optimizer.param_groups[0]["fused"] and not optimizer.param_groups[0]["foreach"]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_scaler_of_ones_own(name: str, capturable: bool) -> None:
    """As torch's step with fused=True, on which a GradScaler sets both."""
    torch.set_default_dtype(torch.float32)  # torch's kernel takes no other scale
    both: list[Any] = []
    ours = {"compile": False, "capturable": capturable}
    for module, more in ((torch.optim, {"fused": True}), (optim, ours)):
        w = torch.ones(3, requires_grad=True)
        optimizer = getattr(module, name)([w], lr=0.1, **more)
        rows: list[Tensor] = []
        for found, scale in ((0, None), (1, 4.0), (0, 4.0), (None, None)):
            w.grad = torch.tensor([8.0, -2.0, 1.0])
            optimizer.found_inf = None if found is None else torch.tensor(float(found))
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.step()
            rows.append(torch.stack([w.detach(), w.grad]) if found != 1 else w.detach())
        both.append((optimizer, rows))
    for got, want in zip(both[1][1], both[0][1]):
        torch.testing.assert_close(got, want)
    assert int(both[1][0].skipped_steps) == 1


class OwnDefaults(optim.SGD):
    """A subclass that calls torch's constructor alone, as some of torch.optim.SGD do."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 2.0) -> None:
        options = {"momentum": 0.9, "dampening": 0, "weight_decay": 0.1, "nesterov": True}
        defaults = {"lr": lr, **options, "scale": scale, **EAGER}
        torch.optim.Optimizer.__init__(self, params, defaults)


def test_a_subclass_with_defaults_of_its_own() -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = OwnDefaults([w])
    optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)], "lr": 0.5})
    assert [g["scale"] for g in optimizer.param_groups] == [2.0, 2.0]
    v = torch.ones(3, requires_grad=True)
    other = torch.optim.SGD([v], 0.1, 0.9, weight_decay=0.1, nesterov=True)
    for _ in range(3):
        for one, p in ((optimizer, w), (other, v)):
            one.zero_grad()
            one.step((p**2).sum().backward)
    torch.testing.assert_close(w, v)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["scale"] == 2.0


def test_adagrads_sums_are_shared() -> None:
    (theirs, ps), (ours, qs) = both = pair("Adagrad")
    theirs.share_memory()
    ours.share_memory()
    stepped(both)
    ours.share_memory()
    stepped(both)
    assert all(ours.state[q]["sum"].is_shared() for q in qs) and len(ps) == 2


INF = float("inf")
RANGES = [
    *[("Adafactor", {"beta2_decay": x}) for x in (0.0, -1.5, -INF)],
    ("Adafactor", {"d": INF}),
    ("SGD", {"momentum": 0.9, "dampening": -0.5}),
    ("SGD", {"momentum": 0.9, "dampening": True}),
    *[("ASGD", {"t0": x}) for x in (-3.0, INF)],
    ("Rprop", {"step_sizes": (0.0, INF)}),
]


@pytest.mark.parametrize(("name", "options"), RANGES)
def test_numbers_that_torch_takes(name: str, options: Any) -> None:
    stepped(pair(name, **options))


def test_numbers_that_torch_takes_and_we_do_not() -> None:
    """The rows of docs/from_torch.md."""
    w = torch.ones(3, 3, requires_grad=True)
    for name, options in (
        ("SGD", {"momentum": 1.0}),
        ("Muon", {"momentum": 1.0}),
        ("Muon", {"ns_steps": 0}),
        ("ASGD", {"lambd": -0.1}),
        ("ASGD", {"alpha": -0.1}),
        ("Rprop", {"step_sizes": (-1.0, 1.0)}),
        ("Adam", {"lr": INF}),
        ("Adam", {"eps": INF}),
    ):
        if name != "ASGD" or torch.__version__ < "2.15":  # which refuses them, as we do
            getattr(torch.optim, name)([w], **options)
        with pytest.raises(ValueError, match=f"Invalid.* {next(iter(options))}"):
            getattr(optim, name)([w], **options)
    with pytest.raises(ValueError, match=r"lr=-0\.1: allowed is finite, at least 0"):
        optim.SGD([{"params": [w], "lr": -0.1}], lr=0.1)
    for name in ("Adafactor", "Muon"):
        with pytest.raises(TypeError, match="complex"):
            getattr(optim, name)([w.detach().to(torch.complex64).requires_grad_()])


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


BETAS = {"betas": (0.8, 0.9)}
MORE: list[tuple[str, Any, Any, Any]] = [
    ("AdamW", {"lr": 0.1}, {"lr": number(0.1)}, {"foreach": True}),
    ("Adam", {"lr": 0.1}, {"lr": number(0.1)}, {"foreach": True}),
    ("Adam", BETAS, {"betas": (number(0.8), number(0.9))}, {"foreach": True}),
    ("Adam", BETAS, {"betas": (number(0.8), 0.9)}, EAGER),
    ("AdamW", BETAS, {"betas": (0.8, number(0.9))}, EAGER),
]


@pytest.mark.parametrize(("name", "floats", "tensors", "more"), MORE, ids=str)
def test_tensors_that_torch_refuses_and_we_take(
    name: str, floats: Any, tensors: Any, more: Any
) -> None:
    """The rows of docs/from_torch.md: torch's numbers, as if they were floats."""
    ps, qs = ([torch.full((2, 2), 3.0, requires_grad=True)] for _ in range(2))
    with pytest.raises(ValueError, match="Tensor"):
        getattr(torch.optim, name)(qs, **tensors, **({} if more is EAGER else more))
    theirs, ours = (
        getattr(torch.optim, name)(ps, **floats),
        getattr(optim, name)(qs, **tensors, **more),
    )
    stepped([(theirs, ps), (ours, qs)])
    assert (qs[0] - 3.0).abs().max() > 1e-4


def test_an_initial_value_of_adagrad_is_its_groups() -> None:
    """Torch starts the sums of all groups with the constructor's number."""
    for module, more, want in (
        (torch.optim, {}, [0.25, 0.25]),
        (optim, EAGER, [0.25, 4.0, 9.0]),
    ):
        ps = [torch.ones(2, requires_grad=True) for _ in want]
        groups = [
            {"params": p, "initial_accumulator_value": x}
            for p, x in zip(ps, (0.25, 4.0, 9.0))
        ]
        optimizer = module.Adagrad(groups[:2], initial_accumulator_value=0.25, **more)
        for late in groups[2:]:
            optimizer.add_param_group(late)
        for p in ps:
            p.grad = torch.zeros(2)
        optimizer.step()
        assert [optimizer.state[p]["sum"][0].item() for p in ps] == want


def test_modules_of_torch_optim_are_found() -> None:
    """As in `from torch.optim.lr_scheduler import StepLR` of pytorch/examples."""
    space: dict[str, Any] = {}
    for line in (
        "from optimi_func.optim.lr_scheduler import StepLR, LRScheduler",
        "from optimi_func.optim.swa_utils import AveragedModel",
        "from optimi_func.optim.optimizer import Optimizer, required",
        "from optimi_func.optim.adam import Adam",
        "from optimi_func.optim.adamw import AdamW, adamw",
        "from optimi_func.optim.sgd import SGD",
        "import optimi_func.optim.lr_scheduler as schedulers",
        "import optimi_func.optim.rmsprop as rmsprop",
        "from optimi_func.optim import lr_scheduler",
    ):
        exec(line, space)
    assert space["StepLR"] is torch.optim.lr_scheduler.StepLR
    assert space["schedulers"] is space["lr_scheduler"] is torch.optim.lr_scheduler
    assert space["Optimizer"] is torch.optim.Optimizer
    for name in ("Adam", "AdamW", "SGD"):
        assert space[name] is getattr(optim, name) is not getattr(torch.optim, name)
    assert space["rmsprop"].RMSprop is optim.RMSprop


@pytest.mark.parametrize("wide", [False, True])
def test_nadam_differs_from_torch_by_its_float32_mu_product(wide: bool) -> None:
    """torch keeps it in the default dtype: with float64 both are the same algorithm."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    try:
        moved: list[Tensor] = []
        for kind in (torch.optim.NAdam, optim.NAdam):
            w = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
            optimizer: Any = kind(
                [w], lr=0.1, foreach=False, **(EAGER if kind is optim.NAdam else {})
            )
            for t in range(3):
                w.grad = 2 * w.detach() + t
                optimizer.step()
            moved.append(w.detach())
    finally:
        torch.set_default_dtype(before)
    error = (moved[0] - moved[1]).abs().max().item()
    assert error < 1e-15 if wide else 1e-10 < error < 1e-8


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
