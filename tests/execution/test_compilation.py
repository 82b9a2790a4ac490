"""What compiling promises, counted: graphs, kernels, allocations, autograd's notice."""

import itertools
import os
import re
import threading
from functools import partial
from unittest.mock import patch

import pytest
import torch
from forked import run_script
from kernel_keys import key_of
from tiers import few, row
from torch._inductor.utils import run_and_get_code

import optimi_func
from optimi_func import Adam, AdamW, adamw_init, compiled, prepare_for_gradient_release
from optimi_func.core.leaf import init_leaf, requests, rounds_in
from optimi_func.core.packed import Packed
from optimi_func.core.rule import Rates, Scalars, Storage
from optimi_func.core.runtime import runtime
from optimi_func.execution import cpp, inductor, kernels, list_kernel, store
from optimi_func.execution.kernels import kernel

SHAPES = [
    *[(1,), (), (2,), (3,), (5, 1), (7, 11), (64,), (100, 3), (0,), (8193,)],
    *[(91, 97), (4, 4, 4), (128, 128), (1, 20000), (3, 3, 64, 64), (9000, 1)],
    *[(2, 2, 2, 2, 2), (17, 1, 19), (33333,), (2048, 33)],
]


COUNT = itertools.count()


def fresh(name: str, **options):
    """A rule of its own, so that another test's kernels do not count."""
    import dataclasses

    optimizer = getattr(optimi_func, name)(**options)
    digest = optimizer.rule.digest and f"{optimizer.rule.digest} {next(COUNT)}"
    own = {"rule": dataclasses.replace(optimizer.rule, digest=digest)}
    return type(name, (type(optimizer),), own)(**options)


@pytest.mark.kernels
@pytest.mark.parametrize("name", few(["adamw", "stableadamw", "cautious"], ["adamw"]))
def test_one_graph_for_all_shapes_and_schedules(name: str, graphs) -> None:
    """Thirty steps, twenty shapes, the smallest first, and everything changing."""
    import dataclasses

    more = {"cautious": True} if name == "cautious" else {}
    base = fresh("adamw" if more else name, lr=0.1, **more)
    states = {}
    for i in range(30):
        shapes = SHAPES[: i + 1]
        for j, shape in enumerate(shapes):
            p = torch.ones(shape)
            state = states.get(j) or base.init(p)
            betas = (0.9 - i / 100, 0.99 - i / 1000)
            optimizer = dataclasses.replace(
                base, lr=0.1 / (i + 1), weight_decay=0.01 * i, betas=betas
            )
            _, states[j] = compiled.step_(optimizer, p, torch.ones(shape), state)
    assert graphs() == (1 if name == "adamw" else 2)  # means are one of their own


@pytest.mark.kernels
def test_one_graph_for_any_number_of_tensors_and_any_ambient_state(graphs) -> None:
    optimizer = fresh("sgd", lr=0.1, momentum=0.9)
    for count in (1, 3, 50):
        params = [torch.ones(9000 + i) for i in range(count)]
        grads = [torch.ones_like(p) for p in params]
        state = optimizer.init(params)
        compiled.step_(optimizer, params, grads, state)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            compiled.step_(optimizer, params, grads, state)
        with torch.enable_grad():
            compiled.step_(optimizer, params, grads, state)
        with torch.inference_mode():
            compiled.step_(optimizer, params, grads, state)
    assert graphs() == 1


def released(model: torch.nn.Module, flag: bool = False, **options) -> None:
    """Two backwards under gradient release, the first with optimi's flag if asked for."""
    optimizer = AdamW(model.parameters(), lr=0.1, compile=True, gradient_release=True)
    handle = prepare_for_gradient_release(model, optimizer, **options)
    for last in (False, True):
        optimizer.optimizer_accumulation = flag and not last
        model(torch.ones(2, 9)).square().sum().backward()
    handle.remove()


def test_the_page_says_what_makes_another_graph(wanted: list[str]) -> None:
    """The table of docs/compiled.md, without compiling anything."""

    def asked(make, **options) -> list[str]:
        known = len(wanted)
        if isinstance(make, type):
            model = torch.nn.Linear(9, 9, dtype=options.pop("dtype", torch.float32))
            optimizer = make(model.parameters(), **{"lr": 0.1, "compile": True} | options)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        else:
            make(**options)
        return wanted[known:]

    model, tree = torch.nn.Linear(9, 9), {"w": torch.ones(9)}
    first = asked(Adam, weight_decay=0.1)
    assert len(first) == 1
    for same in (
        partial(asked, AdamW, weight_decay=0.1, maximize=True),
        partial(asked, AdamW, lr=torch.tensor(0.1), capturable=True),
        partial(asked, released, model=model),
        partial(asked, released, model=model, clip_value=1.0, skip_nonfinite=True),
        partial(asked, released, model=model, accumulation="buffer", accumulation_steps=2),
    ):
        assert same() == []
    for other in (
        partial(asked, AdamW, amsgrad=True),
        partial(asked, AdamW, dtype=torch.bfloat16, kahan_sum=False),
        partial(asked, AdamW, dtype=torch.bfloat16),
        partial(asked, AdamW, cautious_decay=True, weight_decay=0.1),
        # The state alone.
        partial(asked, released, model=model, flag=True),
        partial(asked, lambda: compiled.adamw_step(tree, tree, adamw_init(tree), lr=0.1)),
    ):
        assert len(other()) == 1
        assert other() == []
    states = {"accumulation": "states", "accumulation_steps": 2}
    assert len(asked(released, model=model, **states)) == 1  # a further part of a gradient
    assert len(asked(AdamW, cautious=True)) == 2


@pytest.mark.full
def test_rangers_lookahead_costs_a_second_graph_and_no_more(graphs) -> None:
    optimizer = fresh("ranger", lr=0.1, k=3)
    p = torch.ones(9000)
    state = optimizer.init(p)
    for _ in range(9):
        slow = state.leaves.slow_param
        version = slow._version
        compiled.step_(optimizer, p, torch.ones_like(p), state)
        del version
    assert graphs() == 2


def code_of(name: str, dtype: torch.dtype) -> list[str]:
    """The generated code of a leaf's kernels, compiled as the package compiles them."""
    optimizer = fresh(name, lr=0.1)
    p = torch.ones(4, dtype=dtype)
    leaf = init_leaf(optimizer.rule, optimizer.init_numbers, p, Storage())
    coeffs, _ = optimizer.advance(1, optimizer.rule.running())
    numbers = Packed(Scalars(coeffs, Rates(0.1, 0.0, 0.0, 1.0)))
    rounds = rounds_in(requests(optimizer.rule, numbers.scalars, True))
    keys = [key_of(optimizer.rule, numbers, leaf, p, x) for x in (*rounds, None)]
    with patch.dict(os.environ, {store.VARIABLE: "0"}):  # what is kept has no code
        _, code = run_and_get_code(lambda: [kernel(key, numbers.scalars) for key in keys])
    return code


@pytest.mark.kernels
@pytest.mark.parametrize(
    "dtype",
    [row(torch.float32, id="float32"), row(torch.bfloat16, id="bfloat16", tier="full")],
)
def test_a_step_is_one_kernel_without_allocations(dtype: torch.dtype, threads) -> None:
    """The kernel is for one thread, because our loop divides a list among all threads."""
    threads(2)
    (code,) = code_of("adamw", dtype)
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert code.count("#pragma omp for") == 0
    assert "empty_strided_cpu(" not in code
    assert "extern_kernels." not in code


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        row("stableadamw", torch.float32, id="stableadamw-float32"),
        row("stableadamw", torch.bfloat16, id="stableadamw-bfloat16", tier="full"),
        # Four means in one loop.
        row("lamb", torch.float32, id="lamb-float32", tier="full"),
    ],
)
def test_a_reduction_is_a_kernel_before_and_no_scratch(
    name: str, dtype: torch.dtype
) -> None:
    measure, move = code_of(name, dtype)
    for code in (measure, move):
        assert code.count("async_compile.cpp_pybinding(") == 1
        assert "extern_kernels." not in code
    assert name == "lamb" or "empty_strided_cpu(" not in move
    # The means themselves, what is made of several, and nothing as long as a parameter.
    sizes = re.findall(r"empty_strided_cpu\(\(([^)]*)\)", measure + move)
    assert all("s" not in size for size in sizes), sizes


def test_settings_that_keep_a_mean_out_of_memory_are_there() -> None:
    """Private ones: without them a GPU's mean takes a tensor as long as the parameter."""
    assert len(inductor._one_pass()) == 3


@pytest.mark.kernels
def test_pure_compiled_step_is_pure() -> None:
    params = {"big": torch.ones(9000), "small": torch.ones(3), "one": torch.ones(())}
    grads = {k: torch.ones_like(v) for k, v in params.items()}
    state = optimi_func.adamw_init(params)
    inputs = torch.utils._pytree.tree_leaves((params, grads, state))
    copies = [x.clone() for x in inputs]
    new = compiled.adamw_step(params, grads, state, lr=0.1)
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies))
    outputs = torch.utils._pytree.tree_leaves(new)
    memory = [x.untyped_storage().data_ptr() for x in [*inputs, *outputs]]
    assert len(set(memory)) == len(memory)
    assert not any(x.requires_grad for x in outputs)


@pytest.mark.kernels
def test_in_place_step_returns_what_it_was_given() -> None:
    params = {"a": torch.ones(3), "b": torch.ones(3)}
    grads = {"a": torch.ones(3), "b": None}
    state = optimi_func.adamw_init(params)
    new, after = compiled.adamw_step_(params, grads, state, lr=0.1)
    assert new is params
    assert after is state
    assert state.step == 1
    assert params["b"].tolist() == [1, 1, 1]
    assert (params["a"] < 1).all()


def test_names_match_the_pure_api() -> None:
    pure = {n for n in dir(optimi_func) if n.endswith("_step")}
    steps = {n for n in dir(compiled) if n.endswith("_step") and n[0] != "_"}
    assert pure == steps - {"train_step"}  # which takes any optimizer
    assert pure == {n[:-1] for n in dir(compiled) if n.endswith("_step_")}
    for name in pure:
        for step in (getattr(compiled, name), getattr(compiled, f"{name}_")):
            import inspect

            assert inspect.signature(step) == inspect.signature(getattr(optimi_func, name))


@pytest.mark.kernels
def test_nothing_is_written_when_the_compiler_fails(unkept, monkeypatch) -> None:
    optimizer = fresh("adamw", lr=0.1)
    monkeypatch.setattr(torch, "compile", lambda *a, **k: broken)

    def broken(*tensors):
        raise RuntimeError("no compiler today")

    p = torch.ones(9000)
    state = optimizer.init(p)
    with pytest.raises(RuntimeError, match="no compiler today"):
        compiled.step_(optimizer, p, torch.ones_like(p), state)
    assert (p == 1).all()
    assert state.step == 0


@pytest.mark.kernels
def test_threads_share_kernels() -> None:
    def work(out: list) -> None:
        w = torch.nn.Parameter(torch.ones(9000))
        optimizer = optimi_func.AdamW([w], lr=0.1, compile=True)
        for _ in range(5):
            w.grad = torch.ones_like(w)
            optimizer.step()
        out.append(w.detach())

    results: list = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 2
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["adamw", "stableadamw", "ranger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(name: str, dtype: torch.dtype) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        params = [torch.randn(s).to(device, dtype) for s in ((300, 40), (7,), ())]
        grads = [torch.randn(p.shape).to(device, dtype) for p in params]
        optimizer = getattr(optimi_func, name)(lr=0.1)
        state = optimizer.init(params)
        for _ in range(7):
            compiled.step_(optimizer, params, grads, state)
        ends.append([p.double().cpu() for p in params])
    for x, y in zip(*ends):
        torch.testing.assert_close(
            x, y, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5
        )


PARTS = {
    "compiler": (list_kernel, "native", lambda: None),
    "machine code": (list_kernel, "_machine_code", lambda *a: None),
    "generated": (inductor, "generated_code", lambda compiled: None),
    "arguments": (inductor, "argument_order", lambda given, example: None),
}


def stepped() -> tuple[torch.Tensor, str]:
    """Parameters after steps of a new rule, and what runs them."""
    optimizer = fresh("sgd", lr=0.1, momentum=0.9)
    params = [torch.ones(90, 100), torch.ones(3), torch.ones(9000)]
    state = optimizer.init(params)
    for i in range(3):
        grads = [torch.full_like(p, i + 1.0) for p in params]
        compiled.step_(optimizer, params, grads, state)
    way = "list" if runtime.kernels else "eager"
    return torch.cat([p.flatten() for p in params]), way


@pytest.fixture(scope="module")
def as_it_is() -> tuple[torch.Tensor, str]:
    return stepped()


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_without_inductors_private_parts_the_same_is_done(
    part, as_it_is, unkept, monkeypatch
):
    """The fallbacks of compiled/, and that they are not what runs here."""
    fast, way = as_it_is
    assert way == "list"
    monkeypatch.setattr(runtime, "other_code", [])
    monkeypatch.setattr(runtime, "kernels", {})
    monkeypatch.setattr(runtime, "said", set())
    monkeypatch.setattr(*PARTS[part])
    with pytest.warns(UserWarning, match="runs eagerly.*other code than expected"):
        slow, way = stepped()
    assert way == "eager"
    torch.testing.assert_close(fast, slow)
    # It is not tried again.
    assert not kernels.has_list_kernels()


@pytest.mark.full
def test_kernels_know_no_number_of_threads(graphs, threads) -> None:
    optimizer = fresh("sgd", lr=0.1)
    p = torch.ones(9000)
    state = optimizer.init(p)
    for count in (1, 2, 3, 1, 2, 3):
        threads(count)
        compiled.step_(optimizer, p, torch.ones_like(p), state)
    assert graphs() == 1


@pytest.mark.full
def test_ambient_state_costs_no_graph(graphs) -> None:
    optimizer = fresh("lion", lr=0.1)
    params = [torch.ones(9000), torch.ones(3)]
    grads = [torch.ones_like(p) for p in params]
    state = optimizer.init(params)
    compiled.step_(optimizer, params, grads, state)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("cpu"):
            compiled.step_(optimizer, params, grads, state)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    # One tensor may be another's gradient, and a parameter need not require grad.
    compiled.step_(optimizer, params, params, state)
    assert graphs() == 1


@pytest.mark.kernels
def test_a_bucket_of_one_is_a_copy() -> None:
    """Also of a weight that is contiguous and whose strides say otherwise."""
    p = {"b": torch.ones(3)}
    state = optimi_func.adamw_init(p)
    compiled.adamw_step(p, {"b": torch.ones(3)}, state, lr=0.1)
    assert p["b"].tolist() == [1, 1, 1]
    assert state.leaves["b"].exp_avg.tolist() == [0, 0, 0]
    conv = torch.nn.Conv2d(1, 8, 3, bias=False).to(memory_format=torch.channels_last)
    before = conv.weight.detach().clone()
    conv(torch.randn(2, 1, 8, 8)).sum().backward()
    optimi_func.AdamW(conv.parameters(), lr=0.1, compile=True).step()
    assert (conv.weight != before).all()


def tried_out(self: object, code: str) -> bool:
    raise AssertionError("tried out")


def test_vector_instructions_are_not_tried_out(monkeypatch) -> None:
    """A test program for each, and for its extensions, takes a fifth of a first step."""
    from torch._inductor import config, cpu_vec_isa

    usual = cpu_vec_isa.valid_vec_isa_list
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", tried_out)
    with cpp.unprobed_vectors():
        vectors = cpu_vec_isa.pick_vec_isa()
        assert vectors or not cpu_vec_isa.valid_vec_isa_list()
        with config.patch({"cpp.vec_isa_ok": False}), cpp.unprobed_vectors():
            assert config.cpp.vec_isa_ok is False  # as the user has it
    assert cpu_vec_isa.valid_vec_isa_list is usual and config.cpp.vec_isa_ok is None


def test_vectors_are_those_that_inductor_finds() -> None:
    """Kernels have the same code, whether instruction sets were tried out or not."""
    from torch._inductor import cpu_vec_isa

    found = cpu_vec_isa.pick_vec_isa()
    with cpp.unprobed_vectors():
        ours = cpu_vec_isa.pick_vec_isa()
    assert (str(ours), ours.bit_width()) == (str(found), found.bit_width())
    assert (ours.build_macro(), hash(ours)) == (found.build_macro(), hash(found))
    assert isinstance(ours, type(found))


@pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="needs an x86 CPU"
)
def test_vector_instructions_are_tried_out_where_a_compilation_fails(monkeypatch) -> None:
    from torch._inductor import cpu_vec_isa

    seen = []
    usual: list[object] = []
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: usual)

    def compile_(function, example, options):
        seen.append(cpu_vec_isa.valid_vec_isa_list())
        if len(seen) == 1:
            raise RuntimeError("unknown instruction")
        return function, None

    monkeypatch.setattr(inductor, "_run_inductor", compile_)
    inductor.compile_flat(lambda *xs: None, [torch.ones(1), torch.ones(2)], 1)
    assert seen[0] and seen[1] is usual


def test_threads_that_compile_at_a_time_leave_nothing_behind(monkeypatch) -> None:
    """Nor does a thread see what another one has."""
    from torch._inductor import config, cpu_vec_isa

    def usual() -> list[None]:
        return [None] * 9

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", usual)
    one, both, two = (threading.Barrier(2, timeout=60) for _ in range(3))
    seen = []

    def first() -> None:
        with cpp.unprobed_vectors():
            one.wait()
            both.wait()
            seen.append(len(cpu_vec_isa.valid_vec_isa_list()))
        seen.append(len(cpu_vec_isa.valid_vec_isa_list()))
        two.wait()

    def second() -> None:
        one.wait()
        with cpp.unprobed_vectors():
            both.wait()
            two.wait()
            seen.append(len(cpu_vec_isa.valid_vec_isa_list()))
        seen.append(len(cpu_vec_isa.valid_vec_isa_list()))

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = len(cpp._vectors()) or 9
    assert seen == [kinds, 9, kinds, 9]
    assert cpu_vec_isa.valid_vec_isa_list is usual and config.cpp.vec_isa_ok is None


STEP = """
import sys
import torch
import optimi_func
from torch._dynamo.utils import counters
from optimi_func.execution import inductor

inductor.PRECOMPILE_HEADERS = True  # as for all tests
path, mode = sys.argv[1:]
if mode == "load":
    with open(path, "rb") as file:
        assert torch.compiler.load_cache_artifacts(file.read()) is not None
w = torch.ones(10000, requires_grad=True)
w.grad = torch.ones(10000)
optimi_func.SGD([w], lr=0.1, compile=True).step()
assert torch.allclose(w, torch.full_like(w, 0.9))
if mode == "save":
    artifacts, _ = torch.compiler.save_cache_artifacts()
    with open(path, "wb") as file:
        file.write(artifacts)
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.full
def test_compiled_kernels_travel_as_cache_artifacts(tmp_path) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    hits = []
    for mode in ("save", "load"):
        folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / mode)}
        folder["OPTIMI_FUNC_CACHE"] = "0"
        options = [str(tmp_path / "artifacts"), mode]
        done = run_script(script, *options, strict=False, environment=folder)
        assert done.returncode == 0, done.stderr
        hits.append(done.stdout.strip())
    assert hits == ["0", "1"]


def test_a_transformed_optimizer_is_refused() -> None:
    from optimi_func.transforms import every_k

    p = torch.ones(2)
    optimizer = every_k(optimi_func.adamw(lr=0.1), 2)
    for step in (compiled.step, compiled.step_):
        with pytest.raises(TypeError, match="is not a FunctionalOptimizer"):
            step(optimizer, p, p, optimizer.init(p))


@pytest.mark.full
def test_a_child_does_not_wait_for_what_its_parent_compiles() -> None:
    """A thread that compiles in the parent is not in the child, whose lock is free."""
    held, done = threading.Event(), threading.Event()

    def compiling() -> None:
        with kernels.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=compiling)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if kernels.lock.acquire(timeout=10.0) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
