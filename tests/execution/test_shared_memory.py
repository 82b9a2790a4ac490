"""State that the user has put in shared memory, as A3C does, stays there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import torch.multiprocessing as mp
from optimi_func import SGD, AdamW


def work(params, optimizer, steps):
    torch.set_num_threads(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


def tensors(params, optimizer):
    return [*params, *(x for p in params for x in optimizer.state[p].values())]


def main(method, cls, options):
    processes = mp.get_context(method)
    params = [torch.nn.Parameter(torch.ones(n)) for n in (9000, 5, 1)]
    alone = [torch.nn.Parameter(torch.ones(n)) for n in (9000, 5, 1)]
    optimizer = cls(params, lr=0.125, **options)
    optimizer.init_state()
    for x in tensors(params, optimizer):
        x.share_memory_()
    shared = tensors(params, optimizer)
    places = [x.data_ptr() for x in shared]
    for steps in (2, 3) if method == "fork" else (5,):
        child = processes.Process(target=work, args=(params, optimizer, steps))
        child.start()
        child.join()
        assert child.exitcode == 0
    work(params, optimizer, 2)
    work(alone, (cls(alone, lr=0.125, **options)), 7)
    assert all(map(torch.equal, params, alone)), (params[1], alone[1])
    assert optimizer.state[params[2]]["step"] == 7
    # The tensors are those that were shared, where they were shared.
    now = tensors(params, optimizer)
    assert all(x is y and x.is_shared() for x, y in zip(now, shared, strict=True))
    assert [x.data_ptr() for x in now] == places
    if method == "spawn":
        return  # a process takes seconds to begin
    # Several at a time, as they come: nothing raises, and all of it is seen here.
    before = params[0].detach().clone()
    children = [
        processes.Process(target=work, args=(params, optimizer, 5)) for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert (params[0] < before).all() and 7 + 5 <= optimizer.state[params[0]]["step"]


if __name__ == "__main__":
    for cls, options in [
        (AdamW, {"compile": True}),
        (AdamW, {"compile": False}),
        (AdamW, {"foreach": True}),
        (SGD, {"momentum": 0.9, "compile": True}),
    ]:
        if sys.argv[1] == "fork" or options == {"compile": True}:
            main(sys.argv[1], cls, options)
"""


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_step_what_their_parent_sees(method: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(file), method],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
