"""`optimi_func.memory.plan`: true to the profiler, for every rule, and what it refuses."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CLASSES, NAMES
from measured import allocated_by, trained_peak
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import optimi_func
from optimi_func import SGD, AdamW, Storage
from optimi_func.memory import plan
from optimi_func.memory.recipes import WAYS

WIDTH = 128


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.contract(F.gelu(self.expand(self.norm(x))))
        return x + F.dropout(y, self.dropout)


class Net(nn.Module):
    """Residual blocks, perhaps checkpointed."""

    def __init__(self, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class GPT(nn.Module):
    """Attention, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        qkv = self.qkv(self.norm(x)).view(*tokens.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, dropout_p=self.dropout, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return model(x).float().square().mean()


def entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def by_name(found: Any) -> dict[str, Any]:
    return {recipe.name: recipe for recipe in found.recipes}


MANY = torch.randn(256, WIDTH)
FEW = MANY[:8]
TOKENS = torch.arange(256).view(4, 64)
TRUE = {
    "plain": (Net, squared, MANY, ["float32", "float32, release", "bfloat16 exact"]),
    "checkpoint": (partial(Net, True), squared, MANY, ["float32", "float32, release"]),
    "dropout": (partial(Net, dropout=0.1), squared, MANY, ["float32 + 8bit, release"]),
    "autocast": (Net, autocast, MANY, ["float32", "float32, release"]),
    "small gradient": (
        Net,
        squared,
        FEW,
        ["bfloat16 compact", "bfloat16 compact, release"],
    ),
    "tied": (GPT, entropy, TOKENS, ["float32", "float32, release", "bfloat16 kahan"]),
}


@pytest.mark.parametrize("kind", TRUE)
def test_the_peak_is_the_profilers(kind: str) -> None:
    make, loss_fn, batch, names = TRUE[kind]
    found = by_name(plan(make(), AdamW, "1GB", loss_fn, batch, compile=False))
    for name in names:
        measured = trained_peak(make, loss_fn, batch, found[name])
        # Checkpoints keep the state of the random numbers, which is no tensor's.
        assert found[name].peak == pytest.approx(measured, rel=3e-3), name
        if kind != "checkpoint":
            assert abs(found[name].peak - measured) <= 64, name


@pytest.mark.parametrize("steps", [2, 3])
def test_the_peak_is_the_profilers_where_gradients_accumulate(steps: int) -> None:
    options = {"accumulation_steps": steps, "compile": False}
    found = by_name(plan(Net(), AdamW, "1GB", squared, FEW, **options))
    for name in (
        "float32",
        "float32, release, float32 sums",
        "float32, release, bfloat16 sums",
        "bfloat16 plain, release, float32 sums",
        "bfloat16 plain, release, bfloat16 sums",
    ):
        measured = trained_peak(Net, squared, FEW, found[name])
        assert found[name].peak == pytest.approx(measured, rel=3e-2), name
        assert found[name].accumulation_steps == steps


def test_small_gradients_wait_as_in_a_release() -> None:
    """More than a release lets wait, each too small to be updated by itself."""

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(80, 80) for _ in range(60)])

    batch = torch.randn(4, 80)
    found = by_name(plan(make(), SGD, "1GB", squared, batch, compile=False))
    for name in ("float32, release", "bfloat16 plain, release"):
        measured = trained_peak(make, squared, batch, found[name])
        assert abs(found[name].peak - measured) <= 64, name
    # On CUDA they wait where they are, and no longer than to the end of backward.
    found = by_name(plan(make(), SGD, "1GB", squared, batch, device="cuda"))
    small = found["float32, release"]
    assert 1 << 20 < small.gradients < (1 << 20) + 2 * 80 * 81 * 4 + 1024


@pytest.mark.parametrize("name", NAMES)
def test_state_is_that_of_the_rule(name: str) -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 3))
    found = by_name(plan(model, CLASSES[name], "1MB"))
    assert {"float32", "bfloat16 plain", "bfloat16 compact, release"} - {*found} <= {
        # Which has no moments to be kept in codes.
        *(["bfloat16 compact, release"] if name == "sgd" else [])
    }
    for recipe in found.values():
        if recipe.gradient_release:
            continue
        params = [p.detach().to(recipe.dtype) for p in model.parameters()]
        optimizer = CLASSES[name](
            [p.requires_grad_() for p in params], lr=1e-3, storage=recipe.storage
        )
        optimizer.init_state()
        kept = [x.nbytes for state in optimizer.state.values() for x in state.values()]
        assert recipe.state == sum(kept)
        assert recipe.parameters == sum(p.nbytes for p in params)


ORDER = [
    "float32",
    "bfloat16 exact",
    "float32 + 8bit",
    "bfloat16 exact + 8bit",
    "bfloat16 kahan",
    "bfloat16 kahan + 8bit",
    "bfloat16 compact",
    "bfloat16 plain",
]


def test_recipes_are_in_the_order_of_fidelity() -> None:
    model = nn.Linear(256, 256)
    names = [recipe.name for recipe in plan(model, AdamW, "1GB").recipes]
    assert names == [name + end for name in ORDER for end in ("", ", release")]
    found = plan(model, AdamW, "1GB", accumulation_steps=4).recipes
    names = [recipe.name for recipe in found]
    ends = ["", ", release, float32 sums", ", release, bfloat16 sums"]
    # p.grad adds up in bfloat16 where that is the parameter's dtype.
    low = [ends[1], ends[0], ends[2]]
    expected = [n + end for n in ORDER for end in (low if n.startswith("b") else ends)]
    assert names == expected
    for recipe in found:
        sums = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        assert recipe.buffer_dtype == sums.get(recipe.name.split(", ")[-1].split()[0]) or (
            not recipe.gradient_release
        )


def test_only_what_the_rule_can_honour_is_planned() -> None:
    model = nn.Linear(256, 256)
    plain = [r.storage for r in plan(model, SGD, "1GB", lr=1.0).recipes]
    assert plain[::2] == [None, "exact", Storage("kahan"), Storage("plain")]
    momentum = plan(model, SGD, "1GB", lr=1.0, momentum=0.9)
    assert [r.storage for r in momentum.recipes][::2] == [way[2] for way in WAYS]


def test_the_best_is_the_most_faithful_that_fits() -> None:
    found = plan(Net(), AdamW, "1GB", squared, FEW, device="cpu")
    assert found.best is found.recipes[0]
    peaks = [recipe.peak for recipe in found.recipes]
    for limit in {*peaks, *(peak - 1 for peak in peaks)}:
        best = found.within(limit).best
        fitting = [i for i, peak in enumerate(peaks) if peak <= limit]
        assert (best is None) == (not fitting)
        if best is not None:
            assert best.name == found.recipes[fitting[0]].name and best.fits
    assert found.within(min(peaks) - 1).best is None


def test_apply_makes_what_was_planned() -> None:
    model = Net()
    found = by_name(plan(model, AdamW, "1GB", betas=(0.8, 0.9), compile=False))
    optimizer, release = found["bfloat16 compact, release"].apply(model, lr=1e-2)
    assert isinstance(optimizer, AdamW) and release is not None
    (group,) = optimizer.param_groups
    assert group["storage"] == "compact" and group["lr"] == 1e-2
    assert group["betas"] == (0.8, 0.9)
    before = model.blocks[0].expand.weight.detach().clone()
    assert before.dtype == torch.bfloat16
    squared(model, FEW.bfloat16()).backward()
    assert not torch.equal(model.blocks[0].expand.weight, before)
    release.remove()

    model = Net()
    optimizer, release = found["float32"].apply(model, lr=1e-2)
    assert release is None and next(model.parameters()).dtype == torch.float32
    assert found["float32"].keywords == {"betas": (0.8, 0.9), "compile": False}


def test_apply_prepares_the_accumulation() -> None:
    model = Net()
    found = by_name(plan(model, AdamW, "1GB", accumulation_steps=3, compile=False))
    _, release = found["float32, release, bfloat16 sums"].apply(model)
    assert release is not None
    o = release.options
    assert (o.accumulation, o.accumulation_steps) == ("buffer", 3)
    assert o.buffer_dtype == torch.bfloat16
    release.remove()


def test_apply_refuses() -> None:
    with torch.device("meta"):
        model = Net()
    best = plan(model, AdamW, "1GB").best
    assert best is not None
    with pytest.raises(ValueError, match=r"model is on meta.*to_empty"):
        best.apply(model)
    with pytest.raises(ValueError, match=r"options=\['storage'\]: this recipe decides"):
        best.apply(Net(), storage="compact")


def test_nothing_is_computed_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random, where = torch.get_rng_state(), [p.data_ptr() for p in model.parameters()]
    seen: list[Any] = []
    plan(
        model,
        AdamW,
        "1GB",
        lambda m, x: seen.append(m) or squared(m, x),
        torch.ones(2, 3, 8, 8),
    )
    assert seen and all(m is not model for m in seen)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == where
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_large_model_on_meta_takes_no_memory() -> None:
    with torch.device("meta"):
        wide = nn.Linear(8192, 28672)
        model = nn.Sequential(nn.Embedding(128256, 8192), wide, nn.Linear(28672, 8192))
        tokens = torch.zeros(1, 2048, dtype=torch.int64)
    found: list[Any] = []
    taken = allocated_by(
        lambda: found.append(plan(model, AdamW, "20GB", squared, tokens, device="cuda"))
    )
    assert taken < 10_000
    (first, *_) = found[0].recipes
    assert first.parameters > 6e9 and first.state > 2 * 6e9 and not first.fits
    assert first.activations > 2048 * 8192 * 4


def test_without_a_batch_the_column_is_empty() -> None:
    model = GPT()
    found = plan(model, AdamW, "1GB")
    tied = model.head.weight.numel() * 4
    first, released = found.recipes[:2]
    every = sum(p.nbytes for p in model.parameters())
    assert first.parameters == every and first.gradients == every + 2 * tied
    # The tied one's shares and their sum; small ones are put aside.
    small = sum(p.nbytes for p in model.parameters() if p.numel() < 1 << 13)
    assert released.gradients == 3 * tied + small
    assert first.activations is None
    text = str(found)
    assert "activations are not counted: give loss_fn and batch" in text
    assert text.splitlines()[2].split()[4] == "-"


def test_attention_on_cuda_is_an_estimate() -> None:
    model = GPT()
    model.dropout = 0.1
    here = plan(model, AdamW, "1GB", entropy, TOKENS)
    there = plan(model, AdamW, "1GB", entropy, TOKENS, device="cuda")
    assert here.recipes[0].estimated == () and "~" not in str(here)
    assert there.recipes[0].estimated == ("activations",)
    assert "~ attention on CUDA is an estimate" in str(there)
    # Its kernels draw dropout again, where the CPU keeps every pair of positions.
    pairs = 4 * 4 * 64 * 64 * 4
    assert here.recipes[1].peak > there.recipes[1].peak + pairs


def test_scratch_is_where_updates_run_operation_by_operation() -> None:
    model = nn.Linear(256, 256)
    compiled = by_name(plan(model, AdamW, "1GB", device="cpu"))
    assert all(recipe.scratch == 0 for recipe in compiled.values())
    eager = by_name(plan(model, AdamW, "1GB", device="cpu", compile=False))
    assert all(recipe.scratch > 256 * 256 * 4 for recipe in eager.values())
    cuda = by_name(plan(model, AdamW, "1GB", device="cuda"))
    # Codes have no compiled step there.
    coded = {name for name, recipe in cuda.items() if recipe.scratch}
    assert coded == {n for n in cuda if "8bit" in n or "exact" in n or "compact" in n}


def test_bytes_of_a_rank() -> None:
    model = nn.Sequential(nn.Linear(256, 250), nn.Linear(250, 3, bias=False))
    alone, shared = (plan(model, AdamW, "1GB", device="cpu", ranks=n) for n in (1, 4))
    one, part = alone.recipes[0], shared.recipes[0]
    assert one.estimated == () and part.estimated == ("scratch",)
    # Rows are divided: 63 of the 250, and 1 of the 3.
    assert part.parameters == 4 * (63 * 256 + 63 + 250)
    assert part.state == 2 * part.parameters + 3 * 4
    assert part.gradients == part.parameters
    # Both blocks, whole, with their gradients.
    assert part.scratch == 4 * 4 * (256 * 250 + 250)
    assert "fully_shard gathers is an estimate" in str(shared)
    traced = plan(model, AdamW, "1GB", squared, torch.randn(9, 256), ranks=4).recipes[0]
    assert traced.peak == part.peak + traced.activations


def test_a_model_that_is_divided_already() -> None:
    """As `ranks` says beforehand: bytes are those that are here."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group(
        "fake", store=fake_pg.FakeStore(), rank=0, world_size=4
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(256, 250), nn.Linear(8192, 128))
        before = plan(model, AdamW, "1GB", device="cpu", ranks=4)
        mesh = init_device_mesh("cpu", (4,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        after = plan(model, AdamW, "1GB", device="cpu")
        for one, other in zip(before.recipes, after.recipes, strict=True):
            assert one.peak == other.peak and one.state == other.state, one.name
        with pytest.raises(ValueError, match="plan it before fully_shard, with ranks="):
            plan(model, AdamW, "1GB", squared, MANY)
        with pytest.raises(ValueError, match="ranks=4 for a model that is divided already"):
            plan(model, AdamW, "1GB", ranks=4)
    finally:
        torch.distributed.destroy_process_group()


def test_str_and_plot(tmp_path: Any) -> None:
    found = plan(Net(), AdamW, "8MB", squared, MANY)
    lines = str(found).splitlines()
    assert lines[0].startswith("Net, 0.40 million parameters, AdamW on cpu; budget 8.00 MB")
    assert lines[1].split() == [
        *("recipe", "parameters", "gradients", "state", "activations", "scratch"),
        *("peak", "in", "fits"),
    ]
    assert len({len(line) for line in lines[1:18]}) == 1
    for recipe, line in zip(found.recipes, lines[2:]):
        assert line.startswith(recipe.name)
        assert line.endswith("yes" if recipe.fits else "no")
        assert f" {recipe.peak / 1e6:.2f} " in line
    assert found.best is not None and lines[18] == f"best: {found.best.name}"
    path = tmp_path / "plan.png"
    found.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(monkeypatch: Any, tmp_path: Any) -> None:
    found = plan(nn.Linear(4, 4), AdamW, "8MB")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        found.plot(tmp_path / "plan.png")


SIZES = {"24GB": 24 * 10**9, " 1.5 mb ": 1_500_000, "16GiB": 2**34, 4e9: 4 * 10**9}


def test_sizes() -> None:
    model = nn.Linear(2, 2)
    for size, expected in SIZES.items():
        assert plan(model, AdamW, size).budget == expected
    for size in ("24", "GB", "24 G", "-3GB", "1e9GB", 0, -5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"budget=.*24GB"):
            plan(model, AdamW, size)
    for size in (None, True, [1]):
        with pytest.raises(TypeError, match=r"budget=.*24GB"):
            plan(model, AdamW, size)


class Asks(nn.Module):
    """Asks for a value in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_a_forward_that_asks_for_values_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Asks()))
    with pytest.raises(RuntimeError, match=r"module 1\.1 \(Asks\)(.|\n)*item\(\)"):
        plan(model, AdamW, "1GB", squared, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="outside of all of them"):
        plan(nn.Linear(4, 4), AdamW, "1GB", lambda m, x: 1 / 0, torch.ones(2, 4))


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not this one")


def test_what_cannot_be_planned_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    on_gpu = optimi_func._torch.fake_mode()
    with on_gpu:
        far = torch.empty(2, 4, device="cuda")
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"batch\['x'\] is on cuda:0, the model on cpu", (squared, {"x": far})),
        (
            ValueError,
            r"loss of shape \(2, 4\): allowed is a scalar",
            (lambda m, x: m(x), x),
        ),
        (TypeError, "loss_fn returned float", (lambda m, x: 1.0, x)),
        (ValueError, "depends on no parameter", (lambda m, x: x.sum(), x)),
        (ValueError, "loss_fn without batch", (squared, None)),
        (ValueError, "batch without loss_fn", (None, x)),
        (TypeError, "loss_fn=3", (3, x)),
    ]
    for error, text, (loss_fn, batch) in refused:
        with pytest.raises(error, match=text):
            plan(model, AdamW, "1GB", loss_fn, batch)
    with pytest.raises(RuntimeError, match=r"a Uncopied, cannot be copied.*not this one"):
        plan(Uncopied(4, 4), AdamW, "1GB", squared, x)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        plan(frozen, AdamW, "1GB")
    with pytest.raises(ValueError, match=r"weight has no shape yet"):
        plan(nn.LazyLinear(4), AdamW, "1GB")
    with pytest.raises(TypeError, match="model=list"):
        plan([model], AdamW, "1GB")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"optimizer=.*adamw.AdamW.* makes a AdamW: allowed"
    ):
        plan(model, torch.optim.AdamW, "1GB")
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"on \['cpu', 'meta'\]: a plan is for one device"):
        plan(two, AdamW, "1GB")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"storage": "compact"}, "storage='compact': recipes decide it"),
        ({"gradient_release": True}, "gradient_release=True: recipes decide it"),
        ({"foreach": True}, "foreach=True: the temporaries of lists are not planned"),
        ({"device": "mps"}, "device='mps': allowed are 'cpu', 'cuda' and None"),
        ({"ranks": 0}, "ranks=0: allowed are whole numbers from 1"),
        ({"accumulation_steps": 1.5}, "accumulation_steps=1.5: allowed are whole numbers"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
    ],
)
def test_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(nn.Linear(4, 4), AdamW, "1GB", **options)


def test_autocast_of_another_device_is_refused() -> None:
    """CPU tensors are planned with, for which it would do nothing."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            return squared(model, x)
        finally:
            torch.set_autocast_enabled("cuda", before)

    with pytest.raises(ValueError, match=r"loss_fn enters torch.autocast\(.cuda.\)"):
        plan(nn.Linear(4, 4), AdamW, "1GB", loss_fn, torch.ones(2, 4))


def test_functions_and_partials_make_the_optimizer() -> None:
    model = Net()

    def grouped(params: Any, **options: Any) -> AdamW:
        named = dict(params)
        vectors = {n: p for n, p in named.items() if p.dim() == 1}
        groups = [
            {"params": list(vectors.values()), "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if n not in vectors]},
        ]
        return AdamW(groups, **options)

    whole = plan(model, AdamW, "1GB").recipes
    for optimizer in (grouped, partial(AdamW, lr=1e-4)):
        found = plan(model, optimizer, "1GB").recipes
        assert [r.peak for r in found] == [r.peak for r in whole]
    made, _ = plan(model, grouped, "1GB").recipes[0].apply(model, lr=1e-5)
    assert made.param_groups[0]["weight_decay"] == 0.0
    assert made.param_groups[1]["lr"] == 1e-5


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[0].requires_grad_(False)
    first = plan(model, AdamW, "1GB").recipes[0]
    trained = 4 * (256 * 256 + 256)
    assert first.parameters == 2 * trained and first.gradients == trained
    assert first.state == 2 * trained + 2 * 4


def test_a_compiled_models_own_is_planned() -> None:
    model = nn.Linear(64, 64)
    compiled = torch.compile(model)
    peaks = [
        [r.peak for r in plan(m, AdamW, "1GB", squared, torch.ones(2, 64)).recipes]
        for m in (model, compiled)
    ]
    assert peaks[0] == peaks[1]
