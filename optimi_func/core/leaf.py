"""The update of one tensor in five stages: decode, rule, delta, add, encode.

Pure: nothing passed in is written. Every executor calls `leaf_step`, so that executors
differ in where they compute and write, but not in the formula.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from optimi_func.core.codes import narrow, remainder_dtype, round_to, to, widen
from optimi_func.core.distributed import distribute_like, on_whole, whole
from optimi_func.core.hooks import Keyed, Norms, scaled_by
from optimi_func.core.math import plus, scalar_dtype, times
from optimi_func.core.pairs import as_complex, as_real, stored
from optimi_func.core.rule import (
    WHOLE_BATCH,
    DecayKind,
    Leaf,
    Microbatch,
    Numbers,
    Rates,
    Rule,
    Scalar,
    Scalars,
)
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import BITS, Storage, decode, encode


class Facts(NamedTuple):
    """A step asks for numbers of the whole tensor that need no computation.

    The answer is the number of elements, then the fields that `Rule.measure` keeps.
    """

    x: Tensor  # the parameter, which may be a shard
    fields: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """Return the name of this request, under which kernels find its answer."""
        return FACTS


class Round(NamedTuple):
    """A step asks for the mean of each tensor over the whole parameter.

    Of the last tensors, as many as `tops` says, it asks for the maximum. A step asks for
    means before its direction ("measure"), for hooks ("hook 0", or "hook 0.0"), for
    sums over all parameters ("sums"), and for the finished delta ("after").
    """

    name: str
    tensors: list[Tensor]
    tops: int = 0


class Size(NamedTuple):
    """The count of numbers that answer a request, of which the last `tops` are maxima."""

    number: int
    tops: int


FACTS = "facts"
Ask: TypeAlias = Facts | Round
# Returns as many 0-d tensors as a request asks for.
Answer: TypeAlias = Callable[[Any], list[Tensor]]
# The numbers that are known, by the name of the request that they answer.
Known: TypeAlias = Mapping[str, Sequence[Tensor]]


def whole_answer(request: Ask) -> list[Tensor]:
    """Answer a request of a step whose tensors are no shards."""
    if isinstance(request, Round):
        return whole_means(request.tensors, request.tops)
    x = request.x
    numel = torch.full((), x.numel(), dtype=x.dtype, device=x.device)
    return [numel, *map(whole, request.fields)]


def noting_sums(sums: list[Tensor]) -> Answer:
    """Return `whole_answer`, which also puts the means for `Rule.sums` into a list."""

    def answer(request: Ask) -> list[Tensor]:
        found = whole_answer(request)
        if request.name == "sums":
            sums[:] = found
        return found

    return answer


def whole_means(tensors: list[Tensor], tops: int = 0) -> list[Tensor]:
    """Return the mean of each tensor, and of the last ones the maximum, of no shard."""
    # The mean of no elements is NaN, which derivatives would multiply by 0.
    end = len(tensors) - tops
    return [
        x.sum() if not x.numel() else x.mean() if i < end else x.amax()
        for i, x in enumerate(tensors)
    ]


def answering(known: Known, otherwise: Answer = whole_answer) -> Answer:
    """Return an `Answer` of known numbers, which calls another for what is not known."""

    def answer(request: Ask) -> list[Tensor]:
        if request.name not in known:
            return otherwise(request)
        return _in_its_dtype(request, known)

    return answer


def _in_its_dtype(request: Ask, known: Known) -> list[Tensor]:
    dtype = request.tensors[0].dtype if isinstance(request, Round) else request.x.dtype
    return [x.to(dtype) for x in known[request.name]]


def requests(rule: Rule, scalars: Scalars, write: bool) -> dict[str, Size]:
    """Return what a step asks for, in order, learned from one step of a tiny example.

    Only the structure of the scalars matters. The rule has no map of whole tensors.
    """
    asks = (rule.measure, rule.sums, rule.after_means) != (None, None, None)
    if not (asks or scalars.rates.hooks):
        return {}
    leaves, spec = pytree.tree_flatten(scalars)
    key = spec, tuple([x if isinstance(x, bool | str) else None for x in leaves]), write
    found = runtime.requests.setdefault(rule, {})
    if key not in found:
        found[key] = _learned(rule, pytree.tree_map_only(Tensor, _half, scalars), write)
    return found[key]


def rounds_in(asked: Mapping[str, Size]) -> dict[str, Size]:
    """Return what of the requests of a step has to be measured."""
    return {name: size for name, size in asked.items() if name != FACTS}


def _half(x: Tensor) -> Tensor:
    return torch.full((), 0.5, dtype=torch.float32, device="cpu")


def _learned(rule: Rule, scalars: Scalars, write: bool) -> dict[str, Size]:
    found: dict[str, Size] = {}

    def answer(request: Ask) -> list[Tensor]:
        answers = whole_answer(request)
        found[request.name] = Size(len(answers), getattr(request, "tops", 0))
        return answers

    with _disable_current_modes(), torch.no_grad():
        x = torch.ones(2, dtype=torch.float32, device="cpu")
        kept = [torch.ones_like(x).sum() for _ in rule.whole_fields]
        state = rule.state(*[x.clone() for _ in rule.fields], *kept)
        leaf = Leaf(x.clone(), state, None)
        _, now = with_given(leaf, scalars, dict.fromkeys(rule.given, x))
        leaf_step(rule, leaf, x, now, write, answer)
    return found


def with_given(
    leaf: Leaf, scalars: Scalars, given: Mapping[str, Tensor]
) -> tuple[Leaf, Scalars]:
    """Return a leaf and scalars with the tensors that a step is given besides, by name.

    A name is one of `Rule.given`, or BITS for random bits to round the parameter by.
    """
    if not given:
        return leaf, scalars
    tensors = {**given}
    if BITS in tensors:
        leaf = leaf._replace(comp=tensors.pop(BITS))
    return leaf, scalars._replace(coeffs=scalars.coeffs._replace(**tensors))


def leaf_sums(rule: Rule, leaf: Leaf, coeffs: Any, means: list[Tensor] | None) -> Tensor:
    """Return the sums that a rule joins; without means gradient and extras count as 0."""
    leaf = _real(leaf)
    p, wide = leaf.p, leaf_dtype(leaf, leaf.p)
    if means is not None:
        averages = torch.stack([whole(x) for x in means])
        return averages.to(scalar_dtype(p.device)) * p.numel()
    zeros = torch.zeros((), dtype=wide, device=p.device).expand(p.shape)
    state = type(leaf.state)(*[decode(s, wide) for s in leaf.state])
    assert rule.sums is not None
    coeffs = coeffs._replace(**dict.fromkeys(rule.extras, zeros)) if rule.extras else coeffs
    measured = rule.sums.measure(zeros, to(p, wide), state, coeffs)
    return torch.stack([whole(x.sum()) for x in measured]).to(scalar_dtype(p.device))


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 if a dtype is that wide, else float32."""
    wide = torch.float64 in dtypes or torch.complex128 in dtypes
    return torch.float64 if wide else torch.float32


def held_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that holds results of the arithmetic: complex if any dtype is."""
    return reduce(torch.promote_types, dtypes, compute_dtype(*dtypes))


def leaf_dtype(leaf: Leaf, g: Tensor) -> torch.dtype:
    """Return the dtype of one leaf's arithmetic."""
    # Codes are no float64.
    fields = [x.dtype for x in leaf.state if isinstance(x, Tensor)]
    return compute_dtype(leaf.p.dtype, g.dtype, *fields)


def leaf_step(
    rule: Rule,
    leaf: Leaf,
    g: Tensor,
    scalars: Scalars,
    write: bool,
    answer: Answer = whole_answer,
    wide: torch.dtype | None = None,
) -> Leaf:
    """Return one parameter after one step: see `step_requests`.

    `answer` gives the numbers of the whole parameter that the step asks for. By default the
    leaf is the whole parameter.
    """
    if leaf.p.dtype.is_complex:
        real, rest = _real(leaf), (scalars, write, answer, wide)
        pairs = leaf_step(rule, real, as_real(g.resolve_conj()), *rest)
        return pytree.tree_map(_as_before, pairs, real, leaf)
    steps = step_requests(rule, leaf, g, scalars, write, wide)
    found = next(steps)
    while not isinstance(found, Leaf):
        found = steps.send(answer(found))
    return found


def leaf_round(
    rule: Rule, leaf: Leaf, g: Tensor, scalars: Scalars, known: Known, write: bool = True
) -> Round:
    """Return the first request of a step whose answer is not known.

    The rest of the step is not run.
    """
    steps = step_requests(rule, leaf, g, scalars, write)
    found = next(steps)
    while found.name in known:
        found = steps.send(_in_its_dtype(found, known))
    return found


def step_requests(
    rule: Rule,
    leaf: Leaf,
    g: Tensor,
    scalars: Scalars,
    write: bool,
    wide: torch.dtype | None = None,
) -> Generator[Any, list[Tensor], None]:
    """Yield what one parameter's step asks for, and at last the parameter after it.

    The step is a generator because only its caller knows whether a tensor is the whole
    parameter, a shard of it, or one of many in a list. Wherever the step needs a mean over
    the whole parameter, it yields an `Ask`, and its caller sends the numbers.

    x is the parameter with its compensation, p + comp. State and x are decoded from their
    storage first, and encoded again at the end:

        g <- grad_scale * g + l2 * x
        coeffs, kept <- measure.settle(mean(measure(g, x, state)))
        d, state <- direction(g, state)
        d, fields <- whole(d, x, fields)
        d <- hook(d, g, x)                                              for each hook
        u <- -(lr * d + decay * x)
        u, state <- after(x, u, state, mean(after_means(x, u, state)))
        p <- round(p + (comp + u)),   comp <- what that rounding lost

    Decay is part of the delta, because a bfloat16 parameter times 1 - 1e-5 is itself, while
    its compensation keeps the 1e-5. Cautious decay (arXiv:2510.12402) leaves out decay * x,
    and a proximal kind's division, for elements of d and x that differ in sign. The map
    `whole` applies the first hooks itself if their norms are those of matrices or rows.

    Args:
        rule: The mathematics.
        leaf: The parameter with its state. It is not complex.
        g: The gradient, in the shape of the parameter.
        scalars: The numbers of the step.
        write: False moves only the state (accumulating), and yields the old parameter.
        wide: The leaf's dtype of arithmetic, if it is known.
    """
    # The last item is yielded and not returned, because Dynamo cannot compute with what a
    # generator returns.
    p, state, comp = leaf
    wide = leaf_dtype(leaf, g) if wide is None else wide
    c, r, dither = scalars
    p32, x, wide_comp = widen(p, comp, wide)
    old: list[Any] = [s if s is None else decode(s, wide) for s in state]
    g = plus(times(r.grad_scale, to(g, wide)), r.l2, x)
    more = (x,) if rule.reads_param else ()
    count = len(old) - len(rule.whole_fields)
    mapped = tuple(old[count:])
    partial_state = type(state)(*old[:count], *[None] * len(mapped))
    hooks = r.hooks[rule.mapped_hooks :] if write else ()
    facts: list[Any] = [None]
    if rule.measure is not None or any([hook.sized for _, hook in hooks]):
        facts = yield Facts(x, mapped if rule.measure is not None else ())
    if rule.measure is not None:
        measured = rule.measure.measure(g, x, partial_state, c)
        means = yield Round("measure", measured, rule.measure.tops)
        c, kept = rule.measure.settle([*facts, *means], c)
        if write and mapped and mapped[0] is not None:
            mapped = tuple(map(distribute_like, state[count:], map(whole, kept)))
    d, new = rule.direction(g, partial_state, c, *more)
    if write:
        if rule.whole is not None:
            read: list[Tensor] = []
            for name in rule.whole.reads:
                i = -1 if name == "x" else rule.fields.index(name)
                read.append(x if i < 0 else _stored(new[i], old[i], state[i], dither))
            given = d, tuple(read), mapped, c, r
            d, new_fields = on_whole(rule.whole.map, *given, by_matrix=rule.whole.by_matrix)
            # Results share no memory with arguments.
            mapped = tuple([y.clone() if y is x else y for x, y in zip(mapped, new_fields)])
        norms = None  # those of d, as long as all hooks since have only scaled it
        for i, (_, hook) in enumerate(hooks):
            if hook.scales:
                if norms is None:
                    means = yield Round(f"hook {i}", [x * x, x * d, d * d])
                    norms = Norms(*means, numel=facts[0])
                d, norms = scaled_by(hook, d, x, norms, r.lr)
                continue
            norms, update, k = None, hook.update(d, g, x), 0
            found = next(update)
            while isinstance(found, list):
                means = yield Round(f"hook {i}.{k}", found)
                found = update.send([*means, *facts[:1] * hook.sized])
                k += 1
            d = found
        if rule.sums is not None:
            # For `Rule.join`, which the caller of the step calls.
            yield Round("sums", rule.sums.measure(g, x, new, c))
        u = _delta(x, d, r)
        if rule.after is not None:
            means = []
            if (told := rule.after_means) is not None:
                means = yield Round("after", told.measure(x, u, new, c), told.tops)
            u, new = rule.after(x, u, new, c, *means)
        p, comp = _add(p, p32, x, comp, wide_comp, u)
    own = new[: len(state) - len(mapped)]
    results = _apart([*own, *mapped], old, x, r.lr)
    # Fields that the rule returned unchanged are not encoded again.
    rows = zip(results, old, state)
    fields = [s if n is o else encode(n, s, dither) for n, o, s in rows]
    yield Leaf(p, type(state)(*fields), comp)


def _as_before(new: Any, pairs: object, old: Any) -> object:
    """Return a result of real pairs as its complex tensor was."""
    return old if new is pairs else as_complex(new, old)


def _real(leaf: Leaf) -> Leaf:
    """Return a leaf with complex tensors as real pairs."""
    return pytree.tree_map(as_real, leaf) if leaf.p.dtype.is_complex else leaf


def _stored(new: Tensor, old: Tensor, before: Any, dither: Scalar) -> Tensor:
    """Return a field as it is after storage, where executors find it for a map."""
    return old if new is old else decode(encode(new, before, dither), new.dtype)


def _apart(fields: list[Tensor], old: list[Tensor], x: Tensor, lr: Scalar) -> list[Tensor]:
    """Copy fields that are another tensor of the step, which may be written before them."""
    tensors = [x, *old]
    for i, (new, before) in enumerate(zip(fields, old)):
        if new is before:
            continue
        if not any([new is y for y in tensors]):
            tensors.append(new)
        elif isinstance(lr, Tensor) and torch.compiler.is_compiling():
            # Inductor leaves out clones, and reads what is written. Reading lr, as the
            # move does, keeps this in the one loop that list kernels are made of.
            fields[i] = torch.where(lr == lr, new, lr)
        else:
            fields[i] = new.clone()
    return fields


def leaf_eval_point(rule: Rule, leaf: Leaf, coeffs: object) -> Tensor:
    """Return the parameter to evaluate with, in the dtype of the arithmetic.

    `coeffs` are those of the next step; the rule has an `eval_point`.
    """
    p, state, comp = _real(leaf)
    wide = leaf_dtype(leaf, p)
    _, x, _ = widen(p, comp, wide)
    assert rule.eval_point is not None
    point = rule.eval_point(x, type(state)(*[decode(s, wide) for s in state]), coeffs)
    return as_complex(point, leaf.p)


def _delta(x: Tensor, d: Tensor, r: Rates) -> Tensor:
    """Return the delta of a direction, with decay."""
    lr, decaying = r.lr, x
    for undecayed_lr in r.undecayed_lr:
        # 0 if the signs differ, else 1.
        decays = (d.sign() * x.sign()).clamp_max(0.0) + 1.0
        lr = undecayed_lr + decays * (lr - undecayed_lr)
        decaying = decays * x
    return -plus(lr * d, r.decay, decaying)


def _add(
    p: Tensor,
    p32: Tensor,
    x: Tensor,
    comp: Tensor | None,
    own: Tensor | None,
    u: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return p + u in p's dtype, and the compensation if there is one (Kahan 1965).

    `own` is the compensation in the dtype of u, unless it is in codes.
    """
    if comp is None:
        return to(p32 + u, p.dtype), None
    if own is None:
        new, rest = narrow(x + u, p, comp)
        return new, None if comp.dtype == torch.int32 else rest
    u = u + own
    new = round_to(p32 + u, p.dtype)
    return to(new, p.dtype), to(u - (new - p32), comp.dtype)


def init_leaf(rule: Rule, numbers: Numbers, p: Tensor, storage: Storage) -> Leaf:
    """Return a leaf with fresh state. See `Rule.init` for the numbers."""
    dtype = remainder_dtype(p, storage.param)
    comp = None if dtype is None else torch.zeros_like(p, dtype=dtype)
    x = as_real(p)
    state = rule.init(x, storage.moments or x.dtype, numbers)
    return Leaf(p, stored(p, state), comp)


def microbatch_scalars(
    rule: Rule, scalars: Scalars, microbatch: Microbatch, write: bool
) -> Scalars:
    """Return a step's scalars for a gradient that is a part of it, or scaled.

    If the parameter does not move now (`write`), the gradient has no l2 part, because decay
    belongs to the move. The rule has `accumulate` if `microbatch.accumulate`.
    """
    coeffs, r, _ = scalars
    if microbatch.accumulate:
        assert rule.accumulate is not None
        coeffs = rule.accumulate(coeffs)
    if microbatch.grad_scale is not WHOLE_BATCH.grad_scale:
        r = r._replace(grad_scale=microbatch.grad_scale * r.grad_scale)
    return Scalars(coeffs, r if write else r._replace(l2=0.0), scalars.dither)


def rates(
    lr: Scalar,
    weight_decay: Scalar,
    kind: DecayKind,
    max_lr: Scalar | None,
    maximize: bool,
    cautious_decay: bool,
    hooks: tuple[Keyed, ...] = (),
) -> Rates:
    """Return the rates for a kind of decay.

    | kind        | the parameter loses, per step                          |
    |-------------|--------------------------------------------------------|
    | l2          | nothing by itself: weight_decay * p joins the gradient |
    | own         | nothing: the rule reads weight_decay                   |
    | decoupled   | lr * weight_decay * p                                  |
    | fully       | lr / max_lr * weight_decay * p                         |
    | corrected   | lr^2 / max_lr * weight_decay * p (arXiv:2506.02285)    |
    | proximal    | like the three above, but implicitly, after the move:  |
    |             | p <- (p - lr * d) / (1 + share)                        |

    Only the fully and corrected kinds use max_lr, the largest scheduled lr; with l2,
    cautious_decay has no effect.
    """
    grad_scale = -1.0 if maximize else 1.0
    if kind in ("l2", "own"):
        l2 = weight_decay if kind == "l2" else 0.0
        return Rates(lr, 0.0, l2, grad_scale, (), hooks)
    scheduled = lr
    if kind.startswith("fully") and max_lr is not None:
        scheduled = lr / max_lr
    elif kind.startswith("corrected") and max_lr is not None:
        scheduled = lr * (lr / max_lr)
    undecayed = (lr,) if cautious_decay else ()
    share = scheduled * weight_decay
    if kind.endswith("proximal"):
        # (p - lr*d) / (1 + share) = p - (lr*d + share*p) / (1 + share)
        shrunk = 1.0 + share
        return Rates(lr / shrunk, share / shrunk, 0.0, grad_scale, undecayed, hooks)
    return Rates(lr, share, 0.0, grad_scale, undecayed, hooks)
