"""`MuonAdamW`: Muon for the matrices of a model's hidden layers, AdamW for the rest."""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from optimi_func.core.rule import Storage
from optimi_func.optimizers.adam import adamw
from optimi_func.optimizers.hidden import HiddenMatrices, matrices_of
from optimi_func.optimizers.mixed import Mixed
from optimi_func.optimizers.muon import TABLES, muon
from optimi_func.pure.functional import FunctionalOptimizer


def MuonAdamW(  # noqa: D417
    model: nn.Module = cast(Any, None),
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    *,
    adamw_weight_decay: float | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = TABLES["standard"][0],
    adjust_lr_fn: str = "match_rms_adamw",
    ns_dtype: torch.dtype | str | None = None,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-6,
    head: str | Iterable[str] | None = None,
    kahan_sum: bool | None = None,
    foreach: bool | None = None,
    gradient_release: bool = False,
    compile: bool | None = None,
    capturable: bool = False,
    state_dtype: torch.dtype | str | None = None,
    storage: Storage | str | None = None,
) -> Mixed:
    """`Mixed` of Muon for a model's `hidden_matrices` and AdamW for the rest, at one lr.

    Embeddings, norms, biases and other parameters that are not called a weight do not decay
    unless adamw_weight_decay is given.

    With transformers: Trainer(..., optimizer_cls_and_kwargs=(lambda: MuonAdamW, {"lr":
    1e-3})).

    Args:
        model: Its trainable parameters are taken.
        lr: Learning rate of both; with another adjust_lr_fn they need different ones.
        weight_decay: Decay of the matrices: Muon's, and of AdamW's the output layer (unless
            it is tied to an embedding) and 1-d convolutions.
        adamw_weight_decay: Decay of all parameters of AdamW instead. None: see above.
        momentum: Muon's.
        nesterov: Muon's.
        ns_coefficients: Muon's.
        adjust_lr_fn: Muon's.
        ns_dtype: Muon's.
        betas: AdamW's.
        eps: AdamW's.
        head: The output layer, for AdamW: see `hidden_matrices`.

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
    if model is None:  # the Trainer calls without arguments whatever is no class
        raise TypeError(
            "MuonAdamW takes the model: MuonAdamW(model, lr=1e-3). For transformers: "
            "optimizer_cls_and_kwargs=(lambda: MuonAdamW, {...})"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"MuonAdamW got a {type(model).__name__}: allowed is a module, because its "
            "layers say what is a matrix. Make a Mixed of named parameters"
        )
    hidden, decayed = matrices_of(model, head)
    matrices = muon(
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_coefficients=ns_coefficients,
        adjust_lr_fn=adjust_lr_fn,
        ns_dtype=ns_dtype,
    )
    rest = partial(adamw, lr=lr, betas=betas, eps=eps)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    left = [pair for pair in named if not hidden(*pair)]
    parts: list[tuple[HiddenMatrices, FunctionalOptimizer]] = [(hidden, matrices)]
    if adamw_weight_decay is None:
        if any(decayed(*pair) for pair in left):
            parts.append((decayed, rest(weight_decay=weight_decay)))
        left = [pair for pair in left if not decayed(*pair)]
    return Mixed(
        named,
        *parts,
        rest=rest(weight_decay=adamw_weight_decay or 0.0) if left else None,
        kahan_sum=kahan_sum,
        foreach=foreach,
        gradient_release=gradient_release,
        compile=compile,
        capturable=capturable,
        state_dtype=state_dtype,
        storage=storage,
    )
