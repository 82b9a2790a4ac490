"""The optimizers of `which.py`, and where their lrs are searched."""

import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import which_tasks
from torch import Tensor, nn

import optimi_func
from optimi_func import Mixed, adamw, hidden_matrices, transforms


@dataclass(frozen=True)
class Contender:
    """An optimizer with everything but its lr. Its repr tells all that decides a run.

    Attributes:
        name: Its name, and that of its class if `kind` is empty.
        pure: Its value.
        ratio: The middle of its lrs by that of AdamW's.
        schedule: The factor of lr, a function of `which_tasks`.
        untuned: Its lr without tuning, if it is said to need none.
        of_length: Arguments that are the number of the run's steps.
        options: Further arguments.
        alone: Members of a population would not train faster together.
        kind: Its class, of which the name is a variant.
    """

    name: str
    pure: str
    ratio: float = 1.0
    schedule: str = "cosine"
    untuned: float | None = None
    of_length: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    alone: bool = field(default=False, repr=False)
    kind: str = field(default="", repr=False)

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of lr at a step."""
        schedule: Callable[[int, int], float] = getattr(which_tasks, self.schedule)
        return schedule(step, steps)

    def given(self, steps: int) -> dict[str, Any]:
        """Return the arguments besides lr."""
        return {**self.options, **dict.fromkeys(self.of_length, steps)}

    def make(self, model: nn.Module, lr: float, steps: int, compile: bool) -> Any:
        """Return the optimizer of a model, by its class."""
        kind, given = getattr(optimi_func, self.kind or self.name), self.given(steps)
        return kind(model.parameters(), lr=lr, compile=compile, **given)

    def value(self, model: nn.Module, lr: Any, steps: int) -> Any:
        """Return the same as a value."""
        del model
        return getattr(optimi_func, self.pure)(lr=lr, **self.given(steps))


class ForMatrices(Contender):
    """A matrix rule for a model's hidden matrices, AdamW for the rest."""

    def value(self, model: nn.Module, lr: Any, steps: int) -> Any:
        """Return the parts as a value."""
        del steps
        rule = getattr(optimi_func, self.pure)
        matrices = hidden_matrices(model), rule(lr=lr, **self.options)
        return transforms.partition(matrices, rest=optimi_func.adamw(lr=lr))


class MuonAdamW(ForMatrices):
    """Muon or NorMuon with AdamW, which have a class for a whole model."""

    def make(self, model: nn.Module, lr: float, steps: int, compile: bool) -> Any:
        """Return the optimizer of a model."""
        del steps
        of_model = getattr(optimi_func, self.kind or self.name)
        return of_model(model, lr=lr, compile=compile, **self.options)


class ByLayers(Contender):
    """Scion: hidden matrices and vectors by their norms, and the rest by signs."""

    def make(self, model: nn.Module, lr: float, steps: int, compile: bool) -> Any:
        """Return the optimizer of a model."""
        del steps
        *parts, rest = self.parts(model, lr)
        return Mixed(model.named_parameters(), *parts, rest=rest, compile=compile)

    def value(self, model: nn.Module, lr: Any, steps: int) -> Any:
        """Return the same as a value."""
        del steps
        *parts, rest = self.parts(model, lr)
        return transforms.partition(*parts, rest=rest)

    def parts(self, model: nn.Module, lr: Any) -> tuple[Any, ...]:
        """Return selections with values, and that of the rest, by the authors' radii."""
        rule = getattr(optimi_func, self.pure)
        ball = rule(lr=lr, **self.options)
        signs = rule(lr=lr, norm="sign", radius=60.0, **self.options)
        vectors = (lambda path, p: p.dim() < 2), ball
        return (hidden_matrices(model), ball), vectors, signs


@cache
def loaded(file: str) -> dict[str, Any]:
    """Return what a file defines."""
    return runpy.run_path(file)


@dataclass(frozen=True)
class RuleOfFile(Contender):
    """A rule of the user's.

    Attributes:
        file: Where its class is.
        source: The text of the file, which decides a run too.
    """

    file: str = ""
    source: str = ""

    def make(self, model: nn.Module, lr: float, steps: int, compile: bool) -> Any:
        """Return the optimizer of a model."""
        del steps
        kind = loaded(self.file)[self.name]
        if (value := kind.pure(lr=lr)).rule.refuses is None:
            return kind(model.parameters(), lr=lr, compile=compile)
        part, named = (self.takes(model, value), value), model.named_parameters()
        return Mixed(named, part, rest=adamw(lr=lr), compile=compile)

    def value(self, model: nn.Module, lr: Any, steps: int) -> Any:
        """Return the same as a value."""
        del steps
        value = loaded(self.file)[self.name].pure(lr=lr)
        if value.rule.refuses is None:
            return value
        return transforms.partition((self.takes(model, value), value), rest=adamw(lr=lr))

    def takes(self, model: nn.Module, value: Any) -> Callable[[str, Tensor], bool]:
        """Return a predicate of the hidden matrices that a rule does not refuse."""
        hidden = hidden_matrices(model)
        return lambda name, p: hidden(name, p) and value.rule.refuses(p) is None


def rule_of_file(rule: str) -> Contender:
    """Return the contender of FILE:CLASS."""
    file, _, name = rule.rpartition(":")
    if not Path(file).is_file() or name not in loaded(file):
        raise SystemExit(f"--rule {rule}: allowed is a class of a file, as FILE:CLASS")
    return RuleOfFile(name, "", file=file, source=Path(file).read_text())


# A warmup is part of the schedule.
_WITH_WARMUP = {"safeguard_warmup": True}
_ADAMUON = {"weight_decay": 0.0, "element_beta": 0.95}
_KL = {"weight_decay": 0.0, "kl": True}
_BETA2 = {"betas": (0.9, 0.95)}
_MARS = {"mars": 0.025, "betas": (0.95, 0.99)}

CONTENDERS = (
    Contender("AdamW", "adamw", untuned=1e-3),
    Contender("AdamW beta2=0.95", "adamw", options=_BETA2, kind="AdamW"),
    Contender("StableAdamW", "stableadamw"),
    Contender("RAdam", "radam"),
    Contender("Ranger", "ranger"),
    Contender("AdEMAMix", "ademamix", of_length=("alpha_warmup", "beta3_warmup")),
    Contender("ADOPT", "adopt"),
    Contender("Adan", "adan"),
    Contender("LAMB", "lamb", 3.0),
    Contender("Lion", "lion", 1 / 9),
    Contender("SGD", "sgd", 27.0, options={"momentum": 0.9, "nesterov": True}),
    Contender("RMSprop", "rmsprop"),
    Contender("Adagrad", "adagrad", 10.0),
    Contender("Adadelta", "adadelta", 1e3, untuned=1.0),
    Contender("Adamax", "adamax", 2.0),
    Contender("NAdam", "nadam"),
    Contender("ASGD", "asgd", 27.0),
    Contender("Rprop", "rprop"),
    MuonAdamW("MuonAdamW", "muon", options={"weight_decay": 0.0}),
    MuonAdamW("NorMuonAdamW", "normuon", options={"weight_decay": 0.0}),
    MuonAdamW("AdaMuon", "muon", options=_ADAMUON, kind="MuonAdamW"),
    ByLayers("Scion", "scion", 9.0, options={"weight_decay": 0.0}),
    Contender("MARS-AdamW", "adamw", options=_MARS, kind="AdamW"),
    # A population computes its bases in every step, not in every tenth.
    Contender("SOAP", "soap", options={"weight_decay": 0.0}, alone=True),
    # A population fits its factors in every step, not in a share of them.
    Contender("Kron", "kron", 1 / 3, alone=True),
    Contender("Shampoo", "shampoo", options={"weight_decay": 0.0}, alone=True),
    Contender("KL-Shampoo", "shampoo", options=_KL, kind="Shampoo", alone=True),
    Contender("Adafactor", "adafactor"),
    Contender("Prodigy", "prodigy", 250.0, untuned=1.0, options=_WITH_WARMUP),
    Contender("ScheduleFreeAdamW", "schedule_free_adamw", 1.0, "warmed", 2.5e-3),
    Contender("ScheduleFreeRAdam", "schedule_free_radam", 1.0, "warmed", 2.5e-3),
    Contender("ScheduleFreeSGD", "schedule_free_sgd", 81.0, "warmed", 1.0),
)
