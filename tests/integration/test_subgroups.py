"""Process groups smaller than the world: two teams of two processes train side by side.

The teams are [0, 2] and [1, 3], so that a rank in the group is not the rank in the world.
Each has weights and data of its own, and must end where one process with its data ends.
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from cases import CLASSES
from one_process import (
    Among,
    Poison,
    Steps,
    Trained,
    Training,
    as_one_process,
    fully_sharded,
    of,
    replicated,
)
from shards import EAGER, Net, full, loss_of, snapshot
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import raises, world

from optimi_func import AdamW, Muon, MuonAdamW, prepare_for_gradient_release

STEPS, TIGHT, BAD = 4, 1e-9, 2
STEP: dict[str, Any] = {"skip_nonfinite": "step"}


def teams() -> Any:
    """The mesh whose first dimension is a team; the second is across the teams."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("members", "teams"))


def team() -> int:
    return dist.get_rank() % 2


def plain(team_: int | None = None) -> Net:
    torch.manual_seed(10 + (team() if team_ is None else team_))
    return Net().double()


def whole_batch(i: int, team_: int | None = None) -> Tensor:
    source = torch.Generator().manual_seed(100 * i + (team() if team_ is None else team_))
    return 3 * torch.randn(8, 5, dtype=torch.float64, generator=source)


def share(x: Tensor) -> Tensor:
    return x.chunk(2)[dist.get_rank() // 2]


def of_team(name: str = "adamw", **options: Any) -> Training:
    more = {"d0": 0.05, "d_coef": 4.0} if name == "prodigy" else {}
    return Training(plain, of(CLASSES[name], lr=0.02, **more), whole_batch, **options)


def sharded() -> Among:
    return replace(fully_sharded(teams()["members"]), share=share)


@world(full=[4])
def test_replicas_of_a_team_average_among_themselves() -> None:
    def divide(model: Net) -> Net:
        if dist.get_rank() > 1:  # takes the weights of its team's first process
            nn.init.ones_(model.first.weight)
        return model

    among = replace(replicated(teams().get_group(0), bucket_cap_mb=1e-4), divide=divide)
    ways: list[tuple[dict[str, Any], float | None, int]] = [
        ({}, None, 1),
        ({"accumulation": "buffer", "accumulation_steps": 2}, None, 2),
        ({"clip_global_norm": 0.1, "grad_norm": True, **STEP}, 0.1, 1),
    ]
    for release, clip, micro in ways:
        alone = of_team(clip=clip, micro=micro).alone
        training = of_team(release=release, micro=micro)
        as_one_process(training, among, tolerance=TIGHT, about=release, than=alone)


@world(full=[4])
def test_buffers_are_those_of_the_teams_first_process() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    optimizer = of(AdamW)(model, gradient_release=True)
    prepare_for_gradient_release(model, optimizer, process_group=teams().get_group(0))
    for i in range(2):
        loss_of(model, share(whole_batch(i))).backward()
    alone = nn.BatchNorm1d(5).double()
    for i in range(2):
        alone(whole_batch(i).chunk(2)[0])
    x = share(whole_batch(2))
    model(x)  # takes over what the first had after the last step
    told = model[0].running_mean.clone()
    want = 0.9 * alone.running_mean + 0.1 * x.mean(0)
    torch.testing.assert_close(told, want, rtol=1e-12, atol=1e-12)


@world(full=[4])
def test_maps_are_divided_within_a_team() -> None:
    """Bit for bit what each process maps alone. The teams have different matrices."""
    sizes = [(6, 4), (4, 6), (5, 5), (3, 7, 4)][: 3 + team()]
    group = teams().get_group(0)
    for name in ("muon", "soap", "scion"):
        steps = Steps(partial(CLASSES[name], lr=0.02, **EAGER), sizes, count=STEPS)
        as_one_process(steps, lambda x: x, about=name, process_group=group)


@world(full=[4])
def test_a_team_skips_its_step_alone() -> None:
    group = teams().get_group(0)
    for cls in (Muon, MuonAdamW):
        torch.manual_seed(team())
        model: Any = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
        options: dict[str, Any] = {"process_group": group, **STEP, **EAGER}
        optimizer = cls(
            model if cls is MuonAdamW else model.parameters(), lr=0.1, **options
        )
        for i in range(STEPS):
            before = snapshot(model)
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + i)
            if i == BAD and dist.get_rank() == 3:
                model[0].weight.grad[0, 0] = torch.nan
            optimizer.step()
            same = all(map(torch.equal, before, snapshot(model)))
            assert same == (i == BAD and team() == 1)
        assert optimizer.skipped_steps == team()


@world(full=[4])
def test_a_difference_within_a_team_is_an_error_in_that_team() -> None:
    group = teams().get_group(0)
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    optimizer = Muon(
        [("w", p)], lr=0.1 + (dist.get_rank() == 3), process_group=group, **EAGER
    )
    if team() == 0:
        optimizer.step()
        assert not torch.equal(p.detach(), torch.ones(2, 2))
        return
    with raises(ValueError, "lr of param group 0: process 1 of the group has 1.1"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(2, 2))


@world(full=[4])
def test_shards_of_a_team_are_summed_within_it() -> None:
    for name in ("adamw", "stableadamw", "adafactor", "prodigy", "muon", "shampoo"):
        # Shampoo's first roots are of eigenvalues that are 0 but for rounding.
        tolerance = 1e-6 if name == "shampoo" else TIGHT
        as_one_process(of_team(name), sharded(), tolerance=tolerance, about=name)


@world(full=[4])
def test_a_parameter_is_skipped_by_the_team_that_has_its_shards() -> None:
    name = "second.weight"
    ends: list[Tensor] = []
    for poison in (None, Poison(name, 2, BAD)):
        training = of_team(release={"skip_nonfinite": True}, poison=poison)
        end = training.run(sharded())
        ends.append(full(end.model.get_parameter(name)))
    assert torch.equal(*ends) == (team() == 1)
    assert end.handle.skipped == ({} if team() else {name: 1})


def of_both_stages(clip: float) -> list[Trained]:
    """Return the ends of two models that are clipped together, and leave out a step."""
    ends = [Trained(model, of(AdamW, lr=0.02)(model), None) for model in map(plain, (0, 1))]
    for i in range(STEPS):
        for k, end in enumerate(ends):
            loss_of(end.model, whole_batch(i, k)).backward()
        norm = nn.utils.clip_grad_norm_(chain(*[x.model.parameters() for x in ends]), clip)
        for end in ends:
            end.norms.append(torch.nan if i == BAD else norm)
            if i != BAD:
                end.optimizer.step()
            end.optimizer.zero_grad()
    return ends


@world(full=[4])
def test_stages_of_shards_are_clipped_and_skipped_together() -> None:
    """A team is a stage of a pipeline, whose parameters its processes shard."""
    ways: list[dict[str, Any]] = [
        {"clip_global_norm": 0.1},
        {"clip_global_norm": 0.1, "accumulation": "buffer"},
        {"accumulation": "buffer"},
    ]
    among = replace(sharded(), release={"groups": [teams().get_group(1)]})
    for options in ways:
        than = of_both_stages(options.get("clip_global_norm", torch.inf))[team()]
        for rank in (0, 3):  # the process whose gradient is bad
            how, poison = (
                {"grad_norm": True, **STEP, **options},
                Poison("first.bias", rank, BAD),
            )
            training = of_team(release=how, poison=poison)
            end = as_one_process(training, among, tolerance=TIGHT, about=options, than=than)
            assert set(end.handle.skipped.values()) == {1}
            assert len(end.handle.skipped) == len(end.handle.params)
