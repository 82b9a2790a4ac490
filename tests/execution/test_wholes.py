"""Rules that map whole tensors, through the executors: the pipeline's step, in three."""

import copy
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from cases import assert_moved_alike
from mapped import Mapped, mapped
from tiers import few
from torch import Tensor, nn

import optimi_func
from optimi_func import Muon, compiled, muon_init, muon_step
from optimi_func.core.leaf import leaf_step, rates
from optimi_func.core.math import moment
from optimi_func.core.rule import Direction, Leaf, Means, Rule, Scalar, Scalars, Whole
from optimi_func.core.storage import tensors_of
from optimi_func.core.tree import LeafState
from optimi_func.execution import wholes
from optimi_func.execution.launches import run_launches
from optimi_func.execution.plans import Plan
from optimi_func.execution.scalars import pack
from optimi_func.execution.slots import Columns, Step, make_slots
from optimi_func.optimizers.sgd import SGD

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


def assert_same_moves(
    found: list[Tensor], wanted: list[Tensor], starts: list[Any], tolerance: float
) -> None:
    """Compare the movements of parameters, which come first, and their state."""
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        start = starts[i].detach() if i < len(starts) else torch.zeros_like(want)
        if tolerance == 0.0 or torch.equal(want, start):
            assert torch.equal(got, want)
        else:
            assert_moved_alike(start, got, want, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "way", few(["foreach", "compiled", "capturable"], ["foreach", "capturable"])
)
def test_every_way_is_the_eager_one(way: str, dtype: torch.dtype) -> None:
    wanted, found = ended("eager", dtype), ended(way, dtype)
    assert_same_moves(found, wanted, params(dtype), 0.0 if way == "foreach" else 1e-6)
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


@pytest.mark.parametrize(
    "way", ["eager", pytest.param("compiled", marks=pytest.mark.kernels)]
)
def test_directions_elsewhere_are_no_new_plan(way: str, monkeypatch: Any) -> None:
    wanted = ended(way)
    made: list[Any] = []
    empty, plan = wholes.WholeLaunch._empty, wholes.WholeLaunch.__init__
    planned: list[int] = []

    def kept(self: Any, ps: list[Tensor]) -> list[Tensor]:
        made.append(empty(self, ps))
        return made[-1]

    def counted(self: Any, rule: Any, updates: list[Any], planner: Any) -> None:
        plan(self, rule, updates, lambda *x: planned.append(1) or planner(*x))

    monkeypatch.setattr(wholes.WholeLaunch, "_empty", kept)
    monkeypatch.setattr(wholes.WholeLaunch, "__init__", counted)
    for got, want in zip(ended(way), wanted, strict=True):
        assert torch.equal(got, want)
    assert len({x.data_ptr() for some in made for x in some if x.numel()}) == 5 * 8
    assert len(planned) == 2


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
        return lambda d, *more: calls.append(tuple(d.shape)) or batch(*args)(d, *more)

    monkeypatch.setattr(wholes, "vmap", watched)
    assert_same_moves(ended("eager"), wanted, params(), 1e-5)
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


@pytest.mark.parametrize("kind", [Muon, Mapped])
def test_a_flag_on_the_device_skips(kind: Any) -> None:
    p = nn.Parameter(torch.eye(4))
    options: dict[str, Any] = {"gradient_release": True, "capturable": True}
    optimizer = kind([p], lr=0.1, **options, **EAGER)
    net = nn.ParameterList([p])
    handle = optimi_func.prepare_for_gradient_release(net, optimizer, skip_nonfinite=True)
    for factor in (1.0, float("nan"), 2.0):
        before, known = p.detach().clone(), copy.deepcopy(optimizer.state[p])
        (p * factor).sum().backward()
        optimizer.step()
        assert torch.equal(p.detach(), before) == (factor != factor)
        for name, x in known.items():
            assert torch.equal(optimizer.state[p][name], x) == (factor != factor)
    assert optimizer.state[p]["step"] == 2 and handle.skipped == {"0": 1}


# A rule with all that Muon has not: decay within the gradient, and a State of its own.
State = SGD.Buffer


class Coeffs(NamedTuple):
    momentum: Scalar
    rest: Scalar
    ahead: Scalar


def init(p: Tensor, kept: Any, numbers: object) -> State:
    del numbers
    return State(moment(p, kept))


def accumulate(c: Coeffs) -> Coeffs:
    return c._replace(momentum=1.0)


def look_ahead(g: Tensor, s: State, c: Coeffs) -> Direction:
    b = c.momentum * s.momentum_buffer + c.rest * g
    return Direction(g + c.ahead * b, State(b))


def coeffs(t: Scalar) -> Coeffs:
    del t
    return Coeffs(0.9, 0.5, 0.9)


def centred(d: Tensor, x: Any, fields: Any, c: Coeffs, r: Any) -> Any:
    assert x == ()
    return (d - d.mean()) * c.momentum, fields


rule: Rule = Rule(
    *("centred", State, init, coeffs, look_ahead),
    accumulate=accumulate,
    whole=Whole(centred),
)


@pytest.mark.parametrize("comp", [False, True], ids=["plain", "kahan"])
@pytest.mark.parametrize("executor", few(["eager", "kernels"], ["eager"]))
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
    scalars = Scalars(coeffs(1), rates(0.1, 0.3, "l2", None, True, False))
    wanted = [leaf_step(rule, leaf, g, scalars, True) for leaf, g in zip(leaves, grads)]
    rows = list(map(tensors_of, leaves))
    own = {name: [row[name] for row in rows] for name in rows[0]}
    into = {name: list(map(torch.empty_like, column)) for name, column in own.items()}
    packed, at = pack(rule, [scalars], [0, 0], None, True)
    for there in (into, own):
        columns = Columns(grads, own, there)
        slots = make_slots(rule, columns, own)
        with torch.no_grad():
            inputs = Step(columns, packed, at, True)
            launches = Plan(rule, slots, ()).new_launches(executor, inputs)
            run_launches(launches.calls, inputs, False)
        for i, want in enumerate(wanted):
            for name, x in tensors_of(want).items():
                assert torch.equal(there[name][i], x)


def test_a_map_goes_with_no_other_cut() -> None:
    sums = Means(lambda *_: [])
    with pytest.raises(ValueError, match="centred: whole does not go with sums"):
        Rule("centred", State, init, coeffs, look_ahead, sums=sums, whole=Whole(centred))
    with pytest.raises(ValueError, match=r"centred: whole_fields=.'b',. are not the last"):
        Rule("centred", State, init, coeffs, look_ahead, whole=Whole(centred, ("b",)))


def given(ps: Any, i: int) -> list[Tensor]:
    torch.manual_seed(i)
    return [torch.randn(p.shape).to(p.dtype) for p in ps]


def stepped() -> tuple[list[Any], Mapped]:
    ps = [p for p in params() if p.numel()]
    optimizer = Mapped(ps, **EAGER)
    for i in range(3):
        for p, g in zip(ps, given(ps, i)):
            p.grad = g
        optimizer.step()
    return ps, optimizer


def test_fields_of_a_map_have_their_shapes() -> None:
    ps, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["sides"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"\['sides'\] has shape \(2, 3\): .* \(3, 2\)"):
        optimizer.load_state_dict(saved)
    optimizer.state[ps[0]]["row_avg"] = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"\['row_avg'\] has shape \(3, 4\): .* \(3, 1\)"):
        optimizer.step()
    state = mapped(lr=0.1).init([ps[0]])
    leaf = state.leaves[0].rule_state._replace(sides=torch.zeros(6))
    state = state._replace(leaves=[LeafState(leaf, None)])
    with pytest.raises(ValueError, match=r"leaves\[0\]\['sides'\] has shape \(6,\)"):
        mapped(lr=0.1).step([ps[0].detach()], [ps[0].detach()], state)


def test_fields_of_a_map_in_batches(monkeypatch: Any) -> None:
    wanted = [p.detach() for p in stepped()[0]]
    monkeypatch.setattr(wholes, "_batches", lambda x: True)
    starts = [p for p in params() if p.numel()]
    assert_same_moves([p.detach() for p in stepped()[0]], wanted, starts, 1e-5)


def test_parts_of_a_step_leave_the_fields_alone() -> None:
    """Micro-batches move the moments alone."""
    p = nn.Parameter(torch.randn(3, 4))
    start, (a, b) = p.detach().clone(), given([p, p], 1)
    optimizer = Mapped([p], gradient_release=True, **EAGER)
    optimi_func.prepare_for_gradient_release(
        nn.ParameterList([p]), optimizer, accumulation="states"
    )
    for g in (a, b):
        assert not any(x.any() for x in optimizer.state[p].values() if x.shape == (3, 2))
        (p * g).sum().backward()
    optimizer.step()
    d = a + b + 0.1 * start
    rows, sides = d.square().mean(-1, keepdim=True), 0.1 * start.square().mean()
    torch.testing.assert_close(optimizer.state[p]["row_avg"], rows)
    d = (d - d.mean() + a + b) / (rows.sqrt() + 6 * sides)
    torch.testing.assert_close(p.detach(), start - 0.1 * d - 0.001 * start)


@pytest.mark.parametrize("storage", [None, "compact"])
def test_a_map_reads_moments_as_they_are_stored(storage: Any) -> None:
    """The class decodes them, and the pure step, which has them in float32, rounds them."""
    p = nn.Parameter(torch.randn(64, 96).bfloat16())
    optimizer = Mapped([p], storage=storage, **EAGER)
    value = mapped(lr=0.1, weight_decay=0.01)
    tree = p.detach().clone()
    state = value.init(tree, storage=storage)
    for i in range(3):
        (p.grad,) = given([p], i)
        tree, state = value.step(tree, p.grad, state)
        optimizer.step()
    assert torch.equal(p, tree)
