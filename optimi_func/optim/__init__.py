"""torch.optim with this package's steps: `import optimi_func.optim as optim`.

The classes have torch.optim's names, order of arguments, defaults and results. They are
subclasses of this package's, whose options, such as `storage` and `compile`, they take by
name. All else is torch's own: schedulers, `swa_utils`, `Optimizer`, LBFGS, and SparseAdam,
because sparse gradients are refused here.

>>> import optimi_func.optim as optim
>>> w = torch.ones(2, requires_grad=True)
>>> optimizer = optim.SGD([w], 0.1, 0.9, 0, 0.5, compile=False)  # weight_decay=0.5
>>> scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
>>> optimizer.step(w.sum().backward)
>>> w.detach()
tensor([0.8500, 0.8500])
"""

import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from optimi_func import functional
from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.checks import bind_call

__all__ = [*torch.optim.__all__]  # pyright: ignore[reportUnsupportedDunderAll]

# What makes the steps torch's, where the defaults do not.
_FORMS = {
    "Adafactor": {"torch_form": True},
    "Muon": {"ns_dtype": "bfloat16"},
    "RAdam": {"torch_form": True},
}


def _with_torchs_names(name: str) -> Any:
    """Return a subclass of ours with the arguments and groups of torch's."""
    theirs, ours = getattr(torch.optim, name), getattr(functional, name)
    # AdamW is an Adam whose decay is decoupled.
    base = globals().get(theirs.__base__.__name__, ours)
    form, factory = _FORMS.get(name, {}), base.factory
    names = factory.counterparts.torch_names
    keys = {own: key for key, own in names.items()}
    keywords = tuple([keys.get(x, x) for x in inspect.signature(factory).parameters])
    parameters = dict(inspect.signature(theirs).parameters)
    fixed = {key: True for key in names if key not in parameters}
    for key, own in inspect.signature(ours).parameters.items():
        if key not in {*parameters, *keys}:
            default = form.get(key, own.default)
            parameters[key] = own.replace(kind=own.KEYWORD_ONLY, default=default)
    signature = inspect.Signature([*parameters.values()], return_annotation=None)

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        (_, params), *options = bind_call(name, signature, args, kwargs).items()
        BaseOptimizer.__init__(self, params, _with_torchs_true(dict(options)) | fixed)

    def add_param_group(self: Any, param_group: Any) -> None:
        base.add_param_group(self, _with_torchs_true(param_group))

    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[self, *parameters.values()]
    )
    own = {"keywords": keywords, "_our_names": names, "_fixed": fixed}
    own["_declared"] = parameters
    doc = f"`{name}` with the arguments of torch.optim.{name}, and by name our others."
    own |= {"__init__": __init__, "__doc__": doc, "__module__": __name__}
    own |= {"add_param_group": add_param_group} if "dampening" in parameters else {}
    cls: Any = type(name, (base,), own)
    cls._parameters = parameters
    if hasattr(theirs, "share_memory"):
        type.__setattr__(cls, "share_memory", _share_memory)  # no part of the rule
    return cls


def _with_torchs_true(options: Any) -> Any:
    """Return options, with dampening=True as 1: ours takes the momentum then."""
    if isinstance(options, dict) and options.get("dampening") is True:
        options["dampening"] = 1.0
    return options


def _share_memory(self: Any) -> None:
    """Make the state, and move its sums to memory that processes share."""
    self.init_state()
    for entry in self.state.values():
        entry["sum"].share_memory_()


def _with_our_classes(module: ModuleType) -> ModuleType:
    """Return a module of torch.optim's, or one like it that has classes of ours."""
    own = {k: x for k, x in globals().items() if k in __all__ and hasattr(module, k)}
    if not own:
        return module
    ours = ModuleType(module.__name__)
    ours.__dict__.update(vars(module) | own)
    return ours


if TYPE_CHECKING:
    from torch.optim import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:
    for _name in __all__:
        if hasattr(functional, _name):
            globals()[_name] = _with_torchs_names(_name)
    functional.AdamW.register(globals()["AdamW"])
    # `from optimi_func.optim.lr_scheduler import StepLR` finds its module here.
    for _name in [x for x in sys.modules if x.startswith("torch.optim.")]:
        _module = _with_our_classes(sys.modules[_name])
        sys.modules[_name.replace("torch.optim", __name__, 1)] = _module
    del _name, _module

    def __getattr__(name: str) -> Any:
        """Return what torch.optim has besides."""
        return getattr(torch.optim, name)

    def __dir__() -> list[str]:
        """Return the names of torch.optim and of this module."""
        return [*{*globals(), *dir(torch.optim)}]
