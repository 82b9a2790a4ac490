"""Faster C++ for the kernels of bfloat16 tensors on x86.

Inductor's C++ calls at::vec, which converts between bfloat16 and float32 with many more
instructions than the processor needs. cpp/bfloat16.cpp has faster versions of these
functions, which return the same bits. Compilers read it before the code that Inductor
generated.

`codes.round_to` rounds by six operations, because compilers drop a conversion to bfloat16
and back, and with it the compensation. `Conversions` puts that conversion into the graph
at the last moment, where Inductor can be told to keep it, and a trial shows that it did.
"""

import logging
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from optimi_func.core.checks import is_first
from optimi_func.core.runtime import runtime
from optimi_func.execution.list_kernel import TRIAL, kernels_agree

HEADER = Path(__file__).with_name("cpp") / "bfloat16.cpp"
# Inductor has no setting for additional flags of the compiler, but it writes the value of
# this one into the command line as it is.
_FLAG = "enable_floating_point_contract_flag"
_log = logging.getLogger("optimi_func")


def header_options(dtypes: set[torch.dtype], elementwise: bool) -> dict[str, object]:
    """Return options of Inductor by which compilers read cpp/bfloat16.cpp.

    Args:
        dtypes: The dtypes of the kernel's tensors. Without bfloat16 there are no options.
        elementwise: True if the kernel adds up no elements, so that their order in a vector
            does not matter.
    """
    from torch._inductor import config

    x86 = platform.machine() in ("x86_64", "AMD64") and os.name != "nt"
    if torch.bfloat16 not in dtypes or not x86 or runtime.no_conversions:
        return {}
    if not hasattr(config.cpp, _FLAG):
        report(f"torch {torch.__version__} has no setting {_FLAG!r}")
        return {}
    # Inductor's caches compare flags, but not the files that these name.
    flags = f" -include {shlex.quote(str(HEADER))} -DOPTIMI_DIGEST={_digest()}"
    if elementwise and dtypes == {torch.bfloat16}:
        flags += " -DOPTIMI_BFLOAT16_ONLY"
    return {f"cpp.{_FLAG}": getattr(config.cpp, _FLAG) + flags}


def report(cause: object) -> None:
    """Do without the header from now on in this process, and say so once."""
    if not runtime.no_conversions:
        runtime.no_conversions.append(str(cause))
        _log.warning(
            "bfloat16 steps on this CPU take up to twice as long as they could: %s cannot "
            "be used with torch %s and this compiler. The results are the same. Use torch "
            "2.13 and g++ 12 or newer, or report this error: %s",
            HEADER.name,
            torch.__version__,
            cause,
        )


def report_conversions(name: str) -> None:
    """Say once in a process that a kernel is compiled again without conversions."""
    if is_first("conversions"):
        _log.warning(
            "bfloat16 steps with Kahan summation take about a tenth longer than they "
            "could: a trial of the kernel %s with conversions to bfloat16 gave other bits "
            "than its graph, so it is compiled again without them. The results are right. "
            "Use torch 2.13, or report this with torch %s",
            name,
            torch.__version__,
        )


@cache
def _digest() -> str:
    return sha256(HEADER.read_bytes()).hexdigest()[:16]


# Operations whose results are exact or correctly rounded, which means that every way to
# compute them gives the same bits. torch's own exp(), for example, may differ in the last
# bit from that of a kernel.
_EXACT = frozenset(
    "abs add alias clamp clamp_max clamp_min convert_element_type copy copy_ div eq full "
    "ge getitem gt le logical_and logical_not logical_or lt maximum minimum mul ne neg "
    "scalar_tensor sign split sqrt sub unbind view where".split()
)


class Conversions:
    """A change of a kernel's graph: roundings to bfloat16 become conversions.

    A conversion is one instruction for 32 elements. Results have the same bits, except that
    a parameter that a step makes infinite is infinite, where `round_to` returns NaN. A
    graph is left unchanged if its results could not be checked bit for bit.
    """

    def __init__(self) -> None:
        self._before: GraphModule | None = None

    def __call__(self, module: GraphModule) -> dict[str, object]:
        """Change the graph, and return the options that Inductor needs for it."""
        from torch._inductor import config

        setting = "emulate_precision_casts"  # or Inductor would drop the conversions
        before = deepcopy(module)
        exact = all(map(_is_exact, module.graph.nodes))
        if not exact or not hasattr(config, setting) or not convert_roundings(module):
            return {}
        self._before = before
        return {setting: True}

    def hold(
        self, kernel: Callable[..., None], order: list[int], example: Sequence[Tensor]
    ) -> bool:
        """Return True if a kernel gives bit for bit what the unchanged graph gives.

        The graph is run one operation after the other, without a compiler.

        Args:
            kernel: Writes to its arguments, which are like the example.
            order: The index in the example for each argument of the graph, or a negative
                number for the length.
            example: Scalars, then tensors of one length.
        """
        if (before := self._before) is None:
            return True

        def run(*trial: Tensor) -> None:
            # Its last nodes write to the arguments.
            _Operations(before).run(*[TRIAL if i < 0 else trial[i] for i in order])

        # In the first trial compensations are larger than a rounding error can be, and are
        # left out. The second has usual ones. Both round up and down.
        return all(
            kernels_agree(kernel, run, example, 0.0, scale) for scale in (1.0, 2.0**-8)
        )


class _Operations(Interpreter):
    """The operations of a graph, each correctly rounded, as in the C++ of Inductor."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # torch may compute square roots by MKL, whose last bit can be another.
        if target == torch.ops.aten.sqrt.default:
            return args[0].double().sqrt().to(args[0].dtype)
        return super().call_function(target, args, kwargs)


def _is_exact(node: Node) -> bool:
    if node.op != "call_function":
        return True
    name = getattr(node.target, "__name__", "").split(".")[0]
    # A sum with a factor may be one rounding or two.
    return name in _EXACT and not node.kwargs.get("alpha")


def convert_roundings(module: GraphModule) -> bool:
    """Replace `round_to` for bfloat16 by a conversion and its inverse.

    Returns False if the graph has none.
    """
    graph, convert = module.graph, torch.ops.prims.convert_element_type.default
    found = [(node, x) for node in graph.nodes if (x := _scaled_down(node)) is not None]
    for node, small in found:
        with graph.inserting_before(node):
            # `round_to` scales down first, which takes bits from numbers below 2^-109.
            x = graph.call_function(torch.ops.aten.mul.Tensor, (small, 2.0**17))
            low = graph.call_function(convert, (x, torch.bfloat16))
            wide = graph.call_function(convert, (low, torch.float32))
        low.meta = {**node.meta, "val": node.meta["val"].to(torch.bfloat16)}
        x.meta, wide.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(wide)
        # The parameter is the rounded number in bfloat16, which is `low` already.
        for user in list(wide.users):
            if user.target == convert and user.args[1] == torch.bfloat16:
                user.replace_all_uses_with(low)
    graph.eliminate_dead_code()
    module.recompile()
    return bool(found)


def _scaled_down(node: Node) -> Node | None:
    """Return x * 2^-17 if a node is `round_to(x, torch.bfloat16)`, or None."""
    aten = torch.ops.aten
    rest, factor = _operands(node, aten.mul.Tensor)
    scaled, less = _operands(rest, aten.sub.Tensor)
    again, small = _operands(less, aten.sub.Tensor)
    large, added = _operands(scaled, aten.add.Tensor)
    same, bits = _operands(large, aten.mul.Tensor)
    _, by = _operands(small, aten.mul.Tensor)
    fits = again is scaled and added is small and same is small
    return small if fits and (by, bits, factor) == (2.0**-17, 2.0**16, 2.0**17) else None


def _operands(node: object, target: object) -> tuple[Any, Any]:
    """Return the two operands of a node that calls `target`, or None for others."""
    if not isinstance(node, Node) or node.target != target or len(node.args) != 2:
        return None, None
    return node.args[0], node.args[1]
