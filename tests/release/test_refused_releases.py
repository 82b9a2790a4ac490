"""What gradient release refuses, before it registers a hook or writes to anything."""

import gc
from typing import Any

import pytest
import torch
from refusals import Scene, refuses
from released import EAGER, Net, batch, make, prepared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimi_func import (
    AdamW,
    adamw,
    prepare_for_gradient_release,
    sgd,
)

STATES = {"accumulation": "states", "accumulation_steps": 4}
BUFFER = {"accumulation": "buffer", "accumulation_steps": 4}
NORM = {"clip_global_norm": 0.05}
POSITIVE = "allowed are positive numbers and None"
OPTIONS = {
    "accumulation='sum'": "accumulation='sum': allowed are",
    "**BUFFER | {'accumulation_steps': 0}": "accumulation_steps=0",
    "**BUFFER | {'accumulation_steps': 2.5}": r"accumulation_steps=2\.5",
    "accumulation_steps=2": "needs accumulation=",
    "buffer_dtype=torch.float32": "needs accumulation='buffer'",
    "**BUFFER, buffer_dtype=torch.float16": "buffer_dtype=torch.float16",
    "clip_value=-1.0": f"clip_value=-1.0: {POSITIVE}",
    "clip_value='1'": f"TypeError: clip_value='1': {POSITIVE}",
    "clip_value=1.0, clip_param_norm=1.0": "choose one",
    "clip_global_norm=nan": f"clip_global_norm=nan: {POSITIVE}",
    "clip_global_norm=True": f"TypeError: clip_global_norm=True: {POSITIVE}",
    "grad_norm='l2'": "TypeError: grad_norm='l2': allowed are True and False",
    "skip_nonfinite='yes'": "TypeError: skip_nonfinite='yes': allowed are True and False",
}
PREPARE = {
    "prepare(optimizer, model)": r"TypeError: _release: model=a AdamW: allowed is a",
    "prepare(model.parameters(), optimizer)": "TypeError: _release: model=a generator",
    "prepare(model, optimizer, 'a')": "TypeError: ignore_existing_hooks='a': allowed are",
    # Many classes here have the names of torch's.
    "prepare(model, torch.optim.SGD(model.parameters()))": (
        "TypeError: optimizer=<class 'torch.optim.sgd.SGD'> is not"
    ),
    "prepare(model, optimi_func.transforms.chain(clip_value(1.0), sgd(lr=0.1)))": (
        "TypeError: Chain.*is not one of optimi_func's classes"
    ),
    "prepare(*make(release=False))": "gradient_release=True",
    "prepare(Net(), optimizer)": "none of the model's trainable parameters",
    "model.norm.weight.register_post_accumulate_grad_hook(print); "
    "prepare(model, optimizer)": "1 parameters have .*ignore_existing_hooks=True",
    "prepare(*make(hooks=[cautious()]), **STATES)": (
        r"'states' with the hook cautious\(\).*'buffer'"
    ),
    "prepare(model, adamw(lr=0.1, cautious=True), **STATES)": (
        r"'states' with the hook cautious.*='buffer'"
    ),
    **{
        f"prepare(*make({made}), **STATES)": "use accumulation='buffer'"
        for made in ("Adan", "SGD", "SOAP", "Adafactor", "AdamW, mars=0.025")
    },
    "prepare(model, adan(lr=0.1), **STATES)": "accumulation='buffer'",
    "prepare(*make(SGD, momentum=0.9), **STATES, **NORM)": "use accumulation='buffer'",
    "prepare(*make(capturable=True), skip_nonfinite=True, **STATES)": "wait for the device",
    # Already released, also through another module around the same parameters.
    "prepare(*released)": r"already, to AdamW.*remove_gradient_release\(",
    "prepare(*released, ignore_existing_hooks=True)": "already, to AdamW",
    "prepare(released[0], sgd(lr=0.1))": "already, to AdamW",
    "prepare(nn.Sequential(released[0]), optimizer_of(released[0]))": "released already",
    "prepare(filters, optimizer_of(filters), clip_value=0.1)": (
        "with 0.weight, which is complex: allowed are norms"
    ),
    "prepare(filters, optimizer_of(filters), **BUFFER, buffer_dtype=torch.bfloat16)": (
        "with 0.weight, which is complex: allowed are norms"
    ),
}
for _options, _text in OPTIONS.items():
    PREPARE[f"prepare(model, optimizer, {_options})"] = _text
    PREPARE[f"handle.options = dataclasses.replace(handle.options, {_options})"] = _text


@refuses(PREPARE)
def test_what_cannot_be_prepared() -> Scene:
    model, optimizer = make()
    *released, handle = prepared()
    filters = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))

    def optimizer_of(model: nn.Module) -> Any:
        return AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)

    return locals() | {"prepare": prepare_for_gradient_release}


OPEN = "model, optimizer, handle = prepared(**BUFFER); backward(model); "
HANDLED = {
    f"{OPEN}handle.accumulation = 'states'": r"inside an open cycle.*step\(\)",
    f"{OPEN}optimizer.reset()": r"reset\(\) inside an accumulation cycle",
    **{
        f"{OPEN}load = handle.load_state_dict; load(handle.state_dict() | {change})": (text)
        for change, text in {
            "{'begun': ['nobody']}": "names 'nobody'",
            "{'begun': ['last.weight'], 'buffer': {'last.weight': torch.ones(3)}}": (
                r"shape \(4, 128\)"
            ),
            "{'more': 1}": "allowed are",
            "{'position': 2, 'accumulation': 'states'}": "open cycle of accumulation=",
            "{'buffer': {}}": "open cycle and lacks its sums",
        }.items()
    },
    "handle.load_state_dict(None)": "TypeError: state_dict=None: allowed is a dict",
    "handle.state": r"AttributeError: AdamW keeps its own in optimizer\.state",
    "pure.state = sgd(lr=0.1).init({'w': torch.ones(2)})": "params",
    "handle.backward(lambda: loss(model), clip_global_norm=0)": "clip_global_norm=0",
    "handle.backward(loss(model))": "TypeError: got a Tensor: allowed is a function",
    "handle.remove(); handle.backward(lambda: loss(model))": (
        "RuntimeError: hooks were removed"
    ),
    "twin = copy.deepcopy(handle); twin.backward(lambda: loss(model))": (
        "RuntimeError: or this is a copy"
    ),
    "backward(model); clip_grad_norm_(model.parameters(), 1.0)": (
        "RuntimeError: AdamW has applied .*clip_global_norm=1.0"
    ),
    "backward(model); "
    "clip_grad_norm_([*model.first.parameters(), nn.Parameter(torch.ones(2))], 1.0)": (
        "RuntimeError: gradient release"
    ),
    "loss(model).backward(create_graph=True)": (
        r"RuntimeError: last\.weight.*create_graph=True"
    ),
    "optimizer.param_groups[0]['lr'] = -1.0; backward(model)": (
        r"RuntimeError: middle\.weight.*Invalid learning rate"
    ),
    "optimizer.optimizer_accumulation = True; optimizer.step(param=free)": (
        "in none of the groups"
    ),
    "layer = only_weakly(); backward(layer)": ("RuntimeError: keep a reference"),
    "model, optimizer, _ = prepared(make(SGD, momentum=0.9), **STATES); "
    "optimizer.param_groups[0]['momentum'] = 0.0; backward(model)": "accumulation='buffer'",
    "model, optimizer, _ = prepared(**BUFFER); optimizer.optimizer_accumulation = True; "
    "backward(model)": "RuntimeError: choose one",
    "model, optimizer, handle = prepared(**STATES); backward(model); handle.discard()": (
        "RuntimeError: take gradients back"
    ),
    "model, *_ = prepared(**NORM); backward(model)": (
        r"RuntimeError: handle\.backward\(loss_fn\)"
    ),
    "model, _, handle = prepared(**NORM); batches = iter([2.0, 3.0]); "
    "handle.backward(lambda: loss(model) * next(batches))": (
        "RuntimeError: do the same thing twice"
    ),
    "model, _, handle = prepared(**NORM); "
    "handle.backward(lambda: checkpoint(model, x, use_reentrant=True).sum())": (
        r"RuntimeError: reentrant.*use_reentrant=False"
    ),
    "model, _, handle = prepared(**NORM); handle.backward(lambda: again(model))": (
        r"RuntimeError: create_graph=True.*paused\(\)"
    ),
    "free_model, free_optimizer, _ = prepared(make(ScheduleFreeAdamW), **BUFFER); "
    "backward(free_model); free_optimizer.eval()": (
        r"RuntimeError: eval\(\) inside an accumulation cycle"
    ),
    "free = prepared(make(ScheduleFreeAdamW))[1]; free.optimizer_accumulation = True; "
    "free.eval()": r"RuntimeError: eval\(\) inside an accumulation cycle",
    "free = make(ScheduleFreeAdamW)[1]; free.init_state(); "
    "held = EMA(free, 0.9).applied(); "
    "held.__enter__(); free.eval()": r"RuntimeError: eval\(\) inside of EMA.applied\(\)",
    "average = EMA(optimizer, 0.9); held = average.applied(); held.__enter__(); "
    "backward(model)": r"RuntimeError: a backward inside of EMA.applied\(\)",
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@refuses(HANDLED)
def test_what_a_handle_refuses() -> Scene:
    model, optimizer, handle = prepared()
    pure = prepare_for_gradient_release(Net(), sgd(lr=0.1))
    free, x = nn.Parameter(torch.ones(2)), batch(0).requires_grad_()

    def loss(model: Any) -> Tensor:
        return model(batch(0)).square().mean()

    def backward(model: Any) -> None:
        loss(model).backward()

    def again(model: Any) -> Tensor:
        (total := loss(model)).backward(create_graph=True)
        return total

    def only_weakly() -> Any:
        """Return a layer whose optimizer, a value, only its handle refers to."""
        layer = nn.Linear(16, 1)
        prepare_for_gradient_release(nn.ModuleList([layer]), adamw(lr=0.1))
        gc.collect()
        return layer

    return locals() | {"checkpoint": checkpoint}
