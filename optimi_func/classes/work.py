"""The records that a step hands on."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from optimi_func.classes.extras import Extras
from optimi_func.core.rule import Microbatch
from optimi_func.state.convert import Entry, Group
from optimi_func.state.names import without_repeats


class Work(NamedTuple):
    """Some parameters of a group, and a gradient for each."""

    group: Group
    params: list[Tensor]
    grads: list[Tensor]
    # Says for each gradient whether it is only a part of the step's gradient, and by which
    # factor it is multiplied. None: all gradients are complete.
    batches: list[Microbatch] | None = None

    def once(self) -> "Work":
        """Return the work in which a parameter that is in the list twice is there once."""
        at = without_repeats(self.params)
        batches = self.batches and [self.batches[i] for i in at]
        params, grads = [self.params[i] for i in at], [self.grads[i] for i in at]
        return Work(self.group, params, grads, batches)


class Request(NamedTuple):
    """The parts of an update that all its groups have in common."""

    write: bool  # False: only the state is updated, and the parameters stay
    ends: bool  # False: step counts stay, because further gradients of the step follow
    extras: Extras
    # An output: the new entries of parameters that had no state. `GroupUpdate` collects
    # them here, and they become the optimizer's state once nothing can fail any more.
    new_entries: dict[Tensor, Entry]
    # Called before the first write, when no check can fail any more.
    begin: Callable[[], None] | None = None
