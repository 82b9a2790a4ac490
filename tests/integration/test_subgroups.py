"""Process groups smaller than the world: two teams of two processes train side by side.

The teams are [0, 2] and [1, 3], so that a rank in the group is not the rank in the world.
Each has weights and data of its own, and must end where one process with its data ends.
"""

from typing import Any

import torch
import torch.distributed as dist
from cases import CLASSES
from shards import EAGER, Net, assert_close, full, loss_of, snapshot
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worlds import raises, world

from optimi_func import Muon, MuonAdamW, prepare_for_gradient_release

STEPS, TIGHT, BAD = 4, 1e-9, 2
STEP: dict[str, Any] = {"skip_nonfinite": "step"}


def teams() -> Any:
    """The mesh whose first dimension is a team; the second is across the teams."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("members", "teams"))


def team() -> int:
    return dist.get_rank() % 2


def plain(of: int | None = None) -> Net:
    torch.manual_seed(10 + (team() if of is None else of))
    return Net().double()


def whole_batch(i: int, of: int | None = None) -> Tensor:
    source = torch.Generator().manual_seed(100 * i + (team() if of is None else of))
    return 3 * torch.randn(8, 5, dtype=torch.float64, generator=source)


def share(i: int) -> Tensor:
    return whole_batch(i).chunk(2)[dist.get_rank() // 2]


def sharded(mesh: Any, model: Net) -> Net:
    for part in (model.first, model.second, model.last, model):
        fully_shard(part, mesh=mesh)
    return model


def made(name: str, model: nn.Module, **options: Any) -> Any:
    params = list(model.parameters())
    if name == "muon":
        for p in params:
            p.requires_grad_(p.dim() > 1)
        params = [p for p in params if p.dim() > 1]
    more = {"d0": 0.05, "d_coef": 4.0} if name == "prodigy" else {}
    return CLASSES[name](params, lr=0.02, **more, **options, **EAGER)


def in_one_process(name: str, clip: float | None = None, part: int = 1) -> list[Tensor]:
    model = plain()
    optimizer = made(name, model)
    for i in range(STEPS):
        for k in range(part):
            (loss_of(model, whole_batch(part * i + k)) / part).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@world(full=[4])
def test_replicas_of_a_team_average_among_themselves() -> None:
    group = teams().get_group(0)
    ways: list[tuple[dict[str, Any], float | None, int]] = [
        ({}, None, 1),
        ({"accumulation": "buffer", "accumulation_steps": 2}, None, 2),
        ({"clip_global_norm": 0.1, "grad_norm": True, **STEP}, 0.1, 1),
    ]
    for options, clip, part in ways:
        model = plain()
        if dist.get_rank() > 1:  # takes the weights of its team's first process
            nn.init.ones_(model.first.weight)
        optimizer = made("adamw", model, gradient_release=True)
        handle = prepare_for_gradient_release(
            model, optimizer, process_group=group, bucket_cap_mb=1e-4, **options
        )
        for i in range(STEPS):
            for k in range(part):
                x = share(part * i + k)
                handle.backward(lambda x=x: loss_of(model, x) / part)  # noqa: B023
            optimizer.step()
        theirs = in_one_process("adamw", clip, part)
        assert_close(snapshot(model), theirs, snapshot(plain()), TIGHT)


@world(full=[4])
def test_buffers_are_those_of_the_teams_first_process() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    optimizer = made("adamw", model, gradient_release=True)
    prepare_for_gradient_release(model, optimizer, process_group=teams().get_group(0))
    for i in range(2):
        loss_of(model, share(i)).backward()
    alone = nn.BatchNorm1d(5).double()
    for i in range(2):
        alone(whole_batch(i).chunk(2)[0])
    model(share(2))  # takes over what the first had after the last step
    told = model[0].running_mean.clone()
    want = 0.9 * alone.running_mean + 0.1 * share(2).mean(0)
    torch.testing.assert_close(told, want, rtol=1e-12, atol=1e-12)


@world(full=[4])
def test_maps_are_divided_within_a_team() -> None:
    """Bit for bit what each process maps alone. The teams have different matrices."""
    group = teams().get_group(0)

    def matrices() -> Any:
        torch.manual_seed(team())
        sizes = [(6, 4), (4, 6), (5, 5), (3, 7, 4)][: 3 + team()]
        return nn.ParameterList([torch.randn(*size) for size in sizes])

    for name in ("muon", "soap", "scion"):
        ends: list[Any] = []
        for how in ({}, {"process_group": group}):
            params = matrices()
            optimizer = CLASSES[name](params.parameters(), lr=0.02, **how, **EAGER)
            for i in range(STEPS):
                torch.manual_seed(100 * i + team())
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()
            ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
        for ours, theirs in zip(*ends, strict=True):
            assert all(map(torch.equal, ours, theirs)), name


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
    mesh = teams()["members"]
    for name in ("adamw", "stableadamw", "adafactor", "prodigy", "muon", "shampoo"):
        model = plain()
        made(name, model)  # freezes what it takes not, before it is sharded
        sharded(mesh, model)
        optimizer = made(name, model)
        for i in range(STEPS):
            loss_of(model, share(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs = in_one_process(name)
        # Shampoo's first roots are of eigenvalues that are 0 but for rounding.
        tolerance = 1e-6 if name == "shampoo" else TIGHT
        assert_close(snapshot(model), theirs, snapshot(plain()), tolerance)


class Poison:
    """Puts a NaN into one process's shard of a gradient, at one backward."""

    def __init__(self, p: Any, rank: int) -> None:
        self.on, self._rank = False, rank
        p.register_post_accumulate_grad_hook(self)

    def __call__(self, p: Any) -> None:
        if self.on and dist.get_rank() == self._rank:
            p.grad.to_local().view(-1)[:1] = torch.nan


@world(full=[4])
def test_a_parameter_is_skipped_by_the_team_that_has_its_shards() -> None:
    model = sharded(teams()["members"], plain())
    poison = Poison(model.second.weight, rank=2)
    optimizer = made("adamw", model, gradient_release=True)
    handle = prepare_for_gradient_release(
        model, optimizer, ignore_existing_hooks=True, skip_nonfinite=True
    )
    for i in range(STEPS):
        poison.on = i == BAD
        before = full(model.second.weight)
        loss_of(model, share(i)).backward()
        optimizer.step()
        same = torch.equal(before, full(model.second.weight))
        assert same == (i == BAD and team() == 0)
    assert handle.skipped == ({} if team() else {"second.weight": 1})


def of_both_stages(clip: float) -> tuple[list[list[Tensor]], list[float]]:
    """The ends of two models that are clipped together and leave out a step, in turns."""
    models = [plain(0), plain(1)]
    optimizers = [made("adamw", model) for model in models]
    norms: list[float] = []
    for i in range(STEPS):
        for k, model in enumerate(models):
            loss_of(model, whole_batch(i, k)).backward()
        params = [p for model in models for p in model.parameters()]
        norms.append(nn.utils.clip_grad_norm_(params, clip).item())
        for optimizer in optimizers:
            if i != BAD:
                optimizer.step()
            optimizer.zero_grad()
    return [snapshot(model) for model in models], norms


@world(full=[4])
def test_stages_of_shards_are_clipped_and_skipped_together() -> None:
    """A team is a stage of a pipeline, whose parameters its processes shard."""
    mesh = teams()
    ways: list[dict[str, Any]] = [
        {"clip_global_norm": 0.1},
        {"clip_global_norm": 0.1, "accumulation": "buffer"},
        {"accumulation": "buffer"},
    ]
    for options in ways:
        clip = options.get("clip_global_norm", torch.inf)
        ends, norms = of_both_stages(clip)
        for rank in (0, 3):  # the process whose gradient is bad
            model = sharded(mesh["members"], plain())
            poison = Poison(model.first.bias, rank)
            optimizer = made("adamw", model, gradient_release=True)
            handle = prepare_for_gradient_release(
                model,
                optimizer,
                ignore_existing_hooks=True,
                groups=[mesh.get_group(1)],
                grad_norm=True,
                **STEP,
                **options,
            )
            for i in range(STEPS):
                poison.on = i == BAD
                handle.backward(lambda i=i, model=model: loss_of(model, share(i)))
                optimizer.step()
                if i != BAD:
                    torch.testing.assert_close(handle.grad_norm.item(), norms[i])
            assert set(handle.skipped.values()) == {1}
            assert len(handle.skipped) == len(handle.params)
            assert_close(snapshot(model), ends[team()], snapshot(plain()), TIGHT)
