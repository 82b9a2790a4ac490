"""`check_rule`: the tests that this package runs on its rules, for rules of your own."""

import copy
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from math import inf
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.checks import check_whole
from optimi_func.core.codes import widen
from optimi_func.gradient_release import prepare_for_gradient_release
from optimi_func.rules.tracing import line_of

Tensors: TypeAlias = list[Tensor]
_Row: TypeAlias = tuple[str, float, Callable[[], tuple[Any, Any]]]

_SHAPES = ((128, 64), (7, 5), (5,), (), (0,))
_DESCENT = 30  # steps
_DOUBLE = torch.float64
_DOUBLES: dict[str, Any] = {"dtype": _DOUBLE, "device": "cpu"}
# The errors that storages may have of float64, and executors of the eager one.
_STORED: dict[str, tuple[torch.dtype, dict[str, object], float, float]] = {
    "float64": (_DOUBLE, {}, 1e-12, 1e-9),
    "float32": (torch.float32, {}, 1e-4, 1e-5),
    "bfloat16": (torch.bfloat16, {}, 0.1, 0.02),
    "bfloat16 exact": (torch.bfloat16, {"storage": "exact"}, 0.1, 0.02),
    "bfloat16 compact": (torch.bfloat16, {"storage": "compact"}, 0.3, 0.02),
}


def check_rule(
    cls: type[BaseOptimizer],
    reference: Callable[..., Tensors] | None = None,
    *,
    compile: bool = True,
    steps: int = 12,
    extras: Callable[[Tensors], Mapping[str, object]] | None = None,
    allowed: Mapping[str, float] | None = None,
    lr: float = 0.02,
    hyper: Mapping[str, object] | None = None,
    **more: object,
) -> None:
    """Raise an error if two ways to run a rule disagree, and print a table of all ways.

    The eager step in float64 is compared with your reference, with other ways to run the
    step (foreach, compiled kernels, low precision, gradient release, a resumed run, vmap),
    and with finite differences. The parameters have 0 to 8192 elements with values near 1.
    Some of the gradients are zeros, and each hyperparameter is also tried with the value 0.
    With lr = 0, where warmups begin, nothing may move or become NaN. The movement of a
    parameter may not depend on its place in the list or, unless the rule adds up sums over
    all parameters, on the other parameters. Steps along the gradient of |p|^2 / 2 may not
    lead away from 0. Derivatives are also compared at
    gradients of 0, so clamp the argument of a root, both in the rule and in the reference.
    If the rule compares a float hyperparameter with the step number t, pass a value between
    two steps, such as 3.5, because the derivative does not exist at a jump. Each error in
    the table is the norm of a difference, divided by the norm of the movement of the
    parameters. The message for a row that fails names the state field or the hyperparameter
    that differs most.

    Args:
        cls: The optimizer class, whose rule is `cls.factory`. If cls is another subclass of
            torch.optim.Optimizer, only the reference, foreach, float32 and a resumed run
            are compared.
        reference: A function `(params, grads, **hyper) -> params` that takes all steps with
            plain tensors. grads contains a list of gradients for each step, and lr is one
            of the hyperparameters.
        compile: Run the compiled kernels too, which takes several seconds for each dtype.
        steps: Number of steps, at least 6.
        extras: A function that receives the gradients of a step, and returns the extra
            arguments of this step in a dict by name. Each extra is a tensor for all
            parameters, or a list with one tensor for each parameter.
        allowed: The largest allowed errors by row, such as {"float32": 0.1}, in place of
            the default limits. If the direction jumps (because of signs, votes or clips),
            raise the allowed errors of the rows for dtypes and derivatives, which even a
            correct rule may fail. If the rule hardly moves the parameters, raise `lr`,
            because float32 and compact parameters round small moves.
        lr: Learning rate.
        hyper: Other hyperparameters and options by name. Use this argument if a
            hyperparameter has the name of an argument of check_rule.
        **more: Other hyperparameters and options of the rule.

    Raises:
        AssertionError: Some ways disagree. The message has a line for each row that fails.
        TypeError: The rule has extra arguments, but `extras` is None.
        ValueError: allowed contains a name that is not a row, or the rule accepts none of
            the shapes.

    >>> from optimi_func import SGD
    >>> def loop(params, grads, lr):
    ...     for step in grads:
    ...         params = [p - lr * g for p, g in zip(params, step)]
    ...     return params
    >>> check_rule(SGD, loop, compile=False)  # doctest: +ELLIPSIS
    row                            error  allowed
    repeated                     0.0e+00    0e+00
    ...
    """
    check_whole("steps", steps, 6)
    check = _Check(cls, {"lr": lr, **(hyper or {}), **more}, steps, extras)
    if check.value is None:
        rows = [*check.other_rows(reference)]
    else:
        rows = [*check.pure_rows(reference), *check.class_rows(compile)]
    if unknown := {*(bounds := allowed or {})} - {row[0] for row in rows}:
        names = ", ".join([row[0] for row in rows])
        raise ValueError(f"allowed has {sorted(unknown)}: the rows are {names}")
    wrong: list[str] = []
    print(f"{'row':<26} {'error':>9} {'allowed':>8}")
    for row in rows:
        name, usual, _ = row
        most = bounds.get(name, usual)
        found = _found_in(row, most)
        if not found.moved:
            wrong.append(f"{name}: {found.problem}")
            break
        fits = found.error <= most
        print(f"{name:<26} {found.error:9.1e} {most:8.0e}" + "  wrong" * (not fits))
        wrong += [] if fits else [f"{name}: {found.problem}"]
    if wrong:
        print(
            "If the direction jumps (a sign, a vote, a clip), a right rule may fail rows "
            'of dtypes and derivatives: raise their bounds, as allowed={"float32": 0.1}'
        )
        raise AssertionError("\n".join([f"{cls.__name__}, {len(wrong)} rows:", *wrong]))


class _Found(NamedTuple):
    """The result of comparing the two sides of a row."""

    error: float  # inf if one of the sides raised an exception
    problem: str  # the message if the error is larger than allowed
    moved: bool = True  # False if no step moved a parameter


def _found_in(row: _Row, most: float) -> _Found:
    """Run both sides of a row, and return by how much they differ."""
    name, usual, compared = row
    try:
        with warnings.catch_warnings():
            # Of betas that bfloat16 moments hardly follow, where warnings are errors.
            warnings.simplefilter("ignore", UserWarning)
            pair = compared()
            got, want = (
                torch.cat([x.detach().flatten().double() for x in y]) for y in pair
            )
        if name == "repeated" and not want.any():
            text = "no parameter moved, so no row has what to compare"
            return _Found(inf, text, moved=False)
        error = ((got - want).norm() / want.norm()).item()
        problem = f"error {error:.1e} above {most:.0e}, largest difference "
        problem += f"{(got - want).abs().max():.2g}{_worst(*pair)}"
        if want.isnan().any():
            problem += ": what it is compared with, as the loop, is NaN. One step has "
            problem += "gradients of 0, and one parameter has no elements"
        problem += " (if the direction jumps, raise allowed=)" * (usual >= 1e-5)
    except Exception as raised:
        first_line = f"{type(raised).__name__}: {raised}".split("\n")[0]
        return _Found(inf, first_line + line_of(raised))
    return _Found(error, problem)


class _Named(Tensors):
    """Tensors that are compared, with those of fields or hyperparameters by name."""

    fields: dict[str, Tensors]


def _worst(got: object, want: object) -> str:
    """Return words for the field or hyperparameter that differs most."""
    fields: dict[str, Tensors] = getattr(got, "fields", {})
    errors: dict[str, float] = {}
    for name, theirs in getattr(want, "fields", {}).items():
        pairs = [(x.double(), y.double()) for x, y in zip(fields.get(name, ()), theirs)]
        size = max([1e-30, *[y.norm().item() for _, y in pairs]])
        norms = [(x - y).norm().nan_to_num(inf).item() for x, y in pairs]
        errors[name] = max([0.0, *norms]) / size
    name = max(errors, key=lambda x: errors[x], default="")
    return f", most in {name}" if errors.get(name) else ""


class _Check:
    """A rule, the problem that it is tried on, and its rows, which compare movements."""

    def __init__(self, cls: Any, hyper: Any, steps: int, extras: Any) -> None:
        self.cls, self.hyper, self.extras = cls, hyper, extras
        self.more: Any = extras or (lambda grads: {})
        self.value: Any = cls.factory(**hyper) if hasattr(cls, "factory") else None
        rule: Any = getattr(self.value, "rule", None)
        names = [x for x in getattr(rule, "extras", ()) if x not in rule.usual]
        if not extras and names:
            raise TypeError(
                f"the direction of {cls.__name__} takes {', '.join(names)}: give "
                "check_rule extras=, a function from a step's gradients to them by name"
            )
        refuses = getattr(rule, "refuses", None) or (lambda p: None)
        how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        reasons = [refuses(torch.empty(x, **how)) for x in _SHAPES]
        shapes = [x for x, why in zip(_SHAPES, reasons) if why is None]
        if not shapes:
            raise ValueError(f"{cls.__name__} takes no shape: {reasons[0]}")
        source = torch.Generator().manual_seed(0)

        def draw(scale: float, mean: float) -> Tensors:  # values that bfloat16 has too
            drawn = [torch.randn(x, generator=source, **how) for x in shapes]
            tensors = [x * scale + mean for x in drawn]
            return [x.bfloat16().double() for x in tensors]

        self.start = draw(0.5, 1.0)
        self.grads = [draw(1.0, 0.5 * (-1) ** i) for i in range(steps)]
        self.grads[2] = [torch.zeros_like(p) for p in self.start]
        for g in chain(*self.grads[:4]):
            g.view(-1)[:1] = 0.0  # an element without a gradient so far
        self.run = cache(self._run)

    def pure(
        self,
        start: Any = None,
        grads: Any = None,
        hyper: Any = None,
        zeros: Any = False,
        extras: Any = None,
    ) -> Tensors:
        """Return how far it moves; `zeros` are written over what a pure step was given."""
        start = self.start if start is None else start
        params, grads = start, self.grads if grads is None else grads
        if zeros:
            params, grads = copy.deepcopy((params, grads))
        value = self.cls.factory(**{**self.hyper, **(hyper or {})})
        state = value.init(params)
        for i, g in enumerate(grads):
            given = params, g, state, self.more(g) if extras is None else extras[i]
            params, state = value.step(*given[:3], **given[3])
            for x in pytree.tree_leaves(given) if zeros else ():
                x.zero_()
        return [p - q for p, q in zip(params, start)]

    def pure_rows(self, reference: object) -> Iterator[_Row]:
        """Yield the rows of the pure step."""
        copies, rule = copy.deepcopy((self.start, self.grads)), self.value.rule
        yield "repeated", 0.0, lambda: (self.pure(), self.pure(*copies))
        yield "inputs kept", 0.0, self._inputs
        yield "results apart", 0.0, lambda: (self.pure(zeros=True), self.pure())
        if reference is not None:
            yield "reference", 1e-9, lambda: (self.pure(), self._loop(reference))
        means = rule.sums, rule.measure, rule.after_means
        if (
            rule.whole is None
            and means == (None,) * 3
            and "z" not in rule.given
            and not self.value.every_hook
        ):
            yield "elementwise", 1e-12, self._halves
        with suppress(ValueError):  # which a rule may raise for lr = 0
            self.cls.factory(**{**self.hyper, "lr": 0.0})
            yield "lr of 0", 0.0, self._without_lr
        if not rule.draws and "z" not in rule.given:  # by the position in the list
            yield "permuted", 1e-9, self._permuted
            if rule.join is None and len(self.start) > 1:
                yield "list in two", 1e-9, self._divided
        yield "parabola", 1.0, self._parabola
        yield "vmap", 1e-9, self._members
        yield "derivatives", 1e-4, self._slopes
        yield "numbers of 0", 1e-9, self._zeros
        told = rule.running._fields or rule.measure  # of which a part has others
        if rule.accumulate is not None and not told:
            yield "accumulate", 1e-9, self._accumulated

    def _inputs(self) -> tuple[object, object]:
        """Return parameters, gradients and states that steps were given, and copies."""
        given: list[object] = []
        copies: list[object] = []
        params, state = self.start, self.value.init(self.start)
        for g in self.grads:
            given.append((params, g, state))
            copies.append(copy.deepcopy(given[-1]))
            params, state = self.value.step(params, g, state, **self.more(g))
        return pytree.tree_leaves(given), pytree.tree_leaves(copies)

    def _without_lr(self) -> tuple[Tensors, Tensors]:
        """Return the parameters after steps with lr = 0, and before."""
        lrs = 0.0, torch.zeros((), **_DOUBLES)
        moves = [x for lr in lrs for x in self.pure(hyper={"lr": lr})]
        return [p + d for p, d in zip(self.start * 2, moves)], self.start * 2

    def _permuted(self) -> tuple[Tensors, Tensors]:
        """Return the movements of the parameters in the opposite order, and in order."""
        places = [*reversed(range(len(self.start)))]
        return self._part(places), [self.pure()[i] for i in places]

    def _divided(self) -> tuple[Tensors, Tensors]:
        """Return the movements of two lists, each with a half of the parameters."""
        places = [*range(len(self.start))]
        return [*self._part(places[::2]), *self._part(places[1::2])], [
            self.pure()[i] for i in (*places[::2], *places[1::2])
        ]

    def _part(self, places: list[int]) -> Tensors:
        """Return the movements of a list of the parameters with these indices."""

        def some(x: Any) -> Any:
            return [x[i] for i in places] if isinstance(x, list) else x

        extras = [{name: some(x) for name, x in self.more(g).items()} for g in self.grads]
        return self.pure(some(self.start), list(map(some, self.grads)), extras=extras)

    def _parabola(self) -> tuple[Tensors, Tensors]:
        """Return two lists, which differ by parameters that have minimized |p|^2 / 2.

        The second one has the parameters before, so the error is the part of the distance
        to the minimum that is left.
        """
        value = self.cls.factory(**self.hyper)
        params, state = self.start, value.init(self.start)
        for _ in range(_DESCENT):
            grads = [-p if self.hyper.get("maximize") else p.clone() for p in params]
            params, state = value.step(params, grads, state, **self.more(grads))
        return [p + q for p, q in zip(self.start, params)], self.start

    def _loop(self, reference: Any) -> Tensors:
        result = reference(*copy.deepcopy((self.start, self.grads)), **self.hyper)
        return [p - q for p, q in zip(result, self.start)]

    def _halves(self) -> tuple[object, object]:
        def half(i: int, x: Tensor) -> Tensor:
            return x.flatten()[i::2] if x.dim() else x  # a number is in both

        extras, got, want = list(map(self.more, self.grads)), Tensors(), Tensors()
        for i in (0, 1):
            given = self.start, self.grads, extras, self.pure()
            start, grads, more, moved = pytree.tree_map(partial(half, i), given)
            got, want = got + self.pure(start, grads, extras=more), want + moved
        return got, want

    def _members(self) -> tuple[Tensors, Tensors]:
        lrs = self.hyper["lr"] * torch.tensor([1.0, 0.5], **_DOUBLES)
        many = vmap(lambda lr: self.pure(hyper={"lr": lr}))(lrs)
        each = [self.pure(hyper={"lr": lr.item()}) for lr in lrs]
        return [x[i] for i in (0, 1) for x in many], [*chain(*each)]

    def _slopes(self) -> tuple[object, object]:
        """Return derivatives by hyperparameters, parameters and gradients."""
        leaves, spec, names = self._numbers()
        at = [i for i, x in enumerate(leaves) if type(x) is float and 0 < abs(x) < inf]
        small = [i for i, p in enumerate(self.start) if 0 < p.numel() < 99]
        start, *grads = ([tree[i] for i in small] for tree in (self.start, *self.grads[:6]))

        def end(scales: Tensor) -> Tensor:
            scaled = list(leaves)
            for i, scale in zip(at, scales):
                scaled[i] = leaves[i] * scale
            turned = [[g * (1 + (scales[-1] - 1) * g.cos()) for g in x] for x in grads]
            hyper = pytree.tree_unflatten(scaled, spec)
            results = self.pure([p * scales[-2] for p in start], turned, hyper)
            return torch.stack([(p * p.cos()).sum() for p in results]).sum()

        ones, h = torch.ones(len(at) + 2, **_DOUBLES), 1e-5
        steps = h * torch.eye(len(ones), **_DOUBLES)
        got, want = _Named(grad(end)(ones).unbind()), _Named()
        want += [(end(ones + x) - end(ones - x)) / (2 * h) for x in steps]
        names = [*[names[i] for i in at], "the parameters", "the gradients"]
        got.fields, want.fields = ({k: [x] for k, x in zip(names, y)} for y in (got, want))
        return got, want

    def _numbers(self) -> tuple[list[Any], pytree.TreeSpec, list[str]]:
        """Return the hyperparameters, flat, with the structure and names."""
        numbers = {**self.value.numbers, "lr": 1.0 * self.hyper["lr"]}
        numbers["weight_decay"] = self.value.weight_decay
        paths, spec = pytree.tree_flatten_with_path(numbers)
        names = [pytree.keystr(path)[2:].replace("']", "") for path, _ in paths]
        return [x for _, x in paths], spec, names

    def _zeros(self) -> "tuple[_Named, _Named]":
        """Return steps with each hyperparameter 0, as a tensor and as a number."""
        leaves, spec, names = self._numbers()
        ones = torch.ones(1, **_DOUBLES)  # of the movement, if lr is the only number
        got, want = _Named([ones]), _Named([ones])
        got.fields, want.fields = {}, {}
        for i, name in enumerate(names):
            hypers = [
                pytree.tree_unflatten([*leaves[:i], zero, *leaves[i + 1 :]], spec)
                for zero in (torch.zeros((), **_DOUBLES), 0.0)
            ]
            try:
                pair = [self.pure(hyper=hyper) for hyper in hypers]
            except (TypeError, ValueError):
                continue  # 0 is not allowed
            for all_of, moved in zip((got, want), pair):
                all_of.fields[name] = values = [x.nan_to_num(7.0) for x in moved]
                all_of += values
        return got, want

    def _accumulated(self) -> tuple[object, object]:
        """Return the state after a further part of a gradient that is 0, and before."""
        rule, p, g = self.value.rule, self.start[0], self.grads[0][0]
        c, _ = rule.advance(1.0, self.hyper["lr"], rule.running(), self.value.numbers)
        more = (p,) if rule.reads_param else ()
        before = rule.direction(
            g, rule.init(p, _DOUBLE, self.value.init_numbers), c, *more
        ).state
        return rule.direction(0.0 * g, before, rule.accumulate(c), *more).state, before

    def _run(
        self,
        dtype: torch.dtype = _DOUBLE,
        parts: int = 0,
        resumes: bool = False,
        **how: object,
    ) -> Tensors:
        """Return how far the class moves, with `parts` by gradient release."""
        if self.value is not None:
            how = how if "foreach" in how else {"compile": False, **how}
        params = nn.ParameterList([p.to(dtype, copy=True) for p in self.start])
        release = {"gradient_release": True} if parts else {}
        optimizer: Any = self.cls(params, **self.hyper, **how, **release)
        if parts:
            options: Any = {"accumulation": "buffer", "accumulation_steps": parts}
            prepare_for_gradient_release(params, optimizer, **options)
        for i, step in enumerate(self.grads):
            if resumes and i == 4:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                optimizer = self.cls(params, **self.hyper, **how)
                optimizer.load_state_dict(torch.load(file, weights_only=True))
            for _ in range(parts or 1):
                terms = [
                    (p * g.to(dtype)).sum() / (parts or 1) for p, g in zip(params, step)
                ]
                torch.stack(terms).sum().backward()
            optimizer.step(**self.more(step))
            optimizer.zero_grad()
        moves = _Named()  # of parameters with their compensations
        for p, q in zip(params, self.start):
            comp = optimizer.state.get(p, {}).get("kahan_comp")
            moves.append(widen(p.detach(), comp, _DOUBLE)[1] - q)
        entries = [optimizer.state[p] for p in params if optimizer.state[p]]
        floats = [
            k for k, x in (entries or [{}])[0].items() if isinstance(x, Tensor) and x.dim()
        ]
        moves.fields = {k: [x[k] for x in entries if k in x] for k in floats}
        return moves

    def other_rows(self, reference: Any) -> Iterator[_Row]:
        """Yield the rows of a class that is not this package's."""
        run = self.run
        yield "repeated", 0.0, lambda: (self._run(), run())
        if reference is not None:
            yield "reference", 1e-9, lambda: (run(), self._loop(reference))
        if "foreach" in inspect.signature(self.cls).parameters:
            ways = {"foreach": True}, {"foreach": False}
            yield "foreach", 1e-9, lambda: tuple([run(**way) for way in ways])
        yield "float32", 1e-4, lambda: (run(torch.float32), run())
        yield "resumed", 0.0, lambda: (run(resumes=True), run())

    def class_rows(self, compile: bool) -> Iterator[_Row]:
        """Yield the rows of the class."""
        ways: dict[str, dict[str, object]] = {"foreach": {"foreach": True}}
        if compile:
            ways["kernels"] = {"compile": True}
        for name, (dtype, how, allowed, alike) in _STORED.items():
            eager = partial(self.run, dtype, **how)
            yield name, allowed, lambda a=eager: (a(), self.pure())
            for way, more in ways.items():
                other = partial(self.run, dtype, **how, **more)
                yield f"{name}, {way}", alike, lambda a=other, b=eager: (a(), b())
        decay = {"weight_decay": 0.1} if "weight_decay" not in self.hyper else {}
        run = partial(self.run, foreach=True, **decay)
        with suppress(ValueError):  # which a rule raises that has none
            self.cls.factory(**{**self.hyper, **decay})
            yield "decay", 1e-9, lambda: (run(), self.pure(hyper=decay))
        yield "resumed", 0.0, lambda: (self.run(resumes=True), self.run())
        if self.extras:
            return
        yield "release", 1e-9, lambda: (self.run(parts=1), self.run())
        yield "release, two parts", 1e-9, lambda: (self.run(parts=2), self.run())
