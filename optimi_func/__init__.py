"""Optimizers as pure functions, compiled per dtype, with drop-in classes.

`AdamW(model.parameters(), lr=1e-3)` is a torch.optim.Optimizer; `adamw_step(params, grads,
state, lr=1e-3)` is the same update as a pure function over pytrees; `optimi_func.compiled`
runs it through one kernel a dtype.
"""

from optimi_func import compiled as compiled
from optimi_func import functional as functional
from optimi_func import memory as memory
from optimi_func import population as population
from optimi_func import schedules as schedules
from optimi_func import transforms as transforms
from optimi_func._functional import FunctionalOptimizer as FunctionalOptimizer
from optimi_func._rule import PureOptimizer as PureOptimizer
from optimi_func._rule import Storage as Storage
from optimi_func._tree import LeafState as LeafState
from optimi_func._tree import TreeState as TreeState
from optimi_func.gradient_release import GradientRelease as GradientRelease
from optimi_func.gradient_release import (
    prepare_for_gradient_release as prepare_for_gradient_release,
)
from optimi_func.gradient_release import remove_gradient_release as remove_gradient_release
from optimi_func.optimizers import ADOPT as ADOPT
from optimi_func.optimizers import LAMB as LAMB
from optimi_func.optimizers import SGD as SGD
from optimi_func.optimizers import Adam as Adam
from optimi_func.optimizers import AdamW as AdamW
from optimi_func.optimizers import Adan as Adan
from optimi_func.optimizers import AdEMAMix as AdEMAMix
from optimi_func.optimizers import Lion as Lion
from optimi_func.optimizers import Mixed as Mixed
from optimi_func.optimizers import Muon as Muon
from optimi_func.optimizers import MuonAdamW as MuonAdamW
from optimi_func.optimizers import RAdam as RAdam
from optimi_func.optimizers import Ranger as Ranger
from optimi_func.optimizers import ScheduleFreeAdamW as ScheduleFreeAdamW
from optimi_func.optimizers import ScheduleFreeRAdam as ScheduleFreeRAdam
from optimi_func.optimizers import ScheduleFreeSGD as ScheduleFreeSGD
from optimi_func.optimizers import StableAdamW as StableAdamW
from optimi_func.optimizers import hidden_matrices as hidden_matrices
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
from optimi_func.unrolling import Unrolled as Unrolled
from optimi_func.unrolling import detach as detach
from optimi_func.unrolling import unroll as unroll
from optimi_func.utils import param_groups_weight_decay as param_groups_weight_decay
from optimi_func.utils import to_low_precision as to_low_precision

__version__ = "0.2.0"
