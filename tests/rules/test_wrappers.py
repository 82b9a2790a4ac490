"""SAM, Lookahead and the line search, as classes and values, beside their papers' loops."""

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

from optimi_func import (
    LBFGS,
    SAM,
    SGD,
    AdamW,
    Backtracking,
    Lookahead,
    ScheduleFreeSGD,
    adamw,
    schedule_free_sgd,
    sgd,
    unroll,
)
from optimi_func.transforms import backtracking, every_k, lookahead, partition, sam

WIDE = torch.float64
EAGER: dict[str, Any] = {"compile": False}
DECAY: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def start(dtype: torch.dtype = WIDE) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=drawn, dtype=WIDE).to(dtype) for s in [(3, 2), (2,)]]


def fit(params: list[Tensor]) -> Tensor:
    w, b = [p.to(WIDE) for p in params]
    return ((w.tanh() + b - 0.3) ** 2).sum() + 0.1 * (b**4).sum()


def value_and_grad(params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    grads, value = torch.func.grad_and_value(fit)(params)
    return value, grads


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
        _, grads = value_and_grad(params)
        t = [p.abs() + 0.01 if adaptive else torch.ones_like(p) for p in params]
        size = sum([((x * g) ** 2).sum() for x, g in zip(t, grads)]) ** 0.5
        near = [p + rho * x * x * g / size for p, x, g in zip(params, t, grads)]
        params = step(params, value_and_grad(near)[1])
    return params


def lookahead_loop(k: int, alpha: float, n: int) -> list[Tensor]:
    params = slow = start()
    step = Adam(params)
    for i in range(n):
        params = step(params, value_and_grad(params)[1])
        if (i + 1) % k == 0:
            params = slow = [s + alpha * (p - s) for s, p in zip(slow, params)]
    return params


def armijo_loop(lr: float, decrease: float, shrink: float, n: int, most: int = 20) -> Any:
    """Gradient descent; returns the shares too."""
    params, shares = start(), []
    for _ in range(n):
        f, grads = value_and_grad(params)
        square = sum([(g * g).sum() for g in grads])
        t = 1.0
        for _ in range(most):
            new = [p - t * lr * g for p, g in zip(params, grads)]
            if value_and_grad(new)[0] <= f - decrease * t * lr * square:
                params = new
                break
            t *= shrink
        else:
            t = 0.0
        shares.append(t)
    return params, shares


@pytest.mark.parametrize("inner", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize(("rho", "adaptive"), [(0.05, False), (0.5, False), (0.5, True)])
def test_sam_as_its_paper(inner: Any, rho: float, adaptive: bool) -> None:
    more = EAGER if inner is AdamW else {}
    run = Run(lambda ps: SAM(inner(ps, **DECAY, **more), rho=rho, adaptive=adaptive))
    close(run.steps(5), sam_loop(rho, adaptive, 5))
    assert run.count == 10
    params, opt = start(), sam(adamw(**DECAY), rho=rho, adaptive=adaptive)
    state = opt.init(params)
    for _ in range(5):
        before = fit(params)
        params, state = opt.step(params, state, value_and_grad)
        close([state.f], [before])
    close(params, sam_loop(rho, adaptive, 5))


def test_each_option_changes_the_answer() -> None:
    differ(
        *[sam_loop(*x, 5) for x in [(0.0, False), (0.05, False), (0.5, False), (0.5, True)]]
    )
    differ(*[lookahead_loop(*x, 6) for x in [(2, 0.5), (3, 0.5), (2, 0.25), (2, 1.0)]])
    runs = [
        armijo_loop(*x, 4) for x in [(8.0, 1e-4, 0.5), (8.0, 0.7, 0.5), (8.0, 1e-4, 0.8)]
    ]
    differ(*[params for params, _ in runs], armijo_loop(8.0, 1e-4, 0.5, 4, most=2)[0])


@pytest.mark.parametrize(("k", "alpha"), [(2, 0.5), (3, 0.25), (2, 1.0)])
def test_lookahead_as_its_paper(k: int, alpha: float) -> None:
    for inner, more in ((AdamW, EAGER), (torch.optim.AdamW, {})):
        run = Run(lambda ps, c=inner, m=more: Lookahead(c(ps, **DECAY, **m), k, alpha))
        close(run.steps(7), lookahead_loop(k, alpha, 7))
    params, opt = start(), lookahead(adamw(**DECAY), k, alpha)
    state = opt.init(params)
    for _ in range(7):
        params, state = opt.step(params, value_and_grad(params)[1], state)
    close(params, lookahead_loop(k, alpha, 7))


@pytest.mark.parametrize(
    ("decrease", "shrink", "most"),
    [(1e-4, 0.5, 20), (0.7, 0.5, 20), (1e-4, 0.8, 20), (1e-4, 0.5, 2)],
)
def test_armijo(decrease: float, shrink: float, most: int) -> None:
    wanted, shares = armijo_loop(8.0, decrease, shrink, 4, most)
    assert min(shares) < 1
    run = Run(lambda ps: Backtracking(SGD(ps, lr=8.0, **EAGER), decrease, shrink, most))
    params, opt = start(), backtracking(sgd(lr=8.0), decrease, shrink, most)
    state = opt.init(params)
    for share in shares:
        run.steps(1)
        params, state = opt.step(params, state, value_and_grad)
        assert run.optimizer.t == pytest.approx(share) == float(state.t)
    close(run.params, wanted)
    close(params, wanted)


@pytest.mark.parametrize("cls", [SAM, Lookahead, Backtracking])
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
    optimizer.track()  # a method of the optimizer's


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


@pytest.mark.parametrize("storage", [None, "exact", "compact"])
@pytest.mark.parametrize("cls", [SAM, Backtracking])
def test_a_closure_that_raises_leaves_the_parameters(cls: Any, storage: Any) -> None:
    run = Run(lambda ps: cls(AdamW(ps, lr=0.5, storage=storage, **EAGER)), torch.bfloat16)
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


@pytest.mark.parametrize("cls", [SAM, Lookahead, Backtracking])
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
        _, grads = value_and_grad(params)
        size = sum([(g**2).sum() for g in grads]) ** 0.5
        near = [p + 0.5 * g / size for p, g in zip(params, grads)]
        params = step(params, value_and_grad(near)[1])
        if i % 2:
            params = slow = [s + 0.5 * (p - s) for s, p in zip(slow, params)]
    close(run.steps(4), params)
    opt = sam(lookahead(adamw(**DECAY), 2), rho=0.5)
    mine, state = start(), opt.init(start())
    for _ in range(4):
        mine, state = opt.step(mine, state, value_and_grad)
    close(mine, params)


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

    for cls in (SAM, Lookahead, Backtracking):
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


# Values: torch.func, vmap, compile, unroll

VALUES = {
    "sam": lambda lr, x: sam(sgd(lr=lr), rho=x),
    "backtracking": lambda lr, x: backtracking(sgd(lr=8 * lr), shrink=x),
}


def trained(name: str, lr: Any, x: Any, p: Tensor, n: int = 3) -> Tensor:
    opt = VALUES[name](lr, x)
    state = opt.init([p, p.sum(0)])
    params: Any = [p, p.sum(0)]
    for _ in range(n):
        params, state = opt.step(params, state, value_and_grad)
    return params[0]


@pytest.mark.parametrize("name", VALUES)
def test_values_vmap_and_differentiate(name: str) -> None:
    xs = torch.tensor([0.2, 0.5, 0.7], dtype=WIDE)
    ps = torch.randn(3, 3, 2, dtype=WIDE, generator=torch.Generator().manual_seed(3))
    lr = torch.tensor(0.3, dtype=WIDE)
    together = torch.func.vmap(lambda x, p: trained(name, lr, x, p))(xs, ps)
    for found, x, p in zip(together, xs, ps):
        close([found], [trained(name, lr, x, p)])

    def end(x: Tensor) -> Tensor:
        return (trained(name, lr, x, ps[0]) ** 2).sum()

    slope, size = torch.func.grad(end)(xs[1]), 1e-6
    by_hand = (end(xs[1] + size) - end(xs[1] - size)) / (2 * size)
    torch.testing.assert_close(slope, by_hand, rtol=1e-5, atol=1e-8)
    assert slope != 0


@pytest.mark.parametrize("name", [*VALUES, "lookahead"])
def test_values_unroll(name: str) -> None:
    p = start()[0]

    def end(lr: Tensor) -> Any:
        opt: Any = (
            lookahead(sgd(lr=lr), 2) if name == "lookahead" else VALUES[name](lr, 0.5)
        )
        run = unroll(opt, lambda q, _: fit([q, q.sum(0)]), p, None, range(4))
        return run

    lr = torch.tensor(0.01, dtype=WIDE)
    run = end(lr)
    assert run.losses.shape == (4,) and run.losses[0] == fit([p, p.sum(0)])
    assert run.losses[-1] < run.losses[0]
    slope, size = torch.func.grad(lambda x: end(x).losses.sum())(lr), 1e-6
    by_hand = (end(lr + size).losses.sum() - end(lr - size).losses.sum()) / (2 * size)
    torch.testing.assert_close(slope, by_hand, rtol=1e-4, atol=1e-7)
    kept = unroll(
        VALUES["sam"](0.1, 0.5),
        lambda q, _: (fit([q, q.sum(0)]), q[0]),
        *(p, None, range(4)),
        has_aux=True,
        checkpoint_every=2,
    )
    assert kept[1].shape == (4, 2) and torch.equal(kept[1][0], p[0])
    with pytest.raises(TypeError, match=r"extras=\.\.\.\) of an optimizer whose step"):
        unroll(VALUES["sam"](0.1, 0.5), lambda q, _: q.sum(), p, None, [0], extras=dict)


def test_members_search_alone() -> None:
    """Under vmap each has a length of its own."""
    opt, at = backtracking(sgd(lr=1.0)), torch.tensor([1.0, 100.0])

    def step(p: Tensor, a: Tensor) -> Tensor:
        return opt.step(p, opt.init(p), lambda q: (a * q * q, 2 * a * q))[1].t

    found = torch.func.vmap(step)(torch.ones(2), at)
    assert found.tolist() == [0.5, 2.0**-7]


@pytest.mark.full
def test_a_step_is_one_graph() -> None:
    for name in VALUES:
        p = start()[0]
        compiled = torch.compile(
            lambda q, n=name: trained(n, 0.1, 0.5, q, 1), fullgraph=True
        )
        close([compiled(p)], [trained(name, 0.1, 0.5, p, 1)])


# Refusals, before the first write


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
        (lambda o: Backtracking(o, decrease=1.0), ValueError, r"decrease=1\.0: .* below 1"),
        (lambda o: Backtracking(o, shrink=1.0), ValueError, r"shrink=1\.0: .* below 1"),
        (lambda o: Backtracking(o, max_ls=0), ValueError, r"max_ls=0"),
        (lambda o: SAM(adamw(lr=0.1)), TypeError, r"Around a value, .* is transforms\.sam"),
        (lambda o: sam(o), TypeError, r"sam got AdamW|has no init"),
    ],
)
def test_options_are_checked(make: Any, error: Any, text: str) -> None:
    optimizer = AdamW([torch.zeros(1, requires_grad=True)], **EAGER)
    with pytest.raises(error, match=text):
        make(optimizer)


def test_optimizers_that_do_not_fit_are_named() -> None:
    p = torch.ones(1, requires_grad=True)
    for cls in (Lookahead, Backtracking):
        with pytest.raises(ValueError, match=f"{cls.__name__} writes parameters"):
            cls(ScheduleFreeSGD([p], lr=0.1, **EAGER))
    SAM(ScheduleFreeSGD([p], lr=0.1, **EAGER))
    for wrap in (lookahead, backtracking):
        with pytest.raises(ValueError, match="writes parameters"):
            wrap(every_k(schedule_free_sgd(lr=0.1), 2))
        with pytest.raises(TypeError, match=r"compensation of torch\.bfloat16 would not"):
            wrap(sgd(lr=0.1)).init(p.detach().bfloat16())
    for cls in (SAM, Backtracking):
        with pytest.raises(ValueError, match="maximize=True: let the loss be its negative"):
            cls(torch.optim.SGD([p], lr=0.1, maximize=True))
        with pytest.raises(ValueError, match="with gradient_release=True"):
            cls(SGD([p], lr=0.1, gradient_release=True, **EAGER))
        with pytest.raises(TypeError, match=r"missing .* argument: 'closure'"):
            run = Run(lambda ps, c=cls: c(LBFGS(ps)))
            run.steps(1)
        with pytest.raises(TypeError, match=rf"{cls.__name__}\.step: closure=None"):
            cls(SGD([p], lr=0.1, **EAGER)).step()
    for wrap in (sam, backtracking):
        with pytest.raises(ValueError, match="maximize=True"):
            wrap(partition(("*", sgd(lr=0.1, maximize=True))))
        opt = every_k(wrap(sgd(lr=0.1)), 2)
        with pytest.raises(TypeError, match=r"What gives gradients goes inside"):
            opt.step(p, p, opt.init(p))


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
