"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

There is one graph for each rule and set of dtypes. Shapes, the number of tensors and
schedules do not change it. Steps run under no_grad and return detached tensors. To
differentiate a step, compile your own function over the pure step in `optimi_func`. States
come from the `*_init` functions there.
"""

from optimi_func.compiled.train_step import train_step as train_step
from optimi_func.execution.trees import step as step
from optimi_func.execution.trees import step_ as step_
from optimi_func.optimizers._forms import compiled_functions
from optimi_func.optimizers.adam import adam, adamw
from optimi_func.optimizers.adan import adan
from optimi_func.optimizers.ademamix import ademamix
from optimi_func.optimizers.adopt import adopt
from optimi_func.optimizers.lamb import lamb
from optimi_func.optimizers.lion import lion
from optimi_func.optimizers.muon import muon
from optimi_func.optimizers.prodigy import prodigy
from optimi_func.optimizers.radam import radam
from optimi_func.optimizers.ranger import ranger
from optimi_func.optimizers.schedule_free import (
    schedule_free_adamw,
    schedule_free_radam,
    schedule_free_sgd,
)
from optimi_func.optimizers.sgd import sgd
from optimi_func.optimizers.stableadamw import stableadamw

adam_step, adam_step_ = compiled_functions(adam)
adamw_step, adamw_step_ = compiled_functions(adamw)
adan_step, adan_step_ = compiled_functions(adan)
ademamix_step, ademamix_step_ = compiled_functions(ademamix)
adopt_step, adopt_step_ = compiled_functions(adopt)
lamb_step, lamb_step_ = compiled_functions(lamb)
lion_step, lion_step_ = compiled_functions(lion)
muon_step, muon_step_ = compiled_functions(muon)
prodigy_step, prodigy_step_ = compiled_functions(prodigy)
radam_step, radam_step_ = compiled_functions(radam)
ranger_step, ranger_step_ = compiled_functions(ranger)
schedule_free_adamw_step, schedule_free_adamw_step_ = compiled_functions(
    schedule_free_adamw
)
schedule_free_radam_step, schedule_free_radam_step_ = compiled_functions(
    schedule_free_radam
)
schedule_free_sgd_step, schedule_free_sgd_step_ = compiled_functions(schedule_free_sgd)
sgd_step, sgd_step_ = compiled_functions(sgd)
stableadamw_step, stableadamw_step_ = compiled_functions(stableadamw)
