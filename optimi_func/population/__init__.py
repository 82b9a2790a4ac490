"""Populations: many models trained at once, each with numbers of its own.

A `Population` is a pytree whose every leaf has the members along its first axis: their
parameters, their optimizers' states, their hyperparameters and their buffers. One vmapped
step updates all of them, torch.compile makes it one graph, and what population-based
training does between steps is indexing: `select`, `clone`, `perturb`.

    members = init(adamw, model, {"lr": lrs, "weight_decay": 1e-2}, n=64)
    losses, grads = loss_and_grad(loss_fn, members, x, y)
    members = step(adamw, members, grads)

An optimizer is given as its factory (`adamw`, not `adamw(lr=...)`) wherever members have
numbers of their own, because vmap batches no keyword arguments: the numbers travel as a
pytree beside params and state, and each member binds its own. What is no number is the same
for all and part of the factory: `functools.partial(adamw, amsgrad=True)`.
"""

from optimi_func.population.axes import Randomness as Randomness
from optimi_func.population.evolution import clone as clone
from optimi_func.population.evolution import perturb as perturb
from optimi_func.population.evolution import select as select
from optimi_func.population.members import Hyper as Hyper
from optimi_func.population.members import Population as Population
from optimi_func.population.members import init as init
from optimi_func.population.members import stack as stack
from optimi_func.population.members import state_dicts as state_dicts
from optimi_func.population.members import unstack as unstack
from optimi_func.population.stepping import call_module as call_module
from optimi_func.population.stepping import evaluate as evaluate
from optimi_func.population.stepping import loss_and_grad as loss_and_grad
from optimi_func.population.stepping import step as step
from optimi_func.population.stepping import vmap_step as vmap_step
