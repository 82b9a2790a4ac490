"""The seed of everything that tests draw at random.

The gate has a constant one, so that two runs of a commit compare the same numbers, and a
failure is the change's. Each night has another (`--seed`), and so looks for more.
"""

import hashlib
import random

import hypothesis
import numpy as np
import torch

GATE = "gate"
PROFILE = "optimi_func"  # of hypothesis
# The option --seed, which conftest.py sets before any test file is imported.
text = GATE


def place(name: str) -> str:
    """Return a key that sorts names at random, differently for each seed."""
    return hashlib.sha256(f"{text} {name}".encode()).hexdigest()


def number() -> int:
    """Return the seed of generators, which numpy limits to 32 bits."""
    return 0 if text == GATE else int(place("number")[:8], 16)


def plant() -> None:
    """Seed what draws numbers without a generator of its own."""
    random.seed(number())
    np.random.seed(number())
    torch.manual_seed(number())


def load_profile() -> None:
    """Choose how hypothesis draws: in the gate, examples depend on the test alone.

    Neither failures of an earlier run nor the time that an example takes may decide.
    torch.testing loads a profile of its own when it is imported, so this is called again
    before each test file is imported.
    """
    hypothesis.settings.register_profile(
        PROFILE,
        derandomize=text == GATE,
        max_examples=50 if text == GATE else 200,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile(PROFILE)
