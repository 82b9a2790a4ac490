"""The optimizers, a file each: the rule, the value, the class. `functional` lists them."""

from optimi_func.classes.base import BaseOptimizer as BaseOptimizer
