"""The one runner for refusals: a bad call raises, says why, and has written nothing.

A table maps a call to the last line of its traceback: `"adamw(lr='a')": "TypeError: Inv"`.
Both are text. The name of the error's class is followed by a regular expression, which is
searched for in the error's text. An expression alone stands for a ValueError. If there are
several statements, all but the last prepare what the last one refuses:

    @refuses({"p.grad = torch.ones(3); optimizer.step()": r"grads\\[0\\] has"})
    def test_gradients_that_do_not_fit() -> Scene:
        p = torch.ones(2, requires_grad=True)
        optimizer = AdamW([p], lr=0.1)
        return locals()

The function makes the objects of one row, and returns them by name. The calls also see the
names of its module, of optimi_func and of its rooms. After the call, every one of these
objects has to be what it was before: the elements of tensors, the parameters, buffers and
hooks of modules, the groups and the state of optimizers, and whatever has a `state_dict`.
"""

import ast
import builtins
import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimi_func
from optimi_func import hooks, population, rules, schedules, transforms

Scene: TypeAlias = dict[str, Any]
_ROOMS = (rules, schedules, hooks, transforms, optimi_func)
_NAMES: Scene = {"torch": torch, "nn": nn, "np": np, "optimi_func": optimi_func}
_NAMES |= {"math": math, "copy": copy, "dataclasses": dataclasses, "partial": partial}
for _room in _ROOMS:
    _NAMES |= {k: x for k, x in vars(_room).items() if k[0] != "_"}
_NAMES |= {"nan": math.nan, "inf": math.inf, "population": population}


class Refused(NamedTuple):
    """A call, the error that it raises, and a pattern that the error's text contains."""

    call: str
    error: tuple[type[Exception], ...]
    text: str

    def run(self, scene: Scene, names: Mapping[str, Any] = _NAMES) -> None:
        """Run the statements before the call, and check what the call does."""
        known = {**names, **scene}
        *first, call = [ast.Module([x], []) for x in ast.parse(self.call).body]
        for statement in first:
            exec(compile(statement, "a refused call", "exec"), known)
        watched = [x for k, x in known.items() if k in scene or k not in names]
        code = compile(call, "a refused call", "exec")
        refused(lambda: exec(code, known), self.error, self.text, watched)


def refused(
    call: Callable[[], object], error: Any, text: str, watched: Iterable[Any] = ()
) -> None:
    """Check that a call raises this error, and that it writes to none of `watched`."""
    watched = list(watched)
    before = _bits(watched)
    with pytest.raises(error, match=text):
        call()
    assert _bits(watched) == before, "the refused call has written something"


def rows(table: Mapping[str, str]) -> list[Refused]:
    """Return the rows of a table from calls to the last lines of their tracebacks."""
    found: list[Refused] = []
    for call, said in table.items():
        named = re.match(r"([A-Z][\w|]+Error): ", said)
        errors = named[1].split("|") if named else ["ValueError"]
        text = said[named.end() :] if named else said
        found.append(Refused(call, tuple([getattr(builtins, x) for x in errors]), text))
    return found


def refuses(
    table: Mapping[str, str],
) -> Callable[[Callable[..., Scene]], Callable[..., None]]:
    """Make a test of each row of a table from a function that makes its objects."""

    def made(scene: Callable[..., Scene]) -> Callable[..., None]:
        def test(row: Refused, **given: Any) -> None:
            row.run(scene(**given), {**_NAMES, **scene.__globals__})

        # pytest reads from these which arguments the scene takes beside the row.
        takes = list(inspect.signature(scene).parameters.values())
        row = inspect.Parameter("row", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*takes, row])  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = scene.__name__, scene.__doc__
        test.__module__ = scene.__module__
        test.pytestmark = getattr(scene, "pytestmark", [])  # type: ignore[attr-defined]
        each = [pytest.param(row, id=row.call) for row in rows(table)]
        return pytest.mark.parametrize("row", each)(test)

    return made


def _bits(x: Any) -> Any:
    """Return what a call could have written to, as values that compare by ==."""
    if isinstance(x, Tensor):
        return str(x.dtype), tuple(x.shape), _elements(x)
    if isinstance(x, nn.Module):
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in x.parameters()]
        return [_bits(dict(x.named_parameters())), _bits(dict(x.named_buffers())), hooks]
    if isinstance(x, torch.optim.Optimizer):
        return [_bits(x.param_groups), _bits(list(x.state.values()))]
    if isinstance(x, Mapping):
        return {str(k): _bits(y) for k, y in x.items()}
    if isinstance(x, list | tuple):
        return [_bits(y) for y in x]
    if hasattr(x, "state_dict") and not isinstance(x, type):
        return _bits(x.state_dict())
    return x if isinstance(x, str | int | bool | None) else repr(x)


def _elements(x: Tensor) -> Any:
    plain = x.layout == torch.strided and type(x) in (Tensor, nn.Parameter)
    if not plain or x.is_meta:
        return repr(x.layout)
    return (
        x.detach()
        .resolve_conj()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
