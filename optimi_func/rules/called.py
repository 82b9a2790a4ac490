"""The methods of a class body that are not traced, but called: coeffs, init, whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from optimi_func.core.codes import NEAREST, Codes, to
from optimi_func.core.distributed import distribute_like, whole, whole_field
from optimi_func.core.math import moment
from optimi_func.core.rule import MomentStorage, Named, Rule, Scalar
from optimi_func.core.storage import encode
from optimi_func.rules.lifting import as_scalar, is_scalar, line_of

RATES = ("lr", "weight_decay")


class Written(Protocol):
    """A class body, whose methods nobody knows."""

    __name__: str
    at_definition: bool

    def bare(self, values: Mapping[str, object]) -> Any:
        """Return an instance with values as attributes."""
        ...


class Explicit(NamedTuple):
    """The `coeffs` of a class that has one."""

    cls: Written
    statics: Mapping[str, object]
    takes: list[str]

    def __call__(
        self,
        t: Scalar,
        r: object,
        hyper: Mapping[str, object],
        known: Mapping[str, object] | None = None,
    ) -> tuple[Named, dict[str, Scalar]]:
        """Return the result and its scalars by name. Raise if it is another."""
        where = f"{self.cls.__name__}.coeffs"
        numbers = {name: x for name, x in hyper.items() if name not in RATES}
        arguments = {**hyper, "t": t, "r": r}
        try:
            me = self.cls.bare({**self.statics, **numbers})
            result = me.coeffs(*[arguments[name] for name in self.takes])
        except Exception as error:
            raise TypeError(
                f"{where} raises {type(error).__name__}: {error} (self has the fields, "
                "further arguments are t, r, lr, weight_decay, and torch.where is for an "
                "if over tensors)"
            ) from error
        scalars = result._asdict() if hasattr(result, "_asdict") else result
        right = isinstance(scalars, dict) and all(map(is_scalar, scalars.values()))
        if not right or scalars.keys() != (known or scalars).keys():
            raise TypeError(
                f"{where} returned {result!r}: allowed are a NamedTuple and a dict of "
                "numbers and 0-d tensors, with the same names at each step"
            )
        return result, {name: as_scalar(x) for name, x in scalars.items()}


def makers_of(owner: str, kind: object) -> list[Callable[..., Any]]:
    """Return the functions that make the fields of a State, by their annotations."""
    if not (isinstance(kind, type) and hasattr(kind, "_field_defaults")):
        raise TypeError(f"{owner}.State is {kind!r}: allowed are NamedTuples of tensors")
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise TypeError(f"{owner}.State: {error} (an annotation)") from error
    for name in kind._fields:
        if getattr(hint := hints.get(name), "__origin__", hint) is not Tensor:
            raise TypeError(
                f"{owner}.State.{name} is annotated {getattr(hint, '__name__', hint)}: "
                "allowed are Tensor, SecondMoment, Wide and Shaped; scalars go to Running"
            )
    for name, x in kind._field_defaults.items():
        raise TypeError(
            f"{owner}.State.{name} = {x!r}: write init, which returns first values"
        )
    annotated = [get_args(hints[name])[1:] for name in kind._fields]
    return [next(filter(callable, x), moment) for x in annotated]


def make_init(
    cls: Written,
    statics: Mapping[str, object],
    usual: Mapping[str, object],
    kind: type[Named],
    makers: Sequence[Callable[..., Codes | Tensor]],
) -> Callable[..., Named]:
    """Return `Rule.init`: zeros, or what the class's own init returns."""
    where = f"{cls.__name__}.init"

    def field(
        p: Tensor, kept: MomentStorage, make: Callable[..., Codes | Tensor], x: Any
    ) -> Codes | Tensor:
        if make is not whole_field:
            zeros = make(p, kept)
            # Clones, because fields share no memory with p.
            return zeros if x is None else encode(x.clone(), zeros, NEAREST)
        zeros = whole_field(p, p.shape if x is None else getattr(x, "shape", x))
        if not isinstance(x, Tensor):
            return zeros
        return distribute_like(zeros, whole(x).clone().to(zeros.device, zeros.dtype))

    def fits(p: Tensor, make: object, x: object) -> bool:
        if make is whole_field and isinstance(x, tuple | list):
            return all([isinstance(n, int) and n >= 0 for n in x])
        return x is None or (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and (make is whole_field or x.shape == p.shape)
        )

    def init(
        p: Tensor, kept: MomentStorage, numbers: Mapping[str, object] | None = None
    ) -> Named:
        if not hasattr(cls, "init"):
            return kind(*[field(p, kept, make, None) for make in makers])
        try:
            found = cls.bare({**statics, **(usual if numbers is None else numbers)})
            found = found.init(p)
        except (TypeError, RuntimeError) as error:  # vmap raises the second
            hint = "None is for zeros, and torch.zeros_like(p) + self.x for full_like"
            raise TypeError(f"{where}: {error} ({hint})") from error
        right = getattr(found, "_fields", None) == kind._fields
        if not right or not all([fits(p, *pair) for pair in zip(makers, found)]):
            raise TypeError(
                f"{where} returned {found!r} for a parameter of {tuple(p.shape)}: "
                "allowed is self.State of floating tensors of its shape, and None for zeros"
                f"{', and in Shaped fields of any, and shapes' * (whole_field in makers)}"
            )
        return kind(*[field(p, kept, *pair) for pair in zip(makers, found)])

    return init


def make_whole(
    cls: Written,
    statics: Mapping[str, object],
    kind: type[Named],
    count: int,
    takes: Sequence[str],
    numbers: Sequence[str],
) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    """Return `Rule.whole`: the class's, of an instance that has numbers of the step.

    `Coeffs.whole` has t and these numbers, and `count` fields of `kind` are not the map's.
    """
    names, rest = kind._fields[count:], (None,) * count

    def mapped(
        d: Tensor, x: Tensor | None, fields: tuple[Tensor, ...], c: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        now = dict(zip(numbers, c.whole[1:]))
        arguments = {**now, "d": d, "s": kind(*rest, *fields), "t": c.whole[0], "x": x}
        value = cls.bare({**statics, **now}).whole(*[arguments[name] for name in takes])
        new_d, state = value if names and isinstance(value, tuple) else (value, ())
        right = isinstance(new_d, Tensor) and new_d.shape == d.shape
        if names and (not right or getattr(state, "_fields", ()) != kind._fields):
            raise TypeError(
                f"{cls.__name__}.whole returned {value!r}: allowed is (d, self.State(...)) "
                f"with a direction of shape {tuple(d.shape)}"
            )
        if not right:
            raise TypeError(
                f"{cls.__name__}.whole returned {value!r} for a direction of shape "
                f"{tuple(d.shape)}: allowed are tensors of its shape"
            )
        new: list[Tensor] = []
        for name, before, x in zip(names, fields, state[count:]):
            if not isinstance(x, Tensor) or x.shape != before.shape:
                raise TypeError(
                    f"{cls.__name__}.whole returned {name}={x!r}: allowed are tensors of "
                    f"the shape {tuple(before.shape)}, which init gave it"
                )
            new.append(to(x, before.dtype))
        return to(new_d, d.dtype), tuple(new)

    return mapped


def make_refuses(
    cls: Written, statics: Mapping[str, object], rule: Rule, now: object
) -> Callable[[Tensor], str | None] | None:
    """Return `Rule.refuses`, which also tries a user's `whole` on a parameter's shape."""
    me, map_of = cls.bare(statics), rule.whole
    method = getattr(cls, "refuses", None)
    tried = map_of is not None and cls.at_definition
    if method is None and not tried:
        return None

    def refuses(p: Tensor) -> str | None:
        why = None if method is None else me.refuses(p)
        if why is not None or not tried or torch.compiler.is_compiling():
            return why
        try:
            with torch.inference_mode(False):  # in which tensors have no version
                d = torch.empty(p.shape, dtype=torch.float32, device="meta")
                fields = rule.init(d, d.dtype)[len(rule.fields) :]
                given = [d, d.clone(), *fields]
                before = [x._version for x in given]
                assert map_of is not None
                map_of(d, given[1] if rule.reads_param else None, tuple(fields), now)
                if before != [x._version for x in given]:
                    raise TypeError("it writes to d, x or s, where a new tensor is allowed")
        except NotImplementedError:
            return None  # an operation that the meta device lacks
        except Exception as error:
            return f"whole raises {type(error).__name__}: {error}{line_of(error)}"

    return refuses
