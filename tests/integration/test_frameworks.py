"""Other people's training loops: each ends where it ends without gradient release.

Every framework wraps the optimizer, reloads its state and calls its step in its own way;
the hooks have to outlive all of it. None of the frameworks is a dependency, and the tests
are skipped without them. `make test-full` and `make soak` install them.
"""

import importlib
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_moved_alike
from scheduled import drive, start
from sophia import Sophia
from tiers import built, few, row
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from optimi_func import (
    AdamW,
    Mixed,
    MuonAdamW,
    ScheduleFreeAdamW,
    param_groups_weight_decay,
    prepare_for_gradient_release,
)

LR = 1e-2
STEPS = 6
F32, BF16 = DTYPES = [torch.float32, torch.bfloat16]

# Theirs, by the modules that warn: what this package warns of stays an error.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:::{module}")
    for module in ("transformers", "lightning", "torch.utils._pytree", "trl", "peft")
] + [pytest.mark.full]


def crossed(*columns: list[Any], full: list[tuple[Any, ...]]) -> list[Any]:
    """Return the product of columns, of which `make test-full` runs a few rows."""
    return built(
        [
            row(*x, id="-".join(map(str, x)), tier="" if x in full else "soak")
            for x in product(*columns)
        ]
    )


class Recorded(AdamW):
    """AdamW that remembers each step's lr, as the hooks found it in backward."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.lrs = []

    def update(self, params, *rest) -> None:
        self.lrs.append(self.param_groups[0]["lr"])
        super().update(params, *rest)


def make_optimizer(model: nn.Module, release: bool, **options) -> Recorded:
    """Two groups, the decayed and the others; hooks where the step is released."""
    groups = param_groups_weight_decay(model, weight_decay=0.1)
    optimizer = Recorded(groups, lr=LR, gradient_release=release, compile=False)
    if release:
        prepare_for_gradient_release(model, optimizer, **options)
    return optimizer


def linear(optimizer: Recorded) -> lr_scheduler.LambdaLR:
    return lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / STEPS)


def assert_lrs(optimizer: Recorded, first: int = 0) -> None:
    """The schedule's, one after the other, were those that the hooks used."""
    expected = [LR * (1 - i / STEPS) for i in range(first, STEPS)]
    assert list(dict.fromkeys(optimizer.lrs)) == pytest.approx(expected)


def assert_same(one, two) -> None:
    (model, optimizer), (twin, other) = one, two
    weights, others = model.state_dict(), twin.state_dict()
    assert weights.keys() == others.keys()
    for name, x in weights.items():
        assert torch.equal(x, others[name]), name
    mine, theirs = optimizer.state_dict(), other.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for i, state in mine["state"].items():
        assert state.keys() == theirs["state"][i].keys()
        for name, x in state.items():
            y = theirs["state"][i][name]
            assert x.dtype == y.dtype and torch.equal(x, y), (i, name)
    for groups in zip(mine["param_groups"], theirs["param_groups"]):
        one, other = ({**group, "gradient_release": None} for group in groups)
        assert one == other


def both(run):
    """Runs with the ordinary step and with release, which end the same."""
    ends = [run(release) for release in (False, True)]
    assert_same(*ends)
    return ends[1]


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """One parameter that is updated by itself, and small ones that wait for the end."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 1),
    ).to(dtype)


def make_data(dtype: torch.dtype = torch.float32, steps: int = STEPS) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * steps, 16, generator=generator).to(dtype)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8)


# transformers


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("accelerate")
    yield pytest.importorskip("transformers")
    reset_accelerate()


def reset_accelerate() -> None:
    """Accelerate keeps its settings in singletons, which would reach the next test."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_gpt2(transformers, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Tied embeddings, dropout, LayerNorm: small, but all of it."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(dtype)


def tokens(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(256, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def make_arguments(kind, out, **options):
    """The arguments of a trainer: TrainingArguments, or a kind of them."""
    usual = dict(max_steps=STEPS, per_device_train_batch_size=4, max_grad_norm=0)
    usual |= dict(use_cpu=True, report_to="none", disable_tqdm=True)
    usual |= dict(save_strategy="no", logging_strategy="no")
    return kind(output_dir=str(out), **{**usual, **options})


def make_trainer(transformers, out, model, optimizer, scheduler, **options):
    arguments = make_arguments(transformers.TrainingArguments, out, **options)
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=tokens(4 * STEPS * arguments.gradient_accumulation_steps),
        optimizers=(optimizer, scheduler),
    )


@pytest.mark.parametrize(
    ("dtype", "recompute", "autocast"),
    crossed(
        DTYPES,
        [False, True],
        [False, True],
        full=[(F32, False, False), (BF16, True, False), (F32, False, True)],
    ),
)
def test_transformers_trainer(
    transformers, tmp_path, dtype, recompute: bool, autocast: bool
) -> None:
    def run(release: bool):
        model = make_gpt2(transformers, dtype=dtype)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = make_optimizer(model, release)
        arguments = (transformers, tmp_path, model, optimizer, linear(optimizer))
        make_trainer(*arguments, bf16=autocast).train()
        return model, optimizer

    assert_lrs(both(run)[1])


def estimate(model: nn.Module, inputs) -> list[torch.Tensor]:
    """The diagonal of Gauss-Newton-Bartlett, as docs/own_rule.md has it."""
    logits = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1)
    labels = torch.distributions.Categorical(logits=logits).sample()
    loss = nn.functional.cross_entropy(logits, labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [len(logits) * g.square() for g in grads]


def test_transformers_trainer_of_a_rule_with_extras(transformers, tmp_path) -> None:
    losses = []

    def run(release: bool):
        model = make_gpt2(transformers)
        optimizer = Sophia(model.parameters(), lr=3e-3, rho=1.0, gradient_release=release)
        if release:
            prepare_for_gradient_release(model, optimizer)

        class Second(transformers.Trainer):
            def training_step(self, model, inputs, *rest):
                if self.state.global_step % 2 == 0:
                    optimizer.give(hessian=estimate(model, inputs))
                losses.append(super().training_step(model, inputs, *rest).item())
                return torch.tensor(losses[-1])

        Second(
            model=model,
            args=make_arguments(transformers.TrainingArguments, tmp_path),
            train_dataset=tokens(4) * STEPS,
            optimizers=(optimizer, linear(optimizer)),
        ).train()
        return model, optimizer

    both(run)
    assert losses[STEPS - 1] < losses[0]


@pytest.mark.parametrize("resumed", [False, True])
def test_transformers_trainer_resumes_from_a_released_checkpoint(
    transformers, tmp_path, resumed: bool
) -> None:
    half = STEPS // 2
    model = make_gpt2(transformers)
    straight = make_optimizer(model, release=False)
    make_trainer(transformers, tmp_path, model, straight, linear(straight)).train()

    for release, seed, checkpoint in (
        (True, 0, None),
        (resumed, 7, tmp_path / f"checkpoint-{half}"),
    ):
        twin = make_gpt2(transformers, seed)
        optimizer = make_optimizer(twin, release)
        trainer = make_trainer(transformers, tmp_path, twin, optimizer, linear(optimizer))
        trainer.args.save_strategy = trainer.state.save_strategy = "steps"
        trainer.args.save_steps = half
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        assert_same((model, straight), (twin, optimizer))
    if resumed:
        assert_lrs(optimizer, first=half)
    else:
        assert not optimizer.lrs


def test_transformers_trainer_switches_to_evaluate_and_back(transformers, tmp_path) -> None:
    """It calls train() and eval(); evaluated or resumed, the run stays what it was."""
    half = STEPS // 2

    def make(seed: int = 0) -> ScheduleFreeAdamW:
        model = make_gpt2(transformers, seed)
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # evaluation draws from its generator
                module.p = 0.0
        optimizer = ScheduleFreeAdamW(model.parameters(), lr=1e-2, compile=False)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return make_trainer(transformers, tmp_path, model, optimizer, schedule)

    straight = make()
    straight.train()
    for seed, checkpoint in ((0, None), (7, str(tmp_path / f"checkpoint-{half}"))):
        trainer = make(seed)
        trainer.eval_dataset = tokens(4)
        trainer.args.save_strategy = trainer.state.save_strategy = "steps"
        trainer.args.eval_strategy = "steps"
        trainer.args.save_steps = trainer.args.eval_steps = half
        trainer.train(resume_from_checkpoint=checkpoint)
        # The last thing it did was to evaluate.
        (group,) = trainer.optimizer.param_groups
        assert not group["train_mode"]
        trainer.optimizer.train()
        pairs = zip(straight.model.parameters(), trainer.model.parameters())
        assert all(torch.equal(p, q) for p, q in pairs)
    saved = torch.load(tmp_path / f"checkpoint-{half}/optimizer.pt", weights_only=True)
    assert all("train_param" in state for state in saved["state"].values())


def test_transformers_trainer_accumulates_with_the_ordinary_step(
    transformers, tmp_path
) -> None:
    ends = []
    for ours in (True, False):
        model = make_gpt2(transformers)
        if ours:
            optimizer = make_optimizer(model, release=False)
        else:
            groups = param_groups_weight_decay(model, weight_decay=0.1)
            optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-6)
        arguments = (transformers, tmp_path, model, optimizer, linear(optimizer))
        make_trainer(*arguments, gradient_accumulation_steps=2).train()
        ends.append(model.state_dict())
    for name, x in ends[0].items():
        torch.testing.assert_close(x, ends[1][name], atol=1e-5, rtol=1e-4, msg=name)


SCHEDULES: dict[str, dict] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
    "greedy": {"patience": 1, "factor": 0.5},
}


def test_all_schedules_of_transformers_are_here(transformers) -> None:
    assert {kind.value for kind in transformers.SchedulerType} == set(SCHEDULES)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    "name", few(SCHEDULES, ["linear", "reduce_lr_on_plateau"], later="soak")
)
def test_transformers_schedules(transformers, name: str, release: bool) -> None:
    def make(optimizer):
        return transformers.get_scheduler(name, optimizer, 4, 14, SCHEDULES[name])

    seen, ends = drive(torch.optim.AdamW, make, LR)
    ours, found = drive(AdamW, make, LR, release)
    assert ours == seen
    assert (len({step[0][0] for step in seen}) > 1) == (name != "constant")
    for s, p, q in zip(start(), found, ends):
        assert_moved_alike(s, p, q, 1e-12)


BY_TWO = {"accumulation": "buffer", "accumulation_steps": 2}


def test_transformers_trainer_accumulates_under_release(transformers, tmp_path) -> None:
    def run(release: bool):
        model = make_gpt2(transformers)
        optimizer = make_optimizer(model, release, **BY_TWO)
        arguments = (transformers, tmp_path, model, optimizer, linear(optimizer))
        make_trainer(*arguments, gradient_accumulation_steps=2).train()
        return model, optimizer

    assert_lrs(both(run)[1])
    # Without being told, the hooks would step twice as often: said aloud.
    model = make_gpt2(transformers)
    optimizer = make_optimizer(model, True)
    arguments = (transformers, tmp_path, model, optimizer, linear(optimizer))
    with pytest.warns(UserWarning, match="2 backwards since the last step"):
        make_trainer(*arguments, gradient_accumulation_steps=2).train()


def test_transformers_trainer_clips_on_the_handle(transformers, tmp_path) -> None:
    ends = []
    for limit in (None, 1e-3):
        model = make_gpt2(transformers)
        options = {"accumulation": "buffer", "clip_global_norm": limit, "grad_norm": True}
        optimizer = make_optimizer(model, True, **options)
        arguments = (transformers, tmp_path, model, optimizer, linear(optimizer))
        make_trainer(*arguments).train()
        (handle,) = optimizer.releases
        assert handle.grad_norm > 1e-2
        ends.append(model.state_dict())
    assert not torch.equal(*[end["transformer.wte.weight"] for end in ends])


@pytest.fixture
def callbacks(transformers, monkeypatch):
    """The callbacks that docs/saving.md shows."""
    folder = Path(__file__).parents[2] / "examples" / "trainers"
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("transformers_callbacks")


@pytest.mark.parametrize("parts", [1, 2])
def test_transformers_trainer_makes_the_optimizer_that_a_callback_releases(
    transformers, callbacks, tmp_path, parts: int
) -> None:
    pair = []
    for release in (False, True):
        model, half = make_gpt2(transformers), STEPS // 2
        given = {"lr": LR, "gradient_release": release, "compile": False}
        arguments = make_arguments(
            transformers.TrainingArguments,
            tmp_path / str(release),
            gradient_accumulation_steps=parts,
            save_strategy="steps",
            save_steps=half,
        )

        def make(model=model, arguments=arguments, given=given, release=release):
            return transformers.Trainer(
                model,
                arguments,
                train_dataset=tokens(4 * STEPS * parts),
                optimizer_cls_and_kwargs=(AdamW, given),
                callbacks=[callbacks.Release()] if release else None,
            )

        trainer = make()
        trainer.train()
        optimizer = trainer.optimizer.optimizer
        assert type(optimizer) is AdamW and not optimizer.releases
        assert {int(s["step"]) for s in optimizer.state.values()} == {STEPS}
        pair.append((model, optimizer))
    assert_same(*pair)
    # Resumed, its hooks are added after the state is loaded.
    twin = make_gpt2(transformers, seed=7)
    resumed = make(model=twin)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"True/checkpoint-{half}"))
    assert_same(pair[0], (twin, resumed.optimizer.optimizer))
    with pytest.raises(ValueError, match="set max_grad_norm=0"):
        resumed.args.max_grad_norm = 1.0
        resumed.train()


@pytest.mark.parametrize("adapters", [False, True])
def test_trl_makes_the_model_that_a_callback_releases(
    transformers, callbacks, tmp_path, adapters: bool
) -> None:
    """SFTTrainer, with and without a `peft_config`, of which it makes adapters."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets, tokenizers = (importlib.import_module(x) for x in ("datasets", "tokenizers"))
    words = tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words),
        pad_token="0",
        eos_token="1",
        unk_token="0",
    )
    rows = [{"input_ids": row["input_ids"].tolist()} for row in tokens(8 * STEPS)]
    off = {"gradient_checkpointing": False, "bf16": False}

    def run(release: bool):
        transformers.set_seed(0)
        arguments = make_arguments(
            trl.SFTConfig, tmp_path, gradient_accumulation_steps=2, **off
        )
        lora = peft.LoraConfig(
            r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
        given = {"lr": LR, "gradient_release": release, "compile": False}
        trainer = trl.SFTTrainer(
            make_gpt2(transformers),
            arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora if adapters else None,
            optimizer_cls_and_kwargs=(AdamW, given),
            callbacks=[callbacks.Release()] if release else None,
        )
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        assert not all(map(torch.equal, before, trainer.model.parameters()))
        return trainer.model, trainer.optimizer.optimizer

    both(run)


def test_transformers_trainer_saves_the_average_by_a_callback(
    transformers, callbacks, tmp_path
) -> None:
    half = STEPS // 2

    def train(steps: int, averages: bool = True, **options):
        model = make_gpt2(transformers)
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # evaluation draws from its generator
                module.p = 0.0
        optimizer = ScheduleFreeAdamW(model.parameters(), lr=LR, compile=False)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = make_trainer(transformers, tmp_path, model, optimizer, schedule)
        trainer.args.max_steps, trainer.args.save_steps = steps, half
        for name, value in options.items():
            setattr(trainer.args, name, value)
        if averages:
            trainer.add_callback(callbacks.SaveAverage())
        trainer.train()
        return trainer

    def saved(name: str) -> dict[str, torch.Tensor]:
        path = str(tmp_path / name)
        return transformers.GPT2LMHeadModel.from_pretrained(path).state_dict()

    def equal(one, other) -> bool:
        return all(torch.equal(x, other[name]) for name, x in one.items())

    end, middle = train(STEPS).model.state_dict(), train(half).model.state_dict()
    # Without the callback both are weights that are not to be evaluated.
    without = train(STEPS, averages=False, save_strategy="steps")
    without.save_model(str(tmp_path / "end"))
    assert not equal(end, saved("end"))
    assert not equal(middle, saved(f"checkpoint-{half}"))
    without.optimizer.eval()
    assert equal(end, without.model.state_dict())

    trainer = train(STEPS, save_strategy="steps")
    trainer.save_model(str(tmp_path / "end"))
    assert equal(end, saved("end"))
    assert equal(middle, saved(f"checkpoint-{half}"))
    # What is loaded at the end stays.
    trainer.state.best_model_checkpoint = str(tmp_path / f"checkpoint-{half}")
    trainer._load_best_model()
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    assert equal(middle, trainer.model.state_dict())


# Lightning


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning")


def make_module(lightning, release: bool, automatic: bool, dtype: torch.dtype, **options):
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(dtype)
            self.automatic_optimization = automatic

        def configure_optimizers(self):
            optimizer = make_optimizer(self, release, **options)
            schedule = {"scheduler": linear(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def training_step(self, batch, index):
            x, y = batch
            loss = (self.net(x) - y).float().square().mean()
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()

    return Module()


def fit(lightning, out, module, data: DataLoader, checkpoint=None, **options):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    usual = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": out}
    trainer = lightning.Trainer(**{**usual, **dict.fromkeys(off, False), **options})
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module, trainer.optimizers[0]


@pytest.mark.parametrize(
    ("dtype", "automatic", "precision"),
    crossed(
        DTYPES,
        [True, False],
        [None, "bf16-mixed"],
        full=[(F32, True, None), (BF16, False, None), (F32, True, "bf16-mixed")],
    ),
)
def test_lightning(lightning, tmp_path, automatic: bool, dtype, precision) -> None:
    def run(release: bool):
        module = make_module(lightning, release, automatic, dtype)
        return fit(lightning, tmp_path, module, make_data(dtype), precision=precision)

    assert_lrs(both(run)[1])


def test_lightning_resumes_from_a_released_checkpoint(lightning, tmp_path) -> None:
    half, saved = STEPS // 2, tmp_path / "half.ckpt"

    def run(release: bool):
        data = make_data(steps=half)  # Lightning resumes between two epochs
        module = make_module(lightning, release, True, torch.float32)
        if release:
            fit(lightning, tmp_path, module, data)
            module.trainer.save_checkpoint(saved)
            module = make_module(lightning, release, True, torch.float32)
        checkpoint = saved if release else None
        return fit(lightning, tmp_path, module, data, checkpoint, max_epochs=2)

    assert_lrs(both(run)[1], first=half)


def test_lightning_accumulates_under_release(lightning, tmp_path) -> None:
    """And the last of three batches is a step of its own: the epoch ends there."""

    def run(release: bool):
        module = make_module(lightning, release, True, torch.float32, **BY_TWO)
        how = {"max_epochs": 2, "accumulate_grad_batches": 2}
        return fit(lightning, tmp_path, module, make_data(steps=3), **how)

    assert {int(s["step"]) for s in both(run)[1].state.values()} == {4}


# Accelerate


@pytest.fixture
def accelerate():
    yield pytest.importorskip("accelerate")
    reset_accelerate()


def by_accelerate(accelerate, release: bool, make=make_optimizer, at=None, **options):
    """Train a network, with what happens after some steps."""
    reset_accelerate()
    dtype, steps = options.pop("dtype", torch.float32), options.pop("steps", STEPS)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = make_net(dtype)
    parts = "gradient_accumulation_steps" in options
    optimizer = make(model, release, **(BY_TWO if parts else {}))
    everything = (model, optimizer, make_data(dtype, steps), linear(optimizer))
    wrapped, stepped, data, schedule = accelerator.prepare(*everything)
    for i, (x, y) in enumerate(data):
        if at is not None and i == 2:
            at(accelerator)
        with accelerator.accumulate(wrapped):
            accelerator.backward((wrapped(x) - y).float().square().mean())
            stepped.step()
            schedule.step()
            stepped.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("dtype", "precision"),
    crossed(DTYPES, ["no", "bf16"], full=[(BF16, "no"), (F32, "bf16")]),
)
def test_accelerate(accelerate, dtype, precision: str) -> None:
    options = {"dtype": dtype, "mixed_precision": precision}
    assert_lrs(both(partial(by_accelerate, accelerate, **options))[1])


def test_accelerate_prepares_and_loads_in_mid_run(accelerate, tmp_path) -> None:
    """`prepare` saves and loads a state that is not empty; load_state does so again."""

    def run(model, optimizer, schedule, batches, backward=torch.Tensor.backward):
        for x, y in batches:
            backward((model(x) - y).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    straight = make_net()
    ordinary = make_optimizer(straight, release=False)
    data = list(make_data())
    run(straight, ordinary, linear(ordinary), data)

    model = make_net()
    optimizer = make_optimizer(model, release=True)
    schedule = linear(optimizer)
    run(model, optimizer, schedule, data[:2])
    accelerator = accelerate.Accelerator(cpu=True)
    everything = accelerator.prepare(model, optimizer, schedule)
    run(*everything, data[2:4], accelerator.backward)
    accelerator.save_state(tmp_path)
    run(*everything, data[:2], accelerator.backward)  # somewhere else, and back
    accelerator.load_state(tmp_path)
    optimizer.lrs.clear()
    run(*everything, data[4:], accelerator.backward)
    assert_same((straight, ordinary), (model, optimizer))
    assert_lrs(optimizer, first=4)


def test_accelerate_accumulates_under_release(accelerate) -> None:
    options = {"gradient_accumulation_steps": 2, "steps": 2 * STEPS - 1}
    _, optimizer = both(partial(by_accelerate, accelerate, **options))
    assert {int(s["step"]) for s in optimizer.state.values()} == {STEPS}


# An optimizer of two rules


def make_mixed(model: nn.Module, release: bool, **options) -> Mixed:
    optimizer = MuonAdamW(model, lr=LR, gradient_release=release, compile=False)
    if release:
        prepare_for_gradient_release(model, optimizer, **options)
    return optimizer


def test_transformers_trainer_makes_it(transformers, tmp_path) -> None:
    """From its own factory, with its schedule, clipping and checkpoints."""
    ends, half = [], STEPS // 2
    for checkpoint in (None, tmp_path / f"checkpoint-{half}"):
        model = make_gpt2(transformers, seed=0 if checkpoint is None else 7)
        trainer = make_trainer(transformers, tmp_path, model, None, None)
        trainer.optimizer_cls_and_kwargs = (lambda: MuonAdamW), {"lr": LR, "compile": False}
        trainer.args.max_grad_norm = 1.0
        trainer.args.save_strategy = trainer.state.save_strategy = "steps"
        trainer.args.save_steps = half
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        optimizer = trainer.optimizer.optimizer
        assert type(optimizer) is Mixed
        ends.append((model, optimizer))
    assert_same(*ends)
    first, second = optimizer.param_groups
    assert (first["rule"], second["rule"]) == ("muon", "adamw")
    # The matrices of attention and MLPs; the head is tied to the embedding.
    assert len(first["params"]) == 8 and first["lr"] == second["lr"] < LR / 2
    assert "transformer.wte.weight" in second["param_names"]


def test_lightning_takes_it(lightning, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "make_optimizer", make_mixed)

    def run(release: bool):
        module = make_module(lightning, release, True, torch.float32)
        return fit(lightning, tmp_path, module, make_data())

    # The head decays and the norms and biases do not.
    rules = [group["rule"] for group in both(run)[1].param_groups]
    assert rules == ["muon", "adamw", "adamw"]


def test_accelerate_takes_it(accelerate, tmp_path) -> None:
    def saved_and_loaded(accelerator) -> None:
        accelerator.save_state(tmp_path)
        accelerator.load_state(tmp_path)

    both(partial(by_accelerate, accelerate, make=make_mixed, at=saved_and_loaded))


def test_accelerate_leaves_the_modes_to_the_loop(accelerate) -> None:
    """It passes train() and eval() on, and calls neither."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_net()
    optimizer = ScheduleFreeAdamW(model.parameters(), lr=LR, compile=False)
    model, prepared, data = accelerator.prepare(model, optimizer, make_data())
    for x, y in data:
        model.train()
        accelerator.backward((model(x) - y).square().mean())
        prepared.step()
        prepared.zero_grad()
    model.eval()
    assert optimizer.param_groups[0]["train_mode"]
    trained = accelerator.get_state_dict(model)["0.weight"].clone()
    prepared.eval()
    assert not optimizer.param_groups[0]["train_mode"]
    assert not torch.equal(trained, accelerator.get_state_dict(model)["0.weight"])
    prepared.train()
    assert torch.equal(trained, accelerator.get_state_dict(model)["0.weight"])
