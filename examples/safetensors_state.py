"""Save an optimizer's state as safetensors: flat, named tensors, no pickle.

`model.safetensors` holds the parameters under their names, `optimizer.safetensors` each
parameter's state under the same names with the field's behind it, and the param groups'
numbers as JSON in its metadata. The optimizer has to be made from `named_parameters()`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from optimi_func import AdamW


def save_state(optimizer: torch.optim.Optimizer, path: Path) -> None:
    saved = optimizer.state_dict()
    names: dict[int, str] = {}
    for group in saved["param_groups"]:
        names |= zip(group["params"], group["param_names"])
    tensors = {
        f"{names[i]}.{field}": x.contiguous()
        for i, entry in saved["state"].items()
        for field, x in entry.items()
    }
    # The running optimizer chooses dtypes, which JSON does not have.
    groups = [
        {k: v for k, v in g.items() if k != "state_dtype"} for g in saved["param_groups"]
    ]
    save_file(tensors, path, {"param_groups": json.dumps(groups)})


def load_state(optimizer: torch.optim.Optimizer, path: Path) -> None:
    with safe_open(path, "pt") as file:
        groups = json.loads(file.metadata()["param_groups"])
        numbers: dict[str, int] = {}
        for group in groups:
            numbers |= zip(group["param_names"], group["params"])
        state: dict[int, dict[str, Any]] = {}
        for key in file.keys():
            name, field = key.rsplit(".", 1)
            state.setdefault(numbers[name], {})[field] = file.get_tensor(key)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/safetensors"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    def make() -> tuple[nn.Module, AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).bfloat16()
        return model, AdamW(model.named_parameters(), lr=1e-2, compile=False)

    def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
        for step in steps:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, optimizer = make()
    train(straight, optimizer, range(10))
    save_file(straight.state_dict(), out / "model.safetensors")
    save_state(optimizer, out / "optimizer.safetensors")
    train(straight, optimizer, range(10, 20))

    resumed, optimizer = make()
    resumed.load_state_dict(load_file(out / "model.safetensors"))
    load_state(optimizer, out / "optimizer.safetensors")
    with safe_open(out / "optimizer.safetensors", "pt") as file:
        for key in sorted(file.keys()):
            x = file.get_tensor(key)
            print(f"{key:24} {str(x.dtype)[6:]:9} {list(x.shape)}")
    train(resumed, optimizer, range(10, 20))
    same = all(map(torch.equal, straight.parameters(), resumed.parameters()))
    print(f"10 steps and 10 more after loading: the same weights as 20 steps: {same}")


if __name__ == "__main__":
    main()
