"""The mathematics: against the papers' loops, and the code of other packages, by option."""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    CASES,
    CLASSES,
    DECAYS,
    DEFAULTS,
    LR,
    NAMES,
    OPTIONS,
    SENSITIVE,
    STILL,
    Case,
    assert_moved_alike,
    problem,
    schedule,
)
from tiers import built, row

import optimi_func

# The files of optimizers, and how many lines the mathematics of each may take.
FILES = {Path(inspect.getfile(getattr(optimi_func, name))): 75 for name in NAMES}
FILES[Path(inspect.getfile(optimi_func.schedule_free_adamw))] = 150  # three rules
FILES[Path(inspect.getfile(optimi_func.prodigy))] = 90  # and how d follows from the sums
FILES[Path(inspect.getfile(optimi_func.muon))] = 90  # and the options of three papers


def run(case: Case, p, grads, lrs=None):
    """The path of the pure step."""
    state = case.functional().init(p)
    path = []
    for i, g in enumerate(grads):
        optimizer = case.functional(LR if lrs is None else lrs[i])
        p, state = optimizer.step(p, g, state)
        path.append(p)
    return path


def paper_rows() -> list[Any]:
    """Return every case with an lr that changes; a constant one is a schedule, too."""
    return built(
        [
            row(case, scheduled, id=f"{case.id}-{how}", tier=tier)
            for case in CASES
            for scheduled, how, tier in (
                (True, "scheduled", ""),
                (False, "constant", "soak" if case.options else ""),
            )
        ]
    )


@pytest.mark.filterwarnings("ignore:eps=", "ignore:weight_decay=")
@pytest.mark.parametrize(("case", "scheduled"), paper_rows())
def test_equals_the_paper(case: Case, scheduled: bool) -> None:
    p, grads = problem()
    lrs = schedule() if scheduled else None
    ours = run(case, p, grads, lrs)
    theirs = case.reference(p, grads, LR if lrs is None else lrs)
    still = STILL.get(case.name, 0) if case.options.get("silent_sgd_phase", True) else 0
    still = 0 if case.name in SENSITIVE else still  # they decay
    for _ in range(still):
        assert ours.pop(0).equal(p) and theirs.pop(0).equal(p)
    for got, want in zip(ours, theirs):
        # Shampoo's first roots are of eigenvalues that are 0 but for rounding.
        assert_moved_alike(p, got, want, 1e-10 if case.name == "shampoo" else 1e-12)


@pytest.mark.filterwarnings("ignore:eps=", "ignore:weight_decay=")
@pytest.mark.parametrize("case", [*DECAYS, *OPTIONS], ids=lambda c: c.id)
def test_every_option_changes_the_answer(case: Case) -> None:
    # Gradients have to become small beside one eps of Adafactor.
    steps = 60 if case.name == "adafactor" else 30
    (p, grads), lrs = problem(steps=steps), schedule(steps)
    changed = torch.stack(run(case, p, grads, lrs))
    for name in case.options:
        # These carry the options that qualify them, and have rows of their own.
        without = {k: v for k, v in case.options.items() if k != name}
        qualified = ["momentum", "decouple_lr", "corrected_decay", "dampening"]
        qualified += ["decouple_wd"] if "cautious_decay" in without else []
        qualified += ["weight_decay"] if "hyperball" in without else []
        if name in qualified and len(without) > 0:
            continue
        plain = torch.stack(run(Case(case.name, without), p, grads, lrs))
        assert (changed - plain).abs().max() > 1e-6, name


# Options that do nothing to a small matrix in few steps, or whose paths are not the loop's,
# each with the rules that have it: they have tests in the files of their optimizers.
ELSEWHERE: dict[str, set[str]] = {
    "adafactor": {"flatten", "beta1", "relative_step"},
    "asgd": {"t0"},
    **{name: {"ns_dtype"} for name in ("muon", "normuon", "scion")},
    **{name: {"precondition_1d", "merge_dims"} for name in ("shampoo", "soap")},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_tried(name: str) -> None:
    """Beside the loop of the optimizer, or of one that it is a subclass of."""
    tried = {key for case in CASES if case.name == name for key in case.options}
    bases = [x.pure.__name__ for x in CLASSES[name].__mro__[1:] if hasattr(x, "pure")]
    tried |= {key for case in CASES if case.name in bases for key in case.options}
    lacking = {*CLASSES[name]._own} - {"lr", "weight_decay"} - tried
    assert lacking == ELSEWHERE.get(name, set()), (
        f"tests/support/reference.py: {name} has no tried={lacking}"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("adam", "lion", "adan", "stableadamw", "ranger", "lamb"),
        "schedule_free_adamw",
    ],
)
def test_betas_may_change_as_torch_has_them(name: str) -> None:
    import reference

    p, grads = problem()
    betas = [(0.9 - 0.005 * i, 0.99 - 0.001 * i) for i in range(60)]
    if name == "adan":
        betas = [(*b, 0.98) for b in betas]
    theirs = getattr(reference, name)(p, grads, lr=LR, betas=betas)
    q, state = p, getattr(optimi_func, f"{name}_init")(p)
    step = getattr(optimi_func, f"{name}_step")
    for g, b, want in zip(grads, betas, theirs):
        q, state = step(q, g, state, lr=LR, betas=b)
        assert_moved_alike(p, q, want, 1e-12)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_rule_files_are_mathematics(path: Path) -> None:
    """Short, pure, and without a word of what the pipeline does."""
    text = path.read_text()
    if re.search("^class .*name=", text, re.M):  # the methods of a body
        methods = re.findall(r"^    def .*?(?=^    def |^\w|^$)", text, re.M | re.S)
        classes = re.compile("    def (_|functional|usual_decay|unit_of)")  # are not traced
        source = "".join([textwrap.dedent(x) for x in methods if not classes.match(x)])
    else:  # between the names of the file and the first value, or a cache of rules
        (source,) = re.findall(
            r"^__all__ = [^]]*\]\n(.*?)^(?:@dataclass\(frozen|_rules: )", text, re.M | re.S
        )
    assert re.search("direction|def (whole|scaled|after)", source) or "Rectified," in text
    tree = ast.parse(source)
    documentation = sum(
        node.value.end_lineno - node.value.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    lines = [line for line in source.splitlines() if line.strip()]
    code = [line for line in lines if not line.strip().startswith("#")]
    assert len(code) - documentation <= FILES[path]
    for word in ("weight_decay", "kahan", "compile", "group", "grad is None"):
        assert word not in source.lower(), f"a rule does not mention {word}: see house.md"
    calls = [
        n.func.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    assert not [name for name in calls if name.endswith("_")]


@pytest.mark.parametrize("case", DEFAULTS, ids=lambda c: c.id)
def test_init_makes_tensors_of_its_own(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p = torch.ones(3, 2, dtype=dtype)
        leaf = case.functional().init(p).leaves
        tensors = [p, *leaf.rule_state, leaf.kahan_comp]
        pointers = [x.data_ptr() for x in tensors if x is not None and x.numel()]
        assert len(set(pointers)) == len(pointers)


# Beside the code of packages


# RAdam's silent phase, and its other.
FREE: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    ("AdamW", {"r": 0.5, "weight_lr_power": 1.0}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.7, "weight_decay": 0.1, "r": 1.0, "weight_lr_power": 0.5}),
    ("RAdam", {}),
    ("RAdam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "r": 0.5}),
    ("RAdam", {"silent_sgd_phase": False, "weight_lr_power": 1.0}),
]


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize(("name", "options"), FREE, ids=str)
def test_equals_schedulefree(name: str, options: Any, scheduled: bool) -> None:
    """200 steps, evaluated in between; what is trained, and what is evaluated."""
    import schedulefree

    p, grads = problem(steps=200)
    if name != "RAdam":
        options = {"warmup_steps": 30, **options}
    lrs = schedule(200) if scheduled else [LR] * 200
    found: list[list[torch.Tensor]] = []
    for make, more in (
        (getattr(schedulefree, f"{name}ScheduleFree"), {"foreach": False}),
        (getattr(optimi_func, f"ScheduleFree{name}"), {"compile": False}),
    ):
        q = torch.nn.Parameter(p.clone())
        optimizer = make([q], lr=LR, **options, **more)
        path: list[torch.Tensor] = []
        optimizer.train()
        for i, (g, lr) in enumerate(zip(grads, lrs)):
            optimizer.param_groups[0]["lr"] = lr
            q.grad = g.clone()
            optimizer.step()
            if i % 20 == 19:
                path.append(q.detach().clone())
                optimizer.eval()
                path.append(q.detach().clone())
                optimizer.train()
        found.append(path)
    for theirs, ours in zip(*found):
        assert_moved_alike(p, ours, theirs, 1e-9)


AdEMAMix, ADOPT = optimi_func.AdEMAMix, optimi_func.ADOPT
PAIRS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (AdEMAMix, {"alpha": 5.0}, {"alpha": 5.0}),
    (
        AdEMAMix,
        {"betas": (0.9, 0.95, 0.99), "alpha_warmup": 40, "beta3_warmup": 40},
        {"betas": (0.9, 0.95, 0.99), "alpha": 8.0, "t_alpha_beta3": 40},
    ),
    (AdEMAMix, {"weight_decay": 0.1}, {"weight_decay": 0.1, "alpha": 8.0, "decoupled": 1}),
    (ADOPT, {}, {}),
    (ADOPT, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    (ADOPT, {"betas": (0.5, 0.9), "maximize": True}, {"betas": (0.5, 0.9), "maximize": 1}),
]


@pytest.mark.parametrize(("cls", "ours", "theirs"), PAIRS, ids=str)
def test_equals_pytorch_optimizer(cls: Any, ours: Any, theirs: Any) -> None:
    import pytorch_optimizer

    p, grads = problem()
    theirs = dict(theirs)
    if cls is ADOPT:  # its authors count steps from 0, that package from 1
        theirs["clip_lambda"] = lambda step: (step - 1) ** 0.25
    theirs["weight_decouple"] = bool(theirs.pop("decoupled", False))
    other = getattr(pytorch_optimizer, cls.__name__)
    ended: list[torch.Tensor] = []
    for make, options in ((other, {"foreach": False, **theirs}), (cls, ours)):
        q = torch.nn.Parameter(p.clone())
        eager = {"compile": False} if make is cls else {}
        optimizer = make([q], lr=LR, **options, **eager)
        for g, lr in zip(grads, schedule()):
            optimizer.param_groups[0]["lr"] = lr
            q.grad = g.clone()
            optimizer.step()
        ended.append(q.detach())
    assert_moved_alike(p, ended[1], ended[0], 1e-12)


# Its LAMB corrects no bias: a factor that the ratio takes out again where nothing decays,
# or that is 1 where nothing is averaged.
LAMBS: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "betas": (0, 0)},
]


@pytest.mark.parametrize("options", LAMBS, ids=str)
def test_lamb_equals_pytorch_optimizer(options: dict[str, Any]) -> None:
    import pytorch_optimizer

    p, grads = problem()
    grads[3] = 0.1 * grads[2]  # 0 is a direction of its own to an eps of 1e-16
    theirs = {"weight_decouple": False, "max_grad_norm": 0.0, "adam_debias": True}
    ended: list[torch.Tensor] = []
    for make, more in (
        (pytorch_optimizer.Lamb, theirs),
        (optimi_func.LAMB, {"compile": False}),
    ):
        q = torch.nn.Parameter(p.clone())
        optimizer = make([q], lr=LR, eps=1e-16, **options, **more)
        for g, lr in zip(grads, schedule()):
            optimizer.param_groups[0]["lr"] = lr
            q.grad = g.clone()
            optimizer.step()
        ended.append(q.detach())
    assert_moved_alike(p, ended[1], ended[0], 1e-12)
