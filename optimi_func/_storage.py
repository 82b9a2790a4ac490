"""How parameters and moments are kept between steps: plain, compensated, or as codes.

A rule computes in float32 (float64); what it is given is decoded here, and what it returns
encoded. Nothing here knows an optimizer, nor where a step runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from optimi_func._checks import IDLE_KAHAN, check_state_dtype
from optimi_func._codes import (
    GROUP,
    Codes,
    Moment8,
    SecondMoment8,
    cuts_groups,
    is_low,
    refuse_derivatives,
    to,
)
from optimi_func._rule import Rule, Scalar, Storage

STORAGES: dict[str, Storage] = {
    "compact": Storage("kahan8", "8bit"),
    "exact": Storage("exact", torch.float32),
}


def storage_of(
    storage: Storage | str | None,
    kahan_sum: bool | None,
    state_dtype: torch.dtype | None,
) -> Storage:
    """The storage that these options ask for.

    Raises:
        TypeError, ValueError: An unknown name, or options that exclude each other.
    """
    if storage is None:
        param = {None: None, True: "kahan", False: "plain"}[kahan_sum]
        check_state_dtype(state_dtype)
        return Storage(cast(Any, param), state_dtype)
    if kahan_sum is not None or state_dtype is not None:
        raise ValueError(
            f"storage={storage!r} with kahan_sum={kahan_sum}, state_dtype={state_dtype}: "
            "these are shorthands for storage=Storage(param, moments): choose one way"
        )
    if isinstance(storage, str):
        if storage not in STORAGES:
            raise ValueError(
                f"Invalid storage: storage={storage!r}: allowed are {sorted(STORAGES)} "
                "and Storage(param=..., moments=...)"
            )
        return STORAGES[storage]
    if not isinstance(storage, Storage):
        raise TypeError(
            f"Invalid storage: storage={storage!r}: allowed are {sorted(STORAGES)}, "
            "Storage(param=..., moments=...) and None"
        )
    params = ("plain", "kahan", "kahan8", "exact", None)
    if storage.param not in params:
        raise ValueError(
            f"Invalid storage: storage.param={storage.param!r}: allowed are {params}"
        )
    if storage.moments != "8bit":
        check_state_dtype(storage.moments)
    return storage


def check_stored(
    rules: list[Rule[Any, Any]], storage: Storage, params: list[Tensor]
) -> list[str]:
    """Refuse a storage that changes nothing; the warnings about it.

    Args:
        rules: The mathematics, of all groups with this storage.
        storage: What was asked for.
        params: What it was asked for.

    Raises:
        ValueError: Codes for parameters or moments of which there are none.
    """
    low = [p for p in params if is_low(p)]
    if storage.param == "exact":
        low = [p for p in low if p.dtype == torch.bfloat16]
    if storage.param == "kahan" and not low:
        return [IDLE_KAHAN]
    if storage.param in ("kahan8", "exact") and params and not low:
        allowed = "bfloat16" if storage.param == "exact" else "bfloat16 or float16"
        raise ValueError(
            f"Invalid storage: storage.param={storage.param!r}: no parameter is "
            f"{allowed}: convert the model, or choose param=None, which leaves others as "
            "they are"
        )
    if storage.moments != "8bit":
        return []
    if not any(map(keeps_codes, rules)):
        raise ValueError(
            f"Invalid storage: storage.moments='8bit': {rules[0].name} keeps no moments "
            "in 8 bits with these options, so that it would change nothing"
        )
    apart = [tuple(p.shape) for p in params if cuts_groups(p)]
    if not apart:
        return []
    return [
        f"storage.moments='8bit': parameters of shapes {sorted(set(apart))} are divided "
        f"among processes in the midst of groups of {GROUP} elements: their moments are "
        "not kept in codes"
    ]


def keeps_codes(rule: Rule[Any, Any]) -> bool:
    """Whether any field of a rule's state can be kept in codes."""
    fields = rule.init(torch.empty(128, 64, device="meta"), "8bit")
    return not all(isinstance(field, Tensor) for field in fields)


# Fields of a state, in codes or not


def decode(field: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """A field in the dtype of the arithmetic; the same object if it is in it."""
    return field.decode(dtype) if isinstance(field, Codes) else to(field, dtype)


def encode(x: Tensor, like: Tensor | Codes, dither: Scalar) -> Any:
    """X as a field is kept."""
    if isinstance(like, Codes):
        return like.encode(refuse_derivatives(x, x), dither)
    return to(x, like.dtype)


def tensors_of(field: Any) -> tuple[Tensor, ...]:
    """The tensors that a field is kept in."""
    return tuple(field) if isinstance(field, Codes) else (field,)


def entry_of(state: Any, comp: Tensor | None) -> dict[str, Tensor]:
    """A leaf's state as a flat dict: of a field in codes two tensors, under other names."""
    entry: dict[str, Tensor] = {}
    for name, field in state._asdict().items():
        if isinstance(field, Tensor):
            entry[name] = field
        else:
            entry[name + _Q], entry[name + _SCALE] = field
    if comp is not None:
        entry["kahan_comp"] = comp
    return entry


def state_in(rule: Rule[Any, Any], entry: Mapping[str, Any]) -> tuple[Any, Any]:
    """A rule's state and the compensation from what `entry_of` makes of them."""
    fields = rule.state._fields
    codes = tuple([entry.get(name) is None for name in fields])
    names = [name for name in names_in(fields, entry) if entry[name] is not None]
    tensors = iter([entry[name] for name in names if name != "kahan_comp"])
    return state_of(rule.state, tensors, codes), entry.get("kahan_comp")


def names_in(fields: tuple[str, ...], entry: Mapping[str, Any]) -> list[str]:
    """Under which names an entry has a rule's fields and the compensation, in order."""
    return [name for name in (*field_names(fields), "kahan_comp") if name in entry]


def is_scale(name: str) -> bool:
    """Whether an entry has scales under this name, which have a shape of their own."""
    return name.endswith(_SCALE)


def check_codes(path: str, name: str, x: Tensor, p: Tensor) -> None:
    """Refuse what is no code or scale under the name of one.

    Casting a whole state, as torch's own load_state_dict does, makes it so.

    Args:
        path: How errors call it.
        name: In the entry.
        x: What is there.
        p: The parameter.
    """
    if name.endswith(_Q) and x.dtype not in (torch.int8, torch.uint8):
        raise TypeError(
            f"{path} has dtype {x.dtype}: allowed are codes, of int8 or uint8, as they "
            "were saved"
        )
    count = -(-p.numel() // GROUP)
    if is_scale(name) and (x.dtype != torch.float32 or x.numel() != count):
        raise TypeError(
            f"{path} has dtype {x.dtype} and {x.numel()} elements: allowed are {count} of "
            f"float32, a scale for each {GROUP} elements, as they were saved"
        )


def codes_of(q: Tensor, scale: Tensor) -> Codes:
    """The codes that these tensors are."""
    return Moment8(q, scale) if q.dtype == torch.int8 else SecondMoment8(q, scale)


def state_of(kind: Any, tensors: Iterator[Tensor], codes: tuple[bool, ...]) -> Any:
    """The state of a rule from its tensors, one after the other.

    Args:
        kind: The rule's State.
        tensors: As `entry_of` has them; what comes after them is left.
        codes: Of each field whether it is kept in codes.
    """
    fields = [
        codes_of(next(tensors), next(tensors)) if coded else next(tensors)
        for coded in codes
    ]
    return kind(*fields)


def names_of(name: str, field: Any) -> tuple[str, ...]:
    """Under which names an entry has a field."""
    return (name,) if isinstance(field, Tensor) else (name + _Q, name + _SCALE)


def has_field(entry: Mapping[str, Any], name: str) -> bool:
    """Whether an entry has a field, in codes or not."""
    return entry.get(name) is not None or entry.get(name + _Q) is not None


def field_of(name: str) -> str:
    """The field that a name in an entry belongs to."""
    return name.removesuffix(_Q).removesuffix(_SCALE)


def field_names(fields: tuple[str, ...]) -> list[str]:
    """Every name under which an entry may have a rule's fields."""
    return [n for field in fields for n in (field, field + _Q, field + _SCALE)]


_Q, _SCALE = "_q", "_scale"
