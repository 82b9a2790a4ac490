"""Random programs around a class, beside a float64 model of each; programs of threads.

After every instruction each tensor is what the model says: bit for bit where nothing was
computed, else within the rounding of its dtype.
"""

import copy
import io
import pickle
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import CLASSES
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulator import FIELDS, RUNNING, fresh, one_step, options
from tiers import few, row
from torch import Tensor, nn

from optimi_func import AdamW, prepare_for_gradient_release

SHAPES = [(), (1,), (0,), (3,), (2, 3), (4, 4), (16,), (2, 3, 2, 2), (91, 91)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Of one step's arithmetic and of what it is stored in, relative; in float64 that of the
# model as well.
ERROR = {torch.float64: 1e-11, torch.float32: 1e-4}
UNIT = {torch.float64: 2.0**-50, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
KINDS = [*["normal"] * 12, "none", "zero", "denormal", "tiny", "nan", "inf", "-inf", "none"]

lrs = st.sampled_from([0.0, 1e-3, 0.01, 0.1])
decays = st.sampled_from([0.0, 0.01, 0.3])
seeds = st.integers(0, 2**31)
picks = st.integers(0, 1 << 16)
# Of each parameter; most often all are alike, as in training.
kinds = st.one_of(
    st.just(["normal"]),
    st.just(["normal"]),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
)


def gradient(p: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    small = torch.finfo(p.dtype).smallest_normal
    if kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "denormal":
        x = torch.full_like(x, small) / 4
    elif kind == "tiny":
        x = x * 1e-20
    elif kind != "normal" and x.numel():
        x.view(-1)[0] = float(kind)  # one element of it
    return x


@dataclass
class Slot:
    """A parameter, and copies of all that belongs to it as it should be."""

    p: nn.Parameter
    group: int
    want: dict[str, Tensor]  # "p", and the state's entries where there are any

    def found(self, optimizer: Any) -> dict[str, Tensor]:
        return {"p": self.p.detach(), **optimizer.state.get(self.p, {})}

    def keep(self, optimizer: Any) -> None:
        self.want = {k: x.detach().clone() for k, x in self.found(optimizer).items()}


def assert_kept(slot: Slot, optimizer: Any) -> None:
    found = slot.found(optimizer)
    assert set(found) == set(slot.want)
    for name, x in slot.want.items():
        y = found[name]
        assert y.dtype == x.dtype, (name, y.dtype, x.dtype)
        if not torch.equal(x, y):  # not by NaN alone; quicker to ask first
            torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True, msg=name)


def assert_near(x: Tensor, y: Tensor, tolerance: Tensor, what: str) -> None:
    """As close as allowed, and not finite in the same places."""
    assert torch.equal(x.isfinite(), y.isfinite()), (what, x, y)
    ok = ~y.isfinite() | ((x - y).abs() <= tolerance)
    assert ok.all(), (what, x[~ok], y[~ok])


class Program(RuleBasedStateMachine):
    """An optimizer in any mode, and everything one may do to it between two steps."""

    names = tuple(FIELDS)
    modes: tuple[dict[str, Any], ...] = ({"compile": False}, {"foreach": True})
    dtypes = tuple(DTYPES)

    def __init__(self) -> None:
        super().__init__()
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        # Advice; and what torch says of what it is made to do here.
        warnings.simplefilter("ignore", UserWarning)
        self.handle: Any = None
        self.parts = 1
        self.retired: list[tuple[Any, list[Slot]]] = []  # what nobody steps any more
        self.saved: tuple[dict, dict] = {}, {}  # what was loaded, and as it was

    def teardown(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.quiet.__exit__(None, None, None)

    # What there is

    @initialize(data=st.data(), seed=seeds, lr=lrs, decay=decays, groups=st.integers(1, 2))
    def begin(self, data: Any, seed: int, lr: float, decay: float, groups: int) -> None:
        self.name = data.draw(st.sampled_from(self.names))
        self.mode = data.draw(st.sampled_from(self.modes))
        self.dtype = data.draw(st.sampled_from(self.dtypes))
        self.slots: list[Slot] = []
        self.numbers = [{"lr": lr, "weight_decay": decay} for _ in range(groups)]
        shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6)
        made = [self.new_slots(i, data.draw(shapes), seed + i) for i in range(groups)]
        self.slots = [slot for some in made for slot in some]
        self.optimizer = self.make(self.slots)

    def new_slots(self, group: int, shapes: list[Any], seed: int) -> list[Slot]:
        generator = torch.Generator().manual_seed(seed)
        found = []
        for shape in shapes:
            x = torch.randn(shape, generator=generator).to(self.dtype)
            found.append(Slot(nn.Parameter(x), group, {"p": x.clone()}))
        return found

    def make(self, slots: list[Slot]) -> Any:
        """A new optimizer over parameters, with the numbers of now."""
        cls = CLASSES[self.name]
        groups = [
            {**numbers, "params": [s.p for s in slots if s.group == i]}
            for i, numbers in enumerate(self.numbers)
        ]
        release = "foreach" not in self.mode
        extra = {**options(self.name), **self.mode, "gradient_release": release}
        return cls(groups, lr=0.1, **extra)

    def pick(self, index: int) -> Slot:
        return self.slots[index % len(self.slots)]

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        if not hasattr(self, "optimizer"):
            return
        for slot in self.slots:
            assert_kept(slot, self.optimizer)
        for optimizer, slots in self.retired:
            for slot in slots:
                assert_kept(slot, optimizer)
        for now, before in zip(*[saved.values() for saved in self.saved]):
            for name, x in before.items():
                assert torch.equal(now[name].nan_to_num(), x.nan_to_num()), name
        for numbers, group in zip(self.numbers, self.optimizer.param_groups):
            assert float(group["lr"]) == numbers["lr"]
            assert group["weight_decay"] == numbers["weight_decay"]

    # Steps

    @rule(kinds=kinds, seed=seeds, repeat=st.sampled_from([1, 2, 3]), closure=st.booleans())
    def step(self, kinds: list[str], seed: int, repeat: int, closure: bool) -> None:
        for i in range(repeat):
            self.step_once(kinds, torch.Generator().manual_seed(seed + i), closure)

    def step_once(
        self, kinds: list[str], generator: torch.Generator, closure: bool
    ) -> None:
        chosen = [kinds[i % len(kinds)] for i in range(len(self.slots))]
        released: dict[nn.Parameter, Tensor] = {}
        given: dict[nn.Parameter, Tensor] = {}

        def backward() -> Tensor:
            loss = torch.zeros(())
            for part in range(self.parts if self.handle else 1):
                grads = {
                    slot.p: gradient(slot.p, kind, generator)
                    for slot, kind in zip(self.slots, chosen)
                    if kind != "none" and slot.p.requires_grad
                }
                for p, g in grads.items():
                    if self.handle:
                        wide = torch.promote_types(p.dtype, torch.float32)
                        total = g if p.grad is None else p.grad + g
                        if part:
                            total = released[p] + total
                        released[p] = total.to(wide) if self.parts > 1 else total
                    else:
                        p.grad = g
                if self.handle and grads:
                    loss = torch.stack([(p * g).sum().double() for p, g in grads.items()])
                    loss = loss.sum()
                    loss.backward()
            for slot in self.slots:
                if slot.p.grad is not None:
                    given[slot.p] = slot.p.grad.clone()
            return loss

        if closure:
            self.optimizer.step(backward)
        else:
            backward()
            self.optimizer.step()
        for slot in self.slots:
            p = slot.p
            if p in given:
                assert p.grad is not None
                torch.testing.assert_close(p.grad, given[p], rtol=0, atol=0, equal_nan=True)
            g = given.get(p, released.get(p))
            if g is not None:
                self.check_step(slot, g)
                slot.keep(self.optimizer)

    def is_compensated(self, slot: Slot) -> bool:
        asked = self.numbers[slot.group].get("kahan_sum")
        return slot.want["p"].dtype == torch.bfloat16 and asked is not False

    def check_step(self, slot: Slot, g: Tensor) -> None:
        before, after = dict(slot.want), slot.found(self.optimizer)
        p = before.pop("p")
        numbers = self.numbers[slot.group]
        compensated = self.is_compensated(slot)
        comp = before.pop("kahan_comp", torch.zeros_like(p)) if compensated else None
        before.pop("kahan_comp", None)
        if not before:
            before = {**fresh(self.name, p), "step": torch.zeros(())}
        t = int(before.pop("step")) + 1
        fields = FIELDS[self.name]
        assert set(after) == {"p", "step", *fields} | ({"kahan_comp"} & set(after))
        assert ("kahan_comp" in after) == compensated
        assert after["step"] == t and after["step"].dtype == torch.float32

        wide = torch.float32
        tensors = [f for f in fields if f not in RUNNING]
        if torch.float64 in {p.dtype, g.dtype, *(before[f].dtype for f in tensors)}:
            wide = torch.float64
        x = p.double() if comp is None else p.double() + comp.double()
        state = {f: before[f].double() for f in fields}
        lr, decay = numbers["lr"], numbers["weight_decay"]
        u, new, tie = one_step(self.name, x, state, t, g.double(), lr, decay)
        for f in fields:
            assert after[f].dtype == before[f].dtype, f
            # Of sums that cancel, the error is that of their terms.
            terms = largest(state[f], new[f], g.double(), g.double() ** 2)
            tolerance = UNIT[before[f].dtype] * new[f].abs() + ERROR[wide] / 50 * terms
            tolerance = tolerance + torch.finfo(before[f].dtype).smallest_normal
            assert_near(after[f].double(), new[f], tolerance, f)
        y = after["p"].double()
        unit = UNIT[p.dtype]
        if comp is not None:
            # Never more than half a unit of p away from it.
            c = after["kahan_comp"].double()
            fine = y.isfinite() & c.isfinite()
            assert (c.abs() <= unit * y.abs() + 1e-38)[fine].all()
            y, unit = y + c, unit**2
        tolerance = ERROR[wide] * largest(u) + unit * (x + u).abs() + 1e-38
        y, want = y.masked_fill(tie, 0.0), (x + u).masked_fill(tie, 0.0)
        assert_near(y, want, tolerance, "p")

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for slot in self.slots:
            g = slot.p.grad
            assert g is None or (not set_to_none and not g.any())

    # Groups

    @precondition(lambda self: len(self.slots) < 12)
    @rule(
        shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
        seed=seeds,
        lr=lrs,
        decay=decays,
    )
    def add_param_group(self, shapes: list, seed: int, lr: float, decay: float) -> None:
        slots = self.new_slots(len(self.numbers), shapes, seed)
        group = {"params": [s.p for s in slots], "lr": lr, "weight_decay": decay}
        self.optimizer.add_param_group(group)
        self.numbers.append({"lr": lr, "weight_decay": decay})
        self.slots += slots

    @rule(index=picks, lr=lrs, decay=decays, tensor=st.booleans())
    def change_numbers(self, index: int, lr: float, decay: float, tensor: bool) -> None:
        index %= len(self.numbers)
        now: Any = torch.tensor(lr) if tensor else lr
        self.optimizer.param_groups[index].update(lr=now, weight_decay=decay)
        self.numbers[index].update(lr=float(now), weight_decay=decay)

    @precondition(lambda self: torch.bfloat16 in self.dtypes)
    @rule(index=picks, on=st.sampled_from([None, False]))
    def change_kahan(self, index: int, on: bool | None) -> None:
        index %= len(self.numbers)
        self.optimizer.param_groups[index]["kahan_sum"] = on
        self.numbers[index]["kahan_sum"] = on

    @rule(index=picks, keep_grad=st.booleans())
    def freeze(self, index: int, keep_grad: bool) -> None:
        p = self.pick(index).p
        p.requires_grad_(False)
        if not keep_grad:
            p.grad = None

    @rule(index=picks)
    def thaw(self, index: int) -> None:
        self.pick(index).p.requires_grad_(True)

    # Parameters under its hands

    @rule(index=picks, how=st.sampled_from(["write", "swap", "transpose", "stride"]))
    def swap_data(self, index: int, how: str) -> None:
        slot = self.pick(index)
        x = slot.p.detach().clone() * 0.75
        slot.want["p"] = x.clone()
        if how == "write":
            with torch.no_grad():
                slot.p.copy_(x)
            return
        if how == "transpose" and x.dim() == 2:
            x = x.t().contiguous().t()
        elif how == "stride":
            x = torch.stack([x, x], -1)[..., 0]
        slot.p.data = x

    @precondition(lambda self: len(self.dtypes) == len(DTYPES))
    @rule(dtype=st.sampled_from(DTYPES))
    def cast_model(self, dtype: torch.dtype) -> None:
        nn.ParameterList([slot.p for slot in self.slots]).to(dtype)
        self.dtype = dtype
        for slot in self.slots:
            slot.want["p"] = slot.want["p"].to(dtype)

    @rule(
        index=picks,
        field=picks,
        how=st.sampled_from(["write", "replace", "data"] * 2 + ["forget", "forget all"]),
    )
    def edit_state(self, index: int, field: int, how: str) -> None:
        slot = self.pick(index)
        state = self.optimizer.state
        if how == "forget all":
            state.clear()
            for slot in self.slots:
                slot.want = {"p": slot.want["p"]}
        elif slot.p not in state:
            return
        elif how == "forget":
            del state[slot.p]
            slot.want = {"p": slot.want["p"]}
        else:
            key = list(state[slot.p])[field % len(state[slot.p])]
            x = state[slot.p][key]
            new = x + 2 if key == "step" else x * 0.5
            slot.want[key] = new.clone()
            if how == "write":
                x.copy_(new)
            elif how == "data":
                x.data = new
            else:
                state[slot.p][key] = new

    @rule(
        index=picks,
        field=picks,
        how=st.sampled_from(["write", "replace", "data"]),
        seed=seeds,
    )
    def disturb_cohort(self, index: int, field: int, how: str, seed: int) -> None:
        """What stepped together twice lies side by side: a third time after an edit."""
        self.step(["normal"], seed, 2, False)
        self.edit_state(index, field, how)
        self.step(["normal"], seed + 2, 1, False)

    # Copies and checkpoints

    @rule(pickled=st.booleans())
    def copy_all(self, pickled: bool) -> None:
        """Go on with a copy; nothing of what was before may move any more."""
        self.release_off()
        old = self.optimizer
        copied = pickle.loads(pickle.dumps(old)) if pickled else copy.deepcopy(old)
        self.retired = [(old, self.slots)]
        slots = []
        places = [iter(group["params"]) for group in copied.param_groups]
        for slot in self.slots:
            slots.append(Slot(next(places[slot.group]), slot.group, dict(slot.want)))
        self.slots, self.optimizer = slots, copied

    @rule(
        elsewhere=st.booleans(),
        through_file=st.booleans(),
        keep_dtypes=st.booleans(),
        mode=picks,
    )
    def save_and_load(
        self, elsewhere: bool, through_file: bool, keep_dtypes: bool, mode: int
    ) -> None:
        """Into this optimizer, or into another over copies of the parameters."""
        saved = self.optimizer.state_dict()
        if through_file:
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        if elsewhere:
            self.release_off()
            self.retired = [(self.optimizer, self.slots)]
            self.slots = [
                Slot(nn.Parameter(s.p.detach().clone()), s.group, dict(s.want))
                for s in self.slots
            ]
            self.mode = self.modes[mode % len(self.modes)]
            self.optimizer = self.make(self.slots)
        self.optimizer.load_state_dict(saved, keep_dtypes=keep_dtypes)
        for slot in self.slots:
            self.expect_loaded(slot, keep_dtypes)
        if through_file or elsewhere:
            self.saved = (saved["state"], copy.deepcopy(saved["state"]))

    def expect_loaded(self, slot: Slot, keep_dtypes: bool) -> None:
        p = slot.want["p"]
        if not self.is_compensated(slot):
            slot.want.pop("kahan_comp", None)
        elif len(slot.want) > 1:
            slot.want.setdefault("kahan_comp", torch.zeros_like(p))
        if not keep_dtypes:
            likes = {**fresh(self.name, p), "kahan_comp": p}
            for name, like in likes.items():
                if name in slot.want:
                    slot.want[name] = slot.want[name].to(like.dtype)

    # Gradient release

    @precondition(lambda self: self.handle is None and "foreach" not in self.mode)
    @rule(buffer=st.booleans())
    def release_on(self, buffer: bool) -> None:
        trainable = [slot.p for slot in self.slots if slot.p.requires_grad]
        if not trainable:
            return
        self.optimizer.zero_grad()
        self.model = nn.ParameterList([slot.p for slot in self.slots])
        self.parts = 2 if buffer else 1
        sums: Any = {"accumulation": "buffer", "accumulation_steps": 2} if buffer else {}
        self.handle = prepare_for_gradient_release(self.model, self.optimizer, **sums)

    @rule()
    def release_off(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle, self.parts = None, 1


def largest(*xs: Tensor) -> float:
    """The largest finite size among them."""
    found = [x[x.isfinite()].abs().max().item() for x in xs if x.isfinite().any()]
    return max(found, default=0.0)


class CompiledProgram(Program):
    """The same, through kernels of one rule."""

    names = ("adamw",)
    modes = ({"compile": True},)
    dtypes = (torch.float64, torch.float32)


@pytest.mark.parametrize(
    ("program", "examples"),
    [
        row(Program, 15, id="Program-15"),
        row(Program, 40, id="Program-40", tier="full"),
        row(CompiledProgram, 10, id="CompiledProgram-10", tier="full"),
        row(Program, 200, id="Program-200", tier="night"),
        row(CompiledProgram, 50, id="CompiledProgram-50", tier="night"),
    ],
)
def test_random_programs(program: type[Program], examples: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=30,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(program, settings=chosen)


WAYS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "foreach": {"foreach": True},
    "compiled": {"compile": True},
    "release": {"compile": False, "gradient_release": True},
}


def train(seed: int, how: dict[str, Any], ends: dict[int, list[Tensor]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 4), (16,), (), (1,), (91, 91)]
    model = nn.ParameterList([torch.randn(s, generator=generator) for s in shapes])
    optimizer = AdamW(model, lr=0.01, **how)
    if how.get("gradient_release"):
        prepare_for_gradient_release(model, optimizer)
    for _ in range(40):
        terms = [(p * torch.randn(p.shape, generator=generator)).sum() for p in model]
        torch.stack(terms).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ends[seed] = [p.detach().clone() for p in model]


@pytest.mark.kernels
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_two_optimizers_on_two_threads(how: dict[str, Any]) -> None:
    alone: dict[int, list[Tensor]] = {}
    together: dict[int, list[Tensor]] = {}
    for seed in (1, 2):
        train(seed, how, alone)
    threads = [threading.Thread(target=train, args=(s, how, together)) for s in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert all(map(torch.equal, alone[seed], together[seed]))


HOW = [{"compile": True}, {"compile": False}, {"foreach": True}]


@pytest.mark.parametrize("how", few(HOW, [str(how) for how in HOW[1:]]))
def test_threads_that_step_and_save_one_optimizer(how: dict[str, Any]) -> None:
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for trial in range(10):
            _run(how, trial)
    finally:
        sys.setswitchinterval(switching)


def _run(how: dict[str, Any], trial: int) -> None:
    ps = [torch.nn.Parameter(torch.ones(n)) for n in (50, 5, 1)]
    for p in ps:
        p.grad = torch.ones_like(p)
    # Other options are other traces and plans, to be made by whoever comes first.
    optimizer = AdamW(ps, lr=1e-3, amsgrad=trial % 2 == 1, **how)
    optimizer.init_state()  # a dict that grows cannot be saved, by torch's either
    errors: list[BaseException] = []
    begin = threading.Barrier(3)

    def work() -> None:
        try:
            begin.wait()
            for i in range(20):
                optimizer.step()
                if i % 5 == 0:
                    optimizer.state_dict()
                if i % 7 == 0:
                    optimizer.group_of(ps[i % 3])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all((p < 1).all() for p in ps)
    assert 20 <= optimizer.state[ps[0]]["step"] <= 60
