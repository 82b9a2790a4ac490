"""Memory plans: find the recipes with which the training of a model fits into a budget.

A recipe consists of the dtype of the parameters, the storage of parameters and moments,
whether to use gradient release, and the dtype in which gradients accumulate. Bytes are
counted on meta and fake tensors, so you can plan the training of a model on a laptop that
does not have the memory for it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.checks import check_whole
from optimi_func.core.distributed import any_distributed
from optimi_func.core.rule import Storage
from optimi_func.execution.executors import SMALL
from optimi_func.memory import counting
from optimi_func.memory.activations import Activations, LossFn, activations_of
from optimi_func.memory.counting import Factory
from optimi_func.memory.peaks import Handling, Peak, Sizes, peak_of
from optimi_func.memory.recipes import (
    WAYS,
    Applied,
    MemoryPlan,
    Recipe,
    check_undecided,
    parse_size,
    slower_by,
)

__all__ = ["Applied", "MemoryPlan", "Recipe", "plan"]


def plan(
    model: nn.Module,
    optimizer: Factory,
    budget: str | float,
    loss_fn: LossFn | None = None,
    batch: object = None,
    *,
    device: str | None = None,
    ranks: int = 1,
    accumulation_steps: int = 1,
    **options: object,
) -> MemoryPlan:
    """Find the recipes that train a model within a memory budget.

    The peak of a recipe is the number of bytes of all tensors that are alive at the worst
    moment of a training step. Memory that an allocator keeps in addition, CUDA's context
    (half a GB), the workspaces of matrix products and the program itself are not counted.
    On a CPU, the bytes of the parameters, gradients, state and temporaries of the optimizer
    are exact, because the plan runs the optimizer's own step on meta tensors.

    Recipes without gradient release come first, because its hooks exclude some ways to clip
    and scale gradients. Plain bfloat16 comes last. Within this order, recipes are sorted by
    the rounding errors that a step never recovers: first by those of weights and moments,
    then by those of summed gradients.

    If you pass `loss_fn` and `batch`, one forward pass runs on fake CPU tensors for each
    dtype, and the tensors that autograd saves for the backward pass are counted. The
    gradients of activations, and other temporaries of the backward pass, cannot be counted
    in this way, so they are estimated from the sizes of the saved tensors. The activations
    are therefore an estimate, and so is a peak in the backward pass. The estimate is
    usually slightly too large; [the guide](../precision.md#will-it-fit) compares it with
    measurements. A block in `torch.utils.checkpoint` is counted as if all of its modules
    ran again together. Floating-point tensors in the batch that have the model's dtype are
    cast together with the model. `torch.autocast(device.type)` in `loss_fn` has the same
    effect as in training, if the device is that of the batch.

    Without `loss_fn` and `batch`, the column of activations is empty. In this case, the
    gradient of a tied weight is counted during the whole backward pass, and, under gradient
    release, only the largest of the other gradients is counted.

    Args:
        model: The model, on any device including "meta". It is not changed.
        optimizer: An optimizer class of this package, a `functools.partial` of a class, or
            a function that is called with `(named_parameters, storage=...,
            gradient_release=..., **options)` and returns an optimizer. If the first
            argument of the function is named `model`, the function is called with the model
            instead of the parameters.
        budget: The memory for one process: "24GB" (1 GB is 10^9 bytes), "16GiB" (1 GiB is
            2^30 bytes), or a number of bytes of at least 10^6.
        loss_fn: A function `(model, batch) -> loss`, which is called with a copy of the
            model.
        batch: A tree of tensors, on the model's device or on "meta".
        device: The device on which the model will be trained, "cpu" or "cuda". None means
            the model's device, or "cuda" if the model is on "meta".
        ranks: The number of processes over which fully_shard will divide the model. Bytes
            are then those of one process, and the bytes of gathered parameters are an
            estimate.
        accumulation_steps: The number of backward passes per step.
        options: Options of the optimizer's constructor. Pass the options that change the
            size of the state (momentum, amsgrad). You can pass lr and other options to
            `apply` instead.

    Returns:
        The plan. You can `print` the plan, and `best` is the recipe to `apply`, if a recipe
        fits.

    Raises:
        TypeError, ValueError: The budget is not a size, the batch is on a different device
            than the model, the loss is not a scalar or depends on no parameter, the model
            is already divided among processes, an option is one that the recipes decide, or
            the optimizer does not accept an option.
        RuntimeError: The forward pass cannot run on fake tensors. The error names the
            module.

    >>> from optimi_func import AdamW
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    >>> found = plan(model, AdamW, "2MB")
    >>> found.best.name, found.best.peak < 2_000_000
    ('bfloat16 exact', True)
    >>> [found.within(budget).best.name for budget in ("3MB", "1.5MB", "1MB")]
    ['float32', 'float32 + 8bit', 'bfloat16 compact']
    >>> optimizer, release = found.within("1MB").best.apply(model, lr=1e-3)
    >>> model[0].weight.dtype, release is None
    (torch.bfloat16, True)
    """
    limit = parse_size("budget", budget)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    params, device = _checked_params(model, device)
    check_whole("ranks", ranks, 1)
    check_whole("accumulation_steps", accumulation_steps, 1)
    check_undecided(options)
    _check_batch(params, loss_fn, batch)
    metas = {
        x: counting.cast_to(params, x, "meta") for x in (torch.float32, torch.bfloat16)
    }
    make = partial(counting.made_of, optimizer, model)
    releases = _may_release(make, metas[torch.float32], options)
    job = _Job(model, params, device, ranks, accumulation_steps)
    counted: dict[torch.dtype, Activations] = {}
    recipes: list[Recipe] = []
    for name, dtype, storage in WAYS:
        meta = metas[dtype]
        try:
            instance = make(meta, {**options, "storage": storage})
            state = counting.state_bytes(instance, device, ranks)
        except ValueError:
            if storage is None:
                raise
            continue  # the rule or a parameter refuses this storage
        if dtype not in counted and loss_fn is not None:
            counted[dtype] = activations_of(model, loss_fn, batch, dtype, device)
        activations, fixed = counted.get(dtype), job.fixed(meta)
        twin = Twin(instance, meta, {})
        for release, buffer in _variants(dtype, accumulation_steps):
            if release and not releases:
                continue
            sizes, scratch = job.sizes(meta, twin, release)
            how = Handling(release, accumulation_steps, device, dtype, buffer, scratch)
            sums = "" if buffer is None else f", {str(buffer).removeprefix('torch.')} sums"
            recipe = Recipe(
                name=f"{name}{', release' * release}{sums}",
                dtype=dtype,
                storage=storage,
                gradient_release=release,
                accumulation_steps=accumulation_steps,
                slower=slower_by(dtype, storage, release, device),
                buffer_dtype=buffer,
                parameters=fixed,
                state=state,
                **job.peak(activations, sizes, how)._asdict(),
                estimated=job.estimated(activations),
                optimizer=optimizer,
                options=options,
            )
            recipes.append(recipe)
    # Hooks exclude some ways to clip and to scale, and plain bfloat16 drops small updates.
    recipes.sort(key=lambda r: (r.storage == Storage("plain"), r.gradient_release))
    factory = getattr(optimizer, "func", optimizer)  # of a partial
    plan = MemoryPlan(job.title(factory.__name__), limit, tuple(recipes))
    return plan.within(budget)


Make = Callable[..., BaseOptimizer]


class Twin(NamedTuple):
    """An optimizer of meta parameters that stand for those of one process."""

    optimizer: BaseOptimizer
    params: counting.Params
    found: dict[object, int]  # temporaries of the update of one parameter, by its kind

    def temporaries(self, params: list[nn.Parameter], device: str) -> int:
        """Return the most bytes of temporaries while parameters are updated together."""
        if not params:
            return 0
        p = params[0]
        group = id(self.optimizer.group_of(p))
        key = (p.shape, p.stride(), p.dtype, group) if len(params) == 1 else len(params)
        if key not in self.found:
            self.found[key] = counting.temporaries(self.optimizer, params, device)
        return self.found[key]


class _Job(NamedTuple):
    """A training that recipes are for."""

    model: nn.Module
    params: dict[str, Tensor]
    device: str
    ranks: int
    backwards: int  # that make a step

    def title(self, optimizer: str) -> str:
        count = sum(map(Tensor.numel, self.params.values()))
        size = f"{count / 1e6:.2f} million"
        if count >= 10**8:
            size = f"{count / 1e9:.2f} billion"
        name = type(self.model).__name__
        title = f"{name}, {size} parameters, {optimizer} on {self.device}"
        title += f", each of {self.ranks} ranks" * (self.ranks > 1)
        return title + f", {self.backwards} backwards a step" * (self.backwards > 1)

    def estimated(self, activations: Activations | None) -> tuple[str, ...]:
        """Return the parts that are estimates."""
        return ("activations",) * bool(activations) + ("scratch",) * (self.ranks > 1)

    def fixed(self, meta: Mapping[str, Tensor]) -> int:
        """Return the bytes of parameters and buffers."""
        sizes = [counting.held(p, self.ranks) for p in meta.values()]
        dtype = next(p.dtype for p in meta.values() if p.requires_grad)
        for x in self.model.buffers():
            sizes.append(x.numel() * counting.cast_dtype(x, dtype).itemsize)
        return sum(counting.rounded(size, self.device) for size in sizes)

    def sizes(
        self, meta: counting.Params, twin: Twin, release: bool
    ) -> tuple[list[Sizes], int]:
        """Return the sizes of the trainable parameters, and bytes of temporaries.

        The latter are of the update of all, or (release) of those that wait for each other.
        """
        uses = Counter(
            id(p) for _, p in self.model.named_parameters(remove_duplicate=False)
        )
        trained = {name: p for name, p in twin.params.items() if p.requires_grad}
        waiting = [p for p in trained.values() if not release or p.numel() < SMALL]
        sizes: list[Sizes] = []
        for name, p in trained.items():
            size = counting.held(meta[name], self.ranks)
            alone = release and p.numel() >= SMALL
            scratch = twin.temporaries([p], self.device) // self.ranks if alone else None
            size = Sizes(
                numel=size // p.element_size(),
                bytes=counting.rounded(size, self.device),
                uses=uses[id(self.params[name])],
                scratch=scratch,
            )
            sizes.append(size)
        return sizes, -(-twin.temporaries(waiting, self.device) // self.ranks)

    def peak(
        self, activations: Activations | None, sizes: list[Sizes], how: Handling
    ) -> Peak:
        """Return the bytes at the worst moment of a step in one process."""
        if self.ranks == 1:
            return peak_of(activations, sizes, how)
        block, rest = _largest_unit(self.model, how.dtype)
        gradients = sum(p.bytes for p in sizes)
        if how.release:  # they are reduced and released block by block
            gradients = how.sums(sizes) + max(block, rest) // self.ranks
        # Two blocks with their gradients are whole, the running and the prefetched one.
        # Parameters in no block are whole from forward to the end of backward.
        update = max([how.scratch, *[p.scratch or 0 for p in sizes]])
        scratch = 2 * (2 * block + rest) + update
        if activations is not None:
            empty = [m._replace(params=()) for m in activations.moments]
            alone = peak_of(activations._replace(moments=empty), [], how)
            return Peak(gradients, alone.activations, scratch, "backward")
        return Peak(gradients, None, scratch, "backward")


def _largest_unit(model: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the largest block, and of all parameters in no block.

    Blocks are the members of lists and sequences. fully_shard is usually applied to each of
    them, and last to the model. What it gathers is an estimate.
    """
    units = [*_blocks(model), model]
    *blocks, whole = [sum(p.numel() for p in unit.parameters()) for unit in units]
    rest = max(0, whole - sum(blocks))
    return max(blocks, default=0) * dtype.itemsize, rest * dtype.itemsize


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return list(module.children())
    return [block for child in module.children() for block in _blocks(child)]


def _may_release(
    make: Callable[..., object],
    meta: dict[str, nn.Parameter],
    options: Mapping[str, object],
) -> bool:
    """Return False if the optimizer refuses gradient release."""
    try:
        make(meta, {**options, "gradient_release": True})
    except (TypeError, ValueError):
        return False
    return True


def _variants(
    dtype: torch.dtype, accumulation_steps: int
) -> list[tuple[bool, torch.dtype | None]]:
    """Return pairs of gradient release and buffer dtype, the most faithful first."""
    if accumulation_steps == 1:
        return [(False, None), (True, None)]
    plain, wide, low = (False, None), (True, torch.float32), (True, torch.bfloat16)
    # Without release, p.grad accumulates in the parameter's dtype.
    return [plain, wide, low] if dtype == torch.float32 else [wide, plain, low]


def _checked_params(model: object, device: object) -> tuple[dict[str, Tensor], str]:
    """Return the parameters, and the type of the device to plan for."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: allowed are modules")
    params: dict[str, Tensor] = dict(model.named_parameters())
    for name, x in (*params.items(), *model.named_buffers()):
        if nn.parameter.is_lazy(x):
            raise ValueError(f"{name} has no shape yet: run a forward first")
    if not any(p.requires_grad for p in params.values()):
        raise ValueError(f"model={type(model).__name__} has no parameter to train")
    if any_distributed(list(params.values())):
        raise ValueError(
            "the model is divided among processes already: plan it before fully_shard, "
            "with ranks="
        )
    devices = {p.device for p in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on {sorted(map(str, devices))}: a plan is for one "
            "device, so plan the part on each device"
        )
    if device is None:
        (single,) = devices
        device = "cuda" if single.type == "meta" else single.type
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: allowed are 'cpu', 'cuda' and None")
    return params, device


def _check_batch(params: Mapping[str, Tensor], loss_fn: object, batch: object) -> None:
    if (loss_fn is None) != (batch is None):
        given, missing = ("batch", "loss_fn") if loss_fn is None else ("loss_fn", "batch")
        raise ValueError(f"{given} without {missing}: pass both, or neither")
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r}: allowed are functions (model, batch) -> loss"
        )
    home = next(iter(params.values())).device
    allowed = {home, torch.device("meta")}
    allowed |= {torch.device("cpu")} if home.type == "meta" else set()
    for path, x in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(x, Tensor) and x.device not in allowed:
            raise ValueError(
                f"batch{pytree.keystr(path)} is on {x.device}, the model on {home}: "
                f"allowed are {sorted(map(str, allowed))}"
            )
