"""Optimizers as pure functions over pytrees: (params, grads, state) -> (params, state).

Each optimizer has three names. `adamw_init(params)` returns the first state, and
`adamw_step(params, grads, state, lr=...)` returns the parameters and the state after one
step. `adamw(lr=...)` is a `FunctionalOptimizer`: an object with fixed hyperparameters,
whose methods `init` and `step` do the same as these two functions. The functions do not
write to their arguments, and their results share no memory with the arguments. All
functions work with `torch.compile`, `torch.vmap`, `torch.func.grad` and `torch.func.jvp`.

`params` is a pytree: a floating-point or complex tensor, or any nesting of dicts, lists,
tuples and registered classes that contains such tensors. `grads` has the same structure. If
a gradient is None, its parameter and the parameter's state are returned unchanged.

The signatures use these types:

- `Scalar`: a float or a 0-d tensor.
- `Number`: a Scalar or a schedule. A schedule is a function that receives the number of
  steps taken so far, as a 0-d tensor, and returns a Scalar. In a compiled graph, a schedule
  has to return a 0-d tensor (see `schedules`). lr and weight_decay may also be trees that
  contain a number for each part of `params`.
- `PyTree`: a pytree as described above.
"""

from optimi_func.core.rule import PyTree as PyTree
from optimi_func.core.rule import Scalar as Scalar
from optimi_func.core.rule import Storage as Storage
from optimi_func.core.tree import LeafState as LeafState
from optimi_func.core.tree import TreeState as TreeState
from optimi_func.fitting.lbfgs import lbfgs as lbfgs
from optimi_func.optimizers.adadelta import *
from optimi_func.optimizers.adafactor import *
from optimi_func.optimizers.adagrad import *
from optimi_func.optimizers.adam import *
from optimi_func.optimizers.adamax import *
from optimi_func.optimizers.adan import *
from optimi_func.optimizers.ademamix import *
from optimi_func.optimizers.adopt import *
from optimi_func.optimizers.asgd import *
from optimi_func.optimizers.kron import *
from optimi_func.optimizers.lamb import *
from optimi_func.optimizers.lion import *
from optimi_func.optimizers.mixed import Mixed as Mixed
from optimi_func.optimizers.muon import *
from optimi_func.optimizers.muonadamw import MuonAdamW as MuonAdamW
from optimi_func.optimizers.muonadamw import NorMuonAdamW as NorMuonAdamW
from optimi_func.optimizers.muonadamw import hidden_matrices as hidden_matrices
from optimi_func.optimizers.nadam import *
from optimi_func.optimizers.normuon import *
from optimi_func.optimizers.prodigy import *
from optimi_func.optimizers.radam import *
from optimi_func.optimizers.ranger import *
from optimi_func.optimizers.rmsprop import *
from optimi_func.optimizers.rprop import *
from optimi_func.optimizers.schedule_free import *
from optimi_func.optimizers.scion import *
from optimi_func.optimizers.sgd import *
from optimi_func.optimizers.shampoo import *
from optimi_func.optimizers.soap import *
from optimi_func.optimizers.stableadamw import *
from optimi_func.pure.functional import FunctionalOptimizer as FunctionalOptimizer
from optimi_func.pure.functional import Number as Number
