"""SAM and Lookahead, as classes and in pure loops, beside their papers' loops."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn
from wrapper_worlds import shards

from optimi_func import SAM, SGD, AdamW, Lookahead, ScheduleFreeSGD, adamw, sgd
from optimi_func.transforms import ascent

WIDE = torch.float64
EAGER: dict[str, Any] = {"compile": False}
DECAY: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def start(dtype: torch.dtype = WIDE) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=drawn, dtype=WIDE).to(dtype) for s in [(3, 2), (2,)]]


def fit(params: list[Tensor]) -> Tensor:
    w, b = [p.to(WIDE) for p in params]
    return ((w.tanh() + b - 0.3) ** 2).sum() + 0.1 * (b**4).sum()


gradients: Callable[[Any], list[Tensor]] = torch.func.grad(fit)


class Run:
    """A class on the fit, whose evaluations are counted."""

    def __init__(self, make: Callable[[list[Tensor]], Any], dtype: Any = WIDE) -> None:
        self.params = [p.requires_grad_() for p in start(dtype)]
        self.optimizer, self.count = make(self.params), 0

    def closure(self) -> Tensor:
        self.count += 1
        self.optimizer.zero_grad()
        loss = fit(self.params)
        loss.backward()
        return loss

    def steps(self, n: int) -> list[Tensor]:
        for _ in range(n):
            self.optimizer.step(self.closure)
        return [p.detach() for p in self.params]


def close(ours: Any, theirs: Any, size: float = 1e-10) -> None:
    torch.testing.assert_close(list(ours), list(theirs), rtol=size, atol=size)


def differ(*runs: list[Tensor]) -> None:
    for a, b in itertools.combinations(runs, 2):
        assert max(float((x - y).abs().max()) for x, y in zip(a, b)) > 1e-6


class Adam:
    """AdamW's step, written from its paper."""

    def __init__(self, params: list[Tensor]) -> None:
        self.m, self.v, self.t = [0 * p for p in params], [0 * p for p in params], 0

    def __call__(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        self.t += 1
        self.m = [0.9 * m + 0.1 * g for m, g in zip(self.m, grads)]
        self.v = [0.999 * v + 0.001 * g * g for v, g in zip(self.v, grads)]
        a, b = 1 - 0.9**self.t, 1 - 0.999**self.t
        return [
            p - 0.01 * p - 0.1 * (m / a) / ((v / b).sqrt() + 1e-8)
            for p, m, v in zip(params, self.m, self.v)
        ]


def sam_loop(rho: float, adaptive: bool, n: int) -> list[Tensor]:
    params = start()
    step = Adam(params)
    for _ in range(n):
        grads = gradients(params)
        t = [p.abs() + 0.01 if adaptive else torch.ones_like(p) for p in params]
        size = sum([((x * g) ** 2).sum() for x, g in zip(t, grads)]) ** 0.5
        near = [p + rho * x * x * g / size for p, x, g in zip(params, t, grads)]
        params = step(params, gradients(near))
    return params


def lookahead_loop(k: int, alpha: float, n: int) -> list[Tensor]:
    params = slow = start()
    step = Adam(params)
    for i in range(n):
        params = step(params, gradients(params))
        if (i + 1) % k == 0:
            params = slow = [s + alpha * (p - s) for s, p in zip(slow, params)]
    return params


@pytest.mark.parametrize("inner", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize(("rho", "adaptive"), [(0.05, False), (0.5, False), (0.5, True)])
def test_sam_as_its_paper(inner: Any, rho: float, adaptive: bool) -> None:
    more = EAGER if inner is AdamW else {}
    run = Run(lambda ps: SAM(inner(ps, **DECAY, **more), rho=rho, adaptive=adaptive))
    close(run.steps(5), sam_loop(rho, adaptive, 5))
    assert run.count == 10
    params, opt = start(), adamw(**DECAY)
    state = opt.init(params)
    for _ in range(5):
        near = ascent(params, gradients(params), rho, adaptive)
        params, state = opt.step(params, gradients(near), state)
    close(params, sam_loop(rho, adaptive, 5))


def test_each_option_changes_the_answer() -> None:
    differ(
        *[sam_loop(*x, 5) for x in [(0.0, False), (0.05, False), (0.5, False), (0.5, True)]]
    )
    differ(*[lookahead_loop(*x, 6) for x in [(2, 0.5), (3, 0.5), (2, 0.25), (2, 1.0)]])


@pytest.mark.parametrize(("k", "alpha"), [(2, 0.5), (3, 0.25), (2, 1.0)])
def test_lookahead_as_its_paper(k: int, alpha: float) -> None:
    for inner, more in ((AdamW, EAGER), (torch.optim.AdamW, {})):
        run = Run(lambda ps, c=inner, m=more: Lookahead(c(ps, **DECAY, **m), k, alpha))
        close(run.steps(7), lookahead_loop(k, alpha, 7))


@pytest.mark.parametrize("cls", [SAM, Lookahead])
def test_the_protocol_of_torch(cls: Any) -> None:
    """Param groups are shared, schedulers work, states load, copies go on alike."""
    run = Run(lambda ps: cls(AdamW(ps, **DECAY, **EAGER)))
    optimizer, inner = run.optimizer, run.optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    said: list[str] = []
    optimizer.register_step_post_hook(lambda *_: said.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: said.append("state"))
    run.steps(3)
    schedule.step()
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.05
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert said == ["step"] * 3 + ["state"]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = Run(lambda ps: cls(AdamW(ps, **DECAY, **EAGER)))
    with torch.no_grad():
        for p, q in zip(fresh.params, run.params):
            p.copy_(q)
    fresh.optimizer.load_state_dict(saved)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied = Run(lambda _, o=other: o)
        copied.params = other.param_groups[0]["params"]
        close(copied.steps(1), copy.deepcopy(run).steps(1), 0)
    close(run.steps(4), fresh.steps(4), 0)
    added = torch.ones(2, dtype=WIDE, requires_grad=True)
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    run.params.append(added)
    before = added.detach().clone()
    optimizer.step(lambda: optimizer.zero_grad() or _backward((added**2).sum()))
    assert not torch.equal(added, before) and len(inner.param_groups) == 2
    assert "AdamW" in repr(optimizer)
    assert optimizer.describe()  # a method of the optimizer's


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


@pytest.mark.parametrize("storage", [None, "exact", "compact"])
def test_a_closure_that_raises_leaves_the_parameters(storage: Any) -> None:
    run = Run(lambda ps: SAM(AdamW(ps, lr=0.5, storage=storage, **EAGER)), torch.bfloat16)
    run.steps(2)
    state = run.optimizer.state
    comps = [state[p]["kahan_comp"].clone() for p in run.params]
    before = [p.detach().clone() for p in run.params]
    seen: list[Tensor] = []

    def fails() -> Tensor:
        seen.append(run.params[0].detach().clone())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return run.closure()

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step(fails)
    assert not torch.equal(seen[0], seen[1])
    assert all(map(torch.equal, run.params, before))
    assert all(torch.equal(state[p]["kahan_comp"], c) for p, c in zip(run.params, comps))


@pytest.mark.parametrize("cls", [SAM, Lookahead])
def test_bfloat16_keeps_its_compensation(cls: Any) -> None:
    """As near to float64 as rounded gradients allow, and nearer than without."""
    options = {"rho": 0.5} if cls is SAM else {}
    found = []
    for dtype, kahan in ((WIDE, None), (torch.bfloat16, None), (torch.bfloat16, False)):
        run = Run(
            lambda ps, k=kahan: cls(SGD(ps, lr=2e-3, kahan_sum=k, **EAGER), **options),
            dtype,
        )
        found.append([x.double() for x in run.steps(60)])
    errors = [
        max(float((x - y).abs().max()) for x, y in zip(found[0], low)) for low in found[1:]
    ]
    assert errors[0] < 0.02 and errors[0] < errors[1]


def test_sam_restores_bit_for_bit() -> None:
    run = Run(lambda ps: SAM(SGD(ps, lr=0.0, **EAGER), rho=3.0), torch.bfloat16)
    before = [p.detach().clone() for p in run.params]
    run.steps(3)
    assert all(map(torch.equal, run.params, before))


def test_wrappers_nest() -> None:
    run = Run(lambda ps: Lookahead(SAM(AdamW(ps, **DECAY, **EAGER), rho=0.5), 2, 0.5))
    slow = start()
    step = Adam(slow)
    params = slow
    for i in range(4):
        grads = gradients(params)
        size = sum([(g**2).sum() for g in grads]) ** 0.5
        near = [p + 0.5 * g / size for p, g in zip(params, grads)]
        params = step(params, gradients(near))
        if i % 2:
            params = slow = [s + 0.5 * (p - s) for s, p in zip(slow, params)]
    close(run.steps(4), params)


def test_lookahead_goes_with_a_grad_scaler() -> None:
    run = Run(lambda ps: Lookahead(AdamW(ps, **DECAY, **EAGER), 2), torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for i in range(4):
        run.optimizer.zero_grad()
        loss = fit(run.params) * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
    assert run.optimizer.param_groups[0]["lookahead_step"] == 3
    close([p.double() for p in run.params], lookahead_loop(2, 0.5, 3), 1e-4)


def test_checkpoints_of_torch_distributed() -> None:
    """Its trial step makes the state and is none."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    for cls in (SAM, Lookahead):
        model = nn.Linear(2, 1)
        optimizer = cls(AdamW(model.parameters(), **DECAY, **EAGER))
        before = [p.detach().clone() for p in model.parameters()]
        found = get_optimizer_state_dict(model, optimizer)
        assert {"exp_avg", "step"} <= {*found["state"]["weight"]}
        assert all(map(torch.equal, model.parameters(), before))
        assert optimizer.param_groups[0].get("lookahead_step", 0) == 0


@pytest.mark.full
def test_shards_step_as_one_process(tmp_path: Path) -> None:
    found = worlds.start([shards], 2, tmp_path)
    assert not found["shards"], found["shards"]


# The pure loop: torch.func, vmap, compile, dtypes


def moved(rho: Any, p: Tensor, adaptive: bool = False) -> Tensor:
    params, opt = [p, p.sum(0)], sgd(lr=0.3)
    state = opt.init(params)
    for _ in range(3):
        near = ascent(params, gradients(params), rho, adaptive)
        params, state = opt.step(params, gradients(near), state)
    return params[0]


@pytest.mark.parametrize("adaptive", [False, True])
def test_ascent_vmaps_and_differentiates(adaptive: bool) -> None:
    xs = torch.tensor([0.2, 0.5, 0.7], dtype=WIDE)
    ps = torch.randn(3, 3, 2, dtype=WIDE, generator=torch.Generator().manual_seed(3))
    together = torch.func.vmap(lambda x, p: moved(x, p, adaptive))(xs, ps)
    for found, x, p in zip(together, xs, ps):
        close([found], [moved(x, p, adaptive)])

    def end(x: Tensor) -> Tensor:
        return (moved(x, ps[0], adaptive) ** 2).sum()

    slope, size = torch.func.grad(end)(xs[1]), 1e-6
    by_hand = (end(xs[1] + size) - end(xs[1] - size)) / (2 * size)
    torch.testing.assert_close(slope, by_hand, rtol=1e-5, atol=1e-8)
    assert slope != 0


def test_ascent_is_in_one_graph() -> None:
    p = start()[0]
    whole = torch.compile(lambda q: moved(0.5, q), backend="eager", fullgraph=True)
    close([whole(p)], [moved(0.5, p)])


def test_ascent_leaves_what_has_no_gradient_and_keeps_dtypes() -> None:
    p = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2), "c": torch.zeros(2).bfloat16()}
    near = ascent(p, {**p, "b": None}, rho=1.0)
    close([near["a"]], [torch.tensor([3.6, 4.8])], 1e-6)
    assert near["b"] is p["b"] and near["c"].dtype == torch.bfloat16
    assert p["a"].tolist() == [3.0, 4.0]


# Refusals, before the first write

P = torch.zeros(1)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda o: SAM(o, rho=-1.0),
            ValueError,
            r"rho=-1\.0: allowed is finite, at least 0",
        ),
        (lambda o: SAM(o, rho=lambda t: 0.1), TypeError, r"rho=.*numbers and 0-d tensors"),
        (lambda o: SAM(o, adaptive="yes"), TypeError, r"adaptive='yes'"),
        (lambda o: Lookahead(o, k=0), ValueError, r"k=0: allowed are whole numbers from 1"),
        (lambda o: Lookahead(o, alpha=0.0), ValueError, r"alpha=0\.0: .* above 0\.0"),
        (lambda o: Lookahead(o, alpha=1.5), ValueError, r"alpha=1\.5: .* at most 1\.0"),
        (lambda o: SAM(adamw(lr=0.1)), TypeError, r"value, .* is transforms\.ascent"),
        (lambda o: Lookahead(adamw(lr=0.1)), TypeError, r"is torch\.lerp every k steps"),
        (lambda o: ascent(P, P, rho=-1.0), ValueError, r"rho=-1\.0"),
        (lambda o: ascent(P, P, rho=lambda t: 0.1), TypeError, r"rho=.*numbers and 0-d"),
        (lambda o: ascent(P, P, adaptive=0.5), TypeError, r"adaptive=0\.5"),
        (lambda o: ascent(P, torch.ones(2), rho=0.1), ValueError, r"shape"),
    ],
)
def test_options_are_checked(make: Any, error: Any, text: str) -> None:
    optimizer = AdamW([torch.zeros(1, requires_grad=True)], **EAGER)
    with pytest.raises(error, match=text):
        make(optimizer)


def test_optimizers_that_do_not_fit_are_named() -> None:
    p = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="Lookahead writes parameters"):
        Lookahead(ScheduleFreeSGD([p], lr=0.1, **EAGER))
    SAM(ScheduleFreeSGD([p], lr=0.1, **EAGER))
    with pytest.raises(ValueError, match="maximize=True: let the loss be its negative"):
        SAM(torch.optim.SGD([p], lr=0.1, maximize=True))
    for cls in (SAM, Lookahead):
        with pytest.raises(ValueError, match="with gradient_release=True"):
            cls(SGD([p], lr=0.1, gradient_release=True, **EAGER))
    with pytest.raises(TypeError, match=r"LBFGS\.step.* 'closure'"):
        Run(lambda ps: SAM(torch.optim.LBFGS(ps))).steps(1)
    with pytest.raises(TypeError, match=r"SAM\.step: closure=None"):
        SAM(SGD([p], lr=0.1, **EAGER)).step()


def test_options_changed_later_are_checked_before_the_closure() -> None:
    run = Run(lambda ps: SAM(SGD(ps, lr=0.1, **EAGER)))
    run.optimizer.rho = -1.0
    with pytest.raises(ValueError, match=r"rho=-1\.0"):
        run.steps(1)
    assert run.count == 0


def test_a_step_in_eval_mode_is_refused_before_the_closure() -> None:
    run = Run(lambda ps: SAM(ScheduleFreeSGD(ps, lr=0.1, **EAGER)))
    run.steps(1)
    run.optimizer.eval()
    with pytest.raises(RuntimeError, match=r"SAM\.step\(\) in eval mode"):
        run.steps(1)
    assert run.count == 2
