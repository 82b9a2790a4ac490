"""torch.optim with this package's steps: `import optimi_func.optim as optim`.

The classes have the names, order of arguments, defaults and results of torch.optim. They
are subclasses of the classes of this package, and accept the options of these classes, such
as `storage` and `compile`, by name. Everything else is torch's own object: schedulers,
`swa_utils`, `Optimizer`, LBFGS, SparseAdam (because this package does not support sparse
gradients), and, from torch 2.15 on, `functional`, whose functions write to their arguments.
The pure functions of this package are in `optimi_func.functional`. This module has no
public name that torch.optim does not have, because the next release of torch might use such
a name for something else.

>>> import optimi_func.optim as optim
>>> w = torch.ones(2, requires_grad=True)
>>> optimizer = optim.SGD([w], 0.1, 0.9, 0, 0.5, compile=False)  # weight_decay=0.5
>>> scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
>>> optimizer.step(w.sum().backward)
>>> w.detach()
tensor([0.8500, 0.8500])
"""

import typing as _typing

import torch as _torch

from optimi_func.optim import _classes

__all__ = [*_torch.optim.__all__]  # pyright: ignore[reportUnsupportedDunderAll]

if _typing.TYPE_CHECKING:
    from torch.optim import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:
    _own = _classes.torchs_classes(__name__)
    globals().update(_own | _classes.torchs_modules(_own, __name__))

    def __getattr__(name: str) -> _typing.Any:
        """Return what torch.optim has besides."""
        if name == "functional" and not hasattr(_torch.optim, name):
            raise AttributeError(
                f"torch.optim.functional is new in torch 2.15, and this is torch "
                f"{_torch.__version__}. The pure functions of this package, which have "
                "other arguments, are in optimi_func.functional"
            )
        return getattr(_torch.optim, name)

    def __dir__() -> list[str]:
        """Return the names of torch.optim and of this module."""
        return [*{*globals(), *dir(_torch.optim)}]
