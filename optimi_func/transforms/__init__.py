"""Transforms of pure optimizers: clipping, averaging, accumulation and others.

Each transform takes a pure optimizer (a `PureOptimizer`), such as `adamw(lr=...)`, and
returns another pure optimizer. `init(params)` creates a state and `step(params, grads,
state)` takes a step, so you can nest transforms:

    clipped = chain(clip_global_norm(1.0), adamw(lr=schedule))
    apply_if_finite(every_k(clipped, 4))

The state of a transform is a NamedTuple, whose last field is the state of the inner
optimizer. Steps do not branch on the values of tensors, so each step can be compiled into
one graph, vmapped and differentiated.
"""

from optimi_func.core.torch_private import serializable
from optimi_func.transforms.around import EmaState as EmaState
from optimi_func.transforms.around import EveryState as EveryState
from optimi_func.transforms.around import FiniteState as FiniteState
from optimi_func.transforms.around import apply_if_finite as apply_if_finite
from optimi_func.transforms.around import ema as ema
from optimi_func.transforms.around import every_k as every_k
from optimi_func.transforms.ascent import ascent as ascent
from optimi_func.transforms.gradients import ChainState as ChainState
from optimi_func.transforms.gradients import GradientTransform as GradientTransform
from optimi_func.transforms.gradients import NoiseState as NoiseState
from optimi_func.transforms.gradients import add_noise as add_noise
from optimi_func.transforms.gradients import centralize as centralize
from optimi_func.transforms.gradients import chain as chain
from optimi_func.transforms.gradients import clip_global_norm as clip_global_norm
from optimi_func.transforms.gradients import clip_param_norm as clip_param_norm
from optimi_func.transforms.gradients import clip_value as clip_value
from optimi_func.transforms.partition import PartitionState as PartitionState
from optimi_func.transforms.partition import masked as masked
from optimi_func.transforms.partition import partition as partition

for _state in (ChainState, EmaState, EveryState, FiniteState, NoiseState):
    serializable(_state)
