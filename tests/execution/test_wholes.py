"""Rules that map whole tensors, through the executors: the pipeline's step, in three."""

import weakref
from typing import Any

import pytest
import torch
from cases import assert_moved_alike
from tiers import few
from torch import Tensor, nn

from optimi_func import Muon, compiled, muon_init, muon_step
from optimi_func.core.leaf import leaf_step, rates, whole_means
from optimi_func.core.rule import Leaf, Means, Rule, Scalar, Scalars
from optimi_func.execution import wholes
from optimi_func.execution.launches import run_launches
from optimi_func.execution.plans import Plan
from optimi_func.execution.scalars import pack
from optimi_func.execution.slots import make_slots
from optimi_func.optimizers.sgd import Coeffs, State, accumulate, init, look_ahead

EAGER: dict[str, Any] = {"compile": False}
WAYS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "foreach": {"foreach": True},
    "compiled": {"compile": True},
    "capturable": {**EAGER, "capturable": True},
}
# Small, large, of other memory orders, empty, and several of one shape.
SHAPES = [(3, 4), (130, 70), (70, 130), (2, 3, 4), (5, 3, 2, 2), (0, 3), (3, 4), (130, 70)]


def params(dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    found = [torch.randn(s).to(dtype) for s in SHAPES]
    found[2] = found[2].t().contiguous().t()
    found[4] = found[4].contiguous(memory_format=torch.channels_last)
    found[5] = torch.randn(9, 11).to(dtype)[1:8:2, 2:7]  # with gaps
    return [nn.Parameter(x) for x in found]


def train(optimizer: Any, ps: list[Any], steps: int = 4, turned: bool = False) -> None:
    for i in range(steps):
        torch.manual_seed(i)
        for p in ps:
            p.grad = torch.randn(p.shape).to(p.dtype)
            if turned and p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()
        optimizer.step()


def ended(way: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    turned = options.pop("turned", False)
    ps = params(dtype)
    optimizer = Muon(ps, lr=0.02, **WAYS[way], **options)
    train(optimizer, ps, turned=turned)
    state = [x for p in ps for x in optimizer.state[p].values()]
    return [*(p.detach() for p in ps), *state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "way", few(["foreach", "compiled", "capturable"], ["foreach", "capturable"])
)
def test_every_way_is_the_eager_one(way: str, dtype: torch.dtype) -> None:
    wanted, found = ended("eager", dtype), ended(way, dtype)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for got, want in zip(found, ended(way, dtype, turned=True), strict=True):
        assert torch.equal(got, want)  # whatever the order of a gradient's memory


@pytest.mark.kernels
def test_options_of_the_map_share_their_kernels(graphs: Any) -> None:
    """Two are compiled, of the direction and of the move."""
    ended("compiled")
    made = graphs()
    for options in ({"ns_steps": 2}, {"adjust_lr_fn": "original"}, {"lr": 0.3}):
        ps = params()[:2]
        train(Muon(ps, **{"lr": 0.02, **options}, compile=True), ps, 1)
    assert graphs() == made


@pytest.mark.full
def test_the_compiled_pure_step() -> None:
    tree = {str(i): p.detach() for i, p in enumerate(params())}
    grads = {n: torch.ones_like(x) for n, x in tree.items()}
    known = {n: x.clone() for n, x in tree.items()}
    state = muon_init(tree)
    want, after = muon_step(tree, grads, state, lr=0.1)
    got, now = compiled.muon_step(tree, grads, state, lr=0.1)
    assert all(torch.equal(tree[n], x) for n, x in known.items())
    compiled.muon_step_(tree, grads, state, lr=0.1)
    for n, x in want.items():
        assert_moved_alike(known[n], got[n], x, 1e-5)
        assert torch.equal(tree[n], got[n])
        b = after.leaves[n].momentum_buffer
        assert torch.equal(now.leaves[n].momentum_buffer, b)
        assert torch.equal(state.leaves[n].momentum_buffer, b)


@pytest.mark.parametrize("way", ["eager", "foreach"])
def test_what_else_there_is_does_not_matter(way: str, monkeypatch: Any) -> None:
    """A CPU's parameters are mapped one by one: alone, among others, or a few at a time."""
    wanted = ended(way)
    monkeypatch.setattr(wholes, "ELEMENTS", 1)
    assert all(map(torch.equal, ended(way), wanted))
    for i in range(len(SHAPES)):
        ps = params()
        optimizer = Muon([ps[i]], lr=0.02, **WAYS[way])
        train(optimizer, ps)
        assert torch.equal(ps[i].detach(), wanted[i])


def test_equal_shapes_are_one_batch_where_there_is_no_cpu(monkeypatch: Any) -> None:
    wanted, calls = ended("eager"), []
    monkeypatch.setattr(wholes, "_batches", lambda x: True)
    batch = wholes.vmap

    def watched(*args: Any) -> Any:
        return lambda x, c: calls.append(tuple(x.shape)) or batch(*args)(x, c)

    monkeypatch.setattr(wholes, "vmap", watched)
    for got, want in zip(ended("eager"), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert calls == [(2, 3, 4), (2, 130, 70)] * 4


def test_directions_are_few_and_go(monkeypatch: Any) -> None:
    """No more at a time than are asked for, or one; none stays after a step."""
    made: list[list[Any]] = []
    empty = wholes.WholeLaunch._empty

    def watched(self: Any, ps: list[Tensor]) -> list[Tensor]:
        assert not [x for some in made for x in some if x() is not None]
        found = empty(self, ps)
        made.append([weakref.ref(x) for x in found])
        return found

    monkeypatch.setattr(wholes.WholeLaunch, "_empty", watched)
    monkeypatch.setattr(wholes, "ELEMENTS", 130 * 70)
    ended("eager")
    # When they are planned, and in each of four steps.
    assert list(map(len, made)) == [1, 1, 1, 4, 1] * 5
    assert not [x for some in made for x in some if x() is not None]


def test_a_flag_on_the_device_skips(monkeypatch: Any) -> None:
    import optimi_func

    p = nn.Parameter(torch.eye(4))
    options: dict[str, Any] = {"gradient_release": True, "capturable": True}
    optimizer = Muon([p], lr=0.1, **options, **EAGER)
    net = nn.ParameterList([p])
    handle = optimi_func.prepare_for_gradient_release(net, optimizer, skip_nonfinite=True)
    for factor in (1.0, float("nan"), 2.0):
        before = p.detach().clone()
        (p * factor).sum().backward()
        optimizer.step()
        assert torch.equal(p.detach(), before) == (factor != factor)
    assert optimizer.state[p]["step"] == 2 and handle.skipped == {"0": 1}


# A rule with all that Muon has not: decay within the gradient, and a State of its own.


def coeffs(t: Scalar) -> Coeffs:
    del t
    return Coeffs(0.9, 0.5, 0.9)


def centred(d: Tensor, c: Coeffs) -> Tensor:
    return (d - d.mean()) * c.momentum


rule: Rule[Any, Any] = Rule(
    *("centred", State, init, coeffs, look_ahead), accumulate=accumulate, whole=centred
)


@pytest.mark.parametrize("comp", [False, True], ids=["plain", "kahan"])
@pytest.mark.parametrize(
    "executor", few(["eager", "foreach", "kernels"], ["eager", "foreach"])
)
def test_three_passes_are_the_pipelines_step(executor: Any, comp: bool) -> None:
    dtype = torch.bfloat16 if comp else torch.float32
    torch.manual_seed(0)
    leaves = [
        Leaf(
            torch.randn(s).to(dtype),
            State(torch.randn(s).to(dtype)),
            torch.zeros(s, dtype=dtype) if comp else None,
        )
        for s in ((7, 5), (200, 90))
    ]
    grads = [torch.randn_like(leaf.p) for leaf in leaves]
    scalars = Scalars(coeffs(1), rates(0.1, 0.3, "l2", None, True, False, False))
    wanted = [
        leaf_step(rule, leaf, g, scalars, True, whole_means)
        for leaf, g in zip(leaves, grads)
    ]
    columns: Any = [
        [leaf.p for leaf in leaves],
        grads,
        [leaf.state.momentum_buffer for leaf in leaves],
        [leaf.comp for leaf in leaves],
    ]
    into = [[None if x is None else torch.empty_like(x) for x in y] for y in columns]
    names = ["momentum_buffer"]
    packed, at = pack(rule, [scalars], [0, 0], None, True)
    for targets in (into, []):
        slots = make_slots(names, State._fields, columns, targets, [None, None])
        there = targets or columns
        with torch.no_grad():
            inputs = columns + targets, packed, at
            launches, _ = Plan(rule, slots).launches(executor, *inputs, True, lambda: None)
            run_launches(launches, *inputs, there)
        for i, want in enumerate(wanted):
            torch.testing.assert_close(there[0][i], want.p, rtol=1e-2, atol=1e-5)
            buffer = want.state.momentum_buffer
            torch.testing.assert_close(there[2][i], buffer, rtol=1e-2, atol=1e-6)
            if comp:
                exact = want.p.double() + want.comp.double()
                got = there[0][i].double() + there[3][i].double()
                torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


def test_a_map_goes_with_no_other_cut() -> None:
    def after(x: Tensor, u: Tensor, s: State, c: Coeffs) -> Any:
        return u, s

    means = Means(1, lambda *_: [], lambda *_: torch.ones(()))
    for more in ({"after": after}, {"means": means}):
        with pytest.raises(ValueError, match="centred: whole goes with neither after nor"):
            Rule("centred", State, init, coeffs, look_ahead, whole=centred, **more)
