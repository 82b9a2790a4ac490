"""States that do not fit, and calls about states, are refused before any write."""

import copy
from typing import Any

import torch
from cases import CLASSES
from refusals import Scene, refuses
from torch import nn

from optimi_func import AdamW, Lion, Mixed, MuonAdamW, Storage, lion

EAGER: dict[str, Any] = {"compile": False}


def started(cls: Any, params: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return an optimizer after two steps, and a copy of its state."""
    optimizer = cls(params, lr=0.05, **EAGER, **options)
    for i in range(2):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 1.0 + i)
        optimizer.step()
    return optimizer, copy.deepcopy(optimizer.state_dict())


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


NOT_LISTS = {
    "params": ("None", "'abcd'", "[torch.tensor(i) for i in range(4)]", "torch.arange(4)"),
    "param_names": ("None", "'abcd'", "[0, 1, 2, 3]", "b'abcd'"),
}
NOT_NUMBERS = ("[]", "()", "[[0.1]]", "(0.1,)", "{'a': 0.1}", "{0.1}")
NOT_NUMBERS += ("torch.tensor([0.1]).to_sparse()", "'0.1'")
OF_ANOTHER = "are another rule's"
# What is written into a saved state of AdamW, of its group or of the entry of 1.weight.
WRITTEN = {
    "entry['step'] -= 9": "'1.weight'.*allowed is at least 0",
    "entry['step'] = -3": r"\['step'\] is -3\.0: allowed is at least",
    "entry['step'] = None": r"the optimizer needs .*'step'\]",
    "entry['exp_avg'] = entry['exp_avg'][:1]": "'1.weight'.*has shape",
    "entry['exp_avg'] = entry['exp_avg'].reshape(2, -1)": "'1.weight'.*has shape",
    "entry['exp_avg'] = entry['exp_avg'].int()": "'1.weight'.*dtype torch.int32",
    "entry['exp_avg'] = entry['exp_avg'].to_sparse()": "'1.weight'.* is .*allowed",
    "entry['exp_avg'] = 'x'": "TypeError: '1.weight'.*='x': allowed is a tensor",
    "entry['exp_avg_sq'] = None": "'1.weight'.*the optimizer needs",
    "del entry['exp_avg']": r"state\['1.weight'\] holds",
    "entry['square_avg'] = torch.zeros(4, 4)": f"'1.weight'.*{OF_ANOTHER}",
    "entry['mu'] = torch.zeros(())": f"'1.weight'.*{OF_ANOTHER}",
    "saved['state'][0] = 1": r"state\['0.weight'\] is 1: allowed is a dict",
    "del saved['state']": "state_dict holds",
    "saved['state'] = None": "an optimizer's holds 'state' and",
    "saved['param_groups'] = None": "an optimizer's holds 'state' and",
    "del group['params']": "state_dict holds",
    "group['lr'] = -1.0": "learning rate",
    "group['betas'] = (0.1, 0.2, 0.3)": "betas",
    **{
        f"group[{key!r}] = {x}": rf"TypeError: param_groups\[0\]\['{key}'\] is .*: allo"
        for key, values in NOT_LISTS.items()
        for x in values
    },
}
LOADS = {f"{change}; load(saved)": text for change, text in WRITTEN.items()} | {
    f"load({given})": "TypeError: (?s)state_dict=.*: allowed is a dict"
    for given in ("None", "'run.pt'", "3", "[1, 2]", "model")
}
LOADS |= {
    "unnamed['param_groups'].clear(); plain.load_state_dict(unnamed)": (
        "different number of parameter groups: it has 0"
    ),
    "unnamed['param_groups'][0]['params'].pop(); plain.load_state_dict(unnamed)": (
        "has 5 parameters"
    ),
}
LOADS["mixed.load_state_dict('run.pt')"] = "TypeError: state_dict=.*: allowed is a dict"
for _rule, _options in {
    "adamw": ("lr", "weight_decay", "eps"),
    "prodigy": ("lr", "weight_decay", "eps", "d_coef"),
}.items():
    for _key in _options:
        for _x in NOT_NUMBERS:
            _call = f"of_{_rule}['param_groups'][0][{_key!r}] = {_x}; "
            LOADS[f"{_call}{_rule}.load_state_dict(of_{_rule})"] = (
                f"TypeError|ValueError: (?s){_key}=.*allowed are numbers"
            )
for _rule, _key, _x in (
    *[("prodigy", key, "{}") for key in ("share_d", "use_bias_correction", "betas")],
    *[
        ("muon", x, "torch.ones(2)")
        for x in ("ns_steps", "split", "adjust_lr_fn", "ns_dtype")
    ],
):
    _call = f"of_{_rule}['param_groups'][0][{_key!r}] = {_x}; "
    LOADS[f"{_call}{_rule}.load_state_dict(of_{_rule})"] = f"TypeError|ValueError: {_key}="
for _key in ("step", "d", "exp_avg"):
    _call = (
        f"entry = of_prodigy['state'][0]; entry[{_key!r}] = entry[{_key!r}].to_sparse(); "
    )
    LOADS[f"{_call}prodigy.load_state_dict(of_prodigy)"] = (
        rf"state\[0\]\['{_key}'\] is .*allowed"
    )


@refuses(LOADS)
def test_states_that_do_not_fit() -> Scene:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])  # entries alike
    adamw, of_adamw = started(AdamW, model.named_parameters())
    plain, unnamed = started(AdamW, model.parameters())
    prodigy, of_prodigy = started(CLASSES["prodigy"], [torch.ones(3, requires_grad=True)])
    muon, of_muon = started(CLASSES["muon"], [torch.ones(3, 2, requires_grad=True)])
    mixed = Mixed(model.named_parameters(), ("*", lion(lr=0.1)), **EAGER)
    saved, load = copy.deepcopy(of_adamw), adamw.load_state_dict
    entry, (group,) = saved["state"][2], saved["param_groups"]
    return locals()


BAD_WEIGHTS = (
    "torch.ones(6, 4).to_sparse()",
    "torch.ones(6, 4, device='meta')",
    "'x'",
    "None",
)
NONE = "none of the model's parameters"
FORMS = {
    # The pure form, and back.
    "unnamed.functional()": "have no names",
    "grouped.functional()": "differ in hyper",
    "late.functional()": "one step count",
    "adamw.load_functional(of(leaves={**leaves, 'x': leaves['0.bias']}))": (
        "'x' is no parameter"
    ),
    "adamw.load_functional(of(leaves={**leaves, '1.bias': leaves['0.bias']}))": (
        r"leaves\['1.bias'\]"
    ),
    "adamw.load_functional(state, {**params, '1.bias': params['0.bias']})": (
        r"params\['1.bias'\] has shape"
    ),
    "adamw.load_functional(lion_init(params))": "the optimizer needs",
    # Weights in float32.
    "adamw.master_state_dict(network())": NONE,
    "adamw.load_master_state_dict(network(), masters)": NONE,
    "adamw.load_master_state_dict(masters, model)": (
        r"TypeError: model=a dict: allowed is a torch\.nn"
    ),
    "adamw.load_master_state_dict(model, None)": (
        "TypeError: state_dict=None: allowed is a dict by name"
    ),
    "adamw.load_master_state_dict(model, {**masters, 'x': torch.ones(4)})": (
        r"^state_dict: no parameters \['x'\]$"
    ),
    "masters['x'] = masters.pop('1.bias'); adamw.load_master_state_dict(model, masters)": (
        r"nothing for \['1.bias'\], and no parameters \['x'\]$"
    ),
    "adamw.load_master_state_dict(model, {**masters, '1.bias': torch.ones(3)})": (
        r"'1.bias'\] has shape \(3,\).*\(4,\)"
    ),
    # Other rules and options.
    "lion.load_state_dict(uncoded.state_dict())": rf"\['exp_avg_sq'\] {OF_ANOTHER}",
    "lion.load_state_dict(coded.state_dict())": rf"\['exp_avg_sq'\] {OF_ANOTHER}",
    "unnamed.load_fitting(adamw.state_dict())": "this optimizer's parameters have no names",
    "fitting.load_fitting(theirs.state_dict())": (
        "no 'param_names', by which entries are found"
    ),
    "free.load_fitting(adamw.state_dict())": "RuntimeError: load_fitting",
    "free.reset()": r"RuntimeError: reset\(\) in eval mode",
    # Parts that begin anew.
    "adamw.reset(other)": r"of shape \(3,\) is in none",
    "adamw.reset([w, other])": "in none of the groups",
    "adamw.reset(['w'])": r"TypeError: reset\(params=...\) got 'w'",
    "adamw.reset(rows=[0])": "without params",
    "adamw.reset(w, rows=[50])": r"rows=\[50\].* \(6, 4\)",
    "adamw.reset(w, rows=[0.5])": "allowed are indices",
    "adamw.reset(w, rows=[True])": "or a bool for each",
    "adamw.reset(w, rows={1})": r"rows=\{1\}.*are indices",
    "adamw.reset(w, slice(2))": "rows=slice.*are indices",
    "SOAP([w]).reset(w, rows=[0])": r"soap: its .*factors, bases are of the",
}
for _bad in BAD_WEIGHTS:
    FORMS |= {
        f"adamw.load_master_state_dict(model, {{**masters, '0.weight': {_bad}}})": (
            "TypeError: state_dict"
        ),
        f"adamw.load_functional(state, {{**params, '0.weight': {_bad}}})": (
            r"TypeError: params\['0.weight'\]"
        ),
    }


@refuses(FORMS)
def test_forms_of_a_state() -> Scene:
    model, other = network(), torch.ones(3, requires_grad=True)
    w, *rest = model.parameters()
    adamw, _ = started(AdamW, model.named_parameters())
    unnamed, _ = started(AdamW, network().parameters())
    halves = [*network().named_parameters()]
    grouped, _ = started(
        AdamW, [{"params": halves[:2], "eps": 1e-5}, {"params": halves[2:]}]
    )
    late, _ = started(AdamW, network().named_parameters())
    late.param_groups[0]["params"][0].grad = None
    late.step()
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    leaves = (state := adamw.functional()[1]).leaves
    of = state._replace
    masters = {k: x.clone() for k, x in adamw.master_state_dict(model).items()}
    wide = torch.ones(64, 128, requires_grad=True)
    coded, _ = started(AdamW, [wide], storage=Storage(moments="8bit"))
    uncoded, _ = started(AdamW, [wide])
    lion = Lion([wide], lr=0.1, **EAGER)
    theirs = torch.optim.AdamW(model.parameters())
    fitting = MuonAdamW(model, **EAGER)
    free, _ = started(CLASSES["schedule_free_adamw"], network().named_parameters())
    free.eval()
    return locals()


TO_TORCH = {
    "lion, {}": "has no Lion",
    "scion, {}": "has no Scion",
    "normuon, {}": "has no NorMuon",
    "adamw, {'decouple_lr': True, 'weight_decay': 1e-4}": "decouple_lr=True and",
    "sgd, {'decouple_wd': True, 'weight_decay': 0.1}": "decouple_wd=True and",
    "adamw, {'cautious': True}": "AdamW cannot go on with cautious=True",
    "adamw, {'cautious_decay': True}": "cautious_decay=True and weight_decay=0.01",
    "adamw, {'corrected_decay': True}": "corrected_decay=True and weight_decay=0.01",
    "adamw, {'mars': 0.025}": r"cannot go on with mars=0\.025",
    **{
        f"adafactor, {options}": f"Adafactor cannot go on with {name}="
        for name, options in {
            "torch_form": {},
            "flatten": {"torch_form": True, "flatten": True},
            "beta1": {"torch_form": True, "beta1": 0},
        }.items()
    },
    **{
        f"muon, {{{name!r}: {x!r}}}": f"cannot go on with {name}="
        for name, x in {
            "adjust_lr_fn": "rms_to_rms",
            "ns_coefficients": "quintic",
            "split": 2,
            "transposed": True,
            "maximize": True,
            "element_beta": 0.9,
        }.items()
    },
    "muon, {'hyperball': True, 'weight_decay': 0.0}": "cannot go on with hyperball=",
}


@refuses({f"to_torch({call})": text for call, text in TO_TORCH.items()})
def test_what_torch_cannot_go_on_with() -> Scene:
    def to_torch(factory: Any, options: Any) -> Any:
        w = torch.ones(4, 4, requires_grad=True)
        optimizer, _ = started(factory.owner, [w], **options)
        return optimizer.torch_state_dict()

    return locals()
