"""transformers' Trainer with callbacks: gradient release, and training without a schedule.

Where the Trainer makes the optimizer (`optimizer_cls_and_kwargs`, TRL with a
`peft_config`), `Release` prepares the model as training begins. `SaveAverage` has a
Schedule-Free run save the average, which is what to evaluate. Both are shown on a small
GPT-2.
"""

# [start:imports]
import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from optimi_func import (
    EMA,
    AdamW,
    ScheduleFreeAdamW,
    prepare_for_gradient_release,
)

# [end:imports]

STEPS = 20


# [start:release]
class Release(TrainerCallback):
    """Gradient release with an optimizer that the Trainer makes.

    The norm of the gradients goes into the Trainer's log if the options
    measure it: `Release(grad_norm=True)`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options  # of prepare_for_gradient_release

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        if args.max_grad_norm:
            raise ValueError(
                "the Trainer would clip nothing: set max_grad_norm=0, "
                "and to clip pass Release(accumulation='buffer', "
                "accumulation_steps=None, "
                f"clip_global_norm={args.max_grad_norm})"
            )
        steps, options = args.gradient_accumulation_steps, self.options
        if steps > 1:
            options = {
                "accumulation": "buffer",
                "accumulation_steps": steps,
                **options,
            }
        # Accelerate has wrapped the optimizer that the hooks are for.
        optimizer = given["optimizer"].optimizer
        self.handle = prepare_for_gradient_release(
            given["model"], optimizer, **options
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **given: Any,
    ) -> None:
        if "loss" in logs and self.handle.grad_norm is not None:
            logs["grad_norm"] = self.handle.grad_norm.item()
            state.log_history[-1]["grad_norm"] = logs["grad_norm"]

    def on_train_end(self, *_: Any, **given: Any) -> None:
        self.handle.remove()


# [end:release]


# [start:ema]
class Averaged(TrainerCallback):
    """Average the weights after each step, and evaluate the averages."""

    def __init__(self, decay: float = 0.999) -> None:
        self.decay, self.evaluation = decay, ExitStack()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        self.average = EMA(given["optimizer"].optimizer, self.decay)
        if (file := self.file(args, state)).exists():  # a resumed run
            self.average.load_state_dict(torch.load(file))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        self.average.update()  # once a step, not once a micro-batch
        self.on_epoch_end(args, state, control)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        if control.should_evaluate:
            self.evaluation.enter_context(self.average.applied())

    def on_evaluate(self, *_: Any, **given: Any) -> None:
        self.evaluation.close()  # the trained weights again

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        torch.save(self.average.state_dict(), self.file(args, state))

    def file(self, args: TrainingArguments, state: TrainerState) -> Path:
        folder = f"checkpoint-{state.global_step}"
        return Path(args.output_dir) / folder / "average.pt"


# [end:ema]


# [start:average]
class SaveAverage(TrainerCallback):
    """Save the average of a Schedule-Free run, and end with it."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        if control.should_save or control.should_training_stop:
            given[
                "optimizer"
            ].eval()  # the next training step calls train()

    on_epoch_end = on_step_end


# [end:average]


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Sequences that count upwards from anywhere, modulo 64."""
    starts = torch.randint(
        64, (count, 1), generator=torch.Generator().manual_seed(0)
    )
    ids = (starts + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(
    out: Path, cls: Any, callback: TrainerCallback | None, **options: Any
) -> Any:
    """Train by a Trainer that makes the optimizer."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        logging_steps=STEPS // 2,
        use_cpu=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=sentences(512),
        optimizer_cls_and_kwargs=(
            cls,
            {"lr": 1e-2, "compile": False, **options},
        ),
        callbacks=[callback] if callback else None,
    )
    trainer.train()
    trainer.save_model(str(out))
    return trainer


def same(one: Any, other: Any) -> bool:
    """Compare the weights of two models, bit for bit."""
    pair = [model.state_dict().values() for model in (one, other)]
    return all(torch.equal(x, y) for x, y in zip(*pair))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/transformers_callbacks")
    )
    out = parser.parse_args().out
    plain = trained(out / "plain", AdamW, None)
    released = trained(
        out / "released", AdamW, Release(), gradient_release=True
    )
    print(f"Release: the same weights: {same(plain.model, released.model)}")

    for name, callback in (
        ("no callback", None),
        ("SaveAverage", SaveAverage()),
    ):
        run = trained(out / name, ScheduleFreeAdamW, callback)
        saved = GPT2LMHeadModel.from_pretrained(out / name)
        run.optimizer.eval()  # the average
        print(
            f"{name}: the saved weights are the average: {same(run.model, saved)}"
        )


if __name__ == "__main__":
    main()
