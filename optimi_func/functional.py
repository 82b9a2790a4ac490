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
from optimi_func.optimizers.adam import adam as adam
from optimi_func.optimizers.adam import adam_init as adam_init
from optimi_func.optimizers.adam import adam_step as adam_step
from optimi_func.optimizers.adam import adamw as adamw
from optimi_func.optimizers.adam import adamw_init as adamw_init
from optimi_func.optimizers.adam import adamw_step as adamw_step
from optimi_func.optimizers.adan import adan as adan
from optimi_func.optimizers.adan import adan_init as adan_init
from optimi_func.optimizers.adan import adan_step as adan_step
from optimi_func.optimizers.ademamix import ademamix as ademamix
from optimi_func.optimizers.ademamix import ademamix_init as ademamix_init
from optimi_func.optimizers.ademamix import ademamix_step as ademamix_step
from optimi_func.optimizers.adopt import adopt as adopt
from optimi_func.optimizers.adopt import adopt_init as adopt_init
from optimi_func.optimizers.adopt import adopt_step as adopt_step
from optimi_func.optimizers.lamb import lamb as lamb
from optimi_func.optimizers.lamb import lamb_init as lamb_init
from optimi_func.optimizers.lamb import lamb_step as lamb_step
from optimi_func.optimizers.lion import lion as lion
from optimi_func.optimizers.lion import lion_init as lion_init
from optimi_func.optimizers.lion import lion_step as lion_step
from optimi_func.optimizers.muon import muon as muon
from optimi_func.optimizers.muon import muon_init as muon_init
from optimi_func.optimizers.muon import muon_step as muon_step
from optimi_func.optimizers.radam import radam as radam
from optimi_func.optimizers.radam import radam_init as radam_init
from optimi_func.optimizers.radam import radam_step as radam_step
from optimi_func.optimizers.ranger import ranger as ranger
from optimi_func.optimizers.ranger import ranger_init as ranger_init
from optimi_func.optimizers.ranger import ranger_step as ranger_step
from optimi_func.optimizers.schedule_free_adamw import (
    schedule_free_adamw as schedule_free_adamw,
)
from optimi_func.optimizers.schedule_free_adamw import (
    schedule_free_adamw_init as schedule_free_adamw_init,
)
from optimi_func.optimizers.schedule_free_adamw import (
    schedule_free_adamw_step as schedule_free_adamw_step,
)
from optimi_func.optimizers.schedule_free_radam import (
    schedule_free_radam as schedule_free_radam,
)
from optimi_func.optimizers.schedule_free_radam import (
    schedule_free_radam_init as schedule_free_radam_init,
)
from optimi_func.optimizers.schedule_free_radam import (
    schedule_free_radam_step as schedule_free_radam_step,
)
from optimi_func.optimizers.schedule_free_sgd import schedule_free_sgd as schedule_free_sgd
from optimi_func.optimizers.schedule_free_sgd import (
    schedule_free_sgd_init as schedule_free_sgd_init,
)
from optimi_func.optimizers.schedule_free_sgd import (
    schedule_free_sgd_step as schedule_free_sgd_step,
)
from optimi_func.optimizers.sgd import sgd as sgd
from optimi_func.optimizers.sgd import sgd_init as sgd_init
from optimi_func.optimizers.sgd import sgd_step as sgd_step
from optimi_func.optimizers.stableadamw import stableadamw as stableadamw
from optimi_func.optimizers.stableadamw import stableadamw_init as stableadamw_init
from optimi_func.optimizers.stableadamw import stableadamw_step as stableadamw_step
