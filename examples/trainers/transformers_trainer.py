"""transformers' Trainer: it saves and resumes the optimizer as it does torch's own.

A small GPT-2 with dropout trains for 40 steps. A second run stops after 20; a third, of new
objects, resumes from the second's checkpoint. It ends with the weights of the first.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_scheduler,
    set_seed,
)

from optimi_func import AdamW, param_groups_weight_decay

STEPS = 40


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Sequences that count upwards from anywhere, modulo 64."""
    starts = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(0))
    ids = (starts + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in ids]


def make_trainer(out: Path, steps: int) -> Trainer:
    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    groups = param_groups_weight_decay(model, weight_decay=0.1)
    # A few steps of a small model: a compiled step would still be compiling.
    optimizer = AdamW(groups, lr=1e-2, compile=False)
    schedule = get_scheduler(
        "cosine", optimizer, num_warmup_steps=4, num_training_steps=STEPS
    )
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=8,
        save_steps=STEPS // 2,
        logging_steps=STEPS // 4,
        report_to="none",
        use_cpu=True,
    )
    return Trainer(model, arguments, None, sentences(512), optimizers=(optimizer, schedule))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/transformers"))
    out = parser.parse_args().out
    straight = make_trainer(out / "straight", STEPS)
    straight.train()
    make_trainer(out / "stopped", STEPS // 2).train()
    resumed = make_trainer(out / "resumed", STEPS)
    checkpoint = out / "stopped" / f"checkpoint-{STEPS // 2}"
    resumed.train(resume_from_checkpoint=str(checkpoint))

    losses = [f"{log['loss']:.2f}" for log in straight.state.log_history if "loss" in log]
    pair = [trainer.model.state_dict().values() for trainer in (straight, resumed)]
    same = all(torch.equal(x, y) for x, y in zip(*pair))
    print(f"loss every {STEPS // 4} steps: {', '.join(losses)}")
    print(f"{STEPS} steps, and {STEPS // 2} resumed for the rest: the same weights: {same}")


if __name__ == "__main__":
    main()
