"""Two methods of a rule that do the same to tensors, with other scalars."""

from torch import fx

from optimi_func.rules.lifting import Trace, Traced


def other_scalars(
    trace: Trace, results: list[Traced], others: list[Traced]
) -> dict[fx.Node, object] | None:
    """Return what takes the place of scalars of `results` in `others`.

    None if they differ in more, or in the scalars of one coefficient.
    """
    if len(results) != len(others):
        return None
    replacements: dict[fx.Node, object] = {}
    for one, other in zip(results, others):
        if not _match(trace, one.node, other.node, replacements):
            return None
    return {a: b for a, b in replacements.items() if not _equal(a, b)}


def _match(trace: Trace, a: object, b: object, replacements: dict[fx.Node, object]) -> bool:
    if isinstance(a, fx.Node) and a in trace.host:
        if isinstance(b, fx.Node) and b not in trace.host:
            return False
        partner = replacements.setdefault(a, b)
        return partner is b or _equal(partner, b)
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return _equal(a, b)
    alike = (a.op, a.target, len(a.args), {*a.kwargs}) == (
        *(b.op, b.target, len(b.args)),
        {*b.kwargs},
    )
    pairs = [*zip(a.args, b.args), *[(a.kwargs[k], b.kwargs.get(k)) for k in a.kwargs]]
    return alike and all([_match(trace, x, y, replacements) for x, y in pairs])


def _equal(a: object, b: object) -> bool:
    """Return True if two arguments are computed in the same way."""
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return type(a) is type(b) and bool(a == b)
    if a is b or "placeholder" in (a.op, b.op):
        return a is b
    same = a.target == b.target and len(a.args) == len(b.args) and a.kwargs == b.kwargs
    return same and all([_equal(x, y) for x, y in zip(a.args, b.args)])
