"""The bytes of parameters, of an optimizer's state, and of its updates' temporaries.

No rule or storage is known here. An optimizer is made on meta parameters, and its tensors
are counted.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.codes import GROUP
from optimi_func.core.distributed import any_distributed, is_distributed, to_local
from optimi_func.core.leaf import compute_dtype, count_means
from optimi_func.core.program import JOINED
from optimi_func.core.rule import WHOLE_BATCH, Rule, StorageLike
from optimi_func.core.storage import state_in
from optimi_func.execution.kernels import has_list_kernels
from optimi_func.execution.shaped import EXAMPLES
from optimi_func.execution.trees import TreeUpdate
from optimi_func.memory.trace import Counter, cast_dtype, most_alive
from optimi_func.pure.tree import FlatTree, LeafState, TreeState

# A class of this package, or a function that makes one of its optimizers in the same way.
Factory = Callable[..., Any]
Options = Mapping[str, Any]

_UNITS = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


def parse_size(name: str, size: object) -> int:
    """Convert "24GB" (10^9), "16GiB" (2^30) or a number of bytes to bytes, or raise."""
    allowed = 'allowed are sizes such as "24GB" and "16GiB", and numbers of bytes'
    if isinstance(size, bool) or not isinstance(size, str | Real):
        raise TypeError(f"{name}={size!r}: {allowed}")
    number = 0.0
    if not isinstance(size, str):
        number = float(size)
    elif match := _SIZE.fullmatch(size):
        number = float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 1 <= number < float("inf"):
        raise ValueError(f"{name}={size!r}: {allowed}")
    return int(number)


def held(x: Tensor, ranks: int = 1) -> int:
    """Return the bytes of a tensor in one process, for a DTensor those of its local part.

    If `ranks` > 1, fully_shard will divide its rows. The first process has the most.
    """
    (part,) = to_local([x])
    if ranks == 1 or is_distributed(x) or not part.dim() or not part.numel():
        return part.nbytes
    rows = part.shape[0]
    return part.nbytes // rows * -(-rows // ranks)


def rounded(size: int, device: str) -> int:
    """Round bytes up to the block that the device's allocator takes, 512 on CUDA."""
    return -(-size // 512) * 512 if device == "cuda" else size


def takes_model(optimizer: Factory) -> bool:
    """Return True if an optimizer is made of a model, as by MuonAdamW."""
    return next(iter(inspect.signature(optimizer).parameters), "") == "model"


def made_of(
    optimizer: Factory, model: nn.Module, params: dict[str, nn.Parameter], options: Options
) -> BaseOptimizer:
    """Make an optimizer of this package, or raise TypeError if it is of another one.

    `params` are in the place of the model's. If the constructor requires lr it gets one,
    because bytes do not depend on it. Warnings are left to `apply`.
    """
    if not callable(optimizer):
        name = type(optimizer).__name__
        raise TypeError(f"optimizer={name}(...): pass the class, as each recipe makes one")
    lr = inspect.signature(optimizer).parameters.get("lr")
    if lr is not None and lr.default is inspect.Parameter.empty:
        options = {"lr": 1e-3, **options}
    first: Any = list(params.items())
    if takes_model(optimizer):
        memo: dict[int, object] = {
            id(p): params[name] for name, p in model.named_parameters()
        }
        first = deepcopy(model, memo | {id(x): x.to("meta") for x in model.buffers()})
    kind = optimizer
    if not isinstance(optimizer, type) or issubclass(optimizer, BaseOptimizer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            instance = optimizer(first, **options)
        if isinstance(instance, BaseOptimizer):
            return instance
        kind = type(instance)
    raise TypeError(
        f"optimizer={optimizer!r} makes a {kind.__name__}: allowed are the classes of "
        "optimi_func, partials of them, and functions that make one of them"
    )


def on_meta(params: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return meta parameters of the same shapes, cast to a dtype."""
    return {
        name: nn.Parameter(
            torch.empty_like(p.detach(), device="meta", dtype=cast_dtype(p, dtype)),
            p.requires_grad,
        )
        for name, p in params.items()
    }


def kept(
    make: Callable[[dict[str, nn.Parameter], Options], BaseOptimizer],
    params: dict[str, nn.Parameter],
    storage: StorageLike | None,
    options: Options,
    device: str,
    ranks: int,
) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the bytes of state, and each update's of temporaries and direction in them."""
    options = {**options, "storage": storage}
    optimizer = make(params, options)
    optimizer.init_state()
    total, eager, directions = 0, list[str](), dict[str, int]()
    for name, p in params.items():
        entry = optimizer.state.get(p, {})
        tensors = [x for x in entry.values() if isinstance(x, Tensor)]
        # Step counts stay on the host.
        there = [x for x in tensors if x.is_meta or device == "cpu"]
        total += sum(rounded(held(x, ranks), device) for x in there)
        group = optimizer.group_of(p)
        rule = optimizer.rule_of(group)
        asked = group["compile"] is not False and not group["foreach"]
        compiled = asked and _has_kernel(rule, p, entry, device)
        if p.requires_grad and not compiled:
            eager.append(name)
            if rule.whole is not None:
                wide = compute_dtype(p.dtype).itemsize
                directions[name] = rounded(
                    held(p, ranks) // p.element_size() * wide, device
                )
    if eager and any_distributed(list(params.values())):
        parts = to_local([p.detach() for p in params.values()])
        params = {
            name: nn.Parameter(part, p.requires_grad)
            for (name, p), part in zip(params.items(), parts)
        }
        optimizer = make(params, options)
        optimizer.init_state()
    scratch: dict[str, int] = {}
    by_kind: dict[object, int] = {}
    for name in eager:
        p = params[name]
        kind = (p.shape, p.stride(), id(optimizer.group_of(p)))
        if kind not in by_kind:
            by_kind[kind] = _temporaries(optimizer, p, device)
        scratch[name] = -(-by_kind[kind] // ranks)
        if p.numel() and _joins(optimizer, p):
            # With others it is copied into one tensor, with its gradient and its state; and
            # the numbers of the step are there once.
            tensors = [x for x in optimizer.state[p].values() if x.shape == p.shape]
            each = scratch[name] // p.numel() * p.numel()
            directions[name] = each + sum([x.nbytes for x in (p, p, *tensors)])
    return total, scratch, directions


def _joins(optimizer: BaseOptimizer, p: Tensor) -> bool:
    """Return True if the step without a compiler joins p with others."""
    group = optimizer.group_of(p)
    bound = optimizer.bound_of(group, [p], group["capturable"])
    rule = bound.rule
    alone = rule.whole or count_means(rule, bound.rates_now)
    return p.numel() <= JOINED and not alone


def _has_kernel(rule: Rule, p: Tensor, entry: Mapping[str, object], device: str) -> bool:
    """Return True if the compiled step of p needs no temporaries."""
    kinds = {x.dtype for x in entry.values() if isinstance(x, Tensor)}
    if "z" in rule.given:
        return False
    if rule.whole is not None:  # as shaped kernels take it
        plain = p.dim() in EXAMPLES and p.is_contiguous() and kinds == {torch.float32}
        return plain and device == "cpu" and rule.whole.digest != ""
    coded = any(not kind.is_floating_point for kind in kinds)
    if not coded or has_list_kernels(torch.device(device)):
        return True
    in_groups = any(name.endswith("_scale") for name in entry)
    return p.numel() > 1 and not (in_groups and p.numel() % GROUP)


def _temporaries(made: BaseOptimizer, p: Tensor, device: str) -> int:
    """Run the eager update of one parameter, and return the most bytes that it adds."""
    g = torch.empty_like(p, requires_grad=False)
    counter = Counter()
    pytree.tree_map_only_(Tensor, counter.number, [p, g, *made.state[p].values()])
    group, entry = made.group_of(p), made.state[p]
    bound = made.bound_of(group, [p], group["capturable"])
    rule_state, comp = state_in(bound.rule, entry)
    running = bound.rule.running(*[entry[x] for x in bound.rule.running._fields])
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    state = TreeState(step, [LeafState(rule_state, comp, running)])
    with counter:
        if bound.rule.given:
            made.update([p], [g], [WHOLE_BATCH], write=True, count=True)
        else:
            tree = FlatTree.of([p.detach()], [g], state)
            TreeUpdate(bound, tree, "eager").update([0], [g])
    events = counter.finish()
    return most_alive(e._replace(bytes=rounded(e.bytes, device)) for e in events)
