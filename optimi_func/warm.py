"""Compile the steps of optimizers now, so that later processes load them.

`python -m optimi_func.warm AdamW Lion --dtype bfloat16 --storage compact`
"""

import argparse
import ast
import logging
import sys
import time
from typing import Any

import torch
from torch.nn import Parameter

from optimi_func import optimizers
from optimi_func.execution import cpp, kernels, store
from optimi_func.execution.list_kernel import ListKernel

_CLASSES = {
    name: x
    for name, x in vars(optimizers).items()
    if isinstance(x, type) and hasattr(x, "factory")
}


def warm(name: str, dtype: torch.dtype, **options: Any) -> list[str]:
    """Compile or load the kernels of a class's steps.

    Args:
        name: A class of `optimi_func.optimizers`.
        dtype: The dtype of parameters and gradients.
        options: Arguments of the class; lr is 1e-3 without.

    Returns:
        The names of kernels that no later process can load.

    Raises:
        ValueError, TypeError: An option that the class does not take.
        Exception: Any error of the compiler.
    """
    for _ in range(2):  # The second time, all that were kept are loaded.
        kernels.forget()
        p = Parameter(torch.ones(64, 64, dtype=dtype))
        optimizer = _CLASSES[name]([p], **{"lr": 1e-3, "compile": True, **options})
        for _ in range(int(options.get("k", 6))):  # Ranger's k-th step has its own kernel.
            p.grad = torch.ones_like(p)
            optimizer.step()
    loop = store.find(cpp.native_key()) is not None
    return [
        key.name
        for key, made in kernels.compiled().items()
        if not (loop and isinstance(made, ListKernel) and made.is_loaded)
    ]


def main() -> None:
    """Warm the optimizers of the command line; exit with 1 if something was not kept."""
    parser = argparse.ArgumentParser(prog="python -m optimi_func.warm", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="class", choices=_CLASSES)
    dtypes = ("float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=dtypes)
    parser.add_argument("--storage", choices=("compact", "exact"))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="option=value", help="such as momentum=0.9"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options: dict[str, Any] = {"storage": given.storage} if given.storage else {}
    for text in given.set:
        option, equals, value = text.partition("=")
        if not equals:
            parser.error(f"--set {text}: allowed is option=value")
        try:
            options[option] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[option] = value
    if store.folder() is None:
        sys.exit(f"{store.VARIABLE}=0: no folder to keep compiled steps in")
    lost: list[str] = []
    for name in given.names:
        for dtype in given.dtype:
            start = time.perf_counter()
            lost += warm(name, getattr(torch, dtype), **options)
            seconds = time.perf_counter() - start
            print(f"{name} {dtype}: {seconds:.1f} s", flush=True)
    if lost:
        sys.exit(f"not kept in {store.folder()}, so each process compiles: {lost}")
    print(f"kept in {store.folder()}")


if __name__ == "__main__":
    main()
