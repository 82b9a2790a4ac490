"""`hidden_matrices`: select the matrices of a model's hidden layers."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import Tensor, nn

from optimi_func.state.convert import without_wrappers

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Weights of three dimensions that are no stacks of matrices.
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


class HiddenMatrices:
    """The predicate that `hidden_matrices` makes."""

    __name__ = "hidden_matrices"

    def __init__(self, names: Iterable[str], others: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.others = frozenset(others)

    def __call__(self, path: str, p: Tensor) -> bool:
        """Return True if the parameter of this name is a hidden matrix."""
        del p
        plain = without_wrappers(path)
        for name in (path, plain, plain.removeprefix("module.")):
            if name in self.names or name in self.others:
                return name in self.names
        raise ValueError(f"hidden_matrices: the model has no parameter {path!r}")


def hidden_matrices(
    model: nn.Module, head: str | Iterable[str] | None = None
) -> HiddenMatrices:
    """Make a predicate for the matrices of hidden layers, for `Mixed` and `partition`.

    It selects every weight of at least two dimensions except embeddings, weights tied to
    one, the output layer, and the weights of 1-d convolutions. Parameters that are not
    called a weight (class tokens, positions) are not selected. The shape alone does not
    decide, so print `optimizer.describe()` and look.

    Args:
        model: The model with the parameters.
        head: The output layer's weight, as names or patterns (`fnmatch`); () for none.
            None asks the model (get_output_embeddings of transformers, get_classifier of
            timm), or else takes its last nn.Linear.

    Raises:
        ValueError: A name or pattern that no parameter has.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    >>> chosen = hidden_matrices(model)
    >>> [name for name, p in model.named_parameters() if chosen(name, p)]
    ['1.weight']
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    apart = _head_by_name(named, head) if head is not None else _head_of(model)
    hidden: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, EMBEDDINGS + _CONVOLUTIONS):
            apart |= {id(p) for p in own.values()}
            continue
        weights = [n for n, p in own.items() if "weight" in n and p.dim() > 1]
        hidden += [f"{prefix}.{n}" if prefix else n for n in weights]
    hidden = [name for name in hidden if id(named[name]) not in apart]
    chosen = {without_wrappers(name) for name in hidden}
    return HiddenMatrices(chosen, {without_wrappers(name) for name in named} - chosen)


def _head_by_name(named: dict[str, nn.Parameter], head: str | Iterable[str]) -> set[int]:
    found: set[int] = set()
    for pattern in [head] if isinstance(head, str) else list(head):
        hits = [
            p for name, p in named.items() if fnmatchcase(without_wrappers(name), pattern)
        ]
        if not hits:
            raise ValueError(
                f"head={pattern!r} is no parameter: allowed are names and patterns of "
                f"{list(named)[-5:]} and the others"
            )
        found |= set(map(id, hits))
    return found


def _head_of(model: nn.Module) -> set[int]:
    for name in ("get_output_embeddings", "get_classifier"):
        getter = getattr(model, name, None)
        found = getter() if callable(getter) else None
        if isinstance(found, nn.Module):
            return set(map(id, found.parameters()))
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return set(map(id, linear[-1].parameters())) if linear else set()
