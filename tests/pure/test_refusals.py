"""Refusals of what a step could see, and would otherwise take without a word."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import NAMES
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
    ranger,
    schedule_free_adamw,
    sgd,
    sgd_init,
    sgd_step,
    unroll,
)
from optimi_func.compiled import train_step
from optimi_func.core.checks import value_of
from optimi_func.rules import Optimizer
from optimi_func.schedules import cosine, linear, one_cycle, warmup_cosine
from optimi_func.transforms import chain, clip_value, ema

NAN = math.nan


def run(optimizer: Any, steps: int = 9) -> Tensor:
    w = torch.ones(1)
    state = optimizer.init(w)
    for _ in range(steps):
        w, state = optimizer.step(w, 2 * w, state)
    return w


# Values of tensors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: adamw(lr=x(-0.1)), r"learning rate: lr=-0\.1"),
        (lambda x: adamw(lr=x(NAN)), "learning rate: lr=nan"),
        (lambda x: adamw(lr=x(math.inf)), "learning rate: lr=inf"),
        (lambda x: adamw(lr={"w": x(0.1), "b": x(-1.0)}), r"lr=-1\.0"),
        (lambda x: adamw(lr=0.1, weight_decay=x(-0.1)), r"weight_decay=-0\.1"),
        (lambda x: adamw(lr=0.1, betas=(x(1.5), 0.9)), r"betas\[0\]=1\.5: .*below 1"),
        (lambda x: adamw(lr=0.1, eps=x(-1.0)), "epsilon: eps=-1"),
        (lambda x: sgd(lr=0.1, momentum=x(1.0)), r"momentum=1\.0"),
        (lambda x: ranger(lr=0.1, k=x(0.0)), "k=0.0: .*at least 1"),
        (lambda x: adamw(lr=0.1, decouple_lr=True, max_lr=x(0.0)), "max_lr=0.0"),
        (lambda x: schedule_free_adamw(lr=0.1, betas=(x(0.0), 0.9)), r"betas\[0\]=0\.0"),
        (lambda x: clip_value(x(0.0)), r"limit=0\.0: allowed is finite, above 0\.0"),
        (lambda x: ema(sgd(lr=0.1), x(1.0)), r"decay=1\.0: .*below 1"),
        (lambda x: linear(x(-1.0), 0.0, 4), r"start=-1\.0"),
        (lambda x: adamw_step({}, {}, None, lr=x(-0.1)), r"lr=-0\.1"),
        (lambda x: adamw(lr=0.1, betas=(0.9, x(-0.1))), r"beta2 parameter: betas\[1\]=-0"),
        (lambda x: adamw(lr=0.1, max_lr=x(-1.0)), r"maximum learning rate: max_lr=-1\.0"),
        (lambda x: optimi_func.adan(lr=0.1, betas=(0.9, 0.9, x(1.5))), r"betas\[2\]=1\.5"),
        (lambda x: ranger(lr=0.1, alpha=x(2.0)), r"lookahead alpha: alpha=2\.0"),
    ],
)
@pytest.mark.parametrize("of", [float, partial(torch.tensor, dtype=torch.float64)])
def test_a_tensor_out_of_range_is_refused_as_a_number_is(make, text: str, of) -> None:
    with pytest.raises(ValueError, match=text):
        make(of)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: adamw(lr=0.0, decouple_lr=True), ValueError, "max_lr=None"),
        (lambda: adamw(lr=lambda s: 0.1, decouple_lr=True), ValueError, "Invalid maximum"),
        (lambda: adamw(lr=torch.tensor(0.1), decouple_lr=True), ValueError, "Invalid max"),
        (lambda: ranger(lr=0.1, k=2.5), ValueError, r"k=2\.5: allowed are whole numbers"),
        (lambda: sgd(lr=0.1, nesterov=True), ValueError, "nesterov=True with momentum=0"),
        (
            lambda: sgd(lr=0.1, momentum=0.9, dampening=0.5, nesterov=True),
            *(ValueError, r"dampening=0\.5"),
        ),
        (lambda: adamw(lr="0.1"), TypeError, "Invalid learning rate: lr='0.1'"),
        (lambda: adamw_init(torch.ones(2), state_dtype=torch.int32), TypeError, "int32"),
    ],
)
def test_options_that_do_not_go_together(make, error, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda tree: adamw(lr=0.1, betas=(tree, 0.9)), r"betas\[0\]"),
        (lambda tree: adamw(lr=0.1, decouple_lr=True, max_lr=tree), "max_lr"),
        (lambda tree: optimi_func.rprop(lr=0.1, step_sizes=(tree, 1.0)), "step_sizes"),
        (lambda tree: clip_value(tree), "limit"),
    ],
)
def test_other_trees_of_numbers_are_for_partition(make, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}=\{{.* transforms\.partition has an opt"):
        make({"a": 0.5, "b": 0.25})


@pytest.mark.parametrize("name", NAMES)
def test_numbers_other_than_the_rates_are_no_trees(name: str) -> None:
    factory = getattr(optimi_func, name)
    for option in factory.owner._own.values():
        if option.number and option.name not in ("lr", "weight_decay"):
            with pytest.raises(
                TypeError, match=rf"{option.name}=\{{.*transforms\.partition"
            ):
                factory(lr=0.1, **{option.name: {"a": 0.5, "b": 0.25}})


def test_a_graph_refuses_a_tree_of_betas_too() -> None:
    step = torch.compile(adamw_step, fullgraph=True, backend="eager")
    p = {"a": torch.ones(1)}
    with pytest.raises(
        Exception, match=r"betas=\{.*transforms\.partition has an optimizer"
    ):
        step(p, p, adamw_init(p), lr=0.1, betas={"a": (0.9, 0.99)})


def test_a_complex_or_bool_tensor_is_refused_in_graphs_too() -> None:
    for wrong in (torch.tensor(0.1 + 1j), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"lr=a tensor of shape .*allowed are .*real"):
            adamw(lr=wrong)
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


def test_a_step_looks_again_at_a_tensor_that_was_written_to() -> None:
    lr, momentum = torch.tensor(0.1), torch.tensor(0.5)
    rates, means = sgd(lr=lr), sgd(lr=0.1, momentum=momentum)
    lr.fill_(-1.0)
    momentum.fill_(1.5)
    with pytest.raises(ValueError, match=r"learning rate: lr=-1\.0"):
        run(rates, 1)
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        run(means, 1)


# Values of schedules


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (sgd(lr=lambda t: 0.2 * (1 - t / 3)), r"lr is a schedule that returned -0\.06"),
        (
            sgd(lr=lambda t: torch.where(t > 1, NAN, 0.1)),
            "lr is a schedule that returned nan",
        ),
        (sgd(lr=0.1, weight_decay=lambda t: -t), "weight_decay is a schedule"),
        (sgd(lr=0.1, momentum=lambda t: t * 0.3), r"momentum=1\.2"),
        (sgd(lr=0.1, momentum=lambda t: float(t) * 0.3), r"momentum=1\.2"),
        (adamw(lr=0.1, betas=(lambda t: 0.5 + t * 0.3, 0.9)), r"betas\[0\]=1\.1"),
        (chain(clip_value(lambda t: 1 - t / 3), sgd(lr=0.1)), "limit is a schedule"),
        (ema(sgd(lr=0.1), lambda t: t * 0.4), r"averaging decay: decay=1\.2"),
    ],
)
def test_a_schedule_out_of_range_is_refused_by_name(optimizer, text: str) -> None:
    run(optimizer, 1)
    with pytest.raises(ValueError, match=text):
        run(optimizer)


def test_what_a_schedule_may_be() -> None:
    # A momentum that is 0 at a step is not another rule.
    run(sgd(lr=0.1, nesterov=True, momentum=lambda t: 0.0), 3)
    run(chain(clip_value(lambda t: math.inf), sgd(lr=0.1)), 2)


def test_compiled_steps_refuse_the_same() -> None:
    w = torch.ones(1)
    for step in (compiled.sgd_step, compiled.sgd_step_):
        for lr in (torch.tensor(-0.1), lambda t: t - 1.0):
            with pytest.raises(ValueError, match=r"lr(=| is a schedule that returned )-"):
                step(w, w, sgd_init(w), lr=lr)
    assert w.item() == 1.0


# Populations


@pytest.mark.parametrize(
    ("factory", "hyper", "text"),
    [
        (adamw, {"lr": torch.linspace(-3, -1, 4)}, r"learning rate: lr=-3\.0"),
        (adamw, {"lr": torch.tensor([0.1, 0.1, 0.1, NAN])}, "lr=nan"),
        (adamw, {"lr": 0.1, "betas": (torch.full((4,), 1.5), 0.9)}, r"betas\[0\]=1\.5"),
        (
            lambda a: sgd(lr=linear(a, 0.0, 4)),
            {"a": torch.tensor([1.0] * 3 + [-1])},
            "start",
        ),
        (partial(adamw, decouple_lr=True), {"lr": 0.1}, "a tensor, as in a population"),
    ],
)
def test_init_of_a_population_checks_every_member(factory, hyper, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        population.init(factory, torch.ones(2), hyper, n=4)


# Parameters that share memory


def test_tied_parameters_are_refused_in_place() -> None:
    w, base = torch.zeros(1), torch.zeros(4, 4)
    tied = {"emb": w, "head": w}
    parts = [base[:, :2], base[:, 2:], base[:, 2:3]]
    for params, text in (
        (tied, r"params\['emb'\] and params\['head'\] share memory"),
        (parts, r"params\[1\] and params\[2\] share memory"),
        (
            [base, base.view(torch.int32).view(torch.float32)[1]],
            r"params\[0\] and params\[1\]",
        ),
    ):
        grads = torch.utils._pytree.tree_map(torch.ones_like, params)
        with pytest.raises(ValueError, match=text):
            compiled.sgd_step_(params, grads, sgd_init(params), lr=1.0)
    assert not w.any() and not base.any()
    pure, _ = sgd_step(tied, {k: torch.ones(1) for k in tied}, sgd_init(tied), lr=1.0)
    assert pure["emb"] == pure["head"] == -1.0


@pytest.mark.kernels
def test_slices_and_one_of_two_tied_parameters_step_in_place() -> None:
    w, base = torch.zeros(1), torch.zeros(4, 4)
    tied, parts = {"emb": w, "head": w}, [base[:, :2], base[:, 2:]]
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


@pytest.mark.parametrize("step", [compiled.adamw_step, compiled.adamw_step_])
def test_a_compiled_step_drops_no_derivative_without_a_word(step) -> None:
    p, lr = torch.ones(3), torch.tensor(0.1, requires_grad=True)
    state = adamw_init(p)
    moved = adamw_step(p, p * lr, state, lr=0.1)[1]
    for args, text in (
        ((p, p, state, lr), "lr requires grad.* call optimi_func.adamw_step"),
        ((p, p * lr, state, 0.1), "grads requires grad"),
        ((p * lr, p, state, 0.1), "params requires grad"),
        ((p, p, moved, 0.1), "state.leaves requires grad"),
    ):
        *trees, rate = args
        with pytest.raises(TypeError, match=text):
            step(*trees, lr=rate)
    with pytest.raises(TypeError, match="betas requires grad"):
        step(p, p, state, lr=0.1, betas=(lr, 0.9))


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


def test_types_are_told_and_no_tensor_is_printed() -> None:
    p, model = {"w": torch.ones(3)}, torch.nn.Linear(2, 1)
    state = adamw_init(p)
    for call, text in (
        (lambda: adamw_init(Unregistered(p["w"])), "pytree.register_dataclass"),
        (lambda: adamw_init(model.parameters()), r"dict\(model\.named_parameters\(\)\)"),
        (lambda: adamw_step(p, {"w": p}, state, lr=0.1), r"grads\['w'\] is a dict"),
        (
            lambda: adamw_step(p, p, state._replace(leaves=p), lr=0.1),
            "is a tensor of shape",
        ),
        (lambda: adamw_step(p, p, state._replace(step=0), lr=0.1), "state.step is 0: "),
        (
            lambda: adamw_step(p, p, state._replace(step=torch.ones(2)), lr=0.1),
            r"state.step is a tensor of shape \(2,\)",
        ),
    ):
        with pytest.raises(TypeError, match=text) as found:
            call()
        assert "tensor([" not in str(found.value)
    with pytest.raises(ValueError, match=r"params=\{'w': None\} holds no tensor"):
        adamw_init({"w": None})
    with pytest.raises(Exception, match=r"is a dict, which is neither a tensor nor None"):
        torch.compile(
            lambda p: adamw_step(p, {"w": p}, state, lr=0.1),
            backend="eager",
            fullgraph=True,
        )(p)


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


def test_a_prefix_that_does_not_fit_is_refused_by_init() -> None:
    """As a list in the place of a tensor with a value for each member."""
    params, two = {"w": torch.ones(3)}, [1e-3, 1e-2]
    text = r"is no prefix of params: .*members are a tensor"
    for name in ("lr", "weight_decay"):
        with pytest.raises(ValueError, match=f"{name} {text}"):
            population.init(adamw, params, {"lr": 0.1, name: two}, n=2)
        with pytest.raises(ValueError, match=f"{name} {text}"):
            adamw(**{"lr": 0.1, name: two}).init(params)
        with pytest.raises(ValueError, match=f"{name} is no prefix of params: .*'w'"):
            adamw(**{"lr": 0.1, name: {"b": 0.1}}).init(params)
    both = [torch.ones(3), torch.ones(2)]
    members = population.init(adamw, both, {"lr": two}, n=2)  # one for each tensor
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


def test_a_module_is_no_parameter_tree() -> None:
    model = torch.nn.Linear(2, 1)
    text = r"module Linear: .*dict\(model\.named_parameters\(\)\)"
    with pytest.raises(TypeError, match=text):
        adamw(lr=0.1).init(model)
    with pytest.raises(TypeError, match=text):
        optimi_func.adamw_step(model, None, None, lr=0.1)


def test_errors_of_adamw_do_not_speak_of_adam() -> None:
    params = {"w": torch.ones(2)}
    for state in ({}, optimi_func.sgd_init(params)):
        with pytest.raises((TypeError, ValueError), match="init") as found:
            adamw(lr=0.1).step(params, params, state)
        assert "adam" not in str(found.value)
    ps = [torch.ones(2, requires_grad=True)]
    saved = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match="the optimizer needs"):
        optimi_func.AdamW(ps, lr=0.1).load_state_dict(saved)


@pytest.mark.parametrize("loss_fn", [lambda y: y, lambda: 0, lambda y, x, z: y])
def test_a_loss_of_another_arity_is_refused_at_once(loss_fn) -> None:
    with pytest.raises(TypeError, match=r"two arguments, loss_fn\(output, batch\)"):
        train_step(torch.nn.Linear(2, 1), loss_fn, sgd(lr=0.1))


def loss_fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (p - x).square().sum()


def test_one_batch_for_so_many_steps() -> None:
    p, x = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    once = unroll(sgd(lr=0.1), loss_fn, p, None, x, steps=5)
    listed = unroll(sgd(lr=0.1), loss_fn, p, None, [x] * 5)
    assert torch.equal(once.params, listed.params) and len(once.losses) == 5
    for steps in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"steps={steps}: allowed are whole numbers"):
            unroll(sgd(lr=0.1), loss_fn, p, None, x, steps=steps)
    with pytest.raises(TypeError, match=r"batches=5: allowed is an iterable.*steps="):
        unroll(sgd(lr=0.1), loss_fn, p, None, 5)


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
