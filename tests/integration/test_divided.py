"""States that the processes of a group divide (`divide_state=True`), on gloo."""

import divided_worlds
import pytest
import worlds

from optimi_func.core.owners import EVERY, owners_of

QUICK = [
    divided_worlds.some_rules,
    divided_worlds.cut,
    divided_worlds.planned,
    divided_worlds.loops,
    divided_worlds.groups,
    divided_worlds.messages,
    divided_worlds.differ,
    divided_worlds.failures,
    divided_worlds.options,
    divided_worlds.averages,
    divided_worlds.emas,
    divided_worlds.tracked,
]
FULL = [
    *QUICK,
    divided_worlds.all_rules,
    divided_worlds.checkpoints,
    divided_worlds.released,
    divided_worlds.cut_released,
]


def loads_of(width: int, layers: int, muon: bool) -> list[tuple[int, ...]]:
    """Bytes of state and parameter, and multiplications, of a GPT-2."""
    sizes = [(3, 1), (1, 1), (4, 1), (4, 1)] * layers
    matrices = [(4 if muon else 8, a * width, b * width) for a, b in sizes]
    tables = [(8, 50304, width), (8, 1024, width)]
    rest = [(8, 1, k * width) for k in (3, 1, 4, 1, 1, 1, 1, 1) * layers]
    return [
        (each * m * n, 4 * m * n, m * n * n if each == 4 else 0)
        for each, m, n in tables + matrices + rest
    ]


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize(
    ("width", "layers", "count"),
    [
        (768, 12, 2),
        (768, 12, 4),
        (768, 12, 16),
        (1024, 24, 4),
        (1600, 48, 4),
        (1600, 48, 8),
    ],
)
def test_an_owner_has_at_most_a_twentieth_more_than_its_part(
    width: int, layers: int, count: int, muon: bool
) -> None:
    loads = loads_of(width, layers, muon)
    tables = [i for i, x in enumerate(loads) if x[0] == 2 * x[1] and x[1] > 1 << 20]
    found = owners_of(loads, count, [], tables)
    total, *_, cost = map(sum, zip(*loads))
    cut = [i for i, owner in enumerate(found) if owner == EVERY]
    # The table of 50304 rows of the small one is larger than a share, and only this is cut.
    assert cut == ([tables[0]] if width == 768 and count > 2 else [])
    own = [[x for x, owner in zip(loads, found) if owner == i] for i in range(count)]
    for some in own:
        state, _, multiplications = map(sum, zip(*some))
        state += sum([loads[i][0] for i in cut]) / count
        assert state <= total * (1 / count + 0.05)
        if width == 1600:  # where tables are small, the work is divided too
            assert multiplications <= cost * (1 / count + 0.05)
    # Owners stay when others join.
    assert (
        owners_of(loads, count, found[: len(loads) // 2], tables)[: len(loads) // 2]
        == (found[: len(loads) // 2])
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(QUICK, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def two_in_full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(FULL[len(QUICK) :], 2, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(FULL, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [check.__name__ for check in QUICK])
def test_two_processes(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]


@pytest.mark.full
@pytest.mark.parametrize("name", [check.__name__ for check in FULL[len(QUICK) :]])
def test_two_processes_in_full(name: str, two_in_full: dict[str, str]) -> None:
    assert not two_in_full[name], two_in_full[name]


@pytest.mark.full
@pytest.mark.parametrize("name", [check.__name__ for check in FULL])
def test_four_processes(name: str, four: dict[str, str]) -> None:
    assert not four[name], four[name]
