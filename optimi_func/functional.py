"""Optimizers as pure functions over pytrees: (params, grads, state) -> (params, state).

For each rule there are three names. `adamw(lr=...)` binds every number and gives a
`FunctionalOptimizer`; `adamw_init(params)` makes a state; `adamw_step(params, grads, state,
lr=...)` makes a step. Nothing passed in is ever written, what comes out shares no memory
with what went in, and everything composes with torch.compile, vmap, grad and jvp.

A parameter tree is anything torch.utils._pytree flattens into floating tensors. A gradient
tree has its structure; a None in it leaves that parameter and its state alone. Numbers are
floats or 0-d tensors, or callables of the 0-based step (a 0-d tensor in, a number out; in
a graph a 0-d tensor too: see `schedules`); lr and weight_decay may also be prefixes of the
parameter tree, a number a subtree.
"""

from optimi_func._functional import FunctionalOptimizer as FunctionalOptimizer
from optimi_func._functional import Number as Number
from optimi_func._rule import Storage as Storage
from optimi_func._tree import LeafState as LeafState
from optimi_func._tree import TreeState as TreeState
from optimi_func.optimizers.adam import *
from optimi_func.optimizers.adan import *
from optimi_func.optimizers.ademamix import *
from optimi_func.optimizers.adopt import *
from optimi_func.optimizers.lamb import *
from optimi_func.optimizers.lion import *
from optimi_func.optimizers.muon import *
from optimi_func.optimizers.radam import *
from optimi_func.optimizers.ranger import *
from optimi_func.optimizers.schedule_free import *
from optimi_func.optimizers.sgd import *
from optimi_func.optimizers.stableadamw import *
