"""A list kernel, run by Triton's interpreter: `python interpreted.py MODULE FILE`.

In a process of its own: what is imported under TRITON_INTERPRET is interpreted for good.
FILE has (numbers, columns, off); each tensor is moved `off` elements behind an aligned
address, and the columns are written back.
"""

import importlib.util
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimi_func.execution.triton_list import BLOCK, REST, DeviceTable


def interpreted(
    module: Path, folder: Path, numbers: Tensor, columns: list[list[Tensor]], off: int
) -> list[list[Tensor]]:
    """The columns after one launch."""
    file = folder / "interpreted.pt"
    torch.save((numbers, columns, off), file)
    subprocess.run([sys.executable, __file__, module, file], check=True)
    return torch.load(file)


def _run(module: Path, file: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from torch._inductor.runtime import triton_helpers

    setattr(triton_helpers, "set_driver_to_gpu", lambda: None)  # noqa: B010
    spec = importlib.util.spec_from_file_location("list_kernel", module)
    assert spec is not None and spec.loader is not None
    loaded: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    numbers, columns, off = torch.load(file)
    columns = [
        [torch.cat([x.new_zeros(off), x])[off:] for x in column] for column in columns
    ]
    p, gradients, *rest = [array("q", map(Tensor.data_ptr, x)) for x in columns]
    lengths = array("q", map(len, columns[0]))
    table = DeviceTable(torch.device("cpu"), lengths, sum(rest, p))
    loaded.all_blocks[(table.blocks,)](
        numbers,
        *table.arguments(gradients),
        table.count,
        numbers.stride(0),
        XBLOCK=BLOCK,
        REST=REST,
    )
    torch.save([[x.clone() for x in column] for column in columns], file)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), Path(sys.argv[2]))
