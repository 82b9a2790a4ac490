"""A training run that stops, is saved, and goes on in another process.

`test_resume.py` runs the first halves; `python resumed.py FOLDER` loads them, runs the
second halves and leaves what became of them beside the checkpoints.
"""

import pickle
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import MATRICES, Case
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import optimi_func
from optimi_func.core import math
from optimi_func.core.rule import Storage
from optimi_func.execution import inductor

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from safetensors_state import load_state, save_state

STEPS = 20
FORMATS = ("torch", "safetensors", "pickle")


@dataclass(frozen=True)
class Mode:
    """A way to run the steps."""

    options: dict[str, Any]
    release: dict[str, Any] | None = None
    small: bool = False  # only tensors that share a bucket


_EAGER: dict[str, Any] = {"compile": False, "gradient_release": True}
MODES = {
    "eager": Mode({"compile": False}),
    "capturable": Mode({"compile": False, "capturable": True}),
    "wide moments": Mode({"compile": False, "state_dtype": torch.float32}),
    "uncompensated": Mode({"compile": False, "kahan_sum": False}),
    # Of bfloat16 parameters alone; one is large enough for codes.
    "compact": Mode({"compile": False, "storage": "compact"}),
    "exact 8bit": Mode({"compile": False, "storage": Storage("exact", "8bit")}),
    "foreach": Mode({"foreach": True}),
    "bucketed": Mode({"foreach": True}, small=True),
    "compiled": Mode({"compile": True}),
    "release": Mode(_EAGER, {}),
    "release buffer": Mode(_EAGER, {"accumulation": "buffer", "accumulation_steps": 2}),
    "release states": Mode(_EAGER, {"accumulation": "states", "accumulation_steps": 2}),
    "release compact": Mode(
        {**_EAGER, "storage": "compact"},
        {"accumulation": "buffer", "accumulation_steps": 2},
    ),
    "release compiled": Mode({"compile": True, "gradient_release": True}, {}),
}


@dataclass(frozen=True)
class Job:
    """A run, by what it is saved and by what it goes on."""

    case: Case
    dtype: torch.dtype
    before: str
    after: str

    @property
    def id(self) -> str:
        way = self.before if self.before == self.after else f"{self.before} to {self.after}"
        return f"{self.case.id}-{str(self.dtype)[6:]}-{way}"


class Sizes(nn.Module):
    """Parameters of all kinds of sizes, whose gradients do not depend on them."""

    def __init__(self, dtype: torch.dtype, small: bool, dims: int = 0) -> None:
        super().__init__()
        shapes = [(16,), (3, 4), (), (1,), (0,), (2, 3, 4, 5), (7,)]
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate(shapes if small else [*shapes, (130, 70), (130, 64)]):
            shape = (1,) * (dims - len(shape)) + shape
            x = (0.1 * torch.randn(shape, generator=generator)).to(dtype)
            if len(shape) == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            self.register_parameter(f"p{i}", nn.Parameter(x))

    def loss(self, t: int) -> Tensor:
        """What has a gradient that is drawn anew each time."""
        generator = torch.Generator().manual_seed(100 + t)
        terms = [
            (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum()
            for p in self.parameters()
        ]
        return torch.stack(terms).sum()


class Run:
    """Model, optimizer, schedule and, under gradient release, the handle."""

    def __init__(self, case: Case, dtype: torch.dtype, mode: Mode) -> None:
        self.mode = mode
        dims = 0 if case.name not in MATRICES else 2
        self.model: nn.Module = Sizes(dtype, mode.small, dims)
        names = self.model.named_parameters()
        self.optimizer = case.cls(names, lr=0.02, **case.options, **mode.options)
        self._attach()
        self.schedule = self._scheduled()

    def _attach(self) -> None:
        self.handle = None
        if self.mode.release is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "clip_global_norm.* with prodigy")
                self.handle = optimi_func.prepare_for_gradient_release(
                    self.model, self.optimizer, **self.mode.release
                )

    def _scheduled(self) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def train(self, start: int, stop: int) -> None:
        """Backwards from `start` on; in a cycle of accumulation two make a step."""
        each = 2 if self.mode.release and "accumulation" in self.mode.release else 1
        for t in range(start, stop):
            self.model.loss(t).backward()
            if (t + 1) % each == 0:
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """In every format."""
        with warnings.catch_warnings():
            # Of an open cycle, whose part is saved with the handle.
            warnings.filterwarnings("ignore", r"state_dict\(\) inside")
            state = self.optimizer.state_dict()
            save_state(self.optimizer, folder / "optimizer.safetensors")
        rest = {
            "schedule": self.schedule.state_dict(),
            "handle": self.handle and self.handle.state_dict(),
        }
        weights = self.model.state_dict()
        torch.save({"model": weights, "optimizer": state, **rest}, folder / "torch.pt")
        torch.save(rest, folder / "rest.pt")
        save_file({k: x.contiguous() for k, x in weights.items()}, folder / "m.safetensors")
        objects = (self.model, self.optimizer, rest)
        (folder / "objects.pickle").write_bytes(pickle.dumps(objects))

    def load(self, folder: Path, form: str) -> None:
        """Go on from where another run was saved."""
        if form == "pickle":
            data = (folder / "objects.pickle").read_bytes()
            self.model, self.optimizer, saved = pickle.loads(data)
            self._attach()
            self.schedule = self._scheduled()
        elif form == "torch":
            saved = torch.load(folder / "torch.pt", weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        else:
            saved = torch.load(folder / "rest.pt", weights_only=True)
            self.model.load_state_dict(load_file(folder / "m.safetensors"))
            load_state(self.optimizer, folder / "optimizer.safetensors")
        self.schedule.load_state_dict(saved["schedule"])
        if self.handle and saved["handle"]:
            self.handle.load_state_dict(saved["handle"])

    def end(self) -> dict[str, Tensor]:
        """All tensors there are now, by name."""
        found = {}
        for name, p in self.model.named_parameters():
            found[name] = p.detach().clone()
            state = self.optimizer.state[p]
            found |= {f"{name}.{field}": x.clone() for field, x in state.items()}
        return found


def go_on(job: Job, folder: Path, form: str, start: int, stop: int) -> dict[str, Tensor]:
    """The second half of a job."""
    run = Run(job.case, job.dtype, MODES[job.after])
    run.load(folder, form)
    run.train(start, stop)
    return run.end()


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "eps=|weight_decay=|max_lr=|`torch.jit")
    torch.set_num_threads(1)
    inductor.PRECOMPILE_HEADERS = True  # as where the first halves were compiled
    math.multiplies_bfloat16 = lambda: False
    # (job, its folder, format, start, stop)
    found: list[Any] = []
    for order in pickle.loads((folder / "orders.pickle").read_bytes()):
        try:
            found.append(go_on(*order))
        except Exception:
            found.append(traceback.format_exc())
    torch.save(found, folder / "ends.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
