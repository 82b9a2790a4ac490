"""States that torch's ZeroRedundancyOptimizer divides among processes, on gloo."""

import pytest
import worlds
import zero_worlds

CHECKS = [
    *(zero_worlds.every_rule, zero_worlds.storages, zero_worlds.transforms),
    zero_worlds.sums,
]


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(CHECKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_processes(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]
