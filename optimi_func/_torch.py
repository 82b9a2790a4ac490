"""Every use of a private torch API outside compiled/ and execution/, a small function each.

Each says why no public name does, in which torch it was tried (the lowest supported is
2.11, the newest tried 2.15), and which test fails where a torch no longer has it. Nothing
here changes torch for others.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.autograd import Variable

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, left out of any graph: torch.compiler.disable, at the first call.

    The public one imports the compiler at once, which takes a second. What torch.optim
    itself is decorated with; torch 2.11 to 2.15. Without it importing this package fails;
    test_import_leaves_the_compiler_and_dtensor_alone notices where it is no longer lazy.
    """
    return _disable_dynamo(function)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward now running has finished without an error.

    It is dropped, and with it whatever it holds, if that backward fails. It comes after
    what others wanted called during the backward: fully_shard reduces the last gradients
    there, DistributedDataParallel puts its own into p.grad.

    A public name is on its way (pytorch/pytorch#66199, #193958); fully_shard uses this
    one. Torch 2.11 to 2.15, test_private_autograd_is_there.
    """
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def backward_id() -> int:
    """A number that tells one running backward from another; -1 outside of any.

    Of a backward that another one started, its own. No public name has it;
    torch.autograd.graph's own multi-gradient hooks use this one. Torch 2.11 to 2.15,
    test_private_autograd_is_there.
    """
    return torch._C._current_graph_task_id()


def in_compiled_autograd() -> bool:
    """Whether torch.compile runs the backward (torch._dynamo.config.compiled_autograd).

    The public setting says that it may, not that it does. Torch 2.11 to 2.15,
    test_compiled_autograd_is_refused.
    """
    from torch._dynamo import compiled_autograd

    return (
        compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
    )


def accumulate_hooks(p: Tensor) -> list[Callable[[Tensor], None]]:
    """The post-accumulate-grad hooks that anybody registered on p.

    Hooks can be added in public, and not be listed. Torch 2.11 to 2.15,
    test_private_autograd_is_there.
    """
    return list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


def fake_mode() -> Any:
    """A mode in which operations compute shapes, dtypes and devices, and no values.

    torch.compile and torch.export run programs so; no public name makes one. Torch 2.11 to
    2.15, test_private_compiler_is_there.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, a 0-d tensor of at least float32.

    As torch.nn.utils.get_total_norm takes them, which returns the norm of all alone. Torch
    2.11 to 2.15, test_private_norms_are_there.
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault(torch.promote_types(x.dtype, torch.float32), []).append(i)
    found: dict[int, Tensor] = {}
    for wide, places in kinds.items():
        some = torch._foreach_norm([tensors[i] for i in places], 2, dtype=wide)
        found.update(zip(places, some))
    return [found[i] for i in range(len(tensors))]


def transform_level() -> int:
    """How many transformations of torch.func are active; 0 outside of any.

    This and the four below have no public names. Torch 2.11 to 2.15,
    test_private_transforms_are_there.
    """
    return _functorch.maybe_current_level() or 0


def level_of(x: Tensor) -> int:
    """Which of these transformations x belongs to, counted from 1; -1 for none."""
    return _functorch.maybe_get_level(x)


def forward_modes() -> int:
    """How many of these transformations are forward mode: jvp and jacfwd."""
    kinds = [one.key() for one in retrieve_all_functorch_interpreters()]
    return kinds.count(_functorch.TransformType.Jvp)


def differentiates(x: Tensor) -> bool:
    """Whether autograd or a transformation may ask for a derivative of what is made of x.

    vmap's tensors do not say of themselves that what is in them requires one.
    """
    kinds = [one.key() for one in retrieve_all_functorch_interpreters()]
    if {_functorch.TransformType.Grad, _functorch.TransformType.Jvp} & {*kinds}:
        return True
    return torch.func.debug_unwrap(x, recurse=True).requires_grad if kinds else False


def no_transforms() -> AbstractContextManager[Any]:
    """A context in which no transformation of torch.func is active."""
    return temporarily_clear_interpreter_stack()
