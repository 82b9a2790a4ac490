"""The graphs of a training step, on flat lists of tensors.

Hyperparameters are not in a graph. Inductor orders a graph for the least memory, so the
update of a parameter follows its gradient and frees it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree as pytree

from optimi_func.compiled.dry_run import DryRun, check_unscaled, dry_run
from optimi_func.compiled.update_op import read_before_written, update_
from optimi_func.core.lists import chunks
from optimi_func.core.math import total_norm
from optimi_func.core.rule import PyTree
from optimi_func.core.torch_private import clip_factor, norms_of
from optimi_func.core.tree import path_of
from optimi_func.execution.cpp import with_vectors
from optimi_func.execution.executors import SMALL
from optimi_func.execution.inductor import torch_compile
from optimi_func.execution.kernels import with_own_code_object

# Parameters are updated in about this many calls a step. More calls cost host time. Fewer
# hold more memory, because a gradient waits until all gradients of its call are ready.
UPDATES = 8


class Inputs(NamedTuple):
    """The arguments of a graph; it writes to all tensors except those of the batch."""

    params: list[Tensor]
    buffers: list[Tensor]
    opaque_true: Tensor  # 0-d, True, which the compiler cannot know
    batch: PyTree


class Outcome(NamedTuple):
    """The results of a training step without the new state."""

    loss: Tensor  # 0-d
    aux: PyTree  # that loss_fn returned, or None
    norm: Tensor | None  # 0-d: of all gradients, before clipping; None without clipping


@dataclass(frozen=True)
class Program:
    """A model and a loss on flat lists of tensors."""

    model: Callable[..., PyTree]
    loss_fn: Callable[[PyTree, PyTree], PyTree]
    params: pytree.TreeSpec
    buffers: pytree.TreeSpec

    def __call__(
        self, params: list[Tensor], buffers: list[Tensor], batch: PyTree
    ) -> tuple[Any, PyTree, list[Tensor]]:
        """Return the loss, the aux of loss_fn or None, and the buffers afterwards."""
        p = pytree.tree_unflatten(params, self.params)
        b = pytree.tree_unflatten(buffers, self.buffers)
        if isinstance(self.model, torch.nn.Module):
            tensors = {**p, **b}
            x = batch[0] if isinstance(batch, tuple | list) else batch
            args = x if isinstance(x, tuple) else (x,)
            args, kwargs = ((), x) if isinstance(x, dict) else (args, {})
            output = functional_call(self.model, tensors, args, kwargs)
            # A forward may replace a buffer; functional_call puts the new one here.
            b = {name: tensors[name] for name in b}
        else:
            output = self.model(p, b, batch)
        result = self.loss_fn(output, batch)
        loss, aux = result if type(result) is tuple and len(result) == 2 else (result, None)
        return loss, aux, pytree.tree_leaves(b)


class StepGraph:
    """The graphs of a train_step."""

    def __init__(self, clip: float | None) -> None:
        self.clip = clip
        self._graphs: dict[object, Callable[..., Outcome]] = {}
        # The arguments of the running call, and the error of its dry run.
        self._now: tuple[Program, Inputs] | None = None
        self._error: Exception | None = None

    def step(
        self,
        program: Program,
        params: list[Tensor],
        buffers: list[Tensor],
        batch: PyTree,
    ) -> Outcome:
        """Take a step. A new graph is compiled before anything is written."""
        for i, p in enumerate(params):
            if p.is_complex():
                where = path_of(pytree.tree_unflatten(params, program.params), i)
                raise TypeError(
                    f"params{where} has dtype {p.dtype}, for which torch's compiler makes "
                    "no graph of a training step: call backward and the optimizer's step"
                )
        opaque_true = torch.ones((), dtype=torch.bool, device=params[0].device)
        inputs = Inputs(params, buffers, opaque_true, batch)
        key = program.params, program.buffers
        graph = self._graphs.get(key)
        self._now, self._error = (program, inputs), None
        try:
            if graph is not None:
                return graph(inputs)
            body = with_own_code_object(self._body(program), "train_step")
            # With fallback_random dropout draws the masks of an eager run. It needs static
            # shapes.
            options = {"dynamic": False, "options": {"fallback_random": True}}
            read_before_written()
            graph = torch_compile(body, options)
            # Nothing has run if this error of the compiler is raised.
            result = with_vectors(partial(graph, inputs), "CppCompileError")
            self._graphs[key] = graph
            return result
        except Exception:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._now = self._error = None

    def _body(self, program: Program) -> Callable[[Inputs], Outcome]:
        @torch.compiler.assume_constant_result
        def dry() -> DryRun:
            # Dynamo calls this whenever it traces: also if the model has changed, whose
            # loss may then depend on other parameters.
            assert self._now is not None
            program, inputs = self._now
            try:
                check_unscaled(program.loss_fn)
                return dry_run(program, inputs.params, inputs.buffers, inputs.batch)
            except Exception as error:
                self._error = error
                raise RuntimeError("the dry run failed") from None  # Dynamo rewrites it

        def body(inputs: Inputs) -> Outcome:
            found = dry()
            loss, aux, grads = _forward_and_backward(program, inputs, found)
            grad_scale = norm = None
            if self.clip is not None:
                norm = total_norm(norms_of(list(grads.values())))
                grad_scale = clip_factor(self.clip, norm)
            _update(grads, inputs.params, grad_scale, loss)
            return Outcome(loss, aux, norm)

        return body


def _forward_and_backward(
    program: Program, inputs: Inputs, found: DryRun
) -> tuple[Tensor, PyTree, dict[int, Tensor]]:
    """Return the loss, aux and gradients; write the buffers."""
    params, buffers, opaque_true, batch = inputs

    def compute(moving: list[Tensor]) -> tuple[Tensor, object]:
        full, all_buffers = list(params), list(buffers)
        for i, p in zip(found.used_params, moving):
            full[i] = p
        for j in found.mutated_buffers:
            all_buffers[j] = buffers[j].clone()
        loss, aux, after = program(full, all_buffers, batch)
        trees = [] if aux is None else [aux]
        return loss, (trees, [after[j] for j in found.mutated_buffers])

    moving = [params[i] for i in found.used_params]
    grads, (loss, (trees, after)) = grad_and_value(compute, has_aux=True)(moving)
    # Nothing is written if the forward fails on its data (an index out of range).
    opaque_true = opaque_true | loss.isnan()
    loss = _chosen(loss, opaque_true)
    items, spec = pytree.tree_flatten(trees)
    for i in found.aliased_aux:
        items[i] = _chosen(items[i], opaque_true)
    aux = pytree.tree_unflatten(items, spec)[0] if trees else None
    for j, new in zip(found.mutated_buffers, after):
        buffers[j].copy_(_chosen(new, opaque_true))
    return loss, aux, dict(zip(found.used_params, grads))


def _update(
    grads: dict[int, Tensor], params: list[Tensor], grad_scale: Tensor | None, loss: Tensor
) -> None:
    """Update large neighbours together, because their gradients follow one another.

    All small parameters are updated together: they share a launch, and their gradients take
    little memory while they wait.
    """
    small = [i for i in grads if params[i].numel() < SMALL]
    large = [i for i in grads if params[i].numel() >= SMALL]
    most = sum(params[i].numel() for i in grads) // UPDATES
    for its in [*chunks(large, most, lambda i: params[i].numel()), small]:
        if its:
            update_(
                loss, its, grad_scale, [grads[i] for i in its], [params[i] for i in its]
            )


def _chosen(x: Tensor, opaque_true: Tensor) -> Tensor:
    """Copy x before it is written. Inductor drops a clone and reads x after the write."""
    return torch.where(opaque_true.to(x.device), x, x.new_zeros(()))
