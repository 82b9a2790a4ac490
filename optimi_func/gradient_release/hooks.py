"""Whose hooks are on a model's parameters: those of releases, and of others."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimi_func import _torch

if TYPE_CHECKING:
    from optimi_func.gradient_release.handle import GradientRelease

# Caches, not on the model or its parameters, whose copies would carry them along: which
# releases a model has,
_attached: "weakref.WeakKeyDictionary[nn.Module, list[GradientRelease]]" = (
    weakref.WeakKeyDictionary()
)
# which release a hook is of, and how to take it off where that release is gone.
_releases: "weakref.WeakKeyDictionary[Any, weakref.ref[GradientRelease]]" = (
    weakref.WeakKeyDictionary()
)
_removers: "weakref.WeakKeyDictionary[Any, list[RemovableHandle]]" = (
    weakref.WeakKeyDictionary()
)


def attach(
    release: "GradientRelease",
    model: nn.Module,
    hook: Any,
    removers: list[RemovableHandle],
) -> None:
    """Remember a release as the model's, and as the one of the hook on its parameters."""
    _attached.setdefault(model, []).append(release)
    _releases[hook] = weakref.ref(release)
    _removers[hook] = list(removers)


def detach(release: "GradientRelease", model: nn.Module) -> None:
    """Forget that the release is the model's."""
    _attached[model] = [x for x in _attached.get(model, []) if x is not release]


def releases_of(model: nn.Module) -> "list[GradientRelease]":
    """The model's, also those made through another module around its parameters."""
    found = list(_attached.get(model, []))
    params = set(model.parameters())
    for release in releases_on(params):
        if release not in found and params.issuperset(release.params.values()):
            found.append(release)
    return found


def releases_on(params: Iterable[Tensor]) -> "list[GradientRelease]":
    """The releases that have hooks on any of these."""
    found: dict[int, GradientRelease] = {}
    for p in params:
        for hook in _torch.accumulate_hooks(p):
            release = _releases[hook]() if hook in _releases else None
            if release is not None:
                found[id(release)] = release
    return list(found.values())


def has_hooks_of_others(p: Tensor) -> bool:
    """Whether anybody but a release has hooks on p; those of a dead one are taken off."""
    others = False
    for hook in _torch.accumulate_hooks(p):
        release = _releases.get(hook)
        others |= release is None
        if release is not None and release() is None:
            for remover in _removers[hook]:
                remover.remove()
    return others
