"""`MuonAdamW`: Muon for the matrices of a model's hidden layers, AdamW for the rest."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from optimi_func.core.checks import check_process_group
from optimi_func.core.rule import StorageLike
from optimi_func.optimizers.adam import adamw
from optimi_func.optimizers.hidden import EMBEDDINGS, hidden_matrices
from optimi_func.optimizers.mixed import Mixed, Named
from optimi_func.optimizers.muon import TABLES, muon
from optimi_func.optimizers.normuon import normuon


def MuonAdamW(  # noqa: D417
    model: nn.Module | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    *,
    adamw_weight_decay: float | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = TABLES["standard"][0],
    adjust_lr_fn: str | None = "match_rms_adamw",
    ns_dtype: torch.dtype | str | None = None,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-6,
    head: str | Iterable[str] | None = None,
    row_beta: float | None = None,
    kahan_sum: bool | None = None,
    foreach: bool | None = None,
    gradient_release: bool = False,
    compile: bool | None = None,
    capturable: bool = False,
    state_dtype: torch.dtype | str | None = None,
    storage: StorageLike | None = None,
    process_group: Any = None,
) -> Mixed:
    """`Mixed` of Muon for a model's `hidden_matrices` and AdamW for the rest, at one lr.

    With transformers: Trainer(..., optimizer_cls_and_kwargs=(lambda: MuonAdamW, {"lr":
    1e-3})).

    Args:
        model: Its trainable parameters are taken.
        lr: Learning rate of both; with another adjust_lr_fn they need different ones.
        weight_decay: Decay of matrices and of an output layer not tied to an embedding.
        adamw_weight_decay: Decay of all that AdamW updates, as torch's. None: embeddings,
            norms, biases and others that are not called a weight do not decay.
        momentum: Muon's.
        nesterov: Muon's.
        ns_coefficients: Muon's.
        adjust_lr_fn: Muon's.
        ns_dtype: Muon's.
        betas: AdamW's.
        eps: AdamW's.
        head: The output layer, for AdamW: see `hidden_matrices`.
        row_beta: `NorMuon`'s, which it takes in the place of Muon. None: Muon.
        process_group: Muon's.

    The other arguments are those of every optimizer: see `BaseOptimizer`.

    Raises:
        TypeError: model is missing, or is no module.
        ValueError: A hyperparameter out of its range, or a model without hidden matrices.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> print(MuonAdamW(model, lr=1e-3).describe())
    group  tensors  elements  parameters  moments  in codes  bytes    each
        0        1         8     float32  float32     0.0 %     64   8.000
        1        1        12     float32  float32     0.0 %    144  12.000
        2        2         7     float32  float32     0.0 %     84  12.000
      all        4        27                          0.0 %    292  10.815
    <BLANKLINE>
    muon   4 x 2  0.weight
    adamw  3 x 4  2.weight
    adamw  4      0.bias
    adamw  3      2.bias
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"MuonAdamW got a {type(model).__name__}: allowed is a module, because its "
            "layers say what is a matrix. Make a Mixed of named parameters. Pass "
            "transformers optimizer_cls_and_kwargs=(lambda: MuonAdamW, {...})"
        )
    own: dict[str, Any] = dict(momentum=momentum, nesterov=nesterov, ns_dtype=ns_dtype)
    own |= dict(ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn)
    hidden, rest = hidden_matrices(model, head), partial(adamw, lr=lr, betas=betas, eps=eps)
    matrices = muon if row_beta is None else partial(normuon, row_beta=row_beta)
    parts: list[Any] = [(hidden, matrices(lr=lr, weight_decay=weight_decay, **own))]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    left = {name: p for name, p in named if not hidden(name, p)}
    if adamw_weight_decay is None:
        tables = [m for m in model.modules() if isinstance(m, EMBEDDINGS)]
        tied = {id(p) for table in tables for p in table.parameters()}
        weights = [n for n, p in left.items() if p.dim() > 1 and id(p) not in tied]
        decayed = Named([n for n in weights if "weight" in n.split(".")[-1]])
        parts += [(decayed, rest(weight_decay=weight_decay))] if decayed.names else []
        left = left.keys() - decayed.names
    how: dict[str, Any] = dict(kahan_sum=kahan_sum, foreach=foreach, compile=compile)
    how |= dict(gradient_release=gradient_release, capturable=capturable)
    how |= dict(state_dtype=state_dtype, storage=storage)
    decay = rest(weight_decay=adamw_weight_decay or 0.0) if left else None
    made = Mixed(named, *parts, rest=decay, **how)
    made.process_group = check_process_group(process_group)
    return made
