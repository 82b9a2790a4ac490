"""The optimizers, a file each: the rule, the pure optimizer as a value, the class.

`optimi_func.functional` lists them.
"""

from optimi_func.classes.base import BaseOptimizer as BaseOptimizer
