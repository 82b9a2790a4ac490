"""The callbacks of docs/saving.md, called as transformers' Trainer calls them."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from released import batch, flat, make

from optimi_func import EMA, SGD


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the callbacks, with no more of transformers than their base class."""
    folder = Path(__file__).parents[2] / "examples" / "trainers"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "transformers", MagicMock(TrainerCallback=object))
    monkeypatch.delitem(sys.modules, "transformers_callbacks", raising=False)
    yield importlib.import_module("transformers_callbacks")
    sys.modules.pop("transformers_callbacks", None)


def begun(callback: Any, optimizer: Any, model: Any, **options: Any) -> Any:
    args = SimpleNamespace(
        **{"max_grad_norm": 0, "gradient_accumulation_steps": 2, **options}
    )
    state = SimpleNamespace(global_step=0, log_history=[])
    given = {"optimizer": SimpleNamespace(optimizer=optimizer), "model": model}
    callback.on_train_begin(args, state, None, **given)
    return args, state


def test_release_clips_accumulates_and_logs_the_norm(callbacks: Any) -> None:
    ends, norms = [], []
    for release in (False, True):
        model, optimizer = make(SGD, release=release)
        callback = callbacks.Release(
            accumulation="buffer",
            accumulation_steps=None,
            clip_global_norm=0.1,
            grad_norm=True,
        )
        args, state = begun(callback, optimizer, model) if release else (None, None)
        for i in range(4):
            (model(batch(i)).square().mean() / 2).backward()
            if i % 2:
                if not release:
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        if release:
            logs = {"loss": 1.0}
            state.log_history.append({**logs, "step": 2})
            callback.on_log(args, state, None, logs)
            assert state.log_history[-1]["grad_norm"] == logs["grad_norm"]
            norm = torch.tensor(logs["grad_norm"])
            callback.on_train_end(args, state, None)
        norms.append(norm)
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(*norms)


def test_a_trainers_clipping_is_refused_with_what_to_pass(callbacks: Any) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"set max_grad_norm=0.*clip_global_norm=1.0\)"):
        begun(callbacks.Release(), optimizer, model, max_grad_norm=1.0)
    assert not optimizer.releases


def test_averages_are_evaluated_saved_and_gone_on_with(
    callbacks: Any, tmp_path: Path
) -> None:
    model, optimizer = make(SGD, release=False)
    callback, plain = callbacks.Averaged(0.9), EMA(optimizer, 0.9)
    args, state = begun(callback, optimizer, model, output_dir=tmp_path)
    for i in range(3):
        model(batch(i)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.update()
        state.global_step += 1
        trained = flat(model)
        control = SimpleNamespace(should_evaluate=i == 2)
        callback.on_step_end(args, state, control)
        assert torch.equal(flat(model), trained) == (i < 2)
    with_averages = flat(model)
    callback.on_evaluate(args, state, control)
    assert torch.equal(flat(model), trained)
    with plain.applied():
        assert torch.equal(flat(model), with_averages)
    (tmp_path / "checkpoint-3").mkdir()
    callback.on_save(args, state, control)
    resumed = callbacks.Averaged(0.9)
    given = {"optimizer": SimpleNamespace(optimizer=optimizer)}
    resumed.on_train_begin(args, state, control, **given)
    with resumed.average.applied():
        assert torch.equal(flat(model), with_averages)
