"""What a gradient release can be asked for, and which requests exclude each other."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

AccumulationMode: TypeAlias = Literal["states", "buffer"]
How: TypeAlias = Literal["two_pass", "lagged"]
Fidelity: TypeAlias = Literal["exact", "approximate", "raises"]

# Clipping by accumulation, beside a step by p.grad with torch.nn.utils.clip_grad_*: with
# "flag" (optimizer_accumulation) each part of the gradient is clipped by itself; with
# "states" the whole gradient is nowhere to be measured.
CLIPPING: dict[str, dict[str, Fidelity]] = {
    "clip_param_norm": {
        "none": "exact",
        "flag": "approximate",
        "states": "raises",
        "buffer": "exact",
    },
    "clip_value": {
        "none": "exact",
        "flag": "approximate",
        "states": "raises",
        "buffer": "exact",
    },
    "two_pass": {
        "none": "exact",
        "flag": "approximate",
        "states": "raises",
        "buffer": "exact",
    },
    "lagged": {
        "none": "approximate",
        "flag": "approximate",
        "states": "raises",
        "buffer": "approximate",
    },
}


@dataclass(frozen=True)
class ReleaseOptions:
    """What a release does beyond the plain step: see `prepare_for_gradient_release`.

    A value: `handle.options = dataclasses.replace(handle.options, grad_norm=True)` changes
    one between two backwards.
    """

    pending_bytes: int
    accumulation: AccumulationMode | None
    accumulation_steps: int | None
    buffer_dtype: torch.dtype | None
    clip_param_norm: float | None
    clip_value: float | None
    clip_global_norm: float | None
    how: How
    grad_norm: bool
    skip_nonfinite: bool

    def __post_init__(self) -> None:
        """Refuse what no backward could honour."""
        if self.pending_bytes < 0:
            raise ValueError(f"pending_bytes={self.pending_bytes}: allowed is at least 0")
        self._check_accumulation()
        if self.how not in get_args(How):
            raise ValueError(f"how={self.how!r}: allowed are {get_args(How)}")
        for name in ("clip_param_norm", "clip_value", "clip_global_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: allowed are positive numbers and None")
        limits = (self.clip_param_norm, self.clip_value, self.clip_global_norm)
        if sum(x is not None for x in limits) > 1:
            raise ValueError(
                f"clip_param_norm={limits[0]}, clip_value={limits[1]}, "
                f"clip_global_norm={limits[2]}: choose one"
            )
        row = CLIPPING.get(self.clipping or "", {})
        if row.get(self.accumulation or "none") == "raises":
            raise ValueError(
                f"accumulation={self.accumulation!r} never holds the whole gradient that "
                "clipping would measure: use accumulation='buffer'"
            )

    def _check_accumulation(self) -> None:
        chosen, steps = self.accumulation, self.accumulation_steps
        if chosen not in (None, *get_args(AccumulationMode)):
            raise ValueError(
                f"accumulation={chosen!r}: allowed are {get_args(AccumulationMode)} and "
                "None"
            )
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(
                f"accumulation_steps={steps!r}: allowed are whole numbers from 1, and None"
            )
        if steps is not None and chosen is None:
            raise ValueError(
                f"accumulation_steps={steps} needs accumulation='buffer' or 'states'"
            )
        if self.buffer_dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
            raise ValueError(
                f"buffer_dtype={self.buffer_dtype}: allowed are torch.float32, "
                "torch.float64, torch.bfloat16 and None"
            )
        if self.buffer_dtype is not None and chosen != "buffer":
            raise ValueError(
                f"buffer_dtype={self.buffer_dtype} needs accumulation='buffer'"
            )

    @property
    def clipping(self) -> str | None:
        """The row of `CLIPPING` that was asked for."""
        if self.clip_param_norm is not None:
            return "clip_param_norm"
        if self.clip_value is not None:
            return "clip_value"
        return None if self.clip_global_norm is None else self.how

    @property
    def two_pass(self) -> bool:
        """Whether an update has to know the norm of the backward that it is in."""
        return self.clipping == "two_pass"

    @property
    def whole_backward(self) -> bool:
        """Whether anything depends on where a backward begins and ends."""
        return bool(self.accumulation_steps or self.clip_global_norm or self.grad_norm)
