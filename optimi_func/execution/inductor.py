"""Calling the code that Inductor generated without torch.compile around it.

torch.compile checks its guards and unwraps its arguments for some 30 us a call, ten times
what a small update takes. A kernel's arguments are flat tensors that differ only in
length, so there is nothing to check: the generated code is kept from the one compilation,
with the order of its arguments, and is called directly.

Only this module and bfloat16.py use private parts of Inductor. If they are not as expected,
`compile_flat` returns torch.compile's own function, which does the same, slower.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from optimi_func.execution import bfloat16, cpp, store
from optimi_func.execution.cpp import with_vectors
from optimi_func.execution.list_kernel import ListKernel, list_kernel_of
from optimi_func.execution.shaped import ShapedKernel, shaped_kernel_of, store_vectors
from optimi_func.execution.tensors import uncollected
from optimi_func.execution.triton_list import triton_list_kernel_of

T = TypeVar("T", bound=Callable[..., object])
# `run(scalars, p, g, *state, *comp, *targets)` on 1-D tensors, some of which it writes to.
Kernel: TypeAlias = Callable[..., None]
Generated = Callable[[list[object]], object]

# Precompiling torch's C++ headers takes as long as four kernels without them.
PRECOMPILE_HEADERS = False
# Every combination of ambient state is a graph, and torch raises after 8 of them.
_RECOMPILE_LIMIT = 64
# Inductor indexes with 32 bits if its example allows it, and guards on that.
_LONGEST = 2**31 - 1


def compile_flat(function: Kernel, example: Sequence[Tensor], row: int) -> Kernel:
    """Compile `function` by calling it on an example.

    It takes a 1-D tensor of fixed length, then 1-D tensors of one common length, or rows of
    `row` elements (see `in_rows`), and writes to its arguments, the example too. The result
    takes dense tensors of any shape and length from 2, with one order of elements in
    memory. Autograd does not see its writes. On CUDA it is a TritonListKernel if one can be
    made. Errors of the compiler are raised.
    """

    def made() -> Kernel:
        kind = example[0].device.type
        options = _width() if kind == "cpu" else _one_pass()
        public, code = _run_inductor(function, example, options)

        def guarded(*tensors: Tensor) -> None:
            # torch.compile guards on shapes, so it gets flat aliases.
            numbers, *flat = map(_alias, tensors)
            public(numbers, *in_rows(flat, row))

        if code is None:
            return guarded
        generated, order = code

        def direct(*tensors: Tensor) -> None:
            length = tensors[1].numel()
            if length > _LONGEST:
                guarded(*tensors)
            else:
                generated([tensors[i] if i >= 0 else length // row for i in order])

        if kind != "cuda" or row > 1:
            return direct
        return triton_list_kernel_of(direct, generated, order, example) or direct

    with uncollected():
        return with_vectors(made)


def compile_list_kernel(
    function: Kernel,
    example: Sequence[Tensor],
    shaped: bool,
    elementwise: bool,
    kept: bool = False,
) -> ListKernel | ShapedKernel | None:
    """Compile `function` for lists of tensors on CPU; None if that is not possible.

    If `shaped`, tensors have shapes, and the first of the example one of different primes.
    If `elementwise`, the function adds up no elements. If `kept`, the store will have it.
    """

    def compile_with(
        header: dict[str, object], conversions: bfloat16.Conversions | None
    ) -> ListKernel | ShapedKernel | None:
        options = {"cpp.threads": 1, **_width(), **header}
        options |= _one_pass() if shaped else {}
        if kept and store.folder() is not None:
            # A key of torch's own cache takes longer to compute than a kernel to generate.
            options["fx_graph_cache"] = False
        change = store_vectors if shaped else conversions
        _, code = _run_inductor(function, example, options, change)
        make = shaped_kernel_of if shaped else list_kernel_of
        kernel = None if code is None else make(*code, example)
        if code is None or kernel is None or conversions is None:
            return kernel
        if conversions.hold(kernel, code[1], example):
            return kernel
        bfloat16.report_conversions(function.__name__)
        return compile_with(header, None)

    def made() -> ListKernel | ShapedKernel | None:
        dtypes = {x.dtype for x in example[1:]}
        header = bfloat16.header_options(dtypes, elementwise and not shaped)
        try:
            converts = header and not shaped
            return compile_with(header, bfloat16.Conversions() if converts else None)
        except Exception as error:
            if not header or "C++ compile error" not in str(error):
                raise
            kernel = compile_with({}, None)  # raises if the header is not the cause
            bfloat16.report(error)
            return kernel

    cpp.start()  # of the settings before they are changed
    with uncollected():
        return with_vectors(made)


def _width() -> dict[str, object]:
    """Return the width of vectors, which is in the key of torch's cache as an option alone.

    Code for other vectors (ATEN_CPU_CAPABILITY, another processor) writes elsewhere.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return {"cpp.simdlen": pick_vec_isa().bit_width()}


def _one_pass() -> dict[str, object]:
    """Return options that keep Inductor from storing temporaries as long as a parameter.

    By default it stores what took many reads or operations, and each of a kernel's scalars
    counts as a read. A mean over such a temporary would take twice the memory traffic.
    """
    limits = "reads", "acc_reads", "opcount"
    return {f"realize_{limit}_threshold": 1 << 20 for limit in limits}


def _run_inductor(
    function: Kernel,
    example: Sequence[Tensor],
    options: dict[str, object],
    change: Callable[[GraphModule], dict[str, object]] | None = None,
) -> tuple[Kernel, tuple[Generated, list[int]] | None]:
    """Return torch.compile's function, and the generated code with `argument_order`.

    `change` changes the graph that Inductor compiles, and returns more options for it.
    """
    from torch._functorch import config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner

    codes: list[Generated | None] = []
    calls: list[Sequence[object]] = []

    def inner(graph: GraphModule, given: Sequence[Tensor], **more: Any) -> object:
        settings = {} if change is None else change(graph)
        with inductor_config.patch(settings):
            compiled: Any = compile_fx_inner(graph, given, **more)
        codes.append(generated_code(compiled))
        call = compiled.__call__

        def first(arguments: list[object]) -> object:
            if not calls:
                calls.append(list(arguments))
            return call(arguments)

        first._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return first

    def backend(graph: GraphModule, given: Sequence[Tensor]) -> object:
        return lower(graph, given, inner, options)

    public = torch_compile(function, {"dynamic": True, "backend": backend})
    # A hit in that cache would not call `inner`.
    with config.patch(enable_autograd_cache=False):
        # Else numbers that a hook reads of its module would be arguments of the code, and
        # all objects of the process would be searched for garbage.
        with torch._dynamo.config.patch(specialize_float=True, run_gc_after_compile=False):
            public(*example)
    order = argument_order(calls[0] if calls else (), example)
    calls[:] = [()]  # frees the example
    generated = codes[-1] if codes else None
    return public, None if generated is None or order is None else (generated, order)


def lower(
    graph: GraphModule,
    example: Sequence[Tensor],
    inner: Callable[..., Any],
    options: Mapping[str, object],
) -> object:
    """Compile a graph by Inductor, `inner` being its last stage."""
    from torch._inductor.compile_fx import compile_fx

    patches = {
        # Without size asserts the generated code takes any dense tensor for a flat one.
        "size_asserts": False,
        # Attention, convolutions: patterns that no update has, and that take long to load.
        "use_pre_grad_passes": False,
        "use_joint_graph_passes": False,
        "cpp_cache_precompile_headers": PRECOMPILE_HEADERS,
        **options,
    }
    return compile_fx(graph, example, inner_compile=inner, config_patches=patches)


def argument_order(given: Sequence[object], example: Sequence[Tensor]) -> list[int] | None:
    """Return for each generated argument the index of ours, -1 - i for dimension i."""
    order: list[int] = []
    places = {x.data_ptr(): i for i, x in enumerate(example)}
    sizes = list(example[1].shape)
    for argument in given:
        if isinstance(argument, int) and argument in sizes:
            order.append(-1 - sizes.index(argument))
        elif isinstance(argument, Tensor) and argument.data_ptr() in places:
            order.append(places[argument.data_ptr()])
        else:
            return None
    return order if -1 in order else None


def generated_code(compiled: object) -> Generated | None:
    """Return what Inductor wrote, if it is where torch 2.13 to 2.15 have it."""
    return getattr(compiled, "current_callable", None)


def in_rows(tensors: list[Tensor], row: int) -> list[Tensor]:
    """View 1-D tensors as rows of `row` elements, except scales.

    Scales have one element for each row, so they are shorter than the first tensor.
    """
    if row == 1:
        return tensors
    count = tensors[0].numel()
    rows = [x.view(-1, row) if x.numel() == count else x for x in tensors]
    for x in rows:
        if x.dim() > 1:
            # Only the number of rows is free.
            torch._dynamo.mark_static(x, 1)
    return rows


def _alias(x: Tensor) -> Tensor:
    # Guards look at a view's base, and would make a graph for each rank. They also notice
    # if two arguments are one object, so this is always a new one.
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), (x.numel(),), (1,))


def torch_compile(function: T, options: Mapping[str, object]) -> T:
    """Apply torch.compile as one graph, with room for every kind of ambient state."""
    compiler: Any = torch.compile
    return compiler(function, fullgraph=True, recompile_limit=_RECOMPILE_LIMIT, **options)
