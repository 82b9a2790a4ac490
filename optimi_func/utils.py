"""Utilities: param groups, low precision, joining modules, and clipping on any meshes."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from optimi_func.core.checks import check_module, check_number, warn_user
from optimi_func.core.distributed import (
    ShardSpec,
    check_placed,
    is_distributed,
    shards_of,
    to_local,
)
from optimi_func.core.math import norm_of_shards
from optimi_func.core.torch_private import clip_factor, norms_of
from optimi_func.gradient_release.handle import releases_on
from optimi_func.state.convert import Group


def param_groups_weight_decay(
    model: nn.Module,
    weight_decay: float = 1e-2,
    additional_layers: Iterable[str] | None = None,
) -> list[Group]:
    """Return two param groups, so that weight decay is not applied to vectors.

    The first group has no weight decay. It contains biases and all parameters with at most
    one dimension, such as the weights of norms. The second group contains all other
    parameters. Each parameter is a pair of its name and the tensor, as in
    model.named_parameters().

    Args:
        model: The model. Frozen parameters are left out.
        weight_decay: Coefficient of weight decay for the second group. The optimizer
            decides what this coefficient is multiplied by.
        additional_layers: A list of strings. Parameters whose names contain one of these
            strings get no weight decay. A string that no name contains causes a warning.

    Returns:
        The group without weight decay, followed by the group with weight decay.

    Raises:
        ValueError: weight_decay is negative.
        TypeError: model is not a module, weight_decay is not a number, or additional_layers
            is a single string.

    >>> groups = param_groups_weight_decay(nn.Linear(2, 2), 0.1)
    >>> [([name for name, p in g["params"]], g["weight_decay"]) for g in groups]
    [(['bias'], 0.0), (['weight'], 0.1)]
    """
    check_module("param_groups_weight_decay", model)
    check_number("weight decay", "weight_decay", weight_decay)
    if isinstance(additional_layers, str):
        raise TypeError(
            f"additional_layers={additional_layers!r} is one string: pass a list of them"
        )
    excluded = list(additional_layers or ())
    groups: list[Group] = [
        {"params": [], "weight_decay": decay} for decay in (0.0, weight_decay)
    ]
    for word in excluded:
        if not any(word in name for name, _ in model.named_parameters()):
            warn_user(f"additional_layers has {word!r}, which is in no parameter's name")
    for name, p in model.named_parameters():
        exempt = p.ndim <= 1 or name.endswith(".bias") or any(x in name for x in excluded)
        if p.requires_grad:
            groups[not exempt]["params"].append((name, p))
    # An empty group has names too, because torch refuses groups of which some have none.
    return [group if group["params"] else {**group, "param_names": []} for group in groups]


def join_modules(parts: Iterable[nn.Module]) -> nn.Module:
    """Join parts of a model, such as pipeline stages, into one module with their own names.

    The joined module has no forward. You can pass it in place of the model to optimizers,
    gradient release and torch.distributed.checkpoint, as in
    `AdamW(whole.named_parameters())` or `get_state_dict(whole, optimizer)`. The joined
    module contains the parameters and buffers that the parts have at the time of the call,
    so shard the parts before you join them.

    Raises:
        ValueError: Two parts have a parameter or persistent buffer of the same name.

    >>> names = ("0", nn.Linear(2, 2)), ("1", nn.Linear(2, 1))
    >>> layers = [nn.ModuleDict({k: x}) for k, x in names]
    >>> parts = [nn.ModuleDict({"layers": x}) for x in layers]
    >>> [name for name, p in join_modules(parts).named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    """
    parts = list(parts)
    for part in parts:
        check_module("join_modules", part)
    names = [name for part in parts for name in part.state_dict()]
    if len({*names}) < len(names):
        raise ValueError(
            f"join_modules: several parts have {max(names, key=names.count)!r}: allowed "
            "are names of the whole model, as of a ModuleDict, and persistent=False buffers"
        )
    return _joined(parts)


def _joined(parts: list[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return parts[0]
    whole, children = nn.Module(), dict[str, list[nn.Module]]()
    for part in parts:
        whole._parameters.update(part.named_parameters(recurse=False))
        whole._buffers.update(part.named_buffers(recurse=False))
        whole._non_persistent_buffers_set |= part._non_persistent_buffers_set
        for name, child in part.named_children():
            children.setdefault(name, []).append(child)
    for name, some in children.items():
        whole.add_module(name, _joined(some))
    return whole


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    groups: Sequence["distributed.ProcessGroup"] = (),
) -> Tensor:
    """Clip gradients by their joint norm, even if they are DTensors on different meshes.

    This function does the same as torch.nn.utils.clip_grad_norm_, but accepts DTensors on
    different meshes, as in tensor parallelism together with fully_shard. Replicated
    gradients are counted once, and plain tensors are treated as replicas. All processes
    have to call this function with the same parameters, even if some of the parameters have
    no gradient.

    Args:
        parameters: A tensor or an iterable of tensors, with or without gradients.
        max_norm: The largest norm after clipping, at least 0. If max_norm is inf, a finite
            norm leaves the gradients unchanged.
        norm_type: The order of the norm, above 0. It may be inf.
        error_if_nonfinite: Raise an error if the norm is infinite or NaN, before any
            gradient is scaled.
        groups: Process groups in which each process has different parameters, such as the
            stages of a pipeline: [mesh["pp"].get_group()]. The norm is then computed over
            the parameters of all processes in these groups.

    Returns:
        The norm before clipping, as a plain tensor that is equal in all processes.

    Raises:
        ValueError: max_norm or norm_type is out of its range, or a gradient has a Partial
            placement.
        RuntimeError: The norm is not finite and error_if_nonfinite is True, or the
            gradients no longer exist, because gradient release has applied them during the
            backward pass.

    >>> p = nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([p], 1.0), p.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    order, limit = float(norm_type), float(max_norm)
    if not (limit >= 0 and order > 0):
        text = f"max_norm={max_norm}, norm_type={norm_type}"
        raise ValueError(f"{text}: allowed are numbers from 0, and above 0")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    params = [p for p in params if p.requires_grad or p.grad is not None]
    _check_unreleased(params)
    grads: list[Any] = [p.grad for p in params]
    for i, g in enumerate(grads):
        check_placed(f"[{i}].grad", g)
        if g is not None and g.is_complex() and order != 2:
            raise ValueError(f"norm_type={norm_type} of complex gradients: allowed is 2")
    # A message is for parameters, because another process may have no gradient of one.
    shards = [_shards(p, g) for p, g in zip(params, grads)]
    home = params[0].device if params else "cpu"
    zero = torch.zeros(1, dtype=torch.float32, device=home)
    parts: list[Any] = to_local(grads)
    norms = norms_of([x if x is not None and x.numel() else zero for x in parts], order)
    total = norm_of_shards(list(zip(norms, shards)), order, groups)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} is {total}, which is not finite")
    factor = clip_factor(limit, total)
    for x in parts:
        if x is not None:
            x.mul_(factor.to(x.device))
    return total


def _check_unreleased(params: list[Tensor]) -> None:
    """Raise an error if gradient release has already applied and freed the gradients."""
    for release in releases_on(params):
        released = {*release.params.values()}.intersection(params)
        if all(p.grad is None for p in released):
            raise RuntimeError(
                f"clip_grad_norm_ of {len(released)} parameters whose gradients "
                f"{type(release.optimizer).__name__} has applied and freed in backward "
                "(gradient release): nothing is left to clip. Pass clip_global_norm="
                f"{release.options.clip_global_norm or 1.0} to "
                "prepare_for_gradient_release, with handle.backward(loss_fn), or with "
                "accumulation='buffer' without accumulation_steps"
            )


def _shards(p: Tensor, g: Tensor | None) -> ShardSpec | None:
    """Return how a gradient is sharded, or how the gradient of a parameter would be."""
    spec = shards_of(p if g is None else g)
    if spec is None or not is_distributed(p) or spec.mesh != p.device_mesh:
        return spec
    # Of equal meshes, each with its own groups, all processes take the parameter's: torch's
    # caches decide which one a gradient has.
    return spec._replace(mesh=p.device_mesh)


Modules = type[nn.Module] | Iterable[type[nn.Module]]
Buffers = str | type[nn.Module] | Iterable[str | type[nn.Module]]


def to_low_precision(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    fp32_modules: Modules | None = nn.Embedding,
    fp32_buffers: Buffers | None = ("rope", "rotary"),
) -> nn.Module:
    """Cast a model to low precision, except modules and buffers that need float32.

    Args:
        model: The model, which is cast in place.
        dtype: The floating-point dtype for all parameters and buffers that do not stay in
            float32.
        device: The device to which the model is moved. None does not move the model.
        fp32_modules: Types of modules whose parameters and buffers stay in float32. These
            parameters stay in float32 even if another module shares them, such as an output
            layer that is tied to an embedding.
        fp32_buffers: Buffers that stay in float32. A module type selects the buffers of all
            modules of this type. A string selects all buffers whose qualified names contain
            the string, in upper or lower case.

    Returns:
        The same model.

    Raises:
        TypeError: An argument has the wrong type, or dtype is not a floating-point dtype.

    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    >>> [p.dtype for p in to_low_precision(model).parameters()]
    [torch.float32, torch.bfloat16, torch.bfloat16]
    """
    check_module("to_low_precision", model)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype!r}: allowed are floating torch dtypes")
    types = tuple(_listed("fp32_modules", fp32_modules, strings=False))
    buffers = _listed("fp32_buffers", fp32_buffers, strings=True)
    words = [x.lower() for x in buffers if isinstance(x, str)]
    buffer_types = types + tuple(x for x in buffers if not isinstance(x, str))
    tensors: dict[int, torch.Tensor] = {}
    wide: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]:
            tensors[id(tensor)] = tensor
            full = f"{path}.{name}".lower()
            buffer = not isinstance(tensor, nn.Parameter)
            named = buffer and any(word in full for word in words)
            if named or isinstance(module, buffer_types if buffer else types):
                wide.add(id(tensor))
    for key, tensor in tensors.items():
        target = torch.float32 if key in wide else dtype
        if not tensor.is_floating_point():
            target = tensor.dtype
        # A new parameter object would break ties and the param groups of optimizers.
        tensor.data = tensor.data.to(device, target)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(device, target)
    return model


def _listed(name: str, given: Any, strings: bool) -> list[Any]:
    single = isinstance(given, str) or not isinstance(given, Iterable | None)
    items = [given] if single else list(given or ())
    for item in items:
        module = isinstance(item, type) and issubclass(item, nn.Module)
        if not module and not (strings and isinstance(item, str)):
            kinds = "strings and nn.Module types" if strings else "nn.Module types"
            raise TypeError(f"{name} holds {item!r}: allowed are {kinds}")
    return items
