"""Executors: from updates to launches, through kernels, torch._foreach_* or single ops.

Kernels are handed tensors that fill their memory; the others are copied into flat ones.
Where there are list kernels, one launch takes all that share dtypes and numbers.
Elsewhere large tensors are a call each, and small ones are copied into a flat tensor too.
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, Literal, TypeAlias

import torch

from optimi_func._checks import warn_user
from optimi_func._codes import GROUP
from optimi_func._leaf import count_means
from optimi_func._rule import Rule
from optimi_func.execution.aliasing import split_aliasing
from optimi_func.execution.codecs import arguments_of, can_run, widens_gradients
from optimi_func.execution.foreach import plan_foreach
from optimi_func.execution.kernels import (
    CaptureError,
    DispatchModeError,
    Kernel,
    Pass,
    SwitchedOffError,
    coded_key,
    has_list_kernels,
    kernel,
    kernel_key,
)
from optimi_func.execution.launches import (
    EagerLaunch,
    FlattenedLaunch,
    KernelLaunch,
    Launch,
    ListLaunch,
    MeanKernel,
    ShardedLaunch,
    TableLaunch,
    Update,
    alike,
)
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.tensors import chunks, is_capturing
from optimi_func.execution.triton_list import TritonListKernel
from optimi_func.execution.wholes import plan_wholes

# Below this many elements a kernel call costs more than copying there and back.
SMALL = 1 << 13
# Elements copied into one flat tensor, which bounds the scratch memory.
FLATTENED = 1 << 20
# Elements measured before they are moved: they are still in a cache then.
MEASURED = 1 << 20

# Found out once a process: types of devices for which the compiler has failed.
_uncompilable: set[str] = set()
# And of which devices it was said that nothing is compiled.
_said_switched_off: set[str] = set()

# "auto": kernels where a compiler is found, else eager.
Executor: TypeAlias = Literal["auto", "kernels", "foreach", "eager"]
Planner: TypeAlias = Callable[[Rule[Any, Any], list[Update], bool], list[Launch]]


def plan_launches(
    executor: Executor,
    rule: Rule[Any, Any],
    updates: list[Update],
    write: bool,
) -> list[Launch]:
    """Launches of some updates; whatever has to be compiled is, by the time this returns.

    Args:
        executor: What runs them.
        rule: The mathematics.
        updates: In an order that all processes share.
        write: False moves the state alone.

    Raises:
        Exception: With "kernels" whatever the compiler raised. Nothing has been written.
    """
    if rule.whole is not None and write:
        return plan_wholes(rule, updates, partial(plan_launches, executor))
    if executor == "auto":
        return _plan_auto(rule, updates, write)
    planners: dict[str, Planner] = {
        "kernels": _plan_kernels,
        "foreach": plan_foreach,
        "eager": _plan_eager,
    }
    plan = planners[executor]
    together = [
        write
        and u.slot.shard is not None
        and count_means(rule, u.scalars.scalars.rates) > 0
        for u in updates
    ]
    launches = plan(rule, [u for u, held in zip(updates, together) if not held], write)
    if any(together):
        sharded = list(compress(updates, together))
        here = [u for u in sharded if u.slot.numel]
        launches.append(ShardedLaunch(rule, plan(rule, here, write), sharded))
    return launches


def _plan_auto(rule: Rule[Any, Any], updates: list[Update], write: bool) -> list[Launch]:
    odd = [u for u in updates if not u.plain]
    if odd:
        # Tensor subclasses: their own dispatch knows what an operation means.
        plain = [u for u in updates if u.plain]
        rest = _plan_auto(rule, plain, write) if plain else []
        return rest + plan_launches("eager", rule, odd, write)
    device = updates[0].g.device.type
    if device not in _uncompilable:
        try:
            return plan_launches("kernels", rule, updates, write)
        except CaptureError:
            raise
        except DispatchModeError:
            pass  # What watches single operations gets single operations.
        except SwitchedOffError as error:
            if device not in _said_switched_off:
                _said_switched_off.add(device)
                warn_user(
                    f"{error}: the optimizer step for {device} runs eagerly, several "
                    "times slower. Switch it on, or choose compile=False or foreach=True.",
                )
        except Exception as error:
            _uncompilable.add(device)
            # torch's first line may only say that there is a second.
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[: 1 + (lines[:1] or [""])[0].endswith(":")])
            warn_user(
                f"the optimizer step could not be compiled for {device} and runs, in "
                "this process, eagerly, several times slower "
                f"({type(error).__name__}: {reason}). "
                "Install a C++ compiler (g++ or clang++, on PATH or named by CXX) "
                "for CPU, Triton for CUDA; or choose compile=False or foreach=True.",
            )
    return plan_launches("eager", rule, updates, write)


def _plan_eager(rule: Rule[Any, Any], updates: list[Update], write: bool) -> list[Launch]:
    return [EagerLaunch(rule, u, write) for u in updates]


def _plan_kernels(rule: Rule[Any, Any], updates: list[Update], write: bool) -> list[Launch]:
    launches: list[Launch] = []
    for some in alike(updates):
        odd = next((u for u in some if not u.plain), None)
        if odd is not None:
            raise TypeError(
                f"compiled steps take plain tensors, not {type(odd.p).__name__} with a "
                f"gradient of {type(odd.g).__name__}: pass compile=False"
            )
        launches += _plan_alike(rule, some, write)
    return launches


def _plan_alike(rule: Rule[Any, Any], updates: list[Update], write: bool) -> list[Launch]:
    """Launches of updates that share their kernels and numbers."""
    slot, device = updates[0].slot, updates[0].g.device
    # On CPU the codecs are C++ around the kernel, elsewhere in it.
    around = slot.coded and has_list_kernels(device)
    if around and not (updates[0].target is slot and can_run(slot)):
        return _plan_eager(rule, updates, write)
    count = count_means(rule, updates[0].scalars.scalars.rates) if write else 0
    measures = count > 0

    def made(part: Pass, first: Update) -> Kernel:
        if not around:
            key = (coded_key if slot.coded else kernel_key)(rule, first, write, part)
            return kernel(key, first.scalars.scalars)
        # Nothing of it is called where the flag is false.
        key = kernel_key(rule, first._replace(guarded=False), write, part)
        widens = measures and widens_gradients(slot, first.g)
        if widens:
            p, _, *rest = key.dtypes
            key = key._replace(dtypes=(p, torch.float32, *rest))
        found = kernel(key, first.scalars.scalars)
        if not isinstance(found, ListKernel):
            return found
        return found.on_codes(arguments_of(slot, write, part != "mean", widens))

    launches: list[Launch] = []
    direct = [u for u in updates if u.dense]
    if any(slot.codes) and not around:
        # Of others the last row is none.
        direct = [u for u in direct if u.slot.numel % GROUP == 0]
    if direct:
        run = made("move" if measures else "whole", direct[0])
        # Its table would be uploaded in the capture, from memory that goes.
        capturing = is_capturing(device)
        if isinstance(run, TritonListKernel) and capturing:
            run = run.single
        least = _least(run, measures, capturing)
        direct = [u for u in direct if not (u.aligned and u.slot.numel < least)]
        mean = None
        if direct and measures:
            reads_x = rule.means is not None and rule.means.reads_x
            mean = MeanKernel(made("mean", direct[0]), count, reads_x)
        both = [run] if mean is None else [run, mean.kernel]
        if around and not all([isinstance(x, ListKernel) for x in both]):
            # Compiled, but for tensors that are decoded.
            return _plan_eager(rule, updates, write)
        launches += _plan_direct(run, mean, direct)
    places = {u.place for u in direct}
    flattened = [u for u in updates if u.place not in places]
    if slot.coded:
        return launches + _plan_eager(rule, flattened, write)
    for chunk in chunks(flattened, FLATTENED, _numel) if flattened else ():
        if measures or sum(map(_numel, chunk)) < 2:
            # Each needs a mean of its own, which a concatenation does not have.
            launches += plan_foreach(rule, chunk, write)
        else:
            # The copies are the kernel's to write; a flag decides on the way back.
            first = chunk[0]._replace(target=chunk[0].slot, guarded=False)
            launches.append(FlattenedLaunch(made("whole", first), chunk, write))
    return launches


def _least(run: Kernel, measures: bool, capturing: bool) -> int:
    """The elements below which a tensor is copied into a flat one."""
    if isinstance(run, ListKernel) or (isinstance(run, TritonListKernel) and not measures):
        return 0
    # Length 1 would specialise the graph. A capture has compiled no kernel of copies.
    return 2 if measures or capturing else SMALL


def _plan_direct(
    run: Kernel, mean: MeanKernel | None, updates: list[Update]
) -> list[Launch]:
    """Launches of tensors that kernels are handed as they are."""
    if not updates:
        return []
    if isinstance(run, ListKernel) and (
        mean is None or isinstance(mean.kernel, ListKernel)
    ):
        launches: list[Launch] = []
        for apart in split_aliasing(updates):
            together = [apart] if mean is None else chunks(apart, MEASURED, _numel)
            launches += [ListLaunch(run, mean, chunk) for chunk in together]
        return launches
    if isinstance(run, TritonListKernel):
        return [TableLaunch(run, mean, apart) for apart in split_aliasing(updates)]
    return [KernelLaunch(run, mean, updates)]


def _numel(u: Update) -> int:
    return u.slot.numel
