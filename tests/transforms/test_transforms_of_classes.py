"""Transforms given to a class: the steps of the same chain in pure form, and refusals."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformed_worlds
import worlds
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import (
    SGD,
    AdamW,
    Mixed,
    MuonAdamW,
    ScheduleFreeAdamW,
    adamw,
    compiled,
    memory,
    prepare_for_gradient_release,
)
from optimi_func.transforms import (
    GradientTransform,
    add_noise,
    centralize,
    chain,
    clip_global_norm,
    clip_param_norm,
    clip_value,
)

SHAPES = {"w": (4, 3), "b": (5,), "m": (3, 6)}
EAGER: Any = {"compile": False}


def zeros(params: Any) -> Any:
    return pytree.tree_map(torch.zeros_like, params)


def _trace(grads: Any, kept: Any, step: Tensor, beta: Any) -> Any:
    leaves, spec = pytree.tree_flatten(kept)
    new = [m if g is None else beta * m + g for m, g in zip(leaves, grads)]
    out = [None if g is None else m for m, g in zip(new, grads)]
    return out, pytree.tree_unflatten(new, spec)


def trace(beta: Any, by_parameter: bool = True) -> GradientTransform:
    """Return momentum as a transform, with state for each parameter."""
    return GradientTransform(zeros, _trace, {"beta": beta}, by_parameter=by_parameter)


def _scaled(grads: Any, state: Any, step: Tensor, params: Any, paths: Any) -> Any:
    found = zip(grads, params, paths)
    return [
        g if g is None or path.endswith("b") else g * p.norm() for g, p, path in found
    ], state


scaled = GradientTransform(lambda params: (), _scaled, by_parameter=True)


def falling(t: Any) -> Any:
    return 0.02 / (t + 1)


# Some that limit, and some that are for all parameters.
SETS: dict[str, list[Any]] = {
    "clip_value": [clip_value(0.3)],
    "clip_param_norm": [clip_param_norm(0.5)],
    "clip_global_norm": [clip_global_norm(1.0)],
    "centralize": [centralize()],
    "add_noise": [add_noise(0.3, seed=7)],
    "trace": [trace(0.5)],
    "trace of all": [trace(0.5, by_parameter=False)],
    "with params and paths": [scaled],
    "falling": [clip_value(falling)],
    "several": [centralize(), trace(0.5), clip_global_norm(1.0), clip_value(falling)],
}
ALONE = [name for name, parts in SETS.items() if all(x.by_parameter for x in parts)]


def params_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    wide = {k: torch.randn(s, dtype=torch.float64) for k, s in SHAPES.items()}
    return {k: nn.Parameter(x.to(dtype)) for k, x in wide.items()}


def grads_of(params: Any, steps: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{k: torch.randn_like(p) for k, p in params.items()} for _ in range(steps)]


def train(optimizer: Any, params: Any, grads: Any, **extras: Any) -> None:
    for g in grads:
        for k, p in params.items():
            p.grad = None if g[k] is None else g[k].clone()
        optimizer.step(**extras)


def moved(name: str, cls: Any = AdamW, dtype: Any = torch.float64, **options: Any) -> Any:
    params = params_of(dtype)
    grads = grads_of(params, 4)
    parts = {"transforms": SETS[name]} if name else {}
    optimizer = cls(params.items(), lr=0.05, **{**EAGER, **parts, **options})
    train(optimizer, params, grads)
    return params, optimizer, grads


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_steps_are_those_of_the_chain(name: str, dtype: torch.dtype) -> None:
    params, optimizer, grads = moved(name, dtype=dtype, weight_decay=0.1)
    value = chain(*SETS[name], adamw(lr=0.05, weight_decay=0.1))
    tree = {k: p.detach() for k, p in params_of(dtype).items()}
    state = value.init(tree)
    for g in grads:
        tree, state = value.step(tree, g, state)
    for k, p in params.items():
        assert torch.equal(p.detach(), tree[k]), k
        comp = optimizer.state[p].get("kahan_comp")
        assert comp is None or torch.equal(comp, state.inner.leaves[k].kahan_comp)
    bare, _, _ = moved("", dtype=dtype, weight_decay=0.1)
    assert any(not torch.equal(bare[k], p) for k, p in params.items())


@pytest.mark.parametrize(
    ("cls", "value", "options"),
    [
        (SGD, optimi_func.sgd, {"momentum": 0.9, "nesterov": True}),
        (ScheduleFreeAdamW, optimi_func.schedule_free_adamw, {}),
        (optimi_func.Ranger, optimi_func.ranger, {"k": 2}),
        (optimi_func.NAdam, optimi_func.nadam, {}),
        (optimi_func.LAMB, optimi_func.lamb, {}),
        (AdamW, adamw, {"cautious": True, "maximize": True}),
        (AdamW, adamw, {"storage": "8bit"}),
        (AdamW, adamw, {"storage": "compact", "dtype": torch.bfloat16}),
        (AdamW, adamw, {"storage": "exact", "dtype": torch.bfloat16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["several", "clip_global_norm"])
def test_rules_and_storages(cls: Any, value: Any, options: dict, name: str) -> None:
    own = dict(options)
    how = {"storage": own.pop("storage")} if "storage" in own else {}
    if how == {"storage": "8bit"}:
        how = {"storage": optimi_func.Storage(None, "8bit")}
    dtype = own.pop("dtype", torch.float32)
    params, _, grads = moved(name, cls, dtype, **own, **how)
    tree = {k: p.detach() for k, p in params_of(dtype).items()}
    pure = chain(*SETS[name], value(lr=0.05, **own))
    state = pure.init(tree, **how)
    for g in grads:
        tree, state = pure.step(tree, g, state)
    for k, p in params.items():
        assert torch.equal(p.detach(), tree[k]), k


def test_all_groups_are_one_chain_and_have_their_own_rates() -> None:
    params = params_of(torch.float64)
    grads = grads_of(params, 3)
    groups = [
        {"params": [("w", params["w"])], "lr": 0.1},
        {"params": [("b", params["b"]), ("m", params["m"])], "lr": 0.01},
    ]
    optimizer = SGD(groups, lr=1.0, transforms=[clip_global_norm(0.5)], **EAGER)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    want = {k: p.detach().clone() for k, p in params.items()}
    for i, g in enumerate(grads):
        train(optimizer, params, [g])
        schedule.step()
        total = sum(float((x**2).sum()) for x in g.values()) ** 0.5
        for k, rate in (("w", 0.1), ("b", 0.01), ("m", 0.01)):
            want[k] -= rate * 0.5**i * g[k] * min(1.0, 0.5 / (total + 1e-6))
    for k, p in params.items():
        torch.testing.assert_close(p.detach(), want[k], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["clip_global_norm", "trace", "add_noise"])
def test_a_parameter_without_a_gradient(name: str) -> None:
    """It keeps what it had, and counts its own steps."""
    params = params_of(torch.float32)
    optimizer = AdamW(params.items(), lr=0.1, transforms=SETS[name], **EAGER)
    first, second, third = grads_of(params, 3)
    train(optimizer, params, [first])
    before = copy.deepcopy(optimizer.state[params["b"]]), params["b"].detach().clone()
    train(optimizer, params, [{**second, "b": None}])
    after = optimizer.state[params["b"]], params["b"].detach()
    for x, y in zip(pytree.tree_leaves(before), pytree.tree_leaves(after)):
        assert torch.equal(x, y)
    train(optimizer, params, [third])
    assert optimizer.state[params["b"]]["step"] == 2


def test_a_closure_and_zeroed_gradients() -> None:
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = SGD([w], lr=1.0, transforms=[clip_param_norm(1.0)], **EAGER)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w * torch.tensor([3.0, 4.0])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 25.0
    torch.testing.assert_close(w.detach(), torch.tensor([2.4, 3.2]), rtol=1e-5, atol=0)
    assert torch.equal(w.grad, torch.tensor([3.0, 4.0]))  # the caller's is not written to


@pytest.mark.parametrize("name", ["clip_param_norm", "several"])
def test_foreach_before_the_optimizer(name: str) -> None:
    parts = SETS[name][:3]
    ways = [{"foreach": True, "compile": None}, {}]
    found = []
    for way in ways:
        params = params_of(torch.float32)
        optimizer = AdamW(params.items(), lr=0.1, transforms=parts, **{**EAGER, **way})
        train(optimizer, params, grads_of(params, 3))
        found.append(params)
    for k, p in found[0].items():
        torch.testing.assert_close(p.detach(), found[1][k].detach())


@pytest.mark.kernels
def test_kernels_before_the_optimizer() -> None:
    found = []
    for kernels in (True, False):
        params = params_of(torch.float32)
        how = {"transforms": SETS["clip_global_norm"], "compile": kernels}
        train(AdamW(params.items(), lr=0.1, **how), params, grads_of(params, 3))
        found.append(params)
    for k, p in found[0].items():
        torch.testing.assert_close(p.detach(), found[1][k].detach(), rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("options", [{}, {"clip_param_norm": 0.5}], ids=str)
def test_gradient_release_takes_the_same_steps(name: str, options: dict) -> None:
    found = []
    for release in (True, False):
        model = Net()
        how = {"transforms": SETS[name], "gradient_release": release, **EAGER}
        optimizer = AdamW(model.named_parameters(), lr=0.1, **how)
        if release:
            prepare_for_gradient_release(model, optimizer, **options)
        for i in range(3):
            torch.manual_seed(i)
            model(torch.randn(8, 4)).square().sum().backward()
            for p in model.parameters() if options and not release else ():
                nn.utils.clip_grad_norm_([p], 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append((model, optimizer))
    (ours, first), (theirs, second) = found
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert first.state[p].keys() == second.state[q].keys()


def test_accumulation_in_a_buffer_takes_them_too() -> None:
    model, how = Net(), {"transforms": [clip_param_norm(0.1)], "gradient_release": True}
    optimizer = AdamW(model.parameters(), lr=0.1, **how, **EAGER)
    with pytest.raises(RuntimeError, match="accumulation='states' or optimizer_acc"):
        prepare_for_gradient_release(
            model, optimizer, accumulation="states", accumulation_steps=2
        )
    prepare_for_gradient_release(
        model, optimizer, accumulation="buffer", accumulation_steps=2
    )
    x = torch.randn(8, 4)
    for _ in range(2):
        model(x).square().sum().backward()
    assert optimizer.state[model.a.weight]["step"] == 1
    optimizer.optimizer_accumulation = True


def test_optimizer_accumulation_is_refused() -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = AdamW([w], lr=0.1, transforms=[clip_param_norm(0.1)], **EAGER)
    optimizer.optimizer_accumulation, w.grad = True, torch.ones(2)
    with pytest.raises(RuntimeError, match="optimizer_accumulation=True: they need"):
        optimizer.step()
    assert not optimizer.state


KEPT = ["trace", "add_noise", "several", "trace of all"]


def again_of(optimizer: Any, params: Any, name: str, how: str) -> tuple[Any, Any]:
    """Return an optimizer that goes on, and its parameters."""
    if how == "deepcopy":
        both = copy.deepcopy((optimizer, params))
        return both
    if how == "pickle":
        return pickle.loads(pickle.dumps((optimizer, params)))
    new = {k: nn.Parameter(p.detach().clone()) for k, p in params.items()}
    made = AdamW(new.items(), lr=9.0, transforms=SETS[name], **EAGER)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    made.load_state_dict(torch.load(file, weights_only=True))
    return made, new


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("how", ["load", "deepcopy", "pickle"])
def test_a_run_goes_on_exactly(name: str, how: str) -> None:
    params, optimizer, _ = moved(name, dtype=torch.bfloat16)
    made, new = again_of(optimizer, params, name, how)
    more = grads_of(params, 6)[4:]
    train(optimizer, params, more)
    train(made, new, more)
    for k, p in params.items():
        assert torch.equal(p, new[k])
    for x, y in zip(
        pytree.tree_leaves(optimizer.state_dict()), pytree.tree_leaves(made.state_dict())
    ):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y
    kept = optimizer.param_groups[0].get("transforms", {}).keys()
    kept |= {k for x in optimizer.state.values() for k in x if k.startswith("transforms")}
    assert kept


def test_init_state_makes_it_before_the_first_step() -> None:
    """As torch.distributed.checkpoint needs it, which loads into what is there."""
    params = params_of(torch.float32)
    made = AdamW(params.items(), lr=0.1, transforms=SETS["several"], **EAGER)
    made.init_state()
    fresh = pytree.tree_structure(made.state_dict())
    train(made, params, grads_of(params, 1))
    assert pytree.tree_structure(made.state_dict()) == fresh


def test_states_without_them_begin_anew_and_say_so() -> None:
    params, optimizer, _ = moved("")
    bare = optimizer.state_dict()
    for name in ("trace", "add_noise"):
        made = AdamW(params.items(), lr=0.1, transforms=SETS[name], **EAGER)
        with pytest.warns(UserWarning, match="lacks .*transform.*begins anew"):
            made.load_state_dict(bare)
        train(made, params, grads_of(params, 1))
        with pytest.warns(UserWarning, match="of a transform that is not here"):
            optimizer.load_state_dict(made.state_dict())
    wrong = made.state_dict()
    wrong["param_groups"][0]["transforms"]["0.seed"] = torch.zeros(2)
    again = AdamW(params.items(), lr=0.1, transforms=SETS["add_noise"], **EAGER)
    with pytest.raises(ValueError, match=r"'0.seed'\] is \(2,\) .*keeps \(\) of torch.int"):
        again.load_state_dict(wrong)
    assert not again.state


def test_reset_begins_anew() -> None:
    params, optimizer, grads = moved("several")
    with pytest.raises(ValueError, match=r"reset.rows=.*'transforms.1' of a transf"):
        optimizer.reset(params["w"], rows=[0])
    optimizer.reset()
    start = params_of(torch.float64)
    for k, p in params.items():
        p.data.copy_(start[k])
    train(optimizer, params, grads)
    want, _, _ = moved("several")
    for k, p in params.items():
        assert torch.equal(p, want[k])


def test_a_skipped_step_changes_nothing() -> None:
    for capturable in (False, True):
        params, optimizer, grads = moved(
            "several", dtype=torch.float32, skip_nonfinite="step", capturable=capturable
        )
        before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(params)
        bad = {**grads[0], "b": torch.full_like(params["b"], torch.inf)}
        train(optimizer, params, [bad])
        after = optimizer.state_dict(), params
        for x, y in zip(pytree.tree_leaves(before), pytree.tree_leaves(after)):
            assert torch.equal(x, y) if isinstance(x, Tensor) else x == y
        assert optimizer.skipped_steps == 1


def polyak(grads: Any, state: Any, step: Tensor, loss: Tensor) -> Any:
    squares = torch.stack([g.square().sum() for g in grads]).sum()
    return [g * loss / squares for g in grads], state


def test_transforms_take_extras() -> None:
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    parts = [GradientTransform(lambda params: (), polyak)]
    optimizer = SGD([w], lr=1.0, transforms=parts, **EAGER)
    w.grad = w.detach().clone()
    optimizer.step(loss=torch.tensor(12.5))
    torch.testing.assert_close(w.detach(), torch.tensor([1.5, 2.0]))
    with pytest.raises(TypeError, match=r"takes 'loss': pass it"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"got the extras \['lots'\]"):
        optimizer.step(loss=torch.ones(()), lots=1)
    with pytest.raises(ValueError, match=r"gradient_release=True with .*polyak, which ta"):
        parts = [GradientTransform(lambda params: (), polyak, by_parameter=True)]
        SGD([w], lr=1.0, transforms=parts, gradient_release=True)


def test_transforms_may_leave_a_parameter_out() -> None:
    def only(grads: Any, state: Any, step: Tensor, paths: Any) -> Any:
        return [g if path == "w" else None for g, path in zip(grads, paths)], state

    params = params_of(torch.float32)
    start = copy.deepcopy(params)
    parts: list[Any] = [GradientTransform(lambda params: (), only, by_parameter=True)]
    optimizer = AdamW(params.items(), lr=0.1, transforms=parts, **EAGER)
    train(optimizer, params, grads_of(params, 2))
    assert [torch.equal(p, start[k]) for k, p in params.items()] == [False, True, True]


def test_mixed_rules() -> None:
    seen: list[Tensor] = []

    def watch(grads: Any, state: Any, step: Tensor) -> Any:
        seen.extend(grads)
        return grads, state

    parts = [clip_global_norm(0.1), GradientTransform(lambda params: (), watch)]
    for make in (
        lambda model: MuonAdamW(model, lr=0.1, transforms=parts, **EAGER),
        lambda model: Mixed(
            model.named_parameters(),
            ("*.weight", optimi_func.muon(lr=0.1)),
            rest=adamw(lr=0.1),
            transforms=parts,
            **EAGER,
        ),
    ):
        model = Net()
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(8, 4)).sum().backward()
        make(model).step()
        assert not any(map(torch.equal, before, model.parameters()))
        norm = torch.cat([x.flatten() for x in seen]).norm()
        assert norm == pytest.approx(0.1, rel=1e-4)
        seen.clear()


def test_meta_tensors_step() -> None:
    with torch.device("meta"):
        model = Net()
    optimizer = AdamW(
        model.parameters(), lr=0.1, transforms=SETS["clip_global_norm"], **EAGER
    )
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert optimizer.state[model.a.weight]["exp_avg"].is_meta


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


NORM = [clip_global_norm(1.0)]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: AdamW(one(), lr=0.1, transforms=[adamw(lr=1.0)]), TypeError, "got adamw"),
        (lambda: AdamW(one(), lr=0.1, transforms=[clip_value]), TypeError, "got <function"),
        (lambda: AdamW(one(), lr=0.1, transforms=clip_value), TypeError, "got <function"),
        (
            lambda: AdamW(one(), lr=0.1, transforms=[*NORM, ..., clip_value(0.1)]),
            *(TypeError, r"in the pure API: chain\(a, optimizer, b\)"),
        ),
        (
            lambda: AdamW(one(), lr=0.1, transforms=NORM, gradient_release=True),
            *(ValueError, r"gradient_release=True with transforms\[0\], _clip_global_norm"),
        ),
        (
            lambda: AdamW([{"params": one(), "transforms": NORM}], lr=0.1),
            *(TypeError, "transforms of a param group"),
        ),
        (
            lambda: AdamW(one(), lr=0.1, transforms=NORM).torch_state_dict(),
            *(ValueError, r"torch_state_dict\(\) with transforms="),
        ),
        (
            lambda: AdamW([("w", one()[0])], lr=0.1, transforms=NORM).functional(),
            *(ValueError, r"functional\(\) with transforms="),
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_other_programs_refuse_them() -> None:
    model, how = Net(), {"transforms": NORM}
    with pytest.raises(ValueError, match="transforms=: plans do not count"):
        memory.plan(model, AdamW, "1GB", **how)
    optimizer = AdamW(model.parameters(), lr=0.1, **how)
    with pytest.raises(ValueError, match="optimizer has transforms=: make it without"):
        compiled.train_step(model, lambda out, batch: out.sum(), optimizer)


def test_nothing_is_written_if_a_transform_raises() -> None:
    def bad(grads: Any, state: Any, step: Tensor) -> Any:
        return grads[1:], state

    params = params_of(torch.float32)
    start = copy.deepcopy(params)
    parts = [trace(0.5), GradientTransform(lambda params: (), bad)]
    optimizer = AdamW(params.items(), lr=0.1, transforms=parts, **EAGER)
    with pytest.raises(ValueError, match=r"chain's part 1, .*bad, returned"):
        train(optimizer, params, grads_of(params, 1))
    assert not optimizer.state
    assert all(torch.equal(p, start[k]) for k, p in params.items())


@pytest.mark.full
def test_two_processes(tmp_path: Path) -> None:
    checks = [
        transformed_worlds.shards,
        transformed_worlds.released,
    ]
    found = worlds.start(checks, 2, tmp_path)
    assert not any(found.values()), "\n".join(found.values())
