"""Programs that edit `group["params"]`: what belongs to a parameter goes where it goes.

Each step is compared with that of an optimizer that was newly made of the lists as they
are, with copies of the parameters and their states, found by the tensors.
"""

import copy
import gc
import random
import warnings
import weakref
from typing import Any

import pytest
import seeds
import torch
from cases import CLASSES, NAMES, SCHEDULE_FREE, SOME
from refusals import Scene, refused, refuses
from tiers import built, row
from torch import Tensor, nn

from optimi_func import (
    EMA,
    SGD,
    AdamW,
    Mixed,
    Prodigy,
    ScheduleFreeAdamW,
    adamw,
    lion,
    prepare_for_gradient_release,
)

EAGER: dict[str, Any] = {"compile": False}


def parameter(seed: int, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))


class Program:
    """An optimizer of two groups, random edits of their lists, and what should follow."""

    def __init__(self, name: str, seed: int, release: bool) -> None:
        self.cls: Any = CLASSES[name]
        self.pick, self.release = random.Random(f"{name} {seed} {release}"), release
        self.averages = name not in SCHEDULE_FREE  # which average other points
        self.joins = name == "prodigy"
        self.count = 5
        self.name = {parameter(i, 4, 3): f"layer{i}" for i in range(5)}
        self.dropped: list[Tensor] = []
        ps = [*self.name]
        self.options = {**EAGER, "gradient_release": release}
        self.optimizer = self.made([(0.1, ps[:3]), (0.05, ps[3:])], self.name)
        self.handle: Any = None
        self.prepare()
        self.ema, self.decay = EMA(self.optimizer, 0.8, debias=False), 0.8
        self.average = {p: p.detach().clone() for p in ps}
        self.nameless: set[Tensor] = set()  # whose names cannot be known until written

    def made(self, groups: list[tuple[float, list[Tensor]]], name: Any) -> Any:
        dicts = [{"params": [(name[p], p) for p in ps], "lr": lr} for lr, ps in groups]
        dicts = [x if x["params"] else {**x, "param_names": []} for x in dicts]
        return self.cls(dicts, lr=9.0, **self.options)

    def prepare(self) -> None:
        if self.release:
            if self.handle is not None:
                self.handle.remove()
            model = nn.ParameterList(self.members())
            self.handle = prepare_for_gradient_release(model, self.optimizer)
            self.model = model

    @property
    def unclear(self) -> bool:
        return not self.nameless.isdisjoint(self.members())

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def members(self) -> list[Any]:
        return [p for group in self.groups for p in group["params"]]

    # Edits.

    def swap(self) -> None:
        spots = [(g["params"], i) for g in self.groups for i in range(len(g["params"]))]
        (a, i), (b, j) = self.pick.choices(spots, k=2)
        a[i], b[j] = b[j], a[i]

    def sort(self) -> None:
        for group in self.groups:
            group["params"] = sorted(group["params"], key=self.name.__getitem__)

    def drop(self) -> None:
        if len(ps := self.members()) > 2:
            p = self.pick.choice(ps)
            for group in self.groups:
                group["params"] = [q for q in group["params"] if q is not p]
            if p not in self.nameless:  # one that no step has seen comes back as a new one
                self.dropped.append(p)
            self.optimizer.state.pop(p, None)

    def append(self) -> None:
        if self.dropped:
            p = self.dropped.pop(self.pick.randrange(len(self.dropped)))
            self.pick.choice(self.groups)["params"].append(p)

    def move(self) -> None:
        source, target = self.pick.sample([g["params"] for g in self.groups], 2)
        if len(source) > 1:
            p = source.pop(self.pick.randrange(len(source)))
            target.insert(0, p)
            if self.joins and not any(q in self.optimizer.state for q in target[1:]):
                self.optimizer.state.pop(p, None)  # as the error says

    def exchange(self) -> None:
        group = self.pick.choice([g for g in self.groups if g["params"]])
        i = self.pick.randrange(len(group["params"]))
        old, self.count = group["params"][i], self.count + 1
        group["params"][i] = new = parameter(self.count, 4, 3)
        self.name[new] = self.name.pop(old)
        if old in self.nameless:
            self.nameless.add(new)  # it takes the place of one without a name
        self.optimizer.state.pop(old, None)

    def adapt(self) -> None:
        """Append a parameter that is no other's successor, with its name beside it."""
        self.count += 1
        group = self.pick.choice(self.groups)
        new = parameter(self.count, 4, 3)
        self.name[new] = f"adapter{self.count}"
        group["params"].append(new)
        group["param_names"] = [*group["param_names"], self.name[new]]

    def rename(self) -> None:
        """Write other names for a whole group."""
        group = self.pick.choice(self.groups)
        for p in group["params"]:
            self.name[p] = f"model.{self.name[p]}"
        group["param_names"] = [self.name[p] for p in group["params"]]
        self.nameless.difference_update(group["params"])

    def freeze(self) -> None:
        ps = [p for p in self.members() if p.requires_grad]
        if len(ps) > 1:
            self.pick.choice(ps).requires_grad_(False)

    def thaw(self) -> None:
        for p in self.name:
            p.requires_grad_(True)

    def edit(self) -> None:
        names = "swap sort drop append move exchange adapt freeze thaw".split()
        edits, before = self.pick.sample(names, self.pick.randint(1, 3)), {*self.name}
        for name in edits:
            getattr(self, name)()
        if len(edits) > 1:
            self.nameless |= self.name.keys() - before
            self.dropped = [p for p in self.dropped if p not in self.nameless]
            # A new name may be beside another parameter now.
            self.nameless.update(self.members() if "adapt" in edits else ())
        if self.pick.random() < 0.1:
            self.rename()  # names are read at an edit or by a save: it is one of both
            # Which came first is not known.
            self.nameless.update(self.members())
            self.save()
        if self.joins and {"append", "exchange", "adapt", "thaw"} & {*edits}:
            self.prepare()  # sums over all parameters want hooks at all of them
        for group in self.groups if self.joins else ():
            entries = {
                p: self.optimizer.state[p]
                for p in group["params"]
                if p in self.optimizer.state
            }
            if not entries:
                group.pop("d", None)  # nothing is left of what it was computed from
            if all(x["d"] != group.get("d") for x in entries.values()):
                for p in entries:  # all came from another group: as the error says
                    del self.optimizer.state[p]
                group.pop("d", None)  # as reset() does

    # What should follow.

    def twin(self) -> tuple[Any, dict[Tensor, nn.Parameter]]:
        """A new optimizer of copies, in the lists as they are."""
        copies = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in self.name}
        lists = [(g["lr"], [copies[p] for p in g["params"]]) for g in self.groups]
        name = {copies[p]: name for p, name in self.name.items()}
        twin = self.made(lists, name)
        for p in self.members():
            if p in self.optimizer.state:
                twin.state[copies[p]] = copy.deepcopy(self.optimizer.state[p])
        for mine, group in zip(self.groups, twin.param_groups):
            group.update({k: mine[k] for k in ("d",) if k in mine})
        return twin, copies

    def step(self) -> None:
        twin, copies = self.twin()
        grads = {p: torch.randn_like(p) for p in self.name if p.requires_grad}
        if not self.joins:  # not all get one, but for sums these should be the same
            grads = {p: g for p, g in grads.items() if self.pick.random() < 0.8}
        for p, g in grads.items():
            copies[p].grad = g.clone()
        twin.step()
        if self.release:
            if grads:
                sum([(p * g).sum() for p, g in grads.items()]).backward()
        else:
            for p, g in grads.items():
                p.grad = g
        self.optimizer.step()
        for p in self.name:
            assert torch.equal(p, copies[p]), self.name[p]
            found, want = self.optimizer.state.get(p, {}), twin.state.get(copies[p], {})
            assert found.keys() == want.keys(), self.name[p]
            for key, x in want.items():
                assert torch.equal(found[key], x), (self.name[p], key)
            p.grad = None
        self.update()

    def update(self) -> None:
        self.ema.update()
        share, before = 1 - self.decay, self.average
        members = [p for p in self.members() if p.requires_grad or p in before]
        self.average = {
            p: torch.lerp(before.get(p, p.detach()), p.detach(), share) for p in members
        }
        if self.averages and not self.unclear:
            found = self.ema.averages
            assert found.keys() == {self.name[p] for p in members}
            for p, x in self.average.items():
                torch.testing.assert_close(found[self.name[p]], x, rtol=1e-12, atol=1e-14)

    def save(self) -> None:
        """Names, states and lr in a state dict are those of the same tensor."""
        try:
            saved = self.optimizer.state_dict()
        except ValueError as error:
            assert self.unclear and "has no name" in str(error)
            for group in self.groups:
                group["param_names"] = [self.name[p] for p in group["params"]]
            saved = self.optimizer.state_dict()
        self.nameless.difference_update(self.members())
        for mine, group in zip(self.groups, saved["param_groups"]):
            assert group["param_names"] == [self.name[p] for p in mine["params"]]
            for p, i in zip(mine["params"], group["params"]):
                assert saved["state"].get(i, {}) is self.optimizer.state.get(p, {}) or (
                    not saved["state"].get(i) and not self.optimizer.state.get(p)
                )
        self.load(copy.deepcopy(saved))

    def load(self, saved: Any) -> None:
        """Into groups of another order, and by name into the same ones."""
        clone = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in self.name}
        lists = [(9.0, [clone[p] for p in g["params"]][::-1]) for g in self.groups[::-1]]
        other = self.made(lists, {clone[p]: name for p, name in self.name.items()})
        assert other.load_state_dict(saved) == ([], [])
        self.optimizer.load_state_dict(saved)
        for group in self.groups:
            for p in group["params"]:
                assert other.group_of(clone[p])["lr"] == group["lr"], self.name[p]
                for optimizer, q in ((other, clone[p]), (self.optimizer, p)):
                    found = {k: x for k, x in optimizer.state.get(q, {}).items()}
                    want = self.optimizer.state.get(p, {})
                    assert found.keys() == want.keys()
                    assert all(torch.equal(found[k], x) for k, x in want.items())


def run(name: str, seed: int, release: bool, rounds: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        program = Program(name, seed, release)
        for _ in range(rounds):
            program.step()
            program.edit()
            if program.pick.random() < 0.6:
                program.save()


ROWS = [(name, release) for name in NAMES for release in (False, True)]


@pytest.mark.parametrize(
    ("name", "release"),
    built(
        [
            row(
                *x,
                id=f"{x[0]}-{x[1]}",
                tier="" if x[1] == (i % 2) or x[0] in SOME else "full",
            )
            for i, x in enumerate(sorted(ROWS), 1)
        ]
    ),
)
def test_edits_move_what_belongs_to_a_parameter(name: str, release: bool) -> None:
    run(name, 0, release, rounds=5)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_long_edits_move_what_belongs_to_a_parameter(name: str) -> None:
    for seed in range(40):
        run(name, seeds.number() + seed, seed % 2 == 0, rounds=12)


# Single edits.


def named(*options: dict[str, Any], kind: Any = SGD, **more: Any) -> tuple[Any, list[Any]]:
    """An optimizer with a group of two parameters for each of the options."""
    ps = [parameter(i, 2) for i in range(2 * len(options))]
    pairs = [(f"layer{i}", p) for i, p in enumerate(ps)]
    groups = [{"params": pairs[2 * i : 2 * i + 2], **x} for i, x in enumerate(options)]
    return kind(groups, lr=0.1, **EAGER, **more), ps


def names_in(optimizer: Any) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.state_dict()["param_groups"]]


def test_a_step_notes_parameters_that_have_no_gradient() -> None:
    """Its plan has only the others, and a second edit finds the first one noted."""
    optimizer, ps = named({}, {})
    for replaced in (False, True):
        if replaced:
            optimizer.param_groups[0]["params"][1] = parameter(9, 2)
        ps[0].grad = torch.ones_like(ps[0])
        optimizer.step()
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop(0))
    assert names_in(optimizer) == [["layer1"], ["layer0", "layer2", "layer3"]]


def test_a_new_parameter_has_the_name_of_the_one_in_whose_place_it_is() -> None:
    optimizer, _ = named({}, {})
    optimizer.param_groups[0]["params"][1] = parameter(9, 3)
    assert names_in(optimizer) == [["layer0", "layer1"], ["layer2", "layer3"]]


SECOND = r"param_groups\[1\]\['params'\]\[0\].* has no name"
FIRST = r"param_groups\[0\]\['params'\]\[0\].* has no name"
FIFTH = r"param_groups\[1\]\['params'\]\[1\], of shape \(5,\), has no name"
REFUSED = {
    "second['params'] = [d, parameter(9, 5), c]; save()": FIFTH,
    "second['params'] = [d, parameter(9, 5), c]; optimizer.load_state_dict(saved)": FIFTH,
    # An appended parameter is not taken for one that was dropped before it.
    "first['params'] = [b, parameter(9, 2)]; save()": "has no name",
    # A name beside one that was appended is not that of a dropped one.
    "first['param_names'] = [*first['param_names'], 'adapter']; "
    "first['params'] = [a, parameter(9, 2)]; save()": "has no name",
    # One that returns has lost a name that another has got.
    **{
        f"first['params'].remove(a); {steps}"
        "optimizer.add_param_group({'params': [('layer0', parameter(9, 2))]}); "
        "first['params'].insert(0, a); save()": FIRST
        for steps in ("", "optimizer.step(); ")
    },
    # Errors name the parameter and not its place.
    "optimizer.step(); first['params'].reverse(); a.grad = a.grad.to_sparse(); "
    "optimizer.step()": "TypeError: layer0",
    "second['params'].append(a); optimizer.step()": (
        r"layer0.* param_groups\[0\] and in param"
    ),
    # Each list is known from an earlier step, and together they have a parameter twice.
    "first['params'], second['params'] = [a, b], [c]; optimizer.step(); "
    "first['params'], second['params'] = [b], [c, a]; optimizer.step(); "
    "first['params'] = [a, b]; optimizer.step()": "layer0",
}


@refuses(REFUSED)
def test_edits_that_are_refused() -> Scene:
    optimizer, (a, b, c, d) = named({}, {"lr": 1.0}, momentum=0.9)
    for p in (a, b, c, d):
        p.grad = torch.ones_like(p)
    first, second = optimizer.param_groups
    saved, save = optimizer.state_dict(), optimizer.state_dict
    return locals()


def test_a_group_that_is_refused_gives_no_names() -> None:
    optimizer, ps = named({}, {})
    new, dropped = parameter(9, 5), ps[3]
    optimizer.param_groups[1]["params"] = [ps[2]]
    for name, p, before in (("wrong", new, None), ("wrong", dropped, "layer3")):
        with pytest.raises(ValueError, match="lr=-1"):
            optimizer.add_param_group({"params": [(name, p)], "lr": -1.0})
        assert optimizer.name_of(p) == before
    optimizer.add_param_group({"params": [("new", new), ("layer3", dropped)]})
    assert names_in(optimizer)[2] == ["new", "layer3"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("adapters", [[], ["adapter0"]])
def test_a_replaced_parameter_is_not_named_after_another(
    frozen: bool, adapters: Any
) -> None:
    """It replaces layer0, which had moved to the place that layer2 left.

    Names of other parameters, which follow their lists, are written before the error.
    """
    optimizer, ps = named({}, {})
    first, second = optimizer.param_groups
    ps[0].requires_grad_(not frozen)
    first["param_names"] = [*first["param_names"], *adapters]
    second["params"], first["params"] = [parameter(9, 2), ps[3]], [ps[1]]
    refused(optimizer.state_dict, ValueError, SECOND, ps)
    first["param_names"] = ["layer1"]
    second["param_names"] = ["layer0", "layer3"]
    assert names_in(optimizer) == [["layer1"], ["layer0", "layer3"]]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_replaced_parameter_has_its_name_if_no_other_fits(frozen: bool) -> None:
    optimizer, ps = named({}, {})
    first, second = optimizer.param_groups
    ps[0].requires_grad_(not frozen)
    second["params"], first["params"] = [parameter(9, 5), ps[3]], [ps[1]]
    assert names_in(optimizer) == [["layer1"], ["layer2", "layer3"]]


def test_one_without_a_name_takes_none_when_it_moves() -> None:
    """And the names that are written after the error count."""
    optimizer, (a, b, c, _) = named({}, {})
    first, second = optimizer.param_groups
    first["params"], second["params"] = [b], [c, new := parameter(9, 2), a]
    optimizer.step()
    first["params"], second["params"] = [new], [c, other := parameter(8, 2), a]
    with pytest.raises(ValueError, match="has no name"):
        optimizer.state_dict()
    first["param_names"] = ["layer3"]
    second["param_names"] = ["layer2", "layer1", "layer0"]
    assert names_in(optimizer) == [["layer3"], ["layer2", "layer1", "layer0"]]
    assert optimizer.name_of(other) == "layer1"


def test_one_is_replaced_among_those_of_another_group() -> None:
    optimizer, (a, b, c, _) = named({}, {})
    first, second = optimizer.param_groups
    first["params"], second["params"] = [a, c], [b, parameter(9, 2)]
    assert names_in(optimizer) == [["layer0", "layer2"], ["layer1", "layer3"]]


def test_a_name_that_was_written_stays_with_its_parameter_in_another_group() -> None:
    optimizer, (_, b, c, d) = named({}, {})
    first, second = optimizer.param_groups
    first["params"].append(new := parameter(9, 2))
    first["param_names"].append("adapter")
    first["params"][2], second["params"][0] = c, new
    with pytest.raises(ValueError, match="has no name"):
        optimizer.state_dict()
    assert optimizer.name_of(new) is None
    assert [optimizer.name_of(p) for p in (b, d)] == ["layer1", "layer3"]
    first["param_names"] = ["layer0", "layer1", "layer2"]
    second["param_names"] = ["adapter", "layer3"]
    assert names_in(optimizer) == [["layer0", "layer1", "layer2"], ["adapter", "layer3"]]


def test_names_of_other_parameters_are_refused_with_a_warning() -> None:
    optimizer, _ = named({}, {})
    optimizer.param_groups[0]["param_names"] = ["layer1", "layer0"]
    with pytest.warns(UserWarning, match="each parameter keeps its own"):
        assert names_in(optimizer)[0] == ["layer0", "layer1"]


def test_a_group_that_was_refused_leaves_no_trace_in_names() -> None:
    optimizer, _ = named({}, {})
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [("bad", parameter(9, 2))], "lr": -1.0})
    optimizer.param_groups[0]["params"][0] = parameter(8, 2)
    assert names_in(optimizer) == [["layer0", "layer1"], ["layer2", "layer3"]]


def test_the_name_of_a_frozen_layer_is_given_away_with_a_warning() -> None:
    optimizer, ps = named({}, {})
    ps[1].requires_grad_(False)
    del optimizer.param_groups[0]["params"][1]
    optimizer.param_groups[0]["params"].append(adapter := parameter(9, 2))
    with pytest.warns(UserWarning, match="'layer1' of one that was frozen"):
        assert names_in(optimizer)[0] == ["layer0", "layer1"]
    optimizer.param_groups[0]["param_names"] = ["layer0", "adapter"]
    assert names_in(optimizer)[0] == ["layer0", "adapter"]
    assert optimizer.name_of(adapter) == "adapter"


def test_state_of_a_parameter_that_was_taken_out_is_not_saved_and_kept() -> None:
    optimizer, ps = named({}, {}, momentum=0.9)
    optimizer.init_state()
    optimizer.param_groups[0]["params"] = [ps[1]]
    with pytest.warns(UserWarning, match=r"not saved: \['layer0'\]"):
        saved = optimizer.state_dict()
    assert saved["state"].keys() == {0, 1, 2}
    assert saved["state"][0] is optimizer.state[ps[1]]
    assert ps[0] in optimizer.state


def test_names_that_programs_write_count() -> None:
    optimizer, _ = named({}, {})
    group = optimizer.param_groups[0]
    group["param_names"] = ["model.layer0", "model.layer1"]
    assert names_in(optimizer)[0] == ["model.layer0", "model.layer1"]
    group["params"].reverse()
    group["params"].append(parameter(9, 2))
    group["param_names"].append("head")
    assert names_in(optimizer)[0] == ["model.layer1", "model.layer0", "head"]


def test_a_group_of_named_parameters_needs_no_names() -> None:
    optimizer, ps = named({}, {})
    optimizer.param_groups[0]["params"].remove(ps[0])
    optimizer.add_param_group({"params": (p for p in [ps[0]]), "lr": 1.0})
    assert names_in(optimizer) == [["layer1"], ["layer2", "layer3"], ["layer0"]]


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
def test_copies_have_the_names_of_now(how: Any) -> None:
    optimizer, _ = named({}, {})
    optimizer.param_groups[0]["params"].reverse()
    other = how(optimizer)
    other.param_groups[1]["params"].reverse()
    assert names_in(other) == [["layer1", "layer0"], ["layer3", "layer2"]]


def test_extras_by_name_go_with_the_parameter() -> None:
    """Those of `step()`, and the pure optimizer's tree."""
    optimizer, ps = named({}, kind=AdamW)
    optimizer.init_state()
    optimizer.state[ps[0]]["exp_avg"].fill_(7.0)
    optimizer.param_groups[0]["params"].reverse()
    _, state = optimizer.functional()
    assert state.leaves["layer0"].rule_state.exp_avg.unique() == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_twice_in_a_group_is_stepped_once(name: str) -> None:
    ps = [parameter(0, 4, 3) for _ in range(2)]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = CLASSES[name]([ps[0], ps[0]], lr=0.1, **EAGER)
    once = CLASSES[name]([ps[1]], lr=0.1, **EAGER)
    for t in range(4):
        for p, optimizer in zip(ps, (twice, once)):
            p.grad = 2 * p.detach() + t
            optimizer.step()
    twice.load_state_dict(copy.deepcopy(twice.state_dict()))
    assert torch.equal(*ps)
    assert len(twice.state) == 1
    assert twice.state[ps[0]]["step"] == once.state[ps[1]]["step"] == 4


def test_gradients_of_one_that_is_there_twice_are_unscaled_once() -> None:
    p = parameter(0, 2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer: Any = SGD([p, p], lr=1.0, **EAGER)
    before, p.grad = p.detach().clone(), torch.full_like(p, 8.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    assert torch.equal(p, before - 2.0)


# Averages.


def test_a_layer_that_is_frozen_is_evaluated_with_its_average() -> None:
    optimizer, (w, _) = named({})
    ema = EMA(optimizer, 0.5, debias=False)
    w.grad = torch.ones_like(w)
    optimizer.step()
    w.requires_grad_(False)
    w.grad = None
    for _ in range(60):
        optimizer.step()
        ema.update()
    with ema.applied():
        evaluated = w.detach().clone()
    torch.testing.assert_close(evaluated, w.detach())


def test_a_layer_that_is_taken_out_is_evaluated_as_it_is() -> None:
    optimizer, (w, v) = named({})
    ema = EMA(optimizer, 0.5, debias=False)
    with torch.no_grad():
        w.add_(1)
    optimizer.param_groups[0]["params"] = [v]
    with ema.applied():
        evaluated = w.detach().clone()
    assert torch.equal(evaluated, w)
    assert list(ema.averages) == ["layer1"]


def test_averages_of_a_frozen_layer_are_loaded() -> None:
    optimizer, (w, _) = named({})
    ema = EMA(optimizer, 0.5, debias=False)
    w.requires_grad_(False)
    with torch.no_grad():
        w.add_(1)
    ema.update()
    other, (q, _) = named({})
    q.requires_grad_(False)
    resumed = EMA(other, 0.5)
    resumed.load_state_dict(ema.state_dict())
    assert resumed.averages.keys() == ema.averages.keys()
    assert torch.equal(resumed.averages["layer0"], ema.averages["layer0"])


# Memory.


@pytest.mark.parametrize("with_names", [False, True])
@pytest.mark.parametrize("kind", [AdamW, Prodigy, ScheduleFreeAdamW, EMA])
def test_parameters_that_were_replaced_are_freed(kind: Any, with_names: bool) -> None:
    cls, gone = (AdamW if kind is EMA else kind), list[Any]()
    optimizer = cls(
        [("w", parameter(0, 3))] if with_names else [parameter(0, 3)], lr=0.1, **EAGER
    )
    ema = EMA(optimizer) if kind is EMA else None
    for i in range(4):
        old = optimizer.param_groups[0]["params"][0]
        old.grad = torch.ones_like(old)
        optimizer.step()
        if ema is not None:
            ema.update()
        new = parameter(i, 3)
        optimizer.state[new] = optimizer.state.pop(old)
        optimizer.param_groups[0]["params"] = [new]
        gone.append(weakref.ref(old))
        del old
    gc.collect()
    assert [r() is None for r in gone[:-1]] == [True] * 3
    optimizer.step()
    if ema is not None:
        ema.update()
    optimizer.state_dict()
    assert gone[-1]() is None


def test_a_frozen_layer_that_is_taken_out_and_dropped_is_freed() -> None:
    """Though the list of those with a gradient is that of the step before."""
    optimizer, ps = named({})
    ps[0].requires_grad_(False)
    ps[1].grad = torch.ones_like(ps[1])
    optimizer.step()
    optimizer.param_groups[0]["params"] = ps[1:]
    gone = weakref.ref(ps.pop(0))
    optimizer.step()
    assert gone() is None
    assert names_in(optimizer) == [["layer1"]]


def test_parameters_with_names_may_be_swapped() -> None:
    """As by module.to() of DTensors, which refuses parameters that have weak references."""
    layer = nn.Linear(2, 2)
    optimizer: Any = AdamW(layer.named_parameters(), lr=0.1, **EAGER)
    for _ in range(2):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        layer.weight.grad = None
        new = nn.Parameter(layer.weight.detach() + 1)
        torch.utils.swap_tensors(layer.weight, new)
    assert names_in(optimizer) == [["weight", "bias"]]


# Gradient release.


def test_lists_that_are_swapped_have_the_lr_of_their_group_in_backward() -> None:
    optimizer, (a, _, b, _) = named({"lr": 1.0}, {"lr": 0.1}, gradient_release=True)
    before = a.detach().clone()
    with prepare_for_gradient_release(nn.ParameterList([a, b]), optimizer):
        first, second = optimizer.param_groups
        (0 * a + 0 * b).sum().backward()
        first["params"], second["params"] = second["params"], first["params"]
        a.sum().backward()
    torch.testing.assert_close(a.detach(), before - 0.1)


@pytest.mark.parametrize("accumulation", [None, "buffer", "states"])
def test_one_that_is_taken_out_keeps_its_gradient_in_backward(accumulation: Any) -> None:
    optimizer, (a, b) = named({}, gradient_release=True, momentum=0.9)
    before = a.detach().clone()
    model = nn.ParameterList([a, b])
    how: Any = {"accumulation": accumulation}
    with prepare_for_gradient_release(model, optimizer, **how) as handle:
        if accumulation:
            (a + b).sum().backward()
        optimizer.param_groups[0]["params"] = [b]
        (2 * a + b).sum().backward()
        optimizer.step()
        assert not handle.accumulating
    assert torch.equal(a, before)
    assert a.grad is not None and torch.equal(a.grad, torch.full_like(a, 2.0))
    moved = 0.1 * (2 if accumulation else 1)
    torch.testing.assert_close(b.detach(), parameter(1, 2).detach() - moved)


# Several rules.


def test_a_parameter_of_mixed_goes_to_the_rule_of_its_group() -> None:
    ps = [parameter(i, 2) for i in range(4)]
    named_ps = [(f"layer{i}", p) for i, p in enumerate(ps)]
    parts = ("layer[01]", lion(lr=0.1)), ("layer[23]", adamw(lr=0.01))
    optimizer = Mixed(named_ps, *parts, **EAGER)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    optimizer.step()
    assert optimizer.state[ps[0]].keys() >= {"exp_avg", "exp_avg_sq"}
    assert names_in(optimizer) == [["layer1"], ["layer2", "layer3", "layer0"]]
