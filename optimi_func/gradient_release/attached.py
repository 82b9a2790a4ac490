"""The handles that have hooks on which models and parameters."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimi_func.core import torch_private

if TYPE_CHECKING:
    from optimi_func.gradient_release.handle import GradientRelease


class Attached(NamedTuple):
    """The release that a hook belongs to, and the way to remove the hook without it."""

    release: "ReferenceType[GradientRelease]"
    removers: list[RemovableHandle]


# Weak dictionaries instead of attributes, which copies of a model would share.
by_model: "WeakKeyDictionary[nn.Module, list[GradientRelease]]" = WeakKeyDictionary()
by_hook: "WeakKeyDictionary[Callable[..., object], Attached]" = WeakKeyDictionary()


def releases_of(model: nn.Module) -> "list[GradientRelease]":
    """Find a model's releases, even if made for another module with its parameters."""
    params = set(model.parameters())
    releases = [x for x in releases_on(params) if params.issuperset(x.params.values())]
    return list(dict.fromkeys([*by_model.get(model, []), *releases]))


def releases_on(params: Iterable[Tensor]) -> "list[GradientRelease]":
    """Find the releases that have hooks on any of these parameters."""
    hooks = [hook for p in params for hook in torch_private.accumulate_hooks(p)]
    releases = [by_hook[hook].release() for hook in hooks if hook in by_hook]
    return list(dict.fromkeys([release for release in releases if release is not None]))


def has_foreign_hooks(p: Tensor) -> bool:
    """Return True if other code has hooks on p; remove hooks whose release is gone."""
    foreign = False
    for hook in torch_private.accumulate_hooks(p):
        attached = by_hook.get(hook)
        if attached is None:
            foreign = True
        elif attached.release() is None:
            for remover in attached.removers:
                remover.remove()
    return foreign
