"""Will it fit? Which recipe trains a model in so much memory, planned without that memory.

A recipe is the dtype of the parameters, how they and their moments are stored, whether
gradients are released, and in which dtype they accumulate. What each needs is counted on
tensors without memory, so that a model on meta can be planned on a laptop.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func._distributed import any_distributed, to_local
from optimi_func.memory.kept import Factory, Kept, kept, made_of, on_meta, planned_options
from optimi_func.memory.recipes import WAYS, Applied, MemoryPlan, Recipe
from optimi_func.memory.replay import (
    How,
    Param,
    Peak,
    peak_of,
    rounded_events,
    without_activations,
)
from optimi_func.memory.shards import largest_unit, sharded_peak
from optimi_func.memory.sizes import held, parse_size, rounded
from optimi_func.memory.trace import LossFn, Trace, trace

__all__ = ["Applied", "MemoryPlan", "Recipe", "plan"]

_DECIDED = ("storage", "kahan_sum", "state_dtype", "gradient_release")


def plan(
    model: nn.Module,
    optimizer: Factory,
    budget: str | float,
    loss_fn: LossFn | None = None,
    batch: Any = None,
    *,
    device: str | None = None,
    ranks: int = 1,
    accumulation_steps: int = 1,
    **options: Any,
) -> MemoryPlan:
    """Find the recipes that train a model within so much memory, the most faithful first.

    What counts is every tensor that is alive at the worst moment of a training step: what
    an allocator keeps beyond that, CUDA's own context (half a GB) and the program are not
    counted. Recipes are in the order of what a step loses for good:

    1. in how weights and moments are kept: nothing in float32 or "exact" (which computes
       in bfloat16, and so comes second), then with moments in 8 bits, first on weights
       that lose nothing, then "kahan" with bfloat16 moments, with 8 bits, "compact", and
       plain bfloat16 last, which loses small updates;
    2. in how gradients accumulate: in float32, then in bfloat16;
    3. nothing more is lost by gradient release: without comes first, as it is simpler.

    With `loss_fn` and `batch` forward and backward run on fake CPU tensors, once in each
    dtype, so that checkpoints, recomputation and the temporaries of backward are counted
    where they happen. The batch's floating tensors that have the model's dtype are cast
    with it; `torch.autocast(device.type)` inside of `loss_fn`, of its batch's device, acts
    as it does in training. Without them a tied weight's gradient counts throughout, of the
    others the largest, and the activations' column is empty.

    Args:
        model: On any device, "meta" too; nothing of it changes.
        optimizer: A class of this package, a `functools.partial` of one, or a function
            that takes `(named_parameters, storage=..., gradient_release=..., **options)`
            and makes one.
        budget: Memory in one process: "24GB" (10^9 bytes), "16GiB" (2^30) or bytes.
        loss_fn: `(model, batch) -> loss`, run with a copy of the model.
        batch: A tree of tensors, on the model's device or on meta.
        device: "cpu" or "cuda", where it is to be trained. None: where the model is, and
            "cuda" for one on meta. On CUDA attention's share is an estimate.
        ranks: Processes that fully_shard will divide the model among: bytes are those of
            one. What is gathered is an estimate.
        accumulation_steps: Backwards that make a step.
        options: Of the optimizer's constructor; what changes its state belongs here
            (momentum, amsgrad), lr and the like may wait for `apply`.

    Returns:
        The plan: `print` it, `plot` it; `best` is the recipe to `apply`, or None.

    Raises:
        TypeError, ValueError: A budget that is no size; a batch on another device than the
            model; a loss that is no scalar, or of no parameter; options that recipes
            decide, or that the optimizer refuses.
        RuntimeError: A forward that cannot run on tensors without memory; the module is
            named.

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
    bytes_allowed = parse_size("budget", budget)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    params = _checked_params(model)
    device = _device_of(params, device)
    _check_counts(ranks=ranks, accumulation_steps=accumulation_steps)
    _check_options(options)
    sharded = ranks > 1 or any_distributed(list(params.values()))
    _check_batch(params, loss_fn, batch, ranks)
    metas = {dtype: on_meta(params, dtype) for _, dtype, _ in WAYS}
    releases = _can_release(optimizer, metas[torch.float32], options)
    traces: dict[torch.dtype, Trace | None] = {}
    recipes: list[Recipe] = []
    for name, dtype, storage in WAYS:
        meta = metas[dtype]
        try:
            found = kept(optimizer, meta, storage, options, device, ranks)
        except ValueError:
            if storage is None:
                raise
            continue  # the rule, or these parameters, cannot be kept so
        if dtype not in traces:
            traced = None
            if loss_fn is not None:
                traced = trace(model, loss_fn, batch, dtype, device == "cuda")
            traces[dtype] = traced
        traced = traces[dtype]
        sizes = _sizes(model, params, meta, found, ranks, device)
        fixed = _fixed(model, meta, ranks, device)
        estimated = _estimated(traced, device, sharded)
        for release, buffer in _variants(dtype, accumulation_steps):
            if release and not releases:
                continue
            how = _how(dtype, release, accumulation_steps, buffer, device)
            if sharded:
                unit = largest_unit(model, dtype)
                peak = sharded_peak(traced, sizes, how, unit, max(ranks, _divisor(params)))
            else:
                peak = _peak(traced, sizes, how, device)
            recipe = Recipe(
                name=_name(name, release, buffer),
                dtype=dtype,
                storage=storage,
                gradient_release=release,
                accumulation_steps=accumulation_steps,
                buffer_dtype=buffer,
                parameters=fixed,
                gradients=peak.gradients,
                state=found.state,
                activations=None if traced is None else peak.activations,
                scratch=peak.scratch,
                phase=peak.phase,
                fits=fixed + found.state + peak.total <= bytes_allowed,
                estimated=estimated,
                optimizer=optimizer,
                options=dict(options),
            )
            recipes.append(recipe)
    title = _title(model, params, optimizer, device, ranks, accumulation_steps)
    return MemoryPlan(title, bytes_allowed, tuple(recipes))


def _peak(traced: Trace | None, sizes: Sequence[Param], how: How, device: str) -> Peak:
    events = without_activations(sizes) if traced is None else traced.events
    events = rounded_events(events, lambda size: rounded(size, device))
    peak = peak_of(events, sizes, how)
    if traced is None:
        # Parts of gradients are all that there is.
        gradients = peak.gradients + peak.activations
        return peak._replace(gradients=gradients, activations=0)
    return peak


def _variants(
    dtype: torch.dtype, accumulation_steps: int
) -> list[tuple[bool, torch.dtype | None]]:
    """Release and the dtype of its sum, the most faithful first."""
    if accumulation_steps == 1:
        return [(False, None), (True, None)]
    wide, low = (True, torch.float32), (True, torch.bfloat16)
    # p.grad adds up in the parameter's dtype.
    return (
        [(False, None), wide, low] if dtype == torch.float32 else [wide, (False, None), low]
    )


def _how(
    dtype: torch.dtype,
    release: bool,
    accumulation_steps: int,
    buffer: torch.dtype | None,
    device: str,
) -> How:
    cuda = device == "cuda"
    if buffer is None:
        return How(release, accumulation_steps, cuda=cuda)
    joined = torch.promote_types(dtype, buffer)
    casts = 0 if cuda or dtype == buffer else joined.itemsize
    return How(
        release,
        accumulation_steps,
        sum_bytes=buffer.itemsize,
        wide_bytes=0 if joined == dtype else joined.itemsize,
        # What is added to is read and written, each in a cast of its own.
        adding_bytes=casts if buffer == joined else 2 * casts,
        joining_bytes=casts,
        cuda=cuda,
    )


def _sizes(
    model: nn.Module,
    params: Mapping[str, Tensor],
    meta: Mapping[str, Tensor],
    found: Kept,
    ranks: int,
    device: str,
) -> list[Param]:
    """What counts of each trained parameter, in the model's order."""
    uses: dict[int, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        uses[id(p)] = uses.get(id(p), 0) + 1
    sizes: list[Param] = []
    for (name, p), x in zip(params.items(), meta.values()):
        if p.requires_grad:
            here = held(x, ranks)
            size = rounded(here, device)
            scratch = found.scratch.get(name, 0)
            sizes.append(Param(here // x.element_size(), size, scratch, uses[id(p)]))
    return sizes


def _fixed(model: nn.Module, meta: Mapping[str, Tensor], ranks: int, device: str) -> int:
    """Bytes of parameters and buffers."""
    total = sum(rounded(held(p, ranks), device) for p in meta.values())
    cast = next(iter(meta.values())).element_size()
    for x in to_local(list(model.buffers())):
        item = cast if x.is_floating_point() else x.element_size()
        total += rounded(x.numel() * item, device)
    return total


def _can_release(
    optimizer: Factory, params: dict[str, nn.Parameter], options: Mapping[str, Any]
) -> bool:
    """Whether the optimizer can be made for gradient release."""
    released = {**planned_options(optimizer, options), "gradient_release": True}
    try:
        made_of(optimizer, params, released)
    except (TypeError, ValueError):
        return False
    return True


def _divisor(params: Mapping[str, Tensor]) -> int:
    """Among how many processes parameters are divided already."""
    whole = sum(p.numel() for p in params.values())
    here = sum(p.numel() for p in to_local([p.detach() for p in params.values()]))
    return -(-whole // here)


def _estimated(traced: Trace | None, device: str, sharded: bool) -> tuple[str, ...]:
    attention = traced is not None and traced.attention and device == "cuda"
    return ("activations",) * attention + ("scratch",) * sharded


def _name(name: str, release: bool, buffer: torch.dtype | None) -> str:
    sums = "" if buffer is None else f", {str(buffer).removeprefix('torch.')} sums"
    return f"{name}{', release' if release else ''}{sums}"


def _title(
    model: nn.Module,
    params: Mapping[str, Tensor],
    optimizer: Factory,
    device: str,
    ranks: int,
    accumulation_steps: int,
) -> str:
    count = sum(p.numel() for p in params.values())
    shown = f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.2f} million"
    made = getattr(optimizer, "func", optimizer)  # of a partial
    text = f"{type(model).__name__}, {shown} parameters, {made.__name__} on {device}"
    text += f", each of {ranks} ranks" if ranks > 1 else ""
    return text + (
        f", {accumulation_steps} backwards a step" if accumulation_steps > 1 else ""
    )


# Checks


def _checked_params(model: Any) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: allowed are modules")
    params: dict[str, Tensor] = dict(model.named_parameters())
    lazy = [name for name, p in params.items() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet: run a forward first")
    if not any(p.requires_grad for p in params.values()):
        raise ValueError(f"model={type(model).__name__} has no parameter to train")
    devices = {p.device for p in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on {sorted(map(str, devices))}: a plan is for one "
            "device, plan what lies on each"
        )
    return params


def _device_of(params: Mapping[str, Tensor], device: Any) -> str:
    found = next(iter(params.values())).device.type
    if device is None:
        device = "cuda" if found == "meta" else found
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: allowed are 'cpu', 'cuda' and None")
    return device


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}={count!r}: allowed are whole numbers from 1")


def _check_options(options: Mapping[str, Any]) -> None:
    for name in _DECIDED:
        if name in options:
            raise ValueError(
                f"{name}={options[name]!r}: recipes decide it. Make the optimizer yourself "
                "to fix it"
            )
    if options.get("foreach"):
        raise ValueError(
            "foreach=True: the temporaries of lists are not planned. Allowed are the "
            "compiled step and compile=False"
        )


def _check_batch(
    params: Mapping[str, Tensor], loss_fn: Any, batch: Any, ranks: int
) -> None:
    distributed = any_distributed(list(params.values()))
    if distributed and ranks > 1:
        raise ValueError(f"ranks={ranks} for a model that is divided already: leave it out")
    if (loss_fn is None) != (batch is None):
        given, missing = ("batch", "loss_fn") if loss_fn is None else ("loss_fn", "batch")
        raise ValueError(f"{given} without {missing}: activations take both, or neither")
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
            where = "batch" + pytree.keystr(path)
            raise ValueError(
                f"{where} is on {x.device}, the model on {home}: allowed are "
                f"{sorted(map(str, allowed))}"
            )
