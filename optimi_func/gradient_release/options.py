"""The options of a gradient release, and the combinations that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from optimi_func.core.checks import check_flag, check_whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AccumulationMode: TypeAlias = Literal["states", "buffer"]


@dataclass(frozen=True)
class ReleaseOptions:
    """The options of `prepare_for_gradient_release`, under the same names.

    To change an option between two backward passes, assign `handle.options =
    dataclasses.replace(handle.options, grad_norm=True)`.
    """

    accumulation: AccumulationMode | None
    accumulation_steps: int | None
    buffer_dtype: torch.dtype | None
    clip_param_norm: float | None
    clip_value: float | None
    clip_global_norm: float | None
    grad_norm: bool
    skip_nonfinite: bool | Literal["step"]
    groups: "tuple[ProcessGroup, ...]" = ()

    def __post_init__(self) -> None:
        """Raise if no backward could honour these options."""
        check_flag("grad_norm", self.grad_norm)
        if not self.skips_steps:
            check_flag("skip_nonfinite", self.skip_nonfinite)
        allowed: dict[str, tuple[object, ...]] = {
            "accumulation": (*get_args(AccumulationMode), None),
            "buffer_dtype": (torch.float32, torch.float64, torch.bfloat16, None),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {values}")
        steps = self.accumulation_steps
        check_whole("accumulation_steps", steps, 1, none=True)
        if steps is not None and self.accumulation is None:
            raise ValueError(
                f"accumulation_steps={steps} needs accumulation='buffer' or 'states'"
            )
        if self.buffer_dtype is not None and self.accumulation != "buffer":
            raise ValueError(
                f"buffer_dtype={self.buffer_dtype} needs accumulation='buffer'"
            )
        names = ("clip_param_norm", "clip_value", "clip_global_norm")
        limits: dict[str, float | None] = {name: getattr(self, name) for name in names}
        for name, limit in limits.items():
            number = type(limit) is not bool and isinstance(limit, Real | Tensor | None)
            if not number or (limit is not None and not limit > 0):
                message = f"{name}={limit!r}: allowed are positive numbers and None"
                raise (ValueError if number else TypeError)(message)
        if sum(limit is not None for limit in limits.values()) > 1:
            asked = ", ".join(f"{name}={limit}" for name, limit in limits.items())
            raise ValueError(f"{asked}: choose one")
        if self.groups and not (self.two_pass or self.grad_norm or self.skips_steps):
            raise ValueError(
                f"groups={self.groups}: they need clip_global_norm, grad_norm or "
                "skip_nonfinite='step', which ask about all gradients"
            )
        ends_outside = self.accumulation == "buffer" and steps is None
        if self.skips_steps and not (self.two_pass or ends_outside):
            raise ValueError(
                "skip_nonfinite='step' has to know every gradient before the first update: "
                "pass clip_global_norm, which may be inf, or accumulation='buffer' without "
                "accumulation_steps; or skip by parameter, skip_nonfinite=True"
            )
        if self.clips and self.accumulation == "states":
            raise ValueError(
                "accumulation='states' never holds the whole gradient that clipping would "
                "measure: use accumulation='buffer'"
            )

    def check_complex(self, params: Mapping[str, Tensor]) -> None:
        """Raise for options that complex gradients cannot have."""
        limit, dtype = self.clip_value, self.buffer_dtype
        for name, p in params.items() if limit or dtype == torch.bfloat16 else ():
            if p.is_complex():
                raise ValueError(
                    f"clip_value={limit}, buffer_dtype={dtype} with {name}, which is "
                    "complex: allowed are norms, and sums in float32 and float64"
                )

    @property
    def clips(self) -> bool:
        """True if gradients are clipped."""
        limits = self.clip_param_norm, self.clip_value, self.clip_global_norm
        return any(limit is not None for limit in limits)

    @property
    def two_pass(self) -> bool:
        """True if an update has to know the norm of the backward that it is in."""
        return self.clip_global_norm is not None

    @property
    def needs_norms(self) -> bool:
        """True if the norm of each gradient that is applied has to be known."""
        clips = self.clip_param_norm is not None
        return clips or self.grad_norm or self.skip_nonfinite is True

    @property
    def skips_steps(self) -> bool:
        """True if a gradient that is not finite skips the whole step."""
        return self.skip_nonfinite == "step"
