"""Executors: plan launches of kernels, or of single operations.

Kernels are given tensors that fill their memory in one order; others step eagerly. A list
kernel takes all tensors that share dtypes and scalars. Without one, a kernel is called for
each tensor.
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Literal, TypeAlias

import torch

from optimi_func.core.checks import warn_user
from optimi_func.core.codes import GROUP, LOW
from optimi_func.core.leaf import Size, requests, rounds_in
from optimi_func.core.lists import chunks, grouped
from optimi_func.core.packed import is_capturing
from optimi_func.core.rehearsal import device_type, is_rehearsed
from optimi_func.core.rule import Rule
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import GRAD, PARAM, scales_in
from optimi_func.execution.codecs import (
    are_exact,
    arguments_of,
    can_run,
    widens_gradients,
)
from optimi_func.execution.eager import plan_eager
from optimi_func.execution.kernels import (
    CaptureError,
    DispatchModeError,
    Kernel,
    KernelKey,
    NoListKernelError,
    SwitchedOffError,
    kernel,
    log_once,
    updates_lists,
    warn_once,
)
from optimi_func.execution.launches import (
    KernelLaunch,
    Launch,
    ListLaunch,
    RehearsedLaunch,
)
from optimi_func.execution.list_kernel import ListKernel, can_run_in_place, in_place_kernel
from optimi_func.execution.slots import Slot, Update, alike, split_twins
from optimi_func.execution.triton_list import TritonListKernel
from optimi_func.execution.wholes import elementwise, plan_shaped, plan_wholes

# Parameters with fewer elements share an update where others have their own, because a
# call costs as much as some thousand elements.
SMALL = 1 << 13
# Elements that are measured before they are moved, so that they are still in a cache.
MEASURED = 1 << 20
# Elements whose noise is in memory together.
DRAWN = 1 << 17

# "auto" takes kernels if a compiler is found, else "eager".
Executor: TypeAlias = Literal["auto", "kernels", "eager"]
_Planner: TypeAlias = Callable[[Rule, list[Update], bool], list[Launch]]


def plan_launches(
    executor: Executor, rule: Rule, updates: list[Update], write: bool
) -> list[Launch]:
    """Plan launches of updates, and compile their kernels.

    The updates are in the same order on all processes. With "kernels" any error of the
    compiler is raised, before anything is written.
    """
    if rule.whole is not None and write:
        launches, error = list[Launch](), None
        if executor in ("auto", "kernels"):
            launches, updates, error = plan_shaped(rule, updates, executor == "auto")
        launches += plan_wholes(rule, updates, partial(plan_launches, executor))
        if error is not None and "cpu" not in runtime.uncompilable:
            warn_user(
                f"the map of {rule.name} could not be compiled for cpu, and runs in this "
                f"process for one tensor after the other, several times slower "
                f"({type(error).__name__}: {str(error)[:300]}). Choose a version of torch "
                "that the documentation names, or compile=False"
            )
        return launches
    if rule.whole is not None and rule.whole_fields:
        rule = elementwise(rule, False)
    planners: dict[Executor, _Planner] = {
        "auto": _plan_auto,
        "kernels": _plan_kernels,
        "eager": plan_eager,
    }
    plan = planners[executor]

    # A list kernel takes rows of scalars, if it has to write no means behind them.
    rounds = bool(updates) and bool(_rounds(rule, updates[0], write))
    counted = executor == "eager" or rounds
    # Other processes wait for the message about means that these are in.
    reduced = [u for u in updates if u.slot.shard is not None and rule.join is None]
    reduced = [u for u in reduced if _rounds(rule, u, write)]
    groups = alike(updates, counted, bool(reduced))
    launches = [x for group in groups for x in plan(rule, group, write)]
    empty = [u for u in reduced if not u.slot.numel]
    return launches + [Launch(rule, [u], write, _asked(rule, u, write)) for u in empty]


def _asked(rule: Rule, u: Update, write: bool) -> dict[str, Size]:
    return requests(rule, u.scalars.scalars, write)


def _rounds(rule: Rule, u: Update, write: bool) -> list[str]:
    """Return the rounds of means that a step takes, by name."""
    return [*rounds_in(_asked(rule, u, write))]


def _plan_auto(rule: Rule, updates: list[Update], write: bool) -> list[Launch]:
    """Plan updates of one kind through kernels, or eagerly if there is no compiler."""
    device = device_type(updates[0].g.device)
    # A tensor subclass's own dispatch knows what an operation means.
    if updates[0].plain and device not in runtime.uncompilable:
        try:
            return _plan_kernels(rule, updates, write)
        except CaptureError:
            raise
        except DispatchModeError:
            pass  # A mode that watches single operations sees single operations.
        except SwitchedOffError as error:
            warn_once(
                f"{error}: the optimizer step for {device} runs eagerly, several times "
                "slower. Switch it on, or choose compile=False or foreach=True."
            )
        except Exception as error:
            runtime.uncompilable.add(device)
            runtime.failures[device] = runtime.failures.get(device, 0) + 1
            # torch's first line may only say that there is a second.
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[: 1 + (lines[:1] or [""])[0].endswith(":")])
            warn_once(
                f"the optimizer step could not be compiled for {device} and runs eagerly, "
                f"several times slower ({type(error).__name__}: {reason}). Install a C++ "
                "compiler (g++ or clang++, on PATH or named by CXX) for CPU, Triton for "
                "CUDA; or choose compile=False or foreach=True. The next optimizer tries "
                "again"
            )
    return plan_eager(rule, updates, write)


def _plan_kernels(rule: Rule, updates: list[Update], write: bool) -> list[Launch]:
    """Plan updates of one kind through kernels, and eagerly what no kernel takes."""
    first, slot, device = updates[0], updates[0].slot, updates[0].g.device
    if not first.plain:
        raise TypeError(
            f"compiled steps take plain tensors, not {type(first.p).__name__} with a "
            f"gradient of {type(first.g).__name__}, nor pending negations: allowed is "
            "x.resolve_neg(), a class with compile=False, and the pure step"
        )
    # On CPU C++ around the kernel decodes and encodes, elsewhere the kernel itself.
    around = slot.coded and updates_lists(device)
    if (why := _why_eager(slot, around)) is not None:
        log_once(f"some steps for {device.type} run eagerly, several times slower: {why}")
        return plan_eager(rule, updates, write)
    asked = _asked(rule, first, write)
    rounds = rounds_in(asked)
    if is_rehearsed(device):
        listed = updates_lists(device) or not rounds
        direct, launches = _fitting(rule, updates, write, 1 if listed else 2, around)
        parts = chunks(direct, DRAWN, _numel) if first.draws else [direct]
        return launches + [RehearsedLaunch(rule, x, write) for x in parts if x]
    make = partial(_kernel, rule, first, write, around, bool(rounds))
    try:
        kernels = {name: make(name) for name in (None, *rounds)}
    except NoListKernelError as error:
        warn_once(f"the optimizer step for CPU runs eagerly, several times slower: {error}")
        return plan_eager(rule, updates, write)
    run = kernels[None]
    # It would upload its table within the capture, from memory that is freed.
    if isinstance(run, TritonListKernel) and is_capturing(device):
        kernels[None] = run = run.single
    lists = {name: x for name, x in kernels.items() if isinstance(x, ListKernel)}
    listed = len(lists) == len(kernels)
    if around and not (listed and are_exact()):
        return plan_eager(rule, updates, write)
    # Length 1 would specialise the graph of a single kernel.
    least = 1 if listed or (isinstance(run, TritonListKernel) and not rounds) else 2
    direct, launches = _fitting(rule, updates, write, least, around)
    in_one_call = isinstance(run, ListKernel | TritonListKernel)
    for batch in split_twins(direct) if in_one_call else [direct]:
        parts = [batch]
        if (listed and rounds) or first.draws:
            most = DRAWN if first.draws else MEASURED
            parts = list(chunks(batch, most, _numel))
        if listed:
            launches += [ListLaunch(rule, part, write, asked, lists) for part in parts]
            continue
        for part in parts:
            same = grouped(part, lambda u: u.at).values()
            launches += [KernelLaunch(rule, x, write, asked, kernels) for x in same]
    return launches


def _why_eager(slot: Slot, around: bool) -> str | None:
    """Return why no kernel takes a parameter, and what to do about it, or None."""
    if not slot.dense:
        return (
            "a parameter or its state does not fill its memory in one order, as a part of "
            "another tensor does. Use a contiguous copy as the parameter"
        )
    if around and not slot.in_place:
        return (
            "state in codes, as of storage='compact' and 'exact', is decoded in place, and "
            "this step returns new tensors. Use the step whose name ends with _, or a class"
        )
    if around and not can_run(slot):
        return (
            f"a {slot.dtypes[PARAM]} parameter with a compensation in "
            f"{slot.compensation} is decoded by torch alone. Use bfloat16"
        )
    return None


def _numel(u: Update) -> int:
    return u.slot.numel


def _fitting(
    rule: Rule, updates: list[Update], write: bool, least: int, around: bool
) -> tuple[list[Update], list[Launch]]:
    """Return the updates that a kernel takes, and eager launches of the rest.

    A kernel takes at least so many elements. If it decodes codes itself, and not C++
    `around` it, it takes whole groups of them.
    """
    group = GROUP if scales_in(updates[0].slot.dtypes) and not around else 1
    fit = [u.slot.numel >= least and u.slot.numel % group == 0 for u in updates]
    rest = plan_eager(rule, list(compress(updates, [not x for x in fit])), write)
    return list(compress(updates, fit)), rest


def _kernel(
    rule: Rule,
    u: Update,
    write: bool,
    around: bool,
    has_means: bool,
    measures: str | None,
) -> Kernel:
    """Compile the kernel for updates like `u` that moves them, or measures a round.

    If `around`, C++ decodes the state before it calls the kernel, and encodes it after.
    """
    slot = u.slot
    own = slot.decoded if around or not slot.coded else slot.dtypes
    widens = around and has_means and widens_gradients(slot, u.g)
    grad = torch.float32 if widens else u.g.dtype
    tensors = tuple({PARAM: own[PARAM], GRAD: grad, **own}.items())
    choices = rule, u.scalars.statics, write, slot.in_place, tensors, u.g.device
    key = KernelKey(*choices, given=u.given_dtypes)
    given = [name for name, _ in key.given]
    table = [PARAM, GRAD, *[name for name in slot.dtypes if name != PARAM], *given]
    # Where 16-bit tensors stand beside wider ones, Inductor's in-place code stores 16 of
    # them under a mask, and the next vector's load has to wait for that store. So such a
    # step runs the code that writes to new tensors, on in-place arguments. With AVX-512 a
    # step of 8-bit moments takes 7.2 ms in place of 11.8 with Kahan compensations, and 4.8
    # in place of 8.7 with plain bfloat16 weights; with AVX2 there is no difference.
    mixed = len({x in LOW for x in own.values()}) > 1
    listed = updates_lists(u.g.device)
    simple = write and not has_means and not u.given
    if mixed and listed and slot.in_place and simple:
        result = kernel(key._replace(in_place=False), u.scalars.scalars)
        wide = u.wide
        count = len(u.scalars.array(wide))
        if isinstance(result, ListKernel) and can_run_in_place(
            result, count, wide, key.dtypes
        ):
            stored = arguments_of(slot.dtypes, key.names, table, write, True, widens)
            return in_place_kernel(result, stored)
    result = kernel(key._replace(round=measures), u.scalars.scalars)
    if around and isinstance(result, ListKernel):
        names = [*key.names, *given]
        how = write, measures is None, widens
        stored = arguments_of(slot.dtypes, names, table, *how)
        return ListKernel(*result.made_of, stored)
    return result
