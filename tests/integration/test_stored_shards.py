"""Parameters and moments in codes, on shards: the codes of one process, on gloo."""

import warnings
from functools import partial
from itertools import product

from one_process import End, Steps, assert_alike, everything, ways
from shards import EAGER
from stored import BF16, same_bits
from torch import Tensor
from worlds import world

from optimi_func import (
    AdamW,
    Ranger,
    ScheduleFreeAdamW,
)
from optimi_func.core.rule import Storage

EXACT8 = Storage("exact", "8bit")
STORAGES = [None, "compact", EXACT8, Storage("kahan", "8bit"), "exact"]
STORAGES += [Storage("stochastic", "8bit", 3)]
SHAPES = [(130, 64), (2, 4096), (8192,), (129, 64, 32), (5, 7), (3,)]


@world(full=[2])
def test_reset_of_rows_of_parameters_and_of_all() -> None:
    (rows,) = ways("rows")
    for cls, storage in product((AdamW, Ranger, ScheduleFreeAdamW), STORAGES):
        make = partial(cls, lr=0.01, storage=storage, **EAGER)
        steps = Steps(make, SHAPES, BF16)
        ours, theirs = pair = steps.run(rows.place), steps.run(Tensor.clone)

        def compare(ours: End = ours, theirs: End = theirs) -> None:
            assert_alike(everything(ours), everything(theirs))

        # Rows of both processes, single elements of groups, and parameters.
        for at, some in ((0, [0, 100, -1]), (2, [4097]), (5, [2]), (1, None), (4, None)):
            entry = theirs.optimizer.state[theirs.params[at]]
            before = {k: x.clone() for k, x in entry.items()}
            for end in pair:
                end.optimizer.reset(end.params[at], some)
            after = theirs.optimizer.state[theirs.params[at]]
            assert not all(same_bits(after[k], x) for k, x in before.items())
        for last in (False, True):
            compare()
            for end in pair:
                end.optimizer.step()
            compare()
            for end in pair if not last else ():
                end.optimizer.reset()
            assert last or theirs.optimizer.state[theirs.params[0]]["step"] == 0


@world(full=[4])
def test_cut_along_two_dimensions_and_in_the_midst_of_groups() -> None:
    """Cut along two dimensions; and in the midst of groups, where moments stay wide."""
    for shape, name, coded in (
        ((66, 256), "rows and columns", True),
        ((65, 256), "rows of rows", True),
        ((130, 64), "rows and columns", False),
        ((8256,), "rows of rows", False),
    ):
        steps = Steps(partial(AdamW, lr=0.01, storage="compact", **EAGER), [shape], BF16)
        (way,) = ways(name)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            end = steps.run(way.place)
        said = [str(w.message) for w in found if "cut groups" in str(w.message)]
        assert len(said) == (not coded), said
        assert coded or str(shape) in said[0]
        if coded:
            assert_alike(everything(end), everything(steps.alone), about=name)
        assert ("exp_avg_q" if coded else "exp_avg") in end.optimizer.state[end.params[0]]
