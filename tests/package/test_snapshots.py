"""What must not change unseen: each rule's operations and the layouts of states.

After a change that is meant, run with EXPECTTEST_ACCEPT=1 and review the diff.
"""

import pytest
import torch
from cases import ELEMENTWISE
from counted import allowed, usual
from expecttest import TestCase
from kernel_keys import key_of
from torch import fx
from traced import trace

import optimi_func
from optimi_func.core.leaf import init_leaf
from optimi_func.core.packed import Packed
from optimi_func.core.rule import Rates, Scalars, Storage


def operations(name: str, dtype: torch.dtype = torch.float32, t: int = 6, **options) -> str:
    """The traced pipeline, an operation a line, under the names of its inputs."""
    optimizer = getattr(optimi_func, name)(lr=0.1, **options)
    rule = optimizer.rule
    p = torch.ones(2, dtype=dtype)
    leaf = init_leaf(rule, optimizer.init_numbers, p, Storage())
    coeffs, _ = optimizer.advance(t, rule.running())
    scalars = Scalars(coeffs, Rates(0.1, 0.0, 0.0, 1.0))
    numbers = Packed(scalars)
    traced = trace(key_of(rule, numbers, leaf, p), numbers.scalars)
    names = [*scalar_names(scalars), "p", "g", *rule.state._fields, "comp"]
    called: dict[fx.Node, str] = dict(zip(traced.inputs, names))
    lines = []
    for node in traced.calls:
        arguments = [called.get(a, a) for a in node.args]
        called[node] = f"%{len(lines)}"
        op = str(node.target).removeprefix("aten.").partition(".")[0]
        to = [str(v) for k, v in node.kwargs.items() if k == "dtype"]
        text = ", ".join([*map(str, arguments), *to])
        lines.append(f"{called[node]} = {op}({text})")
    results = ", ".join([called[node] for node in traced.outputs])
    return "\n".join([*lines, f"return {results}"])


def scalar_names(scalars) -> list[str]:
    found = []
    for name, value in scalars._asdict().items():
        if hasattr(value, "_fields"):
            found += scalar_names(value)
        elif not isinstance(value, bool | tuple):
            found.append(name)
    return found


class Operations(TestCase):
    def test_adamw_in_bfloat16_with_kahan(self) -> None:
        found = operations("adamw", torch.bfloat16)
        self.assertExpectedInline(
            found,
            """\
%0 = _to_copy(p, torch.float32)
%1 = abs(comp)
%2 = mul(%1, 128.0)
%3 = abs(p)
%4 = clamp_min(%3, 7.888609052210118e-31)
%5 = le(%2, %4)
%6 = scalar_tensor(0.0, torch.bfloat16)
%7 = where(%5, comp, %6)
%8 = _to_copy(%7, torch.float32)
%9 = add(%0, %8)
%10 = _to_copy(exp_avg, torch.float32)
%11 = _to_copy(exp_avg_sq, torch.float32)
%12 = _to_copy(g, torch.float32)
%13 = mul(grad_scale, %12)
%14 = mul(l2, %9)
%15 = add(%13, %14)
%16 = mul(c0, %10)
%17 = mul(c1, %15)
%18 = add(%16, %17)
%19 = mul(c2, %11)
%20 = mul(%15, %15)
%21 = mul(c3, %20)
%22 = add(%19, %21)
%23 = mul(c4, %18)
%24 = clamp_min(%22, 1.1754943508222875e-38)
%25 = sqrt(%24)
%26 = mul(c5, %25)
%27 = add(%26, c6)
%28 = div(%23, %27)
%29 = mul(lr, %28)
%30 = mul(decay, %9)
%31 = add(%29, %30)
%32 = neg(%31)
%33 = add(%32, %8)
%34 = add(%0, %33)
%35 = mul(%34, 7.62939453125e-06)
%36 = mul(%35, 65536.0)
%37 = add(%36, %35)
%38 = sub(%37, %35)
%39 = sub(%37, %38)
%40 = mul(%39, 131072.0)
%41 = _to_copy(%40, torch.bfloat16)
%42 = sub(%40, %0)
%43 = sub(%33, %42)
%44 = _to_copy(%43, torch.bfloat16)
%45 = _to_copy(%18, torch.bfloat16)
%46 = _to_copy(%22, torch.bfloat16)
return %41, %45, %46, %44""",
        )


# How many operations a kernel has, with a momentum of 0.9 for SGD; Ranger's at a sync. Of
# rules that differ in form; all others have at most what `counted.allowed` says.
COUNTS = {"adam": 21, "adamw": 21, "lion": 15, "sgd": 11, "stableadamw": 35, "ranger": 31}
COUNTS |= {"schedule_free_adamw": 26}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operations_of_a_kernel(name: str) -> None:
    count = operations(name, **usual(name).options).count("=")
    if name in COUNTS:
        assert count == COUNTS[name]
    assert count <= allowed(name), "leave out what defaults do not need"


def test_options_add_operations_to_a_kernel_and_other_steps_have_fewer() -> None:
    def more(name: str, **options) -> int:
        return operations(name, **options).count("=") - COUNTS[name]

    assert more("sgd") == -3
    assert more("sgd", momentum=0.9, nesterov=True) == 2
    assert more("adam", amsgrad=True) == 1
    assert more("ranger", t=5) == -7


def layout(name: str, dtype: torch.dtype, **options) -> str:
    """A state_dict with its tensors as dtype and shape."""
    w = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))
    cls = {c.lower(): c for c in dir(optimi_func) if c[0].isupper()}[name]
    optimizer = getattr(optimi_func, cls)([("w", w)], lr=0.1, compile=False, **options)
    w.grad = torch.ones_like(w)
    optimizer.step()
    saved = optimizer.state_dict()
    lines = [f"{k}: {v!r}" for k, v in saved["param_groups"][0].items()]
    for index, entry in saved["state"].items():
        for k, x in entry.items():
            lines.append(f"state[{index}].{k}: {str(x.dtype)[6:]} {tuple(x.shape)}")
    return "\n".join(lines)


class Layouts(TestCase):
    def test_adamw(self) -> None:
        self.assertExpectedInline(
            layout("adamw", torch.bfloat16),
            """\
param_names: ['w']
lr: 0.1
betas: (0.9, 0.99)
weight_decay: 0.01
eps: 1e-06
decouple_lr: False
max_lr: None
kahan_sum: None
foreach: None
triton: None
gradient_release: False
amsgrad: False
mars: None
compile: False
maximize: False
capturable: False
state_dtype: None
storage: None
cautious_decay: False
corrected_decay: False
cautious: False
hooks: ()
params: [0]
decoupled_weight_decay: True
differentiable: False
fused: None
state[0].step: float32 ()
state[0].exp_avg: bfloat16 (2, 3)
state[0].exp_avg_sq: bfloat16 (2, 3)
state[0].kahan_comp: bfloat16 (2, 3)""",
        )

    def test_states_of_others(self) -> None:
        made = {
            "sgd": layout("sgd", torch.float32, momentum=0.9),
            "ranger": layout("ranger", torch.bfloat16, state_dtype=torch.float32),
            "adan": layout("adan", torch.float16),
        }
        lines = [f"{k} {x}" for k, text in made.items() for x in text.splitlines()]
        states = [line for line in lines if " state[" in line or " state_dtype" in line]
        self.assertExpectedInline(
            "\n".join(states),
            """\
sgd state_dtype: None
sgd state[0].step: float32 ()
sgd state[0].momentum_buffer: float32 (2, 3)
ranger state_dtype: 'torch.float32'
ranger state[0].step: float32 ()
ranger state[0].exp_avg: float32 (2, 3)
ranger state[0].exp_avg_sq: float32 (2, 3)
ranger state[0].slow_param: float32 (2, 3)
ranger state[0].kahan_comp: bfloat16 (2, 3)
adan state_dtype: None
adan state[0].step: float32 ()
adan state[0].exp_avg: float16 (2, 3)
adan state[0].exp_avg_diff: float16 (2, 3)
adan state[0].exp_avg_sq: float32 (2, 3)
adan state[0].prev_grad: float16 (2, 3)
adan state[0].kahan_comp: float16 (2, 3)""",
        )
