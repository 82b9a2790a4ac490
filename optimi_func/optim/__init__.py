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
from typing import TYPE_CHECKING, Any

import torch

from optimi_func import optimizers
from optimi_func.core.checks import bind_call
from optimi_func.state.convert import Group

__all__ = [*torch.optim.__all__]  # pyright: ignore[reportUnsupportedDunderAll]

# Our names of arguments that torch calls otherwise.
_NAMES = {
    "Adafactor": {"d": "clip_threshold", "beta2_decay": "decay_rate"},
    "Adam": {"decoupled_weight_decay": "decouple_wd"},
    "NAdam": {"decoupled_weight_decay": "decouple_wd"},
    "RAdam": {"decoupled_weight_decay": "decouple_wd"},
}
# What makes the steps torch's, where the defaults do not.
_FORMS = {
    "Adafactor": {"torch_form": True},
    "Muon": {"ns_dtype": "bfloat16"},
    "RAdam": {"torch_form": True},
}


def _with_torchs_arguments(name: str) -> object:
    """Return a subclass of our class with the constructor of torch's."""
    ours, theirs = getattr(optimizers, name), getattr(torch.optim, name)
    names, form = _NAMES.get(name, {}), _FORMS.get(name, {})
    parameters = dict(inspect.signature(theirs).parameters)
    for key, own in inspect.signature(ours).parameters.items():
        if key not in {*parameters, *names.values()}:
            default = form.get(key, own.default)
            parameters[key] = own.replace(kind=own.KEYWORD_ONLY, default=default)
    signature = inspect.Signature([*parameters.values()], return_annotation=None)

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        arguments = bind_call(name, signature, args, kwargs)
        ours.__init__(self, **{names.get(key, key): x for key, x in arguments.items()})

    def add_param_group(self: Any, param_group: Group) -> None:
        for key in names.keys() & {*param_group}:
            param_group[names[key]] = param_group.pop(key)
        ours.add_param_group(self, param_group)

    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[self, *parameters.values()]
    )
    doc = f"`{name}` with the arguments of torch.optim.{name}, and by name our others."
    own = {"__init__": __init__, "add_param_group": add_param_group, "__doc__": doc}
    return type(name, (ours,), {**own, "__module__": __name__})


if TYPE_CHECKING:
    from torch.optim import ASGD as ASGD
    from torch.optim import LBFGS as LBFGS
    from torch.optim import SGD as SGD
    from torch.optim import Adadelta as Adadelta
    from torch.optim import Adafactor as Adafactor
    from torch.optim import Adagrad as Adagrad
    from torch.optim import Adam as Adam
    from torch.optim import Adamax as Adamax
    from torch.optim import AdamW as AdamW
    from torch.optim import Muon as Muon
    from torch.optim import NAdam as NAdam
    from torch.optim import Optimizer as Optimizer
    from torch.optim import RAdam as RAdam
    from torch.optim import RMSprop as RMSprop
    from torch.optim import Rprop as Rprop
    from torch.optim import SparseAdam as SparseAdam
    from torch.optim import lr_scheduler as lr_scheduler
    from torch.optim import swa_utils as swa_utils
else:
    for _name in __all__:
        if hasattr(optimizers, _name):
            globals()[_name] = _with_torchs_arguments(_name)
    del _name

    def __getattr__(name: str) -> Any:
        """Return what torch.optim has besides."""
        return getattr(torch.optim, name)
