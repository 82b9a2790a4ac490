"""The places and names of an optimizer's parameters, found from the tensors.

Programs edit `group["params"]`: they drop parameters that they freeze, move them to other
groups and replace them. torch keeps names in a list beside it, which does not follow.
"""

from weakref import ref

from torch import Tensor

from optimi_func.core.checks import warn_user
from optimi_func.state.convert import Group


def homes_in(groups: list[Group]) -> dict[int, tuple[int, int]]:
    """Return the group and the place of each parameter, by its id, where it is first.

    An id says nothing by itself: look if the parameter is at this place still.
    """
    homes: dict[int, tuple[int, int]] = {}
    for i, group in enumerate(groups):
        for k, p in enumerate(group["params"]):
            homes.setdefault(id(p), (i, k))
    return homes


def without_repeats(params: list[Tensor]) -> list[int]:
    """Return the places of parameters, for one that is there twice the first."""
    first = {id(p): i for i, p in reversed([*enumerate(params)])}
    return sorted(first.values())


class Names:
    """The names of parameters, each remembered with the parameter that it was given to.

    A parameter that is taken out of the groups keeps its name for as long as the program
    keeps the parameter. A new one takes the name that stands beside it in "param_names" if
    the program has written that name, or has put the parameter in the place of another and
    left the rest of the list as it was.
    """

    def __init__(self) -> None:
        # With the parameter, because another may get its id when it is gone. Weak
        # references would be refused by torch.utils.swap_tensors, and so by module.to().
        self._pairs: dict[int, tuple[Tensor, str]] = {}
        self._every: set[str] = set()  # all names that were ever given

    def copy(self) -> "Names":
        """Return the same names in an object of its own."""
        other = Names()
        other._pairs, other._every = dict(self._pairs), {*self._every}
        return other

    def remember(self, groups: list[Group]) -> None:
        """Remember the names in "param_names", which are in the order of the parameters."""
        for group in groups:
            for p, name in zip(group["params"], group.get("param_names", ())):
                self._pairs[id(p)] = p, name
                self._every.add(name)

    def pairs_of(self, params: list[Tensor]) -> dict[int, tuple[Tensor, str] | None]:
        """Return what is remembered of parameters, for `restore`."""
        return {id(p): self._pairs.get(id(p)) for p in params}

    def restore(self, pairs: dict[int, tuple[Tensor, str] | None]) -> None:
        """Remember of parameters what `pairs_of` has returned."""
        for i, pair in pairs.items():
            self._pairs.pop(i, None)
            if pair is not None:
                self._pairs[i] = pair

    def get(self, p: Tensor) -> str | None:
        """Return the name of a parameter, or None."""
        pair = self._pairs.get(id(p))
        return None if pair is None else pair[1]

    def note(self, groups: list[Group]) -> None:
        """Write the names of parameters beside them, where those of all are known."""
        if not self._pairs:
            return self.remember(groups)
        members = {id(p) for group in groups for p in group["params"]}
        self._forget_gone(members)
        used = {name for i, (_, name) in self._pairs.items() if i in members}
        for group in groups:
            params, names = group["params"], group.get("param_names", [])
            if len(names) == len(params):
                self._note_new(params, names, used)
            present = list(map(self.get, params))
            if "param_names" in group and None not in present and present != names:
                group["param_names"] = present

    def _note_new(self, params: list[Tensor], names: list[str], used: set[str]) -> None:
        """Remember names that stand beside new parameters, or that were never given."""
        pairs = list(zip(params, names))
        # A new parameter is in the place of another if all else is as it was.
        alike = all([self.get(p) in (None, n) or n not in self._every for p, n in pairs])
        for p, name in pairs:
            new = alike and id(p) not in self._pairs and name not in used
            if new:
                self._take_over(name)
            if new or name not in self._every:
                self._pairs[id(p)] = p, name
                self._every.add(name)
                used.add(name)

    def _take_over(self, name: str) -> None:
        """Take a name from parameters that are in no group, for one in their place."""
        for i in [i for i, (_, other) in self._pairs.items() if other == name]:
            former, _ = self._pairs.pop(i)
            if not former.requires_grad:
                warn_user(
                    f"a parameter that was put into a group has the name {name!r} of one "
                    "that was frozen and taken out of it. If it does not replace that "
                    "parameter, write its own name into the group's 'param_names'"
                )

    def _forget_gone(self, members: set[int]) -> None:
        """Forget parameters that neither the groups nor the program keep."""
        for i in self._pairs.keys() - members:
            p, name = self._pairs.pop(i)
            kept = ref(p)
            del p  # if this was the last reference, `kept` returns None
            if (q := kept()) is not None:
                self._pairs[i] = q, name

    def named(self, groups: list[Group]) -> list[Group]:
        """Return the groups with the names of their parameters as they are now.

        Raises:
            ValueError: A parameter without a name in a group that has names.
        """
        if not any("param_names" in group for group in groups):
            return groups
        self.note(groups)
        result: list[Group] = []
        for i, group in enumerate(groups):
            names = list(map(self.get, group["params"]))
            if None in names:
                k = names.index(None)
                raise ValueError(
                    f"param_groups[{i}]['params'][{k}], of shape "
                    f"{tuple(group['params'][k].shape)}, has no name: it was put into the "
                    "list later. Set the group's 'param_names' to the names of all of its "
                    f"{len(names)} parameters, in their order"
                )
            result.append({**group, "param_names": names})
        return result


class Path:
    """A parameter's name for errors, or its index in the group if it has none.

    Found only when it is formatted, because the search takes time for each parameter.
    """

    def __init__(self, names: Names, group: Group, p: Tensor) -> None:
        self._names, self._group, self._p = names, group, p

    def __str__(self) -> str:
        name = self._names.get(self._p)
        places = [i for i, q in enumerate(self._group["params"]) if q is self._p]
        return f"[{(name if name is not None else places[0])!r}]"
