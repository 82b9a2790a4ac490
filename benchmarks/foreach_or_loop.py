"""Without a compiler: is foreach faster than a loop over the parameters?

The AdamW step of torch and of this library, each with ``foreach=True`` and as a loop, on
the sets of shapes of step_time.py and beside ``torch.optim.AdamW(fused=True)``, which needs
no compiler either.
"""

from dataclasses import dataclass

import harness
from step_time import QUICK, UNCOMPILED, WAYS, draw, measure, report
from step_time import Config as StepTime


@dataclass(frozen=True)
class Config(StepTime):
    ways: tuple[str, ...] = harness.option(UNCOMPILED, "to step", tuple(WAYS))


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
