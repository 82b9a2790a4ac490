"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

There is one graph for each rule and set of dtypes. Shapes, the number of tensors and
schedules do not change it. Steps run under no_grad and return detached tensors. To
differentiate a step, compile your own function over the pure step in `optimi_func`. States
come from the `*_init` functions, which are those of the pure steps.
"""

from optimi_func import functional as pure
from optimi_func.compiled.train_step import train_step as train_step
from optimi_func.execution.trees import step as step
from optimi_func.execution.trees import step_ as step_
from optimi_func.rules.body import InitFunction
from optimi_func.rules.body import compiled_functions as compiled

adadelta_step, adadelta_step_ = compiled(pure.adadelta)
adafactor_step, adafactor_step_ = compiled(pure.adafactor)
adagrad_step, adagrad_step_ = compiled(pure.adagrad)
adam_step, adam_step_ = compiled(pure.adam)
adamax_step, adamax_step_ = compiled(pure.adamax)
adamw_step, adamw_step_ = compiled(pure.adamw)
adan_step, adan_step_ = compiled(pure.adan)
ademamix_step, ademamix_step_ = compiled(pure.ademamix)
adopt_step, adopt_step_ = compiled(pure.adopt)
asgd_step, asgd_step_ = compiled(pure.asgd)
lamb_step, lamb_step_ = compiled(pure.lamb)
lion_step, lion_step_ = compiled(pure.lion)
muon_step, muon_step_ = compiled(pure.muon)
nadam_step, nadam_step_ = compiled(pure.nadam)
normuon_step, normuon_step_ = compiled(pure.normuon)
prodigy_step, prodigy_step_ = compiled(pure.prodigy)
radam_step, radam_step_ = compiled(pure.radam)
ranger_step, ranger_step_ = compiled(pure.ranger)
rmsprop_step, rmsprop_step_ = compiled(pure.rmsprop)
rprop_step, rprop_step_ = compiled(pure.rprop)
schedule_free_adamw_step, schedule_free_adamw_step_ = compiled(pure.schedule_free_adamw)
schedule_free_radam_step, schedule_free_radam_step_ = compiled(pure.schedule_free_radam)
schedule_free_sgd_step, schedule_free_sgd_step_ = compiled(pure.schedule_free_sgd)
sgd_step, sgd_step_ = compiled(pure.sgd)
soap_step, soap_step_ = compiled(pure.soap)
stableadamw_step, stableadamw_step_ = compiled(pure.stableadamw)


def __getattr__(name: str) -> InitFunction:
    """Return a function that makes a state, such as `adamw_init`."""
    if name.endswith("_init"):
        return getattr(pure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
