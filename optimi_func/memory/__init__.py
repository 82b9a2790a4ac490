"""Memory plans: find the recipe that trains a model within a budget, without that memory.

A recipe is the dtype of the parameters, the storage of parameters and moments, gradient
release or not, and the dtype in which gradients accumulate. Bytes are counted on meta and
fake tensors, so a model on meta can be planned on a laptop.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_whole
from optimi_func.core.distributed import any_distributed, to_local
from optimi_func.memory import kept, replay
from optimi_func.memory.kept import Factory
from optimi_func.memory.recipes import WAYS, Applied, MemoryPlan, Recipe, check_undecided
from optimi_func.memory.trace import LossFn, Trace, cast_dtype, trace

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
    """Find the recipes that train a model within a memory budget, the most faithful first.

    A recipe's peak is the bytes of all tensors that are alive at the worst moment of a
    training step. Memory that an allocator keeps beyond that, CUDA's own context (half a
    GB) and the program are not counted. Recipes are ordered by what a step loses for good,
    in weights and moments first, then in sums of gradients. Gradient release loses nothing,
    and comes after the same without.

    With `loss_fn` and `batch`, forward and backward run on fake CPU tensors, once in each
    dtype. Floating tensors of the batch that have the model's dtype are cast with it.
    `torch.autocast(device.type)` in `loss_fn`, with the device of its batch, acts as in
    training. Without `loss_fn` and `batch`, a tied weight's gradient counts throughout, of
    the others the largest, and the column of activations is empty.

    Args:
        model: On any device, "meta" too; it does not change.
        optimizer: A class of this package, a `functools.partial` of one, or a function
            that takes `(named_parameters, storage=..., gradient_release=..., **options)`
            and makes one. A model in place of the parameters is named `model`.
        budget: Memory in one process: "24GB" (10^9 bytes), "16GiB" (2^30) or bytes.
        loss_fn: `(model, batch) -> loss`, run with a copy of the model.
        batch: A tree of tensors, on the model's device or on meta.
        device: "cpu" or "cuda", where the model will be trained. None: the model's
            device, and "cuda" for a model on meta. On CUDA, attention is an estimate.
        ranks: Processes that fully_shard will divide the model among. Bytes are those of
            one process; gathered parameters are an estimate.
        accumulation_steps: Backwards that make a step.
        options: Options of the optimizer's constructor. Pass those that change its state
            (momentum, amsgrad); lr and others may wait for `apply`.

    Returns:
        The plan: `print` it, `plot` it; `best` is the recipe to `apply`, if one fits.

    Raises:
        TypeError, ValueError: The budget is no size, the batch is on another device than
            the model, the loss is no scalar or depends on no parameter, recipes decide an
            option, or the optimizer refuses one.
        RuntimeError: The forward cannot run on fake tensors; the module is named.

    >>> from optimi_func import AdamW
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    >>> found = plan(model, AdamW, "2MB")
    >>> found.best.name, found.best.peak < 2_000_000
    ('float32, release', True)
    >>> [found.within(budget).best.name for budget in ("3MB", "1.5MB", "1MB")]
    ['float32', 'float32 + 8bit', 'bfloat16 exact + 8bit, release']
    >>> optimizer, release = found.within("1MB").best.apply(model, lr=1e-3)
    >>> model[0].weight.dtype, release is None
    (torch.bfloat16, False)
    """
    limit = kept.parse_size("budget", budget)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    params, device = _checked_params(model, device)
    check_whole("ranks", ranks, 1)
    check_whole("accumulation_steps", accumulation_steps, 1)
    check_undecided(options)
    _check_batch(params, loss_fn, batch, ranks)
    metas = {kind: kept.on_meta(params, kind) for kind in (torch.float32, torch.bfloat16)}
    make = partial(kept.made_of, optimizer, model)
    releases = _may_release(make, metas[torch.float32], options)
    job = _Job(model, params, device, ranks, accumulation_steps)
    traces: dict[torch.dtype, Trace] = {}
    recipes: list[Recipe] = []
    for name, dtype, storage in WAYS:
        meta = metas[dtype]
        try:
            state, *more = kept.kept(make, meta, storage, options, device, ranks)
        except ValueError:
            if storage is None:
                raise
            continue  # the rule or a parameter refuses this storage
        if dtype not in traces and loss_fn is not None:
            traces[dtype] = trace(model, loss_fn, batch, dtype, device == "cuda")
        traced, fixed, sizes = traces.get(dtype), job.fixed(meta), job.sizes(meta, *more)
        for release, buffer in _variants(dtype, accumulation_steps):
            if release and not releases:
                continue
            sums = "" if buffer is None else f", {str(buffer).removeprefix('torch.')} sums"
            recipe = Recipe(
                name=f"{name}{', release' * release}{sums}",
                dtype=dtype,
                storage=storage,
                gradient_release=release,
                accumulation_steps=accumulation_steps,
                buffer_dtype=buffer,
                parameters=fixed,
                state=state,
                **job.peak(traced, sizes, dtype, release, buffer)._asdict(),
                estimated=job.estimated(traced),
                optimizer=optimizer,
                options=options,
            )
            recipes.append(recipe)
    factory = getattr(optimizer, "func", optimizer)  # of a partial
    plan = MemoryPlan(job.title(factory.__name__), limit, tuple(recipes))
    return plan.within(budget)


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

    def is_sharded(self) -> bool:
        return self.ranks > 1 or any_distributed(list(self.params.values()))

    def estimated(self, traced: Trace | None) -> tuple[str, ...]:
        """Return the parts that are estimates."""
        attention = traced is not None and traced.attention
        return ("activations",) * attention + ("scratch",) * self.is_sharded()

    def fixed(self, meta: Mapping[str, Tensor]) -> int:
        """Return the bytes of parameters and buffers."""
        sizes = [kept.held(p, self.ranks) for p in meta.values()]
        dtype = next(p.dtype for p in meta.values() if p.requires_grad)
        for x in to_local(list(self.model.buffers())):
            sizes.append(x.numel() * cast_dtype(x, dtype).itemsize)
        return sum(kept.rounded(size, self.device) for size in sizes)

    def sizes(
        self,
        meta: Mapping[str, Tensor],
        scratch: Mapping[str, int],
        directions: Mapping[str, int],
    ) -> list[replay.Param]:
        """Return the sizes of the trainable parameters."""
        pairs = self.model.named_parameters(remove_duplicate=False)
        uses = Counter(id(p) for _, p in pairs)
        sizes: list[replay.Param] = []
        for (key, p), x in zip(self.params.items(), meta.values()):
            if p.requires_grad:
                size = kept.held(x, self.ranks)
                size = replay.Param(
                    numel=size // x.element_size(),
                    bytes=kept.rounded(size, self.device),
                    scratch=scratch.get(key, 0),
                    uses=uses[id(p)],
                    direction=directions.get(key, 0),
                )
                sizes.append(size)
        return sizes

    def peak(
        self,
        traced: Trace | None,
        sizes: list[replay.Param],
        dtype: torch.dtype,
        release: bool,
        buffer: torch.dtype | None,
    ) -> replay.Peak:
        """Return the bytes at the worst moment of a step in one process."""
        handling = replay.Handling(release, self.backwards, self.device, dtype, buffer)
        if not self.is_sharded():
            return replay.peak_of(traced, sizes, handling)
        parts = to_local([p.detach() for p in self.params.values()])
        whole, local = (sum(map(Tensor.numel, x)) for x in (self.params.values(), parts))
        # Processes that the model is or will be divided among.
        processes = max(self.ranks, -(-whole // max(local, 1)))
        unit = replay.largest_unit(self.model, dtype)
        return replay.sharded_peak(traced, sizes, handling, unit, processes)


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


def _check_batch(
    params: Mapping[str, Tensor], loss_fn: object, batch: object, ranks: int
) -> None:
    distributed = any_distributed(list(params.values()))
    if distributed and ranks > 1:
        raise ValueError(f"ranks={ranks} for a model that is divided already: leave it out")
    if (loss_fn is None) != (batch is None):
        given, missing = ("batch", "loss_fn") if loss_fn is None else ("loss_fn", "batch")
        raise ValueError(f"{given} without {missing}: pass both, or neither")
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r}: allowed are functions (model, batch) -> loss"
        )
    if distributed:
        raise ValueError(
            "loss_fn of a model that is divided among processes: plan it before "
            "fully_shard, with ranks="
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
