"""What an optimizer keeps of each parameter, and what its updates need beside that.

Nothing is written down here about any rule or storage: an optimizer is made on tensors
without memory, and what it then has is counted.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimi_func._codes import GROUP
from optimi_func._distributed import any_distributed, to_local
from optimi_func._rule import WHOLE_BATCH, Storage
from optimi_func.execution.kernels import has_list_kernels
from optimi_func.memory.sizes import held, rounded
from optimi_func.memory.trace import Counter
from optimi_func.optimizers import BaseOptimizer

# A class of this package, or what makes one of its optimizers in the same way.
Factory = Callable[..., Any]
Options = Mapping[str, Any]


class Kept(NamedTuple):
    """Of one dtype and storage."""

    state: int  # bytes, of all parameters
    scratch: dict[str, int]  # of a parameter's update, where there is any


def planned_options(optimizer: Factory, options: Options) -> Options:
    """The options, with a learning rate where there has to be one; bytes depend on none."""
    try:
        lr = inspect.signature(optimizer).parameters.get("lr")
    except (TypeError, ValueError):  # no Python function
        return options
    needed = lr is not None and lr.default is inspect.Parameter.empty
    return {"lr": 1e-3, **options} if needed else options


def made_of(
    optimizer: Factory, params: dict[str, nn.Parameter], options: Options
) -> BaseOptimizer:
    """The optimizer of these parameters; its warnings come when it is applied.

    Raises:
        TypeError: One of another library.
        Exception: Whatever its constructor raises.
    """
    made: Any = None
    ours = not isinstance(optimizer, type) or issubclass(optimizer, BaseOptimizer)
    if ours:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = optimizer(list(params.items()), **options)
    if not isinstance(made, BaseOptimizer):
        kind: Any = type(made) if ours else optimizer
        raise TypeError(
            f"optimizer={optimizer!r} makes a {kind.__name__}: allowed are the classes of "
            "optimi_func, partials of them, and functions that make one of them"
        )
    return made


def on_meta(params: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Parameters of the same shapes in a dtype, without memory."""
    with torch.no_grad():
        return {
            name: nn.Parameter(
                torch.empty_like(p, device="meta", dtype=dtype), p.requires_grad
            )
            for name, p in params.items()
        }


def kept(
    optimizer: Factory,
    params: dict[str, nn.Parameter],
    storage: Storage | str | None,
    options: Options,
    device: str,
    ranks: int,
) -> Kept:
    """What an optimizer keeps of a model's parameters.

    Args:
        optimizer: Makes it.
        params: By name, on meta, in the dtype that the model is cast to.
        storage: How they and their state are kept.
        options: Of the constructor beside that.
        device: "cpu" or "cuda": where it will run.
        ranks: Processes that divide the parameters.

    Raises:
        Exception: What the optimizer refuses about these parameters or this storage.
    """
    options = {**planned_options(optimizer, options), "storage": storage}
    made = made_of(optimizer, params, options)
    made.init_state()
    state = 0
    eager: list[str] = []
    for name, p in params.items():
        named = made.state.get(p, {})
        entry = [x for x in named.values() if isinstance(x, Tensor)]
        # Counts stay on the host.
        here = [x for x in entry if x.is_meta or device == "cpu"]
        state += sum(rounded(held(x, ranks), device) for x in here)
        group = made.group_of(p)
        # A map of whole tensors has temporaries in every step.
        compiled = group["compile"] is not False and made.rule_of(group).whole is None
        if p.requires_grad and not (compiled and _has_kernel(p, named, device)):
            eager.append(name)
    if eager and any_distributed(list(params.values())):
        params = {name: _part(p) for name, p in params.items()}
        made = made_of(optimizer, params, options)
        made.init_state()
    scratch = _temporaries(made, {name: params[name] for name in eager}, device)
    return Kept(state, {name: -(-size // ranks) for name, size in scratch.items()})


def _has_kernel(p: Tensor, entry: Mapping[str, Any], device: str) -> bool:
    """Whether the compiled step of a parameter is a kernel, and takes nothing beside it."""
    kinds = {x.dtype for x in entry.values() if isinstance(x, Tensor)}
    coded = any(not kind.is_floating_point for kind in kinds)
    if not coded or has_list_kernels(torch.device(device)):
        return True
    in_groups = any(name.endswith("_scale") for name in entry)
    return p.numel() > 1 and not (in_groups and p.numel() % GROUP)


def _part(p: nn.Parameter) -> nn.Parameter:
    (part,) = to_local([p.detach()])
    return nn.Parameter(part, p.requires_grad)


def _temporaries(
    made: BaseOptimizer, params: dict[str, nn.Parameter], device: str
) -> dict[str, int]:
    """Bytes that updates take which run operation by operation, by parameter."""
    groups = {id(group): i for i, group in enumerate(made.param_groups)}
    found: dict[Any, int] = {}
    by_name: dict[str, int] = {}
    for name, p in params.items():
        kind = (p.shape, p.stride(), groups[id(made.group_of(p))])
        if kind not in found:
            found[kind] = _temporary(made, p, device)
        by_name[name] = found[kind]
    return by_name


def _temporary(made: BaseOptimizer, p: Tensor, device: str) -> int:
    """The most that the update of one parameter has at once beside what it is given."""
    g = torch.empty_like(p, requires_grad=False)
    counter = Counter()
    for x in [p, g, *made.state[p].values()]:
        if isinstance(x, Tensor):
            counter.know(x)
    with counter:
        made.update([p], [g], [WHOLE_BATCH], write=True, count=True)
    most = now = 0
    for e in counter.finish():
        now += {"taken": 1, "freed": -1}.get(e.kind, 0) * rounded(e.bytes, device)
        most = max(most, now)
    return most
