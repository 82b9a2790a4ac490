"""Derivatives through training runs: right for every rule, in every mode; memory."""

import json
from functools import partial
from itertools import pairwise

import pytest
import torch
from cases import (
    MATRICES,
    NAMES,
    SCHEDULE_FREE,
    SENSITIVE,
    SOME,
    Case,
    count_betas,
)
from refusals import Scene, refuses
from tiers import few
from torch.func import grad, hessian, jvp, vmap
from torch.profiler import profile
from torch.utils import _pytree as pytree

from optimi_func import adamw, detach, unroll

DOUBLE = torch.float64
STEPS = 9  # RAdam trusts v from the sixth on, Ranger synchronises at 4 and 8


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=DOUBLE)


def problem():
    """Params, and batches of inputs, integer classes and loss weights."""
    params = {
        "w": 0.5 * torch.randn(4, 3, dtype=DOUBLE),
        "b": torch.full((1, 3), 0.1, dtype=DOUBLE),  # at 0 LAMB has no derivative
    }
    batches = [
        (
            torch.randn(6, 4, dtype=DOUBLE),
            torch.randint(3, (6,)),
            torch.rand(6, dtype=DOUBLE) + 0.5,
        )
        for _ in range(STEPS)
    ]
    return params, batches


def loss(params, batch):
    x, y, weights = batch
    logits = torch.tanh(x @ params["w"] + params["b"])
    picked = logits.log_softmax(-1).gather(1, y[:, None])[:, 0]
    return -(weights * picked).mean()


RULES = [
    # Derivatives hold the bases of SOAP fixed, differences do not.
    *[Case(n, {"max_precond_dim": 1} if n in SENSITIVE else {}) for n in NAMES],
    Case("sgd", {"momentum": 0.9}),
    Case("sgd", {"momentum": 0.9, "nesterov": True}),
    Case("adam", {"amsgrad": True}),
    Case("adamw", {"decouple_lr": True, "max_lr": 0.1}),
    Case("adan", {"adam_wd": True}),
    Case("adamw", {"cautious": True}),
]


def hyper_of(case: Case) -> dict:
    """Every number that the rule has a derivative in."""
    hyper = {"lr": number(0.03), "weight_decay": number(0.02)}
    if case.name == "sgd":
        return hyper | {"momentum": number(0.8)} if case.options else hyper
    own = {
        "rmsprop": {"alpha": 0.8, "eps": 1e-3, "momentum": 0.5},
        "adagrad": {"lr_decay": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.1},
        "adadelta": {"rho": 0.8, "eps": 1e-3},
        "asgd": {"lambd": 0.1, "alpha": 0.6},
        "rprop": {},
        "scion": {"momentum": 0.8, "radius": 0.7},
        "kron": {"momentum": 0.8, "precond_lr": 0.2},
    }
    if case.name in own:
        return hyper | {key: number(x) for key, x in own[case.name].items()}
    if case.name in MATRICES:
        rows = {"row_beta": number(0.7)} if case.name == "normuon" else {}
        return hyper | rows | {"momentum": number(0.8), "eps": number(1e-3)}
    if case.name == "adafactor":
        own = {"decay_rate": number(-0.7), "clip_threshold": number(0.6)}
        return hyper | own | {"eps": (number(1e-3), number(0.1)), "beta1": number(0.8)}
    if case.name in SCHEDULE_FREE:
        hyper |= {"r": number(0.5), "weight_lr_power": number(1.5)}
        if case.name != "schedule_free_radam":
            hyper["warmup_steps"] = number(3.5)
    if case.name == "schedule_free_sgd":
        return hyper | {"momentum": number(0.8)}
    b2 = 0.8 if case.name in ("radam", "ranger") else 0.95
    betas = (0.9, 0.8, 0.95) if count_betas(case.name) == 3 else (0.8, b2)
    hyper["betas"] = tuple(map(number, betas))
    if case.name != "lion":
        hyper["eps"] = number(1e-3)
    if case.name == "ranger":
        hyper["alpha"] = number(0.4)
    return hyper


def factory_of(case: Case):
    """The case's factory, static options bound."""
    options = {k: v for k, v in case.options.items() if k != "momentum"}
    if case.name == "ranger":
        options["k"] = 4
    return lambda **hyper: case.factory(**hyper, **options)


def directional(fn, at, along, h: float = 1e-6) -> float:
    ends = [
        fn(*pytree.tree_map(lambda x, t, s=s: x + s * h * t, at, along)) for s in (1, -1)
    ]
    return ((ends[0] - ends[1]) / (2 * h)).item()


@pytest.mark.parametrize("case", few(RULES, (*SOME, "muon", "adam"), lambda c: c.id))
@pytest.mark.filterwarnings("ignore:weight_decay=", "ignore:eps=")
def test_hypergradients(case: Case) -> None:
    """To all numbers, the first params, and loss weights; reverse, forward, differences.

    Fresh state is part of the function: Ranger's slow weights begin as the params.
    """
    params, batches = problem()
    validation = problem()[1][0]
    factory = factory_of(case)

    def end(hyper, params, weights):
        data = [(x, y, w) for (x, y, _), w in zip(batches, weights)]
        run = unroll(factory, loss, params, None, data, hyper=hyper)
        return loss(run.params, validation)

    at = (hyper_of(case), params, torch.stack([w for _, _, w in batches]))
    reverse = grad(end, argnums=(0, 1, 2))(*at)
    zeros = pytree.tree_map(torch.zeros_like, at)
    leaves, spec = pytree.tree_flatten(zeros)
    seen = 0
    for i, (path, exact) in enumerate(pytree.tree_flatten_with_path(reverse)[0]):
        along = list(leaves)
        along[i] = torch.randn_like(leaves[i]) if leaves[i].dim() else number(1.0)
        tangent = pytree.tree_unflatten(along, spec)
        want = directional(end, at, tangent)
        got = (exact * along[i]).sum().item()
        _, forward = jvp(end, at, tangent)
        assert got == pytest.approx(want, rel=1e-5, abs=1e-9), pytree.keystr(path)
        assert forward.item() == pytest.approx(got, rel=1e-9, abs=1e-13)
        seen += abs(want) > 1e-7
    # A sign has no derivative: betas and weights move nothing, the rest does.
    signs = case.name in ("lion", "rprop")
    assert seen >= (4 if signs else len(leaves) - 1)
    # The weights of every step have moved the end.
    told = reverse[2][case.name in SENSITIVE :]  # whose first gradient moves nothing
    assert signs or (told.abs().amax(1) > 1e-7).all()


@pytest.mark.parametrize("name", few(NAMES, SOME))
def test_second_derivatives(name: str) -> None:
    """Of the run's end to lr, by grad of grad and hessian, against differences."""
    case = Case(name)
    params, batches = problem()

    def end(lr):
        hyper = {**hyper_of(case), "lr": lr}
        run = unroll(factory_of(case), loss, params, None, batches, hyper=hyper)
        return loss(run.params, batches[0])

    lr = number(0.03)
    second = grad(grad(end))(lr)
    (difference,) = (directional(grad(end), (lr,), (number(1.0),)),)
    assert second.item() == pytest.approx(difference, rel=1e-5, abs=1e-8)
    assert hessian(end)(lr).item() == pytest.approx(second.item(), rel=1e-9)


def test_it_trains_as_a_loop_does() -> None:
    params, batches = problem()
    optimizer = adamw(lr=0.03)
    run = unroll(optimizer, loss, params, None, iter(batches))
    p, state = params, optimizer.init(params)
    for batch, one in zip(batches, run.losses):
        assert loss(p, batch) == one
        p, state = optimizer.step(p, grad(loss)(p, batch), state)
    for ours, theirs in zip(pytree.tree_leaves(run[:2]), pytree.tree_leaves((p, state))):
        assert torch.equal(ours, theirs)
    # In two parts, the second from the state of the first.
    half = unroll(optimizer, loss, params, None, batches[:4])
    rest = unroll(optimizer, loss, half.params, half.state, batches[4:])
    assert torch.equal(rest.params["w"], run.params["w"])
    with_grad = run.params["w"].requires_grad
    assert not with_grad


def test_detached_runs_begin_where_they_are_cut() -> None:
    params, batches = problem()
    half = unroll(adamw(lr=0.03), loss, params, None, batches[:5])

    def cut(lr, points):
        state, optimizer = None, adamw(lr=lr)
        p = params
        for first, last in pairwise([0, *points, len(batches)]):
            p, state = detach((p, state)) if first else (p, state)
            p, state, _ = unroll(optimizer, loss, p, state, batches[first:last])
        return loss(p, batches[0])

    def rest(lr):
        run = unroll(adamw(lr=lr), loss, half.params, half.state, batches[5:])
        return loss(run.params, batches[0])

    lr = number(0.03)
    want = grad(rest)(lr)
    for points in ([5], [2, 5]):
        torch.testing.assert_close(grad(cut)(lr, points), want, rtol=1e-12, atol=0)
        _, forward = jvp(lambda x, p=points: cut(x, p), (lr,), (number(1.0),))
        torch.testing.assert_close(forward, want, rtol=1e-12, atol=0)
    assert (grad(cut)(lr, []) - want).abs() > 1e-6


def peak(call, trace) -> int:
    """The most bytes allocated at once, above what was there, by the profiler's count."""
    call()
    with profile(profile_memory=True) as recorded:
        call()
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    memory = [e for e in events if e["name"] == "[memory]"]
    sizes = sorted((e["ts"], e["args"]["Total Allocated"]) for e in memory)
    return max(size for _, size in sizes) - sizes[0][1]


def test_memory(tmp_path) -> None:
    """Forward mode: the same for any number of steps. Reverse: of all steps."""
    params = {"w": torch.randn(64, 64)}
    lr = torch.tensor(0.01)

    def end(steps):
        def of(lr):
            run = unroll(
                *(adamw, lambda p, x: (x @ p["w"]).square().mean(), params, None),
                (torch.ones(8, 64) for _ in range(steps)),
                hyper={"lr": lr},
            )
            return run.params["w"].sum()

        return of

    def used(steps, mode):
        of = end(steps)
        calls = {
            "forward": lambda: jvp(of, (lr,), (torch.ones(()),)),
            "reverse": lambda: grad(of)(lr),
        }
        return peak(calls[mode], tmp_path / "trace.json") / params["w"].nbytes

    few, many = used(6, "forward"), used(24, "forward")
    assert many < 1.1 * few
    reverse = used(6, "reverse"), used(24, "reverse")
    assert reverse[1] > 3 * reverse[0] > 3 * few


def test_an_error_in_the_middle_leaves_what_was_passed_in() -> None:
    params, batches = problem()
    state = adamw(lr=0.1).init(params)
    before = [x.clone() for x in pytree.tree_leaves((params, state))]
    seen = []

    def fails(p, batch):
        seen.append(batch)
        if len(seen) > 4:
            raise KeyError("no such batch")
        return loss(p, batch)

    with pytest.raises(KeyError, match="no such batch"):
        unroll(adamw(lr=0.1), fails, params, state, batches)
    for x, y in zip(pytree.tree_leaves((params, state)), before):
        assert torch.equal(x, y)
    # And torch.func is where it was.
    assert unroll(adamw(lr=0.1), loss, params, state, batches[:2]).losses.shape == (2,)


BAD = {
    "run(batches, hyper={'lr': 0.1})": r"TypeError: hyper has \['lr'\], but every",
    "run(batches, hyper=[0.1])": r"TypeError: hyper=\[0\.1\]: allowed are numbers by name",
    "run({'x': batches[0]})": "TypeError: batches=.*a batch for each step",
    "run('data')": "TypeError: batches=.*a batch for each step",
    "run(torch.tensor(1.0))": "TypeError: batches=.*a batch for each step",
    "run(iter(batches), steps=2)": r"TypeError: steps=2.*islice\(batches, steps\)",
    "run([])": "batches is empty",
    "unroll(torch.optim.AdamW, loss, params, None, batches)": (
        "TypeError: allowed are factories"
    ),
    "unroll(sgd(lr=0.1), lambda p, b: p['w'], params, None, batches)": (
        r"a loss of shape \(4, 3\)"
    ),
    "unroll(sgd(lr=0.1), lambda p, b: p['w'].argmax(), params, None, batches)": (
        r"TypeError: a loss of dtype torch\.int64"
    ),
}


@refuses(BAD)
def test_bad_input() -> Scene:
    params, batches = problem()
    return locals() | {"run": partial(unroll, adamw(lr=0.1), loss, params, None)}


def test_members_have_hypergradients_of_their_own() -> None:
    """Populations and unrolled runs compose: vmap over runs."""
    params, batches = problem()

    def end(lr):
        run = unroll(adamw, loss, params, None, batches, hyper={"lr": lr})
        return loss(run.params, batches[0])

    lrs = torch.tensor([0.01, 0.03], dtype=DOUBLE)
    got = vmap(grad(end))(lrs)
    for lr, one in zip(lrs, got):
        torch.testing.assert_close(one, grad(end)(lr), rtol=1e-10, atol=0)
