"""DTensors: a step of shards is the step of whole tensors, on gloo."""

import itertools
import warnings
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from apollo import APOLLO
from cases import CLASSES, MATRICES, MEASURED, NO_CODES, SENSITIVE, STILL
from conda import Conda
from d_adaptation import DAdaptation
from galore import GaLore
from kourkoutas import Kourkoutas
from lars import LARS
from mars import MARS
from one_process import (
    End,
    Steps,
    Tensors,
    Trained,
    Training,
    Way,
    as_one_process,
    assert_alike,
    both,
    everything,
    fully_sharded,
    local_of,
    masters,
    parameters,
    states,
    ways,
)
from own_rules import NormedLAMB, Sphere, Tangent
from peaks import Peak
from psgd import PSGD
from sgld import SGLD
from shards import (
    EAGER,
    by_rows,
    flat_mesh,
    full,
    hybrid_mesh,
    plain,
)
from stored import same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from worlds import counted, gathered, in_turn, raises, world

import optimi_func
from optimi_func import (
    SOAP,
    AdamW,
    Muon,
    Ranger,
    ScheduleFreeAdamW,
    StableAdamW,
    Storage,
    adamw,
    compiled,
    muon,
    muon_init,
    muon_step,
    soap,
    stableadamw,
)

FOREACH = {"foreach": True}
FLOATS = torch.float32, torch.bfloat16
# Even, uneven, with empty shards, and as large as a kernel wants them.
SHAPES = [(8, 3), (5, 4), (1, 6), (3,), (3, 5000), (2, 1)]
# Uneven and empty shards, one dimension, groups that span two processes; and two that are
# too small for codes.
CODED = [(130, 64), (2, 4096), (8192,), (129, 64, 32), (5, 7), (3,)]
# Convolutions, stacks, and matrices that processes divide unevenly or not at all.
WHOLE = [(8, 5), (5, 9), (1, 6), (7, 2, 3, 3), (3, 6, 4), (6, 1)]
# Beside the names of rules: AdamW with what is measured over the whole tensor.
OPTIONS: dict[str, dict[str, Any]] = {"cautious": {"cautious": True}, "mars": {"mars": 0.1}}
# What some rules need for the shapes above: a basis of 5000 x 5000 takes minutes.
NEEDED: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "kron": {"max_size_triangular": 1000},
    **{name: {"max_precond_dim": 1000} for name in SENSITIVE},
    **OPTIONS,
}
# Rules with sums over a tensor, which processes add up in another order.
SUMS = (*MEASURED, *OPTIONS)
# Of two rules the only field of the state that does not depend on such sums.
EXACT = {"prodigy": "p0", "mars": "prev_grad"}


@cache
def steps_of(name: str, dtype: torch.dtype, **way: Any) -> Steps:
    shapes = CODED if "storage" in way else SHAPES
    if name in MATRICES:
        shapes = [s if len(s) > 1 else (1, *s) for s in shapes]
    cls = CLASSES["adamw" if name in OPTIONS else name]
    make = partial(cls, lr=1e-2, **NEEDED.get(name, {}), **way)
    count = max(4, 2 + STILL.get(name, 0))  # some rules' first gradients move nothing
    return Steps(make, shapes, dtype, count, growth=1.0 if "storage" in way else 10.0)


def compare(name: str, steps: Steps, way: Way, tolerance: float) -> End:
    """Compare bit for bit, except what depends on sums over a tensor."""
    if name not in SUMS:
        return as_one_process(steps, way.place, about=(name, way.name))

    def exact(end: End) -> Tensors:
        ends, found = EXACT.get(name, ""), states(end)
        known = [k for k in found if k.endswith(ends) and not k.endswith("kahan_comp")]
        return {k: found[k] for k in known}

    end = as_one_process(steps, way.place, masters, tolerance, (name, way.name))
    assert_alike(exact(end), exact(steps.alone), about=(name, way.name))
    assert list(states(end)) == list(states(steps.alone))
    return end


def compare_rules(
    divided: list[Way],
    how: list[dict[str, Any]],
    names: Collection[str] = (*CLASSES, *OPTIONS),
) -> None:
    for name, dtype, way, more in itertools.product(names, FLOATS, divided, how):
        steps = steps_of(name, dtype, weight_decay=0.1, **more)
        compare(name, steps, way, 1e-4 if dtype == torch.float32 else 1e-2)


@world(full=[2], soak=[4])
def test_every_rule_steps_shards_as_whole_tensors() -> None:
    """Every rule, eagerly and by foreach, bit for bit as on whole tensors."""
    # Four processes step by foreach on planes.
    how = [EAGER, FOREACH] if dist.get_world_size() == 2 else [EAGER]
    compare_rules(ways("rows"), how)


@world(2)
def test_three_rules_step_shards_as_whole_tensors() -> None:
    """Three rules: elementwise, with means over shards, and of whole matrices."""
    compare_rules(ways("rows"), [EAGER], ("adamw", "stableadamw", "muon"))


@world(full=[4])
def test_every_rule_steps_on_meshes_of_two_dimensions() -> None:
    compare_rules(ways("copies of rows", "rows and columns", "rows of rows"), [FOREACH])


EXACT8 = Storage("exact", "8bit")
STORAGES = [EXACT8, Storage("kahan", "8bit"), "exact", Storage("stochastic", "8bit", 3)]


@world(full=[2], soak=[4])
def test_every_rule_has_the_codes_of_one_process() -> None:
    # Of the others nothing is stored in codes.
    names = [name for name in CLASSES if name not in NO_CODES or name == "sgd"]
    (rows,) = ways("rows")
    coded = [*[(name, "compact") for name in names], *[("adamw", x) for x in STORAGES]]
    for name, storage in coded:
        steps = steps_of(name, torch.bfloat16, storage=storage, **EAGER)
        end = compare(name, steps, rows, 3e-2)  # a last bit of a sum may turn a code
        found = {k.split()[0] for k in states(end) if k.endswith("_q")}
        assert len(found) == (0 if storage == "exact" else 4), (name, storage)


@world(full=[2])
def test_reset_of_rows_of_parameters_and_of_all() -> None:
    (rows,) = ways("rows")
    for cls, storage in itertools.product(
        (AdamW, Ranger, ScheduleFreeAdamW), [None, "compact", *STORAGES]
    ):
        make = partial(cls, lr=0.01, storage=storage, **EAGER)
        steps = Steps(make, CODED, torch.bfloat16)
        ours, theirs = pair = steps.run(rows.place), steps.run(Tensor.clone)

        def compare(ours: End = ours, theirs: End = theirs) -> None:
            assert_alike(everything(ours), everything(theirs))

        # Rows of both processes, single elements of groups, and parameters.
        for at, some in ((0, [0, 100, -1]), (2, [4097]), (5, [2]), (1, None), (4, None)):
            entry = theirs.optimizer.state[theirs.params[at]]
            before = {k: x.clone() for k, x in entry.items()}
            for end in pair:
                end.optimizer.reset(end.params[at], some)
            after = theirs.optimizer.state[theirs.params[at]]
            assert not all(same_bits(after[k], x) for k, x in before.items())
        for last in (False, True):
            compare()
            for end in pair:
                end.optimizer.step()
            compare()
            for end in pair if not last else ():
                end.optimizer.reset()
            assert last or theirs.optimizer.state[theirs.params[0]]["step"] == 0


@world(full=[4])
def test_cut_along_two_dimensions_and_in_the_midst_of_groups() -> None:
    """Cut along two dimensions; and in the midst of groups, where moments stay wide."""
    for shape, name, coded in (
        ((66, 256), "rows and columns", True),
        ((65, 256), "rows of rows", True),
        ((130, 64), "rows and columns", False),
        ((8256,), "rows of rows", False),
    ):
        steps = Steps(
            partial(AdamW, lr=0.01, storage="compact", **EAGER), [shape], torch.bfloat16
        )
        (way,) = ways(name)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            end = steps.run(way.place)
        said = [str(w.message) for w in found if "cut groups" in str(w.message)]
        assert len(said) == (not coded), said
        assert coded or str(shape) in said[0]
        if coded:
            assert_alike(everything(end), everything(steps.alone), about=name)
        assert ("exp_avg_q" if coded else "exp_avg") in end.optimizer.state[end.params[0]]


class Compiled:
    """The compiled steps of a functional optimizer."""

    def __init__(self, value: Any, step: Any = compiled.step, **storage: Any) -> None:
        self.init, self.step = partial(value.init, **storage), partial(step, value)


@world(full=[2], soak=[4])
def test_maps_of_whole_matrices_bit_for_bit() -> None:
    """Muon and SOAP, as classes and as pure steps, in every way to divide the matrices."""
    how: dict[str, Any] = {"lr": 0.05, "precondition_frequency": 2}
    how["max_precond_dim"] = 8  # of (5, 9) only one side is rotated
    rows: list[Steps] = [
        Steps(partial(Muon, lr=0.05, **EAGER), WHOLE, torch.float64, value=muon(lr=0.05)),
        Steps(partial(Muon, lr=0.05, storage="compact", **EAGER), WHOLE, torch.bfloat16),
    ]
    kinds = [
        EAGER,
        {**FOREACH, "ns_coefficients": "quintic"},
        {**EAGER, "capturable": True},
    ]
    for dtype in FLOATS:
        rows += [Steps(partial(Muon, lr=0.05, **x), WHOLE, dtype) for x in kinds]
        made = partial(SOAP, **how, **EAGER)
        rows.append(Steps(made, [*WHOLE, (9,), (0, 3)], dtype, 6, value=soap(**how)))
    for i, steps in enumerate(rows):
        for way in ways():
            as_one_process(steps, way.place, about=(i, way.name), **way.options)
    value = Compiled(muon(lr=0.05), compiled.step_)
    steps = Steps(partial(Muon, lr=0.05, **EAGER), WHOLE, torch.float64, value=value)
    for way in ways():
        as_one_process(steps, way.place, both, 1e-11, **way.options)


@world(full=[2], soak=[4])
def test_a_derivative_through_a_pure_step() -> None:
    torch.manual_seed(3)
    for shape in ((8, 5), (3, 6, 4)):  # a stack is mapped where it lies
        start, g, weight = torch.randn(3, *shape, dtype=torch.float64)
        found = []
        for put in (lambda x: x, by_rows()):
            p = put(start.clone()).requires_grad_()
            new, _ = muon_step(p, put(g) * p, muon_init(p.detach()), lr=0.1)
            (new * put(weight)).sum().backward()
            found.append(full(p.grad))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@world(full=[2])
def test_compiled_steps_of_shards() -> None:
    """A kernel takes one shard and a bucket another; and the compiled pure steps."""
    (rows,) = ways("rows")
    for cls, value in ((AdamW, adamw(lr=0.5)), (StableAdamW, stableadamw(lr=0.5))):
        for step in (compiled.step, compiled.step_):
            make = partial(cls, lr=0.5, compile=True)
            steps = Steps(make, SHAPES, count=4, growth=10.0, value=Compiled(value, step))
            with in_turn():  # compiles what the shards take, too
                assert steps.alone.state.step == 4
            as_one_process(steps, rows.place, both, 1e-6)


@world(full=[2])
def test_pure_steps_of_codes() -> None:
    """Compiled, codes are stepped by single operations, and numbers are the host's."""
    value, storage = adamw(lr=0.01), {"storage": EXACT8}
    make = partial(AdamW, lr=0.01, **storage, **EAGER)
    values = [
        Compiled(value, step, **storage) for step in (type(value).step, compiled.step)
    ]
    eager, other = [Steps(make, CODED[:1], torch.bfloat16, 2, value=x) for x in values]
    (rows,) = ways("rows")
    as_one_process(eager, rows.place)
    ours, theirs = other.run(rows.place), eager.alone
    pairs = [(ours.tree[0], theirs.tree[0], torch.bfloat16)]
    mine_, known = (x.state.leaves[0].exp_avg_sq for x in (ours, theirs))
    pairs.append((mine_.q, known.q, torch.int32))
    for x, y, wide in pairs:
        apart = (full(x).to(wide) - y.to(wide)).abs()
        assert (apart > 0).float().mean() < 1e-2
        assert wide != torch.int32 or apart.max() <= 1
    assert mine_.q.placements == mine_.scale.placements == (Shard(0),)
    torch.testing.assert_close(full(mine_.scale), known.scale, rtol=1e-5, atol=0.0)


# By means before the direction, by whole matrices, and by sums over all parameters: options
# and, if a step sends messages, how many: one for each round and kind.
OWN: dict[Any, tuple[dict[str, Any], int | None]] = {
    LARS: ({"trust": 0.1, "l2": 0.1}, 1),
    MARS: ({}, None),
    Kourkoutas: ({"eps": 1e-2}, 1),  # and numbers that last
    NormedLAMB: ({"weight_decay": 0.1}, 2),  # and of the direction
    Peak: ({}, 4),  # maxima before the direction and of it
    Tangent: ({"weight_decay": 0.1}, 3),  # and of the finished delta
    Sphere: ({}, None),  # of a map's
    PSGD: ({}, None),
    SGLD: ({}, None),
    GaLore: ({"rank": 2, "gap": 2}, None),
    APOLLO: ({"rank": 2, "gap": 2}, None),
    Conda: ({"gap": 2}, None),  # which reads a moment
    DAdaptation: ({"first": 0.1}, None),
}
MATRICES_ONLY = (PSGD, GaLore, Sphere, APOLLO, Conda)
COMPILED = (LARS, NormedLAMB, Peak, Kourkoutas, Tangent, Sphere)


@world(full=[2])
def test_steps_of_users_rules_are_those_of_one_process() -> None:
    """Eager, foreach and kernels, float64 and bfloat16, the class and the pure step."""
    for cls, (hyper, messages) in OWN.items():
        hows: list[Any] = [(torch.float64, 1e-11, EAGER)]
        hows += [(torch.float32, 1e-5, EAGER)] * (cls is SGLD)
        hows += [(torch.bfloat16, 2e-2, FOREACH)] * (cls in (LARS, Kourkoutas))
        hows += [(torch.float32, 1e-4, {"compile": True})] * (cls in COMPILED)
        shapes = [(7, 9), (5, 5), (3,)][: 2 if cls in MATRICES_ONLY else 3]
        for dtype, tolerance, how in hows:
            make, value = partial(cls, lr=0.1, **hyper, **how), cls.pure(lr=0.1, **hyper)
            steps = Steps(make, shapes, dtype, 4, value=value)
            look = masters if dtype == torch.bfloat16 else both
            for way in ways("rows", "columns"):
                end = as_one_process(steps, way.place, look, tolerance, (cls, dtype, how))
                for p in end.params:
                    p.grad = torch.ones_like(p)
                with counted() as sent:
                    end.optimizer.step()
                assert messages in (None, len(sent)), (cls, how, way.name, len(sent))


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

    def make(model: nn.Module, share: bool, gradient_release: bool = False) -> Any:
        named = list(model.named_parameters())
        groups = [{"params": named[:2]}, {"params": named[2:]}]
        how = {"share_d": share, "gradient_release": gradient_release, **EAGER}
        return optimi_func.Prodigy(groups, **how)

    def ds(end: Trained) -> Tensors:
        return {
            f"d {i}": torch.tensor(x["d"]) for i, x in enumerate(end.optimizer.param_groups)
        }

    meshes = [flat_mesh(), *[hybrid_mesh() for _ in range(dist.get_world_size() == 4)]]
    for mesh, share in itertools.product(meshes, (False, True)):
        made, ends = Training(plain, partial(make, share=share), steps=8), list[Trained]()
        assert min(ds(made.alone).values()) > 1e-6
        for training in (made, replace(made, release={})):
            with counted() as sent:
                ends.append(training.run(fully_sharded(mesh)))
            messages = [x.numel() for x in sent if x.numel() in (2, 4)]
            assert messages == [2 if share else 4] * 8, sent
            assert_alike(ds(ends[-1]), ds(made.alone), tolerance=1e-3)
        for look in (ds, parameters):
            pairs = zip(*[map(local_of, look(end).values()) for end in ends])
            assert all(torch.equal(x, y) for x, y in pairs)
        found = list(map(float, ds(ends[0]).values()))
        assert all(x == found for x in gathered(found))
