"""Muon's and NorMuon's maps of tensors: mathematics, shapes that they take, options."""

import json
import sys
from functools import partial
from typing import Any

import pytest
import reference
import torch
from cases import LR, assert_moved_alike, problem
from refusals import Scene, refused, refuses
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import optimi_func
from optimi_func import Muon, NorMuon, compiled, muon, normuon
from optimi_func.optimizers.muon import TABLES

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64
# Of inputs from 0.01 to 1; the last bits of the tables are rounded.
RANGES = {"standard": (0.68, 1.14), "quintic": (0.97, 1.04), "polar_express": (0.85, 1.15)}


def update_of(g: Tensor, **options: Any) -> Tensor:
    """What a first step subtracts, at lr 1."""
    optimizer = muon(lr=1.0, weight_decay=0.0, **options)
    p = torch.zeros_like(g)
    return -optimizer.step(p, g, optimizer.init(p))[0]


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (16, 16)], ids=str)
@pytest.mark.parametrize("table", RANGES)
def test_singular_values_are_in_the_tables_range(table: str, shape: Any) -> None:
    torch.manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(shape, dtype=DOUBLE), full_matrices=False)
    s = torch.logspace(-1.7, 0, min(shape), dtype=DOUBLE)
    s = 0.99 * s / s.norm()
    assert s.min() >= 0.01
    g = u @ s.diag() @ vt
    for dtype, slack in ((DOUBLE, 0.0), (torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        options = {"ns_coefficients": table, "ns_dtype": dtype}
        d = update_of(g, adjust_lr_fn="original", **options)
        found = torch.linalg.svdvals(d / max(1.0, shape[0] / shape[1]) ** 0.5)
        low, high = RANGES[table]
        assert low - slack <= found.min() and found.max() <= high + slack, dtype


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 48), (48, 24)], ids=str)
def test_fifty_steps_are_torchs(shape: Any, scale: str, nesterov: bool) -> None:
    options: dict[str, Any] = {"lr": 0.01, "adjust_lr_fn": scale, "nesterov": nesterov}
    start, grads = problem(shape, steps=50)
    ends: list[Tensor] = []
    for make, more in (
        (Muon, {"ns_dtype": torch.bfloat16, **EAGER}),
        (torch.optim.Muon, {}),
    ):
        p = torch.nn.Parameter(start.float())
        optimizer = make([p], **options, **more)
        for g in grads:
            p.grad = g.float()
            optimizer.step()
        ends.append(p.detach() - start.float())
    assert (ends[0] - ends[1]).norm() <= 2e-2 * ends[1].norm()


def test_a_convolution_is_a_matrix_and_three_dimensions_are_a_stack() -> None:
    for shape, as_matrices in (
        ((6, 3, 2, 2), lambda g: [g.reshape(6, 12)]),
        ((2, 3, 2, 2, 2), lambda g: [g.reshape(2, 24)]),
        ((4, 6, 3), list),
    ):
        torch.manual_seed(0)
        g = torch.randn(shape, dtype=DOUBLE)
        parts = as_matrices(g)
        want = torch.stack(
            [reference.rms_scale(*x.shape) * reference.orthogonalized(x) for x in parts]
        ).reshape(shape)
        for layout in (torch.contiguous_format, torch.channels_last):
            if layout == torch.channels_last and g.dim() != 4:
                continue
            got = update_of(g.contiguous(memory_format=layout))
            assert_moved_alike(torch.zeros(shape), got, want, 1e-12)


@pytest.mark.parametrize("split", [3, (2, 4, 6), [12]], ids=str)
@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 1, 2), (2, 12, 5)], ids=str)
def test_split_rows_are_matrices_of_their_own(shape: Any, split: Any) -> None:
    torch.manual_seed(0)
    g = torch.randn(shape, dtype=DOUBLE)
    rows = [4, 4, 4] if split == 3 else list(split)
    stack = [g.flatten(1)] if g.dim() != 3 else list(g)
    want = [
        reference.rms_scale(*x.shape) * reference.orthogonalized(x)
        for matrix in stack
        for x in matrix.split(rows)
    ]
    got = update_of(g, split=split)
    assert_moved_alike(torch.zeros(shape), got, torch.cat(want).reshape(shape), 1e-12)


# Options, and the arguments of the loop. Of 12 outputs and 8 inputs.
LAYOUTS: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    (3, {"split": (4, 4, 4)}),
    ([2, 10], {"split": (2, 10)}),
    ({"rows": 3, "repeats": 2}, {"split": (2, 2, 2), "repeats": 2}),  # GPT-NeoX's heads
    ({"rows": [1, 3], "repeats": 3}, {"split": (1, 3), "repeats": 3}),
    ({"rows": 2, "repeats": 6}, {"split": (1, 1), "repeats": 6}),  # gate, up, gate, up
    ({"columns": 4}, {"split": (2,) * 4, "columns": True}),  # heads of an o_proj
    ({"columns": [2, 6]}, {"split": (2, 6), "columns": True}),
    ({"columns": 2, "repeats": 2}, {"split": (2, 2), "columns": True, "repeats": 2}),
    (
        {"columns": [1, 3], "repeats": 2},
        {"split": (1, 3), "columns": True, "repeats": 2},
    ),
]
RULES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "muon": (Muon, muon, compiled.muon_step, {"adjust_lr_fn": "original"}),
    "adamuon": (Muon, muon, compiled.muon_step, {"element_beta": 0.9}),
    "normuon": (NorMuon, normuon, compiled.normuon_step, {"row_beta": 0.9}),
}


def looped(p: Tensor, grads: Any, rule: str, loop: Any) -> Tensor:
    """The end of the loop over a matrix, or over each of a stack."""
    if p.dim() == 3:
        each = [looped(x, g, rule, loop) for x, g in zip(p, grads.unbind(1))]
        return torch.stack(each)
    known = dict(RULES[rule][3])
    scale = {"scale": reference.tall_scale} if known.pop("adjust_lr_fn", None) else {}
    s = dict.fromkeys("brv", torch.zeros_like(p))
    for t, g in enumerate(grads, 1):
        at = reference.At(t, 0.1, 0.0)
        u, s = reference.muon_move(p, s, g, at, **known, **scale, **loop)
        p = p + u
    return p


def ends_of(p: Tensor, grads: Tensor, rule: str, options: Any, how: str) -> Tensor:
    """The end of a way to step."""
    cls, value, step, more = RULES[rule]
    options = {"lr": 0.1, "weight_decay": 0.0, **options, **more}
    if how == "pure":
        return stepped(value(**options), p, list(grads))[0]
    if how == "compiled":
        state = value(**options).init(p)
        for g in grads:
            p, state = step(p, g, state, **options)
        return p
    w = nn.Parameter(p.clone())
    release = how == "release"
    optimizer = cls([w], **options, gradient_release=release, **EAGER)
    if release:
        net = nn.ParameterList([w])
        optimi_func.prepare_for_gradient_release(net, optimizer)
    for g in grads:
        optimizer.zero_grad()
        (w * g).sum().backward()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("split", "loop"), LAYOUTS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_layouts_are_those_of_loops(
    rule: str, split: Any, loop: Any, transposed: bool
) -> None:
    """Rows, columns, alternating parts and (in, out), in a matrix, a stack and kernels."""
    torch.manual_seed(0)
    sides = (8, 12) if transposed else (12, 8)
    kernel = (4, 12, 2, 1) if transposed else (12, 4, 2, 1)
    options = {"split": split, "transposed": transposed}
    for shape in (sides, (2, *sides), kernel):
        p, grads = torch.randn(shape, dtype=DOUBLE), torch.randn(3, *shape, dtype=DOUBLE)
        if shape is kernel:
            # Outputs and the rest, which are stored apart.
            flat = [x.transpose(0, 1) if transposed else x for x in (p, *grads)]
            q, *gs = [x.flatten(1) for x in flat]
            want = looped(q, torch.stack(gs), rule, loop)
            want = want.reshape(flat[0].shape)
            want = want.transpose(0, 1) if transposed else want
        else:
            want = looped(p, grads, rule, {**loop, "transposed": transposed})
        for how in ("class", "pure", "release"):
            got = ends_of(p, grads, rule, options, how)
            assert_moved_alike(p, got, want, 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_layouts_in_compiled_functions(rule: str) -> None:
    torch.manual_seed(0)
    p, grads = torch.randn(8, 12, dtype=DOUBLE), torch.randn(3, 8, 12, dtype=DOUBLE)
    for split, loop in LAYOUTS[::3]:
        options = {"split": split, "transposed": True}
        want = looped(p, grads, rule, {**loop, "transposed": True})
        got = ends_of(p, grads, rule, options, "compiled")
        assert_moved_alike(p, got, want, 1e-9)


@pytest.mark.kernels
def test_layouts_with_kernels() -> None:
    torch.manual_seed(0)
    p, grads = torch.randn(8, 12), torch.randn(3, 8, 12)
    for split, loop in LAYOUTS:
        w = nn.Parameter(p.clone())
        options = {"split": split, "transposed": True, "ns_dtype": "float32"}
        optimizer = Muon([w], lr=0.1, weight_decay=0.0, adjust_lr_fn="original", **options)
        for g in grads:
            w.grad = g
            optimizer.step()
        loop = {**loop, "transposed": True}
        want = looped(p.double(), grads.double(), "muon", loop)
        assert_moved_alike(p, w.detach(), want, 1e-3)


def test_a_split_that_is_edited_is_read() -> None:
    """A dict in a param group may be written to, as a list."""
    torch.manual_seed(0)
    g, ends = torch.randn(8, 12, dtype=DOUBLE), []
    for first, then in ((2, 2), (2, 4)):
        w = nn.Parameter(torch.zeros(8, 12, dtype=DOUBLE))
        optimizer = Muon([w], split={"columns": first}, **EAGER)
        for columns in (first, then):
            optimizer.param_groups[0]["split"]["columns"] = columns
            w.grad = g
            optimizer.step()
        ends.append(w.detach())
    assert not torch.equal(*ends)


def test_the_dtype_of_the_iteration() -> None:
    """float32 on CPU, float64 where all is; asked for, it changes the answer."""
    torch.manual_seed(0)
    for dtype in (DOUBLE, torch.float32):
        g = torch.randn(8, 6, dtype=dtype)
        assert torch.equal(update_of(g), update_of(g, ns_dtype=dtype))
        far = (update_of(g) - update_of(g, ns_dtype="bfloat16")).norm() / g.norm()
        assert 1e-4 < far < 1e-1
    wide = update_of(torch.randn(8, 6, dtype=DOUBLE), ns_dtype="torch.float32")
    assert wide.dtype == DOUBLE


@pytest.mark.parametrize(
    "how", ["autograd", "grad", "jvp", "vmap of grad", "grad of vmap", "vmap"]
)
def test_a_derivative_widens_the_iteration(how: str) -> None:
    """In bfloat16 it would be noise: the same is found as in float32."""
    torch.manual_seed(0)
    g, w = torch.randn(6, 4), torch.randn(6, 4)
    found = []
    for dtype in (torch.bfloat16, torch.float32):

        def loss(g: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return (update_of(g, ns_dtype=dtype) * w).sum()

        if how == "autograd":
            x = g.clone().requires_grad_()
            loss(x).backward()
            found.append(x.grad)
        elif how == "grad":
            found.append(grad(loss)(g))
        elif how == "jvp":
            found.append(jvp(loss, (g,), (w,))[1])
        elif how == "vmap of grad":
            found.append(vmap(grad(loss))(torch.stack([g, 2 * g]))[1])
        elif how == "vmap":
            x = g.clone().requires_grad_()
            vmap(loss)(torch.stack([x, x])).sum().backward()
            found.append(x.grad)
        else:
            found.append(grad(lambda x: vmap(loss)(torch.stack([x, x])).sum())(g))
    assert torch.equal(*found)


def test_a_matrix_of_zeros_stays_where_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert update_of(torch.zeros(4, 3, dtype=dtype)).count_nonzero() == 0
    small = update_of(torch.full((4, 3), 1e-30, dtype=DOUBLE))
    assert small.isfinite().all() and small.norm() < 1e-15


ENDS = r"allowed are a number of equal parts"
BAD = {
    "ns_steps=0": "ns_steps=0: allowed are integers from 1 to 99",
    "ns_steps=100": "ns_steps=100: allowed",
    "ns_steps=2.0": r"ns_steps=2\.0: allowed",
    "ns_steps=5, ns_coefficients='quintic'": (
        "ns_steps=5 with ns_coefficients='quintic'.*5 steps: leave ns_steps out"
    ),
    "ns_steps=2, ns_coefficients=[(1.0, 2.0, 3.0)]": "coefficients of 1 steps",
    "ns_coefficients='cubic'": "'cubic': allowed are three.*'quintic'",
    "ns_coefficients=(1.0, 2.0)": r"\(1\.0, 2\.0\): allowed are three",
    "ns_coefficients=(1.0, 2.0, nan)": r"nan\): allowed are three",
    "ns_coefficients=[(1.0, inf, 0.0)]": "allowed are three finite",
    "ns_coefficients=[]": "allowed are three",
    "ns_coefficients=None": "None: allowed are three",
    "adjust_lr_fn='rms'": "'rms': allowed are.*None, which is 'original'",
    "ns_dtype='int8'": "TypeError: ns_dtype='int8': allowed are floating",
    "ns_dtype='single9'": "TypeError: ns_dtype='single9': allowed are floating",
    "ns_dtype=16": "TypeError: ns_dtype=16: allowed are floating",
    "split=0": f"split=0: {ENDS}",
    "split=(2, -2)": ENDS,
    "split=()": ENDS,
    "split=2.0": rf"split=2\.0: {ENDS}",
    "split={}": rf"split=\{{\}}: {ENDS}",
    "split={'rows': 2, 'columns': 2}": f"'columns': 2}}: {ENDS}",
    "split={'heads': 2}": f"'heads': 2}}: {ENDS}",
    "split={'repeats': 2}": f"'repeats': 2}}: {ENDS}",
    "split={'rows': 2, 'repeats': 0}": f"'repeats': 0}}: {ENDS}",
    "split={'columns': [2, 0]}": rf"\[2, 0\]}}: {ENDS}",
    "hyperball=True": r"weight_decay=0\.1: allowed is 0 with hyperball",
}


@pytest.mark.parametrize("make", [muon, partial(Muon, [torch.ones(4, 2)])])
@refuses(
    {f"make(lr=0.1, {options})": text for options, text in BAD.items()}
    | {
        "muon(lr=0.1, hyperball=True, weight_decay=torch.tensor(0.0))": (
            "weight_decay=a tensor.*: allowed is 0 with hyper"
        )
    }
)
def test_options_that_are_none(make: Any) -> Scene:
    return {"make": make}


UNFIT = [
    ({}, (3,), r"shape \(3,\): Muon takes matrices.*optimi_func\.Mixed"),
    ({}, (), r"shape \(\): Muon takes matrices"),
    ({"split": 3}, (4, 3), "split=3 does not divide its 4 rows"),
    ({"split": (2, 1)}, (4, 3), r"split=\(2, 1\) adds up to 3, not to its 4 rows"),
    ({"split": {"columns": 2}}, (4, 3), "split={'columns': 2} does not divide its 3 col"),
    ({"split": {"columns": [1, 1]}}, (4, 3), "adds up to 2, not to its 3 columns"),
    ({"split": {"rows": 2, "repeats": 4}}, (4, 3), "does not divide its 4 rows"),
    ({"split": 4, "transposed": True}, (4, 3), "split=4 does not divide its 3 rows"),
    ({"split": 3}, (4, 3, 1, 1), "split=3 does not divide its 4 rows"),
    ({"split": 3}, (3, 4, 5), "split=3 does not divide its 4 rows"),
]


@pytest.mark.parametrize(("options", "shape", "text"), UNFIT, ids=str)
def test_parameters_that_it_does_not_take(options: Any, shape: Any, text: str) -> None:
    value = muon(lr=0.1, **options)
    refused(lambda: value.init({"w": torch.ones(shape)}), ValueError, text)
    rows = 3 if options == {"split": (2, 1)} else 16 if "rows" in str(options) else 12
    columns = 2 if "[1, 1]" in str(options) else 12
    good, bad = (torch.nn.Parameter(torch.ones(s)) for s in ((rows, columns), shape))
    with pytest.raises(ValueError, match=rf"params\['b'\].*{text}"):
        Muon([("a", good), ("b", bad)], **EAGER, **options)
    # Put there by hand it is found by the step, before anything moves.
    optimizer = Muon([good], **EAGER)
    optimizer.param_groups[0].update(options)
    optimizer.param_groups[0]["params"].append(bad)
    for p in (good, bad):
        p.grad = torch.ones_like(p)
    refused(optimizer.step, ValueError, text, [good, optimizer])


@pytest.mark.kernels
def test_groups_are_json_and_keep_their_options() -> None:
    options = {"ns_dtype": torch.float32, "split": [2, 2], "ns_coefficients": [[1, 2, 3]]}
    optimizer = Muon([torch.nn.Parameter(torch.ones(4, 2))], **options)
    saved = json.loads(json.dumps(optimizer.defaults))
    assert saved["ns_dtype"] == "torch.float32" and saved["split"] == [2, 2]
    twin = Muon([torch.nn.Parameter(torch.ones(4, 2))])
    packed = optimizer.state_dict()
    packed["param_groups"][0] |= {k: saved[k] for k in options}
    twin.load_state_dict(packed)
    for name in options:
        assert twin.param_groups[0][name] == saved[name], name
    ends = []
    for one in (optimizer, twin):
        (p,) = one.param_groups[0]["params"]
        p.grad = torch.eye(4)[:, :2]
        one.step()
        ends.append(p.detach())
    assert torch.equal(*ends) and (ends[0] != 1).any()


def started(make: Any, shapes: Any, **options: Any) -> tuple[list[Tensor], Any]:
    ps = [torch.nn.Parameter(problem(s)[0].float()) for s in shapes]
    optimizer = make(ps, **options)
    go_on(ps, optimizer, 0)
    return ps, optimizer


def go_on(ps: list[Tensor], optimizer: Any, start: int) -> None:
    for i in range(start, start + 4):
        torch.manual_seed(i)
        for p in ps:
            p.grad = torch.randn(p.shape)
        optimizer.step()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", None])
def test_states_of_torch_load_and_go_back(scale: str | None) -> None:
    shapes = [(6, 4), (4, 6)]
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.2, "adjust_lr_fn": scale}
    ps, theirs = started(torch.optim.Muon, shapes, **options, momentum=0.9, ns_steps=4)
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    ours = Muon(qs, ns_dtype=torch.bfloat16, **EAGER)
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert group["adjust_lr_fn"] == scale
    assert (group["momentum"], group["ns_steps"], group["lr"]) == (0.9, 4, 0.05)
    rs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    back = torch.optim.Muon(rs)
    back.load_state_dict(ours.torch_state_dict())
    starts = [p.detach().clone() for p in ps]
    for params, optimizer in ((ps, theirs), (qs, ours), (rs, back)):
        go_on(params, optimizer, 4)
    for p, q, r, start in zip(ps, qs, rs, starts):
        assert torch.equal(p, r)
        assert (p - q).norm() < 2e-2 * (p - start).norm()
        assert torch.equal(
            theirs.state[p]["momentum_buffer"], back.state[r]["momentum_buffer"]
        )


def test_torchs_name_of_a_scale() -> None:
    ends: list[Any] = []
    for scale in ("rms_to_rms", "spectral_unclamped", "original"):
        (w, *_), optimizer = started(Muon, [(3, 6)], adjust_lr_fn=scale, **EAGER)
        w.grad = torch.linspace(-1, 1, 18).reshape(3, 6).to(w)
        optimizer.step()
        ends.append(w.detach().clone())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_a_loaded_rule_of_torchs_is_its_own() -> None:
    """A table is torch's where all its rows are one."""
    ps, ours = started(Muon, [(4, 4)], ns_coefficients="standard", **EAGER)
    back = torch.optim.Muon(ps)
    back.load_state_dict(ours.torch_state_dict())
    group = back.param_groups[0]
    assert group["ns_coefficients"] == TABLES["standard"][0] and group["ns_steps"] == 5


@pytest.mark.parametrize("nesterov", [False, True])
def test_parts_of_a_gradient_in_the_momentum(nesterov: bool) -> None:
    """Exact without Nesterov; with it the last part stands beside the sum."""
    torch.manual_seed(0)
    parts = torch.randn(6, 3, 5, 4, dtype=DOUBLE)
    p = torch.nn.Parameter(torch.randn(5, 4, dtype=DOUBLE))
    start, b = p.detach().clone(), torch.zeros(5, 4, dtype=DOUBLE)
    want = start
    net = torch.nn.ParameterList([p])
    optimizer = Muon([p], lr=LR, nesterov=nesterov, gradient_release=True, **EAGER)
    options: dict[str, Any] = {"accumulation": "states", "accumulation_steps": 3}
    optimi_func.prepare_for_gradient_release(net, optimizer, **options)
    for some in parts:
        for g in some:
            (p * g).sum().backward()
        optimizer.step()
        b = 0.95 * b + 0.05 * some.sum(0)
        d = 0.05 * some[-1] + 0.95 * b if nesterov else b
        move = reference.rms_scale(5, 4) * reference.orthogonalized(d)
        want = want - LR * move - LR * 0.1 * want
    assert_moved_alike(start, p.detach(), want, 1e-12)


# AdaMuon, PolarGrad, Hyperball


FIELD = "second_momentum_buffer"


def trained(make: Any, shapes: list[Any], steps: int = 60) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(s, dtype=DOUBLE)) for s in shapes]
    optimizer = make(ps)
    for i in range(steps):
        torch.manual_seed(i)
        for p in ps:
            p.grad = torch.randn(p.shape, dtype=DOUBLE) * (0.01 + i % 7)
        optimizer.step()
    return ps, optimizer


def stepped(rule: Any, tree: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Parameters and state after a step for each tree of gradients."""
    state = rule.init(tree)
    for now in grads:
        tree, state = rule.step(tree, now, state)
    return tree, state


MORE: dict[str, dict[str, Any]] = {
    "adamuon": {"element_beta": 0.8},
    "polargrad": {"adjust_lr_fn": "nuclear"},
    "hyperball": {"hyperball": True},
    "all": {"element_beta": 0.8, "adjust_lr_fn": "nuclear", "hyperball": True},
}


@pytest.mark.parametrize("options", MORE.values(), ids=MORE)
def test_options_are_of_each_matrix(options: Any) -> None:
    torch.manual_seed(1)
    whole, grads = torch.randn(6, 4, dtype=DOUBLE), torch.randn(5, 6, 4, dtype=DOUBLE)
    how = {"lr": 0.1, "weight_decay": 0.0, **options}
    rules = {
        "alone": (muon(**how), lambda x: list(x.split(2))),
        "rows": (muon(**how, split=(2, 2, 2)), lambda x: [x]),
        "stack": (muon(**how), lambda x: [x.view(3, 2, 4)]),
        "convolutions": (muon(**how), lambda x: [y.view(2, 1, 2, 2) for y in x.split(2)]),
    }
    ends: dict[str, Tensor] = {}
    for name, (rule, of) in rules.items():
        tree, state = stepped(rule, of(whole), [of(g) for g in grads])
        ends[name] = torch.cat([x.reshape(-1, 4) for x in tree])
        kept = [getattr(s, FIELD, None) for s in state.leaves]
        if "element_beta" in options:
            assert [x.shape for x in kept] == [x.shape for x in tree]
        else:
            assert kept == [None] * len(tree)
    for end in ends.values():
        torch.testing.assert_close(end, ends["alone"], rtol=1e-12, atol=1e-12)


def test_who_says_that_each_matrix_of_a_stack_is_mapped_by_itself() -> None:
    """Whose stacks processes divide: no subclass that may take numbers of the whole."""

    class Same(Muon):
        pass

    class Bank(Muon):
        def scaled(self, y: Tensor, v: Any) -> Any:
            return y / y.norm(), v

    rules = optimi_func.functional
    values = [Same.pure(), muon(), muon(element_beta=0.9), normuon(), rules.scion()]
    assert all(value.rule.whole.by_matrix for value in values)
    values = [Bank.pure(), rules.soap(), rules.shampoo(), rules.kron(), rules.adafactor()]
    assert not any(value.rule.whole.by_matrix for value in values)


@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16], ids=str)
def test_norms_stay_and_lr_is_a_share_of_them(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(3 * torch.randn(12, 5).to(dtype))
    start, how = p.detach().double().clone(), {"hyperball": True, "weight_decay": 0.0}
    optimizer = kind([p], lr=0.1, **how, **EAGER)
    for i in range(100):
        p.grad = torch.randn(12, 5).to(dtype)
        before = p.detach().double().clone()
        optimizer.step()
        move = (p.detach().double() - before).norm() / start.norm()
        # From the projection: the angle has the tangent lr, or up to its sine.
        assert 0.05 < move < 0.11, i
    assert p.detach().double().norm() == pytest.approx(
        start.norm().item(), rel={DOUBLE: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    )
    for still in (torch.zeros(4, 3), torch.eye(4)[:, :3]):
        value = muon(lr=0.1, **how)
        g = torch.ones_like(still) * (still.norm() == 0)
        end, _ = value.step(still, g, value.init(still))
        assert torch.equal(end, still)
    # A warmup begins at 0.
    value = muon(lr=0.0, **how)
    assert torch.equal(value.step(start, start + 1, value.init(start))[0], start)


def test_polargrads_step_shrinks_with_the_gradient() -> None:
    g = torch.diag(torch.tensor([3.0, 1.0, 0.5], dtype=DOUBLE))
    for factor in (1.0, 1e-3):
        how = {"ns_coefficients": "deepseek", "nesterov": False, "momentum": 0.0}
        u = update_of(factor * g, adjust_lr_fn="nuclear", **how)
        want = 4.5 * factor * torch.eye(3, dtype=DOUBLE)
        torch.testing.assert_close(u, want, rtol=2e-2, atol=1e-6)


def test_adamuons_signs_and_squares() -> None:
    """The first step is of the signs alone, and of the RMS that AdamW has."""
    torch.manual_seed(0)
    g = torch.randn(6, 4, dtype=DOUBLE)
    u = update_of(g, element_beta=0.9)
    torch.testing.assert_close(u, update_of(g.sign(), element_beta=0.9))
    assert u.square().mean().sqrt() == pytest.approx(0.2, rel=1e-6)
    assert update_of(0 * g, element_beta=0.9).count_nonzero() == 0
    p = torch.ones(4, 3, requires_grad=True)
    optimizer = Muon([p], element_beta=0.9, **EAGER)
    optimizer.init_state()
    assert optimizer.state[p][FIELD].shape == (4, 3)


# NorMuon


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"row_beta": 0.5, "momentum": 0.8}, {"beta2": 0.5, "momentum": 0.8}),
        (
            {"nesterov": False, "weight_decay": 0.1},
            {"nesterov": False, "weight_decay": 0.1},
        ),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"use_adjusted_lr": True}),
    ],
    ids=str,
)
def test_equals_pytorch_optimizer(ours: Any, theirs: Any, monkeypatch: Any) -> None:
    """The authors' formula, iterated in float64."""
    package = pytest.importorskip("pytorch_optimizer")
    module = sys.modules[package.NorMuon.__module__]
    iterate = module.zero_power_via_newton_schulz_5
    monkeypatch.setattr(
        module, "zero_power_via_newton_schulz_5", partial(iterate, dtype=DOUBLE)
    )
    shapes = [(7, 5), (4, 9), (6, 2, 3, 3)]
    usual = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "original"}

    def other(ps: Any) -> Any:
        how = {"lr": 0.02, "foreach": False, **theirs}
        return package.NorMuon([{"params": ps, "use_muon": True}], **how)

    def own(ps: Any) -> Any:
        return NorMuon(ps, **{**usual, **ours}, **EAGER)

    starts, _ = trained(own, shapes, 0)
    for p, q, start in zip(trained(own, shapes)[0], trained(other, shapes)[0], starts):
        assert_moved_alike(start.detach(), p.detach(), q.detach(), 1e-9)


def test_parts_and_stacks_are_matrices_of_their_own() -> None:
    torch.manual_seed(1)
    whole, grads = torch.randn(6, 4, dtype=DOUBLE), torch.randn(5, 6, 4, dtype=DOUBLE)
    how = {"lr": 0.1, "weight_decay": 0.0}
    rules = {
        "alone": (normuon(**how), lambda x: list(x.split(2))),
        "parts": (normuon(**how, split=3), lambda x: [x]),
        "rows": (normuon(**how, split=(2, 2, 2)), lambda x: [x]),
        "stack": (normuon(**how), lambda x: [x.view(3, 2, 4)]),
        "convolutions": (
            normuon(**how),
            lambda x: [y.view(2, 1, 2, 2) for y in x.split(2)],
        ),
    }
    ends: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for name, (rule, of) in rules.items():
        tree, state = stepped(rule, of(whole), [of(g) for g in grads])
        ends[name] = torch.cat([x.reshape(-1, 4) for x in tree])
        fields = [getattr(s, FIELD) for s in state.leaves]
        rows[name] = torch.cat([x.reshape(-1, 1) for x in fields])
        assert [x.shape for x in fields] == [
            (*x.shape[: 1 if x.dim() > 3 else -1], 1) for x in tree
        ]
    for name, end in ends.items():
        torch.testing.assert_close(end, ends["alone"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rows[name], rows["alone"], rtol=1e-12, atol=1e-12)


def test_rows_move_alike_and_the_whole_as_with_muon() -> None:
    shapes = [(12, 5)]
    moves: dict[Any, Tensor] = {}
    for kind in (Muon, NorMuon):
        starts, _ = trained(lambda ps: ps, shapes, 0)
        ps, _ = trained(
            lambda ps, kind=kind: kind(ps, weight_decay=0.0, **EAGER), shapes, 1
        )
        moves[kind] = ps[0].detach() - starts[0].detach()
    assert moves[NorMuon].norm() == pytest.approx(moves[Muon].norm().item(), rel=1e-6)
    lengths = {kind: x.norm(dim=1) for kind, x in moves.items()}
    assert lengths[Muon].std() > 0.1 * lengths[Muon].mean()
    assert lengths[NorMuon].std() < 1e-6 * lengths[NorMuon].mean()


def test_the_rows_are_float32_and_muons_states_do_not_load() -> None:
    p = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True)
    optimizer, other = (
        kind([p], **EAGER, **more)
        for kind, more in ((NorMuon, {"state_dtype": torch.bfloat16}), (Muon, {}))
    )
    for x in (optimizer, other):
        x.init_state()
    assert optimizer.state[p][FIELD].dtype == torch.float32
    assert optimizer.state[p][FIELD].shape == (4, 1)
    with pytest.raises(ValueError, match=f"the optimizer needs .*{FIELD}"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=f"'{FIELD}'. are another rule's"):
        other.load_state_dict(optimizer.state_dict())


def test_deepseeks_coefficients_reach_one() -> None:
    """Of singular values from 0.001 on, which no other table brings as near."""
    x = torch.logspace(-3, 0, 50, dtype=DOUBLE)
    found = {}
    for name, table in TABLES.items():
        y = x
        for a, b, c in table:
            y = a * y + b * y**3 + c * y**5
        found[name] = (y - 1).abs().max().item()
    assert found["deepseek"] < 0.01 < min(y for n, y in found.items() if n != "deepseek")
