"""The caches of the process, what it has found out and what it has said, in one object.

No result depends on what is here. Every entry is keyed by all that it was made of, or is a
fact about this machine and this version of torch, so it is never stale. `forget` makes the
process begin anew, as after its start. Functions that `functools` caches, such as a rule
without its map, depend on their arguments alone and are not here. What belongs to one
optimizer is in the optimizer: see `BaseOptimizer._clear_caches`.
"""

from dataclasses import dataclass, field
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary

# By rule, which they keep no longer than others do.
_ByRule = WeakKeyDictionary[Any, dict[object, Any]]


@dataclass
class Runtime:
    """The caches of a process.

    Attributes:
        said: The warnings that a process issues once: see `checks.is_first`.
        inits: By `Rule.init`, the shapes and dtypes of the state that it makes.
        requests: By rule, what a step asks for: see `leaf.requests`.
        programs: By rule, the recorded operations of eager steps: see `program.program`.
        kernels: By key, the name and the kernel: see `kernels.kernel`.
        tree_plans: By kind of tree, the latest plans and their guards: see `trees`.
        functions: The C++ functions once they are loaded, else empty: see `cpp`.
        errors: Why they could not be loaded, else empty.
        tries_again: Set if a new optimizer asks to compile them once more.
        exact_codecs: Whether the codecs in C++ have the bits of those in torch.
        uncompilable: Types of devices whose steps run eagerly, because compiling failed.
        failures: How often that has happened, by type of device.
        unshaped: The digests of maps that could not be compiled.
        other_code: Why private parts of torch are not as list kernels expect them.
        no_conversions: Why bfloat16 is not converted by the header of `bfloat16`.
    """

    said: set[str] = field(default_factory=set[str])
    inits: _ByRule = field(default_factory=_ByRule)
    requests: _ByRule = field(default_factory=_ByRule)
    programs: _ByRule = field(default_factory=_ByRule)
    kernels: dict[Any, tuple[str, Any]] = field(default_factory=dict[Any, tuple[str, Any]])
    tree_plans: dict[object, list[Any]] = field(default_factory=dict[object, list[Any]])
    functions: list[Any] = field(default_factory=list[Any])
    errors: list[Exception] = field(default_factory=list[Exception])
    tries_again: Event = field(default_factory=Event)
    exact_codecs: dict[int, bool] = field(default_factory=dict[int, bool])
    uncompilable: set[str] = field(default_factory=set[str])
    failures: dict[str, int] = field(default_factory=dict[str, int])
    unshaped: set[str] = field(default_factory=set[str])
    other_code: list[str] = field(default_factory=list[str])
    no_conversions: list[str] = field(default_factory=list[str])

    def forget(self) -> None:
        """Empty all of it."""
        fresh = Runtime()
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))


runtime = Runtime()
