"""Forward, backward, clipping and update as one graph, on flat lists of tensors.

No number of the optimizer's is in a graph. Inductor looks for the order of the least
memory, in which the update of a parameter follows its gradient and frees it.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree as pytree

from optimi_func._leaf import compute_dtype
from optimi_func._rule import PyTree
from optimi_func._torch import clip_factor, norms_of, total_norm
from optimi_func.compiled.dry_run import DryRun, check_unscaled, dry_run
from optimi_func.compiled.update_op import read_before_written, update_
from optimi_func.execution.executors import SMALL
from optimi_func.execution.inductor import probe_vectors, torch_compile, unprobed_vectors
from optimi_func.execution.kernels import with_own_code_object
from optimi_func.execution.tensors import chunks

# Parameters are updated in about this many calls a step. Each call takes the host some
# time; with fewer calls more gradients are held until the others of their call are ready.
UPDATES = 8


class Inputs(NamedTuple):
    """What a graph is called with; it writes to all but the batch."""

    params: list[Tensor]
    buffers: list[Tensor]
    state: list[Tensor]  # for an update that is traced; others hold their own
    opaque_true: Tensor  # 0-d, true: what no compiler knows
    batch: PyTree


class Outputs(NamedTuple):
    """What a graph returns."""

    loss: Tensor
    aux: list[Tensor]  # the leaves of what loss_fn returned beside the loss
    norm: Tensor | None


# (params, gradients or None, flat state) -> (new params, new flat state)
TracedUpdate: TypeAlias = Callable[
    [list[Tensor], list[Tensor | None], list[Tensor]], tuple[list[Tensor], list[Tensor]]
]


@dataclass(frozen=True)
class Program:
    """A model and a loss on flat lists of tensors."""

    model: Callable[..., Any]
    loss_fn: Callable[[Any, Any], Any]
    params: pytree.TreeSpec
    buffers: pytree.TreeSpec

    def __call__(
        self, params: list[Tensor], buffers: list[Tensor], batch: PyTree
    ) -> tuple[Any, PyTree, list[Tensor]]:
        """The loss, what loss_fn returned beside it, and the buffers afterwards."""
        p = pytree.tree_unflatten(params, self.params)
        b = pytree.tree_unflatten(buffers, self.buffers)
        if isinstance(self.model, torch.nn.Module):
            tensors = {**p, **b}
            args, kwargs = arguments(batch)
            output = functional_call(self.model, tensors, args, kwargs)
            # A buffer may be replaced as well: functional_call puts the new one here.
            b = {name: tensors[name] for name in b}
        else:
            output = self.model(p, b, batch)
        found = self.loss_fn(output, batch)
        loss, aux = found if type(found) is tuple and len(found) == 2 else (found, None)
        return loss, aux, pytree.tree_leaves(b)


def arguments(batch: PyTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


class DryRunChanged(Exception):
    """Traced anew, the model uses other parameters or buffers than in the dry run."""


class StepGraph:
    """The graphs of a train_step."""

    def __init__(
        self, accumulate: int, clip: float | None, update: TracedUpdate | None
    ) -> None:
        self.accumulate = accumulate
        self.clip = clip
        self.update = update
        self._found: dict[Any, DryRun] = {}
        self._graphs: dict[Any, Callable[..., Outputs]] = {}
        # The arguments of the running call, for a dry run if its graph is traced anew.
        self._now: tuple[Program, Inputs] | None = None
        self._changed: DryRun | None = None

    def step(self, program: Program, inputs: Inputs) -> tuple[Outputs, PyTree]:
        """Run a step; what is not compiled is, before anything is written.

        Returns:
            What the graph returned, and the tree of what loss_fn returned beside the loss.

        Raises:
            ValueError: A batch that accumulate does not divide.
            ValueError, TypeError: A loss that is none.
            Exception: Whatever the compiler raised.
        """
        parts = split(inputs.batch, self.accumulate)
        inputs = inputs._replace(batch=parts[0])
        kind = _kind(program, parts[0])
        if kind not in self._found:
            self._found[kind] = _dry_run(program, inputs)
        dry = self._found[kind]
        try:
            outputs = self._run_parts(program, dry, inputs, parts)
        except DryRunChanged:
            # The trace has made a dry run of the model as it is now: compile for that.
            assert self._changed is not None
            dry = self._found[kind] = self._changed
            outputs = self._run_parts(program, dry, inputs, parts)
        except Exception:
            # The user may correct the model, and with it which parameters it uses.
            del self._found[kind]
            raise
        aux = None
        if dry.aux is not None:
            aux = pytree.tree_unflatten(outputs.aux, dry.aux)
        return outputs, aux

    def _run_parts(
        self, program: Program, dry: DryRun, inputs: Inputs, parts: list[PyTree]
    ) -> Outputs:
        if self.accumulate == 1:
            return self._run(program, dry, inputs, None, True)
        used_params, mutated_buffers, *_ = dry
        params = [inputs.params[i] for i in used_params]
        sums = [torch.zeros_like(p, dtype=compute_dtype(p.dtype)) for p in params]
        # Not into the buffers themselves: the graph of the last part may fail to compile.
        buffers = [x.clone() for x in inputs.buffers]
        given = inputs._replace(buffers=buffers)
        found: list[Outputs] = []
        for i, batch in enumerate(parts):
            last = i + 1 == len(parts)
            given = given._replace(batch=batch)
            found.append(self._run(program, dry, given, sums, last))
        for j in mutated_buffers:
            inputs.buffers[j].copy_(buffers[j])
        aux = [torch.stack(xs) for xs in zip(*[x.aux for x in found])]
        loss = torch.stack([x.loss for x in found]).mean()
        return Outputs(loss, aux, found[-1].norm)

    def _run(
        self,
        program: Program,
        dry: DryRun,
        inputs: Inputs,
        sums: list[Tensor] | None,
        last: bool,
    ) -> Outputs:
        key = (program.params, program.buffers, dry, last)
        graph = self._graphs.get(key)
        self._now, self._changed = (program, inputs), None
        try:
            if graph is None:
                body = with_own_code_object(self._body(program, dry, last), "train_step")
                # fallback_random: dropout draws the same numbers as eagerly, for which
                # shapes have to be fixed.
                options = {"dynamic": False, "options": {"fallback_random": True}}
                read_before_written()
                graph = torch_compile(body, options)
                outputs = _first(graph, inputs, sums)
                self._graphs[key] = graph
                return outputs
            return graph(inputs, sums)
        except Exception:
            # The compiler wraps what was raised while it traced.
            if self._changed is None:
                raise
            raise DryRunChanged from None
        finally:
            self._now = None

    def _body(
        self, program: Program, dry: DryRun, last: bool
    ) -> Callable[[Inputs, list[Tensor] | None], Outputs]:
        traced: list[bool] = []

        @torch.compiler.assume_constant_result
        def confirm() -> bool:
            # Called while Dynamo traces. A second trace means that something about the
            # model has changed, and perhaps which parameters the loss depends on.
            if traced and self._now is not None:
                found = _dry_run(*self._now)
                if found != dry:
                    self._changed = found
                    raise DryRunChanged
            traced.append(True)
            return True

        used_params, mutated_buffers, aliased_aux, _ = dry

        def body(inputs: Inputs, sums: list[Tensor] | None) -> Outputs:
            confirm()
            params, buffers, state, opaque_true, batch = inputs

            def compute(moving: list[Tensor]) -> tuple[Tensor, Any]:
                full, held = list(params), list(buffers)
                for i, p in zip(used_params, moving):
                    full[i] = p
                for j in mutated_buffers:
                    held[j] = buffers[j].clone()
                loss, aux, after = program(full, held, batch)
                items = [] if aux is None else pytree.tree_leaves(aux)
                return loss, (items, [after[j] for j in mutated_buffers])

            moving = [params[i] for i in used_params]
            grads, (loss, (aux, after)) = grad_and_value(compute, has_aux=True)(moving)
            # Every write depends on the loss: if the forward fails on its data, such as an
            # index out of range, nothing has been written.
            opaque_true = opaque_true | loss.isnan()
            loss = _chosen(loss, opaque_true)
            for i in aliased_aux:
                aux[i] = _chosen(aux[i], opaque_true)
            for j, new in zip(mutated_buffers, after):
                buffers[j].copy_(_chosen(new, opaque_true))
            if sums is not None:
                for total, g in zip(sums, grads):
                    total.add_(g)
                grads = sums
            if not last:
                return Outputs(loss, aux, None)
            grad_scale, norm = self._grad_scale(grads)
            if self.update is None:
                _update(dict(zip(used_params, grads)), params, grad_scale, loss)
            else:
                if grad_scale is not None:
                    grads = [g * grad_scale for g in grads]
                new = self.update(params, _placed(grads, used_params, len(params)), state)
                _write([*params, *state], [*new[0], *new[1]], opaque_true)
            return Outputs(loss, aux, norm)

        return body

    def _grad_scale(self, grads: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What the gradients, or their sums, are scaled by; and the norm of their mean."""
        share = 1.0 / self.accumulate
        if self.clip is None:
            if self.accumulate == 1:
                return None, None
            return torch.full((), share, dtype=grads[0].dtype, device=grads[0].device), None
        norm = total_norm(norms_of(grads)) * share
        return clip_factor(self.clip, norm) * share, norm


class _Place(NamedTuple):
    """A parameter's index, and its number of elements."""

    at: int
    numel: int


def _update(
    grads: dict[int, Tensor], params: list[Tensor], grad_scale: Tensor | None, loss: Tensor
) -> None:
    """Large neighbours together, as their gradients come one after the other.

    All small ones together: they share a launch, and their gradients can wait.
    """
    places = [_Place(i, params[i].numel()) for i in grads]
    small = [place for place in places if place.numel < SMALL]
    large = [place for place in places if place.numel >= SMALL]
    most = sum(place.numel for place in places) // UPDATES
    for chunk in [
        *(chunks(large, most, lambda place: place.numel) if large else ()),
        *([small] if small else ()),
    ]:
        its = [place.at for place in chunk]
        update_(loss, its, grad_scale, [grads[i] for i in its], [params[i] for i in its])


def _placed(
    grads: list[Tensor], places: tuple[int, ...], count: int
) -> list[Tensor | None]:
    found = dict(zip(places, grads))
    return [found.get(i) for i in range(count)]


def _write(olds: list[Tensor], news: list[Tensor], opaque_true: Tensor) -> None:
    """Copy the tensors that an optimizer's step returned into those it was given."""
    # All are read before any is written: a state may hold the parameter before the step.
    news = [_chosen(new, opaque_true) for new in news]
    for old, new in zip(olds, news):
        old.copy_(new)


def _chosen(x: Tensor, opaque_true: Tensor) -> Tensor:
    """A copy of x that Inductor keeps: it drops clones, and would read x after a write."""
    return torch.where(opaque_true.to(x.device), x, x.new_zeros(()))


def split(batch: PyTree, parts: int) -> list[PyTree]:
    """Equal parts of a batch, along the first dimension of its tensors.

    Raises:
        ValueError: A tensor that has no such parts.
    """
    leaves, spec = pytree.tree_flatten(batch)
    pieces: list[list[Any]] = []
    for x in leaves:
        if not isinstance(x, Tensor) or x.dim() == 0:
            pieces.append([x] * parts)
            continue
        if x.shape[0] % parts:
            raise ValueError(
                f"accumulate={parts} does not divide a batch of {x.shape[0]} (a tensor "
                f"of shape {tuple(x.shape)}): allowed are equal parts"
            )
        pieces.append(list(x.chunk(parts)))
    return [pytree.tree_unflatten(part, spec) for part in zip(*pieces)]


def _dry_run(program: Program, inputs: Inputs) -> DryRun:
    check_unscaled(program.loss_fn)
    return dry_run(program, inputs.params, inputs.buffers, inputs.batch)


def _kind(program: Program, batch: PyTree) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(batch)
    shapes = [(x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
    model = program.model
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    modes = [module.training for module in modules]
    return program.params, program.buffers, spec, tuple(shapes), tuple(modes)


def _first(
    graph: Callable[..., Outputs], inputs: Inputs, sums: list[Tensor] | None
) -> Outputs:
    """The call that compiles."""
    try:
        with unprobed_vectors():
            return graph(inputs, sums)
    except RuntimeError as error:
        if "CppCompileError" not in str(error):
            raise
        # Nothing has run yet. Perhaps the compiler knows fewer instructions than the
        # processor: find out.
        probe_vectors()
        return graph(inputs, sums)


@contextmanager
def no_grad_context() -> Generator[None]:
    """torch.no_grad outside of any inference_mode; autocast stays as the caller has it."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield
