"""Refusals of what a step could see, and would otherwise take without a word."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from refusals import Scene, refuses
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import optimi_func
from optimi_func import (
    SGD,
    AdamW,
    adamw,
    adamw_init,
    adamw_step,
    compiled,
    detach,
    population,
    prepare_for_gradient_release,
    sgd,
    sgd_init,
    sgd_step,
    unroll,
)
from optimi_func.compiled import train_step
from optimi_func.core.checks import value_of
from optimi_func.rules import Optimizer
from optimi_func.schedules import cosine, linear, one_cycle, warmup_cosine
from optimi_func.transforms import chain, clip_value


def run(optimizer: Any, steps: int = 9) -> Tensor:
    w = torch.ones(1)
    state = optimizer.init(w)
    for _ in range(steps):
        w, state = optimizer.step(w, 2 * w, state)
    return w


# Values of tensors


OUT_OF_RANGE = {
    "adamw(lr={'w': of(0.1), 'b': of(-1.0)})": r"lr=-1\.0",
    "adamw(decouple_lr=True, max_lr=of(0.0))": r"max_lr=0\.0: .*above 0",
    "adamw_step({}, {}, None, lr=of(-0.1))": r"lr=-0\.1",
    "clip_value(of(0.0))": r"limit=0\.0: allowed is finite, above 0\.0",
    "ema(sgd(lr=0.1), of(1.0))": r"decay=1\.0: .*below 1",
    "linear(of(-1.0), 0.0, 4)": r"start=-1\.0",
}


@pytest.mark.parametrize("of", [float, partial(torch.tensor, dtype=torch.float64)])
@refuses(OUT_OF_RANGE)
def test_a_tensor_out_of_range_is_refused_as_a_number_is(of: Any) -> Scene:
    return {"of": of}


OPTIONS = {
    "adamw(lr=0.0, decouple_lr=True)": "max_lr=None",
    "adamw(lr=lambda s: 0.1, decouple_lr=True)": "Invalid maximum",
    "adamw(lr=torch.tensor(0.1), decouple_lr=True)": "Invalid max",
    "ranger(lr=0.1, k=2.5)": r"k=2\.5: allowed are whole numbers",
    "sgd(lr=0.1, nesterov=True)": "nesterov=True with momentum=0",
    "sgd(lr=0.1, momentum=0.9, dampening=0.5, nesterov=True)": r"dampening=0\.5",
    "adamw_init(torch.ones(2), state_dtype=torch.int32)": "TypeError: int32",
    "adafactor(eps={'a': 0.5})": r"TypeError: eps=\{.* transforms\.partition has",
    "clip_value({'a': 0.5, 'b': 0.25})": r"TypeError: limit=\{.* transforms\.partition has",
    "adamw(lr=torch.tensor(0.1 + 1j))": r"TypeError: lr=a tensor of shape .*allowed are",
    "adamw(lr=torch.tensor(True))": r"TypeError: lr=a tensor of shape .*allowed are .*real",
    "run(rates)": r"learning rate: lr=-1\.0",
    "run(means)": r"momentum=1\.5",
}


@refuses(OPTIONS)
def test_options_that_do_not_go_together() -> Scene:
    """Two have tensors that were written to, at which each step looks again."""
    lr, momentum = torch.tensor(0.1), torch.tensor(0.5)
    rates, means = sgd(lr=lr), sgd(lr=0.1, momentum=momentum)
    lr.fill_(-1.0)
    momentum.fill_(1.5)
    return locals()


def test_a_graph_refuses_a_tree_of_betas_too() -> None:
    step = torch.compile(adamw_step, fullgraph=True, backend="eager")
    p = {"a": torch.ones(1)}
    with pytest.raises(
        Exception, match=r"betas=\{.*transforms\.partition has an optimizer"
    ):
        step(p, p, adamw_init(p), lr=0.1, betas={"a": (0.9, 0.99)})


def test_a_complex_or_bool_tensor_is_refused_in_graphs_too() -> None:
    for wrong in (torch.tensor(0.1 + 1j), torch.tensor(True)):
        with pytest.raises(Exception, match="allowed are numbers and real 0-d tensors"):
            torch.compile(lambda x: adamw(lr=x).lr, backend="eager", fullgraph=True)(wrong)


def test_values_are_read_where_that_neither_waits_nor_falsifies_a_trace() -> None:
    x, seen = torch.tensor(-1.0), []

    def look(x: Tensor) -> Tensor:
        seen.append(value_of(x))
        return x * 1.0

    look(x)
    look(x.clone().requires_grad_())
    assert seen == [-1.0, -1.0]
    vmap(look)(x.expand(2))
    grad(lambda x: look(x).sum())(x)
    jvp(look, (x,), (x,))
    make_fx(look)(x)
    torch.compile(look, backend="eager")(x)
    vmap(lambda y: look(x) + y)(torch.ones(2))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        look(mode.from_tensor(x))
    look(mode.from_tensor(x))
    look(x.to("meta"))
    look(torch.ones(2))
    assert seen[2:] and set(seen[2:]) == {None}


# Values of schedules


SCHEDULES = {
    "sgd(lr=lambda t: 0.2 * (1 - t / 3))": r"lr is a schedule that returned -0\.06",
    "sgd(lr=lambda t: torch.where(t > 1, nan, 0.1))": "lr is a schedule that returned nan",
    "sgd(lr=0.1, weight_decay=lambda t: -t)": "weight_decay is a schedule",
    "sgd(lr=0.1, momentum=lambda t: t * 0.3)": r"momentum=1\.2",
    "sgd(lr=0.1, momentum=lambda t: float(t) * 0.3)": r"momentum=1\.2",
    "adamw(lr=0.1, betas=(lambda t: 0.5 + t * 0.3, 0.9))": r"betas\[0\]=1\.1",
    "chain(clip_value(lambda t: 1 - t / 3), sgd(lr=0.1))": "limit is a schedule",
    "ema(sgd(lr=0.1), lambda t: t * 0.4)": r"averaging decay: decay=1\.2",
}


@refuses({f"x = {k}; run(x, 1); run(x)": x for k, x in SCHEDULES.items()})
def test_a_schedule_out_of_range_is_refused_by_name() -> Scene:
    return {}


def test_what_a_schedule_may_be() -> None:
    # A momentum that is 0 at a step is not another rule.
    run(sgd(lr=0.1, nesterov=True, momentum=lambda t: 0.0), 3)
    run(chain(clip_value(lambda t: math.inf), sgd(lr=0.1)), 2)


COMPILED = {
    f"compiled.{step}(w, w, sgd_init(w), lr={lr})": ("lr(=| is a schedule that returned )-")
    for step in ("sgd_step", "sgd_step_")
    for lr in ("torch.tensor(-0.1)", "lambda t: t - 1.0")
}
# In place, parameters that share memory would move twice.
COMPILED |= {
    f"compiled.sgd_step_({params}, {params}, sgd_init({params}), lr=1.0)": (
        f"{text} share memory"
    )
    for params, text in {
        "tied": r"params\['emb'\] and params\['head'\]",
        "parts": r"params\[1\] and params\[2\]",
        "[base, base.view(torch.int32).view(torch.float32)[1]]": (
            r"params\[0\] and params\[1\]"
        ),
    }.items()
}
for _in_place in ("", "_"):
    # A compiled step drops no derivative without a word.
    COMPILED |= {
        f"compiled.adamw_step{_in_place}({call})": f"TypeError: {text}"
        for call, text in {
            "p, p, state, lr=rate": "lr requires grad.* call optimi_func.adamw_step",
            "p, p * rate, state, lr=0.1": "grads requires grad",
            "p * rate, p, state, lr=0.1": "params requires grad",
            "p, p, moved, lr=0.1": "state.leaves requires grad",
            "p, p, state, lr=0.1, betas=(rate, 0.9)": "betas requires grad",
        }.items()
    }


@refuses(COMPILED)
def test_compiled_steps_refuse() -> Scene:
    w, base, p = torch.zeros(1), torch.zeros(4, 4), torch.ones(3)
    tied, parts = {"emb": w, "head": w}, [base[:, :2], base[:, 2:], base[:, 2:3]]
    rate, state = torch.tensor(0.1, requires_grad=True), adamw_init(p)
    moved = adamw_step(p, p * rate, state, lr=0.1)[1]
    return locals()


# Populations


MEMBERS = {
    "adamw, w, {'lr': torch.linspace(-3, -1, 4)}": r"learning rate: lr=-3\.0",
    "adamw, w, {'lr': torch.tensor([0.1, 0.1, 0.1, nan])}": "lr=nan",
    "adamw, w, {'lr': 0.1, 'betas': (torch.full((4,), 1.5), 0.9)}": r"betas\[0\]=1\.5",
    "lambda a: sgd(lr=linear(a, 0.0, 4)), w, {'a': torch.tensor([1.0, 1, 1, -1])}": "start",
    "partial(adamw, decouple_lr=True), w, {'lr': 0.1}": "a tensor, as in a population",
    "adamw, {'w': w}, {'lr': [0.1, 0.2]}": (
        r"lr is no prefix of params: .*members are a tensor"
    ),
    "adamw, {'w': w}, {'lr': 0.1, 'weight_decay': [0.1, 0.2]}": (
        r"weight_decay is no prefix of params: .*members are a tensor"
    ),
}
PREFIXES = {"[0.1, 0.2]": "members are a tensor", "{'b': 0.1}": "'w'"}
REFUSED = {f"population.init({k}, n=4)": x for k, x in MEMBERS.items()} | {
    f"adamw(**{{'lr': 0.1, {name!r}: {tree}}}).init({{'w': w}})": (
        f"{name} is no prefix of params: .*{text}"
    )
    for name in ("lr", "weight_decay")
    for tree, text in PREFIXES.items()
}


@refuses({call: text for call, text in REFUSED.items()})
def test_init_checks_every_member_and_prefix() -> Scene:
    return {"w": torch.ones(2), "partial": partial}


# Parameters that share memory


@pytest.mark.kernels
def test_slices_and_one_of_two_tied_parameters_step_in_place() -> None:
    w, base = torch.zeros(1), torch.zeros(4, 4)
    tied, parts = {"emb": w, "head": w}, [base[:, :2], base[:, 2:]]
    pure, _ = sgd_step(tied, {k: torch.ones(1) for k in tied}, sgd_init(tied), lr=1.0)
    assert pure["emb"] == pure["head"] == -1.0 and not w.any()
    grads = {"emb": torch.ones(1), "head": None}
    compiled.sgd_step_(tied, grads, sgd_init(tied), lr=1.0)
    compiled.sgd_step_(parts, [torch.ones(4, 2)] * 2, sgd_init(parts), lr=1.0)
    assert w.item() == -1.0 and base.eq(-1.0).all()


def test_parameters_in_one_memory_are_refused_by_the_release_of_a_tree() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = torch.nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match=r"'0.weight'\] and params\['1.weight'\] share"):
        prepare_for_gradient_release(model, sgd(lr=0.1))
    model[1].weight = model[0].weight
    prepare_for_gradient_release(model, sgd(lr=0.1))


# Derivatives and traces of compiled steps


@pytest.mark.kernels
def test_leaves_and_no_grad_are_the_usual_case() -> None:
    p = torch.ones(3, requires_grad=True)
    moved, _ = compiled.adamw_step(p, torch.ones(3), adamw_init(p), lr=0.1)
    assert not moved.requires_grad
    with torch.no_grad():
        again, _ = compiled.adamw_step(
            p, torch.ones(3), adamw_init(p), lr=torch.tensor(0.1, requires_grad=True)
        )
    assert torch.equal(moved, again)


def _vmapped(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return vmap(f)(x.expand(2, 3))


def _faked(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FakeTensorMode():
        return f(torch.ones(3))


def _fakes_outside(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return f(FakeTensorMode().from_tensor(x))


@pytest.mark.parametrize(
    "through",
    [
        _vmapped,
        lambda f, x: grad(f)(x),
        lambda f, x: jvp(f, (x,), (x,)),
        lambda f, x: make_fx(f)(x),
        lambda f, x: make_fx(f, tracing_mode="symbolic")(x),
        _faked,
        _fakes_outside,
        lambda f, x: torch.compile(f, backend="eager")(x),
        lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x),
    ],
)
@pytest.mark.parametrize("step", [compiled.adamw_step, compiled.adamw_step_])
def test_a_compiled_step_names_the_function_to_call_in_a_trace(through, step) -> None:
    state = adamw_init(torch.ones(3))

    def f(p: Tensor) -> Tensor:
        return step(p, p, state, lr=0.1)[0].sum()

    with pytest.raises(Exception, match=r"cannot run .*call optimi_func\.adamw_step here"):
        through(f, torch.ones(3))


class Plain(Optimizer):
    def direction(self, g: Tensor):
        return g


def test_a_compiled_step_of_an_own_rule_names_its_step() -> None:
    value, p = Plain.pure(lr=0.1), torch.ones(2, 3)
    state = value.init(p[0])
    with pytest.raises(RuntimeError, match="call the optimizer's own step here"):
        vmap(lambda p: compiled.step(value, p, p, state)[0])(p)


def test_train_step_refuses_a_trace() -> None:
    model = torch.nn.Linear(2, 1)
    pure = compiled.train_step(model, lambda y, _: y.sum(), sgd(lr=0.1))
    ours = compiled.train_step(model, lambda y, _: y.sum(), SGD(model.parameters(), lr=0.1))
    state = pure.init()
    for f in (lambda x: pure(state, x)[1].loss, lambda x: ours(x).loss):
        for through in (vmap(f), torch.compile(f, backend="eager")):
            with pytest.raises(RuntimeError, match="a compiled step cannot run under"):
                through(torch.ones(3, 2))


@pytest.mark.parametrize("how", ["called", "replaced", "of a subclass"])
def test_a_class_steps_within_torch_compile(how: str) -> None:
    class Subclass(AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return super().step(*args, **kwargs)

    def made() -> tuple[Tensor, AdamW, list[str]]:
        w = torch.ones(3, requires_grad=True)
        cls = Subclass if how == "of a subclass" else AdamW
        optimizer, calls = cls([w], lr=0.1, compile=False), list[str]()
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        return w, optimizer, calls

    def train(w: Tensor, optimizer: AdamW) -> None:
        (w * w).sum().backward()
        optimizer.step()

    (w, optimizer, calls), (expected, eager, eager_calls) = made(), made()
    run = train
    if how == "replaced":
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    else:
        run = torch.compile(train, backend="eager")
    for _ in range(3):
        run(w, optimizer)
        train(expected, eager)
    assert torch.equal(w, expected) and w.max() < 1.0
    assert calls == eager_calls == ["pre", "post"] * 3


def test_a_class_is_made_within_torch_compile() -> None:
    @torch.compile(backend="eager")
    def train(w: Tensor) -> AdamW:
        optimizer = AdamW([w], lr=0.1, compile=False)
        w.sum().backward()
        optimizer.step()
        return optimizer

    w, expected = [torch.ones(3, requires_grad=True) for _ in range(2)]
    assert isinstance(train(w), AdamW)
    eager = AdamW([expected], lr=0.1, compile=False)
    expected.sum().backward()
    eager.step()
    assert torch.equal(w, expected) and w.max() < 1.0


# Words


@dataclass
class Unregistered:
    w: Tensor


ARITY = r"two arguments, loss_fn\(output, batch\)"
WORDS = {
    "adamw_init(Unregistered(ones))": "TypeError: pytree.register_dataclass",
    "adamw_init(model.parameters())": r"TypeError: dict\(model\.named_parameters\(\)\)",
    "adamw_init(model)": r"TypeError: module Linear: .*dict\(model\.named_parameters\(\)\)",
    "adamw_init({'w': None})": r"params=\{'w': None\} holds no tensor",
    "adamw_step(model, None, None, lr=0.1)": "TypeError: module Linear",
    "adamw_step(p, {'w': p}, state, lr=0.1)": r"TypeError: grads\['w'\] is a dict",
    "adamw_step(p, p, state._replace(leaves=p), lr=0.1)": (
        r"TypeError: ^(?!.*tensor\(\[).* is a tensor of shape"
    ),
    "adamw_step(p, p, state._replace(step=0), lr=0.1)": "TypeError: state.step is 0: ",
    "adamw_step(p, p, state._replace(step=torch.ones(2)), lr=0.1)": (
        r"TypeError: ^(?!.*tensor\(\[).*state.step is a tensor of shape \(2,\)"
    ),
    # Errors of adamw do not speak of adam.
    "adamw_step(p, p, {}, lr=0.1)": r"TypeError: ^(?!.*adam\b).*init",
    "adamw_step(p, p, sgd_init(p), lr=0.1)": r"^(?!.*adam\b).*init",
    "AdamW(model.parameters()).load_state_dict(saved)": "the optimizer needs",
    "adamw_step(p, {}, state, lr=0.1)": (
        r"grads and params differ .*: params\['w'\] has no counterpart"
    ),
    "adamw_step(p, {'w': torch.ones(4)}, state, lr=0.1)": (
        r"grads\['w'\] has shape \(4,\), its parameter \(3,\)"
    ),
    "adamw_step(p, {'w': ones.half()}, state, lr=0.1)": (
        r"TypeError: grads\['w'\] has dtype torch.float16, narrower than its parameter's "
        r"torch.float32: allowed are that or wider, such as g.to\(torch.float32\)"
    ),
    "adamw_step(p, {'w': ones.long()}, state, lr=0.1)": (
        r"TypeError: grads\['w'\] has dtype torch.int64: allowed are floating ones"
    ),
    "adamw_step(p, {'w': ones.to_sparse()}, state, lr=0.1)": (
        r"TypeError: grads\['w'\] has layout torch.sparse_coo: allowed is strided\. Sparse "
        "gradients are for torch.optim.SparseAdam"
    ),
    "lion_step(p, p, state, lr=0.1)": (
        r"state.leaves\['w'\] holds \('exp_avg', 'exp_avg_sq'\), but the "
        r"optimizer needs \('exp_avg',\): make it with its own init and the same options"
    ),
    "adamw_step(p, p, state, lr=torch.ones(3))": (
        r"shape \(3,\) reached the step, which takes numbers "
        "and 0-d tensors.*keyword arguments are not batched. Pass it positionally"
    ),
    "adamw_init({'w': ones.long()})": (
        r"TypeError: params\['w'\] has dtype torch.int64: allowed are floating and complex"
    ),
    "soap(lr=0.1).init(ones.cfloat())": (
        "TypeError: params has dtype torch.complex64: soap maps whole matrices of real "
        "numbers. Allowed for complex parameters are elementwise rules, such as adamw"
    ),
    "train_step(model, lambda y: y, sgd(lr=0.1))": f"TypeError: {ARITY}",
    "train_step(model, lambda: 0, sgd(lr=0.1))": f"TypeError: {ARITY}",
    "train_step(model, lambda y, x, z: y, sgd(lr=0.1))": f"TypeError: {ARITY}",
    **{
        f"unroll(sgd(lr=0.1), loss_fn, ones, None, ones, steps={n})": (
            f"steps={n}: allowed are whole numbers"
        )
        for n in (0, 2.0, True)
    },
    "unroll(sgd(lr=0.1), loss_fn, ones, None, 5)": (
        "TypeError: batches=5: allowed is an iterable.*steps="
    ),
}


@refuses(WORDS)
def test_what_is_said() -> Scene:
    ones, model = torch.ones(3), torch.nn.Linear(2, 1)
    p = {"w": ones}
    state = adamw_init(p)
    saved = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0, 1]}]}
    return locals() | {"train_step": train_step, "unroll": unroll}


def test_a_graph_tells_types_too() -> None:
    p = {"w": torch.ones(3)}
    step = torch.compile(adamw_step, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"is a dict, which is neither a tensor nor None"):
        step(p, {"w": p}, adamw_init(p), lr=0.1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_help_shows_the_update_and_the_arguments(name: str) -> None:
    value = getattr(optimi_func, name)
    for step in (getattr(optimi_func, f"{name}_step"), getattr(compiled, f"{name}_step_")):
        for part in ("p <- ", "Args:", "weight_decay: "):
            assert part in step.__doc__, part
    assert "p <- " in value.__doc__


def test_a_star_brings_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from optimi_func import *", names)
    assert {"adamw", "AdamW", "adamw_step", "compiled", "unroll", "Storage"} <= names.keys()
    assert not {"core", "execution", "pure", "state"} & names.keys()


def test_a_list_of_numbers_has_one_for_each_tensor() -> None:
    both = [torch.ones(3), torch.ones(2)]
    members = population.init(adamw, both, {"lr": [1e-3, 1e-2]}, n=2)
    assert [x.tolist() for x in members.hyper["lr"]] == [[1e-3] * 2, [1e-2] * 2]


def test_a_detached_loop_records_nothing() -> None:
    """As the docs advise; attached parameters record every step."""
    model = torch.nn.Linear(2, 1)
    for attached in (True, False):
        params = {k: p if attached else p.detach() for k, p in model.named_parameters()}
        state = adamw_init(params)
        for _ in range(3):
            params, state = adamw_step(params, params, state, lr=0.1)
        tensors = [*params.values(), state.leaves["weight"].exp_avg]
        assert [x.requires_grad for x in tensors] == [attached] * 3


# How values read


@pytest.mark.parametrize(
    "text",
    [
        "adamw(lr=0.001)",
        "adamw(lr=0.001, weight_decay=0.1, betas=(0.9, 0.95))",
        "sgd(lr=0.1, maximize=True, momentum=0.9)",
        "adan(lr=1, decouple_lr=True, max_lr=2.0)",
        "lion(lr={'w': 0.1})",
        "ranger(lr=0.1, k=5)",
    ],
)
def test_a_value_reads_like_the_call_that_makes_it(text: str) -> None:
    assert repr(eval(text, vars(optimi_func))) == text


def test_tensors_read_as_such() -> None:
    assert repr(adamw(lr=torch.tensor(0.5))) == "adamw(lr=tensor(0.5000))"


def loss_fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (p - x).square().sum()


def test_one_batch_for_so_many_steps() -> None:
    p, x = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    once = unroll(sgd(lr=0.1), loss_fn, p, None, x, steps=5)
    listed = unroll(sgd(lr=0.1), loss_fn, p, None, [x] * 5)
    assert torch.equal(once.params, listed.params) and len(once.losses) == 5


def test_detached_between_outer_steps() -> None:
    lr = torch.tensor(0.1, requires_grad=True)
    optimizer = sgd(lr=lr, momentum=0.9)
    params, state = {"w": torch.ones(2)}, optimizer.init({"w": torch.ones(2)})
    for _ in range(2):
        params, state = detach((params, state))
        assert (
            not params["w"].requires_grad and not state.leaves["w"].momentum_buffer.grad_fn
        )
        params, state = optimizer.step(params, params, state)
        assert params["w"].requires_grad
        params["w"].sum().backward()  # through this step alone: no graph is freed before
    assert lr.grad is not None
    assert type(state) is optimi_func.TreeState


def test_schedules_take_what_the_field_has_by_position() -> None:
    pairs = [
        (linear(0.0, 1.0, 4), linear(0.0, 1.0, steps=4)),
        (cosine(1.0, 0.0, 4), cosine(1.0, 0.0, steps=4)),
        (warmup_cosine(1.0, 2, 6), warmup_cosine(1.0, warmup=2, total=6)),
        (one_cycle(1.0, 10), one_cycle(1.0, total=10)),
    ]
    for positional, named in pairs:
        assert [positional(i) for i in range(12)] == [named(i) for i in range(12)]
