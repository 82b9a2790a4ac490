"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

One graph a (rule, dtypes), whatever the shapes, the number of tensors and the schedule do.
These run under no_grad and return detached tensors; to differentiate a step, compile your
own function over the pure one in `optimi_func`. States come from the `*_init` there.
"""

from optimi_func import functional as _f
from optimi_func.compiled.train_step import train_step as train_step
from optimi_func.execution.trees import step as step
from optimi_func.execution.trees import step_ as step_

sgd_step = _f.make_step(_f.sgd, step, "sgd_step")
sgd_step_ = _f.make_step(_f.sgd, step_, "sgd_step_")
adam_step = _f.make_step(_f.adam, step, "adam_step")
adam_step_ = _f.make_step(_f.adam, step_, "adam_step_")
adamw_step = _f.make_step(_f.adamw, step, "adamw_step")
adamw_step_ = _f.make_step(_f.adamw, step_, "adamw_step_")
stableadamw_step = _f.make_step(_f.stableadamw, step, "stableadamw_step")
stableadamw_step_ = _f.make_step(_f.stableadamw, step_, "stableadamw_step_")
radam_step = _f.make_step(_f.radam, step, "radam_step")
radam_step_ = _f.make_step(_f.radam, step_, "radam_step_")
ranger_step = _f.make_step(_f.ranger, step, "ranger_step")
ranger_step_ = _f.make_step(_f.ranger, step_, "ranger_step_")
adan_step = _f.make_step(_f.adan, step, "adan_step")
adan_step_ = _f.make_step(_f.adan, step_, "adan_step_")
lion_step = _f.make_step(_f.lion, step, "lion_step")
lion_step_ = _f.make_step(_f.lion, step_, "lion_step_")
