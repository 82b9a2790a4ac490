"""The places and names of an optimizer's parameters, found from the tensors.

Programs edit `group["params"]`: they drop parameters that they freeze, move them to other
groups and replace them. torch keeps names in a list beside it, which does not follow.
"""

from collections.abc import Iterable
from itertools import zip_longest
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
    keeps the parameter. A new one takes the name that the program writes beside it in
    "param_names". Without one it takes the name of the parameter in whose place it is, but
    only if the others of the list have kept their places, and if no other parameter of its
    shape may have been in this place before it. Else it has no name until one is written.
    """

    def __init__(self) -> None:
        # With the parameter, because another may get its id when it is gone. Weak
        # references would be refused by torch.utils.swap_tensors, and so by module.to().
        self._pairs: dict[int, tuple[Tensor, str | None]] = {}
        self._every: set[str] = set()  # all names that were ever given
        # What the groups were when they were noted, by their ids: the ids of parameters,
        # "param_names", and a copy of it, because programs write to it or replace it.
        self._lists: dict[int, tuple[list[int], object, list[str]]] = {}

    def copy(self) -> "Names":
        """Return the same names in an object of its own."""
        other = Names()
        other._pairs, other._every = dict(self._pairs), {*self._every}
        other._lists = dict(self._lists)
        return other

    def remember(self, groups: list[Group]) -> None:
        """Remember the names in "param_names", which are in the order of the parameters."""
        for group in groups:
            if "param_names" in group:
                self._give(zip(group["params"], group["param_names"]))
                self._see(group)

    def get(self, p: Tensor) -> str | None:
        """Return the name of a parameter, or None."""
        pair = self._pairs.get(id(p))
        return None if pair is None else pair[1]

    def note(self, groups: list[Group]) -> None:
        """Write the names of parameters beside them, where those of all are known."""
        if not self._lists:
            return self.remember(groups)
        members = {id(p) for group in groups for p in group["params"]}
        holders = self._holders(members)
        named = [group for group in groups if "param_names" in group]
        written = [group for group in named if self._is_written(group)]
        replaced = [pair for group in named for pair in self._replaced(group, members)]
        stay = members | {id(former) for _, former in replaced}
        shapes = {p.shape for p in self._left(stay)}
        clear = self._read(written, named, holders)
        for p, former in replaced if clear else ():
            if p.shape not in shapes and self.get(p) is None:
                self._take_over(p, former)
        self._forget_gone(members)
        self._lists.clear()
        for group in named:
            present = list(map(self.get, group["params"]))
            if None not in present and present != group["param_names"]:
                group["param_names"] = present
            self._see(group)

    def _give(self, pairs: Iterable[tuple[Tensor, str]]) -> None:
        for p, name in pairs:
            self._pairs[id(p)] = p, name
            self._every.add(name)

    def _see(self, group: Group) -> None:
        """Remember what a group is now."""
        params, names = group["params"], group["param_names"]
        for p in params:
            self._pairs.setdefault(id(p), (p, None))
        self._lists[id(group)] = list(map(id, params)), names, list(names)

    def _holders(self, members: set[int]) -> dict[str, int]:
        """Return the ids of the groups' parameters by name.

        One that returns loses its name if another has got it in the meantime.
        """
        seen = {i for ids, *_ in self._lists.values() for i in ids}
        known = [i for i in self._pairs if i in members]
        holders: dict[str, int] = {}
        for i in sorted(known, key=lambda i: i not in seen):
            p, name = self._pairs[i]
            if name is not None and holders.setdefault(name, i) != i and i not in seen:
                self._pairs[i] = p, None
        return holders

    def _is_written(self, group: Group) -> bool:
        """Return if the program has written names for a group."""
        _, former, copy = self._lists.get(id(group), ((), None, []))
        return group["param_names"] is not former or former != copy

    def _replaced(self, group: Group, members: set[int]) -> list[tuple[Tensor, Tensor]]:
        """Return new parameters, each with the one that was in its place and is gone."""
        params, (ids, *_) = group["params"], self._lists.get(id(group), ([],))
        stay = [id(p) == i or id(p) not in ids for p, i in zip(params, ids)]
        # Names beside those that were appended say that the others are in their places.
        appended = len(params) > len(ids) and len(params) == len(group["param_names"])
        if not (all(stay) and (len(ids) == len(params) or appended)):
            return []
        new = [(p, i) for p, i in zip(params, ids) if id(p) not in self._pairs]
        return [(p, self._pairs[i][0]) for p, i in new if i not in members]

    def _left(self, stay: set[int]) -> list[Tensor]:
        """Return parameters that have left the groups since these were noted.

        Such a one may have moved to a place that became free, and be what was replaced
        there.
        """
        ids = [i for ids, *_ in self._lists.values() for i in ids if i not in stay]
        return [self._pairs[i][0] for i in ids]

    def _read(
        self, written: list[Group], groups: list[Group], holders: dict[str, int]
    ) -> bool:
        """Read the names that a program has written, maybe before it moved parameters.

        Which of the two it did first is not known. So the names count if they would be the
        same either way. If not, the parameters that they could belong to have no name.

        Args:
            written: The groups whose "param_names" it wrote to.
            groups: All groups with names.
            holders: The ids of the groups' parameters by the names that they had.

        Returns:
            Whether each name that was never given before has a parameter.
        """
        fresh = {n for group in written for n in group["param_names"]} - self._every
        new: list[tuple[Tensor, str]] = []
        for group in written:
            ids, _, copy = self._lists.get(id(group), ([], None, []))
            params, names = group["params"], group["param_names"]
            alone = ids == list(map(id, params))  # no parameter was moved
            pairs = list(zip(params, names)) if len(params) == len(names) else []
            odd = [n for p, n in zip(params, names) if holders.get(n, id(p)) != id(p)]
            if alone:
                edited = {n for n, x in zip_longest(names, copy) if n != x}
                self._warn_of_odd(odd, edited)
            # A program that writes all names anew writes them for the list as it is.
            anew = fresh.issuperset(names) and any([id(p) in ids for p in params])
            if not odd and (alone or anew):
                self._give(pairs)
                continue
            if list(names) == copy:  # they say nothing new
                continue
            unknown = [p for p in params if id(p) not in self._pairs]
            taken = {*holders, *copy}
            if pairs and all([self._fits(p, name, taken) for p, name in pairs]):
                new += [(p, name) for p, name in pairs if self.get(p) is None]
                continue
            same = {*ids} == {id(p) for p in params} - {*map(id, unknown)}
            if pairs and same and len(unknown) == len(fresh) == 1:
                new.append((unknown[0], *fresh))
                continue
            for p, name in pairs:
                if name in fresh:
                    self._pairs[id(p)] = p, None
            for p in unknown:
                self._pairs[id(p)] = p, None
        others = self._nameless(groups) - {id(p) for p, _ in new}
        shapes = {p.shape for g in groups for p in g["params"] if id(p) in others}
        self._give([(p, name) for p, name in new if p.shape not in shapes])
        return fresh <= self._every

    def _fits(self, p: Tensor, name: str, taken: set[str]) -> bool:
        """Return whether a name is that of the parameter beside it, or new beside one."""
        known = self.get(p)
        return name not in taken if known is None else known == name

    def _nameless(self, groups: list[Group]) -> set[int]:
        return {id(p) for g in groups for p in g["params"] if self.get(p) is None}

    def _warn_of_odd(self, odd: list[str], written: set[str]) -> None:
        if names := [name for name in odd if name in written]:
            warn_user(
                f"'param_names' of a group has {names}, the names of other parameters: "
                "each parameter keeps its own. Write names that no other parameter has"
            )

    def _take_over(self, p: Tensor, former: Tensor) -> None:
        """Give a parameter the name of one that is in no group, in whose place it is."""
        if (name := self.get(former)) is None:
            return
        if not former.requires_grad:
            warn_user(
                f"a parameter that was put into a group has the name {name!r} of one "
                "that was frozen and taken out of it. If it does not replace that "
                "parameter, write its own name into the group's 'param_names'"
            )
        self._give([(p, name)])

    def _forget_gone(self, members: set[int]) -> None:
        """Forget parameters that neither the groups nor the program keep.

        Those whose names others have now lose them.
        """
        held = {name for i, (_, name) in self._pairs.items() if i in members and name}
        for i in self._pairs.keys() - members:
            p, name = self._pairs.pop(i)
            kept = ref(p)
            del p  # if this was the last reference, `kept` returns None
            if name not in held and (q := kept()) is not None:
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
