"""Hooks: each against a loop of its definition, in every executor, and what is refused."""

import copy
import io
import math
import pickle
from functools import partial
from typing import Any, NamedTuple

import numpy
import pytest
import reference
import torch
from cases import CLASSES, LR, assert_moved_alike, problem
from stored import BF16, gradients, made, meant, starts, train
from tiers import row
from torch import Tensor, nn
from torch.func import grad, vmap

from optimi_func import (  # noqa: F401, of calls that are texts
    ASGD,
    LAMB,
    SOAP,
    AdamW,
    Lion,
    Muon,
    MuonAdamW,
    Prodigy,
    ScheduleFreeAdamW,
    adamw,
    compiled,
    hooks,
    population,
)
from optimi_func.execution import kernels
from optimi_func.hooks import cautious, clip_rms, floor, hyperball, radial_brake, relative
from optimi_func.rules import Optimizer

DOUBLE = torch.float64
EAGER: dict[str, Any] = {"compile": False}
# The last runs the code of kernels without a compiler, by the fixture `wanted`.
WAYS: dict[str, Any] = {"eager": EAGER, "foreach": {"foreach": True}}
WAYS["kernels"] = {"compile": True}


@hooks.hook
class leaning(NamedTuple):
    """All that a `scale` of a user may read and return."""

    sized = True
    factor: float = 0.5
    over: Any = "tensor"

    def scale(self, n: Any, lr: Any) -> Any:
        return self.factor * n.xd / n.xx, lr / n.numel


@hooks.hook
class clamped(NamedTuple):
    top: float = 0.5

    def update(self, d: Tensor, g: Tensor, x: Tensor) -> Any:
        yield d.sign() * d.abs().clamp_max(self.top)


@hooks.hook
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
TOGETHER = [RUN, [cautious(), hyperball()], [*PARTS, radial_brake(0.5), relative(0.2)]]
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
    """Muon of each matrix of a stack."""
    states = [{k: x[i] for k, x in s.items()} for i in range(len(p))]
    moves, new = zip(*map(reference.muon_move, p, states, g, [at] * len(p)))
    return torch.stack(moves), {k: torch.stack([x[k] for x in new]) for k in new[0]}


in_three = partial(reference.muon_move, split=(2, 2, 2))
BETAS = {AdamW: (0.9, 0.99), Lion: (0.9, 0.99), SOAP: (0.95, 0.95)}
# The class, a shape, the step of a loop, and how many parts a matrix has.
RULES: dict[str, tuple[Any, tuple[int, ...], Any, int]] = {
    "adamw": (AdamW, (6, 4), reference.adam_move, 1),
    "vector": (AdamW, (7,), reference.adam_move, 1),
    "stack": (AdamW, (3, 5, 2), reference.adam_move, 1),
    "convolution": (AdamW, (4, 3, 2, 2), reference.adam_move, 1),
    "lion": (Lion, (6, 4), reference.lion_move, 1),
    "soap": (SOAP, (6, 4), reference.soap_move, 1),
    "muon": (Muon, (6, 4), reference.muon_move, 1),
    "muon stack": (Muon, (3, 6, 4), by_matrix, 1),
    "muon split": (Muon, (6, 4), in_three, 3),
    "own": (Heavy, (6, 4), heavy_move, 1),
}


def parts(x: Tensor, over: str, split: int) -> list[Tensor]:
    """Views of what a hook has norms of."""
    if over == "tensor":
        return [x]
    stack = [*x] if x.dim() == 3 else [x.flatten(1) if x.dim() > 1 else x.view(1, -1)]
    matrices = [y for matrix in stack for y in matrix.chunk(split)]
    return matrices if over == "matrix" else [z for y in matrices for z in y]


def changed(hook: Any, d: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """The direction by its definition: by positions before and after, and their norms."""
    n, still = torch.linalg.vector_norm, not (d.any() and x.any())
    match hook:
        case leaning(factor, _):
            return d * factor * (x * d).mean() / (x * x).mean() + x * LR / d.numel()
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
    cls, _, move, split = RULES[name]
    s, t = dict.fromkeys(("m", "v", "b", "r", "v_max"), torch.zeros_like(p)), 0
    for g, chain in zip(grads, chains):
        if g is None:
            continue
        t += 1
        u, s = move(p, s, g, reference.At(t, 1.0, 0.0, BETAS.get(cls, ())))
        d = -u.contiguous()
        for x in chain:
            over = getattr(x.over, "over", x.over)
            for each in zip(*[parts(y, over, split) for y in (d, g, p)], strict=True):
                each[0].copy_(changed(x, *each))
        p = p - LR * (d + decay_of(chain) * p)
    return p


def options_of(name: str, chain: Any) -> dict[str, Any]:
    cls, _, _, split = RULES[name]
    known = {"betas": BETAS[cls]} if cls in BETAS else {}
    known |= {"split": {"rows": split}} if split > 1 else {}
    return {"lr": LR, "weight_decay": decay_of(chain), "hooks": chain, **known}


def trained(name: str, start: Tensor, grads: Any, chain: Any, **how: Any) -> Tensor:
    p = nn.Parameter(start.clone())
    optimizer = RULES[name][0]([p], **options_of(name, chain), **how)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def pure(name: str, p: Tensor, grads: Any, chain: Any, how: Any = None) -> Tensor:
    optimizer = RULES[name][0].pure(**options_of(name, chain))
    state = optimizer.init(p)
    for g in grads:
        p, state = (how or type(optimizer).step)(optimizer, p, g, state)
    return p


def shown(x: Any) -> str:
    return "+".join(map(repr, x)).replace("'", "") if isinstance(x, list) else str(x)


def fits(name: str, chain: Any) -> bool:
    """Muon and SOAP go with no hook that reads gradients."""
    cls, *_ = RULES[name]
    return cls not in (Muon, SOAP) or not any(x.reads_gradient for x in chain)


@pytest.mark.parametrize("chain", [*ALONE, *TOGETHER], ids=shown)
def test_a_hook_is_its_definition(chain: Any, wanted: list[str]) -> None:
    for name, (_, shape, *_) in RULES.items():
        if not fits(name, chain):
            continue
        start, grads = problem(shape, steps=6)
        want = looped(name, start, grads, [chain] * 6)
        ends = [trained(name, start, grads, chain, **how) for how in WAYS.values()]
        ends += [pure(name, start, grads, chain, how) for how in (None, compiled.step)]
        for end in ends:
            assert_moved_alike(start, end, want, 1e-10)
    assert wanted


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "chain"),
    [("adamw", [cautious(), *RUN]), ("muon split", TOGETHER[2]), ("own", TOGETHER[2])],
    ids=shown,
)
def test_compiled_steps_are_their_definition(name: str, chain: Any) -> None:
    start, grads = problem(RULES[name][1], steps=6)
    want = looped(name, start, grads, [chain] * 6)
    assert_moved_alike(start, trained(name, start, grads, chain, compile=True), want, 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_late_parameters_groups_and_hooks_that_change(way: str, wanted: list[str]) -> None:
    """The second parameter has no gradients at first, and the third's group no hooks."""
    first, then = [cautious(), *RUN], [clip_rms(0.3)]
    drawn = [problem((5, 3), steps=6, seed=i) for i in range(3)]
    columns = drawn[0][1], [None, None, *drawn[1][1][2:]], drawn[2][1]
    ps = [nn.Parameter(p.clone()) for p, _ in drawn]
    groups = [{"params": ps[:2]}, {"params": ps[2:], "hooks": []}]
    optimizer = AdamW(groups, **options_of("adamw", first), **WAYS[way])
    for t, grads in enumerate(zip(*columns)):
        for p, g in zip(ps, grads):
            p.grad = g if g is None else g.clone()
        optimizer.param_groups[0]["hooks"] = first if t < 4 else then
        optimizer.step()
    for i, (p, (start, _)) in enumerate(zip(ps, drawn)):
        chains = [[]] * 6 if i == 2 else [first] * 4 + [then] * 2
        want = looped("adamw", start, columns[i], chains)
        assert_moved_alike(start, p.detach(), want, 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_zeros_stay_finite(way: str, wanted: list[str]) -> None:
    """Of parameters, gradients and rows; and tensors without elements."""
    g = torch.randn(3, 2, dtype=DOUBLE)
    some = g * torch.tensor([[0.0], [1.0], [1.0]], dtype=DOUBLE)
    grads = [torch.zeros_like(g), some, torch.zeros_like(g), g]
    for chain in [x for x in ALONE if not isinstance(x[0], leaning)]:
        for start in (torch.zeros_like(g), some.flip(0)):
            want = looped("own", start, grads, [chain] * 4)
            for end in (
                trained("own", start, grads, chain, **WAYS[way]),
                pure("own", start, grads, chain),
            ):
                torch.testing.assert_close(end, want, rtol=1e-12, atol=1e-14)
        for shape in ((), (0,), (1, 1), (0, 2), (2, 0), (2, 0, 3)):
            p = torch.ones(shape, dtype=DOUBLE)
            assert trained("own", p, [p, 0 * p], chain, **WAYS[way]).isfinite().all()


# The others refuse it.
KEEPS = [
    name
    for name in CLASSES
    if not name.startswith(("asgd", "rprop", "prodigy", "schedule_free_"))
    and name not in ("adopt", "lamb", "stableadamw", "ranger")
]


@pytest.mark.parametrize("name", KEEPS)
def test_hyperball_keeps_the_norm(name: str) -> None:
    start, grads = problem((6, 4), steps=8)
    p = nn.Parameter(start.clone())
    optimizer = CLASSES[name]([p], lr=0.1, weight_decay=0.0, hooks=[hyperball()], **EAGER)
    for g in grads:
        p.grad = g
        optimizer.step()
    assert (p - start).norm() > 0.1 * start.norm()
    assert p.norm().item() == pytest.approx(start.norm().item(), rel=1e-12)


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


RATIOS = torch.tensor([0.9, 2.0, 0.1], dtype=DOUBLE)


def by_ratio(over: str, ratio: Any) -> Any:
    return [floor(ratio, over), radial_brake(ratio / 4, over=over)]


@pytest.mark.parametrize("over", OVERS)
def test_members_and_derivatives_of_a_number(over: str) -> None:
    start, grads = problem((2, 4, 3), steps=4)

    def end(ratio: Any) -> Tensor:
        return pure("adamw", start, grads, by_ratio(over, ratio))

    alone = torch.stack([end(x.item()) for x in RATIOS])
    assert_moved_alike(start, vmap(end)(RATIOS), alone, 1e-12)
    names = {**options_of("adamw", []), "hooks": by_ratio(over, RATIOS)}
    members = population.init(adamw, torch.stack([start] * 3), names)
    for g in grads:
        members = population.step(adamw, members, torch.stack([g] * 3))
    assert_moved_alike(start, members.params, alone, 1e-12)
    ends = [end(RATIOS[0] + h).square().sum() for h in (1e-6, -1e-6)]
    slope = grad(lambda x: end(x).square().sum())(RATIOS[0]).item()
    assert slope == pytest.approx((ends[0] - ends[1]).item() / 2e-6, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("over", OVERS)
def test_a_graph_takes_all_numbers(over: str, graphs: Any) -> None:
    torch._dynamo.reset()  # which counts graphs by the line
    start, grads = problem((2, 4, 3), steps=4)

    def end(ratio: Tensor) -> Tensor:
        return pure("adamw", start, grads, by_ratio(over, ratio))

    step = torch.compile(end, fullgraph=True, backend="aot_eager")
    for x in RATIOS:
        assert_moved_alike(start, step(x), end(x), 1e-12)
    assert graphs() == 1


@pytest.mark.parametrize("over", OVERS)
def test_a_graph_takes_a_step_with_hooks(over: str) -> None:
    torch._dynamo.reset()
    p, (g, *_) = problem((2, 4, 3), steps=1)
    chain = [*by_ratio(over, 0.9), *[relative(lambda step: 0.5 + 0.1 * step)]]
    optimizer = adamw(lr=0.1, hooks=[cautious(), *chain] if over == "tensor" else chain)
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    (ours, s), (theirs, t) = [f(p, g, optimizer.init(p)) for f in (step, optimizer.step)]
    ends = step(ours, g, s)[0], optimizer.step(theirs, g, t)[0]
    assert_moved_alike(p, *ends, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("over", ["tensor", "row"])
def test_schedules_and_tensors(over: str, way: str, wanted: list[str]) -> None:
    start, grads = problem((6, 4), steps=4)
    chain = [relative(lambda step: 0.5 + 0.2 * step, over)]
    want = looped("own", start, grads, [[relative(0.5 + 0.2 * i, over)] for i in range(4)])
    ends = [trained("own", start, grads, chain, **WAYS[way])]
    ends += [pure("own", start, grads, chain)]
    # A tensor that changes between steps.
    x, p = torch.tensor(0.5, dtype=DOUBLE), nn.Parameter(start.clone())
    how = options_of("own", [relative(x, over)]) | WAYS[way] | {"capturable": True}
    optimizer = Heavy([p], **how)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
        x += 0.2
    for end in (*ends, p.detach()):
        assert_moved_alike(start, end, want, 1e-6)  # schedules compute in float32


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
    pytest.param(reloaded, 0.9, id="state dict"),
    pytest.param(reloaded, torch.tensor(0.9), id="state dict, tensor"),
    pytest.param(reloaded, numpy.float64(0.9), id="state dict, numpy"),
]


@pytest.mark.parametrize(("copied", "x"), COPIES)
def test_copies_go_on(copied: Any, x: Any) -> None:
    p, chain = nn.Parameter(torch.randn(5, 3)), [floor(x, "matrix"), leaning(), relative(x)]
    optimizer = AdamW([p], lr=LR, hooks=chain, capturable=True, **EAGER)
    p.grad = torch.randn_like(p)
    optimizer.step()
    q, other = copied(p, optimizer)
    assert other.param_groups[0]["hooks"] == tuple(chain)
    q.grad = p.grad.clone()
    for one in (optimizer, other):
        one.step()
    assert torch.equal(p, q)
    value = adamw(lr=0.1, hooks=chain)
    assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)


def test_over_is_replaced() -> None:
    assert floor(0.2)._replace(over="row") == floor(0.2, "row") != floor(0.2)


W = nn.Parameter(torch.ones(4, 3))
LIST, RANGE = "allowed is a list of hooks", "allowed is finite"
DECAY = "weight_decay=0.1: allowed is 0 with hyperball"
MIXES = r"hook cautious\(\): .* mixes the elements of a matrix"
REFUSED = {
    "AdamW([W], hooks=None)": LIST,
    "AdamW([W], hooks=floor())": LIST,
    "AdamW([{'params': [W], 'hooks': [floor]}])": "class .*floor.*" + LIST,
    "adamw(lr=0.1, hooks='floor')": LIST,
    "adamw(lr=0.1, hooks=[floor(-0.1)])": "floor: ratio=-0.1: " + RANGE,
    "adamw(lr=0.1, hooks=[floor(math.nan)])": "floor: ratio=nan: " + RANGE,
    "adamw(lr=0.1, hooks=[floor('1')])": "floor: ratio='1': allowed are numbers",
    "adamw(lr=0.1, hooks=[relative(-0.1)])": "relative: ratio=-0.1: " + RANGE,
    "adamw(lr=0.1, hooks=[clip_rms(0.0)])": "clip_rms: limit=0.0: " + RANGE,
    "adamw(lr=0.1, hooks=[radial_brake(1.1)])": "radial_brake: outward=1.1: " + RANGE,
    "adamw(lr=0.1, hooks=[radial_brake(0, -1)])": "radial_brake: inward=-1: " + RANGE,
    "hyperball('rows')": "over='rows': allowed are 'tensor', 'matrix' and 'row'",
    "floor(over='rows')": "over='rows': allowed are 'tensor', 'matrix' and 'row'",
    "Muon([W], hooks=[cautious()])": "muon .*" + MIXES,
    "SOAP([W], hooks=[cautious()])": "soap .*" + MIXES,
    "AdamW([W], hooks=[cautious(), floor(1.0, 'row')])": MIXES,
    "Prodigy([W], hooks=[cautious()])": r"cautious\(\): its direction has sums over all",
    "Prodigy([W], hooks=[floor(over='row')])": r"floor\(.*\): its direction has sums over",
    "LAMB([W], weight_decay=0.0, hooks=[hyperball()])": "its `after` changes the move",
    "ASGD([W], hooks=[floor()])": r"hook floor\(.*\): its direction contains lr",
    "AdamW([W], weight_decay=0.1, hooks=[hyperball()])": DECAY,
    "AdamW([{'params': [W], 'hooks': [hyperball()]}], weight_decay=0.1)": DECAY,
    "AdamW([{'params': [W], 'weight_decay': 0.1}], hooks=[hyperball()])": DECAY,
    "ScheduleFreeAdamW([W], hooks=[cautious()])": "always has the gradient's sign",
    "hooks.hook(Heavy)": "Heavy is no hook: allowed is a NamedTuple of numbers",
    "hooks.hook(Heavy.State)": "State is no hook: .* one of the methods scale",
}


@pytest.mark.parametrize("call", REFUSED)
def test_refusals_say_what_is_allowed(call: str) -> None:
    with pytest.raises((TypeError, ValueError), match=REFUSED[call]):
        eval(call)


IN_CLASS = pytest.param(partial(trained, **EAGER), id="class")


@pytest.mark.parametrize("run", [pure, IN_CLASS])
def test_a_schedule_out_of_range_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match=r"relative: ratio=-0\.5"):
        run("adamw", W.detach(), [W.detach()] * 3, [relative(lambda step: 0.5 - step)])


def test_hidden_matrices_on_balls_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    ball, least = (hyperball("matrix"),), (floor(0.2),)
    for first, second, decays in ((ball, least, [0.0, 0.1]), (least, ball, [0.1, 0.0])):
        how = {"hooks": first, "adamw_hooks": second, "weight_decay": 0.1, **EAGER}
        groups = MuonAdamW(model, lr=0.1, **how).param_groups
        assert [g["hooks"] for g in groups] == [first, second, second]
        assert [g["weight_decay"] for g in groups] == [*decays, 0.0]


# What of a hook is another when it is defined again.
AGAIN = {
    "formula": "def scale(self, n, lr): return {k} * self.factor",
    "function": "def scale(self, n, lr): return K(self.factor)",
    "method": "f = lambda x: {k} * x[0]\n def scale(self, n, lr): return self.f()",
    "attribute": "k = {k}\n def scale(self, n, lr): return self.k * self.factor",
}


@pytest.mark.parametrize("what", AGAIN)
def test_a_hook_that_is_defined_again_is_another(what: str, wanted: list[str]) -> None:
    start, grads = problem((6, 4), steps=1)
    ends: list[list[Tensor]] = []
    for k, factor in ((1, 1.0), (1, 0.0), (3, 1.0)):
        space = {"NamedTuple": NamedTuple, "hook": hooks.hook, "K": lambda x, k=k: k * x}
        body = AGAIN[what].format(k=k)
        exec(f"@hook\nclass again(NamedTuple):\n factor: float = 1.0\n {body}", space)
        chain = [space["again"](factor)]
        ends.append([trained("own", start, grads, chain, **how) for how in WAYS.values()])
    for once, none, thrice in zip(*ends):
        assert_moved_alike(none, thrice, none + 3 * (once - none), 1e-12)


def test_the_kernels_of_a_step(wanted: list[str]) -> None:
    start, grads = problem((6, 4), steps=2)

    def asked(*chain: Any, **how: Any) -> int:
        known = len(wanted)
        trained("adamw", start, grads, list(chain), compile=True, **how)
        return len(wanted) - known

    assert asked() == asked(clamped()) == 1
    assert asked(*RUN) == asked(leaning()) == asked(balanced()) == 2  # a round before it
    assert asked(cautious(), *RUN) == 3
    assert asked(*PARTS) == 2  # the direction, and the move that all maps share
    assert asked(hyperball("row"), relative(over="matrix")) == 0
    for x in (0.2, lambda step: 0.1 * step, torch.tensor(0.3)):
        for chain in ([floor(x), radial_brake(x)], [leaning(x)], [relative(x, "row")]):
            assert asked(*chain, capturable=isinstance(x, Tensor)) == 0


@hooks.hook
class turned(NamedTuple):
    def scale(self, n: Any, lr: Any) -> Any:
        return math.pi * n.dd


@pytest.mark.full
def test_a_hook_that_reads_a_float_is_compiled(monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "_other_code", [])  # no later test is told
    start, grads = problem((6, 4), steps=2)
    trained("own", start, grads, [turned()], compile=True)
