"""Argument checks, and warnings about arguments that are allowed but probably a mistake.

Every error names the argument, its value and what is allowed. The pure functions and the
classes share these checks, which know no optimizer.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from numbers import Integral, Rational, Real
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from optimi_func.core.rule import (
    DecayKind,
    PureOptimizer,
    Rule,
    check_pure,
    has_init_and_step,
    is_pure,
)
from optimi_func.core.runtime import runtime
from optimi_func.core.torch_private import (
    dispatch_modes,
    has_memory,
    in_compiled_region,
    is_plain,
    level_of,
    transform_level,
)

K = TypeVar("K")
# A factory takes hyperparameters by name: adamw, a partial of it, the user's lambda.
Optimizer: TypeAlias = PureOptimizer | Callable[..., PureOptimizer]

_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = (*_REAL, torch.complex64, torch.complex128)
TAKEN = {(dtype, torch.strided) for dtype in _DTYPES}  # of parameters
IDLE_KAHAN = "kahan_sum=True has no effect: no parameter is float16 or bfloat16."


def bind_call(
    name: str, signature: inspect.Signature, args: Any, kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Return all arguments of a constructor's call. Raise TypeError in the class's name."""
    takes = signature.parameters
    for key in kwargs.keys() - takes.keys():
        allowed = [x for x in takes if x != "self"]
        near = get_close_matches(key, allowed, 1)
        meant = f": did you mean {near[0]!r}?" if near else f": allowed are {allowed}"
        raise TypeError(f"{name} has no argument {key!r}{meant}")
    first = next(iter(takes.values()))
    usual = len(args) == 1 and first.kind != first.KEYWORD_ONLY and first.name not in kwargs
    if usual:  # params alone have no keyword: `bind` would take several times as long
        values = {name: x.default for name, x in takes.items()}
        values = {**values, first.name: args[0], **kwargs}
        if not any([x is inspect.Parameter.empty for x in values.values()]):
            return values
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        display = inspect.Signature([x.replace(annotation=x.empty) for x in takes.values()])
        raise TypeError(f"{error} of {name}{display}") from None
    bound.apply_defaults()
    return bound.arguments


def check_number(
    label: str,
    name: str,
    value: object,
    below: float | None = None,
    least: float = 0.0,
    most: float | None = None,
    above: float | None = None,
) -> None:
    """Raise if a hyperparameter is not a number, or is out of its range.

    Schedules are not checked, and neither are tensors on a GPU or inside a trace, whose
    values are not read. The error message begins with "Invalid {label}: {name}={value}".

    Args:
        label: A description of the hyperparameter, such as "momentum factor".
        name: The name of the argument.
        value: A number, a real 0-d tensor or a schedule.
        below: The value has to be smaller than this. None means that there is no such
            bound.
        least: The value has to be at least this, if `above` is None.
        most: The value has to be at most this, which may be inf. None means that the value
            has to be finite.
        above: The value has to be larger than this.
    """
    if isinstance(value, Tensor) and not (value.is_complex() or value.dtype == torch.bool):
        if (value := value_of(value)) is None:
            return
    elif callable(value):
        return
    if type(value) is not float and (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or (isinstance(value, Rational) and not isinstance(value, Integral))
    ):
        check_no_tree(name, value)
        raise TypeError(
            f"Invalid {label}: {name}={shown(value)}: allowed are numbers and real 0-d "
            "tensors, and in the pure API schedules"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # Comparisons only: under Dynamo math.isfinite would recompile for each value.
    fits = number >= least if above is None else number > above
    fits = fits and number <= (sys.float_info.max if most is None else most)
    if not (fits and (below is None or number < below)):
        allowed = f"at least {least}" if above is None else f"above {above}"
        allowed = allowed if most == math.inf else f"finite, {allowed}"
        allowed += "" if below is None else f" and below {below}"
        allowed += "" if most is None else f" and at most {most}"
        raise ValueError(f"Invalid {label}: {name}={value}: allowed is {allowed}")


def plain(x: Any) -> Any:
    """Convert numpy's numbers and 0-d arrays, also in a tuple, to Python numbers."""
    if type(x) in (float, bool):
        return x
    if type(x) is tuple:
        return tuple(map(plain, x))
    boxed = not isinstance(x, Tensor) and getattr(x, "shape", None) == ()
    return x.item() if boxed else x


def check_process_group(group: object) -> "distributed.ProcessGroup | None":
    """Return a process group, or None if it has one process. Raise for other values."""
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"Invalid process_group: process_group={group!r}: allowed are None and a group "
            "of torch.distributed that this process is in, such as distributed.group.WORLD"
        )
    return group if group is not None and group.size() > 1 else None


def check_whole(name: str, value: object, least: int, none: bool = False) -> None:
    """Raise if value is no integer from `least` on, nor, if `none`, None."""
    if not (none and value is None) and (type(value) is not int or value < least):
        allowed = f"whole numbers from {least}" + ", and None" * none
        raise ValueError(f"{name}={value!r}: allowed are {allowed}")


def check_flag(name: str, value: object, none: bool = False) -> None:
    """Raise if value is neither True nor False, nor, if `none`, None.

    0 and 1 are flags, as in files of settings. 1.0 was meant for another argument.
    """
    if value is True or value is False:
        return
    flags = True, False, *[None] * none
    if isinstance(value, Tensor | str | float) or value not in flags:
        allowed = "None, True and False" if none else "True and False"
        raise TypeError(f"Invalid {name}: {name}={value!r}: allowed are {allowed}")


def check_module(caller: str, model: object) -> None:
    """Raise if a function's model is no module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model={shown(model)}: allowed is a torch.nn.Module")


def value_of(x: Tensor) -> float | None:
    """Return a 0-d tensor's value; None in a trace, or if reading it would wait or fail."""
    if torch.compiler.is_compiling() or x.dim() != 0 or x.device.type != "cpu":
        return None
    traced = transform_level() > 0 or level_of(x) != -1 or dispatch_modes() > 0
    return None if traced or not is_plain(x) else float(x.item())


def check_no_tree(name: str, value: object) -> None:
    """Raise if a number is a tree, of parts of the parameters."""
    if isinstance(value, dict):
        raise TypeError(
            f"Invalid {name}: {name}={value!r}: allowed as trees are lr and weight_decay "
            "of the pure API. transforms.partition has an optimizer for each part of the "
            "parameters"
        )


def shown(x: object) -> str:
    """Return the repr of a host value, or the type of a tensor or container."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype}"
    plain = x is None or isinstance(x, str | bool | int | float | complex)
    return repr(x) if plain else f"a {type(x).__name__}"


def check_source(name: str, x: object, target: Tensor) -> None:
    """Raise unless x is a tensor whose elements can be copied to a parameter."""
    allowed = "allowed are dense tensors with memory"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {shown(x)}: {allowed}")
    if x.layout != torch.strided or (x.is_meta and not target.is_meta):
        raise TypeError(f"{name} is {shown(x)}, {x.layout} on {x.device}: {allowed}")


def check_no_module(params: object) -> None:
    """Raise if an optimizer is given a module in place of its parameters."""
    module = isinstance(params, torch.nn.Module)
    if module and not isinstance(params, torch.nn.ParameterList):
        raise TypeError(
            "params is a module: pass model.named_parameters(), or parameters()"
        )


def check_param(path: object, p: object) -> None:
    """Raise if p is no strided, floating or complex tensor of at least 16 bits a number."""
    if isinstance(p, Tensor) and (p.dtype, p.layout) in TAKEN:
        return
    if isinstance(p, torch.nn.Module):
        raise TypeError(
            f"params{path} is the module {type(p).__name__}: pass its parameters, "
            "dict(model.named_parameters())"
        )
    if not isinstance(p, Tensor):
        instead = ""
        if isinstance(p, Iterator):
            instead = ": pass a dict or list, such as dict(model.named_parameters())"
        elif is_dataclass(p):
            instead = ": register its class by torch.utils._pytree.register_dataclass"
        raise TypeError(f"params{path} is {shown(p)}, which is not a tensor{instead}")
    why = f"layout {p.layout}: allowed is strided"
    if not (p.is_floating_point() or p.is_complex()):
        why = f"dtype {p.dtype}: allowed are floating and complex ones"
    elif p.dtype not in _DTYPES:
        why = f"dtype {p.dtype}: allowed are those of 16 bits or more, and not complex32"
    raise TypeError(f"params{path} has {why}")


def missing(name: str) -> NoReturn:
    """Raise for a name that the package lacks: this is its `__getattr__`."""
    text, instead = f"module 'optimi_func' has no attribute {name!r}", ""
    if name[0] != "_" and hasattr(torch.optim, name):
        hint = ", or for your own optimi_func.rules.Optimizer" * (name == "Optimizer")
        instead = f": use torch.optim.{name}{hint}"
    elif name[0] != "_":
        names = [x for x in vars(sys.modules["optimi_func"]) if x[0] != "_"]
        spellings = {x.lower(): x for x in names if x[0].isupper() == name[0].isupper()}
        if name.lower() in spellings:
            instead = f": did you mean {spellings[name.lower()]!r}?"
    kind = AttributeError
    if instead and sys._getframe(1).f_code.co_name == "_handle_fromlist":
        kind = ImportError  # `from ... import` would replace the other's text
    raise kind(text + instead, name=name)


def check_taken(rule: Rule, path: object, p: Tensor) -> None:
    """Raise if the rule refuses the parameter's shape, or complex numbers."""
    if p.is_complex() and (rule.whole is not None or rule.whole_fields):
        does = "keeps a Number of tensors" if rule.whole is None else "maps whole matrices"
        raise TypeError(
            f"params{path} has dtype {p.dtype}: {rule.name} {does} of real "
            "numbers. Allowed for complex parameters are elementwise rules, such as adamw"
        )
    why = None if rule.refuses is None else rule.refuses(p)
    if why is not None:
        raise ValueError(f"params{path} has shape {tuple(p.shape)}: {why}")


def check_grad(path: object, p: Tensor, g: object) -> None:
    """Raise if a gradient does not fit its parameter. No gradient (None) fits."""
    if g is None:
        return
    if not isinstance(g, Tensor):
        raise TypeError(f"grads{path} is {shown(g)}, which is neither a tensor nor None")
    if g.layout != torch.strided:
        sparse = ". Sparse gradients are for torch.optim.SparseAdam"
        text = f"grads{path} has layout {g.layout}: allowed is strided"
        raise TypeError(text + sparse * (g.layout == torch.sparse_coo))
    if not (g.is_complex() if p.is_complex() else g.is_floating_point()):
        kind = "complex" if p.is_complex() else "floating"
        raise TypeError(f"grads{path} has dtype {g.dtype}: allowed are {kind} ones")
    if g.dtype != p.dtype and torch.finfo(g.dtype).bits < torch.finfo(p.dtype).bits:
        raise TypeError(
            f"grads{path} has dtype {g.dtype}, narrower than its parameter's {p.dtype}: "
            f"allowed are that or wider, such as g.to({p.dtype})"
        )
    if g.shape != p.shape:
        raise ValueError(
            f"grads{path} has shape {tuple(g.shape)}, its parameter {tuple(p.shape)}"
        )
    if g.device != p.device:
        raise ValueError(f"grads{path} is on {g.device}, its parameter on {p.device}")
    if g is p and torch.compiler.is_exporting():
        why = "torch.export makes one input of a tensor that is passed twice"
        raise ValueError(f"grads{path} is its parameter, but {why}")


def is_expanded(x: Tensor) -> bool:
    """Return True if several elements of x share one place in memory."""
    places = zip(x.shape, x.stride())
    return not x.is_contiguous() and any(n > 1 and step == 0 for n, step in places)


def check_writable(path: object, p: Tensor) -> None:
    """Raise if a parameter is expanded."""
    if is_expanded(p):
        raise ValueError(
            f"params{path} is expanded (strides {p.stride()}): it cannot be written to; "
            "clone it"
        )


def check_runs_kernels(instead: str, tensors: Iterable[Tensor]) -> None:
    """Raise if a trace, a transformation or a mode would not see what kernels do."""
    where = ""
    if in_compiled_region():
        where = "under torch.compile"
    elif transform_level() > 0:
        where = "under a transformation of torch.func (vmap, grad, jvp)"
    elif dispatch_modes() > 0:
        where = "under a TorchDispatchMode (make_fx, FakeTensorMode, a flop counter)"
    elif not all([has_memory(x) or x.is_meta for x in tensors]):
        where = "on fake tensors"
    if where:
        raise RuntimeError(
            f"a compiled step cannot run {where}, because its kernels are no operations of "
            f"torch: call {instead} here"
        )


def check_apart(
    named: Iterable[tuple[K, Tensor]], name: Callable[[K], str], instead: str
) -> None:
    """Raise if tensors share memory, because a step in place would move it twice.

    A tensor that is not contiguous counts as its first element.
    """
    spans = [
        (x.data_ptr(), x.nbytes if x.is_contiguous() else x.element_size(), key)
        for key, x in named
        if x.numel() and is_plain(x)
    ]
    spans.sort(key=itemgetter(0))
    for (start, size, first), (second_start, _, second) in pairwise(spans):
        if start and second_start < start + size:
            raise ValueError(
                f"{name(first)} and {name(second)} share memory, which a step in place "
                f"would move twice: clone one, or {instead}"
            )


def check_state_dtype(dtype: object) -> None:
    """Raise if the state dtype is neither None nor a floating dtype of 16 bits or more."""
    if dtype is None:
        return
    bits = 0
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        bits = torch.finfo(dtype).bits
    if bits < 16:
        raise (ValueError if bits else TypeError)(
            f"Invalid state_dtype: state_dtype={dtype}: allowed are floating torch dtypes "
            "of 16 bits or more and None (and as storage.moments '8bit')"
        )


def check_given(rule: Rule, coeffs: object) -> None:
    """Raise if a step has not given what the direction takes besides."""
    if rule.given and type(x := getattr(coeffs, rule.given[-1])) is tuple and not x:
        more = "".join([f", {name}=..." for name in rule.extras])
        raise TypeError(
            f"the direction of {rule.name} takes {', '.join(rule.given)}, which only the "
            "class's step and the pure one give it: "
            f"{rule.name}.pure(lr=...).step(params, grads, state{more})"
        )


def check_accumulates(rule: Rule, hooks: Iterable[Any]) -> None:
    """Raise if accumulation="states" cannot work with this rule, or with these hooks."""
    for x in (x for x in hooks if x.reads_gradient):
        raise ValueError(
            f"accumulation='states' with the hook {x}, which reads the whole gradient of a "
            "step. It is never there. Use accumulation='buffer'"
        )
    if rule.accumulate is None:
        raise ValueError(
            "accumulation='states' adds gradients into the state, and the state of "
            f"{rule.name} with these options is no sum over gradients: use "
            "accumulation='buffer', or define accumulate(self, g, s)"
        )


def check_moves_state(rule: Rule) -> None:
    """Raise for a rule whose state cannot move without the parameter."""
    if rule.eval_point is not None or rule.join is not None:
        does = "averages the parameters" if rule.join is None else "sums over parameters"
        raise ValueError(
            f"optimizer_accumulation=True: {rule.name} {does} after each move, so the "
            "state cannot accumulate alone: use accumulation='buffer'"
        )


def is_on(number: object) -> bool:
    """Return False if a number is 0 on the host, and True for tensors and schedules."""
    return isinstance(number, Tensor) or callable(number) or number != 0


def numbers_of(tree: object) -> list[float]:
    """Return the numbers of a tree on the host, without tensors and schedules."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, float | int)]


def decay_mistakes(groups: list[tuple[DecayKind, object]]) -> list[str]:
    """Warn once if weight_decay with decouple_lr=True is as large as an AdamW value."""
    trees = [tree for kind, tree in groups if kind.startswith("fully")]
    decays = numbers_of(trees) if trees else []
    if max(decays, default=0.0) < 1e-3:
        return []
    return [
        f"weight_decay={max(decays)} is potentially high for decouple_lr=True: fully "
        "decoupled weight decay is not multiplied by the learning rate, so a "
        "weight_decay of 1e-5 to 1e-4 is usual."
    ]


def stuck_betas(betas: Iterable[object]) -> list[str]:
    """Return warnings for betas whose moments, if bfloat16, round updates to nothing.

    A bfloat16 number has 8 bits. If 1 - beta < 2^-8, beta * v + (1 - beta) * g^2 rounds
    back to v unless g^2 is far from it.
    """
    return [
        f"betas[{i}]={beta} with bfloat16 state: 1 - beta is below 2^-8, so the moment "
        "hardly moves. Pass state_dtype=torch.float32, or a beta of at most 0.996."
        for i, beta in enumerate(betas)
        if isinstance(beta, float) and 1.0 - beta < 2.0**-8
    ]


def warn(texts: list[str]) -> None:
    """Warn of each text as `warn_user` does."""
    for text in texts:
        warn_user(text)


def is_first(what: str) -> bool:
    """Return True at the first call of a process with this text."""
    is_new = what not in runtime.said
    runtime.said.add(what)
    return is_new


def warn_user(text: str) -> None:
    """Issue a UserWarning at the first caller outside this package and torch."""
    frame, level = sys._getframe(1), 2
    inside = ("optimi_func", "torch", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


# Optimizers and losses that a user passes to a function


def check_optimizer(optimizer: object, hyper: Mapping[str, object] | None) -> None:
    """Raise if it is no optimizer or factory, or if a bound one comes with `hyper`."""
    # A class is a factory if it is one of pure optimizers.
    lacks = isinstance(optimizer, type) and not has_init_and_step(optimizer)
    if lacks or not callable(optimizer):
        check_pure("optimizer", optimizer, "factories such as optimi_func.adamw, ")
    if is_pure(optimizer) and hyper:
        raise TypeError(
            f"hyper has {list(hyper)}, but every hyperparameter of "
            f"{type(optimizer).__name__} is bound: pass its factory, adamw instead of "
            "adamw(lr=1e-3)"
        )


def bind(optimizer: Optimizer, hyper: Mapping[str, object]) -> PureOptimizer:
    """Return the optimizer, or call the factory with these hyperparameters."""
    if is_pure(optimizer):
        return optimizer
    factory: Any = optimizer  # no cast: Dynamo loses the class in it
    return factory(**hyper)


def scalar_loss(result: Any, has_aux: bool) -> Any:
    """Return what a loss function returned. Raise if its loss is no scalar."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"loss_fn returned {type(result).__name__}: with has_aux=True it has to be "
            "(loss, aux)"
        )
    check_loss(result[0] if has_aux else result)
    return result


def check_loss(loss: object) -> None:
    """Raise if the loss is not a floating 0-d tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}: allowed is a 0-d tensor (in "
            "population.loss_and_grad with has_aux=True also (loss, aux))"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}: allowed is a scalar, "
            "such as its mean"
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"loss_fn returned a loss of dtype {loss.dtype}: allowed are floating ones"
        )
