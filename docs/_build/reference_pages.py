"""Write the reference: signatures and docstrings of public names, as Markdown.

In docs/reference/, the text about a name is placed between `<!-- api: optimi_func.unroll
-->` and `<!-- / -->`, so that you can read it without a build. After the name of a class, a
comment can list the members to show. Without such a list, all members that the class itself
defines are shown, and with "none", no member is shown. Three pages are generated
completely, because the names in them are those of the optimizers.
"""

import inspect
import math
import re
from importlib import import_module
from typing import Any

import optimizer_pages

import optimi_func
from optimi_func import compiled, functional, optimizers, rules
from optimi_func.compiled.train_step import ClassStep, PureStep
from optimi_func.rules.helping import Shown, named

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
# Functions make the first three, and subclasses stand for the others.
NOT_CALLED = (
    *(optimi_func.GradientRelease, PureStep, ClassStep),
    *(optimizers.BaseOptimizer, rules.Evaluated),
)
PLACE = re.compile(r"<!-- api: ([\w.]+)(?: ([\w, ]+))? -->\n.*?<!-- / -->", re.S)
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|References):\n", re.M)
TITLES = {"Args": "Arguments"}
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.M | re.S)


def found(path: str) -> Any:
    """Return the object with a dotted name.

    Raises:
        SystemExit: There is no object with this name.
    """
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            made: Any = import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[i:]:
                made = inspect.getattr_static(made, part)
        except AttributeError:
            continue
        return made
    raise SystemExit(f"the reference names {path}, which is not there")


def default(x: Any) -> Any:
    """Return a default value in the form in which a user writes it."""
    if isinstance(x, type) and x is not inspect.Parameter.empty:
        return Shown(x.__name__)
    return Shown("math.inf") if x == math.inf else x


def signature(name: str, made: Any) -> str:
    """Return a signature on one line if it fits, or else with one argument per line."""
    shown = named(inspect.signature(made))
    whole = list(shown.parameters.values())
    method = "." in getattr(made, "__qualname__", "")
    if method and whole and whole[0].name in ("self", "cls"):
        whole = whole[1:]
    if isinstance(made, type) and issubclass(made, optimizers.BaseOptimizer):
        whole = [p.replace(annotation=p.empty) for p in whole]
        shown = shown.replace(return_annotation=shown.empty)
    whole = [p.replace(default=default(p.default)) for p in whole]
    shown = shown.replace(parameters=whole)
    line = f"{name}{shown}"
    if len(line) <= WIDTH:
        return line
    fits = [len(str(p)) < WIDTH - 4 for p in whole]
    parts = [
        str(p if fit else p.replace(annotation=p.empty)) for p, fit in zip(whole, fits)
    ]
    star = [i for i, p in enumerate(whole) if p.kind is p.KEYWORD_ONLY]
    if star and not any(p.kind is p.VAR_POSITIONAL for p in whole):
        parts.insert(star[0], "*")
    result = "" if shown.return_annotation is shown.empty else str(shown).rpartition(")")[2]
    return f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def entries(text: str) -> list[tuple[str, str]]:
    """Return the names in a section and their texts; "" if a text has no name."""
    text = inspect.cleandoc(text)
    cut = re.split(r"^([\w*]+(?:, [\w*]+)*|\([\w, ]+\)): ", text, flags=re.M)
    first = [("", cut[0].strip())] if cut[0].strip() else []
    return first + [
        (name, inspect.cleandoc(" " * 8 + said).strip())
        for name, said in zip(cut[1::2], cut[2::2])
    ]


def section(kind: str, text: str) -> str:
    """Return a section of a docstring as a list."""
    title = TITLES.get(kind, kind)
    if kind == "References":
        return f"**{title}**\n\n{optimizer_pages.arxiv(inspect.cleandoc(text))}"
    lines = []
    for name, said in entries(text):
        said = " ".join(said.split())
        told = f"`{name}`: {said}" if name else said
        lines.append(f"- {told}")
    return f"**{title}**\n\n" + "\n".join(lines)


def written(text: str) -> str:
    """Return a docstring as Markdown."""
    text = inspect.cleandoc(text)
    text = EXAMPLE.sub(lambda x: f"```pycon\n{x[0]}\n```", text)
    first, *parts = SECTION.split(text)
    made = [first.strip()]
    for kind, rest in zip(parts[::2], parts[1::2]):
        own = re.match(r"((?:    .*\n?|\n)+)", rest)
        inside = own[1] if own else ""
        made += [section(kind, inside), rest[len(inside) :].strip()]
    return "\n\n".join(filter(None, made))


def members_of(made: Any) -> list[str]:
    """Return the names of documented methods and properties of a class itself."""
    kinds = (property, classmethod, staticmethod)
    return [
        name
        for name, x in vars(made).items()
        if name[0] != "_" and name != "factory"
        if (inspect.isfunction(x) or isinstance(x, kinds)) and x.__doc__
    ]


def heading(path: str, name: str, level: int) -> str:
    """Return a heading to which pages can link, on the site and in a checkout."""
    return f'<a id="{path}"></a>\n\n{"#" * level} `{name}`'


def entry(path: str, members: list[str] | None = None, level: int = 2) -> str:
    """Return the reference text of a module, a class, a function or a property."""
    made = found(path)
    name = path.rpartition(".")[2]
    if inspect.ismodule(made):
        return written(made.__doc__ or "")
    call = made.__func__ if isinstance(made, classmethod | staticmethod) else made
    parts = [heading(path, name, level)]
    if callable(call) and call not in NOT_CALLED:
        parts.append(f"```{{.python .notest}}\n{signature(name, call)}\n```")
    parts.append(written(call.__doc__ or ""))
    if isinstance(made, type):
        names = members_of(made) if members is None else members
        for member in names:
            owner = next(c for c in made.__mro__ if member in vars(c))
            if vars(owner)[member].__doc__:
                parts.append(entry(f"{path}.{member}", None, level + 1))
    return "\n\n".join(filter(None, parts))


def filled(page: str) -> str:
    """Return a page with the present signatures and docstrings of the package."""

    def place(at: re.Match[str]) -> str:
        head = at[0].partition("\n")[0]
        members = None if at[2] is None else re.findall(r"\w+", at[2])
        members = [] if members == ["none"] else members
        return f"{head}\n\n{entry(at[1], members)}\n\n<!-- / -->"

    return PLACE.sub(place, page)


def classes() -> str:
    """Return the page about the classes, and about the arguments they have in common."""
    every = [optimizer_pages.class_of(name).__name__ for name in optimizer_pages.names()]
    base = "BaseOptimizer"
    parts = [
        "# Classes",
        "The optimizer classes on this page are subclasses of `torch.optim.Optimizer`. "
        "Import the classes from `optimi_func`. The arguments and methods that all "
        f"optimizer classes have in common are described under [`{base}`]"
        f"(#optimi_func.optimizers.{base}), at the end of the page.",
        *(
            entry(f"optimi_func.{x}", [])
            for x in (*every, "MuonAdamW", "NorMuonAdamW", "Mixed")
        ),
        entry("optimi_func.hidden_matrices"),
        entry(f"optimi_func.optimizers.{base}", SHARED),
    ]
    return "\n\n".join(parts) + "\n"


def shown(module: str, name: str, made: Any, level: int = 3) -> str:
    """Return a heading to which pages can link, and the signature."""
    head = heading(f"{module}.{name}", name, level)
    return f"{head}\n\n```{{.python .notest}}\n{signature(name, made)}\n```"


def pure() -> str:
    """Return the page about the pure optimizers and their functions."""
    module = "optimi_func.functional"
    parts = [
        "# Pure functions",
        entry(module),
        "The next three entries describe the pure functions for AdamW. `help(lion_step)` "
        "prints the corresponding description for Lion.",
        *(entry(f"{module}.{name}", []) for name in ("adamw", "adamw_init", "adamw_step")),
        entry(f"{module}.FunctionalOptimizer", ["init", "step", "eval_params", "numbers"]),
        entry("optimi_func.TreeState"),
        entry("optimi_func.LeafState", []),
        "## All optimizers",
        "Each [optimizer](../optimizers/index.md) has its own page, which shows the update "
        "formula and explains the hyperparameters.",
    ]
    for name in optimizer_pages.names():
        if name == "adamw":
            continue
        for end in ("", "_init", "_step"):
            made = getattr(functional, name + end)
            parts.append(shown(module, name + end, made, 4 if end else 3))
    parts += [
        entry(f"{module}.lbfgs", ["init", "step", "solve"]),
        entry("optimi_func.implicit_root"),
    ]
    return "\n\n".join(parts) + "\n"


def compiled_steps() -> str:
    """Return the page about the compiled functions."""
    module = "optimi_func.compiled"
    parts = [
        "# Compiled steps",
        entry(module),
        *(
            entry(f"{module}.train_step.{x}")
            for x in ("train_step", "TrainState", "PureStep", "ClassStep")
        ),
        entry(f"{module}.step"),
        entry(f"{module}.step_"),
        "## By optimizer",
        "Functions whose names end in `_step` return new parameters and a new state. "
        "Functions whose names end in `_step_` overwrite the parameters and the state that "
        "you pass. The next two entries describe the two functions for AdamW. The "
        "functions for the other optimizers work in the same way.",
        entry(f"{module}.adamw_step", level=3),
        entry(f"{module}.adamw_step_", level=3),
    ]
    for name in optimizer_pages.names():
        for end in ("_step", "_step_") if name != "adamw" else ():
            made = getattr(compiled, name + end)
            parts.append(shown(module, name + end, made))
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return the texts of the generated pages, by file name in docs/reference/."""
    return {
        "optimizers.md": classes(),
        "functional.md": pure(),
        "compiled.md": compiled_steps(),
    }
