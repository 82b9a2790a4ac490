"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

There is one graph for each rule and set of dtypes. Shapes, the number of tensors and
schedules do not change it. Steps run under no_grad and return detached tensors. To
differentiate a step, compile your own function over the pure step in `optimi_func`. States
come from the `*_init` functions, which are those of the pure steps.

They raise where they could not do what is asked for: in grad mode, if gradients, state or
hyperparameters require grad, or parameters that are not leaves (tensors within a schedule
are not seen); in `torch.compile`, `make_fx`, `vmap`, `grad`, `jvp` and on fake tensors; in
place, if two parameters share memory. For tied weights pass one name, or None as the
gradient of the other. A pure call copies a leaf without a gradient.

On CPU a step is one call for all tensors that share their dtypes: a loop in C++ cuts the
list into pieces, which all threads process. A result depends neither on the number of
threads nor on other tensors of the list. On CUDA a step is one launch: a Triton kernel
around the body that Inductor generated, which looks up its tensors in a table. A trial
compares it with Inductor's code when it is compiled; if they differ in a bit, each tensor
takes a launch. Rules with means need two more. A launch that is planned while a CUDA graph
is captured takes one per tensor, and what was captured keeps its table until the process
ends.

Machine code is kept, in entries of some 70 KB. An entry belongs to torch's version and
build, Python, every line of this package's sources, rule, dtypes and options, the
processor's instructions, the variables `TORCHINDUCTOR_...`, `ATEN_CPU_CAPABILITY` and
others, and Inductor's settings. What another C++ compiler made, by its version, `CXX` and
the variables it reads, is made again in its place; where no compiler is installed, it is
loaded. Sources of torch that you edit are not noticed: switch the store off then. Of
several processes that need a kernel one compiles, and the others wait for it, five minutes
at most. Compiled in each process are steps on CUDA, kernels that need the wrapper of
Inductor's C++, own rules without a digest of their functions, and steps after
`torch.compiler.set_stance`. A compilation of more than 2 s is said once, by the logger
`optimi_func`.

torch's own cache, `TORCHINDUCTOR_CACHE_DIR`, leaves `ATEN_CPU_CAPABILITY` out of its keys:
graphs of `train_step` and of your `torch.compile` need a folder for each value.
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
kron_step, kron_step_ = compiled(pure.kron)
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
scion_step, scion_step_ = compiled(pure.scion)
sgd_step, sgd_step_ = compiled(pure.sgd)
shampoo_step, shampoo_step_ = compiled(pure.shampoo)
soap_step, soap_step_ = compiled(pure.soap)
stableadamw_step, stableadamw_step_ = compiled(pure.stableadamw)


def __getattr__(name: str) -> InitFunction:
    """Return a function that makes a state, such as `adamw_init`."""
    if name.endswith("_init"):
        return getattr(pure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
