"""The training step as one graph, compared with an ordinary loop."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measured import allocated_by
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func.compiled import train_step, whole
from optimi_func.compiled.dry_run import DryRun
from optimi_func.compiled.train_step import Outcome, TrainState
from optimi_func.compiled.update_op import running, update_
from optimi_func.transforms import chain, clip_value

LR = 0.02


class Net(nn.Module):
    """BatchNorm, dropout and noise, tied and frozen weights, a parameter without use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)  # a bias would be normalized away
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.dropout.p and self.training:
            x = x + 0.1 * torch.randn_like(x)
        x = torch.tanh(self.norm(self.first(x + self.table)))
        return self.frozen(self.dropout(self.second(x)))


def mean_loss(output: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.mse_loss(output, batch[1])
    return loss, {"largest": output.abs().max()}


def batches(count: int, size: int = 8, dtype: torch.dtype = torch.float64) -> list[Any]:
    shapes = [(size, 6), (size, 3)]
    return [tuple(torch.randn(s, dtype=dtype) for s in shapes) for _ in range(count)]


def double(model: nn.Module) -> nn.Module:
    return model.to(torch.float64)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: list[Any],
    clip: float | None = None,
    loss_fn: Callable[..., Any] = mean_loss,
) -> list[Outcome]:
    """Take the same steps in an ordinary loop."""
    told: list[Outcome] = []
    for batch in given:
        norm = None
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)[0]
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        told.append(Outcome(loss.detach(), None, norm))
    optimizer.zero_grad()
    return told


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    a, b = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [model.state_dict(), optimizer.state_dict()["state"]]


@pytest.fixture
def not_generated(monkeypatch) -> None:
    """Trace graphs and run them without Inductor, which takes seconds to compile.

    For tests of what becomes a graph, and for a model or a rule that others compile.
    """

    def torch_compile(function: Callable[..., Any], options: dict[str, Any]) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(whole, "torch_compile", torch_compile)


@pytest.mark.full
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optimi_func.AdamW(ps, lr=LR, weight_decay=0.1),
        lambda ps: optimi_func.StableAdamW(ps, lr=LR),
        lambda ps: optimi_func.Ranger(ps, lr=LR, k=2),
    ],
    ids=["adamw", "stableadamw", "ranger"],
)
def test_a_class_stays_in_step(make, graphs) -> None:
    """With BatchNorm, tied, frozen and unused parameters, a scheduler, an eager step."""
    ours = double(Net())
    theirs = copy.deepcopy(ours)
    a, b = make(ours.parameters()), make(theirs.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(x, 0.7) for x in (a, b)]
    heard = []
    a.register_step_post_hook(lambda *_: heard.append("step"))
    step = train_step(ours, mean_loss, a)
    for i, batch in enumerate(batches(6)):
        if i == 3:
            loop(ours, a, [batch])
        else:
            outcome = step(batch)
        (want,) = loop(theirs, b, [batch])
        if i != 3:
            assert_close(outcome.loss, want.loss)
            assert outcome.norm is None
            assert outcome.aux["largest"].shape == ()
        for schedule in schedules:
            schedule.step()
        if i == 1:
            before = graphs()  # with the second kernel that Ranger's lookahead is
    assert graphs() == before
    assert heard == ["step"] * 6
    assert_close(everything(ours, a), everything(theirs, b))
    assert ours.unused not in a.state
    assert all(p.grad is None for p in ours.parameters())
    assert ours.norm.num_batches_tracked == 6


@pytest.mark.full
@pytest.mark.usefixtures("not_generated")
def test_one_graph_whatever_the_numbers_are(graphs) -> None:
    model = double(nn.Linear(6, 3))
    optimizer = optimi_func.SGD(model.parameters(), lr=LR, momentum=0.9)
    step = train_step(model, mean_loss, optimizer)
    first, *rest = batches(6)
    step(first)
    before = graphs()
    for i, batch in enumerate(rest):
        optimizer.param_groups[0].update(lr=LR / (i + 1), weight_decay=0.1 * i)
        step(batch)
    assert graphs() == before
    (only,) = step._step_graph._graphs.values()
    assert callable(only)
    step(batches(1, size=4)[0])
    assert graphs() == before + 1  # another shape is another graph


GROUPS: list[Any] = [[0.02, 0.1], [0.05, 0.0]]


@pytest.mark.full
def test_groups_and_clipping() -> None:
    def make(model):
        groups = [model.first.parameters(), [model.norm.weight, model.norm.bias]]
        groups[1] += [model.second.bias, model.unused]
        options = [
            {"params": list(ps), "lr": lr, "weight_decay": wd}
            for ps, (lr, wd) in zip(groups, GROUPS)
        ]
        return optimi_func.AdamW(options, lr=1.0)

    ours = double(Net())
    theirs = copy.deepcopy(ours)
    a, b = make(ours), make(theirs)
    # Between the smallest and the largest norm: some steps are clipped, some are not.
    step = train_step(ours, mean_loss, a, clip_global_norm=0.8)
    given = batches(5)
    told = [step(batch) for batch in given]
    want = loop(theirs, b, given, 0.8)
    assert_close([x.loss for x in told], [x.loss for x in want])
    assert_close([x.norm for x in told], [x.norm for x in want])
    norms = [float(x.norm) for x in want]
    assert min(norms) < 0.8 < max(norms)
    assert_close(everything(ours, a), everything(theirs, b))
    assert told[0].aux["largest"].shape == ()


class Noisy(nn.Module):
    """Noise, dropout and BatchNorm, which differ between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return self.last(self.dropout(self.norm(x)))


@pytest.mark.full
def test_dropout_is_the_eager_runs(request) -> None:
    model = double(Noisy())
    other = copy.deepcopy(model)
    a, b = (optimi_func.SGD(m.parameters(), lr=LR) for m in (model, other))
    step = train_step(model, mean_loss, a)
    given = batches(1) * 3
    torch.manual_seed(3)
    told = [step(batch).loss for batch in given]
    torch.manual_seed(3)
    want = loop(other, b, given)
    assert_close(told, [x.loss for x in want])
    assert_close(model.state_dict(), other.state_dict())
    frozen = {k: v.clone() for k, v in model.state_dict().items()}
    a.param_groups[0]["lr"] = 0.0
    model.load_state_dict(frozen)
    one = step(given[0]).loss
    model.load_state_dict(frozen)
    assert step(given[0]).loss != one  # the same weights, another mask
    # In evaluation nothing is dropped, and the running statistics stay: other graphs.
    request.getfixturevalue("not_generated")
    model.eval()
    one = step(given[0]).loss
    assert step(given[0]).loss == one
    # Two steps in training mode, of which loading took back the first, and two that do not
    # count.
    assert model.norm.num_batches_tracked == frozen["norm.num_batches_tracked"] + 1


def function(params: Any, buffers: Any, batch: Any) -> Tensor:
    """A model without a module, which counts its calls in a buffer."""
    buffers["calls"].add_(1.0)
    w, b = params["layer"]
    return batch[0] @ w + b * buffers["scale"]


def function_state(optimizer: Any, dtype: torch.dtype = torch.float64) -> TrainState:
    params = {"layer": (torch.randn(6, 3, dtype=dtype), torch.zeros(3, dtype=dtype))}
    params["unused"] = torch.ones(2, dtype=dtype)
    buffers = {"calls": torch.zeros(()), "scale": torch.full((3,), 2.0, dtype=dtype)}
    return TrainState(params, buffers, optimizer.init(params))


def plain_loss(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


def function_loop(optimizer: Any, state: TrainState, given: list[Any]) -> TrainState:
    params, buffers, inner = pytree.tree_map(torch.clone, state)
    for batch in given:
        leaves = pytree.tree_map(lambda p: p.detach().requires_grad_(), params)
        flat, spec = pytree.tree_flatten(leaves)
        loss = plain_loss(function(leaves, buffers, batch), batch)
        grads = torch.autograd.grad(loss, flat, allow_unused=True)
        with torch.no_grad():
            params, inner = optimizer.step(
                params, pytree.tree_unflatten(grads, spec), inner
            )
    return TrainState(params, buffers, inner)


def schedule(step: Tensor) -> Tensor:
    return 0.05 / (step + 1.0)


FUNCTIONAL = {
    "adamw": optimi_func.adamw(lr=schedule, weight_decay=0.1),
    "lion": optimi_func.lion(lr={"layer": 0.01, "unused": 1.0}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.filterwarnings("ignore:eps=")
def test_pytrees(name, graphs, tmp_path) -> None:
    """Schedules in one graph, unused parameters, resuming in the middle."""
    optimizer = FUNCTIONAL[name]
    start = function_state(optimizer)
    given = batches(5)
    want = function_loop(optimizer, start, given)

    # The state that comes out is the state that went in, overwritten.
    unused = start.params["unused"].clone()
    step = train_step(function, plain_loss, optimizer)
    state = start
    places = [x.data_ptr() for x in pytree.tree_leaves(state)]
    version = start.params["layer"][0]._version
    for i, batch in enumerate(given):
        if i == 2:
            torch.save(pytree.tree_leaves(state), tmp_path / "state.pt")
        state, outcome = step(state, batch)
        assert outcome.aux is None
        if i == 0:
            before = graphs()
    assert graphs() == before
    assert places == [x.data_ptr() for x in pytree.tree_leaves(state)]
    assert start.params["layer"][0]._version > version  # autograd has been told
    assert_close(state, want)
    assert torch.equal(state.params["unused"], unused)
    assert state.buffers["calls"] == 5

    # From a file, in the middle, without another graph.
    saved = torch.load(tmp_path / "state.pt")
    state = pytree.tree_unflatten(saved, pytree.tree_structure(start))
    for batch in given[2:]:
        state, _ = step(state, batch)
    assert_close(state, want)
    assert graphs() == before


@pytest.mark.full
def test_a_module_with_a_pure_optimizer() -> None:
    """The state of init shares the module's memory; a copy of the state does not."""
    model = double(Net())
    other = copy.deepcopy(model)
    step = train_step(model, mean_loss, optimi_func.sgd(lr=LR, momentum=0.9))
    state = step.init()
    assert set(state.params) == {n for n, p in model.named_parameters() if p.requires_grad}
    b = optimi_func.SGD(other.parameters(), lr=LR, momentum=0.9)
    given = batches(3)
    for batch in given[:2]:
        state, _ = step(state, batch)
    loop(other, b, given[:2])
    assert_close(model.state_dict(), other.state_dict())
    for dtype in (torch.float32, torch.float64):
        leaves = step.init(state_dtype=dtype).optimizer.leaves
        assert leaves["first.weight"].momentum_buffer.dtype == dtype
    copied = pytree.tree_map(torch.clone, state)
    copied, _ = step(copied, given[2])
    assert_close(model.state_dict(), other.state_dict())  # still as before
    loop(other, b, given[2:])
    assert_close(copied.params["first.weight"], other.first.weight.detach())
    assert_close(copied.buffers["norm.running_var"], other.norm.running_var)


class Switched(nn.Module):
    """A model that uses another parameter if an attribute is set."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a * (self.b if self.both else 1.0)


@pytest.mark.kernels
@pytest.mark.usefixtures("not_generated")
def test_unused_parameters_are_found_again() -> None:
    model = Switched()
    optimizer = optimi_func.SGD(model.parameters(), lr=0.1)
    step = train_step(model, lambda output, batch: output.mean(), optimizer)
    x = torch.ones(2, 3)
    step(x)
    assert torch.equal(model.b.detach(), torch.ones(3)) and model.b not in optimizer.state
    model.both = True
    step(x)
    assert (model.b < 1).all() and optimizer.state[model.b]["step"] == 1
    assert optimizer.state[model.a]["step"] == 2


@pytest.mark.full
def test_updates_follow_their_gradients() -> None:
    """The peak above parameters and state is far below the bytes of all gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = optimi_func.AdamW(model.parameters(), lr=1e-3)
    step = train_step(model, lambda output, batch: output.square().mean(), optimizer)
    x = torch.randn(2, 128)
    for _ in range(2):
        step(x)
    gc.collect()
    peak = allocated_by(lambda: step(x))
    gradients = sum(p.nbytes for p in model.parameters())
    assert peak < 0.6 * gradients


@pytest.mark.full
def test_gradients_read_parameters_before_they_move() -> None:
    """The gradients of a product are its other factors, some of which are updated first."""
    sizes = [20000, 20000, 20000, 4, 4, 1]
    params = [torch.rand(n, dtype=torch.float64) for n in sizes]
    params.append(torch.rand((), dtype=torch.float64))

    def product(p: list[Tensor], buffers: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c, d, e, f, g = p
        return (a * b * x + b * c * x).sum() + (a[:4] * d * e).sum() * f[0] * g, g.exp()

    def loss_fn(output: Any, x: Tensor) -> Any:
        return output

    x = torch.rand(20000, dtype=torch.float64)
    olds = [p.clone().requires_grad_() for p in params]
    loss, aux = product(olds, None, x)
    news = [p - 0.1 * g for p, g in zip(olds, torch.autograd.grad(loss, olds))]
    step = train_step(product, loss_fn, optimi_func.sgd(lr=0.1))
    state, outcome = step(step.init(params), x)
    assert_close([state.params, outcome.aux, outcome.loss], [news, aux, loss])


def test_copies_that_the_compiler_makes_are_updated() -> None:
    owned = [torch.zeros(3), torch.ones(3)]
    handed = [owned[1].clone(), owned[0]]

    def update(places: Any, grads: list[Tensor], microbatch: Any) -> None:
        for i, g in zip(places, grads):
            owned[i].sub_(g)

    with running(update, owned):
        gradients = [torch.ones(3), torch.full((3,), 2.0)]
        update_(torch.ones(()), [1, 0], None, gradients, handed)
    assert handed[0].tolist() == [0.0] * 3
    assert handed[1].tolist() == owned[0].tolist() == [-2.0] * 3
    # A graph reads it after, and copies the copy back.
    assert owned[1].tolist() == [1.0] * 3


def refused(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=text):
        call()


MODEL = nn.Linear(6, 3)


def of(*more: Tensor, **options: Any) -> Any:
    return optimi_func.AdamW([*MODEL.parameters(), *more], lr=LR, **options)


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "model_or_fn=3", {"model_or_fn": 3}),
    (TypeError, "model_or_fn=<function", {"model_or_fn": function, "optimizer": of()}),
    (TypeError, "loss_fn=None", {"loss_fn": None}),
    (TypeError, "optimizer=3: allowed are", {"optimizer": 3}),
    (
        *(TypeError, r"optimizer=Chain.* calls torch\.func\.grad and its step"),
        {"optimizer": chain(clip_value(0.1), optimi_func.sgd(lr=LR))},
    ),
    *[
        (ValueError, f"clip_global_norm={bad}", {"clip_global_norm": bad})
        for bad in (0, -1.0, float("nan"))
    ],
    (TypeError, "clip_global_norm='1'", {"clip_global_norm": "1"}),
    (ValueError, "compile=False", {"optimizer": of(compile=False)}),
    (ValueError, "foreach=True", {"optimizer": of(foreach=True)}),
    (TypeError, "optimizer=AdamW", {"optimizer": torch.optim.AdamW(MODEL.parameters())}),
    (
        *(ValueError, "optimizer has not .* 'bias'"),
        {"optimizer": optimi_func.AdamW([MODEL.weight], lr=LR)},
    ),
    (ValueError, r"shape \(2,\)", {"optimizer": of(torch.ones(2))}),
]


@pytest.mark.parametrize(("kind", "text", "given"), REFUSED)
def test_arguments_are_refused(kind: Any, text: str, given: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"model_or_fn": MODEL, "loss_fn": plain_loss}
    usual["optimizer"] = optimi_func.adamw(lr=LR)
    with pytest.raises(kind, match=text):
        train_step(**usual | given)


def test_a_model_that_is_frozen_is_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    step = train_step(frozen, plain_loss, optimi_func.adamw(lr=LR))
    refused(ValueError, "model_or_fn has no", step.init)


def test_calls_are_refused_before_any_write() -> None:
    model = nn.Linear(6, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = optimi_func.AdamW(model.parameters(), lr=LR)
    (batch,) = batches(1, dtype=torch.float32)

    def call(loss_fn: Any, **options: Any) -> Callable[[], Any]:
        return lambda: train_step(model, loss_fn, optimizer, **options)(batch)

    refused(ValueError, r"loss_fn .* shape \(8, 3\)", call(lambda out, b: out))
    refused(TypeError, "loss_fn returned float", call(lambda out, b: 1.0))
    refused(TypeError, "loss_fn .*int64", call(lambda out, b: out.argmax()))
    refused(ValueError, "no parameter", call(lambda out, b: out.detach().sum()))
    # The whole message: the compiler adds nothing to an error of the dry run.
    refused(TypeError, r"1.5 as aux: allowed are .*$", call(lambda o, b: (o.sum(), 1.5)))
    scaler = torch.amp.GradScaler("cpu")
    refused(ValueError, "GradScaler", call(lambda out, b: scaler.scale(out.sum())))
    step = train_step(model, plain_loss, optimizer)
    model(batch[0]).sum().backward()
    refused(ValueError, "'weight' has a gradient", lambda: step(batch))
    optimizer.zero_grad()
    handle = model.weight.register_hook(lambda g: g)
    refused(ValueError, "'weight' has gradient hooks", lambda: step(batch))
    handle.remove()
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    refused(ValueError, "pre-hooks", lambda: step(batch))
    handle.remove()
    released = optimi_func.AdamW(model.parameters(), lr=LR, gradient_release=True)
    step = train_step(model, plain_loss, released)
    optimi_func.prepare_for_gradient_release(model, released)
    refused(ValueError, "gradient release", lambda: step(batch))
    optimi_func.remove_gradient_release(model)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not optimizer.state and not released.state


@pytest.mark.parametrize(
    ("name", "bad"), [("lr", -1.0), ("lr", torch.tensor(-1.0)), ("betas", (0.9, 1.5))]
)
def test_a_groups_number_is_refused_before_any_write(name: str, bad: Any) -> None:
    """The bad number is in the second group, which is updated after the first."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = optimi_func.AdamW(groups, lr=LR)
    step = train_step(model, plain_loss, optimizer)
    (batch,) = batches(1, dtype=torch.float32)
    optimizer.param_groups[1][name] = bad
    before = {k: v.clone() for k, v in model.state_dict().items()}
    refused(ValueError, "Invalid .*: allowed is finite", lambda: step(batch))
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not optimizer.state


@pytest.mark.kernels
@pytest.mark.usefixtures("not_generated")
def test_states_are_refused_before_any_write() -> None:
    optimizer = optimi_func.adamw(lr=LR)
    step = train_step(function, plain_loss, optimizer)
    refused(TypeError, "params=None", step.init)
    (batch,) = batches(1)
    state = function_state(optimizer)
    refused(TypeError, "state=dict", lambda: step({}, batch))
    w, _ = state.params["layer"]
    twice = state._replace(params={**state.params, "layer": (w, w.view(-1)[:3])})
    refused(ValueError, "share memory", lambda: step(twice, batch))
    one = {**state.params, "unused": torch.ones(1, dtype=w.dtype).expand(2)}
    refused(ValueError, "is expanded", lambda: step(state._replace(params=one), batch))
    step(state._replace(buffers={**state.buffers, "again": state.buffers["scale"]}), batch)
    odd = state._replace(buffers={"calls": 0, "scale": state.buffers["scale"]})
    refused(TypeError, r"buffers\['calls'\]=0", lambda: step(odd, batch))
    model = nn.Linear(6, 3)
    step = train_step(model, plain_loss, optimizer)
    refused(TypeError, "a module brings its own", lambda: step.init({}))
    params = {"nothing": torch.ones(2)}
    astray = TrainState(params, {}, optimizer.init(params))
    state = step.init()
    refused(TypeError, "params=list", lambda: step(state._replace(params=[]), batch))
    more = state._replace(buffers={"mean": torch.ones(2)})
    refused(ValueError, r"names \['mean'\]", lambda: step(more, batch))
    refused(ValueError, r"params\['nothing'\]", lambda: step(astray, batch))


class Lookup(nn.Module):
    """A model that fails for an index out of range, and returns its weights as output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.norm(self.table(x)) + self.shift, self.table.weight.t(), self.shift


def lookup_loss(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output[0], batch[1]), output[1:]


@pytest.mark.full
def test_an_error_of_the_data_leaves_the_state_as_it_was() -> None:
    step = train_step(Lookup(), lookup_loss, optimi_func.adamw(lr=LR))
    good, x = (torch.arange(4), torch.arange(4)), torch.arange(4)
    state, _ = step(step.init(), good)
    before = pytree.tree_map(torch.clone, state)
    for bad in ((x + 3, x), (x, x + 3)):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            step(state, bad)
        assert all(map(torch.equal, pytree.tree_leaves(state), pytree.tree_leaves(before)))
    # What aux lends is as it was before the step, and stays.
    _, outcome = step(state, good)
    step(state, good)
    table, shift = outcome.aux
    assert (table == before.params["table.weight"].t()).all()
    assert (shift == before.params["shift"]).all()


@pytest.mark.full
def test_a_loss_that_is_a_parameter() -> None:
    step = train_step(lambda p, b, x: p, lambda out, x: out, optimi_func.sgd(lr=0.5))
    state, outcome = step(step.init(torch.tensor(2.0)), torch.ones(1))
    assert (state.params.item(), outcome.loss.item()) == (1.5, 2.0)


def test_a_scaler_is_found_where_loss_fn_names_it() -> None:
    from optimi_func.compiled.dry_run import check_unscaled

    scaler = torch.amp.GradScaler("cpu")
    scale = scaler.scale

    class Trainer:
        def __init__(self) -> None:
            self.scaler = scaler

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return self.scaler.scale(output.sum())

        def other(self, output: Tensor, batch: Any) -> Tensor:
            return output.sum()

    for loss_fn in (lambda out, b: scaler.scale(out.sum()), Trainer().loss):
        with pytest.raises(ValueError, match="loss_fn has a GradScaler, scaler"):
            check_unscaled(loss_fn)
    check_unscaled(Trainer().other)
    check_unscaled(torch.nn.MSELoss())
    off = torch.amp.GradScaler("cpu", enabled=False)
    check_unscaled(lambda out, b: off.scale(out.sum()))
    # A limit: what stands behind something else is not found.
    check_unscaled(lambda out, b: scale(out.sum()))


def test_a_rehearsal_draws_nothing_and_writes_nothing() -> None:
    from optimi_func.compiled.dry_run import dry_run
    from optimi_func.compiled.whole import Program

    model = Net(dropout=0.5)
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    params, spec = pytree.tree_flatten(names)
    buffers, buffers_spec = pytree.tree_flatten(dict(model.named_buffers()))
    (batch,) = batches(1, dtype=torch.float32)
    seed, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    program = Program(model, mean_loss, spec, buffers_spec)
    found = dry_run(program, params, buffers, batch)
    assert isinstance(found, DryRun)
    assert [list(names)[i] for i in range(len(names)) if i not in found.used_params] == [
        "unused"
    ]
    assert [list(dict(model.named_buffers()))[i] for i in found.mutated_buffers] == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert torch.equal(seed, torch.get_rng_state())
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_a_compiled_model_is_told_apart() -> None:
    model = torch.compile(torch.nn.Linear(2, 1))
    optimizer = optimi_func.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"the module that you gave to torch\.compile"):
        train_step(model, lambda y, batch: y.mean(), optimizer)
