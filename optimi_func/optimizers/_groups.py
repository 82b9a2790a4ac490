"""Param groups: what is allowed in one, its numbers, and how errors call its parameters.

A group is the dict that torch.optim keeps: its parameters, the numbers under torch's names,
and the options that say how the step is carried out.
"""

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from operator import is_, itemgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from optimi_func._checks import check_param, decay_mistakes, stuck_moments, warn_user
from optimi_func._codes import NEAREST, dither_at
from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import Scalar, Scalars, Storage
from optimi_func._storage import check_stored, storage_of
from optimi_func.execution.executors import Executor

Group: TypeAlias = dict[str, Any]


def plain_number(x: Any) -> Any:
    """An option as Python has it, where it is numpy's, or a sequence of whatever kind.

    Json can write it.
    """
    if isinstance(x, bool | str | Tensor | Storage) or x is None:
        return x
    if isinstance(x, torch.dtype):  # json has none
        return str(x)
    if getattr(x, "shape", None) == ():  # numpy's
        x = x.item()
    if isinstance(x, Real):
        return int(x) if isinstance(x, Integral) else float(x)
    if isinstance(x, Sequence) or getattr(x, "ndim", None) == 1:
        return tuple(map(plain_number, x))
    return x


def check_torchs_own(fused: Any, differentiable: Any) -> None:
    """Refuse what torch's classes offer by these names, and say what does it here.

    Raises:
        ValueError: One of the two is true.
    """
    if fused:
        raise ValueError(
            f"fused={fused!r}: allowed are None and False. compile=True is this package's "
            "fused step, and it is the default where a compiler is found"
        )
    if differentiable:
        raise ValueError(
            f"differentiable={differentiable!r}: allowed is False. The pure functions are "
            "differentiable: optimi_func.adamw_step and its kin, and optimi_func.unroll"
        )


def check_group(group: Group, keywords: tuple[str, ...]) -> None:
    """Refuse parameters and numbers of types that no step takes, and settle max_lr.

    Args:
        group: The group; `max_lr` is written into it.
        keywords: The numbers that the optimizer takes.

    Raises:
        TypeError, ValueError: What is not allowed, by its name and value.
    """
    names = group.get("param_names") or range(len(group["params"]))
    for name, p in zip(names, group["params"]):
        check_param(f"[{name!r}]", p)
    lr = group["lr"]
    for name in keywords:
        x = group[name]
        # As many as there have to be, the optimizer's own check counts.
        numbers = x if name == "betas" and isinstance(x, tuple | list) else (x,)
        unfit = not all(map(_is_host, numbers)) or (x is None and name != "max_lr")
        if unfit or (name == "lr" and isinstance(x, bool)):
            raise TypeError(
                f"Invalid {name}: {name}={group[name]!r}: allowed are numbers and "
                "tensors of one element"
            )
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"Tensor lr must be 1-element: lr={lr}: allowed is a number or a tensor "
            "of one element"
        )
    if (group["decouple_lr"] or group["corrected_decay"]) and group["max_lr"] is None:
        # The max_lr of every step to come, resolved before a schedule lowers lr.
        group["max_lr"] = float(lr)
        if group["max_lr"] == 0.0:
            group["max_lr"] = None
    elif isinstance(group["max_lr"], Tensor):
        group["max_lr"] = float(group["max_lr"])
    group["state_dtype"] = _as_dtype(group["state_dtype"])
    if isinstance(storage := group["storage"], Storage):
        group["storage"] = storage._replace(moments=_as_dtype(storage.moments))
    group_storage(group)


def group_storage(group: Group) -> Storage:
    """How a group's parameters and moments are kept.

    Raises:
        ValueError, TypeError: An unknown storage, or one beside its shorthands.
    """
    return storage_of(group["storage"], group["kahan_sum"], group["state_dtype"])


def _as_dtype(x: Any) -> Any:
    """A dtype of torch's from its name."""
    found = getattr(torch, x.removeprefix("torch."), x) if isinstance(x, str) else x
    return found if isinstance(found, torch.dtype) else x


def _is_host(x: Any) -> bool:
    return x is None or isinstance(x, Real | Tensor)


def check_modes(group: Group) -> None:
    """Refuse options on how the step runs that exclude each other.

    foreach yields to gradient_release, with a warning at the caller of add_param_group.
    """
    for name in ("compile", "foreach", "triton", "kahan_sum"):
        if group[name] not in (None, True, False):
            raise TypeError(
                f"Invalid {name}: {name}={group[name]!r}: allowed are None, True and False"
            )
    if group["compile"] is False and group["triton"]:
        raise ValueError(
            "triton=True asks for the compiled step and compile=False for the eager "
            "one: choose one"
        )
    if group["foreach"] and (group["compile"] or group["triton"]):
        raise ValueError(
            "foreach=True and compile=True (or triton=True) are two ways to run the "
            "step: choose one"
        )
    if group["foreach"] and group["gradient_release"]:
        warn_user(
            "foreach=True updates many tensors at once, gradient_release=True one "
            "at a time: foreach is disabled",
        )
        group["foreach"] = False


def likely_mistakes(
    groups: list[Group], bounds: list[FunctionalOptimizer], first: int
) -> list[str]:
    """What is allowed in new groups, but hardly meant: each text once.

    Args:
        groups: All groups.
        bounds: The numbers of each.
        first: The first of the new ones.

    Raises:
        ValueError: A storage that changes nothing about any group that asks for it.
    """
    found: list[str] = []
    # A storage may be for one group's parameters alone, as where norms are float32.
    asked: dict[Storage, tuple[list[Any], list[Tensor]]] = {}
    storages = list(map(group_storage, groups))
    for storage, group, bound in zip(storages, groups, bounds):
        rules, params = asked.setdefault(storage, ([], []))
        rules.append(bound.rule)
        params += group["params"]
    for storage in dict.fromkeys(storages[first:]):
        rules, params = asked[storage]
        found += check_stored(rules, storage, params)
    for storage, group, bound in list(zip(storages, groups, bounds))[first:]:
        decay = decay_mistakes([(bound.decay, bound.weight_decay)])
        found += [text for text in bound.likely_mistakes() if text not in decay]
        kept = {storage.moments or p.dtype for p in group["params"]}
        dtypes = {x for x in kept if isinstance(x, torch.dtype)}
        found += stuck_moments(bound.narrow_betas, dtypes)
        lr = group["lr"]
        if storage.param == "kahan8" and not isinstance(lr, Tensor) and 0 < lr < 2e-6:
            found.append(
                f"lr={lr} with storage.param='kahan8': steps below 2^-16 of a "
                "weight are lost in its 24 bits: 'exact' keeps 32"
            )
    # One warning for all groups, with the highest.
    decays = decay_mistakes([(bound.decay, bound.weight_decay) for bound in bounds[first:]])
    return list(dict.fromkeys([*found, *decays]))


def on_host(x: Any) -> Any:
    """A number of a group as a Python number."""
    return x.item() if isinstance(x, Tensor) else x


def on_device(x: Any) -> Any:
    """A number of a group; a tensor stays on its device, as a 0-d float64."""
    return x.reshape(()).double() if isinstance(x, Tensor) else x


def unwaited(params: list[Tensor]) -> Callable[[Any], Any]:
    """As `on_host`, but for a tensor on the GPU of these parameters: it stays there.

    The host would wait at every step for whatever the GPU still has to do.
    """

    def number(x: Any) -> Any:
        stays = isinstance(x, Tensor) and x.is_cuda
        stays = stays and all([p.device == x.device for p in params])
        return on_device(x) if stays else on_host(x)

    return number


class GroupNumbers:
    """The numbers of an optimizer's groups, bound to its rule and kept while they last.

    Args:
        factory: Makes the optimizer as a value.
        keywords: What the factory takes, read from a group; lr first.
    """

    def __init__(
        self, factory: Callable[..., FunctionalOptimizer], keywords: tuple[str, ...]
    ) -> None:
        self._factory, self._keywords = factory, keywords
        self._given: itemgetter[Any] = itemgetter(*keywords)
        self._bound: dict[int, tuple[Any, Any]] = {}

    def keywords(self, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the factory of a group takes, and what of it are no numbers."""
        del group
        return self._keywords, getattr(self._factory, "choices", ())

    def tensors(self, group: Group) -> list[tuple[str, Tensor]]:
        """Those of the group's numbers that are tensors, by name."""
        given = zip(self._keywords, self._given(group))
        flat = [
            (k, y) for k, x in given for y in (x if isinstance(x, tuple | list) else (x,))
        ]
        return [(name, x) for name, x in flat if isinstance(x, Tensor)]

    def bind(self, group: Group, number: Callable[[Any], Any]) -> FunctionalOptimizer:
        """The group's numbers as they are now, bound to the rule.

        Args:
            group: The group.
            number: What becomes of each: `on_host`, `on_device` or `unwaited(...)`.

        Raises:
            ValueError: A number out of its range.
        """
        given = self._given(group)
        last, bound = self._bound.get(id(group), (None, None))
        # Numbers that are the same objects as before need not be checked again.
        if last is not None and all(map(is_, given[1:], last[1:])):
            if given[0] is last[0]:
                return bound
            if type(given[0]) is float:
                bound = bound.with_lr(given[0])
                self._bound[id(group)] = given, bound
                return bound
        chosen = {name: _resolved(group[name], number) for name in self._keywords}
        bound = self._factory(**chosen)
        flat = [y for x in given for y in (x if isinstance(x, tuple) else (x,))]
        mutable = any(isinstance(x, Tensor | list) for x in flat)
        self._bound[id(group)] = None if mutable else given, bound
        return bound


def _resolved(x: Any, number: Callable[[Any], Any]) -> Any:
    return tuple(number(y) for y in x) if isinstance(x, tuple | list) else number(x)


def scalars_after(
    bound: FunctionalOptimizer, counts: list[tuple[Any, Any]], coded: bool
) -> tuple[list[Scalars], list[Any]]:
    """The numbers of the steps that follow these counts, and the running ones after them.

    Args:
        bound: The group's.
        counts: Steps taken, and the running numbers after them.
        coded: Whether any state is kept in codes, which are rounded by a number too.
    """
    lr, decay = cast(tuple[Scalar, Scalar], (bound.lr, bound.weight_decay))
    now = bound.rates(lr, decay, bound.max_lr)
    numbers_of = bound.rule.running
    found: list[Scalars] = []
    after: list[Any] = []
    for count, running in counts:
        t = (count.double() if isinstance(count, Tensor) else count) + 1.0
        coeffs, running = bound.advance(t, numbers_of(*running))
        found.append(Scalars(coeffs, now, dither_at(t) if coded else NEAREST))
        after.append(running)
    return found, after


def executor_of(group: Group) -> Executor:
    """How the group's options ask for the step to be run."""
    if group["foreach"]:
        return "foreach"
    if group["compile"] is False:
        return "eager"
    return "kernels" if group["compile"] or group["triton"] else "auto"


def named_params(group: Group) -> list[tuple[str, Tensor]]:
    """The group's parameters with their names.

    Raises:
        ValueError: Parameters without names.
    """
    if group["params"] and "param_names" not in group:
        raise ValueError(
            "this optimizer's parameters have no names: make it with "
            "model.named_parameters()"
        )
    return list(zip(group.get("param_names", ()), group["params"]))


def first_param(groups: list[Group]) -> Tensor:
    """Any parameter; a tensor of its own where there is none."""
    for group in groups:
        if group["params"]:
            return group["params"][0]
    return torch.empty(0)


class Path:
    """How errors call a parameter: by its name, or its place in the group.

    Found when it is asked for: of ten thousand parameters each would look through all.
    """

    def __init__(self, group: Group, p: Tensor) -> None:
        self._group, self._p = group, p

    def __str__(self) -> str:
        index = next(i for i, q in enumerate(self._group["params"]) if q is self._p)
        names = self._group.get("param_names")
        return f"[{(names[index] if names else index)!r}]"
