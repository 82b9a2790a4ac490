"""Reference pages whose names are those of the optimizers: classes, values, functions.

mkdocstrings reads the source; the functions of an optimizer are made when the package is
imported (`rules/body.py`), so that their signatures are written here.
"""

import inspect
from typing import Any

import optimizer_pages

from optimi_func import compiled, functional

WIDTH = 76
# What the classes' users call; the rest of BaseOptimizer is the engine's.
SHARED = [
    *(
        "step",
        "give",
        "zero_grad",
        "add_param_group",
        "init_state",
        "step_params",
        "describe",
    ),
    *("state_dict", "load_state_dict", "load_fitting", "torch_state_dict"),
    "decoded_state_dict",
    *("master_state_dict", "load_master_state_dict", "functional", "load_functional"),
]


def signature(name: str, function: Any) -> str:
    """Return a signature on one line, or with an argument on each line."""
    found = inspect.signature(function)
    bare = [
        p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()
    ]
    line = f"{name}{found.replace(parameters=bare, return_annotation=found.empty)}"
    if len(line) <= WIDTH:
        return line
    inside = line[len(name) + 1 : -1]
    parts = [str(p) for p in bare]
    star = [i for i, p in enumerate(bare) if p.kind is p.KEYWORD_ONLY]
    if star and "*, " in inside:
        parts.insert(star[0], "*")
    return f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"


def function(module: str, name: str, made: Any, level: int = 3) -> str:
    """A heading that can be linked to, and the signature."""
    heading = f"{'#' * level} `{name}` {{ #{module}.{name} }}"
    return f"{heading}\n\n```{{.python .notest}}\n{signature(name, made)}\n```\n"


def classes() -> str:
    """Every class, and what they share."""
    found = [optimizer_pages.class_of(name).__name__ for name in optimizer_pages.names()]
    base = "BaseOptimizer"
    parts = [
        "# Classes",
        "`torch.optim.Optimizer`s, to be imported from `optimi_func`. Arguments that all "
        f"of them have are told on [`{base}`](#optimi_func.optimizers.{base}).",
        *(
            f"::: optimi_func.{x}\n    options:\n      members: false"
            for x in (*found, "MuonAdamW", "NorMuonAdamW", "Mixed")
        ),
        "::: optimi_func.hidden_matrices",
        f"::: optimi_func.optimizers.{base}\n    options:\n      inherited_members: true\n"
        f"      members: [{', '.join(SHARED)}]",
    ]
    return "\n\n".join(parts) + "\n"


def pure() -> str:
    """Values and their functions."""
    parts = [
        "# Pure functions",
        "::: optimi_func.functional\n    options:\n      members: false\n"
        "      show_root_heading: false\n      show_root_toc_entry: false",
        "::: optimi_func.functional.FunctionalOptimizer\n    options:\n"
        "      members: [init, step, numbers]",
        "::: optimi_func.TreeState",
        "::: optimi_func.LeafState",
    ]
    for name in optimizer_pages.names():
        value: Any = getattr(functional, name)
        if hasattr(value, "owner"):  # made of a class body, which the source does not show
            parts.append(function("optimi_func.functional", name, value, level=2))
            parts.append(value.__doc__.partition("\n")[0])
        else:
            parts.append(
                f"::: optimi_func.functional.{name}\n    options:\n      members: false"
            )
        for end in ("_init", "_step"):
            made = getattr(functional, name + end)
            parts.append(function("optimi_func.functional", name + end, made))
    parts += [
        "::: optimi_func.functional.lbfgs\n"
        "    options:\n      members: [init, step, solve]",
        "::: optimi_func.implicit_root",
    ]
    return "\n\n".join(parts) + "\n"


def compiled_steps() -> str:
    """The compiled names."""
    parts = [
        "# Compiled steps",
        "::: optimi_func.compiled\n    options:\n      members: false\n"
        "      show_root_heading: false\n      show_root_toc_entry: false",
        "::: optimi_func.compiled.train_step.train_step",
        "::: optimi_func.compiled.train_step.TrainState",
        "::: optimi_func.compiled.train_step.PureStep",
        "::: optimi_func.compiled.train_step.ClassStep",
        "::: optimi_func.compiled.step",
        "::: optimi_func.compiled.step_",
        "## By optimizer",
        "`*_step` returns new parameters and state, `*_step_` writes into those given.",
    ]
    for name in optimizer_pages.names():
        for end in ("_step", "_step_"):
            made = getattr(compiled, name + end)
            parts.append(function("optimi_func.compiled", name + end, made))
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return the text of each page, by its name in docs/reference/."""
    return {
        "optimizers.md": classes(),
        "functional.md": pure(),
        "compiled.md": compiled_steps(),
    }
