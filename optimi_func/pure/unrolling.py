"""Unrolled training: a run of steps as one function that torch.func differentiates."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import islice, repeat
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimi_func.core import checks, torch_private
from optimi_func.core.rule import PyTree
from optimi_func.pure.implicit import moves
from optimi_func.pure.tree import grads_and_value, step_of, without_none

T = TypeVar("T")


@torch_private.serializable
class Unrolled(NamedTuple):
    """The result of a run of training steps."""

    params: PyTree
    state: PyTree
    losses: Tensor  # [steps]; each loss is taken before its step


@overload
def unroll(*args: Any, has_aux: Literal[True], **kw: Any) -> tuple[Unrolled, PyTree]: ...


@overload
def unroll(
    optimizer: checks.Optimizer,
    loss_fn: Callable[..., Tensor],
    params: PyTree,
    state: PyTree,
    batches: object,
    *,
    steps: int | None = None,
    hyper: Mapping[str, object] | None = None,
    detach_at: Collection[int] = (),
    checkpoint_every: int | None = None,
    extras: Callable[[PyTree, PyTree, PyTree], Mapping[str, object]] | None = None,
    has_aux: Literal[False] = False,
) -> Unrolled: ...


def unroll(
    optimizer: checks.Optimizer,
    loss_fn: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    state: PyTree,
    batches: object,
    *,
    steps: int | None = None,
    hyper: Mapping[str, object] | None = None,
    detach_at: Collection[int] = (),
    checkpoint_every: int | None = None,
    extras: Callable[[PyTree, PyTree, PyTree], Mapping[str, object]] | None = None,
    has_aux: bool = False,
) -> Unrolled | tuple[Unrolled, PyTree]:
    """Run training steps as a pure function that torch.func differentiates.

        g_t       = d loss_fn(p_t, batch_t) / d p
        p_(t+1), s_(t+1) = optimizer.step(p_t, g_t, s_t)

    No argument is written to. Reverse mode (torch.func.grad, backward) keeps the tensors of
    all steps, so its memory grows with their number. Forward mode (jvp, jacfwd) keeps those
    of one step and computes one derivative per pass. If neither fits, use reverse mode with

    * `checkpoint_every=k`, which keeps params and state of every k-th step and the tensors
      of k steps, and computes each step twice. The square root of the number of steps is
      the k of least memory.
    * `detach_at`, which treats params and state of a step as constants, so that the
      derivative is that of a run from there. This is truncated backpropagation: cheap, and
      biased towards small learning rates (Wu et al., arXiv:1803.02021).

    Args:
        optimizer: A pure optimizer with `init` and `step`, such as `adamw(lr=lr)`, also
            `sam` of one. With `hyper` it is a factory, such as `adamw`.
        loss_fn: `(params, batch) -> loss`, a 0-d tensor.
        params: Parameter tree to start from.
        state: Optimizer state to start from. None makes a fresh one.
        batches: An iterable with one batch per step, each a pytree of tensors. Weights of
            examples in the loss belong into the batch.
        steps: Number of steps on `batches`, which is then one batch.
        hyper: Hyperparameters of the factory by name: a pytree of numbers and tensors.
        detach_at: Steps, 0-based, that take params and state for constants, such as
            range(0, 1000, 100).
        checkpoint_every: Steps between those that are kept. None keeps all. Derivatives
            then reach params, state, batches and hyper only, so loss_fn and the optimizer
            may take no other tensor that needs one. Under two or more forward modes
            (jacfwd of jacfwd) every step is kept nevertheless.
        extras: `(params, grads, batch) -> dict` of what the step is given besides, such as
            a Hessian's diagonal.
        has_aux: True if loss_fn returns (loss, aux), with a tree of tensors.

    Returns:
        Params, state and losses at the end, an `Unrolled`. With has_aux a pair of it and of
        aux, whose tensors have the steps along their first axis.

    Raises:
        ValueError: checkpoint_every < 1, steps < 1, a negative step in detach_at, no
            batch, or a loss that is not a scalar.
        TypeError: batches is not iterable, or is an iterator while steps is given. The loss
            is not a floating tensor. hyper is not a mapping, or is given with an optimizer
            that has its hyperparameters. optimizer is neither a factory nor has a `step`.
        RuntimeError: A tensor from elsewhere needs a derivative with checkpoint_every.

    References:
        Maclaurin, Duvenaud & Adams, "Gradient-based Hyperparameter Optimization through
        Reversible Learning", arXiv:1502.03492. Franceschi et al., "Forward and Reverse
        Gradient-Based Hyperparameter Optimization", arXiv:1703.01785. Chen et al.,
        "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

    >>> from optimi_func import sgd
    >>> def end(lr):
    ...     run = unroll(sgd, lambda p, x: (p - x) ** 2, p, None, [x, x], hyper={"lr": lr})
    ...     return run.params
    >>> p, x = torch.tensor(1.0), torch.tensor(0.0)
    >>> lr = torch.tensor(0.25)
    >>> end(lr), torch.func.grad(end)(lr)  # (1 - 2 lr)^2
    (tensor(0.2500), tensor(-2.))
    """
    if hyper is not None and not isinstance(hyper, Mapping):
        raise TypeError(f"hyper={hyper!r}: allowed are numbers by name, and None")
    checks.check_optimizer(optimizer, hyper)
    batches = _one_a_step(batches, steps)
    checks.check_whole("checkpoint_every", checkpoint_every, 1, none=True)
    if checkpoint_every is not None and torch.compiler.is_compiling():
        raise RuntimeError(
            f"checkpoint_every={checkpoint_every} in a compiled function, which cannot "
            "trace a run that repeats itself: compile loss_fn instead, or leave "
            "checkpoint_every out"
        )
    cut_at = _cuts(detach_at)
    # With two forward modes, torch's autograd.Function loses the outer tangents in the
    # inner jvp (pytorch/pytorch#197867). One forward mode and any reverse ones are right.
    # A run inside a rehearsed one is checked when that one really runs, because in the
    # rehearsal its tensors have other levels.
    rehearse = checkpoint_every is not None and not _rehearsing.get()
    recompute = rehearse and torch_private.forward_modes() < 2
    numbers = dict(hyper or {})
    if state is None:
        state = checks.bind(optimizer, numbers).init(params)
    iterator, losses, done = iter(batches), [], 0
    while part := list(islice(iterator, checkpoint_every or 1)):
        cuts = [i for i in range(len(part)) if done + i in cut_at]
        run = _segment(optimizer, loss_fn, cuts, extras, has_aux)
        if rehearse and not losses:
            _check_nothing_from_outside(run, (params, state, numbers, part[:1]))
        if recompute:
            run = _recomputed(run)
        params, state, new_losses = run((params, state, numbers, part))
        losses += new_losses
        done += len(part)
    if not losses:
        raise ValueError("batches is empty: there is nothing to unroll")
    if not has_aux:
        return Unrolled(params, state, torch.stack(losses))
    losses, auxs = zip(*losses)
    aux = pytree.tree_map(lambda *x: torch.stack(x), *auxs)
    return Unrolled(params, state, torch.stack(losses)), aux


def _one_a_step(batches: object, steps: int | None) -> Iterable[object]:
    """Return an iterable with a batch for each step, or raise."""
    if steps is None:
        # The loop would iterate over the leaves of a single batch.
        single = isinstance(batches, Mapping | str) or (
            isinstance(batches, Tensor) and batches.dim() == 0
        )
        if single or not isinstance(batches, Iterable):
            text = repr(batches) if isinstance(batches, int | str) else type(batches)
            raise TypeError(
                f"batches={text}: allowed is an iterable with a batch for each step; "
                "steps=... takes one batch so many times"
            )
        return batches
    checks.check_whole("steps", steps, 1, none=True)
    if isinstance(batches, Iterator):
        raise TypeError(
            f"batches={batches!r} with steps={steps}: steps takes one batch so many times; "
            "to end an iterator after as many, pass itertools.islice(batches, steps) and "
            "no steps"
        )
    return repeat(batches, steps)


def _cuts(detach_at: object) -> frozenset[int]:
    """Check `detach_at` and return it as a set. It may be an iterator, so read it once."""
    if not isinstance(detach_at, Iterable):
        raise TypeError(f"detach_at={detach_at!r}: allowed are lists of steps")
    steps = list(detach_at)
    for i in steps:
        if type(i) is not int or i < 0:
            raise ValueError(f"detach_at has {i!r}: allowed are steps, integers from 0")
    return frozenset(steps)


def detach(tree: T) -> T:
    """Detach the tensors of a tree, for use between the steps of an outer loop.

    Params and state that a run returns carry its graph, so without this the next run would
    be differentiated through both.

    >>> w = torch.ones(2, requires_grad=True)
    >>> params, _ = detach(({"w": 2 * w}, None))
    >>> params["w"].requires_grad
    False
    """
    return pytree.tree_map_only(Tensor, Tensor.detach, tree)


Segment: TypeAlias = Callable[[PyTree], PyTree]


def _segment(
    optimizer: checks.Optimizer,
    loss_fn: Callable[..., object],
    cuts: list[int],
    extras: Callable[..., object] | None,
    has_aux: bool,
) -> Segment:
    """Make some steps one function: (params, state, hyper, batches) -> (.., .., losses)."""

    def loss(params: PyTree, batch: PyTree) -> PyTree:
        return checks.scalar_loss(loss_fn(params, batch), has_aux)

    def run(given: PyTree) -> PyTree:
        params, state, numbers, batches = given
        bound = checks.bind(optimizer, numbers)
        losses: list[PyTree] = []
        for i, batch in enumerate(batches):
            if i in cuts:
                params, state = detach((params, state))
            outputs: list[PyTree] = []

            def evaluate(
                p: PyTree, batch: PyTree = batch, seen: list[PyTree] = outputs
            ) -> PyTree:
                grads, output = grads_and_value(loss, has_aux, p, batch)
                seen.append(output)
                return (output[0] if has_aux else output), grads

            if takes_loss := getattr(bound, "takes_loss", False):
                params, state = bound.step(params, state, evaluate)
            if takes_loss and extras:
                raise TypeError("unroll(extras=...) of an optimizer whose step evaluates")
            if not takes_loss:
                _, grads = evaluate(params)
                more = extras(params, grads, batch) if extras else {}
                params, state = step_of("unroll", bound, params, grads, state, **more)
            losses.append(outputs[0])  # with aux a pair
        return params, state, losses

    return run


def _recomputed(run: Segment) -> Segment:
    """Make `run` keep only its arguments for derivatives, and run again in them."""

    @torch_private.uncompiled
    def call(given: PyTree) -> PyTree:
        leaves, spec = pytree.tree_flatten(given)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        ambient: list[_Ambient] = []
        specs: list[pytree.TreeSpec] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            whole = list(leaves)
            for i, x in zip(places, tensors):
                whole[i] = x
            if not ambient:
                ambient.append(_Ambient.now(leaves))
                results = run(pytree.tree_unflatten(whole, spec))
            else:
                with ambient[0].again():
                    results = run(pytree.tree_unflatten(whole, spec))
            results = without_none(results)
            specs[:] = [pytree.tree_structure(results)]
            return tuple(pytree.tree_leaves(results))

        results = _Recomputed.apply(flat, *(leaves[i] for i in places))
        return pytree.tree_unflatten(list(results), specs[0])

    return call


def _gpus(leaves: list[object]) -> list[int]:
    return sorted({x.get_device() for x in leaves if isinstance(x, Tensor) and x.is_cuda})


class _Ambient(NamedTuple):
    """Global state that changes the results of a run, such as dropout and autocast."""

    cpu: Tensor  # random state
    gpus: dict[int, Tensor]  # random state by index of the device
    # By type of device. A backward may come after the autocast of its forward has ended.
    autocast: dict[str, tuple[torch.dtype, bool]]

    @staticmethod
    def now(leaves: list[object]) -> "_Ambient":
        states = {i: torch.cuda.get_rng_state(i) for i in _gpus(leaves)}
        kinds = {"cpu", *(x.device.type for x in leaves if isinstance(x, Tensor))}
        autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        }
        return _Ambient(torch.get_rng_state(), states, autocast)

    @contextmanager
    def again(self) -> Generator[None]:
        with ExitStack() as stack:
            for kind, (dtype, enabled) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(torch.random.fork_rng(list(self.gpus)))
            torch.set_rng_state(self.cpu)
            for i, state in self.gpus.items():
                torch.cuda.set_rng_state(state, i)
            yield


class _Recomputed(torch.autograd.Function):
    """A call of a function of tensors that is repeated in every derivative.

    torch.utils.checkpoint does this with hooks on saved tensors, which torch.func refuses.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> object:
        detached = [x.detach() for x in tensors]
        results = run(*detached)
        # A Function must not return one of its arguments as a result.
        ids = {id(x) for x in detached}
        return tuple(x.clone() if id(x) in ids else x for x in results)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        ctx.run, tensors = inputs[0], inputs[1:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.counts = [i for i, x in enumerate(output) if not moves(x)]
        ctx.mark_non_differentiable(*(output[i] for i in ctx.counts))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        floats, _ = _of_floats(ctx.run, tensors)
        float_cotangents = [c for i, c in enumerate(cotangents) if i not in ctx.counts]

        def pull(*both: Tensor) -> tuple[Tensor, ...]:
            at, along = both[: len(tensors)], both[len(tensors) :]
            _, run = _of_floats(ctx.run, at)
            return vjp(run, *(at[i] for i in floats))[1](tuple(along))

        # torch.func records a backward to differentiate it again, so recompute it as well.
        pulled = dict(zip(floats, _Recomputed.apply(pull, *tensors, *float_cotangents)))
        return None, *(pulled.get(i) for i in range(len(tensors)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> object:
        tensors, tangents = ctx.saved_tensors, tangents[1:]
        floats, run = _of_floats(ctx.run, tensors)
        primals = tuple(tensors[i] for i in floats)
        along = [tangents[i] for i in floats]
        along = [torch.zeros_like(p) if t is None else t for p, t in zip(primals, along)]
        pushed = list(jvp(run, primals, tuple(along))[1])
        for i in ctx.counts:
            pushed.insert(i, None)
        return tuple(pushed)


def _of_floats(
    run: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]
) -> tuple[list[int], Callable[..., tuple[Tensor, ...]]]:
    """Return the indices of floating tensors, and `run` from these to floating results."""
    floats = [i for i, x in enumerate(tensors) if moves(x)]

    def of_floats(*some: Tensor) -> tuple[Tensor, ...]:
        whole = list(tensors)
        for i, x in zip(floats, some):
            whole[i] = x
        return tuple(x for x in run(*whole) if moves(x))

    return floats, of_floats


_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@torch_private.uncompiled
def _check_nothing_from_outside(run: Segment, given: PyTree) -> None:
    """Raise if `run` uses a tensor whose derivative a recomputed run would lose.

    This runs on copies. The real run suspends the enclosing transformations, so tensors of
    their levels 1, 2, .. would look like those of transformations inside it. Here as many
    empty levels are in between. Zeros replace tensors that are differentiated themselves,
    because they have no values here.
    """
    level = torch_private.transform_level()

    def blank(x: Tensor) -> Tensor:
        if torch_private.level_of(x) < 0:
            return x.detach().clone()
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def try_out() -> None:
        blanks = pytree.tree_map_only(Tensor, blank, given)
        token = _rehearsing.set(True)
        try:
            with _Inside(level):
                run(blanks)
        finally:
            _rehearsing.reset(token)

    with (
        torch.random.fork_rng(_gpus(pytree.tree_leaves(given))),
        torch_private.no_transforms(),
    ):
        _at_level(level + 1, try_out)


def _at_level(level: int, fn: Callable[[], None]) -> None:
    if level == 0:
        return fn()

    def inner(x: Tensor) -> Tensor:
        _at_level(level - 1, fn)
        return x

    grad(inner)(torch.zeros(()))
    return None


class _Inside(TorchFunctionMode):
    """A mode that raises for tensors that require grad, or of `level` transformations."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        for x in pytree.tree_leaves((args, kwargs)):
            level = torch_private.level_of(x) if isinstance(x, Tensor) else 0
            if 0 < level <= self._level or (level < 0 and x.requires_grad):
                raise RuntimeError(
                    f"a tensor of shape {tuple(x.shape)} that autograd or a transformation "
                    "of torch.func follows came from outside: with checkpoint_every, they "
                    "reach params, state, batches and hyper alone. Pass it in hyper, or in "
                    "every batch"
                )
        return func(*args, **(kwargs or {}))
