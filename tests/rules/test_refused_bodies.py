"""What the body of a rule may not say, and what is said of it instead."""

import inspect
import operator
import random
import types
from typing import Any, NamedTuple

import torch
from refusals import Scene, refuses
from torch import Tensor

from optimi_func.rules import Moment, Number, Optimizer, Shaped

CONSTANT = torch.ones(3)
B: dict[str, Any] = {"b": 0.9, "__annotations__": {"b": float}}


class One(NamedTuple):
    m: Tensor


class Taken(NamedTuple):
    step: Tensor


class Counted(NamedTuple):
    n: int


class Unset(NamedTuple):
    n: float


class Begun(NamedTuple):
    v: Tensor = CONSTANT


class Total(NamedTuple):
    total: float = 0.0


class Rate(NamedTuple):
    size: float = 0.0


def made(base: Any = Optimizer, /, **body: Any) -> Any:
    """Return a class with this body; `State` is One if its direction takes s."""
    if base is Optimizer:
        body = {"direction": lambda self, g: g, **body}
        if "s" in inspect.signature(body["direction"]).parameters:
            body = {"State": One, **body}
    return type("Refused", (base,), body)


def use(cls: Any, p: Tensor = CONSTANT) -> Any:
    """Step by the value of a rule."""
    value = cls.pure(lr=0.1)
    return value.step(p, p.clone(), value.init(p))


def summing(**body: Any) -> Any:
    usual = {
        "Running": Total,
        "direction": lambda self, g, r: (g, r),
        "sums": lambda self, g: g * g,
        "join": lambda self, r, sums: Total(r.total + sums),
        "__annotations__": {"size": float},
        "size": 0.5,
    }
    body = {k: x for k, x in (usual | body).items() if x is not None}
    return type("Refused", (Optimizer,), body)


class Shifted(Optimizer):
    factor: float = 1.0

    def measure(self, mean: Any, numel: Tensor, g: Tensor):
        return {"total": self.factor * mean(g) * numel}

    def direction(self, g: Tensor, total: Tensor):
        return 0.0 * g + total


class Kept(Shifted):
    class State(NamedTuple):
        total: Number

    def init(self, p: Tensor):
        return self.State(torch.ones(()) * self.factor)

    def measure(self, mean: Any, numel: Tensor, g: Tensor, s: State):
        return {"total": s.total + mean(g) * numel}


class Mapped(Optimizer):
    class State(NamedTuple):
        m: Moment
        v: Shaped

    def init(self, p: Tensor) -> Any:
        return self.State(None, (p.shape[0],))  # type: ignore

    def direction(self, g: Tensor, s: State):
        return g, s._replace(m=g)

    def whole(self, d: Tensor, s: State) -> Any:
        return d, s


def in_place(self: Any, g: Tensor) -> Tensor:
    g[0] = 1.0
    return g


def writes(self: Any, g: Tensor) -> Tensor:
    self.kept = g
    return g


def writes_a_field(self: Any, g: Tensor) -> Tensor:
    self.b = 0.5
    return self.b * g


def writes_to_x(self: Any, d: Tensor, s: Any, x: Tensor) -> Any:
    x[0] = 0.0
    return d, s


DIRECTIONS = {
    "g: g if g > 0 else -g": "decides by the value",
    "g: g if self.b > 0 else -g": "decides by the value",
    "g: g * max(self.b, 0.1)": "decides by the value",
    "g, t: g * (t if t > 3 else 1.0)": "decides by the value",
    "g: g * math.sqrt(self.b)": r"x \*\* 0\.5 for math",
    "g: g * CONSTANT": "uses a tensor that is neither",
    "g: g * torch.tensor(2.0)": "uses a tensor that is neither",
    "g: g / g.numel()": "numel returns no tensor",
    "g: g / g.shape[0]": r"reads \.shape",
    "g: g / g.norm()": "norm has another shape",
    "g: g * g.any()": "any.* has another shape",
    "g: g.cumsum(-1)": "d depends on the others",
    "g: g.softmax(-1)": "d depends on the others",
    "g: g.roll(1)": "d depends on the others",
    "g: g.t()": r"cannot be traced: t\(\) expects a tensor with <= 2",
    "g: g.transpose(0, -1)": "transpose has an.* shape",
    "g: g.flatten()": "flatten has another shape",
    "g: g.reshape(-1)": "reshape has another shape",
    "g: g.squeeze()": "squeeze has another shape",
    "g: 1 * g.mT": r"reads \.mT of a tensor",
    "g: operator.imul(1 * g, 2)": (
        r"writes in place: use mul for mul_ \(x = x \+ y for x \+= y\)"
    ),
    "g: g.exp_()": "writes in place: use exp for exp_$",
    "g: torch.add(g, g, out=g)": "writes in place",
    "g: g * torch.rand_like(g)": "draws random numbers in d",
    "g: g * random.random()": "random numbers",
    "g, s: g": r"returned \(Tensor\): allowed is \(d, self",
    "g, s: 1.0": r"returned \(float\)",
    "g, s: (g, s, 1)": r"\(Tensor, One, int\)",
    "g, s: (g, One(g.sum()))": "sum.* has another shape",
    "g, s: (g.float(), s)": r"returns d as torch\.float32",
    "g, s: (g * self.c, s)": "has no attribute 'c'",
    "g, s, *rest: (g, s)": "takes g, s, rest",
    "p, g, s: (g, s)": "direction takes p, g, s: g and s are its first",
    "g, t: g * min(t / 9, 1.0)": r"^(?!.*use normalize).*x\.clamp_max\(1\.0\) for min",
    "g: torch.nn.functional.normalize(g)": "^(?!.*use normalize).*is not elementwise",
    "g, z: g + z": "takes z: add a field, seed: int = 0",
    "g, lr: g * lr": r"direction takes g, lr: .*self\.lr for",
    "g, b: g * b": r"direction takes g, b: .*self\.b for",
    "g, weight=None: weight * g": r"takes weight=None: allowed .*\. Without a default",
}
BODIES = {
    "direction=in_place": "writes in place: use torch.where for __setitem__",
    "State=One": "it has to take g, s",
    "direction=writes": "writes to self",
    "direction=writes_a_field, **B": "writes to self",
    "after=lambda self, x, u, foo: u": "after takes x, u, foo",
    "direction=lambda self, g, s: (g, s), State=Taken": "State has a field 'step'",
    "direction=lambda self, g, s: (g, s), State=Counted": (
        r"State\.n is annotated int: allowed are Tensor, .*go to Running"
    ),
    "direction=lambda self, g, s: (g, s), State=Begun": r"State\.v = tensor.*: write init",
    "direction=lambda self, g, r: (g, r), Running=Unset": (
        r"Running\.n has no default: write its first value"
    ),
    "direction=lambda self, g, s: (g, s), State=object": (
        "State is <class 'object'>: allowed are NamedTuples"
    ),
    "after=lambda self, mean, u: mean(u - mean(u)) * u": "mean_0 is not known",
    "betas=[0.9, 0.99], __annotations__={'betas': list[float]}": (
        r"betas = \[0\.9, 0\.99\] may change: write a tuple"
    ),
    "Shifted, whole=lambda self, d: d": "has measure and whole: allowed is one of both",
    "Shifted, measure=lambda self, g: {'total': g}": r"measure\(g\) returned",
    "Shifted, measure=lambda self, mean, g, t: {'total': mean(t) + mean(g)}": (
        r"measure .*: mean\(t\): allowed are tensors in the shape of the parameter"
    ),
    "Shifted, measure=lambda self, top, g: {'total': top(2.0)}": (
        r"measure .*: top\(2\.0\): allowed are tensors"
    ),
    "Shifted, measure=lambda self, mean, g: {'total': mean(g) * g}": (
        r"g is not known in this method \(all means of a method are"
    ),
    "Shifted, measure=lambda self, mean, g: {'total': mean(g - mean(g))}": (
        "all means of a method are"
    ),
    "Shifted, measure=lambda self, mean, g: {'total': (mean(g), self.factor)[1]}": (
        "returned .*allowed is a dict of numbers that are computed of means"
    ),
    "Shifted, measure=lambda self, mean, g: mean(g)": "allowed is a dict of num",
    "Shifted, measure=lambda self, mean, g: {'t': mean(g)}, direction=lambda self, "
    "g, t: g": ("measure returned 't', which is an argument of methods or an option"),
    "Shifted, measure=lambda self, mean, g: {'total': mean(g.flip(0))}": (
        "measure is not elementwise"
    ),
    "Kept, measure=lambda self, mean, g: {'other': mean(g)}, direction=lambda self, g: g": (
        r"returned \['other'\]: State has the Number 'total', so it is one of them"
    ),
    "Kept, direction=lambda self, g, s, total: (g, self.State(2 * s.total))": (
        r"direction returned other values of \('total',\), which only measure sets"
    ),
    "Kept, measure=lambda self, mean, g, weight: {'total': weight + mean(g)}, "
    "direction=lambda self, g, s, weight: (g, s)": (
        "keeps a number of the extra weight: allowed are means and maxima of it"
    ),
    "Kept, measure=lambda self, s, loss: {'total': s.total + loss}, "
    "direction=lambda self, g, s, loss: (g, s)": (
        r"allowed is a dict of numbers that are computed of means, as mean\(loss\)"
    ),
    "Kept, measure=lambda self, mean, g, s: {'total': mean(g * s.total)}": (
        "s_total is not known in this method"
    ),
    "divisor=lambda self, mean, g: mean(g * g)": "divisor was removed: return a scaled u",
    "means=lambda self, mean, g: mean(g * g)": "divisor was removed: return a scaled u",
    "after=lambda self, x, u, lr: u": r"after takes x, u, lr: .* and self\.lr for lr",
    "after=lambda self, x, u, mask: u": "after takes x, u, mask: allowed are x, u, s, t",
    "whole=lambda self, d, normal: d": "takes normal: add a field, seed: int = 0",
    "State=NamedTuple('S', [('left', Shaped), ('m', Moment)]), "
    "direction=lambda self, g, s: (g, s), whole=lambda self, d, s: (d, s)": (
        "fields that are Shaped come last"
    ),
    "State=NamedTuple('S', [('left', Shaped)])": "are for a class with `whole`",
}
OPTIONS = "storage maximize step decay numbers params t x g s self pure factory State"
BODIES |= {
    f"{name}=1.0, __annotations__={{{name!r}: float}}": f"{name} is an option or a method"
    for name in f"{OPTIONS} Running bare keywords rule_of rule_for".split()
} | {
    f"{name}=lambda self: None": f"{name} is an option or a method"
    for name in ("update", "bare", "rule_for", "factory", "pure")
}
for _name in ("m", "step", "kahan_comp", "train_param", "mean_q", "mean_scale"):
    # Names in an entry stand for one thing.
    BODIES[f"direction=lambda self, g, s, r: (g, s, r), Running=running({_name!r})"] = (
        f"Running has a field '{_name}': choose another"
    )
    if _name != "m":
        _state = f"State=NamedTuple('State', [({_name!r}, Tensor)])"
        BODIES[f"direction=lambda self, g, s: (g, s), {_state}"] = (
            f"State has a field '{_name}': choose another"
        )
SUMS = {
    "join=None": "has no join: `sums` go with",
    "sums=None": "has no sums: `sums` go with",
    "Running=None, direction=lambda self, g: g": "has no Running: `sums` go with",
    "after=lambda self, mean, u: mean(u * u) * u": "has means in `after`: `sums` go",
    "sums=lambda self, g: 2.0": r"sums returned 2\.0: allowed are tensors",
    "sums=lambda self, g: self.size": "sums returned .*allowed are tens",
    "sums=lambda self, g: g.flip(0)": "sums is not elementwise",
    "join=lambda self, r, sums: sums": (
        r"join returned .*allowed is self\.Running\(\.\.\.\) of scalars"
    ),
    "join=lambda self, r, sums, t: r": "join takes r, sums, t: allowed are",
    "Running=Rate, direction=lambda self, g, r: (g, r), join=lambda self, r, "
    "sums: Rate(sums)": ("Running has a field 'size', which is an option"),
}
COEFFS = {
    "t: 1.0": r"returned 1\.0: allowed are a NamedTuple and a dict",
    "t: (1.0, t)": r"returned \(1\.0, 3\.0\): allowed are",
    "t: {'a': 'x'}": "returned {'a': 'x'}: allowed are",
    "t: {'a': CONSTANT}": "returned .* and 0-d tensors",
    "t: {'a': self.lr}": "raises AttributeError.*arguments are t, r, lr",
    "x: {'a': x}": "takes x: allowed are t, r, lr, weight_decay",
    "t: {'a' if t == 3 else 'b': 1.0}": "returned .* the same names at each step",
    "t: {'a': 1 / (t - 3 and t - 7)}": "raises ZeroDivisionError",
}
ONLY = "s has None for Shaped fields, which only whole has"
FULL = r"Refused\.init: .*torch.zeros_like\(p\) \+ self.x for full_like"
TAKES = r"takes \['momentun'\] \(extras are its arguments but g, s, t, x, z, r and c\)"
TYPE_ERRORS = {
    **{f"made(direction=lambda self, {k}, **B)": x for k, x in DIRECTIONS.items()},
    **{f"made({k})": x for k, x in BODIES.items()},
    **{f"summing({k})": x for k, x in SUMS.items()},
    **{
        f"use(made(coeffs=lambda self, {k}, direction=lambda self, g, c: g * c['a']))": (
            rf"Refused\.coeffs {x}"
        )
        for k, x in COEFFS.items()
    },
    "Base.pure(lr=0.1)": r"Base has no direction\(self, g, s\)",
    "Base([CONSTANT], lr=0.1)": r"Base has no direction\(self, g, s\)",
    "types.new_class('A', (Optimizer,), {'decay': 'coupled'})": (
        r"decay='coupled'\): allowed are .*'own'\)"
    ),
    "types.new_class('A', (Optimizer,), {'lr': 'outside'})": (
        r"lr='outside'\): allowed are \('factor', 'ins"
    ),
    # Errors at the first use.
    "use(made(direction=lambda self, g, s: (g, s), init=lambda self, p: One(p.sum())))": (
        r"Refused\.init returned"
    ),
    "use(made(direction=lambda self, g, s: (g, s), init=lambda self, p: self.State()))": (
        r"Refused\.init: .* missing .*'m' \(None is for"
    ),
    "full.pure(lr=1.0, b=w.sum()).init(CONSTANT)": FULL,
    "population.init(full.pure, CONSTANT, {'lr': two, 'b': two}, n=2)": FULL,
    "use(made(direction=lambda self, g, s: (g, s), init=integers))": (
        r"allowed is self\.State of floating t"
    ),
    "Kept([CONSTANT.cfloat()], lr=0.1)": (r"params\[0\] .* Kept keeps a Number of tensors"),
    "use(made(direction=lambda self, g, momentun: g * momentun))": TAKES,
    "optimizer.step()": TAKES,
    "use(made(Mapped, direction=lambda self, g, s: (0.9 * s.v + g, s)), matrix)": ONLY,
    "use(made(Mapped, after=lambda self, u, s: (u / torch.sqrt(s.v), s)), matrix)": ONLY,
}


@refuses({call: f"TypeError: {text}" for call, text in TYPE_ERRORS.items()})
def test_types() -> Scene:
    def running(name: str) -> Any:
        kind = NamedTuple("Running", [(name, float)])
        kind.__new__.__defaults__ = (1.0,)
        kind._field_defaults[name] = 1.0
        return kind

    class Base(Optimizer):
        scale: float = 2.0

    full = made(
        direction=lambda self, g, s: (g, s),
        init=lambda self, p: self.State(torch.full_like(p, 2 * self.b)),
        **B,
    )
    two, matrix, w = torch.ones(2), torch.ones(2, 3), torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = made(direction=lambda self, g, momentun: g * momentun)([w], lr=0.1)
    return locals() | {"operator": operator, "random": random, "types": types}


def integers(self: Any, p: Tensor) -> Any:
    return self.State(torch.zeros_like(p, dtype=torch.int64))


LACKS = "it takes lr and weight_decay by name, and of s it has the Shaped fields"
WHOLE = "it writes to d, x or s"
# Found by trying the shape of a parameter, so the errors are of the parameter.
SHAPES = {
    "whole=lambda self, d, s: (self.lr * d, s)": LACKS,
    "whole=lambda self, d, s: (d * s.m, s)": LACKS,
    "whole=lambda self, d, s: (d, s._replace(v=s.v.add_(1.0)))": WHOLE,
    "whole=lambda self, d, s: (d.mul_(2.0), s)": WHOLE,
    "whole=writes_to_x": WHOLE,
    "whole=lambda self, d, s: (d, s._replace(v=s.v[:1]))": "returned v=.* the shape",
    "whole=lambda self, d, s: d": r"allowed is \(d, self.State\(...\)\)",
    "whole=lambda self, d, s: (d @ d, s)": "same reduction dim",
    "whole=lambda self, d, s: (d.sum(), s)": r"whole returned .* shape \(2, 3\)",
    "init=lambda self, p: self.State(None, (2, -1))": "in Shaped fields of any, and shapes",
    "init=lambda self, p: self.State(None, p.long())": (
        r"allowed is self\.State of floating t"
    ),
    "refuses=lambda self, p: 'only vectors'": "only vectors",
}
CALLS = {
    f"{call.format(f'made(Mapped, {body})')}": text
    for call in ("{}.pure(lr=0.1).init(matrix)", "{}([matrix], lr=0.1)")
    for body, text in SHAPES.items()
}


@refuses(CALLS)
def test_shapes() -> Scene:
    return {"matrix": torch.ones(2, 3, requires_grad=True)}
