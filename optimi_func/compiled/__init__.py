"""Compiled versions of the pure steps: `adamw_step` is pure, `adamw_step_` is in place.

Each rule and each combination of dtypes needs one graph. Other shapes, another number of
tensors, and schedules do not need another graph. Steps run under no_grad and return
detached tensors. To differentiate a step, compile a function of your own that calls the
pure step in `optimi_func`. To create a state, use the `*_init` functions of the pure
optimizers.

The functions raise an error in these cases:

- Grad mode is on, and a gradient, the state, a hyperparameter, or a parameter that is not a
  leaf requires grad. (Tensors inside a schedule are not checked.)
- The call is inside `torch.compile`, `make_fx`, `vmap`, `grad` or `jvp`, or uses fake
  tensors.
- Two parameters of an in-place step share memory. For tied weights, pass the weight under
  only one name, or pass None as the gradient of the other name.

If a gradient is None, a pure step returns a copy of the parameter.

On a CPU, one call updates all tensors that have the same dtypes. A C++ loop cuts the list
of tensors into pieces, which all threads process. The result for a tensor does not depend
on the number of threads or on the other tensors of the list. On CUDA, a step is one launch
of a Triton kernel. This kernel contains the code that Inductor generated, and looks up its
tensors in a table. When the kernel is compiled, a trial compares its results with the
results of Inductor's own kernel. If the results are not bitwise equal, each tensor needs
its own launch. Rules that compute means need two more launches. If a step is planned while
a CUDA graph is captured, each tensor needs its own launch too. The tables that a captured
graph uses are kept in memory until the process ends.

Machine code is stored in entries of about 70 KB each. The key of an entry depends on the
version and build of torch, the Python version, every line of this package's sources, the
rule, the dtypes, the options, the processor's instruction set, environment variables
(`TORCHINDUCTOR_...`, `ATEN_CPU_CAPABILITY` and others), and Inductor's settings. Each entry
also records the C++ compiler that made it: its version, `CXX`, and the environment
variables that it reads. If a different compiler is installed, the entry is compiled again
and replaced. If no compiler is installed, the entry is loaded. Changes that you make in
torch's own sources are not detected, so turn the cache off while you edit them. If several
processes need the same kernel, one of them compiles it, and the others wait for at most
five minutes.

Some kernels are not stored, so each process compiles them: steps on CUDA, kernels that need
the wrapper of Inductor's C++ code, rules of your own whose functions have no digest, and
steps after `torch.compiler.set_stance`.

Before the first compilation for a CPU, each process prints one line on stderr, which says
how long compiling takes and where the result is stored. If a process waits more than 2 s
for a compilation on CUDA, or for another process that compiles, it prints the same line.
Set the environment variable `OPTIMI_FUNC_QUIET=1` to turn the line off.

The graphs of `train_step` and of your own `torch.compile` calls are stored in torch's own
cache (`TORCHINDUCTOR_CACHE_DIR`). The keys of this cache do not contain
`ATEN_CPU_CAPABILITY`. If you run with different values of this variable, use a separate
cache folder for each value.
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
    """Return the function that creates a state, such as `adamw_init`."""
    if name.endswith("_init"):
        return getattr(pure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
