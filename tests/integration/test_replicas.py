"""Gradient release on replicas, beside DistributedDataParallel and step(), on gloo."""

import pytest
import replica_worlds
import worlds

# For `make test`.
QUICK = [
    replica_worlds.steps,
    replica_worlds.accumulation,
    replica_worlds.nonfinite,
    replica_worlds.differ,
]
TWO = [
    replica_worlds.states,
    replica_worlds.kinds,
    replica_worlds.unused,
    replica_worlds.optimizers,
    replica_worlds.compiled_steps,
    replica_worlds.clipping,
    replica_worlds.dtypes,
    replica_worlds.start,
    replica_worlds.refusals,
    replica_worlds.mistakes,
    replica_worlds.trained_later,
    replica_worlds.timeouts,
    replica_worlds.memory,
    replica_worlds.died,
]
FOUR = [
    *QUICK,
    replica_worlds.states,
    replica_worlds.unused,
    replica_worlds.optimizers,
    replica_worlds.clipping,
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(QUICK, 2, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worlds.start(FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [check.__name__ for check in QUICK])
def test_two_processes_in_short(name: str, quick: dict[str, str]) -> None:
    assert not quick[name], quick[name]


@pytest.mark.full
@pytest.mark.parametrize("name", [check.__name__ for check in TWO])
def test_two_processes(name: str, two: dict[str, str]) -> None:
    assert not two[name], two[name]


@pytest.mark.full
@pytest.mark.parametrize("name", [check.__name__ for check in FOUR])
def test_four_processes(name: str, four: dict[str, str]) -> None:
    assert not four[name], four[name]
