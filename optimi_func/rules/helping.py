"""The help of the functions that are generated for each rule, such as `adamw_step`.

One text serves all rules. The formula and the meaning of each hyperparameter come from the
docstring of the rule's class and of its bases.
"""

import inspect
import re
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from optimi_func.core.rule import PyTree, Scalar
from optimi_func.pure.functional import FunctionalOptimizer, Number

_ARGS = re.compile(r"\n\nArgs:\n(.*?)(?=\n\n\S|\n*\Z)", re.S)
_ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w|\Z)", re.M | re.S)

_TREES = """\
    params: The parameters: a floating-point or complex tensor, or any pytree of such
        tensors (a dict, list, tuple, NamedTuple, or a registered class).
"""
_ARGUMENTS = """\
    grads: The gradients: a pytree with the same structure as `params`. Each gradient has
        the shape of its parameter, and the dtype of its parameter or a wider dtype. If a
        gradient is None, its parameter and the parameter's state are returned unchanged.
    state: The state that `{name}_init(params)` or the previous step
        returned.
"""
_STORAGE = """\
    kahan_sum: False turns off Kahan summation, which stores the rounding error of each
        float16 and bfloat16 parameter and adds it back at the next step. None turns Kahan
        summation on.
    state_dtype: The dtype of the moments. None uses the dtype of each parameter, except
        that second moments are never float16.
    storage: How parameters and moments are stored, in place of `kahan_sum` and
        `state_dtype`: "compact", "exact" or a `Storage`.
"""
_NUMBERS = (
    "Each hyperparameter whose type is `Number` may be a float, a 0-d tensor, or a "
    "schedule. A\nschedule is a function that receives the number of steps taken so far, "
    "as a 0-d tensor, and\nreturns a number. lr and weight_decay may also be trees that "
    "contain a number for each part\nof `params`."
)
_PURE = (
    "This is a pure function: it does not write to its arguments, and its results share no "
    "\nmemory with the arguments. You can apply `torch.compile`, and `grad`, `jvp` and "
    "`vmap` from\n`torch.func`, to this function."
).replace(" \n", "\n")
_COMPILED = (
    "This function computes the same results as `optimi_func.{name}_step`,\n"
    "with kernels that are compiled once for each combination of dtypes. You cannot "
    "differentiate\nthis function, and you cannot apply `torch.compile` or `vmap` to it."
)
_EVALUATED = (
    "\n\nContinue training with the returned parameters. Evaluate the model with the\n"
    "averaged parameters: `{name}(lr=...).eval_params(params, state)`."
)
_RAISES = """\
    TypeError: A parameter is not a dense floating-point or complex tensor, `state` is not
        a `TreeState`, or a hyperparameter has the wrong type.
    ValueError: The trees differ in structure, a gradient or a state does not fit its
        parameter, `state` was made with other options, or a hyperparameter is out of range.
"""
_RAISES_COMPILED = """\
    TypeError: The same reasons as for `optimi_func.{name}_step`. In grad
        mode, this error is also raised if a gradient, the state, a hyperparameter or a
        parameter that is not a leaf requires grad.
    ValueError: The same reasons as for `optimi_func.{name}_step`.{shared}
    RuntimeError: The step is called within `torch.compile`, `vmap` or `grad`, or with fake
        tensors.
"""
_SHARED = "\n        This error is also raised if two parameters share memory."
_RESULT = """\
    (params, state): The updated parameters, with the structure, shapes and dtypes of
        `params`, and the `TreeState` to pass to the next step.
"""
_WRITTEN = """\
    (params, state): The objects that you passed, with the new values.
"""


class Shown(str):
    """An annotation that `help` and `inspect.signature` show by its short name."""

    __repr__ = str.__str__  # without quotes


def _name_of(annotation: Any) -> str:
    """Return the short name of a type: `Number`, not the union that it stands for."""
    if isinstance(annotation, str):
        return str(annotation)
    if annotation is None or annotation is NoneType:
        return "None"
    if annotation is PyTree or isinstance(annotation, TypeVar):
        return "PyTree"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for name, alias in (("Number", Number), ("Scalar", Scalar)):
            own = get_args(alias)
            if set(own) <= set(parts):
                others = [_name_of(x) for x in parts if x not in own]
                return " | ".join([name, *others])
        return " | ".join(map(_name_of, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is tuple:
        return f"tuple[{', '.join(map(_name_of, parts))}]"
    return getattr(annotation, "__name__", str(annotation))


def named(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with short names of types."""
    empty, result = inspect.Signature.empty, signature.return_annotation
    return signature.replace(
        parameters=[
            p
            if p.annotation is empty
            else p.replace(annotation=Shown(_name_of(p.annotation)))
            for p in signature.parameters.values()
        ],
        return_annotation=empty if result is empty else Shown(_name_of(result)),
    )


class About(NamedTuple):
    """The texts in the docstrings of a rule's class and its bases."""

    title: str  # the class's name
    update: str  # the formula and the text around it
    arguments: dict[str, str]  # the lines of each hyperparameter


def _arguments(text: str) -> dict[str, str]:
    """Return the entries of a docstring's `Args:`, with their lines as they are."""
    found = {}
    for block in _ARGS.findall(text):
        for name, lines in _ARGUMENT.findall(block + "\n"):
            found[name] = f"    {name}: {lines.rstrip()}\n"
    return found


def _own_arguments(cls: type) -> dict[str, str]:
    return _arguments(inspect.cleandoc(vars(cls).get("__doc__") or ""))


_KNOWN = WeakKeyDictionary[type, About]()  # a class that is defined again is freed


def about(cls: type) -> About:
    """Read the docstrings of a class and its bases, once."""
    if cls not in _KNOWN:
        _KNOWN[cls] = _read(cls)
    return _KNOWN[cls]


def _read(cls: type) -> About:
    bases = cls.__mro__[::-1]
    told: dict[str, str] = {}
    for base in bases:
        told |= _own_arguments(base)
        if base.__name__ == "BaseOptimizer":  # its options, as the pure functions have them
            told |= _own_arguments(FunctionalOptimizer)
    text = inspect.cleandoc(cls.__doc__ or "").partition("\n\nReferences:")[0]
    update = re.split(r"\n\n(?:Args|Raises):\n|\n\nArguments not named|\n\n>>> ", text)[0]
    return About(
        cls.__name__, update.replace("`BaseOptimizer`", "`FunctionalOptimizer`"), told
    )


def _hyperparameters(cls: type, names: list[str]) -> str:
    told = about(cls).arguments
    unknown = f"A hyperparameter of `{cls.__name__}`."
    return "".join([told.get(x, f"    {x}: {unknown}\n") for x in names])


def _example(call: str, name: str) -> str:
    arguments = "params, grads, state, lr=0.1"
    if len(f">>> params, state = {call}({arguments})") > 76:
        arguments = f"\n...     {arguments}\n... "
    return (
        f'>>> params = {{"weight": torch.ones(4, 2)}}\n'
        f">>> state = {name}_init(params)\n"
        f'>>> grads = {{"weight": torch.ones(4, 2)}}\n'
        f">>> params, state = {call}({arguments})\n"
        ">>> state.step\n"
        "tensor(1.)"
    )


def help_of_step(cls: type, name: str, kind: str, names: list[str]) -> str:
    """Return the docstring of `adamw_step`, of the compiled one, or of `adamw_step_`.

    Args:
        cls: The rule's class.
        name: The name of the pure optimizer, such as "adamw".
        kind: "pure", "compiled" or "in place".
        names: The hyperparameters.
    """
    known = about(cls)
    first = f"Return the parameters and the state after one step of {known.title}."
    how, raises, result = _PURE, _RAISES, _RESULT
    call = f"{name}_step"
    if hasattr(cls, "eval_point"):
        how += _EVALUATED.format(name=name)
    if kind != "pure":
        shared = _SHARED if kind == "in place" else ""
        how = how.replace(_PURE, _COMPILED.format(name=name))
        raises = _RAISES_COMPILED.format(name=name, shared=shared)
        call = f"compiled.{call}"
    if kind == "in place":
        first = (
            f"Take one step of {known.title}, writing into the parameters and the state."
        )
        result, call = _WRITTEN, f"{call}_"
    arguments = _TREES + _ARGUMENTS.format(name=name) + _hyperparameters(cls, names)
    return (
        f"{first}\n\n{how}\n\n{known.update}\n\n{_NUMBERS}\n\nArgs:\n{arguments}\n"
        f"Returns:\n{result}\nRaises:\n{raises}\n{_example(call, name)}"
    )


def help_of_init(cls: type, name: str, names: list[str]) -> str:
    """Return the docstring of `adamw_init`, for example."""
    options = _hyperparameters(cls, names)
    needs = ""
    if names:
        needs = (
            "\n\nThe tensors of the state depend on the hyperparameters below, so pass the "
            "same values\nto this function and to the step."
        )
    return (
        f"Return the state of {cls.__name__} before its first step on these parameters."
        f"{needs}\n\nArgs:\n{_TREES}{options}{_STORAGE}\n"
        "Returns:\n"
        "    A `TreeState` with two fields. `step` is the number of steps taken so far,\n"
        "        as a 0-d tensor. `leaves` is a tree like `params`, which contains a\n"
        "        `LeafState` for each parameter.\n\n"
        "Raises:\n"
        "    TypeError: A parameter is not a dense floating-point or complex tensor.\n"
        "    ValueError: `params` contains no tensor, the rule does not accept the shape\n"
        "        of a parameter, or the storage options exclude each other.\n\n"
        f'>>> state = {name}_init({{"weight": torch.ones(4, 2)}})\n'
        ">>> state.step\n"
        "tensor(0.)"
    )


def help_of_value(cls: type, names: list[str]) -> str:
    """Return the docstring of `adamw`, for example, or of a user's `SignSGD.pure`."""
    known, functions = about(cls), "`init` and `step`"
    if hasattr(cls, "eval_point"):
        functions = "`init`, `step` and\n`eval_params`"
    arguments = _hyperparameters(cls, names)
    return (
        f"{known.title} as pure functions, with fixed hyperparameters.\n\n"
        f"The pure functions are the methods of the returned object: {functions}.\nThey do "
        f"not write to their arguments.\n\n{known.update}\n\n{_NUMBERS}\n\n"
        f"Args:\n{arguments}\n"
        "Raises:\n"
        "    TypeError: A hyperparameter has the wrong type, or an unknown name.\n"
        "    ValueError: A hyperparameter is out of range, or two of them exclude each "
        "other."
    )


def example_of_value(cls: type, name: str) -> str:
    """Return the lines that `functions` adds: other rules may need extras or matrices."""
    evaluate = ""
    if hasattr(cls, "eval_point"):
        evaluate = "\n>>> averaged = optimizer.eval_params(params, state)"
    return (
        f"\n\n>>> optimizer = {name}(lr=0.1)\n"
        '>>> params = {"weight": torch.ones(4, 2)}\n'
        ">>> state = optimizer.init(params)\n"
        '>>> grads = {"weight": torch.ones(4, 2)}\n'
        ">>> params, state = optimizer.step(params, grads, state)"
        f"{evaluate}\n>>> state.step\ntensor(1.)"
    )
