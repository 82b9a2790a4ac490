"""Hooks: each against a loop of its definition, in every executor, and what is refused."""

import copy
import io
import pickle
from functools import partial
from math import pi
from typing import Any, NamedTuple

import numpy
import pytest
import reference
import torch
from cases import CLASSES, LR, assert_moved_alike, problem
from refusals import Scene, refuses
from stored import BF16, gradients, made, meant, starts, train
from tiers import row
from torch import Tensor, nn
from torch.func import grad, vmap

import optimi_func
from optimi_func import SOAP, AdamW, Lion, Muon, MuonAdamW, adamw, compiled, population
from optimi_func.core.hooks import TENSOR, hook
from optimi_func.core.runtime import runtime
from optimi_func.hooks import cautious, clip_rms, floor, hyperball, radial_brake, relative
from optimi_func.rules import Optimizer

EAGER: dict[str, Any] = {"compile": False}
# The last runs the code of kernels without a compiler, by the fixture `wanted`.
WAYS: dict[str, Any] = {"eager": EAGER, "foreach": {"foreach": True}}
WAYS["kernels"] = {"compile": True}


@hook
class leaning(NamedTuple):
    """All that a `scale` of a user may read and return."""

    sized = True
    factor: float = 0.5
    over: Any = "tensor"

    def scale(self, n: Any, lr: Any) -> Any:
        return self.factor * n.xd / n.xx, lr / n.numel


@hook
class clamped(NamedTuple):
    top: float = 0.5

    def update(self, d: Tensor, g: Tensor, x: Tensor) -> Any:
        yield d.sign() * d.abs().clamp_max(self.top)


@hook
class balanced(NamedTuple):
    means, sized = 2, True
    share: float = 0.5

    def update(self, d: Tensor, g: Tensor, x: Tensor) -> Any:
        gg, dd, numel = yield [g * g, d * d]
        yield d * gg / (gg + self.share * dd + 1.0 / numel)


OVERS = ("tensor", "matrix", "row")
SCALING = [partial(clip_rms, 0.3), partial(relative, 0.5), partial(floor, 0.9), hyperball]
SCALING += [partial(radial_brake, 0.5, 0.8), leaning]
ALONE: list[Any] = [[make(over=over)] for over in OVERS for make in SCALING]
ALONE += [[cautious()], [clamped()], [balanced()]]
RUN, PARTS = [floor(0.9), radial_brake(0.5)], [floor(0.9, "row"), clip_rms(0.3, "matrix")]
MIXED = [*PARTS, radial_brake(0.5), relative(0.2)]
TOGETHER = [RUN, MIXED, [cautious(), hyperball()]]
TOGETHER += [[clip_rms(0.3), cautious(), *RUN, leaning()]]


class Heavy(Optimizer):
    """SGD with momentum, as a rule of a user."""

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        m = 0.9 * s.exp_avg + g
        return m, self.State(m)


def heavy_move(p: Tensor, s: Any, g: Tensor, at: Any) -> Any:
    m = 0.9 * s["m"] + g
    return -at.lr * m, {"m": m}


def by_matrix(p: Tensor, s: Any, g: Tensor, at: Any) -> Any:
    states = [{k: x[i] for k, x in s.items()} for i in range(len(p))]
    moves, new = zip(*map(reference.muon_move, p, states, g, [at] * len(p)))
    return torch.stack(moves), {k: torch.stack([x[k] for x in new]) for k in new[0]}


# The class, a shape, the step of a loop, its betas, and how many parts a matrix has.
RULES: dict[str, tuple[Any, tuple[int, ...], Any, Any, int]] = {
    "adamw": (AdamW, (6, 4), reference.adam_move, (0.9, 0.99), 1),
    "vector": (AdamW, (7,), reference.adam_move, (0.9, 0.99), 1),
    "convolution": (AdamW, (4, 3, 2, 2), reference.adam_move, (0.9, 0.99), 1),
    "lion": (Lion, (3, 5, 2), reference.lion_move, (0.9, 0.99), 1),
    "soap": (SOAP, (6, 4), reference.soap_move, (0.95, 0.95), 1),
    "muon": (Muon, (6, 4), reference.muon_move, (), 1),
    "muon stack": (Muon, (3, 6, 4), by_matrix, (), 1),
    "muon split": (Muon, (6, 4), partial(reference.muon_move, split=(2, 2, 2)), (), 3),
    "own": (Heavy, (6, 4), heavy_move, (), 1),
    "zeros": (Heavy, (6, 4), heavy_move, (), 1),
}


def drawn(name: str) -> tuple[Tensor, list[Tensor]]:
    """A parameter, and gradients of which one is 0. "zeros" has more of these."""
    start, grads = problem(RULES[name][1], steps=6)
    if name == "zeros":
        start = 0 * start
        grads = [g * (torch.arange(6) > 1).view(6, 1) for g in grads]
    return start, grads


def parts(x: Tensor, over: Any, split: int) -> list[Tensor]:
    """Views of what a hook has norms of."""
    if over == TENSOR:
        return [x]
    stack = [*x] if x.dim() == 3 else [x.flatten(1) if x.dim() > 1 else x.view(1, -1)]
    matrices = [y for matrix in stack for y in matrix.chunk(split)]
    return matrices if over.over == "matrix" else [z for y in matrices for z in y]


def changed(one: Any, d: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """The direction by its definition: by positions before and after, and their norms."""
    n, still = torch.linalg.vector_norm, not (d.any() and x.any())
    match one:
        case leaning(factor, _):
            xx = (x * x).mean()
            return d * factor * (x * d).mean() / xx + x * LR / d.numel()
        case clamped(top):
            return d.clamp(-top, top)
        case balanced(share):
            gg, dd = (g * g).mean(), (d * d).mean()
            return d * gg / (gg + share * dd + 1.0 / d.numel())
        case cautious():
            agrees = (d * g > 0).double()
            return d * agrees / max(agrees.mean().item(), 1e-3)
        case clip_rms(limit, _):
            return d / max(1.0, d.square().mean().sqrt().item() / limit)
        case relative(ratio, _):
            return 0 * d if still else d * (ratio * n(x) / n(d))
        case floor(ratio, _):
            return d if still else d * max(1.0, ratio * n(x) / n(d))
        case radial_brake(outward, inward, _):
            y = x - LR * d
            s = outward if n(y) > n(x) else inward
            y = y * ((n(x) + s * (n(y) - n(x))) / n(y)) if y.any() else y
        case hyperball(_):
            y = x if still else x - LR * n(x) * d / n(d)
            y = x if still else y * (n(x) / n(y))
    return (x - y) / LR


def decay_of(chain: Any) -> float:
    return 0.1 * (hyperball not in map(type, chain))


def looped(name: str, p: Tensor, grads: Any, chains: Any) -> Tensor:
    """The end of a loop with a chain of hooks at each step; None is no gradient."""
    _, _, move, betas, split = RULES[name]
    s, t = dict.fromkeys(("m", "v", "b", "r", "v_max"), torch.zeros_like(p)), 0
    for g, chain in zip(grads, chains):
        if g is None:
            continue
        t += 1
        u, s = move(p, s, g, reference.At(t, 1.0, 0.0, betas))
        d = -u.contiguous()
        for x in chain:
            for each in zip(*[parts(y, x.over, split) for y in (d, g, p)], strict=True):
                each[0].copy_(changed(x, *each))
        p = p - LR * (d + decay_of(chain) * p)
    return p


def options_of(name: str, chain: Any) -> dict[str, Any]:
    *_, betas, split = RULES[name]
    known = {"betas": betas} if betas else {"split": {"rows": 3}} if split > 1 else {}
    return {"lr": LR, "weight_decay": decay_of(chain), "hooks": chain, **known}


def trained(name: str, start: Tensor, grads: Any, chain: Any, **how: Any) -> Tensor:
    p = nn.Parameter(start.clone())
    optimizer = RULES[name][0]([p], **options_of(name, chain), **how)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def pure(name: str, p: Tensor, grads: Any, chain: Any, step: Any = None) -> Tensor:
    optimizer = RULES[name][0].pure(**options_of(name, chain))
    state = optimizer.init(p)
    for g in grads:
        p, state = (step or type(optimizer).step)(optimizer, p, g, state)
    return p


def fits(name: str, chain: Any) -> bool:
    """Muon and SOAP go with no hook that reads gradients, and `leaning` divides by x."""
    if name == "zeros":
        return not any(isinstance(x, leaning) for x in chain)
    return RULES[name][0] not in (Muon, SOAP) or not any(x.reads_gradient for x in chain)


def shown(x: Any) -> str:
    return "+".join(map(repr, x)).replace("'", "") if isinstance(x, list) else str(x)


@pytest.mark.parametrize("chain", [*ALONE, *TOGETHER], ids=shown)
def test_a_hook_is_its_definition(chain: Any, wanted: list[str]) -> None:
    for name in [name for name in RULES if fits(name, chain)]:
        start, grads = drawn(name)
        want = looped(name, start, grads, [chain] * 6)
        ends = [trained(name, start, grads, chain, **how) for how in WAYS.values()]
        ends += [pure(name, start, grads, chain, step) for step in (None, compiled.step)]
        for end in ends:
            torch.testing.assert_close(end - start, want - start, rtol=1e-9, atol=1e-12)
    for shape in ((), (0,), (1, 1), (0, 2), (2, 0, 3)) if fits("zeros", chain) else ():
        p = torch.ones(shape)
        for how in WAYS.values():
            assert trained("own", p, [p, 0 * p], chain, **how).isfinite().all()


ROWS = [("adamw", [cautious(), *RUN]), ("muon split", MIXED), ("own", MIXED)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "chain"), ROWS, ids=shown)
def test_compiled_steps_are_their_definition(name: str, chain: Any) -> None:
    start, grads = drawn(name)
    want = looped(name, start, grads, [chain] * 6)
    assert_moved_alike(start, trained(name, start, grads, chain, compile=True), want, 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_late_parameters_groups_and_hooks_that_change(way: str, wanted: list[str]) -> None:
    """The second parameter has no gradients at first, and the third's group no hooks."""
    first, then = [cautious(), *RUN], [clip_rms(0.3)]
    rows = [problem((5, 3), steps=6, seed=i) for i in range(3)]
    columns = rows[0][1], [None, None, *rows[1][1][2:]], rows[2][1]
    ps = [nn.Parameter(p.clone()) for p, _ in rows]
    groups = [{"params": ps[:2]}, {"params": ps[2:], "hooks": []}]
    optimizer = AdamW(groups, **options_of("adamw", first), **WAYS[way])
    for t, grads in enumerate(zip(*columns)):
        for p, g in zip(ps, grads):
            p.grad = g if g is None else g.clone()
        optimizer.param_groups[0]["hooks"] = first if t < 4 else then
        optimizer.step()
    for i, (p, (start, _)) in enumerate(zip(ps, rows)):
        chains = [[]] * 6 if i == 2 else [first] * 4 + [then] * 2
        want = looped("adamw", start, columns[i], chains)
        assert_moved_alike(start, p.detach(), want, 1e-10)


@pytest.mark.parametrize("name", CLASSES)
def test_hyperball_keeps_the_norm_or_is_refused(name: str) -> None:
    start, grads = drawn("own")
    p = nn.Parameter(start.clone())
    make = partial(CLASSES[name], [p], lr=0.1, weight_decay=0.0, **EAGER)
    if CLASSES[name].pure(lr=0.1).rule.after or name in ("prodigy", "rprop"):
        with pytest.raises(ValueError, match=r"the hook hyperball\(over='tensor'\): its"):
            make(hooks=[hyperball()])
        return
    optimizer = make(hooks=[hyperball()])
    for g in grads:
        p.grad = g
        optimizer.step()
    assert p.norm().item() == pytest.approx(start.norm().item(), rel=1e-12)
    assert (p - start).norm() > 0.1 * start.norm()


OPTIONS: list[Any] = [(make(), make(over=x)) for make in SCALING for x in OVERS[1:]]
OPTIONS += [(f(0.3), f(0.2)) for f in (clip_rms, relative, radial_brake, leaning, balanced)]
OPTIONS += [(floor(0.9), floor(0.8)), (radial_brake(0.5, 0.5), radial_brake(0.5, 0.4))]


@pytest.mark.parametrize(("one", "other"), OPTIONS, ids=repr)
def test_every_option_changes_the_answer(one: Any, other: Any) -> None:
    """And no hook at all, and another order."""
    start, grads = problem((2, 4, 3), steps=6)
    grads = [torch.randn_like(g) + (-1) ** i * start for i, g in enumerate(grads)]
    chains = [[one], [other], [one, clamped(0.1)], [clamped(0.1), one], []]
    ends = [pure("own", 4 * start, grads, chain) for chain in chains]
    assert len({tuple(x.flatten().tolist()) for x in ends}) == len(chains)


COMPILED = row({"compile": True}, id="compiled", tier="full")
FOREACH = row({"foreach": True, "compile": None}, id="foreach")


@pytest.mark.parametrize("storage", [None, "compact", "exact"])
@pytest.mark.parametrize("how", [FOREACH, COMPILED])
def test_storages_move_alike(storage: Any, how: dict[str, Any]) -> None:
    ends: list[Any] = []
    for way in (EAGER, how):
        ps, optimizer = made("adamw", storage, BF16, hooks=RUN, **way)
        train(optimizer, ps, gradients(8))
        ends.append([meant(p, optimizer.state[p]) for p in ps])
    for start, ours, theirs in zip(starts(), *ends):
        moved = (theirs - start.float()).norm()
        assert (ours - theirs).norm() <= (2e-3 if storage else 1e-2) * moved > 0


def by_ratio(over: str, x: Any) -> Any:
    return [floor(x, over), radial_brake(x / 4, over=over)]


RATIOS = torch.tensor([0.9, 2.0, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("over", OVERS)
def test_members_and_derivatives_of_a_number(over: str) -> None:
    start, grads = problem((2, 4, 3), steps=4)

    def end(x: Any) -> Tensor:
        return pure("adamw", start, grads, by_ratio(over, x))

    alone = torch.stack([end(x.item()) for x in RATIOS])
    names = {**options_of("adamw", []), "hooks": by_ratio(over, RATIOS)}
    members = population.init(adamw, torch.stack([start] * 3), names)
    for g in grads:
        members = population.step(adamw, members, torch.stack([g] * 3))
    for found in (vmap(end)(RATIOS), members.params):
        assert_moved_alike(start, found, alone, 1e-12)
    ends = [end(RATIOS[0] + h).square().sum() for h in (1e-6, -1e-6)]
    slope = grad(lambda x: end(x).square().sum())(RATIOS[0]).item()
    assert slope == pytest.approx((ends[0] - ends[1]).item() / 2e-6, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("inside", [True, False])
def test_one_graph_takes_all_numbers(over: str, inside: bool, graphs: Any) -> None:
    """Of an optimizer that the graph makes, or is given."""
    torch._dynamo.reset()  # which counts graphs by the line
    p, (g, *_) = problem((2, 4, 3), steps=4)
    whole = partial(torch.compile, fullgraph=True, backend="aot_eager")

    def step(x: Tensor, s: Any) -> Any:
        return adamw(lr=LR, hooks=by_ratio(over, x)).step(p, g, s)

    compiled_step = whole(step)
    for x in RATIOS:
        value = adamw(lr=LR, hooks=by_ratio(over, x))
        s = value.init(p)
        ours = compiled_step(x, s) if inside else whole(value.step)(p, g, s)
        assert_moved_alike(p, ours[0], value.step(p, g, s)[0], 1e-12)
    assert graphs() == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("over", ["tensor", "row"])
def test_schedules_and_tensors(over: str, way: str, wanted: list[str]) -> None:
    start, grads = drawn("own")
    chain = [relative(lambda step: 0.5 + 0.2 * step, over)]
    want = looped("own", start, grads, [[relative(0.5 + 0.2 * i, over)] for i in range(6)])
    ends = [f("own", start, grads, chain) for f in (pure, partial(trained, **WAYS[way]))]
    # A tensor that changes between steps.
    x, p = torch.tensor(0.5, dtype=torch.float64), nn.Parameter(start.clone())
    how = options_of("own", [relative(x, over)]) | WAYS[way] | {"capturable": True}
    optimizer = Heavy([p], **how)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
        x += 0.2
    for end in (*ends, p.detach()):
        assert_moved_alike(start, end, want, 1e-6)  # schedules compute in float32


@pytest.mark.parametrize("run", [pure, partial(trained, **EAGER)], ids=["pure", "class"])
def test_a_schedule_out_of_range_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match=r"relative: ratio=-0\.5"):
        run("own", *drawn("own"), [relative(lambda step: 0.5 - step)])


def reloaded(p: Tensor, optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    q = nn.Parameter(p.detach().clone())
    other = AdamW([q], lr=LR, capturable=True, **EAGER)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return q, other


COPIES: list[Any] = [
    pytest.param(lambda *x: copy.deepcopy(x), torch.tensor(0.9), id="deepcopy"),
    pytest.param(lambda *x: pickle.loads(pickle.dumps(x)), 0.9, id="pickle"),
    pytest.param(reloaded, torch.tensor(0.9), id="state dict"),
    pytest.param(reloaded, numpy.float64(0.9), id="state dict, numpy"),
]


@pytest.mark.parametrize(("copied", "x"), COPIES)
def test_copies_go_on(copied: Any, x: Any) -> None:
    p, chain = nn.Parameter(torch.randn(5, 3)), [floor(x, "matrix"), leaning(), relative(x)]
    optimizer = AdamW([p], lr=LR, hooks=chain, capturable=True, **EAGER)
    p.grad = torch.randn_like(p)
    optimizer.step()
    q, other = copied(p, optimizer)
    q.grad = p.grad.clone()
    for one in (optimizer, other):
        one.step()
    assert torch.equal(p, q) and other.param_groups[0]["hooks"] == tuple(chain)
    value = adamw(lr=0.1, hooks=chain)
    assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)
    assert floor(0.2)._replace(over="row") == floor(0.2, "row") != floor(0.2)


W = nn.Parameter(torch.ones(4, 3))
LIST, RANGE = "allowed is a list of hooks", "allowed is finite"
DECAY = "weight_decay=0.1: allowed is 0 with hyperball"
MIXES = r"hook cautious\(\): .* mixes the elements of a matrix"
SUMS = r"hook \w+\(.*\): its direction has sums over all parameters"
REFUSED = {
    "AdamW([W], hooks=None)": "TypeError: " + LIST,
    "AdamW([W], hooks=floor())": "TypeError: " + LIST,
    "AdamW([{'params': [W], 'hooks': [floor]}])": "TypeError: class .*floor.*" + LIST,
    "adamw(lr=0.1, hooks='floor')": "TypeError: " + LIST,
    "adamw(lr=0.1, hooks=[floor(-0.1)])": "floor: ratio=-0.1: " + RANGE,
    "adamw(lr=0.1, hooks=[floor(float('inf'))])": "floor: ratio=inf: " + RANGE,
    "adamw(lr=0.1, hooks=[floor('1')])": "TypeError: floor: ratio='1': allowed are numbers",
    "adamw(lr=0.1, hooks=[relative(-0.1)])": "relative: ratio=-0.1: " + RANGE,
    "adamw(lr=0.1, hooks=[clip_rms(0.0)])": "clip_rms: limit=0.0: " + RANGE,
    "adamw(lr=0.1, hooks=[radial_brake(1.1)])": "outward=1.1: " + RANGE,
    "adamw(lr=0.1, hooks=[radial_brake(0, -1)])": "inward=-1: " + RANGE,
    "hyperball('rows')": "over='rows': allowed are 'tensor', 'matrix'",
    "Muon([W], hooks=[cautious()])": "muon .*" + MIXES,
    "SOAP([W], hooks=[cautious()])": "soap .*" + MIXES,
    "AdamW([W], hooks=[cautious(), floor(1.0, 'row')])": "" + MIXES,
    "Prodigy([W], hooks=[cautious()])": "" + SUMS,
    "Prodigy([W], hooks=[floor(over='row')])": "" + SUMS,
    "ASGD([W], hooks=[floor()])": r"hook floor.*: its direction contains lr",
    "AdamW([W], weight_decay=0.1, hooks=[hyperball()])": DECAY,
    "AdamW([{'params': [W], 'hooks': [hyperball()]}], weight_decay=0.1)": DECAY,
    "AdamW([{'params': [W], 'weight_decay': 0.1}], hooks=[hyperball()])": DECAY,
    "schedule_free_sgd(lr=0.1, hooks=[cautious()])": "has the gradient's sign",
    "hook(Heavy)": "TypeError: Heavy is no hook: allowed is a NamedTuple of numbers",
    "hook(Heavy.State)": "TypeError: State is no hook: .* one of the methods scale",
}


@refuses(REFUSED)
def test_refusals_say_what_is_allowed() -> Scene:
    return {"hook": hook}


def test_hidden_matrices_on_balls_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    ball, least = (hyperball("matrix"),), (floor(0.2),)
    for first, second, decays in ((ball, least, [0.0, 0.1]), (least, ball, [0.1, 0.0])):
        how = {"hooks": first, "adamw_hooks": second, "weight_decay": 0.1, **EAGER}
        groups = MuonAdamW(model, lr=0.1, **how).param_groups
        assert [g["hooks"] for g in groups] == [first, second, second]
        assert [g["weight_decay"] for g in groups] == [*decays, 0.0]


def times(k: float, factor: float) -> Any:
    """A hook of a class that has the code of the last one, and another formula."""

    @hook
    class again(NamedTuple):
        factor: float

        def scale(self, n: Any, lr: Any) -> Any:
            return k * self.factor

    return again(factor)


def test_a_hook_that_is_defined_again_is_another(wanted: list[str]) -> None:
    start, grads = drawn("own")
    for how in (*WAYS.values(), "pure"):
        run = pure if how == "pure" else partial(trained, **how)
        hooks = times(1.0, 1.0), times(1.0, 0.0), times(3.0, 1.0)
        once, none, thrice = [run("own", start, grads[:1], [x]) for x in hooks]
        assert_moved_alike(none, thrice, none + 3 * (once - none), 1e-12)
    assert hooks[0] != times(1.0, 1.0) and floor(0.5) != relative(0.5)


class halved(floor):
    def scale(self, n: Any, lr: Any) -> Any:
        return 0.5


def test_a_class_that_inherits_a_hook_is_refused() -> None:
    with pytest.raises(TypeError, match=r"decorated by hooks\.hook"):
        adamw(lr=0.1, hooks=[halved()])
    value = adamw(lr=0.1, hooks=[hook(halved)()])
    assert value.every_hook != adamw(lr=0.1, hooks=[floor()]).every_hook


def test_the_kernels_of_a_step(wanted: list[str]) -> None:
    start, grads = drawn("adamw")

    def asked(*chain: Any, **how: Any) -> int:
        known = len(wanted)
        trained("adamw", start, grads, list(chain), compile=True, **how)
        return len(wanted) - known

    assert asked() == asked(clamped()) == 1
    assert asked(*RUN) == asked(leaning()) == asked(balanced()) == 2  # a round before it
    assert asked(cautious(), *RUN) == 3
    assert asked(*PARTS) == 2  # the direction, and the move that all maps share
    assert asked(leaning(0.5, "row"), relative(over="matrix")) == 0
    for x in (0.2, lambda step: 0.1 * step, torch.tensor(0.3)):
        for chain in ([floor(x), radial_brake(x)], [leaning(x)], [relative(x, "row")]):
            assert asked(*chain, capturable=isinstance(x, Tensor)) == 0


@hook
class turned(NamedTuple):
    def scale(self, n: Any, lr: Any) -> Any:
        return pi * n.dd


@pytest.mark.full
def test_a_hook_that_reads_a_float_is_compiled(monkeypatch: Any) -> None:
    """As a number, not as an argument that no list of tensors has."""
    monkeypatch.setattr(runtime, "other_code", [])  # no later test is told
    trained("own", *drawn("own"), [turned()], compile=True)


def test_schedule_free_loads_hooks() -> None:
    """Its own check reads the hooks as a state dict has them."""
    ends: list[Any] = []
    for _ in range(2):
        p = nn.Parameter(torch.ones(3, 2))
        ends.append(optimi_func.ScheduleFreeAdamW([p], lr=0.1, hooks=[floor()], **EAGER))
    ends[1].load_state_dict(ends[0].state_dict())
    assert ends[1].param_groups[0]["hooks"] == (floor(),)
