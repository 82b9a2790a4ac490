"""Populations: many models trained at once, each with its own hyperparameters.

A `Population` is a pytree of parameters, optimizer states, hyperparameters and buffers. In
each leaf, the first axis indexes the members. One vmapped step updates all members, and
torch.compile compiles this step into one graph. Between steps, population-based training
selects and copies members with `select` and `clone`.

    members = init(adamw, model, {"lr": lrs, "weight_decay": 1e-2}, n=64)
    losses, grads = loss_and_grad(loss_fn, members, x, y)
    members = step(adamw, members, grads)

If the members have different hyperparameters, pass a factory (`adamw`, not
`adamw(lr=...)`), which is called with the hyperparameters of each member. Options that are
not numbers are the same for all members: `functools.partial(adamw, amsgrad=True)`.
"""

from optimi_func.population.axes import Randomness as Randomness
from optimi_func.population.members import Hyper as Hyper
from optimi_func.population.members import Population as Population
from optimi_func.population.members import clone as clone
from optimi_func.population.members import init as init
from optimi_func.population.members import select as select
from optimi_func.population.stepping import call_module as call_module
from optimi_func.population.stepping import loss_and_grad as loss_and_grad
from optimi_func.population.stepping import step as step
from optimi_func.population.stepping import vmap_step as vmap_step
