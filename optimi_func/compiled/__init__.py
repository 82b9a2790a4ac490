"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

One graph a (rule, dtypes), whatever the shapes, the number of tensors and the schedule do.
These run under no_grad and return detached tensors; to differentiate a step, compile your
own function over the pure one in `optimi_func`. States come from the `*_init` there.
"""

from optimi_func.compiled.train_step import train_step
from optimi_func.execution.trees import step, step_
from optimi_func.optimizers.adam import compiled_adam_step as adam_step
from optimi_func.optimizers.adam import compiled_adam_step_ as adam_step_
from optimi_func.optimizers.adam import compiled_adamw_step as adamw_step
from optimi_func.optimizers.adam import compiled_adamw_step_ as adamw_step_
from optimi_func.optimizers.adan import compiled_adan_step as adan_step
from optimi_func.optimizers.adan import compiled_adan_step_ as adan_step_
from optimi_func.optimizers.ademamix import compiled_ademamix_step as ademamix_step
from optimi_func.optimizers.ademamix import compiled_ademamix_step_ as ademamix_step_
from optimi_func.optimizers.adopt import compiled_adopt_step as adopt_step
from optimi_func.optimizers.adopt import compiled_adopt_step_ as adopt_step_
from optimi_func.optimizers.lamb import compiled_lamb_step as lamb_step
from optimi_func.optimizers.lamb import compiled_lamb_step_ as lamb_step_
from optimi_func.optimizers.lion import compiled_lion_step as lion_step
from optimi_func.optimizers.lion import compiled_lion_step_ as lion_step_
from optimi_func.optimizers.muon import compiled_muon_step as muon_step
from optimi_func.optimizers.muon import compiled_muon_step_ as muon_step_
from optimi_func.optimizers.radam import compiled_radam_step as radam_step
from optimi_func.optimizers.radam import compiled_radam_step_ as radam_step_
from optimi_func.optimizers.ranger import compiled_ranger_step as ranger_step
from optimi_func.optimizers.ranger import compiled_ranger_step_ as ranger_step_
from optimi_func.optimizers.schedule_free_adamw import (
    compiled_schedule_free_adamw_step as schedule_free_adamw_step,
)
from optimi_func.optimizers.schedule_free_adamw import (
    compiled_schedule_free_adamw_step_ as schedule_free_adamw_step_,
)
from optimi_func.optimizers.schedule_free_radam import (
    compiled_schedule_free_radam_step as schedule_free_radam_step,
)
from optimi_func.optimizers.schedule_free_radam import (
    compiled_schedule_free_radam_step_ as schedule_free_radam_step_,
)
from optimi_func.optimizers.schedule_free_sgd import (
    compiled_schedule_free_sgd_step as schedule_free_sgd_step,
)
from optimi_func.optimizers.schedule_free_sgd import (
    compiled_schedule_free_sgd_step_ as schedule_free_sgd_step_,
)
from optimi_func.optimizers.sgd import compiled_sgd_step as sgd_step
from optimi_func.optimizers.sgd import compiled_sgd_step_ as sgd_step_
from optimi_func.optimizers.stableadamw import compiled_stableadamw_step as stableadamw_step
from optimi_func.optimizers.stableadamw import (
    compiled_stableadamw_step_ as stableadamw_step_,
)

__all__ = [
    "adam_step",
    "adam_step_",
    "adamw_step",
    "adamw_step_",
    "adan_step",
    "adan_step_",
    "ademamix_step",
    "ademamix_step_",
    "adopt_step",
    "adopt_step_",
    "lamb_step",
    "lamb_step_",
    "lion_step",
    "lion_step_",
    "muon_step",
    "muon_step_",
    "radam_step",
    "radam_step_",
    "ranger_step",
    "ranger_step_",
    "schedule_free_adamw_step",
    "schedule_free_adamw_step_",
    "schedule_free_radam_step",
    "schedule_free_radam_step_",
    "schedule_free_sgd_step",
    "schedule_free_sgd_step_",
    "sgd_step",
    "sgd_step_",
    "stableadamw_step",
    "stableadamw_step_",
    "step",
    "step_",
    "train_step",
]
