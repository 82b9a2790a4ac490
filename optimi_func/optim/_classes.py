"""The classes of torch.optim with this package's steps, and torch's modules with them."""

import inspect
import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import torch

from optimi_func import functional
from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.fields import made_field
from optimi_func.core.checks import bind_call

# What makes the steps torch's, where the defaults do not.
FORMS = {
    "Adafactor": {"torch_form": True},
    "Muon": {"ns_dtype": "bfloat16"},
    "RAdam": {"torch_form": True},
}


def with_torchs_names(name: str, above: dict[str, Any], module: str) -> Any:
    """Return a subclass of ours with the arguments and groups of torch's.

    Args:
        name: The class's in torch.optim and in this package.
        above: The subclasses that were made before. AdamW's base is one of these, because
            torch's AdamW is an Adam whose decay is decoupled.
        module: Where pickle finds the class.
    """
    theirs, ours = getattr(torch.optim, name), getattr(functional, name)
    base = above.get(theirs.__base__.__name__, ours)
    form, factory = FORMS.get(name, {}), base.factory
    names = factory.counterparts.torch_names
    keys = {own: key for key, own in names.items()}
    keywords = tuple([keys.get(x, x) for x in factory.keywords])
    parameters, fields = dict(inspect.signature(theirs).parameters), dict[str, Any]()
    fixed = {key: True for key in names if key not in parameters}
    for key, own in inspect.signature(ours).parameters.items():
        if key not in {*parameters, *keys}:
            default = form.get(key, own.default)
            parameters[key] = own.replace(kind=own.KEYWORD_ONLY, default=default)
    for x in parameters.values():
        fields[x.name] = made_field(x.name, x.annotation, x.default)
        fields[x.name].keyword = x.kind is x.KEYWORD_ONLY
    signature = inspect.Signature([*parameters.values()], return_annotation=None)

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        (_, params), *options = bind_call(name, signature, args, kwargs).items()
        BaseOptimizer.__init__(self, params, with_torchs_true(dict(options)) | fixed)

    def add_param_group(self: Any, param_group: Any) -> None:
        base.add_param_group(self, with_torchs_true(param_group))

    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[self, *parameters.values()]
    )
    own = {"keywords": keywords, "_our_names": names, "_fixed": fixed, "_declared": fields}
    doc = f"`{name}` with torch.optim.{name}'s arguments; our other options are by name."
    own |= {"__init__": __init__, "__doc__": doc, "__module__": module}
    own |= {"add_param_group": add_param_group} if "dampening" in parameters else {}
    cls: Any = type(name, (base,), own)
    cls._arguments = fields
    if hasattr(theirs, "share_memory"):
        type.__setattr__(cls, "share_memory", share_memory)  # no part of the rule
    return cls


def with_torchs_true(options: Any) -> Any:
    """Return options, with dampening=True as 1: ours takes the momentum then."""
    if isinstance(options, dict) and options.get("dampening") is True:
        options["dampening"] = 1.0
    return options


def share_memory(self: Any) -> None:
    """Make the state, and move its sums to memory that processes share."""
    self.init_state()
    for entry in self.state.values():
        entry["sum"].share_memory_()


def torchs_classes(module: str) -> dict[str, Any]:
    """Return the classes of torch.optim that this package has too, by name."""
    classes: dict[str, Any] = {}
    for name in torch.optim.__all__:
        # Classes alone: `torch.optim.functional` may have the name of a function of ours.
        if isinstance(getattr(torch.optim, name), type) and hasattr(functional, name):
            classes[name] = with_torchs_names(name, classes, module)
    functional.AdamW.register(classes["AdamW"])
    return classes


def torchs_modules(classes: dict[str, Any], module: str) -> dict[str, ModuleType]:
    """Register the modules of torch.optim under another name, with these classes.

    So `from optimi_func.optim.lr_scheduler import StepLR` finds its module.

    Returns:
        The modules that are attributes of torch.optim, by name.
    """
    for info in iter_modules(torch.optim.__path__):
        import_module(f"torch.optim.{info.name}")  # also if torch itself has not yet
    attributes: dict[str, ModuleType] = {}
    for name in [x for x in sys.modules if x.startswith("torch.optim.")]:
        theirs = sys.modules[name]
        short = name.removeprefix("torch.optim.")
        ours = {k: x for k, x in classes.items() if isinstance(vars(theirs).get(k), type)}
        found = theirs
        if ours:
            found = ModuleType(theirs.__name__)
            found.__dict__.update(vars(theirs) | ours)
        sys.modules[f"{module}.{short}"] = found
        if hasattr(torch.optim, short):
            attributes[short] = found
    return attributes
