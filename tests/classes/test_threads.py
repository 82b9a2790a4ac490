"""One optimizer, several threads: nothing raises, as with torch's."""

import sys
import threading
from typing import Any

import pytest
import torch
from tiers import few

from optimi_func import AdamW

HOW = [{"compile": True}, {"compile": False}, {"foreach": True}]


@pytest.mark.parametrize("how", few(HOW, [str(how) for how in HOW[1:]]))
def test_threads_that_step_and_save_one_optimizer(how: dict[str, Any]) -> None:
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for trial in range(10):
            _run(how, trial)
    finally:
        sys.setswitchinterval(switching)


def _run(how: dict[str, Any], trial: int) -> None:
    ps = [torch.nn.Parameter(torch.ones(n)) for n in (50, 5, 1)]
    for p in ps:
        p.grad = torch.ones_like(p)
    # Other options are other traces and plans, to be made by whoever comes first.
    optimizer = AdamW(ps, lr=1e-3, amsgrad=trial % 2 == 1, **how)
    optimizer.init_state()  # a dict that grows cannot be saved, by torch's either
    errors: list[BaseException] = []
    begin = threading.Barrier(3)

    def work() -> None:
        try:
            begin.wait()
            for i in range(20):
                optimizer.step()
                if i % 5 == 0:
                    optimizer.state_dict()
                if i % 7 == 0:
                    optimizer.group_of(ps[i % 3])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all((p < 1).all() for p in ps)
    assert 20 <= optimizer.state[ps[0]]["step"] <= 60
