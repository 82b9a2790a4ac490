"""The compiled step of a parameter tree, into new tensors or in place."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.distributed import (
    check_placed,
    is_distributed,
    leaf_to_local,
    redistribute_like,
    shards_of,
    to_local,
)
from optimi_func.core.rule import Leaf, Microbatch, PyTree, Scalars
from optimi_func.core.storage import entry_of, names_in
from optimi_func.execution.executors import Executor
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.launches import StepInputs, run_launches
from optimi_func.execution.plans import make_launches, raise_versions
from optimi_func.execution.scalars import Packed, pack
from optimi_func.execution.slots import Roles, make_slots
from optimi_func.execution.tensors import check_writable, is_capturing
from optimi_func.pure import tree as pure_tree
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import FlatTree, TreeState


class TreeStep:
    """One step of a tree's leaves, some at a time. The caller counts it.

    Args:
        optimizer: Its hyperparameters are read once.
        tree: The checked trees, at the step that `state` has taken last.
        executor: What runs the updates.
    """

    def __init__(
        self,
        optimizer: FunctionalOptimizer,
        tree: FlatTree,
        executor: Executor,
    ) -> None:
        self._rule, self._tree = optimizer.rule, tree
        self._executor: Executor = executor
        step = tree.state.step.detach()
        for path, leaf in zip(tree.paths, tree.leaves):
            if step.device != leaf.p.device and is_capturing(leaf.p.device):
                raise RuntimeError(
                    f"a CUDA graph would keep the numbers of this step for all its "
                    f"replays: state.step is on {step.device}, params{path} on "
                    f"{leaf.p.device}. Move it there before the capture"
                )
        scalars, self._after = optimizer.scalars(tree, step, pure_tree.step_to_come(step))
        self._scalars: list[Scalars] = list({id(s): s for s in scalars}.values())
        places = {id(s): i for i, s in enumerate(self._scalars)}
        self._at = [places[id(s)] for s in scalars]

    def update(
        self,
        places: Sequence[int],
        grads: Sequence[Tensor],
        microbatches: list[Microbatch] | None = None,
        write: bool = True,
        into: list[Leaf] | None = None,
    ) -> None:
        """Update leaves by these gradients.

        Args:
            places: Indices of the leaves.
            grads: The gradient of each.
            microbatches: What each is to its step; None: the whole of it.
            write: False moves the state alone.
            into: Leaves for the results; None: in place.

        Raises:
            ValueError, TypeError: A gradient or leaf that does not fit; before any write.
        """
        leaves, local = [self._tree.leaves[i] for i in places], []
        for i, leaf, g in zip(places, leaves, grads):
            path = self._tree.paths[i]
            check_placed(path, leaf.p)
            if into is None:
                check_writable(path, *to_local([leaf.p]))
            pure_tree.check_grad(path, leaf.p, g)
            local += to_local([redistribute_like(path, leaf.p, g)])
        names, roles = self._roles(list(map(leaf_to_local, leaves)))
        targets = roles
        if into is not None:
            _, targets = self._roles(list(map(leaf_to_local, into)))
        rule, shards = self._rule, [shards_of(leaf.p) for leaf in leaves]
        slots = make_slots(names, rule.state._fields, roles, targets, shards)
        at = [self._at[i] for i in places]
        packed, at = pack(rule, self._scalars, at, microbatches, write)
        inputs = StepInputs(roles, targets, local, packed, at)
        launches = make_launches(self._executor, rule, slots, inputs, write)
        written = targets if write else targets[1:-1]
        run_launches(launches, inputs, written)
        moved = [x for role in written for x in role if x is not None]
        if write and into is None:
            self._advance(places, packed, at)
            # Autograd has not seen that their local shards were written.
            moved += [leaf.p for leaf in leaves if is_distributed(leaf.p)]
        raise_versions(moved, any(map(Tensor.is_inference, moved)))

    def running(self) -> list[Any]:
        """Return each leaf's running scalars after the step, as new tensors."""
        return [
            pure_tree.running_tensors(after, s.running[0].device)
            if s.running
            else s.running
            for after, s in zip(self._after, self._tree.states)
        ]

    def _advance(self, places: Sequence[int], packed: list[Packed], at: list[int]) -> None:
        """Write the running scalars of leaves whose `finite` flag is not false."""
        for i, k in zip(places, at):
            flag = packed[k].finite
            for old, new in zip(self._tree.states[i].running, self._after[i]):
                if flag is not None:
                    new = torch.where(flag.to(old.device), new, old)
                old.copy_(new) if isinstance(new, Tensor) else old.fill_(new)

    def _roles(self, leaves: list[Leaf]) -> tuple[list[str], Roles]:
        """Return the names between parameter and compensation, and the roles."""
        entries = [entry_of(leaf.state, leaf.comp) for leaf in leaves]
        names = dict.fromkeys(name for entry in entries for name in entry)
        every = names_in(self._rule.state._fields, names)
        roles: Roles = [[leaf.p for leaf in leaves]]
        every = [name for name in every if name != "kahan_comp"]
        roles += [[entry.get(name) for entry in entries] for name in every]
        return every, [*roles, [leaf.comp for leaf in leaves]]


def step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Step through compiled kernels, into new tensors."""
    tree = _checked(optimizer, params, grads, state)
    with kernel_context(state.step.device):
        places = [i for i, g in enumerate(tree.grads) if g is not None]
        fresh = {i: _fresh(tree.leaves[i]) for i in places}
        running = _update(optimizer, tree, list(fresh.values()))
        return tree.rebuild(fresh, running)


def step_(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """Step through compiled kernels, writing into params and state."""
    tree = _checked(optimizer, params, grads, state)
    with kernel_context(state.step.device):
        _update(optimizer, tree, None)
        state.step.add_(1.0)
    return params, state


def _checked(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> FlatTree:
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not a FunctionalOptimizer: a "
            "transformed one is compiled by torch.compile(optimizer.step)"
        )
    tree = FlatTree.check(optimizer.rule, params, grads, state)
    pure_tree.warn(optimizer.likely_mistakes() + tree.stuck_moments(optimizer))
    return tree


def _update(
    optimizer: FunctionalOptimizer, tree: FlatTree, into: list[Leaf] | None
) -> list[Any]:
    """Update the leaves that have a gradient, and return all running scalars after it."""
    places = [i for i, g in enumerate(tree.grads) if g is not None]
    if not places:
        return [s.running for s in tree.states]
    grads = [g for g in tree.grads if g is not None]
    step = TreeStep(optimizer, tree, "kernels")
    step.update(places, grads, into=into)
    return step.running() if into is not None else []


def _fresh(leaf: Leaf) -> Leaf:
    # None, where there is no compensation, stays None.
    return pytree.tree_map_only(
        Tensor, partial(torch.empty_like, requires_grad=False), leaf
    )
