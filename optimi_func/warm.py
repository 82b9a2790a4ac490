"""Compile the steps of optimizers now, so that later processes load them.

python -m optimi_func.warm AdamW Lion --dtype bfloat16 --storage compact
python -m optimi_func.warm AdamW --check
"""

import argparse
import json
import logging
import os
import sys
import time
from typing import Any

import torch

from optimi_func import functional
from optimi_func.core.storage import STORAGES
from optimi_func.execution import cpp, kernels, store


def _warm(made: Any, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    """Compile and print a class's kernels. Return those that no process can load."""
    found = kernels.forget()
    for _ in range(2):  # The second time, what has been kept is loaded.
        p = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype, device="cpu"))
        optimizer = made([p], **{"lr": 1e-3, "compile": True, **options})
        for _ in range(int(options.get("k", 6))):  # Ranger's k-th step has its own kernel.
            p.grad = torch.ones_like(p)
            optimizer.step()
        found = kernels.forget()
    cpp.native()
    paths = {x: getattr(made, "made_of", ("",))[0] for x, made in found.items()}
    paths["C++ functions"] = (store.find(cpp.native_key()) or ("",))[0]
    place = str(store.folder())
    lost = [x for x, path in sorted(paths.items()) if not path.startswith(place)]
    for x in sorted(paths):
        reason = (store.missing or {}).get(x, "compiled in each process")
        print(f"  {x}: {reason if x in lost else 'kept'}")
    return lost


def _option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    """Warm the optimizers of the command line; exit with 1 if something was not kept."""
    classes = {k: x for k, x in vars(functional).items() if hasattr(x, "factory")}
    dtypes = ("float32", "bfloat16", "float16", "float64")
    parser = argparse.ArgumentParser("python -m optimi_func.warm", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="class", choices=classes)
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=dtypes)
    parser.add_argument("--storage", choices=[*STORAGES])
    parser.add_argument("--set", nargs="+", default=[], type=_option, metavar="name=json")
    parser.add_argument("--check", action="store_true", help="only say what is kept")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (place := store.folder()) is None:
        sys.exit(f"{store.VARIABLE}={os.environ.get(store.VARIABLE)}: no store to fill")
    if args.check:
        store.missing = {}
    print(f"{place}: {store.unwritable() or 'writable'}")
    lost: list[str] = []
    for name in args.names:
        for dtype in args.dtype:
            start, options = time.perf_counter(), {"storage": args.storage}
            lost += _warm(classes[name], getattr(torch, dtype), options | dict(args.set))
            print(f"{name} {dtype}: {time.perf_counter() - start:.1f} s", flush=True)
    if lost:
        sys.exit(f"not kept in {place}, so each process compiles: {lost}")
    print(f"kept in {place}")


if __name__ == "__main__":
    main()
