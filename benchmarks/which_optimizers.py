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
        name: Its class.
        pure: Its value.
        ratio: The middle of its lrs by that of AdamW's.
        schedule: The factor of lr, a function of `which_tasks`.
        untuned: Its lr without tuning, if it is said to need none.
        of_length: Arguments that are the number of the run's steps.
        options: Further arguments.
        alone: Members of a population would not train faster together.
    """

    name: str
    pure: str
    ratio: float = 1.0
    schedule: str = "cosine"
    untuned: float | None = None
    of_length: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    alone: bool = field(default=False, repr=False)

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of lr at a step."""
        schedule: Callable[[int, int], float] = getattr(which_tasks, self.schedule)
        return schedule(step, steps)

    def given(self, steps: int) -> dict[str, Any]:
        """Return the arguments besides lr."""
        return {**self.options, **dict.fromkeys(self.of_length, steps)}

    def make(self, model: nn.Module, lr: float, steps: int, compile: bool) -> Any:
        """Return the optimizer of a model, by its class."""
        kind, given = getattr(optimi_func, self.name), self.given(steps)
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
        of_model = getattr(optimi_func, self.name)
        return of_model(model, lr=lr, compile=compile, **self.options)


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

CONTENDERS = (
    Contender("AdamW", "adamw", untuned=1e-3),
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
    # A population computes its bases in every step, not in every tenth.
    Contender("SOAP", "soap", options={"weight_decay": 0.0}, alone=True),
    Contender("Adafactor", "adafactor"),
    Contender("Prodigy", "prodigy", 250.0, untuned=1.0, options=_WITH_WARMUP),
    Contender("ScheduleFreeAdamW", "schedule_free_adamw", 1.0, "warmed", 2.5e-3),
    Contender("ScheduleFreeRAdam", "schedule_free_radam", 1.0, "warmed", 2.5e-3),
    Contender("ScheduleFreeSGD", "schedule_free_sgd", 81.0, "warmed", 1.0),
)
