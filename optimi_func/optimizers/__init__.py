"""The rules as torch.optim.Optimizer classes."""

from optimi_func.optimizers.base import SGD as SGD
from optimi_func.optimizers.base import Adam as Adam
from optimi_func.optimizers.base import AdamW as AdamW
from optimi_func.optimizers.base import Adan as Adan
from optimi_func.optimizers.base import BaseOptimizer as BaseOptimizer
from optimi_func.optimizers.base import Lion as Lion
from optimi_func.optimizers.base import RAdam as RAdam
from optimi_func.optimizers.base import Ranger as Ranger
from optimi_func.optimizers.base import StableAdamW as StableAdamW
