"""A fixed selection of runs, hashed, so that two checkouts can be compared bit for bit.

    python tests/support/bits.py save FOLDER      # in the checkout before a change
    python tests/support/bits.py compare FOLDER   # in the one after it

A run that a checkout lacks, or refuses, has its error's type in place of a hash. The
checkpoints that `save` has written are loaded and gone on with by `compare`.
"""

import argparse
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cases
import torch
from cases import CASES, CLASSES, DEFAULTS, MAPPED, MATRICES, REFUSE_STATES, Case
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

import optimi_func
from optimi_func import Storage, compiled, transforms

Run = Callable[[], Any]
DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}
STORAGES: dict[str, Any] = {
    "exact": "exact",
    "compact": "compact",
    "plain": Storage("plain"),
    "kahan": Storage("kahan"),
    "kahan8": Storage("kahan8"),
    "8bit": Storage(moments="8bit"),
    "kahan-8bit": Storage("kahan", "8bit"),
    "bfloat16": Storage(moments=torch.bfloat16),
    "float32": Storage(moments=torch.float32),
}
EXECUTORS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "foreach": {"foreach": True},
}
SHAPES = [(7, 5), (33,), (4, 3, 2), (84, 80)]


def hashed(tree: Any) -> str:
    """Return a hash of all tensors and numbers in a tree."""
    digest = hashlib.sha256()
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor):
            x = x.detach().contiguous().cpu()
            digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
            digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(x).encode())
    return digest.hexdigest()[:16]


def tensors(name: str, dtype: torch.dtype, shapes: Any = SHAPES) -> list[Tensor]:
    some = [s for s in shapes if len(s) == 2] if name in MATRICES else shapes
    draw = torch.Generator().manual_seed(1)
    return [(1 + torch.randn(s, generator=draw)).to(dtype).requires_grad_() for s in some]


def gradients(params: list[Tensor], i: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + i)
    return [
        (0.5 + torch.randn(p.shape, generator=draw)).to(p.dtype) * 0.9**i for p in params
    ]


def steps(optimizer: Any, params: list[Tensor], first: int = 0, count: int = 5) -> None:
    for i in range(first, first + count):
        for group in optimizer.param_groups:
            group["lr"] = cases.LR * (1 + i % 3)
        for p, g in zip(params, gradients(params, i)):
            p.grad = g
        optimizer.step()


def state_of(optimizer: Any, params: list[Tensor]) -> Any:
    rows = [sorted(optimizer.state[p].items()) for p in params if p in optimizer.state]
    return [p.detach() for p in params], rows


def class_run(case: Case, dtype: torch.dtype, **options: Any) -> Any:
    params = tensors(case.name, dtype)
    optimizer: Any = CLASSES[case.name](params, cases.LR, **case.options, **options)
    steps(optimizer, params)
    return state_of(optimizer, params)


def pure_run(case: Case, dtype: torch.dtype, storage: Any = None) -> Any:
    params = [p.detach() for p in tensors(case.name, dtype)]
    value = case.functional()
    state = value.init(params) if storage is None else value.init(params, storage=storage)
    for i in range(4):
        params, state = value.step(params, gradients(params, i), state)
    return params, state


def compiled_pure_run(case: Case, dtype: torch.dtype) -> Any:
    params = [p.detach() for p in tensors(case.name, dtype)]
    value, step = case.functional(), getattr(compiled, f"{case.name}_step")
    state = value.init(params)
    for i in range(3):
        params, state = step(params, gradients(params, i), state, lr=0.02, **case.options)
    return params, state


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    bias = False  # so that optimizers of matrices take it
    layers = [nn.Linear(6, 16, bias=bias), nn.Tanh(), nn.Linear(16, 16, bias=bias)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 3, bias=bias)).to(dtype)


def loss_of(model: nn.Module, i: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def release_run(
    name: str, dtype: torch.dtype, two_pass: bool = False, **options: Any
) -> Any:
    model = net(dtype)
    optimizer: Any = CLASSES[name](
        model.parameters(), cases.LR, gradient_release=True, compile=False
    )
    handle = optimi_func.prepare_for_gradient_release(model, optimizer, **options)
    for i in range(6):
        if two_pass:
            handle.backward(lambda i=i: loss_of(model, i))
        else:
            loss_of(model, i).backward()
    optimizer.step()
    found = state_of(optimizer, list(model.parameters()))
    handle.remove()
    return found


def accumulated_run(name: str, dtype: torch.dtype, release: bool) -> Any:
    model, options = net(dtype), {"compile": False, "gradient_release": release}
    optimizer: Any = CLASSES[name](model.parameters(), cases.LR, **options)
    if release:
        optimi_func.prepare_for_gradient_release(model, optimizer)
    for i in range(6):
        optimizer.optimizer_accumulation = i % 3 < 2
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(optimizer, list(model.parameters()))


def transforms_run(name: str, dtype: torch.dtype) -> Any:
    params = tensors(name, dtype)
    every = [
        transforms.centralize(), transforms.clip_global_norm(1.0),
        transforms.clip_param_norm(0.8), transforms.clip_value(0.1),
    ]  # fmt: skip
    optimizer: Any = CLASSES[name](params, cases.LR, transforms=every, compile=False)
    steps(optimizer, params)
    return state_of(optimizer, params)


def chain_run(name: str, dtype: torch.dtype) -> Any:
    params = [p.detach() for p in tensors(name, dtype)]
    value = Case(name).functional()
    value = transforms.chain(
        transforms.clip_global_norm(1.0), value, transforms.clip_value(1e-2)
    )
    state = value.init(params)
    for i in range(4):
        params, state = value.step(params, gradients(params, i), state)
    return params, state


def wrapped_run(kind: str, name: str) -> Any:
    model = net(torch.float32)
    inner: Any = CLASSES[name](model.parameters(), cases.LR, compile=False)
    more: dict[str, Any] = {"sam": {"rho": 0.1}, "asam": {"rho": 0.1, "adaptive": True}}
    wrapper = optimi_func.Lookahead if kind == "lookahead" else optimi_func.SAM
    optimizer: Any = wrapper(inner, **more.get(kind, {}))

    def closure(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        return loss

    for i in range(7):
        optimizer.step(partial(closure, i))
    return [p.detach() for p in model.parameters()]


def unroll_run(name: str) -> Any:
    params = [p.detach() for p in tensors(name, torch.float64, [(3, 4)])]

    def last(lr: Tensor) -> Tensor:
        value = Case(name).functional(lr)
        p, state = params, value.init(params)
        for i in range(3):
            p, state = value.step(p, gradients(params, i), state)
        return torch.stack([x.square().sum() for x in p]).sum()

    return torch.func.grad_and_value(last)(torch.tensor(0.02, dtype=torch.float64))


def population_run(name: str) -> Any:
    model = optimi_func.population
    params = {"w": tensors(name, torch.float32, [(5, 4)])[0].detach().expand(3, 5, 4)}
    value = Case(name).functional()
    state = torch.func.vmap(value.init)(params)
    for i in range(3):
        grads = {"w": torch.stack(gradients([params["w"][0]] * 3, i))}
        params, state = torch.func.vmap(value.step)(params, grads, state)
    return params, state, model is None


def fit_run(dtype: torch.dtype, batch: bool) -> Any:
    def loss(p: Tensor, at: Tensor) -> Tensor:
        return (p[1:] - p[:-1] ** 2).square().sum() * 10 + (at - p).square().sum()

    p = torch.linspace(0.3, 0.9, 12, dtype=dtype).reshape(3, 4)
    at = torch.tensor(1.1, dtype=dtype, requires_grad=True)
    dims = {"in_dims": (0, None)} if batch else {}
    found, state = optimi_func.lbfgs().solve(loss, p if batch else p[0], at, **dims)
    return found, state.func_evals, torch.autograd.grad(found.sum(), at)


def train_step_run(name: str, **options: Any) -> Any:
    model = net(torch.float32)
    optimizer: Any = CLASSES[name](model.parameters(), cases.LR)

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    step: Any = compiled.train_step(model, loss, optimizer, **options)
    losses = [step(torch.full((8, 6), 0.1 * i + 0.2)).loss for i in range(4)]
    return losses, [p.detach() for p in model.parameters()]


def evaluated_run(name: str, dtype: torch.dtype) -> Any:
    params = tensors(name, dtype)
    optimizer: Any = CLASSES[name](params, cases.LR, compile=False)
    steps(optimizer, params, 0, 3)
    optimizer.eval()
    shown = [p.detach().clone() for p in params]
    optimizer.train()
    steps(optimizer, params, 3, 2)
    return shown, state_of(optimizer, params)


def reset_run(name: str) -> Any:
    params = tensors(name, torch.bfloat16)
    optimizer: Any = CLASSES[name](params, cases.LR, compile=False)
    steps(optimizer, params, 0, 3)
    optimizer.reset(params[:1])
    steps(optimizer, params, 3, 2)
    return state_of(optimizer, params)


def muon_adamw_run(dtype: torch.dtype, **options: Any) -> Any:
    model = net(dtype)
    optimizer: Any = optimi_func.MuonAdamW(model, lr=0.02, **options)
    for i in range(4):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
    return state_of(optimizer, list(model.parameters()))


def saved_run(folder: Path, key: str, saves: bool, case: Case, dtype: Any, o: Any) -> Any:
    """Go on from a checkpoint of the checkout that saved."""
    path = folder / f"{key.replace('/', '_')}.pt"
    params = tensors(case.name, dtype)
    make: Any = partial(CLASSES[case.name], lr=cases.LR, compile=False, **o)
    optimizer = make(params)
    if saves:
        steps(optimizer, params, 0, 3)
        kept = deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
        torch.save(kept, path)
    state, weights = torch.load(path, weights_only=True)
    params = tensors(case.name, dtype)
    for p, w in zip(params, weights):
        p.data.copy_(w)
    optimizer = make(params)
    optimizer.load_state_dict(state)
    steps(optimizer, params, 3, 3)
    return state_of(optimizer, params)


def compiled_rows() -> list[Case]:
    """Return those whose kernels are compiled: every rule, and some options."""
    wanted = ("amsgrad", "momentum", "centered", "nesterov", "torch_form", "cautious")
    some = [c for c in cases.OPTIONS if {*wanted} & {*c.options}]
    return [*DEFAULTS, *some[:10]]


def runs(folder: Path, saves: bool) -> Iterator[tuple[str, Run]]:
    """Yield all runs, by name."""
    for case in CASES:
        for d, dtype in DTYPES.items():
            for e, options in EXECUTORS.items():
                yield f"class/{case.id}/{d}/{e}", partial(class_run, case, dtype, **options)
        yield f"pure/{case.id}", partial(pure_run, case, torch.float32)
    for case in DEFAULTS:
        name = case.name
        for s, storage in STORAGES.items():
            for d in ("float32", "bfloat16"):
                for e, options in EXECUTORS.items():
                    run = partial(class_run, case, DTYPES[d], storage=storage, **options)
                    yield f"storage/{name}/{s}/{d}/{e}", run
                key = f"saved/{name}/{s}/{d}"
                what = folder, key, saves, case, DTYPES[d], {"storage": storage}
                yield key, partial(saved_run, *what)
            run = partial(pure_run, case, torch.bfloat16, storage)
            yield f"pure-storage/{name}/{s}", run
        for d in ("float64", "float32", "bfloat16"):
            dtype, key = DTYPES[d], f"{name}/{d}"
            more = folder, f"saved/{key}", saves, case, dtype, {}
            yield f"saved/{key}", partial(saved_run, *more)
            yield f"release/{key}", partial(release_run, name, dtype)
            buffer = {"accumulation": "buffer", "accumulation_steps": 3}
            yield f"buffer/{key}", partial(release_run, name, dtype, **buffer)
            for clip in ({"clip_param_norm": 0.5}, {"clip_value": 0.1}):
                yield f"{next(iter(clip))}/{key}", partial(release_run, name, dtype, **clip)
            whole: dict[str, Any] = {"clip_global_norm": 0.5, "two_pass": True}
            yield f"two_pass/{key}", partial(release_run, name, dtype, **whole)
            if name not in REFUSE_STATES:
                for r in (False, True):
                    yield f"states/{key}/{r}", partial(accumulated_run, name, dtype, r)
            yield f"transforms/{key}", partial(transforms_run, name, dtype)
            yield f"chain/{key}", partial(chain_run, name, dtype)
        for kind in ("sam", "asam", "lookahead"):
            yield f"{kind}/{name}", partial(wrapped_run, kind, name)
        yield f"reset/{name}", partial(reset_run, name)
        yield f"unroll/{name}", partial(unroll_run, name)
        yield f"vmap/{name}", partial(population_run, name)
        if name in cases.SCHEDULE_FREE:
            for d, dtype in DTYPES.items():
                yield f"evaluated/{name}/{d}", partial(evaluated_run, name, dtype)
        if name in ("adamw", "sgd", "lion", "stableadamw", "muon"):
            yield f"compiled-train/{name}", partial(train_step_run, name)
        if name == "adamw":
            more = {"accumulate": 2, "clip_global_norm": 0.1}
            yield f"compiled-train/{name}/two", partial(train_step_run, name, **more)
    for d in ("float64", "float32"):
        for batch in (False, True):
            yield f"fit/{d}/{batch}", partial(fit_run, DTYPES[d], batch)
    for d, dtype in DTYPES.items():
        yield f"muonadamw/{d}", partial(muon_adamw_run, dtype, compile=False)
    for case in compiled_rows():
        for d in ("float32", "bfloat16"):
            run = partial(class_run, case, DTYPES[d], compile=True)
            yield f"compiled/{case.id}/{d}", run
        if case.name not in MAPPED:
            run = partial(compiled_pure_run, case, torch.float32)
            yield f"compiled-pure/{case.id}", run


def result(run: Run) -> str:
    try:
        return hashed(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:120]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("mode", choices=("save", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="of runs whose names begin so")
    parser.add_argument("--without", default="-", help="not of those")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.folder.mkdir(parents=True, exist_ok=True)
    table = options.folder / "hashes.json"
    before = json.loads(table.read_text()) if table.exists() else {}
    every = [
        (key, run)
        for key, run in runs(options.folder, options.mode == "save")
        if key.startswith(options.only) and not key.startswith(options.without)
    ]
    now, start = {}, time.monotonic()
    for key, run in tqdm(every, "runs", mininterval=5):
        torch.manual_seed(0)
        now[key] = result(run)
    if options.mode == "save":
        table.write_text(json.dumps(before | now, indent=0))
        failed = [f"{k}: {x}" for k, x in now.items() if ":" in x]
        print(f"{len(now)} runs saved in {time.monotonic() - start:.0f} s, of which "
              f"{len(failed)} are refused", *failed[:400], sep="\n")  # fmt: skip
        return 0
    wanted = {k: x for k, x in before.items() if k in now}
    other = [f"{k}: {x} -> {now[k]}" for k, x in wanted.items() if now[k] != x]
    print(*other, f"{len(other)} of {len(wanted)} runs differ", sep="\n")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
