"""Write a page for each optimizer, from its class, its state and a note written by hand.

The optimizers are those of `optimi_func.functional`. The summary, the update, the arguments
and the paper come from the docstring of the class, and the bytes from a state that this
program creates. Everything else is in _notes/<name>.md: `key: value` lines for the examples
and for the tables of all optimizers in README.md and docs/choose.md, and then the sections
of the page.
"""

import inspect
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import optimi_func
from optimi_func import FunctionalOptimizer, Storage, functional
from optimi_func.optimizers import BaseOptimizer

NOTES = Path(__file__).parents[1] / "_notes"
KEYS = ("lr", "for", "state")
SECTIONS = ("When to use it", "Usual hyperparameters", "Coming from elsewhere")

# The text about a numeric argument has to contain one of these words, so that a reader
# knows in which unit the argument is measured.
MEASURES = re.compile(
    r"\b(steps?|shares?|fractions?|factor|multiplied by|power|exponent|norm|RMS|roots?|"
    r"gradients?|sizes?|squared|side|rows|rate|how (much|far|fast))\b",
    re.IGNORECASE,
)
# The dtype of the parameters, the argument `storage`, and the name of both on the pages.
STORAGES: list[tuple[torch.dtype, Any, str]] = [
    (torch.float32, None, "float32"),
    (torch.float32, Storage(moments="8bit"), 'float32, `Storage(moments="8bit")`'),
    (torch.bfloat16, None, "bfloat16, the default storage (Kahan)"),
    (torch.bfloat16, "compact", 'bfloat16, `storage="compact"`'),
    (torch.bfloat16, "exact", 'bfloat16, `storage="exact"`'),
]
# States are created for a matrix with sides of this length, because smaller tensors are not
# stored in 8 bits.
SIDE = 512


@dataclass(frozen=True)
class Documented:
    """The parts of a class docstring, with missing arguments from its base classes."""

    title: str
    summary: str
    body: str
    arguments: dict[str, str]
    references: str

    @classmethod
    def of(cls, described: type) -> "Documented":
        """Split a docstring at its headings, which tests require."""
        text = inspect.cleandoc(described.__doc__ or "")
        text, _, _ = text.partition("\n>>> ")
        first, *parts = re.split(r"\n\n(Args|Raises|References):\n", text)
        sections = dict(zip(parts[::2], parts[1::2]))
        summary, _, body = first.partition("\n")
        arguments, _, _ = sections.get("Args", "").partition("\n\nArguments not named")
        found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", arguments, re.M | re.S)
        told = {name: " ".join(words.split()) for name, words in found}
        if described is BaseOptimizer:
            told = {"lr": told["lr"]}  # its options are told on a page of their own
        elif base := described.__base__:
            told = cls.of(base).arguments | told
        return cls(
            described.__name__,
            summary.partition(": ")[2],
            body.strip("\n"),
            told,
            " ".join(sections.get("References", "").split()),
        )


@dataclass(frozen=True)
class Note:
    """The sections of an optimizer's page that are written by hand."""

    lr: str  # in the examples
    lr_unit: str
    options: str  # in the examples
    purpose: str
    state: str
    text: dict[str, str]

    @classmethod
    def of(cls, name: str) -> "Note":
        """Read the note of an optimizer.

        Raises:
            SystemExit: The note does not exist, or lacks a section or a line.
        """
        path = NOTES / f"{name}.md"
        if not path.exists():
            raise SystemExit(
                f"{name} has no note: write docs/_notes/{name}.md like lion.md, with lines "
                f"for {', '.join(KEYS)}, and with the sections {', '.join(SECTIONS)}"
            )
        head, *parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
        keys = dict(line.split(": ", 1) for line in head.strip().splitlines())
        text = {title: body.strip() for title, body in zip(parts[::2], parts[1::2])}
        lacking = [s for s in SECTIONS if not text.get(s)]
        lacking += [f"line `{key}: ...`" for key in KEYS if key not in keys]
        if lacking:
            raise SystemExit(f"{path} has no {', '.join(lacking)}")
        unit = keys.get("lr unit", "parameter units per step")
        options = keys.get("options", "")
        return cls(keys["lr"], unit, options, keys["for"], keys["state"], text)


def names() -> list[str]:
    """Return the names of all pure optimizers in the package, such as `adamw`."""
    return [
        name
        for name, x in vars(functional).items()
        if isinstance(x, type) and issubclass(x, FunctionalOptimizer)
        if x is not FunctionalOptimizer
    ]


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the class with the same steps as this pure optimizer."""
    found = vars(optimi_func).values()
    (cls,) = [x for x in found if getattr(getattr(x, "factory", 0), "__name__", 0) == name]
    return cls


def arxiv(text: str) -> str:
    """Replace arXiv references by links."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def cell(text: str) -> str:
    """Escape a text for a table cell."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def kept(name: str, options: str) -> Iterator[tuple[str, dict[str, tuple[str, float]]]]:
    """Yield each storage mode with the bytes per element of the parameter and the state."""
    for dtype, storage, called in STORAGES:
        p = torch.zeros(SIDE, SIDE, dtype=dtype, requires_grad=True)
        try:
            optimizer: Any = class_of(name)(
                [p], lr=1e-3, storage=storage, compile=False, **eval(f"dict({options})")
            )
            optimizer.init_state()
        except ValueError:
            continue  # This optimizer stores no tensor that this mode could compress.
        found = {"parameter": (str(dtype), p.element_size())}
        for field, x in optimizer.state[p].items():
            if isinstance(x, torch.Tensor) and x.numel() > 1:
                share = x.numel() * x.element_size() / p.numel()
                found[field] = (str(x.dtype), share)
        yield called, found


def bytes_text(x: float) -> str:
    """Format a number with at most two decimals, such as 8 or 2.12."""
    return f"{x:.2f}".rstrip("0").rstrip(".")


def memory(name: str, note: Note) -> str:
    """Return the table of bytes per element."""
    rows = [
        "| parameters | state | parameter + state | with gradient |",
        "|---|---|---|---|",
    ]
    for called, found in kept(name, note.options):
        dtype_bytes = found["parameter"][1]
        total = sum(share for _, share in found.values())
        fields = [
            f"`{field}` {bytes_text(share)} ({dtype.removeprefix('torch.')})"
            for field, (dtype, share) in found.items()
            if field != "parameter"
        ]
        rows.append(
            f"| {called} | {', '.join(fields) or 'none'} | {bytes_text(total)} "
            f"| {bytes_text(total + dtype_bytes)} |"
        )
    return "\n".join(rows)


def arguments(name: str, note: Note, documented: Documented) -> str:
    """Return the table of the arguments that are specific to this optimizer."""
    cls, value = class_of(name), getattr(functional, name)
    ours = inspect.signature(cls).parameters
    values = inspect.signature(value).parameters
    rows = ["| argument | default | meaning |", "|---|---|---|"]
    for number in [k for k in ours if k in documented.arguments and k != "params"]:
        words = documented.arguments[number]
        default = ours[number].default
        given = "required" if default is inspect.Parameter.empty else f"`{default!r}`"
        pure = values[number].default if number in values else default
        if number == "lr" and given != "required" and pure is inspect.Parameter.empty:
            given += "; required in the pure form"
        if number == "lr":
            words += f" Unit: {note.lr_unit}."
        is_number = type(default) in (int, float) or isinstance(default, float)
        if is_number and not MEASURES.search(words):
            raise SystemExit(
                f"{name}: in what is {number} measured? The docstring of {cls.__name__} "
                "has to say so, with a word such as steps, fraction, factor, norm or root."
            )
        rows.append(f"| `{number}` | {given} | {cell(words)} |")
    return arxiv("\n".join(rows))


def class_program(name: str, note: Note) -> str:
    """Return the program that uses the class; tests run it."""
    cls = class_of(name).__name__
    more = f", {note.options}" if note.options else ""
    loop = """\
for _ in range(3):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    if hasattr(class_of(name), "eval"):
        loop = f"optimizer.train()\n{loop}optimizer.eval()  # before you evaluate or save\n"
    return f"""\
import torch
from optimi_func import {cls}

model = torch.nn.Linear(8, 4, bias=False)
optimizer = {cls}(model.parameters(), lr={note.lr}{more})
{loop}for name, x in optimizer.state[model.weight].items():
    print(name, tuple(x.shape))
"""


def pure_program(name: str, note: Note) -> str:
    """Return the program that uses the pure functions; tests run it."""
    more = f", {note.options}" if note.options else ""
    evaluated = hasattr(class_of(name), "eval")
    end = "evaluated = optimizer.eval_params(params, state)\n" if evaluated else ""
    return f"""\
import torch
from torch.func import grad
from optimi_func import {name}


def loss_fn(params):
    return (torch.ones(16, 8) @ params["weight"]).square().mean()


params = {{"weight": torch.randn(8, 4)}}
optimizer = {name}(lr={note.lr}{more})
state = optimizer.init(params)
for _ in range(3):
    params, state = optimizer.step(params, grad(loss_fn)(params), state)
{end}"""


@contextmanager
def uncompiled(cls: type) -> Generator[None]:
    """Construct optimizers of this class with `compile=False`."""
    constructor = cls.__init__

    def eager(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs, compile=False)

    cls.__init__ = eager  # type: ignore[misc]
    try:
        yield
    finally:
        cls.__init__ = constructor  # type: ignore[misc]


def printed(name: str, program: str) -> str:
    """Run a program without a compiler, and return its output."""
    output = StringIO()
    with uncompiled(class_of(name)), redirect_stdout(output):
        exec(compile(program, name, "exec"), {"__name__": "page"})
    return output.getvalue()


def shown(title: str, program: str, output: str = "") -> str:
    """Return a program under its title, and the output of the program.

    Tabs would be clearer on the site, but could not be read in the Markdown source.
    """
    text = f"\n\n```text\n{output}```" if output else ""
    return f"{title}:\n\n```python\n{program}```{text}"


def facts(name: str) -> list[str]:
    """Return the limits of an optimizer that follow from its rule."""
    rule = getattr(functional, name)(lr=1e-3).rule
    found = []
    if rule.whole is not None:
        found.append(
            "Each step needs the complete matrix, so sharded matrices are gathered before "
            "the step."
        )
    if rule.sums or rule.measure or rule.after_means:
        found.append(
            "To compute means over each tensor, each step needs a second pass over the "
            "gradient and the state. If tensors are sharded, the processes exchange these "
            "means in one message per step."
        )
    if rule.accumulate is None:
        found.append(
            '[Gradient release](../release.md) with `accumulation="states"` raises an '
            "error, because the new state cannot be computed from one micro-batch at a "
            'time. Use `accumulation="buffer"` instead.'
        )
    return found


def page(name: str) -> str:
    """Return the whole page of an optimizer."""
    note, documented = Note.of(name), Documented.of(class_of(name))
    summary = documented.summary[:1].upper() + documented.summary[1:]
    blocks = re.split(r"\n{2,}", documented.body)
    body = "\n\n".join(
        f"```text\n{inspect.cleandoc(b)}\n```" if b.startswith("    ") else b
        for b in blocks
    )
    program = class_program(name, note)
    parts = [
        f"# {documented.title}",
        f"<!-- Generated by docs/_build from the class and _notes/{name}.md. -->",
        f"**{cell(summary)}**",
        "## Programs",
        shown(
            "Use the class like any other torch optimizer. The program prints the shapes "
            "of the state tensors",
            program,
            printed(name, program),
        ),
        shown("Use the pure functions with torch.func", pure_program(name, note)),
        "## The update",
        body,
        "## When to use it",
        note.text["When to use it"],
        "## Hyperparameters",
        note.text["Usual hyperparameters"],
        arguments(name, note, documented),
        "All optimizer classes also have [some options in common]"
        "(../reference/optimizers.md#optimi_func.optimizers.BaseOptimizer), such as "
        "`compile`, `storage` and `cautious_decay`.",
        "## State",
        f"For each parameter, {documented.title} stores {note.state}. The table shows "
        f"the number of bytes per element for a {SIDE} x {SIDE} matrix. The last column of "
        "the table also counts the memory of the gradient, which [gradient release]"
        "(../release.md) frees during the backward pass.",
        memory(name, note),
        "\n".join(f"- {fact}" for fact in facts(name)),
        "## Coming from elsewhere",
        note.text["Coming from elsewhere"],
        "## Paper",
        arxiv(cell(documented.references)),
        "## Reference",
        f"[`{documented.title}`](../reference/optimizers.md"
        f"#optimi_func.{documented.title}) · "
        f"[`{name}`](../reference/functional.md#optimi_func.functional.{name})",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index() -> str:
    """Return the page that lists all optimizers."""
    rows = [
        "# Optimizers",
        "",
        "Every optimizer is available both as a class and as a pure function. Use the "
        "classes the same way you would use the optimizers in torch.optim. Each optimizer "
        "has its own page with programs to copy, the update formula, typical "
        "hyperparameters and the size of the state. "
        "[Choose an optimizer](../choose.md) helps you decide which optimizer to use.",
        "",
        "```python",
        INDEX_PROGRAM + "```",
        "",
        "```text",
        "-0.001 -0.001",
        "```",
        "",
        "The last two columns show the size of the state in bytes per parameter, first for "
        "float32 parameters and then for bfloat16 parameters with the default storage "
        "mode. The size for bfloat16 parameters includes 2 bytes for the Kahan "
        "compensation.",
        "",
        "| class | pure function | what it does | float32 | bfloat16 |",
        "|---|---|---|---|---|",
    ]
    for name in names():
        documented, note = Documented.of(class_of(name)), Note.of(name)
        found = dict(kept(name, note.options))
        state = [
            bytes_text(sum(s for f, (_, s) in found[called].items() if f != "parameter"))
            for called in (STORAGES[0][2], STORAGES[2][2])
        ]
        summary = documented.summary[:1].upper() + documented.summary[1:]
        rows.append(
            f"| [{documented.title}]({name}.md) | `{name}` | {cell(summary)} | {state[0]} "
            f"| {state[1]} |"
        )
    note = (
        "`MuonAdamW` and `Mixed` combine [several optimizers in one]"
        "(../choose.md#muon-for-the-matrices-adamw-for-the-rest). Use "
        "[`LBFGS`](../populations.md#fits) for losses without noise, and `lbfgs` to solve "
        "many small problems at once."
    )
    keys = """
## Names in the state

If torch.optim contains the same optimizer, the moments have the same names as in
torch.optim. Moments are stored without bias correction. State dicts from torch.optim can
therefore be loaded into the classes in this package, and vice versa. The state of a 16-bit
parameter also has the key `kahan_comp`, unless Kahan summation is off.
"""
    shapes = """
- In Adafactor's state, `row_var` has the shape (..., rows, 1) and `col_var` the shape
  (..., 1, columns). If the parameter is a vector, `variance` has the parameter's shape.
  Tensors that a parameter does not need are empty.
- NorMuon's `second_momentum_buffer` has the shape (..., rows, 1).
- SOAP stores `exp_avg` and `exp_avg_sq` in the coordinates of the bases that it computes,
  not in the coordinates of the parameter.
- RMSprop with `centered=True` stores both of its means in float32 or wider. SOAP and
  Shampoo store all of their state in float32 or wider.
- In eval mode, the schedule-free classes also store the trained weights as `train_param`.
"""
    return "\n".join([*rows, "", note, keys, entries(names()), shapes.lstrip("\n")])


INDEX_PROGRAM = """\
import torch
from optimi_func import AdamW, adamw

p = torch.zeros((), requires_grad=True)
AdamW([p], lr=1e-3).step(p.backward)

w, g, optimizer = torch.zeros(()), torch.ones(()), adamw(lr=1e-3)
w, state = optimizer.step(w, g, optimizer.init(w))
print(round(p.item(), 6), round(w.item(), 6))
"""
ROW = re.compile(r"^\| \[`\w+`\]\(optimizers/(\w+)\.md\)", re.M)
USUAL = {"l2": "L2", "decoupled": "decoupled", "proximal": "proximal"}


def in_order(table: str) -> list[str]:
    """Return all optimizers in the order of a table's rows; new optimizers come last."""
    known = [name for name in ROW.findall(table) if name in names()]
    return [*known, *(name for name in names() if name not in known)]


def grouped_rows(order: list[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    """Return names in groups, by the key of each name."""
    groups: dict[str, list[str]] = {}
    for name in order:
        groups.setdefault(key(name), []).append(name)
    return groups


def coded(found: Iterable[str]) -> str:
    """Format names as code."""
    return ", ".join([f"`{x}`" for x in found])


def glance(order: list[str]) -> str:
    """Return the table to choose from: the purpose of each optimizer, and its bytes."""
    rows = ["| optimizer | for | float32 | bfloat16 | compact |", "|---|---|---|---|---|"]
    for name in order:
        note = Note.of(name)
        found = [dict(kept(name, options)) for options in {"": 0, note.options: 0}]
        cells: list[str] = []
        for *_, called in (STORAGES[0], STORAGES[2], STORAGES[3]):
            totals = [sum(x for _, x in f[called].values()) for f in found if called in f]
            texts = dict.fromkeys([f"{x:.1f}".removesuffix(".0") for x in totals])
            cells.append(" or ".join(texts) or "-")
        title = class_of(name).__name__
        rows.append(
            f"| [`{title}`](optimizers/{name}.md) | {note.purpose} | {' | '.join(cells)} |"
        )
    return "\n".join(rows) + "\n"


def entry(name: str) -> str:
    """Return the keys of `state[p]`, without `step`."""
    value = getattr(functional, name)(lr=1e-3)
    usual = (*value.rule.state._fields, *value.rule.running._fields)
    more = sorted(value.entry_fields.difference(usual))
    found = coded(usual) or "none"
    return f"{found}; some options add {coded(more)}" if more else found


def entries(order: list[str]) -> str:
    """Return the table of the keys in the state of each optimizer."""
    rows = ["| optimizer | keys of `optimizer.state[p]`, except `step` |", "|---|---|"]
    for keys, same in grouped_rows(order, entry).items():
        titles = ", ".join([class_of(name).__name__ for name in same])
        rows.append(f"| {titles} | {keys} |")
    return "\n".join(rows) + "\n"


def listed(order: list[str]) -> str:
    """Return README's table: the classes, grouped by their default kind of weight decay."""
    rows = ["| class | weight decay |", "|---|---|"]

    def decay(name: str) -> str:
        return USUAL[getattr(functional, name)(lr=1e-3).decay]

    for kind, same in grouped_rows(order, decay).items():
        rows.append(f"| {coded(class_of(name).__name__ for name in same)} | {kind} |")
    return "\n".join(rows) + "\n"


def filled(page: str, choose: str) -> str:
    """Return a page with up-to-date tables of optimizers, in the order of choose.md."""
    made = {"glance": glance, "listed": listed}
    return re.sub(
        r"<!-- (glance|listed) -->\n.*?<!-- / -->",
        lambda found: (
            f"<!-- {found[1]} -->\n\n{made[found[1]](in_order(choose))}\n<!-- / -->"
        ),
        page,
        flags=re.S,
    )
