"""A compiled function, called without what torch.compile does at every call.

torch.compile checks its guards and unwraps its arguments for some 30 us a call, ten times
what a small update takes. A kernel's arguments are flat tensors that differ in length
alone, so there is nothing to check: what Inductor generated is kept from the one
compilation, with the order of its arguments, and called by itself.

This is the one module that reaches into Inductor's private parts. Where they are not as
expected, `compile_flat` gives torch.compile's own function, which does the same, slower.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimi_func.execution.list_kernel import ListKernel, list_kernel_of
from optimi_func.execution.triton_list import triton_list_kernel_of

S = TypeVar("S")
T = TypeVar("T", bound=Callable[..., Any])
# A function of 1-D tensors that returns nothing and writes to some of them.
Flat = Callable[..., None]
Generated = Callable[[list[Any]], Any]

# Building torch's C++ headers for kernels to come takes as long as four kernels without.
PRECOMPILE_HEADERS = False
# Every combination of ambient state is a graph; torch stops at 8 of them and raises.
_RECOMPILE_LIMIT = 64
# Inductor indexes with 32 bits where its example allowed it, and guards on that.
_LONGEST = 2**31 - 1


def compile_flat(function: Flat, example: Sequence[Tensor], row: int) -> Flat:
    """Compile `function` by calling it on an example.

    Args:
        function: Takes a 1-D tensor of fixed length, then 1-D tensors of one common
            length, which is free; writes to its arguments and returns nothing.
        example: Arguments of a typical length, which are written to.
        row: The elements of a row, where the function takes rows (see `in_rows`), else 1.

    Returns:
        The compiled function, for every length of 2 and more. It takes dense tensors of
        any shape, as long as their elements lie in memory in one order, and what it
        writes is not seen by autograd. On CUDA it is, where that can be had, a
        TritonListKernel.

    Raises:
        Exception: Whatever the compiler raised.
    """

    def made() -> Flat:
        kind = example[0].device.type
        options = {} if kind == "cpu" else _one_pass()
        public, record = _compile(function, example, options)
        order = record.order(example)
        if record.generated is None or order is None:
            return _Public(public, row).run
        single = _Direct(public, record.generated, order, row).run
        if kind != "cuda" or row > 1:
            return single
        many = triton_list_kernel_of(single, record.generated, order, example)
        return many or single

    return _with_vectors(made)


def compile_list_kernel(function: Flat, example: Sequence[Tensor]) -> ListKernel | None:
    """As `compile_flat`, for CPU and lists of tensors; None where that cannot be had."""

    def made() -> ListKernel | None:
        _, record = _compile(function, example, {"cpp.threads": 1})
        order = record.order(example)
        if record.generated is None or order is None:
            return None
        return list_kernel_of(record.generated, order, example)

    return _with_vectors(made)


def _one_pass() -> dict[str, Any]:
    """Options by which nothing as long as a parameter lies in memory between operations.

    Inductor keeps what was computed from many reads or by many operations, and each of a
    kernel's numbers counts as a read: a mean, which cannot be fused back into what it was
    kept for, would take twice the memory traffic, and a tensor of its own.
    """
    from torch._inductor import config

    limits = ("reads", "acc_reads", "opcount")
    names = [f"realize_{limit}_threshold" for limit in limits]
    return {name: 1 << 20 for name in names if hasattr(config, name)}


def _with_vectors(made: Callable[[], S]) -> S:
    try:
        with unprobed_vectors():
            return made()
    except Exception:
        # Perhaps the compiler knows fewer instructions than the processor: find out.
        probe_vectors()
        return made()


def _compile(
    function: Flat, example: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Flat, "_Record"]:
    record = _Record(options)
    public = torch_compile(function, {"dynamic": True, "backend": record.backend})
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        # A hit in that cache would bring the function without the part that we keep.
        public(*example)
    return public, record


@contextmanager
def unprobed_vectors() -> Generator[None]:
    """Compile for this processor's vector instructions without trying them out first.

    By default Inductor compiles and loads a test program for each instruction set, which
    takes a fifth of a first step (pytorch/pytorch#140970). Its setting for this,
    `torch._inductor.config.cpp.vec_isa_ok` (environment TORCHINDUCTOR_VEC_ISA_OK), is set
    in this thread alone and for the time of the compilation. A value that the user has
    set stays.

    From torch 2.13, where such a setting belongs to one thread. Before, two compilations
    at a time could leave it set for the whole process: there Inductor tries out.
    """
    if torch.__version__ < "2.13":
        yield
        return
    from torch._inductor import config

    if config.cpp.vec_isa_ok is not None:
        yield
        return
    with config.patch({"cpp.vec_isa_ok": True}):
        yield


def probe_vectors() -> None:
    """Have Inductor try out the vector instructions after all, after a failed compilation.

    It keeps the list of instruction sets for the process (`functools.cache`), also one
    made while `unprobed_vectors` was in effect. A compilation that has succeeded with that
    list has tried it out.
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()


class _Record:
    """What Inductor made of the one graph, and the arguments it was first called with."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options  # of Inductor
        self.generated: Generated | None = None
        self.arguments: list[Any] | None = None

    def backend(self, graph: Any, example: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        # Without size asserts the generated code takes any dense tensor for a flat one.
        patches = {"size_asserts": False, **self.options}
        # Attention, convolutions: patterns that no leaf has, and that take long to load.
        for name in ("use_pre_grad_passes", "use_joint_graph_passes"):
            if hasattr(config, name):
                patches[name] = False
        if hasattr(config, "cpp_cache_precompile_headers"):
            patches["cpp_cache_precompile_headers"] = PRECOMPILE_HEADERS
        return compile_fx(
            graph, example, inner_compile=self._compile, config_patches=patches
        )

    def _compile(self, graph: Any, example: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        compiled: Any = compile_fx_inner(graph, example, **options)
        self.generated = generated_code(compiled)
        call = compiled.__call__

        def first(arguments: list[Any]) -> Any:
            if self.arguments is None:
                self.arguments = list(arguments)
            return call(arguments)

        first._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return first

    def order(self, example: Sequence[Tensor]) -> list[int] | None:
        """For each generated argument, the index of ours, or -1 for the length."""
        found: list[int] = []
        places = {x.data_ptr(): i for i, x in enumerate(example)}
        length = len(example[1])
        for argument in self.arguments or ():
            if isinstance(argument, int) and argument == length:
                found.append(-1)
            elif isinstance(argument, Tensor) and argument.data_ptr() in places:
                found.append(places[argument.data_ptr()])
            else:
                return None
        return found if -1 in found else None


def generated_code(compiled: Any) -> Generated | None:
    """What Inductor wrote, if it is where it was."""
    return getattr(compiled, "current_callable", None)


class _Public:
    """torch.compile's own function, which guards on shapes: it gets flat aliases."""

    def __init__(self, public: Flat, row: int) -> None:
        self.public, self.row = public, row

    def run(self, *tensors: Tensor) -> None:
        numbers, *flat = map(_alias, tensors)
        self.public(numbers, *in_rows(flat, self.row))


def in_rows(tensors: list[Tensor], row: int) -> list[Tensor]:
    """1-D tensors in rows of so many elements; those shorter than the first are left.

    One has an element a row already, where others have one an element.
    """
    if row == 1:
        return tensors
    count = tensors[0].numel()
    rows = [x.view(-1, row) if x.numel() == count else x for x in tensors]
    for x in rows:
        if x.dim() > 1:
            # The number of rows alone is free.
            torch._dynamo.mark_static(x, 1)
    return rows


def _alias(x: Tensor) -> Tensor:
    # Not a view: guards look at a view's base, and would make a graph for each rank.
    # Always an object of its own: guards tell when two arguments are one.
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), (x.numel(),), (1,))


class _Direct:
    """The generated code, with torch.compile's function for what it was not made for."""

    def __init__(
        self, public: Flat, generated: Generated, order: list[int], row: int
    ) -> None:
        self.public = _Public(public, row)
        self.generated = generated
        self.order = order
        self.row = row

    def run(self, *tensors: Tensor) -> None:
        length = tensors[1].numel()
        if length > _LONGEST:
            self.public.run(*tensors)
            return
        count = length // self.row
        self.generated([tensors[i] if i >= 0 else count for i in self.order])


def torch_compile(function: T, options: dict[str, Any]) -> T:
    """torch.compile as one graph, with room for every combination of ambient state."""
    compiler: Any = torch.compile
    if "recompile_limit" in inspect.signature(compiler).parameters:
        return compiler(
            function, fullgraph=True, recompile_limit=_RECOMPILE_LIMIT, **options
        )
    # Before torch 2.13 the limit is looked up at each call.
    patch = torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT)
    return patch(compiler(function, fullgraph=True, **options))
