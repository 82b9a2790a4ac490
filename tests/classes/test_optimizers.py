"""The contract of torch.optim.Optimizer, as schedulers and training loops use it."""

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CLASSES, assert_moved_alike
from forked import run_script
from tiers import row
from torch.optim import lr_scheduler

import optimi_func
from optimi_func import SGD, Adam, AdamW, RAdam, Ranger
from optimi_func.classes import stepping
from optimi_func.execution import kernels

CLS = list(CLASSES.values())
EAGER = {"compile": False}


def params(*shapes, dtype=torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes or [(3, 2), (1, 2)]
    ]


def fill(ps, seed=0) -> None:
    torch.manual_seed(seed)
    for p in ps:
        p.grad = torch.randn(p.shape).to(p.dtype)


def train(optimizer, ps, steps=5, start=0) -> None:
    for i in range(start, start + steps):
        fill(ps, i)
        optimizer.step()


SIGNATURES = {
    "Adam": "params lr betas weight_decay eps decouple_wd TAIL",
    "RAdam": "params lr betas weight_decay eps decouple_wd TAIL",
    "AdamW": "params lr betas weight_decay eps TAIL",
    "StableAdamW": "params lr betas weight_decay eps TAIL",
    "Adan": "params lr betas weight_decay eps decouple_lr max_lr adam_wd REST",
    "Lion": "params lr betas weight_decay TAIL",
    "Ranger": "params lr betas weight_decay eps k alpha decouple_wd TAIL",
    "SGD": "params lr momentum weight_decay dampening decouple_wd decouple_lr max_lr"
    " torch_init REST",
}
REST = "kahan_sum foreach triton gradient_release"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_optimis(name: str) -> None:
    text = SIGNATURES[name].replace("TAIL", f"decouple_lr max_lr {REST}")
    signature = inspect.signature(getattr(optimi_func, name))
    positional = [
        n for n, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY
    ]
    assert positional == text.replace("REST", REST).split()
    defaults = {n: p.default for n, p in signature.parameters.items()}
    expected = {
        "betas": (0.9, 0.99),
        "weight_decay": 0,
        "eps": 1e-6,
        "k": 6,
        "alpha": 0.5,
    }
    expected |= {"decouple_wd": name == "Ranger", "kahan_sum": None, "triton": None}
    if name in ("AdamW", "StableAdamW"):
        expected["weight_decay"] = 1e-2
    if name == "Adan":
        expected |= {"betas": (0.98, 0.92, 0.99), "weight_decay": 2e-2}
    for key, value in expected.items():
        if key in defaults:
            assert defaults[key] == value, key


@pytest.mark.parametrize("cls", CLS)
def test_state_layout(cls) -> None:
    ps = params(dtype=torch.bfloat16)
    optimizer = cls(ps, lr=0.1, **EAGER)
    assert not optimizer.state
    train(optimizer, ps, 3)
    for p in ps:
        state = optimizer.state[p]
        assert state["step"].dtype == torch.float32
        assert state["step"].shape == ()
        assert state["step"] == 3
        rule = cls.factory(lr=0.1).rule
        counted = {"step", *rule.running._fields}
        assert set(state) == {*counted, *rule.state._fields, "kahan_comp"}
        assert all(state[name].shape == () for name in counted)


@pytest.mark.parametrize("cls", CLS)
def test_save_and_load_in_the_middle(cls) -> None:
    for dtype, more in (
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"state_dtype": torch.float32}),
    ):
        ps = params(dtype=dtype)
        optimizer = cls(ps, lr=0.1, **EAGER, **more)
        train(optimizer, ps, 5)
        file = io.BytesIO()
        torch.save(([p.detach() for p in ps], optimizer.state_dict()), file)
        train(optimizer, ps, 5, start=5)
        file.seek(0)
        values, state = torch.load(file, weights_only=True)
        qs = [torch.nn.Parameter(v) for v in values]
        resumed = cls(qs, lr=0.5, **EAGER, **more)
        resumed.load_state_dict(state)
        train(resumed, qs, 5, start=5)
        for p, q in zip(ps, qs):
            assert torch.equal(p, q)
            for name, x in optimizer.state[p].items():
                assert x.dtype == resumed.state[q][name].dtype
                assert torch.equal(x, resumed.state[q][name])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("cls", CLS)
def test_copies_go_on(cls, copier) -> None:
    ps = params()
    optimizer = cls(ps, lr=0.1, **EAGER)
    optimizer.mine = "kept"
    lr_scheduler.LambdaLR(optimizer, lambda i: 1.0)
    train(optimizer, ps)
    optimizer.optimizer_accumulation = True
    twin = copier(optimizer)
    assert twin.optimizer_accumulation is True
    optimizer.optimizer_accumulation = twin.optimizer_accumulation = False
    assert twin.mine == "kept"
    qs = twin.param_groups[0]["params"]
    train(optimizer, ps, start=5)
    train(twin, qs, start=5)
    assert all(torch.equal(p, q) for p, q in zip(ps, qs))


def test_one_cycle_says_what_the_largest_lr_is() -> None:
    (p,) = params((3,))
    with pytest.warns(UserWarning, match="decouple_lr"):
        optimizer = AdamW([p], lr=0.1, decouple_lr=True, weight_decay=0.1, **EAGER)
    assert optimizer.param_groups[0]["max_lr"] == 0.1
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    assert optimizer.param_groups[0]["max_lr"] == 0.5
    start = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    share = optimizer.param_groups[0]["lr"] / 0.5 * 0.1
    torch.testing.assert_close(p.detach(), start * (1 - share))


def test_max_lr_is_resolved_per_group() -> None:
    p, q = params()
    groups = [{"params": [p]}, {"params": [q], "lr": torch.tensor(0.2)}]
    optimizer = AdamW(groups, lr=0.1, weight_decay=1e-5, decouple_lr=True, **EAGER)
    assert [g["max_lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.2])


def test_one_warning_names_decay_and_decouple_lr(recwarn) -> None:
    p, q = params()
    groups = [{"params": [p]}, {"params": [q], "weight_decay": 0.5}]
    AdamW(groups, lr=0.1, decouple_lr=True, **EAGER)
    (warning,) = recwarn.list
    assert "weight_decay=0.5" in str(warning.message)
    assert "decouple_lr=True" in str(warning.message)


ADVICE = [
    (AdamW, {"max_lr": 1.0}, "max_lr=1.0 has no effect"),
    (AdamW, {"kahan_sum": True}, "kahan_sum=True has no effect"),
    (SGD, {"dampening": True}, "dampening=True has no effect"),
    (SGD, {"momentum": 0.9, "torch_init": True}, "torch_init=True has no effect"),
    (AdamW, {"foreach": True, "gradient_release": True}, "foreach is disabled"),
]


@pytest.mark.parametrize(("cls", "options", "text"), ADVICE, ids=str)
def test_options_without_effect_warn(cls, options, text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        cls(params(), lr=0.1, **options)


def test_coarse_moments_warn() -> None:
    ps = params(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"betas\[1\]=0.999.*state_dtype=torch.float32"):
        AdamW(ps, lr=0.1, betas=(0.9, 0.999), **EAGER)
    AdamW(ps, lr=0.1, betas=(0.9, 0.999), state_dtype=torch.float32, **EAGER)


def test_gradients_are_read_only() -> None:
    for cls in CLS:
        ps = params()
        optimizer = cls(ps, lr=0.1, weight_decay=0.1, maximize=True, **EAGER)
        fill(ps)
        before = [p.grad.clone() for p in ps]
        optimizer.step()
        assert all(torch.equal(p.grad, b) for p, b in zip(ps, before))


def test_closures_hooks_and_zero_grad() -> None:
    (w,) = params((3,))
    optimizer = SGD([w], lr=0.1, **EAGER)
    calls = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        calls.append("closure")
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == ["pre", "closure", "post"]
    assert loss > w.square().sum()
    optimizer.zero_grad(set_to_none=False)
    assert (w.grad == 0).all()
    optimizer.zero_grad(param=w)
    assert w.grad is None
    assert optimizer.step() is None


def test_torch_watches_steps_that_somebody_watches() -> None:
    """By torch's wrapper of every optimizer's step, which costs a third of a small one."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    (w,) = params((3,))
    w.grad, calls = torch.ones(3, dtype=w.dtype), []

    class Mine(SGD):
        def step(self, closure: Any = None, param: Any = None) -> Any:
            calls.append("mine")
            return super().step(closure, param)

    for cls, first in ((SGD, []), (Mine, ["mine"])):
        optimizer = cls([w], lr=0.1, **EAGER)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        calls.clear()
        optimizer.step()
        assert calls == first
        with torch.profiler.profile() as profile:
            optimizer.step()
        names = [x.key for x in profile.key_averages() if "Optimizer.step" in x.key]
        assert names == [f"Optimizer.step#{cls.__name__}.step"]
        handle = register_optimizer_step_post_hook(lambda *a: calls.append("all"))
        calls.clear()
        try:
            optimizer.step()
        finally:
            handle.remove()
        assert calls == [*first, "all"]
        optimizer.register_step_post_hook(lambda *a: calls.append("own"))
        calls.clear()
        optimizer.step()
        assert calls == [*first, "own"]
        scheduler.step()


def test_late_and_frozen_parameters() -> None:
    ps = params((3,), (4,))
    optimizer = AdamW(ps, lr=0.1, **EAGER)
    ps[1].requires_grad_(False)
    train(optimizer, ps[:1], 3)
    assert ps[1] not in optimizer.state
    ps[1].requires_grad_(True)
    train(optimizer, ps, 1)
    assert optimizer.state[ps[0]]["step"] == 4
    assert optimizer.state[ps[1]]["step"] == 1
    # A late parameter's first step is a first step: bias corrected as one.
    want = params((3,), (4,))[1]
    alone = AdamW([want], lr=0.1, **EAGER)
    torch.manual_seed(0)
    torch.randn(3)
    want.grad = torch.randn(4)
    alone.step()
    assert torch.equal(want, ps[1])


def test_momentum_may_appear_in_mid_run() -> None:
    pair = []
    for cls, more in ((torch.optim.SGD, {}), (SGD, EAGER)):
        ps = params(dtype=torch.float64)
        optimizer = (
            cls(ps, lr=0.1, dampening=0.5, momentum=0.0, **more) if not more else None
        )
        if more:
            with pytest.warns(UserWarning, match="dampening=0.5 has no effect"):
                optimizer = cls(ps, lr=0.1, dampening=0.5, momentum=0.0, **more)
        for start, momentum in ((0, 0.0), (3, 0.9), (6, 0.0), (9, 0.9)):
            optimizer.param_groups[0]["momentum"] = momentum
            train(optimizer, ps, 3, start)
        pair.append(ps)
    for s, p, q in zip(params(dtype=torch.float64), *pair):
        assert_moved_alike(s.detach(), q.detach(), p.detach(), 1e-12)


def test_amsgrad_may_appear_in_mid_run() -> None:
    ps = params((3,))
    optimizer = Adam(ps, lr=0.1, **EAGER)
    train(optimizer, ps, 5)
    optimizer.param_groups[0]["amsgrad"] = True
    train(optimizer, ps, 1)
    assert optimizer.state[ps[0]]["step"] == 6


def test_casting_the_model_in_mid_run() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=1.0, **EAGER)
    fill(model.parameters())
    optimizer.step()
    model.to(torch.bfloat16)
    fill(model.parameters())
    optimizer.step()
    assert "kahan_comp" in optimizer.state[model.weight]
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    optimizer.param_groups[0]["kahan_sum"] = False
    fill(model.parameters())
    optimizer.step()
    assert "kahan_comp" not in optimizer.state[model.weight]


def test_capturable_keeps_its_count_on_the_device() -> None:
    ps = params(dtype=torch.float64)
    qs = params(dtype=torch.float64)
    host = RAdam(ps, lr=0.1, **EAGER)
    device = RAdam(qs, lr=torch.tensor(0.1, dtype=torch.float64), capturable=True, **EAGER)
    train(host, ps, 10)
    train(device, qs, 10)
    assert device.state[qs[0]]["step"].device == qs[0].device
    for s, p, q in zip(params(dtype=torch.float64), ps, qs):
        assert_moved_alike(s.detach(), q.detach(), p.detach(), 1e-12)


def test_ranger_leaves_slow_weights_alone_between_syncs() -> None:
    ps = params((3,))
    optimizer = Ranger(ps, lr=0.1, k=3, **EAGER)
    versions = []
    for i in range(6):
        train(optimizer, ps, 1, i)
        versions.append(optimizer.state[ps[0]]["slow_param"]._version)
    first = versions[0]
    assert [v - first for v in versions] == [0, 0, 1, 1, 1, 2]


def test_step_param_is_for_gradient_release() -> None:
    ps = params()
    optimizer = AdamW(ps, lr=0.1, gradient_release=True, **EAGER)
    fill(ps)
    before = ps[1].detach().clone()
    optimizer.step(param=ps[0])
    assert torch.equal(ps[1], before)
    assert optimizer.state[ps[0]]["step"] == 1
    start = ps[0].detach().clone()
    optimizer.optimizer_accumulation = True
    moment = optimizer.state[ps[0]]["exp_avg"].clone()
    optimizer.step(param=ps[0])
    assert torch.equal(ps[0], start)
    assert not torch.equal(optimizer.state[ps[0]]["exp_avg"], moment)
    with pytest.raises(ValueError, match="in none of the groups"):
        fill(other := params((3,)))
        optimizer.step(param=other[0])


@pytest.mark.kernels
def test_first_step_in_inference_mode_leaves_ordinary_state() -> None:
    for how in (EAGER, {"foreach": True}, {"compile": True}):
        ps = params((3,), (9000,))
        optimizer = AdamW(ps, lr=0.1, **how)
        fill(ps)
        with torch.inference_mode():
            optimizer.step()
        train(optimizer, ps, 1)
        assert not optimizer.state[ps[0]]["exp_avg"].is_inference()


def test_each_group_is_written_in_the_context_of_its_device(monkeypatch) -> None:
    """Autocast and similar modes are off for the devices of all groups."""
    opened: list[str] = []

    def noted(device: torch.device) -> Any:
        opened.append(device.type)
        return kernels.kernel_context(device)

    params = [torch.ones(2, device=d, requires_grad=True) for d in ("cpu", "meta")]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = AdamW([{"params": [p]} for p in params], lr=0.1, compile=False)
    optimizer.step()
    monkeypatch.setattr(stepping, "kernel_context", noted)
    optimizer.step()
    assert opened == ["cpu", "meta"]


@pytest.mark.kernels
def test_under_a_dispatch_mode_the_step_is_eager_and_no_kernel_is_harmed() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    ps = params((9000,))
    optimizer = SGD(ps, lr=0.1)
    train(optimizer, ps, 1)
    with FlopCounterMode(display=False):
        train(optimizer, ps, 1)
        with pytest.raises(RuntimeError, match="TorchDispatchMode"):
            SGD(ps, lr=0.1, compile=True).step()
    train(optimizer, ps, 1)
    assert optimizer.state[ps[0]]["step"] == 3


NO_COMPILER = """
import os, pickle, warnings, torch
from torch._inductor import config
from optimi_func import SGD, Adam, prepare_for_gradient_release, sgd
# Which was read when the module was loaded, before this process.
config.cpp.cxx = (None, os.environ.get("CXX", "g++"))
w = torch.nn.Parameter(torch.ones(9000)); w.grad = torch.ones_like(w)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):  # as programs with an optimizer for every parameter
        optimizer = SGD([w], lr=0.1)
        optimizer.step(); optimizer.step()
    Adam([w], lr=0.0).step()
    pickle.loads(pickle.dumps(optimizer)).step()
    model = torch.nn.Linear(3, 2)
    with prepare_for_gradient_release(model, sgd(lr=0.1)):
        model(torch.ones(1, 3)).sum().backward()
texts = [str(c.message) for c in caught if "eagerly" in str(c.message)]
assert len(texts) == 1 and "compile=False" in texts[0] and WORDS in texts[0], texts
assert abs(w[0].item() - 0.4) < 1e-6
before = w.detach().clone()
try:
    SGD([w], lr=0.1, compile=True).step()
except Exception:
    pass
else:
    raise SystemExit("compile=True did not raise")
assert torch.equal(w, before)
"""


def in_a_process(program: str, folder: Path, **setting: str) -> None:
    script = folder / "script.py"
    script.write_text(program)
    environment = setting | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    done = run_script(script, strict=False, environment=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"CXX": "/nonexistent"}, "Install a C++ compiler"),
        ({"TORCHDYNAMO_DISABLE": "1"}, "torch.compile is switched off"),
    ],
)
def test_without_a_toolchain(setting, words: str, tmp_path) -> None:
    in_a_process(NO_COMPILER.replace("WORDS", repr(words)), tmp_path, **setting)


ALL_ERRORS = """
import warnings, torch
from torch._inductor import graph
from optimi_func import SGD
run = graph.GraphLowering.run
def warned(self, *args, **kwargs):
    exec(compile("import warnings; warnings.warn('of torch, about itself')", "x", "exec"),
         {"__name__": "torch._inductor.graph"})
    return run(self, *args, **kwargs)
graph.GraphLowering.run = warned
w = torch.nn.Parameter(torch.ones(9000)); w.grad = torch.ones_like(w)
warnings.simplefilter("error")
before = list(warnings.filters)
SGD([w], lr=0.1).step()
assert warnings.filters == before
from optimi_func.core.runtime import runtime
assert len(runtime.kernels) == 1
"""


@pytest.mark.full
def test_torchs_warnings_are_no_missing_compiler(tmp_path) -> None:
    in_a_process(ALL_ERRORS, tmp_path, OPTIMI_FUNC_CACHE="0")


def test_empty_groups_are_allowed() -> None:
    (p,) = params((3,))
    optimizer = AdamW([{"params": []}, {"params": [p]}], lr=0.1, **EAGER)
    train(optimizer, [p], 1)
    AdamW([{"params": []}], lr=0.1, **EAGER).step()


def pair_of_steppers(shape=(128, 128), **options):
    made = []
    for how in (EAGER, {"compile": True}):
        ps = params(shape, dtype=torch.float64)
        made.append((ps, AdamW(ps, lr=0.1, **options, **how)))
        train(made[-1][1], ps, 1)
    return made


EDITS = {
    "transposed in place": lambda o, p: o.state[p]["exp_avg"].t_(),
    "transposed data": lambda o, p: setattr(
        o.state[p]["exp_avg"], "data", o.state[p]["exp_avg"].data.t()
    ),
    "another tensor": lambda o, p: o.state[p].update(exp_avg=o.state[p]["exp_avg"] + 1),
    "all gone": lambda o, p: o.state.clear(),
    "one field gone": lambda o, p: o.state[p].pop("exp_avg_sq"),
    "p transposed": lambda o, p: setattr(p, "data", p.data.t()),
    "p copied": lambda o, p: setattr(p, "data", p.data.clone()),
    "p at an offset": lambda o, p: setattr(
        p, "data", torch.cat([torch.zeros(5), p.data.flatten()])[5:].view(p.shape)
    ),
    "kahan off": lambda o, p: o.param_groups[0].update(kahan_sum=False),
    "amsgrad on": lambda o, p: o.param_groups[0].update(amsgrad=True),
}


def edits() -> list[Any]:
    """Return a row for each edit; amsgrad takes a kernel of its own."""
    tiers = {"amsgrad on": "full"}
    return [row(f, id=name, tier=tiers.get(name, "kernels")) for name, f in EDITS.items()]


@pytest.mark.parametrize("edit", edits())
def test_what_is_remembered_of_a_parameter_is_checked(edit) -> None:
    ends = []
    for ps, optimizer in pair_of_steppers():
        start = ps[0].detach().clone()
        edit(optimizer, ps[0])
        train(optimizer, ps, 2, start=1)
        ends.append(ps[0].detach())
    assert_moved_alike(start, ends[1], ends[0], 1e-12)


@pytest.mark.full
def test_state_of_another_dtype_at_the_same_address() -> None:
    n = 1 << 14
    ps = params((n,), (n,))
    optimizer = SGD(ps, lr=0.1, momentum=0.9, compile=True)
    train(optimizer, ps, 1)
    buffer = torch.zeros(2 * n)
    state = optimizer.state[ps[1]]["momentum_buffer"]
    state.data = buffer[:n]
    train(optimizer, ps, 1)
    buffer.fill_(7.0)
    state.data = buffer.view(torch.bfloat16)[:n]
    train(optimizer, ps, 1)
    assert (buffer[n // 2 :] == 7.0).all()


def test_state_taken_away_is_freed() -> None:
    import gc
    import weakref

    ps = params((128, 128))
    optimizer = AdamW(ps, lr=0.1, **EAGER)
    train(optimizer, ps, 2)
    old = weakref.ref(optimizer.state[ps[0]]["exp_avg"])
    optimizer.state[ps[0]]["exp_avg"] = optimizer.state[ps[0]]["exp_avg"].clone()
    gc.collect()
    assert old() is None
    gone = weakref.ref(optimizer.state[ps[0]]["exp_avg"])
    optimizer.param_groups.clear()
    optimizer.state.clear()
    qs = params((3,))
    optimizer.add_param_group({"params": qs})
    train(optimizer, qs, 1)
    gc.collect()
    assert gone() is None


@pytest.mark.full
def test_accumulating_does_not_touch_the_parameters_version() -> None:
    ps = params((128, 128), (3,))
    optimizer = AdamW(ps, lr=0.1, gradient_release=True, compile=True)
    optimizer.optimizer_accumulation = True
    for p in ps:
        p.grad = torch.ones_like(p)
        before = p._version
        optimizer.step(param=p)
        assert p._version == before


@pytest.mark.kernels
def test_state_from_inference_mode_is_made_ordinary_or_refused() -> None:
    ps = params((128, 128))
    optimizer = AdamW(ps, lr=0.1, compile=True)
    train(optimizer, ps, 1)
    saved = optimizer.state_dict()
    with torch.inference_mode():
        optimizer.load_state_dict(saved)
        odd = optimizer.state[ps[0]]["exp_avg"].clone()
    train(optimizer, ps, 1)
    optimizer.state[ps[0]]["exp_avg"] = odd
    before = ps[0].detach().clone()
    fill(ps)
    with pytest.raises(ValueError, match="made under inference_mode"):
        optimizer.step()
    assert torch.equal(ps[0], before)


@pytest.mark.parametrize("size", [8, 128])
def test_wrapper_subclasses_are_stepped_through_their_own_dispatch(size: int) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    p = torch.nn.Parameter(TwoTensor(torch.ones(size, size), torch.ones(size, size)))
    p.grad = TwoTensor(torch.ones(size, size), torch.ones(size, size))
    plain = torch.nn.Parameter(torch.ones(size, size))
    plain.grad = torch._efficientzerotensor((size, size))
    optimizer = SGD([p, plain], lr=0.1)
    optimizer.step()
    assert torch.equal(p.detach().a, torch.full((size, size), 0.9))
    assert (plain == 1).all()
    with pytest.raises(TypeError, match=r"TwoTensor.*compile=False"):
        SGD([p], lr=0.1, compile=True).step()


@pytest.mark.kernels
def test_a_parameter_that_is_a_negated_view() -> None:
    p = params((128, 128))[0]
    optimizer = SGD([p], lr=1.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    value = p.detach().clone()
    p.data = torch._neg_view(-value)
    optimizer.step()
    assert torch.equal(p.detach().resolve_neg(), value - 1)
