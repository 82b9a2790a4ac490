"""What a class body may say, what it costs, and what is said of mistakes in it."""

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from optimi_func.rules import Optimizer

# Imports

FIRST = """
import sys
from typing import NamedTuple
import torch
from torch import Tensor
from optimi_func.rules import Optimizer, SecondMoment

class SignSGD(Optimizer):
    momentum: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor
        square: SecondMoment

    def direction(self, g, s):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return m.sign(), self.State(m, s.square)

w = torch.ones(2, requires_grad=True)
SignSGD([w], lr=0.1, compile=False).step((3 * w).sum().backward)
assert w[0] < 1.0
print({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules))
"""


def test_the_first_rule_imports_no_compiler() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FIRST], check=True, capture_output=True, text=True
    )
    assert found.stdout == "set()\n"


# State


class One(NamedTuple):
    m: Tensor


def test_an_error_within_a_state_property_is_told() -> None:
    def state(self: Any) -> Any:
        return self.missing

    body: dict[str, Any] = {
        "direction": lambda self, g, s: (g, s),
        "State": property(state),
    }
    text = r"Wrong\.State raises AttributeError: 'Wrong' object has no attribute 'missing'"
    with pytest.raises(TypeError, match=text):
        type("Wrong", (Optimizer,), body)
