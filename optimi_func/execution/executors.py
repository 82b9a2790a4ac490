"""Executors: from updates to launches, through kernels, torch._foreach_* or single ops.

Where there are list kernels, on CPU, dense tensors are handed over as they are, all in one
launch. Elsewhere a large tensor is a launch by itself; small ones, and everywhere those
whose gradient and state differ in memory order, are copied into flat tensors and updated
by one call of the same kernel.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from optimi_func._rule import Rule
from optimi_func.execution.foreach import plan_foreach
from optimi_func.execution.inductor import Flat
from optimi_func.execution.kernels import (
    CaptureError,
    DispatchModeError,
    Kernel,
    Pass,
    has_list_kernels,
    kernel,
    kernel_key,
    passes,
)
from optimi_func.execution.launches import (
    AllReduceMeans,
    EagerLaunch,
    FlattenedLaunch,
    KernelLaunch,
    KernelMeasure,
    Launch,
    ListLaunch,
    ListMeasure,
    Update,
    split_aliasing,
)
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.tensors import chunks

# Below this many elements a kernel call costs more than copying there and back.
SMALL = 1 << 13
# Elements copied into one flat tensor, which bounds the scratch memory.
FLATTENED = 1 << 20
# Elements measured before they are moved: they are still in a cache then.
MEASURED = 1 << 20

# "auto": kernels where a compiler is found, else eager.
Executor: TypeAlias = Literal["auto", "kernels", "foreach", "eager"]
# Launches for a part of a step.
PlanPass: TypeAlias = Callable[[list[Update], Pass], list[Launch]]


def plan_launches(
    executor: Executor,
    rule: Rule[Any, Any],
    updates: list[Update],
    write: bool,
    uncompilable: set[str],
) -> list[Launch]:
    """Launches of some updates; whatever has to be compiled is, by the time this returns.

    Args:
        executor: What runs them.
        rule: The mathematics.
        updates: In an order that all processes share.
        write: False moves the state alone.
        uncompilable: Types of devices for which the compiler has failed: "auto" does not
            ask it again, nor warn again. Added to.

    Raises:
        Exception: With "kernels" whatever the compiler raised. Nothing has been written.
    """
    if executor == "auto":
        return _plan_auto(rule, updates, write, uncompilable)
    plans: dict[str, PlanPass] = {
        "kernels": lambda some, part: _plan_kernels(rule, some, write, part),
        "foreach": lambda some, part: plan_foreach(rule, some, write, part),
        "eager": lambda some, part: _plan_eager(rule, some, write, part),
    }
    plan = plans[executor]
    if passes(rule, write) == ("whole",):
        return plan(updates, "whole")
    # A mean over shards is a message, one for all tensors of a mesh, which every process
    # has to send, however much of a tensor lies there.
    updates = list(map(_with_mean, updates))
    sharded = [u for u in updates if u.mean is not None]
    if not sharded:
        return plan(updates, "move")
    measured = [u for u in sharded if u.slot.numel]
    first = plan(measured, "mean") if measured else []
    return [*first, AllReduceMeans(sharded), *plan(updates, "move")]


def _with_mean(u: Update) -> Update:
    if u.slot.shard is None:
        return u
    return u._replace(mean=torch.zeros((), dtype=torch.float64, device=u.g.device))


def _plan_auto(
    rule: Rule[Any, Any], updates: list[Update], write: bool, uncompilable: set[str]
) -> list[Launch]:
    odd = [u for u in updates if not u.plain]
    if odd:
        # Tensor subclasses: their own dispatch knows what an operation means.
        plain = [u for u in updates if u.plain]
        rest = _plan_auto(rule, plain, write, uncompilable) if plain else []
        return rest + plan_launches("eager", rule, odd, write, uncompilable)
    device = updates[0].g.device.type
    if device not in uncompilable:
        try:
            return plan_launches("kernels", rule, updates, write, uncompilable)
        except CaptureError:
            raise
        except DispatchModeError:
            pass  # What watches single operations gets single operations.
        except Exception as error:
            uncompilable.add(device)
            # torch's first line may only say that there is a second.
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[: 1 + (lines[:1] or [""])[0].endswith(":")])
            warnings.warn(
                f"the optimizer step could not be compiled for {device} and runs "
                f"eagerly, several times slower ({type(error).__name__}: {reason}). "
                "Install a C++ compiler (g++ or clang++, on PATH or named by CXX) "
                "for CPU, Triton for CUDA; or choose compile=False or foreach=True.",
                UserWarning,
                stacklevel=6,
            )
    return plan_launches("eager", rule, updates, write, uncompilable)


def _plan_eager(
    rule: Rule[Any, Any], updates: list[Update], write: bool, part: Pass
) -> list[Launch]:
    if part == "mean":
        return plan_foreach(rule, updates, write, part)
    return [EagerLaunch(rule, u, write) for u in updates]


def _plan_kernels(
    rule: Rule[Any, Any], updates: list[Update], write: bool, part: Pass
) -> list[Launch]:
    direct, flattened = _sorted(updates)
    launches: list[Launch] = []
    for some in direct:
        launches += _plan_direct(rule, some, write, part)
    if part != "whole":
        # Each needs a mean of its own, which a concatenation does not have.
        return launches + (plan_foreach(rule, flattened, write, part) if flattened else [])
    groups: dict[Any, list[Update]] = {}
    for u in flattened:
        kind = (u.slot.dtypes, u.g.dtype, u.g.device, u.at, u.guarded)
        groups.setdefault(kind, []).append(u)
    for some in groups.values():
        for chunk in chunks(some, FLATTENED, _numel):
            if sum(map(_numel, chunk)) < 2:
                # Length 1 would specialise the graph.
                launches += _plan_eager(rule, chunk, write, part)
                continue
            # The copies are the kernel's to write; a flag decides on the way back.
            first = chunk[0]._replace(target=chunk[0].slot, guarded=False)
            launches.append(FlattenedLaunch(_flat(rule, first, write, part), chunk, write))
    return launches


def _numel(u: Update) -> int:
    return u.slot.numel


def _sorted(updates: list[Update]) -> tuple[list[list[Update]], list[Update]]:
    """Those whose tensors kernels can be handed, by kernel and numbers; and the others."""
    direct: dict[Any, list[Update]] = {}
    flattened: list[Update] = []
    for u in updates:
        slot = u.slot
        if not slot.numel:
            continue
        if not u.plain:
            raise TypeError(
                f"compiled steps take plain tensors, not {type(u.p).__name__} with a "
                f"gradient of {type(u.g).__name__}: pass compile=False"
            )
        small = slot.numel < SMALL and not has_list_kernels(u.g.device)
        if small or not u.agrees:
            flattened.append(u)
            continue
        kind = (slot.dtypes, u.g.dtype, u.g.device, u.at, u.target is slot, u.guarded)
        direct.setdefault((*kind, u.mean is None), []).append(u)
    return list(direct.values()), flattened


def _plan_direct(
    rule: Rule[Any, Any], updates: list[Update], write: bool, part: Pass
) -> list[Launch]:
    """Launches of updates that share their kernels and numbers."""
    first = updates[0]
    run = _kernel(rule, first, write, part)
    measures = part == "move" and first.mean is None
    mean = _kernel(rule, first, write, "mean") if measures else None
    if not isinstance(run, ListKernel):
        assert not isinstance(mean, ListKernel)
        kernels = [run] if mean is None else [mean, run]
        kind = KernelMeasure if part == "mean" else KernelLaunch
        return [kind(kernels, updates, write)]
    assert mean is None or isinstance(mean, ListKernel)
    launches: list[Launch] = []
    if part == "mean":
        return [ListMeasure(run, chunk) for chunk in chunks(updates, MEASURED, _numel)]
    for apart in split_aliasing(updates):
        together = [apart] if part == "whole" else chunks(apart, MEASURED, _numel)
        launches += [ListLaunch(run, mean, chunk, write) for chunk in together]
    return launches


def _kernel(rule: Rule[Any, Any], u: Update, write: bool, part: Pass) -> Kernel:
    return kernel(kernel_key(rule, u, write, part), u.scalars.scalars)


def _flat(rule: Rule[Any, Any], u: Update, write: bool, part: Pass) -> Flat:
    """A kernel, of one row where it is a list kernel."""
    return _kernel(rule, u, write, part)
