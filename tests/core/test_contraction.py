"""Steps under a compiler that rounds a product and the sum it goes into only once.

Triton, and with it every GPU, contracts a * b + c into one operation by default. Whatever
leans on two roundings, as compensated summation might, is lost there without a sign.
"""

import copy
from typing import Any

import pytest
import torch
from cases import NAMES, SENSITIVE, SOME
from tiers import built, row
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import transforms

aten = torch.ops.aten
STEPS = 120


def contracted(module: fx.GraphModule, first: int) -> fx.GraphModule:
    """The same trace with every float32 product that meets a sum in one rounding.

    Where both operands of a sum are products only one can be contracted: `first` says
    which.
    """
    graph = copy.deepcopy(module.graph)
    made = 0
    for n in list(graph.nodes):
        if n.target not in (aten.add.Tensor, aten.sub.Tensor):
            continue
        operands = _product_and_sum(module, n, first)
        if operands is not None:
            with graph.inserting_before(n):
                whole = graph.call_function(_rounded_once, operands)
            whole.meta = dict(n.meta)
            n.replace_all_uses_with(whole)
            graph.erase_node(n)
            made += 1
    assert made > 1
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _product_and_sum(
    module: fx.GraphModule, n: fx.Node, first: int
) -> tuple[Any, ...] | None:
    """Arguments of `_rounded_once` that make a sum, if a product meets it."""
    sides = [1.0, -1.0 if n.target is aten.sub.Tensor else 1.0]
    for i in (first, 1 - first):
        sign, factor = _signed(n.args[i], sides[i])
        if not isinstance(factor, fx.Node) or factor.target is not aten.mul.Tensor:
            continue
        operands = (*factor.args, n.args[1 - i])
        tensors = [x for x in operands if isinstance(x, fx.Node)]
        if all(_dtype(module, x) == torch.float32 for x in tensors):
            return (sign, *operands, sides[1 - i])
    return None


def _dtype(module: fx.GraphModule, x: fx.Node) -> torch.dtype:
    constant = x.op == "get_attr"
    return (getattr(module, x.target) if constant else x.meta["val"]).dtype


def _rounded_once(sign: float, a: Any, b: Any, c: Any, side: float) -> Tensor:
    """As a float32: sign * a * b + side * c."""
    # A product of two float32 numbers is exact in float64.
    a, b, c = (x.double() if isinstance(x, Tensor) else x for x in (a, b, c))
    return (sign * a * b + side * c).float()


def _signed(node: Any, sign: float) -> tuple[float, Any]:
    while isinstance(node, fx.Node) and node.target is aten.neg.default:
        node, sign = node.args[0], -sign
    return sign, node


def movements(optimizer: Any, dtype: torch.dtype, vmap: bool) -> list[Tensor]:
    """How p + compensation moves: without contraction, and with each choice of it."""
    torch.manual_seed(0)
    p = (1.0 + 0.2 * torch.rand(2, 8)).to(dtype)
    g = torch.where(torch.rand(2, 8) < 0.5, -1.0, 1.0).to(dtype)
    init, step = optimizer.init, optimizer.step
    if vmap:
        init, step = torch.vmap(init), torch.vmap(step)
    state = init(p)
    leaves, spec = pytree.tree_flatten(state)

    def flat(p: Tensor, *leaves: Tensor) -> list[Tensor]:
        new, state = step(p, g, pytree.tree_unflatten(leaves, spec))
        return [new, *pytree.tree_leaves(state)]

    module = make_fx(flat)(p, *leaves)
    modules = [module, contracted(module, 0), contracted(module, 1)]
    return [_movement(each, p, leaves, spec) for each in modules]


def _movement(
    module: fx.GraphModule, p: Tensor, leaves: list[Tensor], spec: pytree.TreeSpec
) -> Tensor:
    start = p.double()
    for _ in range(STEPS):
        p, *leaves = module(p, *leaves)
    keyed, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))
    (comp,) = [x for path, x in keyed if "kahan_comp" in pytree.keystr(path)]
    return p.double() + comp.double() - start


def assert_same_movement(optimizer: Any, dtype: torch.dtype, vmap: bool = False) -> None:
    want, *contracted = movements(optimizer, dtype, vmap)
    # Steps of 1e-4 are far below what the dtype resolves: they add up only if kept.
    assert (want.abs() > 0.2 * STEPS * 1e-4).all()
    for got in contracted:
        assert ((got - want).abs() <= 0.02 * want.abs()).all()


# What is contracted is the sum of parameter, delta and compensation, which all rules share.
FEW = (*SOME, "sgd", "lion", "muon")
ROWS = [
    row(name, dtype, id=f"{name}-{dtype}", tier=later if name in FEW else "soak")
    for name in NAMES
    for dtype, later in ((torch.bfloat16, ""), (torch.float16, "full"))
]


@pytest.mark.parametrize(("name", "dtype"), built(ROWS))
def test_steps_add_up_whatever_is_contracted(name: str, dtype: torch.dtype) -> None:
    # Moments in float32: bfloat16 ones of betas this large are a matter of their own.
    # By 0.999 its rectification would hold most of 120 steps back.
    more: Any = {"betas": (0.9, 0.99)} if name == "schedule_free_radam" else {}
    if name == "prodigy":
        more = {"d0": 1.0}  # so that lr is what it is for others
    if name == "adadelta":
        more = {"eps": 1.0}  # so that steps are of the size of lr
    if name == "scion":  # which moves a matrix of 2 x 8 less
        more = {"radius": 4.0}
    if name in SENSITIVE:  # in other bases some elements hardly move
        more = {"max_precond_dim": 1}
    lr = 2e-4 if name == "adagrad" else 1e-4  # whose steps get smaller
    optimizer = getattr(optimi_func, name)(lr=lr, weight_decay=0.0, **more)
    assert_same_movement(_WideState(optimizer), dtype)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_decay_adds_up_too(name: str) -> None:
    kind = {"decouple_wd": True} if name == "sgd" else {}
    optimizer = getattr(optimi_func, name)(lr=1e-4, weight_decay=0.1, **kind)
    assert_same_movement(_WideState(optimizer), torch.bfloat16)


def test_members_of_a_population() -> None:
    assert_same_movement(
        _WideState(optimi_func.adamw(lr=1e-4, weight_decay=0.0)), torch.bfloat16, vmap=True
    )


def test_a_chain_of_transforms() -> None:
    inner = transforms.chain(
        transforms.clip_value(2.0),
        transforms.clip_global_norm(1e3),
        optimi_func.adamw(lr=1e-4, weight_decay=0.0),
    )
    optimizer = transforms.apply_if_finite(
        transforms.every_k(transforms.ema(inner, 0.9), 1)
    )
    assert_same_movement(_WideState(optimizer), torch.bfloat16)


class _WideState:
    """An optimizer with its moments in float32."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.step = optimizer.step

    def init(self, params: Any) -> Any:
        return self._optimizer.init(params, state_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    """Where x is about to overflow or is denormal a compensated step is as ever."""
    top = torch.finfo(dtype).max
    for value in (top, -top, 1e-30, torch.finfo(dtype).tiny, 0.0):
        p = torch.full((2,), value, dtype=dtype)
        optimizer = optimi_func.sgd(lr=1e-3)
        new, state = optimizer.step(p, torch.zeros_like(p), optimizer.init(p))
        assert new.equal(p)
        assert not state.leaves.kahan_comp.any()
