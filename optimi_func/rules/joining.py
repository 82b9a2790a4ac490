"""Methods that read more than an element: `measure`, and `sums` with `join`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.rule import Named
from optimi_func.rules.lifting import Traced

if TYPE_CHECKING:
    from optimi_func.rules.making import Making


def sums_and_join(
    making: "Making", new: Named
) -> tuple[list[Traced], Callable[..., Named]]:
    """Trace both methods; return the tensors to sum, and `Rule.join`.

    `making` is the `Making` of the class, and `new` the stand-in of the new state. The
    hyperparameters that `join` reads become coefficients.
    """
    trace, where, names = making.trace, making.name, making.running._fields
    lacks = [x for x in ("sums", "join") if not making.names(x)]
    lacks += [] if names else ["Running"]
    if lacks or making.names("means"):
        raise TypeError(
            f"{where} has {'no ' + lacks[0] if lacks else 'means'}: `sums` go with a "
            "`join`, which returns a Running, and without `means`"
        )
    if twice := {*names} & {*making.defaults, *making.statics}:
        raise TypeError(
            f"{where}.Running has a field {min(twice)!r}, which is an option: a group "
            "shows both, so choose another name"
        )
    result = making.call("sums", s=new)
    tensors, spec = pytree.tree_flatten(result)
    if not tensors or any([not _is_traced(x) or x.node in trace.host for x in tensors]):
        raise TypeError(
            f"{where}.sums returned {result!r}: allowed are tensors in the gradient's shape"
        )
    sums = [trace.input(f"sum_{i}", True) for i in range(len(tensors))]
    r = making.running(*[trace.input(f"joined_{name}", True) for name in names])
    after = making.call("join", r=r, sums=pytree.tree_unflatten(sums, spec))
    right = getattr(type(after), "_fields", None) == names
    if not right or any([not _is_traced(x) or x.node not in trace.host for x in after]):
        raise TypeError(
            f"{where}.join returned {after!r}: allowed is self.Running(...) of scalars, "
            "computed of r, of the sums and of hyperparameters"
        )
    nodes = trace.needed([x.node for x in after])
    scalars = [x for x in pytree.tree_leaves(making.scalars) if x.node in nodes]
    trace.coeffs += [x.node for x in scalars if x.node not in trace.coeffs]
    places = [trace.coeffs.index(x.node) for x in scalars]
    compute, _ = trace.function([*r, *sums, *scalars], [*after], on_host=True)

    def join(running: Named, sums: list[Tensor | float], c: Any) -> Named:
        return making.running(*compute(*running, *sums, *[c[i] for i in places]))

    return tensors, join


def measured(making: "Making") -> tuple[list[Traced], list[Traced], dict[str, Traced]]:
    """Trace `measure`; return the tensors, the stand-ins of their means, and the results.

    The last of the stand-ins is the number of elements.
    """
    trace, tensors, means = making.trace, list[Traced](), list[Traced]()
    if not (names := making.names("measure")):
        return [], [], {}
    if lacks := [x for x in ("sums", "join", "whole") if making.names(x)]:
        raise TypeError(f"{making.name} has measure and {lacks[0]}: allowed is one of both")

    def mean(x: Traced) -> Traced:
        tensors.append(x)
        means.append(trace.input(f"measured_{len(means)}"))
        return means[-1]

    numel = trace.input("numel")
    result = making.call("measure", mean=mean, numel=numel)
    numbers = result._asdict() if hasattr(result, "_asdict") else result
    right = isinstance(numbers, dict) and means and all(map(_is_traced, numbers.values()))
    if not right or any([x.node in trace.host for x in numbers.values()]):
        raise TypeError(
            f"{making.name}.measure({', '.join(names)}) returned {result!r}: allowed is a "
            "dict of numbers that are computed of means, by the names that direction takes"
        )
    if clash := {*numbers} & {*making.given, *making.defaults, *making.statics}:
        raise TypeError(
            f"{making.name}.measure returned {min(clash)!r}, which is an argument of "
            "methods or an option: choose another name"
        )
    return tensors, [*means, numel], numbers


def _is_traced(x: object) -> TypeGuard[Traced]:
    return isinstance(x, Traced)
