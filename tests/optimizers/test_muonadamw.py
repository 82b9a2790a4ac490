"""`MuonAdamW` and `hidden_matrices`: who is what, every option, schedules in classes."""

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import reference
import torch
from cases import assert_moved_alike
from refusals import Scene, refuses
from released import assert_same
from torch import Tensor, nn

from optimi_func import (
    Mixed,
    Muon,
    MuonAdamW,
    NorMuon,
    NorMuonAdamW,
    adamw,
    hidden_matrices,
    join_modules,
    muon,
    prepare_for_gradient_release,
)
from optimi_func.schedules import linear

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64


class Block(nn.Module):
    """Attention with a gate for each head, and a gated MLP or experts with a router."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.attn_gate = nn.Linear(8, 2, bias=False)
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 4))])
        self.mlp: Any = nn.Module()
        if experts:
            self.mlp.gate = nn.Linear(8, 3, bias=False)
            self.mlp.experts = nn.Module()
            self.mlp.experts.w1 = nn.Parameter(torch.randn(3, 8, 16))
            self.mlp.experts.w1_bias = nn.Parameter(torch.randn(3, 16))
            self.mlp.shared_experts = nn.ParameterList([torch.randn(8, 16)])
        else:
            self.mlp.gate = nn.Linear(8, 16, bias=False)
            self.mlp.up = nn.Linear(8, 16, bias=False)


class Recipe(nn.Module):
    """A language model with MTP heads, and a policy and a value beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 50, bias=False)
        self.wte, self.wpe = nn.Embedding(50, 8), nn.Embedding(8, 8)
        self.pos_table = nn.Parameter(torch.randn(4, 5, 8))
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.qkvo_bank = nn.Parameter(torch.randn(4, 8, 8))
        self.blocks = nn.ModuleList([Block(i == 1) for i in range(2)])
        self.mtp = nn.ModuleList([nn.Linear(8, 50, bias=False)])
        self.value = nn.Linear(8, 1)
        self.policy = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 5))
        self.output_router = nn.Linear(8, 4)


KINDS = {
    "hidden matrices": [
        "qkvo_bank",
        "blocks.0.qkv.weight",
        "blocks.0.out.weight",
        "blocks.0.heads.0.0.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.1.qkv.weight",
        "blocks.1.out.weight",
        "blocks.1.heads.0.0.weight",
        "blocks.1.mlp.experts.w1",
        "blocks.1.mlp.shared_experts.0",
        "policy.0.weight",
    ],
    "parameters not called a weight": ["pos_table", "cls", "blocks.1.mlp.experts.w1_bias"],
    "output layers": ["lm_head.weight", "mtp.0.weight", "value.weight", "policy.2.weight"],
    "embeddings": ["wte.weight", "wpe.weight"],
    "routers and gates": [
        "blocks.0.attn_gate.weight",
        "blocks.1.attn_gate.weight",
        "blocks.1.mlp.gate.weight",
        "output_router.weight",
    ],
}


def test_what_is_what() -> None:
    model = Recipe()
    found = hidden_matrices(model)
    expected = copy.deepcopy(KINDS)
    expected["output layers"].remove("value.weight")
    expected["matrices of one row or column"] = ["value.weight"]
    assert {k: x for k, x in found.kinds.items() if k != "vectors"} == expected
    lines = str(found).splitlines()
    assert lines[0].startswith("12 hidden matrices: qkvo_bank, blocks.*.qkv.weight, ")
    assert "1 matrices of one row or column: value.weight" in lines
    twin = pickle.loads(pickle.dumps(found))
    assert vars(twin) == vars(found)


def test_experts_of_four_dimensions_are_refused_unless_named() -> None:
    model = named(experts=nn.Module(), first=nn.Linear(3, 3), last=nn.Linear(3, 4))
    model.experts.w1 = nn.Parameter(torch.randn(2, 3, 4, 5))
    model.conv_expert = nn.Conv2d(3, 4, 2)  # which stays what it is
    with pytest.raises(ValueError, match=r"experts.w1 has the shape \(2, 3, 4, 5\): allow"):
        MuonAdamW(model)
    found = ["experts.w1", "first.weight", "conv_expert.weight"]
    assert chosen(model, include="experts.*") == found
    assert chosen(model, exclude="experts.*") == found[1:]


def chosen(model: nn.Module, **more: Any) -> list[str]:
    select = hidden_matrices(model, **more)
    return [name for name, p in model.named_parameters() if select(name, p)]


def named(**layers: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def test_output_layers_by_name_shape_and_place() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 4)
    for name in (
        "lm_head",
        "head",
        "unembed",
        "score",
        "actor_mean",
        "mtp_heads",
        "policy",
    ):
        actor = nn.Sequential(nn.Linear(3, 4)) if "actor" in name else nn.Linear(3, 4)
        model = named(**{name.removesuffix("_mean"): actor}, first=first, last=last)
        assert chosen(model) == ["first.weight", "last.weight"], name
    # The last one only if no other is found.
    assert chosen(named(first=first, last=last)) == ["first.weight"]
    # Of the shape of the largest embedding, if that is no square.
    for rows, found in ((5, ["first.weight"]), (3, [])):
        tables = named(tokens=nn.Embedding(rows, 3), decoder=nn.Linear(3, rows))
        tables.first = first
        assert chosen(tables) == (found or ["decoder.weight"])


def test_include_and_exclude() -> None:
    model = Recipe()
    usual = chosen(model)
    assert chosen(model, exclude="*.qkv.weight") == [n for n in usual if "qkv." not in n]
    more = chosen(model, include=["wte.*", "value.weight"])
    assert {*more} == {*usual, "wte.weight", "value.weight"}
    assert chosen(model, include="lm_head.weight", exclude="lm*") == usual
    optimizer = MuonAdamW(model, exclude="policy*", include="lm_head.weight")
    muons = [n for g in optimizer.param_groups if g["rule"] == "muon" for n in names_of(g)]
    asked = chosen(model, exclude="policy*", include="lm_head.weight")
    assert muons == asked != usual


def names_of(group: Any) -> list[str]:
    return group["param_names"]


def test_it_is_said_once_in_a_line_a_kind(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="optimi_func"):
        MuonAdamW(Recipe())
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"MuonAdamW: {x}" for x in str(hidden_matrices(Recipe())).split("\n")]


# Options


class Net(nn.Module):
    """An embedding, a matrix of three and another, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(18, 6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        return self.head(self.norm(x + self.out(self.qkv(x).tanh())))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net()
    nn.init.normal_(model.norm.bias)  # decay does not move a 0
    return model.to(dtype)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[dict[str, Tensor]]:
    """Train, and return the gradients of each step."""
    found: list[dict[str, Tensor]] = []
    for i in steps:
        x = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(i))
        logits = model(x).flatten(0, 1)
        nn.functional.cross_entropy(logits, x.roll(1, 1).flatten()).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def path(name: str, p: Tensor, grads: list[Tensor], row_beta: float | None) -> Tensor:
    """The reference's end of a parameter, for the options below."""
    factor = {"qkv.weight": 2.0, "tokens.weight": 0.5}.get(name, 1.0)
    warmup = linear(0.85, 0.95, 3)
    if name in ("qkv.weight", "out.weight"):
        p = p.double()
        s = dict.fromkeys("brv", torch.zeros_like(p))
        for t, g in enumerate(grads, 1):
            split = (6, 6, 6) if name == "qkv.weight" else None
            at = reference.At(t, 0.02 * factor, 0.02 * factor * 0.1)
            how = dict(momentum=float(warmup(t - 1)), split=split, row_beta=row_beta)
            u, s = reference.muon_move(p, s, g, at, **how)
            p = p + u
        return p
    decay = 0.1 if name == "head.weight" else 0.0
    how = dict(lr=0.003 * factor, weight_decay=decay, betas=(0.8, 0.9), eps=1e-5)
    return reference.adamw(p, grads, **how)[-1]


@pytest.mark.parametrize("row_beta", [None, 0.9])
def test_it_moves_as_the_formulas_say(row_beta: float | None) -> None:
    model = net(DOUBLE)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    options: dict[str, Any] = dict(lr=0.02, adamw_lr=0.003, betas=(0.8, 0.9), eps=1e-5)
    options |= dict(split={"qkv*": 3}, momentum=linear(0.85, 0.95, 3))
    options |= dict(lr_multipliers={"qkv.weight": 2.0, "tok*": 0.5, "*": 1.0})
    if row_beta is None:
        optimizer = MuonAdamW(model, **options, **EAGER)
    else:
        optimizer = NorMuonAdamW(model, row_beta=row_beta, **options, **EAGER)
    grads = train(model, optimizer, range(5))
    for name, p in model.named_parameters():
        want = path(name, start[name], [g[name] for g in grads], row_beta)
        assert_moved_alike(start[name], p.detach(), want, 1e-9)
    groups = [(g["rule"][-5:], g["lr"], names_of(g)[0]) for g in optimizer.param_groups]
    muon_, adam_ = ("rmuon" if row_beta else "muon"), "adamw"
    assert groups == [
        (muon_, 0.04, "qkv.weight"),
        (muon_, 0.02, "out.weight"),
        (adam_, 0.003, "head.weight"),
        (adam_, 0.0015, "tokens.weight"),
        (adam_, 0.003, "norm.weight"),
    ]


MATRICES, REST = {"qkv.weight", "out.weight"}, {"tokens.weight", "norm.weight", "norm.bias"}
REST |= {"qkv.bias", "out.bias", "head.weight"}
EVERY = MATRICES | REST
# Options, and what they move otherwise.
CHANGED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "adamw_lr": ({"adamw_lr": 1e-3}, REST),
    "lr": ({"lr": 1e-3, "adamw_lr": 0.01}, MATRICES),
    "betas": ({"betas": (0.5, 0.6)}, REST),
    "eps": ({"eps": 1e-2}, REST),
    "lr_multipliers": (
        {"lr_multipliers": {"*.bias": 3.0}},
        {x for x in REST if "bias" in x},
    ),
    "overrides": ({"overrides": {"*.bias": {"lr": 1.0}}}, {x for x in REST if "bias" in x}),
    "split": ({"split": {"qkv*": [9, 9]}}, {"qkv.weight"}),
    "exclude": ({"exclude": "out*"}, {"out.weight"}),
    "include": ({"include": "head*"}, {"head.weight"}),
    "ns_steps": ({"ns_steps": 2}, MATRICES),
    "momentum": ({"momentum": linear(0.5, 0.95, 9)}, MATRICES),
    "row_beta": ({"row_beta": 0.9}, MATRICES),
    "element_beta": ({"element_beta": 0.9}, MATRICES),
    "hyperball": ({"hyperball": True}, MATRICES),
    "maximize": ({"maximize": True}, EVERY),
    "weight_decay": ({"weight_decay": 0.3}, MATRICES | {"head.weight"}),
    "adamw_weight_decay": ({"adamw_weight_decay": 0.5}, REST),
    "decouple_lr": ({"decouple_lr": True}, MATRICES | {"head.weight"}),
    "max_lr": ({"decouple_lr": True, "max_lr": 1.0}, MATRICES | {"head.weight"}),
    "corrected_decay": (
        {"corrected_decay": True, "max_lr": 1.0},
        MATRICES | {"head.weight"},
    ),
    "cautious_decay": ({"cautious_decay": True}, MATRICES | {"head.weight"}),
}
WITHOUT = {"max_lr": {"decouple_lr": True}}


@pytest.mark.filterwarnings("ignore:.*weight_decay")
@pytest.mark.parametrize("name", CHANGED)
def test_each_option_changes_the_step(name: str) -> None:
    options, moved = CHANGED[name]
    # The first step of a moment does not depend on its rate, and moves all that follows.
    late = name in ("betas", "momentum")
    models = [net(), net()]
    for model, more in zip(models, (WITHOUT.get(name, {}), options)):
        train(model, MuonAdamW(model, **{"lr": 0.01, **more}, **EAGER), range(1 + late))
    first, second = [dict(model.named_parameters()) for model in models]
    changed = {n for n in first if not torch.equal(first[n], second[n])}
    assert moved <= changed if late else changed == moved


def test_overrides_are_of_the_rule_that_takes_a_parameter() -> None:
    options: dict[str, dict[str, Any]] = {
        "qkv.*": {"weight_decay": 0.5, "betas": (0.5, 0.6)},
        "norm.*": {"eps": 1e-3},
    }
    optimizer = MuonAdamW(net(), lr=0.01, overrides=options, **EAGER)
    of = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert of["qkv.weight"]["weight_decay"] == of["qkv.bias"]["weight_decay"] == 0.5
    assert of["qkv.bias"]["betas"] == (0.5, 0.6) and "betas" not in of["qkv.weight"]
    assert of["norm.bias"]["eps"] == 1e-3 and of["out.bias"]["eps"] == 1e-6
    assert of["out.weight"]["weight_decay"] == 0.1 and {*of} == EVERY


def test_max_lr_is_that_of_each_group() -> None:
    options = {"decouple_lr": True, "max_lr": 0.1, "lr_multipliers": {"qkv*": 2.0}}
    optimizer = MuonAdamW(net(), lr=0.05, adamw_lr=0.01, weight_decay=1e-4, **options)
    assert {(g["lr"], g["max_lr"]) for g in optimizer.param_groups} == {
        (0.1, 0.2),
        (0.05, 0.1),
        (0.01, 0.02),
        (0.02, 0.04),
    }


LAST = r"has 'qkv\*' behind '\*', which matches all"
BAD = {
    "split={'head*': 3}": r"split has 'head\*', which is none of its",
    "split={'qkv*': 5}": "split=5 does not divide its 18 rows",
    "split=3": "TypeError: split=3: allowed is a dict of names or patterns",
    "lr_multipliers={'lost': 2.0}": "lr_multipliers has 'lost', which is none",
    "lr_multipliers={'tok*': 0.5, '*': 2.0, 'qkv*': 3.0}": LAST,
    "lr_multipliers={'*': -1.0}": "lr_multipliers=-1.0: allowed is finite, at",
    "overrides={'lost': {'lr': 2.0}}": "'lost', which is none of its",
    "overrides={'*': {}, 'qkv*': {'lr': 1.0}}": LAST,
    "overrides={'qkv.w*': {'betas': (0.5, 0.5)}}": r"betas=.* these are \['muon'",
    "overrides={'*': {'decay': 0.5}}": "overrides has 'decay': allowed",
    # The first by name, and not that of a set's order.
    "overrides={'*': dict.fromkeys('zyxwa', 0)}": "overrides has 'a': allowed",
    "overrides={'*': {'eps': -0.5}}": "eps=-0.5",
    "cautious=True": "muon does not go with the hook cautious",
    "adamw_lr=-1.0": "lr=-1.0",
    "include='lost'": "include='lost' is no parameter",
    "exclude='lost'": "exclude='lost' is no parameter",
    "hidden=hidden_matrices(nn.Linear(2, 2))": "the model has no parameter",
    "hidden=hidden_matrices(model), exclude='*.bias'": (
        "exclude, include and transposed are"
    ),
    "hidden=lambda n, p: True": "TypeError: allowed is what hidden_matrices returns",
    "transposed='tok*'": r"transposed selects \['tok",
    "transposed='c_fc*'": "transposed='c_fc.' is no parameter",
    "hooks=floor()": r"TypeError: allowed is a list of hooks",
    "adamw_hooks=floor()": r"TypeError: allowed is a list of hooks",
}


@refuses({f"MuonAdamW(model, {options})": text for options, text in BAD.items()})
def test_bad_options_are_refused_by_name() -> Scene:
    return {"model": net()}


def test_the_first_selection_wins() -> None:
    model = net()
    parts = ("qkv*", muon(lr=0.1, split=3)), (hidden_matrices(model), muon(lr=0.2))
    weights = [(n, p) for n, p in model.named_parameters() if n != "qkv.bias"]
    optimizer = Mixed(weights, *parts, rest=adamw(lr=0.3), **EAGER)
    found = [(g["lr"], g["split"], names_of(g)) for g in optimizer.param_groups[:2]]
    assert found == [(0.1, 3, ["qkv.weight"]), (0.2, None, ["out.weight"])]
    with pytest.raises(
        ValueError, match=r"'qkv\.weight' selects no parameter that the parts"
    ):
        Mixed(weights, *parts, ("qkv.weight", adamw(lr=0.1)), rest=adamw(lr=0.3), **EAGER)


# Schedules of the step in classes


WARM = linear(0.5, 0.95, 4)


def warm(model: nn.Module, **more: Any) -> Any:
    return MuonAdamW(model, lr=0.02, momentum=WARM, **EAGER, **more)


@pytest.mark.parametrize(
    "way", [{}, {"capturable": True}, {"gradient_release": True}], ids=str
)
def test_a_momentum_that_warms_up(way: dict[str, Any]) -> None:
    """The schedule is of each parameter's step, as numbers written before each step."""
    model, twin = net(), net()
    one, other = warm(model, **way), MuonAdamW(twin, lr=0.02, **EAGER)
    if way.get("gradient_release"):
        prepare_for_gradient_release(model, one)
    for i in range(6):
        train(model, one, range(i, i + 1))
        other.param_groups[0]["momentum"] = WARM(i)
        train(twin, other, range(i, i + 1))
    if way:
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    else:
        assert_same((model, one), (twin, other))


def test_a_schedule_is_not_saved_and_stays() -> None:
    model = net()
    optimizer = warm(model)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    assert "momentum" not in state["param_groups"][0]
    twin = net()
    twin.load_state_dict(values)
    other = warm(twin)
    other.load_state_dict(state)
    assert repr(other.param_groups[0]["momentum"]) == repr(WARM)
    both = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert_same((model, optimizer), (twin, other))
    train(*both, range(3, 6))
    assert_same((model, optimizer), both)
    with pytest.raises(ValueError, match="cannot go on with a schedule for momentum"):
        optimizer.torch_state_dict()


def test_a_hidden_layer_of_the_embeddings_shape_is_hidden() -> None:
    """As 4 * 64 beside 256 bytes."""
    block = nn.ModuleDict({"expand": nn.Linear(8, 32), "contract": nn.Linear(32, 8)})
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(32, 8),
            "blocks": nn.ModuleList([block]),
            "result": nn.Linear(8, 32),
        }
    )
    hidden = ["blocks.0.expand.weight", "blocks.0.contract.weight"]
    assert hidden_matrices(model).kinds["hidden matrices"] == hidden


def test_a_stage_and_a_backbone_have_no_output_layer() -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"fc": nn.Linear(4, 8), "proj": nn.Linear(8, 4)})

    whole = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])})
    every = [f"blocks.{i}.{x}.weight" for i in (0, 1) for x in ("fc", "proj")]
    assert hidden_matrices(whole).kinds["hidden matrices"] == every
    whole["last"] = nn.Linear(4, 3)  # the last of all, in no block
    assert hidden_matrices(whole).kinds["hidden matrices"] == every


def stages_of(whole: nn.Module) -> list[nn.Module]:
    """Two, cut as torchtitan does: a ModuleDict keeps names, what is left out is None."""
    kept = ("tok", {"0"}), ("norm", "lm_head", {"1"})
    stages = [copy.deepcopy(whole) for _ in kept]
    for stage, names in zip(stages, kept):
        for name in ("tok", "norm", "lm_head"):
            if name not in names:
                setattr(stage, name, None)
        for name in {*stage.layers} - names[-1]:
            del stage.layers[name]
    return stages


def transformer() -> nn.Module:
    def block() -> nn.Module:
        parts = {"qkv": nn.Linear(4, 12, bias=False), "proj": nn.Linear(4, 4)}
        return nn.ModuleDict(parts)

    whole = named(tok=nn.Embedding(9, 4), layers=nn.ModuleDict({}), norm=nn.LayerNorm(4))
    whole.layers.update({str(i): block() for i in range(2)})
    whole.lm_head = nn.Linear(4, 9, bias=False)
    whole.lm_head.weight = whole.tok.weight  # which a stage alone could not know
    whole.register_buffer("cache", torch.ones(2), persistent=False)
    return whole


def test_a_stage_takes_the_choice_of_the_whole() -> None:
    """And its patterns, also if all that they select is in another stage."""
    how: dict[str, Any] = {"lr_multipliers": {"*.1.proj.*": 2.0}, "split": {"*.0.qkv.*": 3}}
    how["overrides"] = {"tok.*": {"eps": 0.1}, "*.1.qkv.*": {"momentum": 0.5}}
    how["compile"] = False

    def numbers(optimizer: Any) -> dict[str, Any]:
        keys = ("rule", "lr", "weight_decay", "split", "eps", "momentum")
        groups = [
            (name, [group.get(k) for k in keys])
            for group in optimizer.param_groups
            for name in group["param_names"]
        ]
        assert len({name for name, _ in groups}) == len(groups)
        return dict(groups)

    whole = transformer()
    with torch.device("meta"):
        choice = pickle.loads(pickle.dumps(hidden_matrices(transformer())))
    wanted = numbers(MuonAdamW(whole, **how))
    stages = stages_of(whole)
    made = [numbers(MuonAdamW(stage, hidden=choice, **how)) for stage in stages]
    # A copy of the table, which the pattern does not name.
    wanted["lm_head.weight"] = [*wanted["tok.weight"][:4], 1e-6, None]
    assert {**made[0], **made[1]} == wanted and not {*made[0]} & {*made[1]}
    joined = join_modules(stages)
    assert numbers(MuonAdamW(joined, hidden=choice, **how)) == wanted
    head = MuonAdamW(named(lm_head=stages[1].lm_head), hidden=choice, compile=False)
    assert [group["rule"] for group in head.param_groups] == ["adamw"]


def test_stages_are_joined() -> None:
    stages = stages_of(transformer())
    joined = join_modules(stages)
    assert {*joined.state_dict()} == {k for stage in stages for k in stage.state_dict()}
    assert join_modules(stages[:1]) is stages[0]


# Layers that store (inputs, outputs).


class Conv1D(nn.Module):
    """As transformers has it, of GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf, dtype=DOUBLE) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """As gpt-oss's of transformers, whose gate and up alternate."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 6, 8, dtype=DOUBLE))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(3, 8, dtype=DOUBLE))


def stored_by_inputs() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "c_attn": Conv1D(18, 6),
            "c_proj": Conv1D(6, 18),
            "experts": Experts(),
            "up": nn.ConvTranspose2d(4, 3, 2, dtype=DOUBLE),
            "grouped": nn.ConvTranspose2d(4, 4, 2, groups=2, dtype=DOUBLE),
            "linear": nn.Linear(6, 18, dtype=DOUBLE),
            "lm_head": nn.Linear(6, 9, dtype=DOUBLE),
        }
    )


def test_layers_that_store_inputs_first_are_found() -> None:
    model = stored_by_inputs()
    chosen = hidden_matrices(model)
    found = ["c_attn.weight", "c_proj.weight", "experts.gate_up_proj", "up.weight"]
    assert chosen.kinds["hidden matrices stored as (inputs, outputs)"] == found
    assert chosen.kinds["hidden matrices"] == ["grouped.weight", "linear.weight"]
    assert "4 hidden matrices stored as (inputs, outputs): " in str(chosen)
    named = dict(model.named_parameters())
    assert all(chosen(n, named[n]) for n in (*found, "linear.weight"))
    more = hidden_matrices(model, transposed=["grouped.*ight", "c_attn.weight"])
    assert [n for n in named if more.kind(n) != chosen.kind(n)] == ["grouped.weight"]


@pytest.mark.parametrize("split", [3, [6, 6, 6]])
def test_a_split_of_layers_that_store_inputs_first_says_which_side(split: Any) -> None:
    model = stored_by_inputs()
    with pytest.raises(
        ValueError, match=r"c_attn.weight'.*write \{\"rows\": .*\"columns\""
    ):
        MuonAdamW(model, split={"c_attn.weight": split})
    layers = {"c_attn_0": nn.Linear(6, 18), "lm_head": nn.Linear(18, 9)}
    late: Any = nn.ModuleDict(layers).double()
    optimizer = MuonAdamW(late, split={"c_attn*": split}, **EAGER)
    late["c_attn_1"] = new = Conv1D(18, 6)
    with pytest.raises(ValueError, match="stores"):
        optimizer.add_param_group({"params": [("c_attn_1.weight", new.weight)]})


@pytest.mark.parametrize("row_beta", [None, 0.9])
def test_layers_that_store_inputs_first_step_as_linear_ones(row_beta: Any) -> None:
    """The transposes of both move alike: parts of outputs, rows, s."""
    split: Any = {
        "c_attn.weight": {"rows": 3},
        "c_proj.weight": {"columns": 3},
        "experts.*": {"rows": 2, "repeats": 4},
    }
    model = stored_by_inputs()
    turned = {
        n: nn.Parameter(p.detach().transpose(0, 1) if "up." in n else p.detach().mT)
        for n, p in model.named_parameters()
        if n in ("c_attn.weight", "c_proj.weight", "experts.gate_up_proj", "up.weight")
    }
    how: dict[str, Any] = {"weight_decay": 0.1, "adjust_lr_fn": "original", **EAGER}
    optimizer = MuonAdamW(model, 0.02, adamw_lr=0.01, split=split, row_beta=row_beta, **how)
    for group in optimizer.param_groups[:4]:
        assert group.get("transposed", False) == (
            not {*names_of(group)} & {"grouped.weight", "linear.weight"}
        )
    cls, more = (Muon, {}) if row_beta is None else (NorMuon, {"row_beta": row_beta})
    splits = [split.get(n.replace("gate_up_proj", "*")) for n in turned]
    groups = [{"params": [p], "split": x} for p, x in zip(turned.values(), splits)]
    other = cls(groups, lr=0.02, **how, **more)
    starts = {n: p.detach().clone() for n, p in turned.items()}
    for _ in range(3):
        for n, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            if n in turned:
                g = p.grad
                turned[n].grad = g.transpose(0, 1) if "up." in n else g.mT
        optimizer.step()
        other.step()
    for n, want in turned.items():
        got = model.get_parameter(n).detach()
        got = got.transpose(0, 1) if "up." in n else got.mT
        assert_moved_alike(starts[n], got, want.detach(), 1e-9)


def test_a_head_alone_is_adamws(caplog: Any) -> None:
    """As the first stage of a fine-tuning; what is unfrozen later is Muon's."""
    for freeze in (True, False):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(DOUBLE)
        model[0].requires_grad_(not freeze)
        train = model if freeze else model[1]
        with caplog.at_level("WARNING", "optimi_func"):
            optimizer = MuonAdamW(train, 0.1, betas=(0.8, 0.9), eps=1e-8, **EAGER)
        assert "no parameter to train, so that AdamW updates everything" in caplog.text
        caplog.clear()
        q = nn.Parameter(model[1].weight.detach().clone())
        theirs = torch.optim.AdamW([q], 0.1, (0.8, 0.9), weight_decay=0.1)
        start = q.detach().clone()
        for i in range(3):
            q.grad = model[1].weight.grad = (
                torch.sin(i + torch.arange(12.0)).view(3, 4).to(q)
            )
            optimizer.step()
            theirs.step()
        assert_moved_alike(start, model[1].weight.detach(), q.detach(), 1e-9)
        if freeze:
            model[0].requires_grad_()
            model[0].weight.grad = torch.eye(4, dtype=DOUBLE)
            old = model[0].weight.detach().clone()
            optimizer.step()
            assert "momentum_buffer" in optimizer.state[model[0].weight]
            assert not torch.equal(old, model[0].weight)


# Groups that are added later.


def late(
    rule: str | None = None, inside: bool = False, names: bool = True, **more: Any
) -> Any:
    """A MuonAdamW of two layers, to which a third is added."""
    torch.manual_seed(0)
    body: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = MuonAdamW(body, lr=1e-2, compile=False, **more)
    head = nn.Linear(3, 3)
    if inside:
        body.insert(1, head)
    group: Any = {"params": (p for p in head.parameters()), "lr": 5e-3}
    if names:
        group["params"] = list(head.named_parameters("1" if inside else "head"))
    optimizer.add_param_group({**group, "rule": rule} if rule else group)
    return optimizer, body, head


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize(
    ("rule", "inside", "rules"),
    [
        (None, False, ["adamw", "adamw"]),
        (None, True, ["muon", "adamw"]),
        ("adamw", True, ["adamw", "adamw"]),
    ],
)
def test_late_groups_have_a_rule(
    rule: Any, inside: bool, rules: list[str], names: bool
) -> None:
    """A matrix of the model is Muon's; that of a head of its own, AdamW's."""
    optimizer, body, head = late(rule, inside, names)
    groups = optimizer.param_groups[3:]
    assert [g["rule"] for g in groups] == rules
    assert {g["lr"] for g in groups} == {5e-3}
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    before = head.weight.detach().clone()
    (head(body(torch.ones(2, 3))) - 1).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, head.weight)
    found = [name for g in groups for name in names_of(g)]
    own = ["1.weight", "1.bias"] if inside else ["head.weight", "head.bias"]
    assert found == (own if names or inside else ["3.0", "3.1"])
    again, *_ = late(rule, inside, names)
    assert again.load_state_dict(copy.deepcopy(optimizer.state_dict())) == ([], [])


LATE = {
    "add({'params': [new], 'rule': 'muon'})": "Muon takes matrices",
    "add({'params': [new], 'rule': 'lion'})": (
        r"rule='lion': allowed are \['muon', 'adamw'\]"
    ),
    "mixed.add_param_group({'params': [('b', new)]})": "may name one of the r",
    "join_modules(lists)": r"several parts have 'layers\.0\.weight': allowed",
    "join_modules(buffers)": "several parts have 'count'",
    "join_modules([lists[0], 'stage'])": "TypeError: join_modules",
    "Muon([matrix], lr=WARM)": "TypeError: Invalid lr|lr=Ramp",
    "Muon([matrix], weight_decay=WARM)": (
        "TypeError: Invalid weight_decay|weight_decay=Ramp"
    ),
    "scheduled.step()": r"momentum=1\.0: allowed is",
}


@refuses(LATE)
def test_late_groups_stages_and_schedules_that_are_refused() -> Scene:
    optimizer, *_ = late()
    add, new = optimizer.add_param_group, nn.Parameter(torch.ones(3))
    mixed = Mixed([("a", nn.Parameter(torch.ones(2)))], ("a", adamw()), compile=False)
    lists = [named(layers=nn.ModuleList([nn.Linear(2, 2)])) for _ in range(2)]
    buffers = [nn.Module() for _ in range(2)]
    for part in buffers:
        part.register_buffer("count", torch.zeros(()))
    matrix = torch.ones(2, 2, requires_grad=True)
    matrix.grad = torch.ones(2, 2)
    scheduled = Muon([matrix], momentum=linear(0.5, 1.5, 2), **EAGER)
    scheduled.step()
    return locals() | {"join_modules": join_modules}


def test_a_late_group_of_muon() -> None:
    optimizer, *_ = late()
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer.add_param_group({"params": [weight], "rule": "muon"})
    assert [g["rule"] for g in optimizer.param_groups][-3:] == ["adamw", "adamw", "muon"]


def test_late_groups_have_the_options_of_the_constructor() -> None:
    """Those by pattern too."""
    optimizer, *_ = late(
        None,
        lr_multipliers={"*.weight": 0.5},
        overrides={"*.bias": {"betas": (0.5, 0.6)}},
        betas=(0.8, 0.9),
    )
    weight, bias = optimizer.param_groups[-2:]
    assert (weight["betas"], bias["betas"]) == ((0.8, 0.9), (0.5, 0.6))
    optimizer.add_param_group({"params": [("x.weight", nn.Parameter(torch.ones(2, 2)))]})
    assert optimizer.param_groups[-1]["lr"] == 5e-3


def test_a_copy_takes_late_groups() -> None:
    optimizer, *_ = late()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        assert other.param_groups[-1]["rule"] == "adamw"


def test_late_groups_of_mixed_may_name_a_rule() -> None:
    optimizer = Mixed([("a", nn.Parameter(torch.ones(2)))], ("a", adamw()), compile=False)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rule": "adamw"})
    assert optimizer.param_groups[-1]["param_names"] == ["1.0"]
