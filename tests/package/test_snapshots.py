# ruff: noqa: E501  Messages, as long as they are.
"""What must not change unseen: each rule's operations, error texts, state layouts.

After a change that is meant, run with EXPECTTEST_ACCEPT=1 and review the diff.
"""

import torch
from expecttest import TestCase
from torch import fx
from traced import trace

import optimi_func
from optimi_func.core.leaf import init_leaf
from optimi_func.core.rule import Rates, Scalars, Storage
from optimi_func.execution.kernels import KernelKey
from optimi_func.execution.scalars import Packed
from optimi_func.execution.tensors import flat_leaf


def operations(name: str, dtype: torch.dtype = torch.float32, t: int = 6, **options) -> str:
    """The traced pipeline, an operation a line, under the names of its inputs."""
    optimizer = getattr(optimi_func, name)(lr=0.1, **options)
    rule = optimizer.rule
    p = torch.ones(2, dtype=dtype)
    leaf = init_leaf(rule, p, Storage())
    coeffs, _ = optimizer.advance(t, rule.running())
    scalars = Scalars(coeffs, Rates(0.1, 0.0, 0.0, 1.0))
    numbers = Packed(scalars)
    dtypes = (dtype, *(x.dtype for x in flat_leaf(leaf)))
    key = KernelKey(rule, numbers.statics, True, True, dtypes, p.device)
    traced = trace(key, numbers.scalars)
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
    def test_sgd(self) -> None:
        self.assertExpectedInline(
            operations("sgd"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(lr, %2)
%4 = mul(decay, p)
%5 = add(%3, %4)
%6 = neg(%5)
%7 = add(p, %6)
return %7""",
        )

    def test_sgd_momentum(self) -> None:
        self.assertExpectedInline(
            operations("sgd", momentum=0.9),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, momentum_buffer)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(lr, %5)
%7 = mul(decay, p)
%8 = add(%6, %7)
%9 = neg(%8)
%10 = add(p, %9)
return %10, %5""",
        )

    def test_sgd_nesterov(self) -> None:
        found = operations("sgd", momentum=0.9, nesterov=True)
        self.assertExpectedInline(
            found,
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, momentum_buffer)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c0, %5)
%7 = add(%2, %6)
%8 = mul(lr, %7)
%9 = mul(decay, p)
%10 = add(%8, %9)
%11 = neg(%10)
%12 = add(p, %11)
return %12, %5""",
        )

    def test_adam(self) -> None:
        self.assertExpectedInline(
            operations("adam"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c2, exp_avg_sq)
%7 = mul(%2, %2)
%8 = mul(c3, %7)
%9 = add(%6, %8)
%10 = mul(c4, %5)
%11 = clamp_min(%9, 1.1754943508222875e-38)
%12 = sqrt(%11)
%13 = mul(c5, %12)
%14 = add(%13, c6)
%15 = div(%10, %14)
%16 = mul(lr, %15)
%17 = mul(decay, p)
%18 = add(%16, %17)
%19 = neg(%18)
%20 = add(p, %19)
return %20, %5, %9""",
        )

    def test_adam_amsgrad(self) -> None:
        self.assertExpectedInline(
            operations("adam", amsgrad=True),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c2, exp_avg_sq)
%7 = mul(%2, %2)
%8 = mul(c3, %7)
%9 = add(%6, %8)
%10 = maximum(max_exp_avg_sq, %9)
%11 = mul(c4, %5)
%12 = clamp_min(%10, 1.1754943508222875e-38)
%13 = sqrt(%12)
%14 = mul(c5, %13)
%15 = add(%14, c6)
%16 = div(%11, %15)
%17 = mul(lr, %16)
%18 = mul(decay, p)
%19 = add(%17, %18)
%20 = neg(%19)
%21 = add(p, %20)
return %21, %5, %9, %10""",
        )

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

    def test_stableadamw(self) -> None:
        self.assertExpectedInline(
            operations("stableadamw"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c2, exp_avg_sq)
%7 = mul(%2, %2)
%8 = mul(c3, %7)
%9 = add(%6, %8)
%10 = mul(c4, %5)
%11 = clamp_min(%9, 1.1754943508222875e-38)
%12 = sqrt(%11)
%13 = mul(c5, %12)
%14 = add(%13, c6)
%15 = div(%10, %14)
%16 = clamp_min(%9, 1.1754943508222875e-38)
%17 = sqrt(%16)
%18 = mul(c5, %17)
%19 = clamp_min(%18, c6)
%20 = div(%2, %19)
%21 = mul(%20, %20)
%22 = mean(%21)
%23 = clamp_min(%22, 1.0)
%24 = sqrt(%23)
%25 = mul(lr, %15)
%26 = mul(decay, p)
%27 = add(%25, %26)
%28 = neg(%27)
%29 = div(%28, %24)
%30 = add(p, %29)
return %30, %5, %9""",
        )

    def test_radam(self) -> None:
        self.assertExpectedInline(
            operations("radam"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c2, exp_avg_sq)
%7 = mul(%2, %2)
%8 = mul(c3, %7)
%9 = add(%6, %8)
%10 = mul(c4, %5)
%11 = clamp_min(%9, 1.1754943508222875e-38)
%12 = sqrt(%11)
%13 = mul(c5, %12)
%14 = add(%13, c6)
%15 = div(c7, %14)
%16 = add(%15, c8)
%17 = mul(%10, %16)
%18 = mul(lr, %17)
%19 = mul(decay, p)
%20 = add(%18, %19)
%21 = neg(%20)
%22 = add(p, %21)
return %22, %5, %9""",
        )

    def test_ranger_at_a_sync(self) -> None:
        self.assertExpectedInline(
            operations("ranger"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c2, exp_avg_sq)
%7 = mul(%2, %2)
%8 = mul(c3, %7)
%9 = add(%6, %8)
%10 = mul(c4, %5)
%11 = clamp_min(%9, 1.1754943508222875e-38)
%12 = sqrt(%11)
%13 = mul(c5, %12)
%14 = add(%13, c6)
%15 = div(c7, %14)
%16 = add(%15, c8)
%17 = mul(%10, %16)
%18 = mul(lr, %17)
%19 = mul(decay, p)
%20 = add(%18, %19)
%21 = neg(%20)
%22 = add(p, %21)
%23 = sub(%22, slow_param)
%24 = mul(c9, %23)
%25 = add(slow_param, %24)
%26 = sub(%25, p)
%27 = sub(%26, %21)
%28 = add(%21, %27)
%29 = add(p, %28)
return %29, %5, %9, %25""",
        )

    def test_ranger_between_syncs(self) -> None:
        self.assertExpectedInline(
            operations("ranger", t=5),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = mul(c2, exp_avg_sq)
%7 = mul(%2, %2)
%8 = mul(c3, %7)
%9 = add(%6, %8)
%10 = mul(c4, %5)
%11 = clamp_min(%9, 1.1754943508222875e-38)
%12 = sqrt(%11)
%13 = mul(c5, %12)
%14 = add(%13, c6)
%15 = div(c7, %14)
%16 = add(%15, c8)
%17 = mul(%10, %16)
%18 = mul(lr, %17)
%19 = mul(decay, p)
%20 = add(%18, %19)
%21 = neg(%20)
%22 = add(p, %21)
return %22, %5, %9, slow_param""",
        )

    def test_adan(self) -> None:
        self.assertExpectedInline(
            operations("adan"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = sub(%2, prev_grad)
%4 = mul(c0, %3)
%5 = mul(c1, exp_avg)
%6 = mul(c2, %2)
%7 = add(%5, %6)
%8 = mul(c3, exp_avg_diff)
%9 = mul(c4, %4)
%10 = add(%8, %9)
%11 = mul(c3, %4)
%12 = add(%2, %11)
%13 = mul(c5, exp_avg_sq)
%14 = mul(%12, %12)
%15 = mul(c6, %14)
%16 = add(%13, %15)
%17 = mul(c7, %7)
%18 = mul(c3, c8)
%19 = mul(%18, %10)
%20 = add(%17, %19)
%21 = clamp_min(%16, 1.1754943508222875e-38)
%22 = sqrt(%21)
%23 = mul(c9, %22)
%24 = add(%23, c10)
%25 = div(%20, %24)
%26 = mul(lr, %25)
%27 = mul(decay, p)
%28 = add(%26, %27)
%29 = neg(%28)
%30 = add(p, %29)
return %30, %7, %10, %16, %2""",
        )

    def test_lion(self) -> None:
        self.assertExpectedInline(
            operations("lion"),
            """\
%0 = mul(grad_scale, g)
%1 = mul(l2, p)
%2 = add(%0, %1)
%3 = mul(c0, exp_avg)
%4 = mul(c1, %2)
%5 = add(%3, %4)
%6 = sign(%5)
%7 = mul(c2, exp_avg)
%8 = mul(c3, %2)
%9 = add(%7, %8)
%10 = mul(lr, %6)
%11 = mul(decay, p)
%12 = add(%10, %11)
%13 = neg(%12)
%14 = add(p, %13)
return %14, %9""",
        )


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
compile: False
maximize: False
capturable: False
state_dtype: None
storage: None
cautious_decay: False
corrected_decay: False
cautious: False
params: [0]
decoupled_weight_decay: True
differentiable: False
fused: None
state[0].step: float32 ()
state[0].exp_avg: bfloat16 (2, 3)
state[0].exp_avg_sq: bfloat16 (2, 3)
state[0].kahan_comp: bfloat16 (2, 3)""",
        )

    def test_sgd(self) -> None:
        found = layout("sgd", torch.float32, momentum=0.9)
        self.assertExpectedInline(
            found,
            """\
param_names: ['w']
lr: 0.1
momentum: 0.9
weight_decay: 0.0
dampening: False
decouple_wd: False
decouple_lr: False
max_lr: None
torch_init: False
kahan_sum: None
foreach: None
triton: None
gradient_release: False
nesterov: False
compile: False
maximize: False
capturable: False
state_dtype: None
storage: None
cautious_decay: False
corrected_decay: False
cautious: False
params: [0]
differentiable: False
fused: None
state[0].step: float32 ()
state[0].momentum_buffer: float32 (2, 3)""",
        )

    def test_ranger(self) -> None:
        found = layout("ranger", torch.bfloat16, state_dtype=torch.float32)
        self.assertExpectedInline(
            found,
            """\
param_names: ['w']
lr: 0.1
betas: (0.9, 0.99)
weight_decay: 0.0
eps: 1e-06
k: 6
alpha: 0.5
decouple_wd: True
decouple_lr: False
max_lr: None
kahan_sum: None
foreach: None
triton: None
gradient_release: False
compile: False
maximize: False
capturable: False
state_dtype: 'torch.float32'
storage: None
cautious_decay: False
corrected_decay: False
cautious: False
params: [0]
state[0].step: float32 ()
state[0].exp_avg: float32 (2, 3)
state[0].exp_avg_sq: float32 (2, 3)
state[0].slow_param: float32 (2, 3)
state[0].kahan_comp: bfloat16 (2, 3)""",
        )

    def test_adan(self) -> None:
        self.assertExpectedInline(
            layout("adan", torch.float16),
            """\
param_names: ['w']
lr: 0.1
betas: (0.98, 0.92, 0.99)
weight_decay: 0.02
eps: 1e-06
decouple_lr: False
max_lr: None
adam_wd: False
kahan_sum: None
foreach: None
triton: None
gradient_release: False
compile: False
maximize: False
capturable: False
state_dtype: None
storage: None
cautious_decay: False
corrected_decay: False
cautious: False
params: [0]
state[0].step: float32 ()
state[0].exp_avg: float16 (2, 3)
state[0].exp_avg_diff: float16 (2, 3)
state[0].exp_avg_sq: float32 (2, 3)
state[0].prev_grad: float16 (2, 3)
state[0].kahan_comp: float16 (2, 3)""",
        )


def message(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


class Messages(TestCase):
    def test_numbers(self) -> None:
        w = torch.ones(2, requires_grad=True)
        calls = [
            lambda: optimi_func.AdamW([w], lr=-1.0),
            lambda: optimi_func.AdamW([w], lr=float("nan")),
            lambda: optimi_func.AdamW([w], lr="0.1"),
            lambda: optimi_func.AdamW([w], lr=0.1, betas=(1.0, 0.9)),
            lambda: optimi_func.AdamW([w], lr=0.1, eps=-1.0),
            lambda: optimi_func.AdamW([w], lr=0.1, weight_decay=-1.0),
            lambda: optimi_func.AdamW([w], lr=0.1, max_lr=-1.0),
            lambda: optimi_func.AdamW([w], lr=0.0, decouple_lr=True),
            lambda: optimi_func.SGD([w], lr=0.1, momentum=1.0),
            lambda: optimi_func.SGD([w], lr=0.1, nesterov=True),
            lambda: optimi_func.Ranger([w], lr=0.1, k=0),
        ]
        self.assertExpectedInline(
            "\n".join(map(message, calls)),
            """\
ValueError: Invalid learning rate: lr=-1.0: allowed is finite, at least 0.0
ValueError: Invalid learning rate: lr=nan: allowed is finite, at least 0.0
TypeError: Invalid lr: lr='0.1': allowed are numbers and tensors of one element
ValueError: Invalid beta1 parameter: betas[0]=1.0: allowed is finite, at least 0.0 and below 1.0
ValueError: Invalid epsilon: eps=-1.0: allowed is finite, at least 0.0
ValueError: Invalid weight decay: weight_decay=-1.0: allowed is finite, at least 0.0
ValueError: Invalid maximum learning rate: max_lr=-1.0: allowed is finite, at least 0.0
ValueError: Invalid maximum learning rate: max_lr=None with lr=0.0: decouple_lr=True needs max_lr, the largest learning rate that will be scheduled, unless lr is a positive float
ValueError: Invalid momentum: momentum=1.0: allowed is finite, at least 0.0 and below 1.0
ValueError: Invalid nesterov: nesterov=True with momentum=0.0 and dampening=False: allowed with a momentum and no dampening
ValueError: Invalid lookahead period: k=0: allowed is finite, at least 1.0""",
        )

    def test_trees(self) -> None:
        params = {"w": torch.ones(2), "b": torch.ones(3)}
        state = optimi_func.adamw_init(params)
        ones = {k: torch.ones_like(v) for k, v in params.items()}
        bad = [
            {"w": ones["w"]},
            {**ones, "b": torch.ones(4)},
            {**ones, "b": ones["b"].half()},
            {**ones, "b": ones["b"].long()},
            {**ones, "b": ones["b"].to_sparse()},
        ]
        calls = [lambda g=g: optimi_func.adamw_step(params, g, state, lr=0.1) for g in bad]
        calls += [
            lambda: optimi_func.lion_step(params, ones, state, lr=0.1),
            lambda: optimi_func.adamw_step(params, ones, state, lr=torch.ones(3)),
            lambda: optimi_func.adamw_init({"w": torch.ones(2, dtype=torch.int64)}),
            lambda: optimi_func.soap(lr=0.1).init(torch.ones(2, dtype=torch.complex64)),
        ]
        self.assertExpectedInline(
            "\n".join(map(message, calls)),
            """\
ValueError: grads and params differ in structure: params['b'] has no counterpart
ValueError: grads['b'] has shape (4,), its parameter (3,)
TypeError: grads['b'] has dtype torch.float16, narrower than its parameter's torch.float32: allowed are that or wider, such as g.to(torch.float32)
TypeError: grads['b'] has dtype torch.int64: allowed are floating ones
TypeError: grads['b'] has layout torch.sparse_coo: allowed is strided. Sparse gradients are for torch.optim.SparseAdam
ValueError: state.leaves['w'] holds ('exp_avg', 'exp_avg_sq'), but the optimizer needs ('exp_avg',): make it with its own init and the same options
ValueError: a hyperparameter of shape (3,) reached the step, which takes numbers and 0-d tensors. Under vmap, keyword arguments are not batched. Pass it positionally, as in vmap(lambda p, g, s, lr: adamw_step(p, g, s, lr=lr))
TypeError: params['w'] has dtype torch.int64: allowed are floating and complex ones
TypeError: params has dtype torch.complex64: soap maps whole matrices of real numbers. Allowed for complex parameters are elementwise rules, such as adamw""",
        )
