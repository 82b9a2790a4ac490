"""`hidden_matrices`: select the matrices of a model's hidden layers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from optimi_func.core.lists import grouped
from optimi_func.state.convert import without_wrappers

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
HIDDEN = "hidden matrices"
# Weights of three dimensions that are no stacks of matrices.
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
# Last words of the names of output layers, and of those that are children of the model.
_OUTPUTS = re.compile(
    r"(^|_)(heads?|lmhead|embed_out|unembed(ding)?|logits?|classifier|policy|actor|critic|"
    r"action_net|mean|mu|pi|log_?std)$"
)
_OUTERMOST = ("output", "score")
_ROUTER, _GATE = re.compile("(^|_)router"), re.compile(r"(^|_)(gate|gating)$")
# Parameters of three dimensions that are no stacks of matrices, if none is a weight.
_NO_BANK = re.compile("embed|pos|tok|bias|mask|prompt")


class HiddenMatrices:
    """The predicate that `hidden_matrices` makes. Its `str` has a line for each kind."""

    __name__ = "hidden_matrices"

    def __init__(self, kinds: Mapping[str, list[str]]) -> None:
        self.kinds = dict(kinds)
        self.names = frozenset(kinds.get(HIDDEN, ()))
        self.others = frozenset(n for names in kinds.values() for n in names) - self.names

    def __call__(self, path: str, p: Tensor) -> bool:
        """Return True if the parameter of this name is a hidden matrix."""
        del p
        plain = without_wrappers(path)
        for name in (path, plain, plain.removeprefix("module.")):
            if name in self.names or name in self.others:
                return name in self.names
        raise ValueError(f"hidden_matrices: the model has no parameter {path!r}")

    def __str__(self) -> str:
        """Return a line for each kind of parameter, with repeated layers once."""
        lines: list[str] = []
        for kind, names in self.kinds.items():
            alike = grouped(names, lambda name: re.sub(r"\d+", "*", name))
            labels = [xs[0] if len(xs) == 1 else key for key, xs in alike.items()]
            lines.append(f"{len(names)} {kind}: {', '.join(labels)}")
        return "\n".join(lines)


def hidden_matrices(
    model: nn.Module,
    *,
    exclude: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
) -> HiddenMatrices:
    """Make a predicate for the matrices of hidden layers, for `Mixed` and `partition`.

    It selects weights of at least two dimensions, stacks of matrices (three dimensions, as
    the weights of experts), and matrices of experts. Not selected are embeddings and
    weights tied to one, output layers, routers and gates, matrices of one row or column,
    weights of 1-d convolutions, and other parameters that are not called a weight (class
    tokens, positions).

    Output layers are what the model says (get_output_embeddings of transformers,
    get_classifier of timm), layers that are called so (lm_head, mtp_heads, unembed, logits,
    classifier, policy, actor, ...), the last layer of a head of several, and an nn.Linear
    with the shape of the largest embedding. If there is none, it is the last nn.Linear,
    unless that is in a repeated block, as in a pipeline stage or a backbone.
    A layer is a router if it is called so, and a gate if it has a shape of its own beside
    its neighbours: that of a gated MLP does not. `print(hidden_matrices(model))` says what
    was found.

    Args:
        model: The model with the parameters.
        exclude: Names or patterns (`fnmatch`) of parameters that are not selected.
        include: Names or patterns of parameters that are selected, unless excluded.

    Raises:
        ValueError: A name or pattern that no parameter has.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    >>> chosen = hidden_matrices(model)
    >>> [name for name, p in model.named_parameters() if chosen(name, p)]
    ['1.weight']
    >>> print(chosen)
    1 hidden matrices: 1.weight
    1 embeddings: 0.weight
    2 vectors: *.bias
    1 output layers: 2.weight
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    plain = {without_wrappers(name): p for name, p in named.items()}
    explicit = dict.fromkeys(_matching("include", include, plain), HIDDEN)
    explicit |= dict.fromkeys(_matching("exclude", exclude, plain), "excluded")
    tables = [m for m in model.modules() if isinstance(m, EMBEDDINGS)]
    tied = {id(p) for table in tables for p in table.parameters(recurse=False)}
    outputs = _outputs(model, tables)
    kinds: dict[str, list[str]] = {HIDDEN: []}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, p in module.named_parameters(recurse=False):
            name = without_wrappers(f"{prefix}.{short}" if prefix else short)
            kind = explicit.get(name) or _kind(name, p, module, plain)
            if name not in explicit and id(p) in tied:
                kind = "embeddings"
            elif name not in explicit and id(p) in outputs and p.dim() > 1:
                kind = "output layers"
            kinds.setdefault(kind, []).append(name)
    return HiddenMatrices(kinds)


def _matching(
    option: str, patterns: str | Iterable[str], named: Mapping[str, Tensor]
) -> list[str]:
    names: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in named if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"{option}={pattern!r} is no parameter: allowed are names and patterns of "
                f"{list(named)[-5:]} and the others"
            )
        names += hits
    return names


def _kind(name: str, p: Tensor, module: nn.Module, named: Mapping[str, Tensor]) -> str:
    """Return what a parameter is, if it is no embedding and no output layer."""
    *above, short = name.split(".")
    module_name = next((x for x in reversed(above) if not x.isdigit()), "")
    if p.dim() < 2:
        return "vectors"
    if isinstance(module, _CONVOLUTIONS):
        return "weights of 1-d convolutions"
    bank = (p.dim() == 3 and p.shape[0] > 1) or any("expert" in x for x in above)
    if "weight" not in short and not (bank and not _NO_BANK.search(short.lower())):
        return "parameters not called a weight"
    if _ROUTER.search(module_name.lower()) or _ROUTER.search(short.lower()):
        return "routers and gates"
    if _GATE.search(module_name.lower()):
        beside = ".".join(above[: len(above) - above[::-1].index(module_name) - 1])
        near = [q for n, q in named.items() if n.startswith(beside and f"{beside}.")]
        if not any(q is not p and q.shape == p.shape for q in near):
            return "routers and gates"
    rows, columns = p.shape[-2:] if p.dim() < 4 else (p.shape[0], p.shape[1:].numel())
    return HIDDEN if min(rows, columns) > 1 else "matrices of one row or column"


def _outputs(model: nn.Module, tables: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters of output layers."""
    layers: list[nn.Module] = []
    for name in ("get_output_embeddings", "get_classifier"):
        getter = getattr(model, name, None)
        layer = getter() if callable(getter) else None
        layers += [layer] if isinstance(layer, nn.Module) else []
    linear: list[nn.Linear] = []
    single: list[nn.Linear] = []
    for path, module in model.named_modules():
        *above, name = without_wrappers(path).removeprefix("module.").split(".")
        repeated, outermost = any(x.isdigit() for x in above), not above
        if isinstance(module, nn.Linear):
            linear.append(module)
            single += [] if repeated else [module]
        if (outermost and name in _OUTERMOST) or _OUTPUTS.search(
            name.lower().rstrip("0123456789_")
        ):
            layers += _last_layers(module, repeated)
    shapes = [table.weight.shape for table in tables if isinstance(table.weight, Tensor)]
    largest = max(shapes, default=torch.Size())
    if len({*largest}) == 2:  # a square is that of hidden layers too
        # In a repeated block it is hidden, as 4 * 64 beside 256 bytes.
        layers += [m for m in single if m.weight.shape == largest]
    # The last of a stage or a backbone is in one of its blocks, as those before it.
    last = linear[-1:] if linear[-1:] == single[-1:] else []
    return {id(p) for m in layers or last for p in m.parameters()}


def _last_layers(head: nn.Module, repeated: bool) -> Sequence[nn.Module]:
    """Return the layers of a head that have its results; `repeated`: it is in a block."""
    inside = [*head.children()]
    if not inside:
        return [head] if any(p.dim() == 2 for p in head.parameters()) else []
    if repeated and not isinstance(head, nn.Sequential):
        return []  # they may be attention's
    if isinstance(head, nn.ModuleList | nn.ModuleDict):
        return [m for child in inside for m in _last_layers(child, repeated)]
    return [m for m in head.modules() if isinstance(m, nn.Linear)][-1:]
