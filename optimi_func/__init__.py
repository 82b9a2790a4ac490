"""Optimizers as pure functions, compiled per dtype, with drop-in classes.

`AdamW(model.parameters(), lr=1e-3)` is a torch.optim.Optimizer. `adamw_step(params, grads,
state, lr=1e-3)` is the same update as a pure function over pytrees. `optimi_func.compiled`
runs the same update through one kernel for each dtype.
"""

from typing import TYPE_CHECKING

from torch.optim import LBFGS as LBFGS

from optimi_func import compiled as compiled
from optimi_func import functional as functional
from optimi_func import hooks as hooks
from optimi_func import memory as memory
from optimi_func import optim as optim
from optimi_func import population as population
from optimi_func import rules as rules
from optimi_func import schedules as schedules
from optimi_func import transforms as transforms
from optimi_func.classes.groups import param_groups_by_name as param_groups_by_name
from optimi_func.core.rule import PureOptimizer as PureOptimizer
from optimi_func.core.rule import Storage as Storage
from optimi_func.extra.averages import EMA as EMA
from optimi_func.fitting.implicit import implicit_root as implicit_root
from optimi_func.functional import *
from optimi_func.gradient_release import GradientRelease as GradientRelease
from optimi_func.gradient_release import (
    prepare_for_gradient_release as prepare_for_gradient_release,
)
from optimi_func.gradient_release import remove_gradient_release as remove_gradient_release
from optimi_func.pure.unrolling import Unrolled as Unrolled
from optimi_func.pure.unrolling import detach as detach
from optimi_func.pure.unrolling import unroll as unroll
from optimi_func.utils import clip_grad_norm_ as clip_grad_norm_
from optimi_func.utils import join_modules as join_modules
from optimi_func.utils import param_groups_weight_decay as param_groups_weight_decay
from optimi_func.utils import to_low_precision as to_low_precision

if not TYPE_CHECKING:  # type checkers would find every name
    from optimi_func.core.checks import missing as __getattr__  # noqa: F401

# Names of types in `functional` that are too general for the package.
del Number, PyTree, Scalar, TYPE_CHECKING  # noqa: F821

_INNER = set(
    "classes core execution extra fitting gradient_release optimizers pure state "
    "utils".split()
)
__all__ = sorted(n for n in {*globals()} - _INNER if n[0] != "_")  # pyright: ignore[reportUnsupportedDunderAll]

__version__ = "0.2.0"
