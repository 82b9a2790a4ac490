"""Storage options, and entries: the tensors that an optimizer keeps for a parameter.

A field of a rule's state is one tensor in an entry, under its name. A field in 8-bit codes
is two, under its name with "_q" and "_scale". A rule computes in float32 or float64, so
fields are decoded for it, and its results encoded.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from optimi_func.core import checks, codes
from optimi_func.core.pairs import as_real
from optimi_func.core.rule import (
    Leaf,
    Named,
    Numbers,
    ParamStorage,
    Rule,
    Scalar,
    Storage,
    StorageLike,
)
from optimi_func.core.runtime import runtime

STORAGES: dict[str, Storage] = {
    "compact": Storage("kahan8", "8bit"),
    "exact": Storage("exact", torch.float32),
}
_DEFAULT = Storage()
T = TypeVar("T")


def storage_of(
    storage: StorageLike | None = None,
    kahan_sum: bool | None = None,
    state_dtype: torch.dtype | None = None,
) -> Storage:
    """Return the storage that these options ask for. Raise if they exclude each other."""
    if storage is kahan_sum is state_dtype is None:
        return _DEFAULT
    checks.check_flag("kahan_sum", kahan_sum, none=True)
    if storage is None:
        kinds: dict[bool | None, ParamStorage | None]
        kinds = {None: None, True: "kahan", False: "plain"}
        checks.check_state_dtype(state_dtype)
        return Storage(kinds[kahan_sum], state_dtype)
    if kahan_sum is not None or state_dtype is not None:
        raise ValueError(
            f"storage={storage!r} with kahan_sum={kahan_sum}, state_dtype={state_dtype}: "
            "these are shorthands for storage=Storage(param, moments): choose one way"
        )
    if isinstance(storage, str) and storage in STORAGES:
        return STORAGES[storage]
    if not isinstance(storage, Storage):
        kind = ValueError if isinstance(storage, str) else TypeError
        raise kind(
            f"Invalid storage: storage={storage!r}: allowed are {sorted(STORAGES)}, "
            "Storage(param=..., moments=...) and None"
        )
    params = (*codes.PARAMS, None)
    if storage.param not in params:
        raise ValueError(
            f"Invalid storage: storage.param={storage.param!r}: allowed are {params}"
        )
    if storage.moments not in [*codes.MOMENTS]:
        checks.check_state_dtype(storage.moments)
    if type(storage.seed) is not int or not 0 <= storage.seed < 1 << 63:
        raise ValueError(
            f"Invalid storage: storage.seed={storage.seed!r}: allowed are whole numbers "
            "from 0 to 2^63 - 1"
        )
    return storage


def seed_of(storage: Storage, p: Tensor) -> int | None:
    """Return the seed of a parameter that is rounded at random, or None for others."""
    return storage.seed if storage.rounds and p.dtype in codes.LOW else None


def as_dtype(x: Any) -> Any:
    """Convert the name of a dtype to the dtype. Return other values as they are."""
    dtype = getattr(torch, x.removeprefix("torch."), x) if isinstance(x, str) else x
    return dtype if isinstance(dtype, torch.dtype) else x


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def group_storage(group: Mapping[str, Any]) -> Storage:
    """Return the storage that a param group asks for."""
    # torch's ZeroRedundancyOptimizer writes the names in a state dict to groups.
    return storage_of(group["storage"], group["kahan_sum"], as_dtype(group["state_dtype"]))


def check_stored(rules: list[Rule], storage: Storage, params: list[Tensor]) -> list[str]:
    """Return warnings about a storage. Raise ValueError if it has nothing to encode.

    The rules and parameters are those of all groups with this storage.
    """
    changes = codes.PARAMS[storage.param].changes if storage.param else ()
    idle = bool(changes) and all([p.dtype not in changes for p in params])
    if storage.param == "kahan" and idle:
        return [checks.IDLE_KAHAN]
    if idle and params:
        raise ValueError(
            f"Invalid storage: storage.param={storage.param!r}: no parameter is "
            f"{' or '.join(map(dtype_name, changes))}: convert the model, or choose "
            "param=None, which does not change other dtypes"
        )
    if not storage.coded:
        return []
    if not any(map(keeps_codes, rules)):
        if storage.param == "kahan8":
            return []  # of weights alone
        raise ValueError(
            f"Invalid storage: storage.moments={storage.moments!r}: {rules[0].name} keeps "
            "no moments in 8 bits with these options, so it would change nothing"
        )
    parts = [as_real(p.detach()) for p in params]
    cut = [codes.has_groups(x) and not codes.is_eligible(x) for x in parts]
    shapes = {tuple(p.shape) for p, is_cut in zip(params, cut) if is_cut}
    text = (
        f"storage.moments={storage.moments!r}: the shards of parameters of shapes "
        f"{sorted(shapes)} cut groups of {codes.GROUP} elements, which share a scale: "
        "their moments are not kept in codes. In checkpoints of "
        "torch.distributed.checkpoint they are, so that any number of processes can load "
        "them"
    )
    return [text] if shapes else []


def keeps_codes(rule: Rule) -> bool:
    """Return True if any field of a rule's state can be kept in codes."""
    # On the meta device, which takes no memory, zeros_like imports sympy for half a second.
    device = "meta" if "sympy" in sys.modules else "cpu"
    p = torch.empty(128, 64, dtype=torch.float32, device=device)
    kept = next(iter(codes.MOMENTS))  # all formats of moments are for the same fields
    return not all(isinstance(field, Tensor) for field in rule.init(p, kept, None))


# Fields of a state, in codes or not


def decode(field: Tensor | codes.Codes, dtype: torch.dtype) -> Tensor:
    """Convert a field to a dtype. Return the field itself if it has that dtype."""
    return field.decode(dtype) if isinstance(field, tuple) else codes.to(field, dtype)


def encode(x: Tensor, like: Tensor | codes.Codes, dither: Scalar) -> Tensor | codes.Codes:
    """Convert x to the dtype or the codes of `like`."""
    if isinstance(like, tuple):
        return like.encode(codes.refuse_derivatives(x, x), dither)
    return codes.to(x, like.dtype)


# Entries

_Q, _SCALE = "_q", "_scale"
# Names of a step's tensors beside those of an entry. No field of a State can have them.
PARAM, GRAD, BITS = "the parameter", "the gradient", "the random bits"
COMP = "kahan_comp"


def entry_of(state: Named, comp: Tensor | None) -> dict[str, Tensor]:
    """Return a rule's state and its compensation as an entry."""
    entry: dict[str, Tensor] = {}
    for name, field in state._asdict().items():
        if isinstance(field, Tensor):
            entry[name] = field
        elif field is not None:
            entry[name + _Q], entry[name + _SCALE] = field
    if comp is not None:
        entry[COMP] = comp
    return entry


def state_in(rule: Rule, entry: Mapping[str, Tensor]) -> tuple[Named, Tensor | None]:
    """Return the rule's state and the compensation (or None) of an entry.

    A field that the entry lacks is None.
    """
    fields: list[Any] = []
    for name in rule.state._fields:
        x: Any = entry.get(name)
        if x is None and (code := entry.get(name + _Q)) is not None:
            x = codes.CODECS[code.dtype](code, entry[name + _SCALE])
        fields.append(x)
    return rule.state(*fields), entry.get(COMP)


def leaf_in(rule: Rule, tensors: Mapping[str, Tensor]) -> Leaf:
    """Make a leaf of tensors by name: PARAM, and those of an entry. Others are left out."""
    return Leaf(tensors[PARAM], *state_in(rule, tensors))


def tensors_of(leaf: Leaf) -> dict[str, Tensor]:
    """Return by name the tensors that a step writes: parameter, state, compensation."""
    return {PARAM: leaf.p, **entry_of(leaf.state, leaf.comp)}


def coded_in(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the fields that are stored in codes, with the names of codes and scales."""
    every = {*names}
    fields = [x.removesuffix(_Q) for x in every if x.endswith(_Q)]
    pairs = {x: (x + _Q, x + _SCALE) for x in fields}
    return {field: pair for field, pair in pairs.items() if every.issuperset(pair)}


def scales_in(names: Iterable[str]) -> set[str]:
    """Return the names of scales, which have one element for each group of codes."""
    return {scale for _, scale in coded_in(names).values()}


def seed_in(comp: Any) -> Tensor | None:
    """Return what a pure state has for a compensation if it is a seed, of int64."""
    return comp if getattr(comp, "dtype", None) == torch.int64 else None


def names_in(fields: tuple[str, ...], entry: Mapping[str, object]) -> list[str]:
    """Return the names of an entry's state tensors and compensation, in order."""
    return [name for name in _state_names(fields) if name in entry]


def own_names(rule: Rule) -> tuple[str, ...]:
    """Return all names that this package may use in an entry. Others' are kept unread."""
    return (*rule.counted, *_state_names(rule.state._fields))


@lru_cache(256)
def _state_names(fields: tuple[str, ...]) -> tuple[str, ...]:
    return (*[f + end for f in fields for end in ("", _Q, _SCALE)], COMP)


def missing_fields(rule: Rule, entry: Mapping[str, object]) -> list[str]:
    """Return the fields of the rule's state that an entry lacks, plain and in codes."""
    fields = rule.state._fields
    return [x for x in fields if entry.get(x) is None and entry.get(x + _Q) is None]


def field_of(name: str) -> str:
    """Return the field that a name in an entry belongs to."""
    return name.removesuffix(_Q).removesuffix(_SCALE)


def cached_init(rule: Rule, numbers: Numbers, make: Callable[[], T], *key: object) -> T:
    """Return `make()`, a function that calls `rule.init` for a tensor without memory.

    torch takes 5 to 100 us for a tensor without memory, so the result is cached by the
    numbers and the key. It is not cached if a number is a tensor, whose value may change.
    """
    if numbers and any([isinstance(x, Tensor) for x in tree_leaves(numbers)]):
        return make()
    results = runtime.inits.setdefault(rule.init, {})
    key = *key, repr(numbers)
    if (found := results.get(key)) is None:
        if len(results) >= 256:
            results.clear()
        # Another thread may clear this before it is read again.
        results[key] = found = make()
    return found


def own_shapes(rule: Rule, numbers: Numbers, p: Tensor) -> dict[str, torch.Size]:
    """Return the shapes of the rule's `whole_fields` for a parameter."""
    if not rule.whole_fields:
        return {}

    def make() -> dict[str, torch.Size]:
        like = torch.empty(p.shape, dtype=p.dtype, device="meta")
        state = rule.init(like, p.dtype, numbers)
        return {name: getattr(state, name).shape for name in rule.whole_fields}

    if torch.compiler.is_compiling() or not all([type(n) is int for n in p.shape]):
        return make()
    return cached_init(rule, numbers, make, p.shape, p.dtype)


def check_entry(
    rule: Rule,
    numbers: Numbers,
    root: str,
    path: object,
    p: Tensor,
    entry: Mapping[str, object],
    any_device: bool = False,
) -> None:
    """Raise if a value of an entry, which errors call root and path, does not fit p.

    TypeError for no tensor, or for codes and scales that were cast to another dtype, as
    torch.optim's load_state_dict does. ValueError for another shape or device. `numbers`
    are those of `Rule.init`, and any_device is for entries that will be copied.
    """
    if p.is_complex():
        p, entry = as_real(p), {name: as_real(x) for name, x in entry.items()}
    shapes = dict.fromkeys(rule.counted, torch.Size()) | own_shapes(rule, numbers, p)
    if seed_in(entry.get("kahan_comp")) is not None:
        shapes["kahan_comp"] = torch.Size()
    for name, x in entry.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{root}{path}[{name!r}]={x!r}: allowed is a tensor")
        if name.endswith(_Q) and x.dtype not in codes.CODECS:
            raise TypeError(
                f"{root}{path}[{name!r}] has dtype {x.dtype}: allowed are codes, of "
                f"{' or '.join(map(dtype_name, codes.CODECS))}, as they were saved"
            )
        if name.endswith(_SCALE):
            count = -(-p.numel() // codes.GROUP)
            if x.dtype != torch.float32 or x.numel() != count:
                raise TypeError(
                    f"{root}{path}[{name!r}] has dtype {x.dtype} and {x.numel()} elements: "
                    f"allowed are {count} of float32, a scale for each {codes.GROUP} "
                    "elements, as they were saved"
                )
            continue
        if name in rule.state._fields and not x.is_floating_point():
            raise ValueError(
                f"{root}{path}[{name!r}] has dtype {x.dtype}: allowed are floating ones"
            )
        shape = shapes.get(name, p.shape)
        if x.shape != shape:
            raise ValueError(
                f"{root}{path}[{name!r}] has shape {tuple(x.shape)}: allowed is a tensor "
                f"of shape {tuple(shape)}"
            )
        if not any_device and name not in rule.counted and x.device != p.device:
            raise ValueError(
                f"{root}{path}[{name!r}] is on {x.device}, its parameter on {p.device}"
            )


def as_counts(
    root: str, path: object, names: Iterable[str], entry: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return an entry's counts that are not 0-d float32 or float64 tensors as such ones.

    Raises if one is complex or has several elements, or if the step count is below 0,
    infinite or NaN.
    """
    counts: dict[str, Tensor] = {}
    for name in names:
        x = entry.get(name)
        if not isinstance(x, Tensor):
            continue
        odd = x.is_complex() or x.dtype == torch.bool or x.layout != torch.strided
        if odd or x.shape not in ((), (1,)):
            raise ValueError(
                f"{root}{path}[{name!r}] is {checks.shown(x)}: allowed is a real tensor of "
                "one element"
            )
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32 if name == "step" else torch.float64)
        scalar = x.reshape(()) if x.dim() else x
        if name == "step" and not 0.0 <= (checks.value_of(scalar) or 0.0) < math.inf:
            raise ValueError(
                f"{root}{path}['step'] is {x}: allowed is at least 0, and finite"
            )
        if scalar is not entry[name]:
            counts[name] = scalar
    return counts
