"""Param groups: argument checks, and the pure optimizer of a group's hyperparameters.

A group is torch.optim's dict of parameters, hyperparameters under torch's names, and
options about how the step runs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core import checks
from optimi_func.core.distributed import redistribute_like
from optimi_func.core.hooks import is_hook
from optimi_func.core.rule import Rule, Storage
from optimi_func.core.storage import as_dtype, check_stored, group_storage
from optimi_func.pure.casts import PLAIN
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, Group, without_wrappers
from optimi_func.state.entry import stuck_moments

# Hyperparameters that are no schedules of the parameter's step in a class.
UNSCHEDULED = ("lr", "weight_decay", "max_lr")
_NUMBERS = {float, int}
_kind = attrgetter("dtype", "layout")
T = TypeVar("T")


def plain_number(x: Any) -> Any:
    """Convert numpy numbers, dtypes and sequences to Python values that json can write."""
    if type(x) in PLAIN or isinstance(x, str | Tensor):
        return x
    if type(x) is tuple:
        return tuple(map(plain_number, x))
    if isinstance(x, Storage):
        return x._replace(moments=plain_number(x.moments))
    if is_hook(x):
        return type(x)(*map(plain_number, x))
    if isinstance(x, torch.dtype):  # json has none
        return str(x)
    x = checks.plain(x)
    if isinstance(x, Real):
        return int(x) if isinstance(x, Integral) else float(x)
    if isinstance(x, Sequence) or getattr(x, "ndim", None) == 1:
        return tuple(map(plain_number, x))
    return x


def plain_numbers(given: dict[str, object]) -> Group:
    """Convert options by `plain_number`."""
    return {k: x if type(x) in PLAIN else plain_number(x) for k, x in given.items()}


def take_torchs_decay(
    given: dict[str, object],
    factory: type[FunctionalOptimizer],
    keywords: Collection[str],
) -> None:
    """Replace torch's decoupled_weight_decay, in a call or in a group, by decouple_wd."""
    name = "decoupled_weight_decay"
    if name not in given or name in keywords:
        return
    asked, own = given[name], "decouple_wd" in keywords
    ours = given.get("decouple_wd", asked) if own else factory.owner._usual != "l2"
    if asked not in (None, ours):
        raise ValueError(
            f"decoupled_weight_decay={asked} is torch.optim's name of decouple_wd, which "
            f"is {ours} here: allowed is {ours}"
        )
    del given[name]
    if own and asked is not None:
        given["decouple_wd"] = asked


# The fifth positional hyperparameter in torch.optim, where the third is this one.
_FIFTH = {"eps": "amsgrad", "dampening": "nesterov"}


def warn_of_torchs_order(known: Collection[str], args: Sequence[object]) -> None:
    """Warn of positional arguments that are probably in torch.optim's order.

    Args:
        known: Names of the constructor's parameters, in order, from `params` on.
        args: Its positional arguments.
    """
    first, second, third, ours = ([*known][2:6] + [""] * 4)[:4]
    if second != "weight_decay" or third not in _FIFTH or len(args) < 4:
        return
    decay, x, last = [*args[3:6], None, None][:3]
    if third == "eps":
        suspicious = _is_number(x) and not 0 < x < 1e-3
        suspicious = suspicious or (isinstance(decay, float) and 0 < decay <= 1e-7)
    else:
        # True and False are optimi's dampening; decay alone may be torch's dampening.
        alone = len(args) == 4 and _is_number(decay) and 0.1 <= decay <= 1
        suspicious = alone or _is_number(x)
    # Equal ones mean the same in both orders, but what follows them does not.
    theirs = _FIFTH[third]
    another = last is True and theirs != ours and theirs in known
    if (suspicious and decay != x) or (another and decay == x and _is_number(x)):
        names = [f"weight_decay={decay}", f"{third}={x}", f"{ours}={last}"]
        more = len(args) > 5
        checks.warn_user(
            f"{', '.join(names[: len(args) - 3][:3])} by position: torch.optim's "
            f"positional order is (lr, {first}, {third}, weight_decay"
            f"{f', {theirs}' * more}), ours (lr, {first}, weight_decay, {third}"
            f"{f', {ours}' * more}). Pass them by name"
        )


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, float | int) and not isinstance(x, bool)


def normalize_group(
    group: Group,
    defaults: Mapping[str, object],
    path_of: Callable[[Group, Tensor], object],
) -> None:
    """Check types of parameters and hyperparameters, and set max_lr and dtypes.

    `defaults` are the hyperparameters by name, in tuples where they are several.
    `path_of` names a parameter in errors.
    """
    params = group["params"]
    for p in () if checks.TAKEN.issuperset(map(_kind, params)) else params:
        if p.requires_grad:  # a frozen one may be in codes: its first gradient is checked
            checks.check_param(path_of(group, p), p)
    lr = group["lr"]
    check_numbers(group, defaults)
    if (group["decouple_lr"] or group["corrected_decay"]) and group["max_lr"] is None:
        # Set now, because a schedule will lower lr.
        group["max_lr"] = float(lr) or None
    elif isinstance(group["max_lr"], Tensor):
        group["max_lr"] = float(group["max_lr"])
    group["state_dtype"] = as_dtype(group["state_dtype"])
    if isinstance(storage := group["storage"], Storage):
        group["storage"] = storage._replace(moments=as_dtype(storage.moments))
    group_storage(group)


def check_numbers(group: Group, defaults: Mapping[str, object]) -> None:
    """Raise unless the hyperparameters are numbers, or tuples where `defaults` are."""
    for name, default in defaults.items():
        x = group[name]
        # The pure optimizer checks how many betas there are.
        many = isinstance(default, tuple) and isinstance(x, (tuple, list))
        numbers = tuple(map(checks.plain, x if many else (x,)))
        if _NUMBERS.issuperset(map(type, numbers)):
            continue
        scheduled = name not in UNSCHEDULED and any(map(callable, numbers))
        fit = scheduled or all([isinstance(n, Real | Tensor | None) for n in numbers])
        fit = fit and (x is not None or default is None)
        tensors = [n for n in numbers if isinstance(n, Tensor)]
        many = any([n.numel() != 1 or n.layout != torch.strided for n in tensors])
        if many or not fit or (name == "lr" and isinstance(x, bool)):
            what = f"Tensor {name} must be 1-element" if many else f"Invalid {name}"
            text = f"{what}: {name}={x!r}: allowed are numbers and tensors of one element"
            if callable(x):
                text += ". For a schedule use torch.optim.lr_scheduler"
            raise (ValueError if many else TypeError)(text)


def check_modes(group: Group) -> None:
    """Raise for options about how the step runs that exclude each other."""
    for name in ("gradient_release", "capturable"):
        checks.check_flag(name, group[name])
    for name in ("compile", "foreach", "triton", "fused"):
        checks.check_flag(name, group.get(name), none=True)
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True: allowed is False. The pure functions are "
            "differentiable: optimi_func.adamw_step and its kin, and optimi_func.unroll"
        )
    option = "foreach=True" if group["foreach"] else "compile=False"
    eager = group["foreach"] or group["compile"] is False
    if eager and (group["compile"] or group["triton"] or group.get("fused")):
        raise ValueError(
            f"{option} and compile=True (triton=True, fused=True) are two ways to run the "
            "step: choose one"
        )
    if group["foreach"] and group["gradient_release"]:
        checks.warn_user(
            "foreach=True updates many tensors at once, gradient_release=True one "
            "at a time: foreach is disabled, and steps run one by one, as with "
            "compile=False"
        )
        # Without compile=False the step would be compiled, which rounds differently.
        group.update(foreach=False, compile=False)


def likely_mistakes(
    groups: list[Group], bounds: list[FunctionalOptimizer], first: int
) -> list[str]:
    """Return warnings about probable mistakes in the groups from `first` on.

    Raises ValueError if a storage changes nothing in all groups that ask for it.
    """
    texts: list[str] = []
    # Checked over all groups, because one of them may have only float32 norms.
    by_storage: dict[Storage, tuple[list[Rule], list[Tensor]]] = {}
    storages = list(map(group_storage, groups))
    for storage, group, bound in zip(storages, groups, bounds):
        rules, params = by_storage.setdefault(storage, ([], []))
        rules.append(bound.rule)
        params += group["params"]
    for storage in dict.fromkeys(storages[first:]):
        rules, params = by_storage[storage]
        texts += check_stored(rules, storage, params)
    for storage, group, bound in list(zip(storages, groups, bounds))[first:]:
        texts += bound.likely_mistakes()
        texts += stuck_moments(group, bound)
        lr = group["lr"]
        if storage.param == "kahan8" and not isinstance(lr, Tensor) and 0 < lr < 2e-6:
            texts.append(
                f"lr={lr} with storage.param='kahan8': steps below 2^-16 of a "
                "weight are lost in its 24 bits: 'exact' keeps 32"
            )
    # One warning for all groups, with the largest value.
    decays = checks.decay_mistakes(
        [x for bound in bounds[first:] for x in bound.unscaled_decays]
    )
    return list(dict.fromkeys([*texts, *decays]))


def as_scalar(x: Any, params: Sequence[Tensor], capturable: bool) -> Any:
    """Convert a hyperparameter, or each of several, from a tensor to a Python number.

    It stays a 0-d float64 tensor if `capturable`, or if it is on the GPU of all `params`,
    because reading it would make the host wait for the GPU at every step.
    """
    if type(x) in PLAIN:
        return x
    if isinstance(x, (tuple, list)):
        many = [as_scalar(y, params, capturable) for y in x]
        return type(x)(*many) if is_hook(x) else tuple(many)
    if not isinstance(x, Tensor):
        return checks.plain(x)
    if x.numel() != 1:  # of an option that takes no tensor: the value refuses it
        return x
    near = x.is_cuda and bool(params) and all([p.device == x.device for p in params])
    return x.reshape(()).double() if capturable or near else x.item()


def param_groups_by_name(
    params: Iterable[tuple[str, Tensor]], options: Mapping[str, Mapping[str, object]]
) -> list[Group]:
    """Return param groups whose options are selected by patterns of parameter names.

    The result contains one group for each pattern, and one group for all parameters that no
    pattern selects. You can pass these groups to every optimizer class, including torch's
    classes. `Mixed` divides each group among its rules.

    Args:
        params: Named parameters, for example model.named_parameters().
        options: A dict from names or patterns (`fnmatch`) to options such as
            {"weight_decay": 0.0}. The first pattern that matches a parameter's name is
            used.

    Raises:
        ValueError: A pattern matches no parameter, or only parameters that earlier patterns
            have selected.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2))
    >>> options = {"0.*": {"betas": (0.9, 0.95)}}
    >>> options["*.bias"] = {"weight_decay": 0.0}
    >>> for group in param_groups_by_name(model.named_parameters(), options):
    ...     print([name for name, p in group.pop("params")], group)
    ['0.weight'] {'betas': (0.9, 0.95)}
    ['1.bias'] {'weight_decay': 0.0}
    ['1.weight'] {}
    """
    named = list(params)
    for pattern, own in options.items():
        if not isinstance(own, Mapping):
            raise TypeError(f"{pattern!r} has {own!r}: allowed are dicts of options")
    pattern_of = by_pattern("options", {k: k for k in options}, [n for n, _ in named], None)
    groups: list[Group] = [
        {**options.get(k or "", {}), "params": [x for x in named if pattern_of[x[0]] == k]}
        for k in (*options, None)
    ]
    return [group for group in groups if group["params"]]


def by_pattern(
    option: str, given: Mapping[str, T] | None, names: list[str], usual: T
) -> dict[str, T]:
    """Return, for each name, the value of the first pattern that it matches."""
    if not isinstance(given, Mapping | None):
        raise TypeError(f"{option}={given!r}: allowed is a dict of names or patterns")
    values: dict[str, T] = {}
    first: dict[str, str] = {}  # for each pattern that a name matches, the one that counts
    for name in names:
        hits = [k for k in given or {} if fnmatchcase(without_wrappers(name), k)]
        values[name] = (given or {})[hits[0]] if hits else usual
        first |= {k: hits[0] for k in hits if first.get(k) != k}
    for pattern in given or {}:
        if pattern not in first:
            raise ValueError(
                f"{option} has {pattern!r}, which is none of its parameters: allowed "
                f"are names and patterns of {names[-5:]} and the others"
            )
        if first[pattern] != pattern:
            raise ValueError(
                f"{option} has {pattern!r} behind {first[pattern]!r}, which matches all "
                "of its parameters, and the first counts: put it before"
            )
    return values


def names_of(groups: list[Group]) -> dict[Tensor, str]:
    """Return the name of each parameter of `named_groups`, or its place if it has none."""
    names: dict[Tensor, str] = {}
    for i, group in enumerate(groups):
        places = [f"{i}.{k}" for k in range(len(group["params"]))]
        own = map(without_wrappers, group.get("param_names", places))
        names.update(zip(group["params"], own))
    return names


def aligned(
    path_of: Callable[[Tensor], object], params: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """Return gradients with the placements of their parameters, not lazily conjugated."""
    for p, g in zip(params, grads):
        checks.check_grad(path_of(p), p, g)
    placed = [redistribute_like(path_of(p), p, g) for p, g in zip(params, grads)]
    return list(map(Tensor.resolve_conj, placed))


def check_capture(
    group: Group,
    path_of: Callable[[Group, Tensor], object],
    params: list[Tensor],
    states: Mapping[Tensor, Entry],
    names: Collection[str],
) -> None:
    """Raise if the replays of a CUDA graph would differ from steps."""
    if not group["capturable"]:
        raise RuntimeError(
            "a CUDA graph is being captured with capturable=False: all its replays "
            "would take the same step, with the numbers of now. Make the optimizer "
            "with capturable=True"
        )
    for p in params:
        if not states.get(p):
            raise RuntimeError(
                f"a CUDA graph is being captured before the first step of params"
                f"{path_of(group, p)}: each of its replays would make its state anew. "
                "Take a step, or call init_state(), before the capture"
            )
    home = params[0].device
    for name in names:
        for x in pytree.tree_leaves(group[name]):
            if isinstance(x, Tensor) and x.device != home:
                raise RuntimeError(
                    f"a CUDA graph is being captured with {name} a tensor on "
                    f"{x.device}, which its replays could not read: move it to {home}"
                )
    if not isinstance(group["lr"], Tensor):
        checks.warn_user(
            f"a CUDA graph is being captured with lr={group['lr']}, which all its "
            "replays will take: for a schedule make lr a tensor on the parameters' "
            "device and write to it"
        )


def check_skip(value: object) -> bool:
    """Return True if an option skip_nonfinite asks for whole steps."""
    if value is not False and value != "step":
        raise ValueError(
            f"skip_nonfinite={value!r}: allowed are False and 'step'. By parameter, "
            "skip_nonfinite=True, it is an option of prepare_for_gradient_release"
        )
    return value == "step"
