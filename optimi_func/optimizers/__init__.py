"""The optimizers, a file each: the rule, the pure optimizer as a value, the class."""

from optimi_func.classes.base import BaseOptimizer as BaseOptimizer
from optimi_func.optimizers.adafactor import Adafactor as Adafactor
from optimi_func.optimizers.adam import Adam as Adam
from optimi_func.optimizers.adam import AdamW as AdamW
from optimi_func.optimizers.adan import Adan as Adan
from optimi_func.optimizers.ademamix import AdEMAMix as AdEMAMix
from optimi_func.optimizers.adopt import ADOPT as ADOPT
from optimi_func.optimizers.hidden import hidden_matrices as hidden_matrices
from optimi_func.optimizers.lamb import LAMB as LAMB
from optimi_func.optimizers.lbfgs import LBFGS as LBFGS
from optimi_func.optimizers.lion import Lion as Lion
from optimi_func.optimizers.mixed import Mixed as Mixed
from optimi_func.optimizers.muon import Muon as Muon
from optimi_func.optimizers.muonadamw import MuonAdamW as MuonAdamW
from optimi_func.optimizers.muonadamw import NorMuonAdamW as NorMuonAdamW
from optimi_func.optimizers.normuon import NorMuon as NorMuon
from optimi_func.optimizers.prodigy import Prodigy as Prodigy
from optimi_func.optimizers.radam import RAdam as RAdam
from optimi_func.optimizers.ranger import Ranger as Ranger
from optimi_func.optimizers.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
from optimi_func.optimizers.schedule_free import ScheduleFreeRAdam as ScheduleFreeRAdam
from optimi_func.optimizers.schedule_free import ScheduleFreeSGD as ScheduleFreeSGD
from optimi_func.optimizers.sgd import SGD as SGD
from optimi_func.optimizers.soap import SOAP as SOAP
from optimi_func.optimizers.stableadamw import StableAdamW as StableAdamW
