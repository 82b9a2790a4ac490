"""What the classes refuse: arguments, parameters, gradients, groups and state."""

import copy
from fractions import Fraction

import pytest
import torch
from refusals import Scene, refuses
from tiers import row
from torch import nn

import optimi_func
from optimi_func import AdamW, adamw_init

EAGER = {"compile": False}


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(9000)), nn.Parameter(torch.ones(3))]


CALLS = {
    "AdamW(nn.Linear(2, 1))": r"TypeError: module: pass model\.named_param.*, or par",
    "Mixed(nn.Linear(2, 1), ('*', adamw()))": "TypeError: is a module",
    "memory.plan(nn.Linear(2, 1), AdamW([w]), '1MB')": "TypeError: pass the class",
    "AdamW([w], weigth_decay=0.1)": (
        "TypeError: AdamW has no argument 'weigth_decay': did you mean 'weight_decay'"
    ),
    "Lion([w], lr=0.1, zeal=1)": "TypeError: Lion has no argument 'zeal': allowed ar",
    "Lion([w])": r"TypeError: missing a required argument: 'lr' of Lion\(params, lr, b",
    "AdamW(lr=0.1)": r"TypeError: missing a required argument: 'params' of AdamW\(",
    "adamw(lr=0.1, bata=0.1)": "TypeError: adamw has no argument 'bata': .* 'betas'",
    "adamw(0.1)": r"TypeError: too many positional.* of adamw\(\*, lr=0\.001, wei",
    "adamw_step(tree, tree, state, 0.1)": (
        r"TypeError: too many positional arguments of adamw\(\*, lr="
    ),
    "lion_step(tree, tree, lion_init(tree))": (
        r"TypeError: missing a required (keyword-only )?argument: 'lr' of lion\(\*, lr"
    ),
    "compiled.adamw_step(tree, tree, state, lr=1, ep=1)": (
        "TypeError: adamw has no argument 'ep': did you mean 'eps'"
    ),
    "Mixed(nn.Linear(2, 2), storag='exact')": "TypeError: has no argument 'storag': did",
    "MuonAdamW(nn.Linear(2, 2), storag='exact')": (
        "TypeError: has no argument 'storag': did you mean"
    ),
    "AdamW([w], lr='fast')": "TypeError: Invalid lr: lr='fast': allowed are numbers and",
    "AdamW([w], lr=lambda t: 0.1)": "TypeError: Invalid lr: lr=<function.*: allowed are n",
    "AdamW([w], betas=0.9)": r"betas=0\.9: allowed are 2 numbers",
    "AdamW([w], betas='ab')": "TypeError: betas='ab': allowed are numbers",
    "AdamW([w], betas=(0.9,))": r"betas=\(0.9,\): allowed are 2",
    "AdamW([w], lr=10**400)": "lr=1",
    "AdamW([w], state_dtype=torch.int8)": "TypeError: Invalid state_dtype",
    "AdamW([w], state_dtype='single9')": "TypeError: state_dtype=single9",
    "AdamW([w], compile='max')": "TypeError: Invalid compile: compile='max'",
    "AdamW([w], foreach=True, compile=True)": "choose one",
    "AdamW([w], fused=True, compile=False)": r"compile=False and .* fused=True\) ",
    "AdamW([w], fused=True, foreach=True)": r"foreach=True and .* fused=True\)",
    "AdamW([{'params': [w], 'fused': True, 'foreach': True}])": "choose one",
    "AdamW([w], differentiable=True)": "differentiable=True.*pure functions",
    "AdamW([w], triton=True, compile=False)": "choose one",
    "AdamW([w], lr=0.0, decouple_lr=True)": (
        "max_lr=None with lr=0.0: .* the largest learning rate that will be"
    ),
    "AdamW([])": "empty parameter list",
    "AdamW([('w', w.detach().to(torch.float8_e5m2).requires_grad_())])": (
        r"TypeError: params\['w'\] has dtype torch\.float8_e5m2.* 16 bits or more"
    ),
    "AdamW([('w', torch.empty(2, dtype=torch.complex32, requires_grad=True))])": (
        r"TypeError: params\['w'\] has dtype torch\.complex32"
    ),
    "AdamW([w], decoupled_weight_decay=False)": (
        "decoupled_weight_decay=False .* decouple_wd, which is True here"
    ),
    "AdamW([{'params': [w], 'decoupled_weight_decay': False}])": (
        "decoupled_weight_decay=False .* decouple_wd, which is True here"
    ),
    "Adam([w], decoupled_weight_decay=True, decouple_wd=False)": (
        "decoupled_weight_decay=True .*, which is False here: allowed is False"
    ),
    "Mixed([{'params': named, 'decoupled_weight_decay': True}], ('*', adam()))": (
        "decoupled_weight_decay=True .* which is False here"
    ),
    "optimi_func.Adamww": "AttributeError: has no attribute 'Adamww'$",
    "optimi_func.Rmsprop": "AttributeError: 'Rmsprop': did you mean 'RMSprop'",
    "from optimi_func import Adamw": "ImportError: 'Adamw': did you mean 'AdamW'",
    "from optimi_func import AdamWW": "ImportError: cannot import name 'AdamWW'",
    "optimi_func.lr_scheduler": "AttributeError: use torch.optim.lr_scheduler$",
    "from optimi_func import SparseAdam": (
        "ImportError: ^module 'optimi_func' has no attribute 'SparseAdam': "
        "use torch.optim.SparseAdam$"
    ),
    "from optimi_func import Optimizer": (
        "ImportError: use torch.optim.Optimizer, or for your own "
        "optimi_func.rules.Optimizer$"
    ),
    "compiled.adamw_stp": r"AttributeError: optimi_func\.compiled.* 'adamw_stp'",
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@refuses(CALLS)
def test_calls() -> Scene:
    tree = {"w": torch.ones(2)}
    return {
        "w": weights()[0],
        "named": [("w", weights()[0])],
        "tree": tree,
        "state": adamw_init(tree),
        "compiled": optimi_func.compiled,
        "optimi_func": optimi_func,
    }


# What is found wrong by a step, a loaded state or a late group, also of the second group.
STEPS = {
    "q.grad = torch.ones(3).to_sparse(); optimizer.step()": (
        r"TypeError: grads\['q'\] has layout torch.sparse_coo"
    ),
    "group['lr'] = -1.0; optimizer.step()": "Invalid learning rate",
    "group['lr'] = lambda t: 0.1; optimizer.step()": (
        r"TypeError: Invalid lr: lr=.*torch.optim.lr_scheduler"
    ),
    "group['lr'] = 'fast'; optimizer.step()": "TypeError: in the pure API schedules",
    "q.data, q.grad = torch.ones(5), torch.ones(5); optimizer.step()": (
        r"state\['q'\]\['exp_avg'\] has shape \(3,\)"
    ),
    "entry['exp_avg'] = torch.zeros(1).expand(3); optimizer.step()": (
        r"state\['q'\]\['exp_avg'\] is expanded"
    ),
    "q.data = torch.ones(1).expand(3); optimizer.step()": "is expanded",
    "q.requires_grad_(False).data = torch.ones(3, dtype=torch.uint8); "
    "q.grad = torch.ones(3, dtype=torch.uint8); optimizer.step()": (
        r"TypeError: \['q'\] has dtype torch\.uint8: allowed are fl"
    ),
    "optimizer.add_param_group({'params': [('n', new)], 'lr': -1.0})": (
        "Invalid learning rate: lr=-1"
    ),
    "optimizer.step(lambda: 0.0, param=p)": "not both",
    "optimizer.step(param=p)": "gradient_release=True",
}
NUMBERS = {"10**400": "ValueError", "Fraction(1, 10)": "TypeError"}
NUMBERS |= {"torch.ones(2)": "ValueError", "torch.ones(0)": "ValueError"}
for name in ("lr", "weight_decay", "eps"):
    for number, kind in NUMBERS.items():
        STEPS[f"group[{name!r}] = {number}; optimizer.step()"] = f"{kind}: {name}="
COUNT = r"state\['q'\]\['step'\]"
# What somebody writes into an entry between two steps, or has in a file.
for number, said in {
    "torch.tensor(-1.0)": f"{COUNT} is -1.*allowed is at least 0, and fin",
    "torch.tensor(math.inf)": f"{COUNT} is inf: allowed is",
    "torch.tensor(math.nan)": f"{COUNT} is nan: allowed is",
    "torch.zeros(2)": rf"{COUNT} is a tensor of shape \(2,\).*one elem",
    "torch.tensor(True)": f"{COUNT} is a tensor of .* torch.bool",
    "None": f"TypeError: {COUNT}=None: allowed is a t",
    "3": f"TypeError: {COUNT}=3: allowed is a t",
}.items():
    STEPS[f"entry['step'] = {number}; optimizer.step()"] = said
STEPS["entry['exp_avg'] = torch.zeros(3).long(); optimizer.step()"] = (
    r"state\['q'\]\['exp_avg'\] has dtype torch.int64.*floating"
)
STEPS["entry['exp_avg_sq'] = torch.zeros(3).bool(); optimizer.step()"] = (
    r"state\['q'\]\['exp_avg_sq'\] has dtype torch.bool"
)


for number in ("-1.0", "inf", "nan"):
    load = f"saved['state'][1]['step'] = torch.tensor({number}); load(saved)"
    STEPS[load] = f"{COUNT} is {number}"
WAYS = [EAGER, {"foreach": True}, {"compile": False, "capturable": True}]


COMPILED = row({"compile": True}, id="compiled", tier="kernels")


@pytest.mark.parametrize("how", [*WAYS, COMPILED], ids=str)
@refuses(STEPS)
def test_steps(how: dict[str, bool]) -> Scene:
    p, q = weights()
    groups = [{"params": [("p", p)]}, {"params": [("q", q)]}]
    optimizer = AdamW(groups, lr=0.1, **how)
    for x in (p, q):
        x.grad = torch.ones_like(x)
    optimizer.step()
    entry, group = optimizer.state[q], optimizer.param_groups[1]
    saved, new = copy.deepcopy(optimizer.state_dict()), weights()[0]
    load = optimizer.load_state_dict
    return locals() | {"Fraction": Fraction}
