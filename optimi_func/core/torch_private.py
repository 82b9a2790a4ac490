"""Small functions around private torch APIs that compiled/ and execution/ do not own.

They are there in torch 2.13 to 2.15; 2.13 is the oldest supported one. No public name
does the same, and where one seems to, the docstring says why not. Tests named
`test_private_...` fail if a new torch lacks a name. No function changes torch for other
code.
"""

import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from operator import attrgetter
from traceback import walk_stack
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import Variable
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils import _pytree as pytree

from optimi_func.core.lists import grouped
from optimi_func.core.rehearsal import is_rehearsed

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_C: Any = torch._C
P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Leave `function` out of any graph, as torch.compiler.disable does.

    The public decorator imports the compiler at once, which takes a second. torch.optim
    uses this one too. test_import_leaves_the_compiler_and_dtensor_alone fails if it is no
    longer lazy.
    """
    return _disable_dynamo(function)


def between_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Leave `function` out of any graph, as `uncompiled`, which elsewhere is no detour."""
    left_out = uncompiled(function)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return (left_out if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return wrapper


_UNCOMPILED = _disable_dynamo(lambda: None)


def unwrapped(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method of torch.optim.Optimizer that does not import the compiler.

    torch wraps some as `uncompiled` does. Before anything has imported the compiler, there
    is no compiled frame to leave.
    """
    function: Any = method
    if "torch._dynamo" in sys.modules or function.__code__ is not _UNCOMPILED.__code__:
        return method
    return MethodType(function.__wrapped__, function.__self__)


def watched_if_needed(step: Callable[P, T]) -> Callable[P, T]:
    """Return an optimizer's step that runs hooks and is in profiles, where there are any.

    torch wraps the step of every optimizer for both, which takes a third of a small step.
    A step marked as `hooked` is left as it is, also where a subclass's own step calls it.
    In a function that torch.compile traces, the step and its hooks run once, between two
    graphs.
    """
    watched: Any = Optimizer.profile_hook_step(step)
    first, last = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    profiling = _C._autograd._profiler_enabled

    @wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return left_out(self, *args, **kwargs)
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if (hooks or first or last or profiling()) and type(self).step is wrapper:
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    left_out = uncompiled(wrapper)
    found: Any = wrapper
    found.hooked = True
    return found


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that a graph being compiled calls at once, and keeps no call of.

    torch.compiler.assume_constant_result does the same, and imports the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def is_switched_off() -> bool:
    """Return True if the environment or a setting switches torch.compile off."""
    config = sys.modules.get("torch._dynamo.config")
    variable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    disabled = variable if config is None else config.disable
    return disabled or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def has_stance() -> bool:
    """Return True if torch.compiler.set_stance changed what torch.compile does."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and frames._stance != frames.DynamoStance()


def changed_settings() -> list[str] | None:
    """Return the compiler's settings that are not the defaults; None before its import.

    torch's codegen_config also lists those that were set to a default.
    """
    parts = [sys.modules.get(f"torch.{x}.config") for x in ("_inductor", "_functorch")]
    if not any(parts):
        return None
    return [
        f"{name}={value!r}"
        for config in filter(None, parts)
        for name, value in config.get_config_copy().items()
        if value != config._config[name].default
    ]


@constant_in_graphs
def multiplies_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 matrices faster than float32 ones.

    torch.cpu.get_capabilities() tells the same from torch 2.12 on.
    """
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


def in_compiled_region() -> bool:
    """Return True if torch.compile traces, or runs a frame that it could not trace.

    In such a frame torch.compiler.is_compiling() is False.
    """
    return torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False)


def dispatch_modes() -> int:
    """Return how many dispatch modes are active, torch's own (make_fx) included."""
    return torch._C._len_torch_dispatch_stack()


def foreach_add_(tensors: list[Tensor], number: float | list[float]) -> None:
    """Add one number to all tensors, or a list's numbers to one tensor each."""
    if tensors:
        torch._foreach_add_(tensors, number)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward now running has finished without an error.

    If that backward fails, the callback is dropped with everything it references. It runs
    after the callbacks that other code queued during the backward, because fully_shard
    reduces the last gradients there and DistributedDataParallel puts its own into p.grad.

    A public name is on its way (pytorch/pytorch#66199, #193958); fully_shard uses this one.
    """
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def backward_id() -> int:
    """Return the number of the running backward, or -1 outside of any.

    A backward that another one started has its own number. torch.autograd.graph's
    multi-gradient hooks use this name too.
    """
    return torch._C._current_graph_task_id()


def in_compiled_autograd() -> bool:
    """Return True if torch.compile runs the backward (compiled autograd).

    The public setting, torch._dynamo.config.compiled_autograd, only allows it.
    """
    from torch._dynamo import compiled_autograd

    return (
        compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
    )


def in_distributed_checkpoint() -> bool:
    """Return True within a function of torch.distributed.checkpoint.

    It asks a class for its state as any other code does.
    """
    frames = walk_stack(None)
    names = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    return any([name.startswith("torch.distributed.checkpoint.") for name in names])


def accumulate_hooks(p: Tensor) -> list[Callable[[Tensor], None]]:
    """Return all post-accumulate-grad hooks of p, which the public API does not list."""
    return list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


def fake_mode() -> "FakeTensorMode":
    """Return a mode in which operations compute shapes, dtypes and devices, but no values.

    torch.compile and torch.export use it, but no public name makes one.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def serializable(node: type[T]) -> type[T]:
    """Name a NamedTuple of a state in the files of torch.export and of torch.load.

    The public register_pytree_node refuses NamedTuples.
    """
    name = f"optimi_func.{node.__name__}"
    pytree._register_namedtuple(node, serialized_type_name=name)
    torch.serialization.add_safe_globals([node])  # for weights_only=True
    return node


def norms_of(tensors: list[Tensor], order: float = 2) -> list[Tensor]:
    """Return the norm of each tensor, as a 0-d tensor of at least float32.

    torch.nn.utils.get_total_norm computes the same, but returns only the total.
    """
    kinds = grouped(range(len(tensors)), lambda i: tensors[i].dtype)
    norms: dict[int, Tensor] = {}
    for dtype, places in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        values = torch._foreach_norm([tensors[i] for i in places], order, dtype=wide)
        norms.update(zip(places, values))
    return [norms[i] for i in range(len(tensors))]


def clip_factor(limit: float | Tensor | None, norm: Tensor) -> Tensor:
    """Return the factor that clips to `limit`, as torch.nn.utils computes it."""
    assert limit is not None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def is_plain(x: Tensor) -> bool:
    """Return True if x is memory: no subclass with its own dispatch, no zero tensor."""
    kind: Any = type(x)
    return kind.__torch_dispatch__ is _NO_DISPATCH and not x._is_zerotensor()


_NO_DISPATCH = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


# What a launch depends on, besides the addresses. Strides come last, because not every
# layout has them.
TENSOR_FACTS: list[Callable[[Tensor], object]] = [
    type,
    *[attrgetter(name) for name in ("layout", "dtype", "shape", "device")],
    Tensor.is_neg,
    Tensor._is_zerotensor,
    Tensor.is_inference,
    Tensor.stride,
]


def share(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have one storage."""
    return _C._is_alias_of(x, y)


def has_memory(x: Tensor) -> bool:
    """Return False for a meta or fake tensor, if no rehearsal lets it stand for another.

    FakeTensor is looked up in sys.modules, because a program that has one has imported it.
    """
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    fake = fakes is not None and isinstance(x, fakes.FakeTensor)
    return not (x.is_meta or fake) or is_rehearsed(x.device)


def transform_level() -> int:
    """Return how many transformations of torch.func are active."""
    return _functorch.maybe_current_level() or 0


def level_of(x: Tensor) -> int:
    """Return the level of the transformation that x belongs to, from 1, or -1 for none."""
    return _functorch.maybe_get_level(x)


def has_vmap() -> bool:
    """Return True if a vmap is active."""
    kinds = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return _functorch.TransformType.Vmap in kinds


def differentiates(x: Tensor) -> bool:
    """Return True if autograd or a transformation may differentiate through x.

    A vmapped tensor has to be unwrapped, because its own requires_grad is False even if the
    tensor in it requires a gradient.
    """
    if not transform_level():
        return False
    kinds = {interpreter.key() for interpreter in retrieve_all_functorch_interpreters()}
    if kinds & {_functorch.TransformType.Grad, _functorch.TransformType.Jvp}:
        return True
    return torch.func.debug_unwrap(x, recurse=True).requires_grad


def _fsdp_groups(params: Iterable[Tensor]) -> "list[tuple[FSDPModule, FSDPParamGroup]]":
    """Return the modules that fully_shard has divided for these shards, and its groups.

    The public API leads from a module to its parameters alone. A program that has called
    fully_shard has imported it.
    """
    registry = sys.modules.get("torch.distributed._composable_state")
    shards, pairs = {*params}, []
    for module, state in list(registry._module_state_mapping.items()) if registry else []:
        for group in getattr(state(), "_fsdp_param_groups", ()):
            if not shards.isdisjoint([x.sharded_param for x in group.fsdp_params]):
                pairs.append((module, group))
    return pairs


def reshard(params: Iterable[Tensor]) -> None:
    """Drop the parameters that fully_shard keeps gathered after a forward alone."""
    for module, _ in _fsdp_groups(params):
        module.reshard()


def has_unreduced_grads(params: Iterable[Tensor]) -> bool:
    """Return True if fully_shard has gradients that it did not or will not reduce."""
    for _, group in _fsdp_groups(params):
        gathered = [getattr(x, "_unsharded_param", None) for x in group.fsdp_params]
        grads = [x.grad for x in gathered if x is not None]
        grads += [x.unsharded_accumulated_grad for x in group.fsdp_params]
        unreduced = any([x is not None for x in (*grads, group._partial_reduce_output)])
        if unreduced or not (group.reduce_grads and group.all_reduce_grads):
            return True
    return False


def assert_later(flag: Tensor, text: str) -> None:
    """Raise if a 0-d flag is false. The host does not wait, as in public assertions."""
    torch._assert_async(flag, text)


def is_constant(x: Tensor) -> bool:
    """Return True if no derivative passes through x."""
    return not x.requires_grad and (level_of(x) < 0 or not differentiates(x))


def is_unwatched() -> bool:
    """Return True if no graph is traced, and no mode sees the operations."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (traced or dispatch_modes())
