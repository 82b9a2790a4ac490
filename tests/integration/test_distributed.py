"""DTensors: a step of shards is the step of whole tensors, on gloo."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from cases import CLASSES, MEASURED, SENSITIVE
from shards import (
    EAGER,
    assert_close,
    batch,
    by_rows,
    fitted,
    flat_mesh,
    full,
    hybrid_mesh,
    mine,
    placed,
    plain,
    sharded,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from worlds import gathered, in_turn, raises, world

import optimi_func
from optimi_func import AdamW, StableAdamW, compiled, prepare_for_gradient_release

# Beside the names of rules: AdamW with what is measured over the whole tensor.
OPTIONS: dict[str, dict[str, Any]] = {"cautious": {"cautious": True}, "mars": {"mars": 0.1}}


def shapes() -> list[tuple[int, ...]]:
    """Even, uneven, with empty shards, and as large as a kernel wants them."""
    return [(8, 3), (5, 4), (1, 6), (3,), (3, 5000), (2, 1)]


def problem(dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(2)
    starts = [torch.randn(shape).to(dtype) for shape in shapes()]
    grads = [[torch.randn(shape).to(dtype) * 10**i for shape in shapes()] for i in range(4)]
    return starts, grads


def moved(optimizer_of: Callable[[list[Any]], Any], dtype: torch.dtype, place: Any) -> Any:
    """Parameters and optimizer after some given gradients, placed by `place`."""
    starts, grads = problem(dtype)
    params = [nn.Parameter(place(x.clone())) for x in starts]
    optimizer = optimizer_of(params)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = place(g.clone())
        optimizer.step()
    return params, optimizer


def rule(name: str, foreach: bool) -> Callable[[list[Any]], Any]:
    """An optimizer that steps eagerly or by foreach."""
    way = {"foreach": True} if foreach else EAGER
    more: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    if name in OPTIONS:
        name, more = "adamw", OPTIONS[name]
    if name in SENSITIVE:  # a basis of 5000 x 5000 takes minutes
        more = {"max_precond_dim": 1000}
    if name == "kron":
        more = {"max_size_triangular": 1000}
    return lambda ps: CLASSES[name](ps, lr=1e-2, weight_decay=0.1, **more, **way)


@functools.cache
def moved_whole(name: str, dtype: torch.dtype, foreach: bool) -> Any:
    return moved(rule(name, foreach), dtype, lambda x: fitted(name, x))


def compare_rules(
    place: Callable[[Tensor], Any],
    ways: list[bool],
    names: Iterable[str] = (*CLASSES, *OPTIONS),
) -> None:
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            for foreach in ways:
                theirs, other = moved_whole(name, dtype, foreach)
                fit = functools.partial(fitted, name)
                ours, optimizer = moved(
                    rule(name, foreach), dtype, lambda x, fit=fit: place(fit(x))
                )
                for p, q in zip(ours, theirs):
                    # Each process looks at what it has.
                    compare_leaf(name, p.to_local(), place(q.detach()).to_local())
                    state, known = optimizer.state[p], other.state[q]
                    assert list(state) == list(known)
                    assert type(state["step"]) is Tensor and state["step"] == 4
                    its = other.rule_of(other.param_groups[0])
                    numbers = its.running._fields
                    near = functools.partial(torch.allclose, rtol=1e-5)
                    alike = near if name == "prodigy" else torch.equal
                    assert all([alike(state[k], known[k]) for k in numbers])
                    for field in set(state) - {"step", *numbers}:
                        x = state[field]
                        assert isinstance(x, DTensor)
                        if field in its.whole_fields:  # cut on its own
                            assert torch.equal(full(x), known[field]), field
                            continue
                        assert x.placements == p.placements, field
                        assert x.dtype == known[field].dtype
                        part, other_part = x.to_local(), place(known[field]).to_local()
                        exact = name not in (*MEASURED, *OPTIONS) or field != "kahan_comp"
                        kept = {"prodigy": "p0", "mars": "prev_grad"}.get(name, field)
                        exact = exact and field == kept
                        assert not exact or torch.equal(part, other_part), field


def compare_leaf(name: str, ours: Tensor, theirs: Tensor) -> None:
    if name in (*MEASURED, *OPTIONS):
        tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(ours, theirs), name


@world(full=[2], soak=[4])
def test_every_rule_steps_shards_as_whole_tensors() -> None:
    """Every rule, eagerly and by foreach, bit for bit as on whole tensors."""
    # Four processes step by foreach on planes.
    ways = [False, True] if dist.get_world_size() == 2 else [False]
    compare_rules(by_rows(), ways)


@world(2)
def test_three_rules_step_shards_as_whole_tensors() -> None:
    """Three rules: elementwise, with means over shards, and of whole matrices."""
    compare_rules(by_rows(), [False], ("adamw", "stableadamw", "muon"))


@world(full=[4])
def test_every_rule_steps_on_meshes_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        compare_rules(placed(mesh, *placements), [True])


@world(full=[2])
def test_a_kernel_takes_this_shard_and_a_bucket_that_one() -> None:
    place = by_rows()
    for cls in (AdamW, StableAdamW):

        def make(params: Any, cls: Any = cls) -> Any:
            return cls(params, lr=0.5, compile=True)

        starts, _ = problem(torch.float32)
        with in_turn():
            theirs, _ = moved(make, torch.float32, lambda x: x)
        ours, _ = moved(make, torch.float32, place)
        assert_close([full(p) for p in ours], [full(p) for p in theirs], starts, 1e-6)
    # The pure doors, compiled too.
    starts, grads = problem(torch.float32)
    tree = {str(i): place(x) for i, x in enumerate(starts)}
    for step in (
        compiled.stableadamw_step,
        optimi_func.stableadamw_step,
        compiled.stableadamw_step_,
    ):
        whole = {str(i): x.clone() for i, x in enumerate(starts)}
        params, state = copy.deepcopy(tree), optimi_func.stableadamw_init(tree)
        known = optimi_func.stableadamw_init(whole)
        with in_turn():  # compiles what the shards take, too
            first = {str(i): g for i, g in enumerate(grads[0])}
            step(copy.deepcopy(whole), first, copy.deepcopy(known), lr=0.5)
        for gs in grads:
            pieces = {str(i): place(g) for i, g in enumerate(gs)}
            params, state = step(params, pieces, state, lr=0.5)
            gs = {str(i): g for i, g in enumerate(gs)}
            whole, known = optimi_func.stableadamw_step(whole, gs, known, lr=0.5)
        ours = [full(p) for p in params.values()]
        assert_close(ours, list(whole.values()), starts, 1e-6)
        assert state.step == 4


@world(2)
def test_gradients_that_lie_otherwise_are_brought_to_the_parameter_or_refused() -> None:
    mesh, size = flat_mesh(), dist.get_world_size()
    start, g = torch.randn(5, 3), torch.randn(5, 3)
    whole = nn.Parameter(start.clone())
    whole.grad = g.clone()
    AdamW([whole], lr=0.1, **EAGER).step()
    addend = DTensor.from_local(g / size, mesh, [Partial()])
    for at in (Shard(0), Replicate()):
        for grad in (addend, distribute_tensor(g, mesh, [Replicate()])):
            p = nn.Parameter(distribute_tensor(start.clone(), mesh, [at]))
            p.grad = grad
            optimizer = AdamW([p], lr=0.1, **EAGER)
            optimizer.step()
            assert torch.allclose(p.full_tensor(), whole)
            assert p.grad is grad
            assert optimizer.state[p]["exp_avg"].placements == (at,)
    p = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    optimizer = AdamW([("w", p)], lr=0.1, **EAGER)
    optimizer.step()
    before = p.full_tensor()
    alone = nn.Parameter(start.clone())
    alone.grad = distribute_tensor(g, mesh, [Shard(0)])
    with raises(TypeError, "grads[0] is a DTensor, its parameter a Parameter"):
        AdamW([alone], lr=0.1, **EAGER).step()
    other = init_device_mesh("cpu", (1, size))
    p.grad = distribute_tensor(g, other, [Replicate(), Shard(0)])
    with raises(ValueError, "grads['w'] is on"):
        optimizer.step()
    assert torch.equal(before, p.full_tensor())
    part = nn.Parameter(DTensor.from_local(start, mesh, [Partial()]))
    part.grad = DTensor.from_local(g, mesh, [Partial()])
    with raises(ValueError, "allowed are Shard and Replicate"):
        AdamW([part], lr=0.1, **EAGER).step()
    # A state from before it was divided.
    p.grad = distribute_tensor(g, mesh, [Shard(0)])
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(5, 3)
    with raises(ValueError, "state['w']['exp_avg'] is not divided"):
        optimizer.step()
    # Autograd knows that the parameter was written.
    optimizer.state.clear()
    loss = (p * p).sum()
    optimizer.step()
    with raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()


@world(full=[2])
def test_a_shard_that_is_put_elsewhere_between_steps_is_followed() -> None:
    mesh = flat_mesh()
    for shape in ((5,), (5, 2)):
        ends = []
        for divided in (False, True):

            def place(x: Tensor, divided: bool = divided) -> Any:
                return distribute_tensor(x, mesh, [Shard(0)]) if divided else x

            params: list[Any] = [nn.Parameter(place(torch.ones(shape))) for _ in range(2)]
            optimizer = AdamW(params, lr=0.1, foreach=True)
            for i in range(4):
                if i == 3 and divided:
                    params[0]._local_tensor = 2 * params[0]._local_tensor
                elif i == 3:
                    params[0].data = 2 * params[0].data
                for p in params:
                    p.grad = place(torch.full(shape, i - 1.5))
                optimizer.step()
            ends.append([full(p) for p in params])
        assert all(torch.equal(a, b) for a, b in zip(*ends))


@world(2, full=[4])
def test_prodigys_sums_of_all_groups_are_one_message() -> None:
    """Prodigy's two sums of all groups are one message a step, also under release."""
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(x: Tensor, *given: Any, **how: Any) -> Any:
        sent.append(x.numel())
        return reduce(x, *given, **how)

    def stepping(mesh: Any, release: bool, share: bool) -> tuple[Any, Any, Any]:
        model = sharded(mesh)
        named = list(model.named_parameters())
        groups = [{"params": named[:2]}, {"params": named[2:]}]
        options = {"share_d": share, "gradient_release": release, **EAGER}
        optimizer = optimi_func.Prodigy(groups, **options)
        return model, optimizer, release and prepare_for_gradient_release(model, optimizer)

    four = dist.get_world_size() == 4
    meshes = [flat_mesh(), *[hybrid_mesh() for _ in range(four)]]
    for mesh, share in itertools.product(meshes, (False, True)):
        model = plain()
        named = list(model.named_parameters())
        groups = [{"params": named[:2]}, {"params": named[2:]}]
        other = optimi_func.Prodigy(groups, share_d=share, **EAGER)
        train(model, other, range(8), batch)
        runs = [stepping(mesh, release, share) for release in (False, True)]
        for ours, optimizer, _ in runs:
            for i in range(8):
                sent.clear()
                dist.all_reduce = counted
                try:
                    train(ours, optimizer, range(i, i + 1), mine)
                finally:
                    dist.all_reduce = reduce
                messages = [n for n in sent if n in (2, 4)]
                assert messages == [2 if share else 4], sent
            for mine_, theirs in zip(optimizer.param_groups, other.param_groups):
                error = abs(mine_["d"] / theirs["d"] - 1.0)
                assert error < 1e-3 and theirs["d"] > 1e-6, (mine_["d"], theirs["d"])
        (one, first, _), (two, second, handle) = runs
        for p, q in zip(one.parameters(), two.parameters()):
            assert torch.equal(p.to_local(), q.to_local())
        ds = [[group["d"] for group in x.param_groups] for x in (first, second)]
        assert ds[0] == ds[1]
        assert all(x == ds for x in gathered(ds))
        handle.remove()
