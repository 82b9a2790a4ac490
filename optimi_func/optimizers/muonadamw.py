"""`MuonAdamW`: Muon for a model's hidden matrices, AdamW for all other parameters.

`hidden_matrices` selects the hidden matrices. You can also use `hidden_matrices` with
`Mixed` and `partition`.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, Unpack
from weakref import ref

import torch
from torch import Tensor, nn

from optimi_func.classes.groups import by_pattern, param_groups_by_name
from optimi_func.classes.options import with_options
from optimi_func.core.checks import check_number
from optimi_func.core.hooks import checked
from optimi_func.core.layout import as_layout, sides
from optimi_func.core.lists import grouped
from optimi_func.core.rule import Options
from optimi_func.optimizers.adam import AdamW, adamw
from optimi_func.optimizers.mixed import Mixed, Named, Part, rule_name
from optimi_func.optimizers.muon import TABLES, Muon, muon
from optimi_func.optimizers.normuon import NorMuon, normuon
from optimi_func.pure.functional import FunctionalOptimizer, Number
from optimi_func.state.convert import Group, without_wrappers

_log = logging.getLogger("optimi_func")

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
HIDDEN, EMBEDDED = "hidden matrices", "embeddings"
TRANSPOSED = "hidden matrices stored as (inputs, outputs)"
MATRICES = (HIDDEN, TRANSPOSED)
# Weights of three dimensions that are no stacks of matrices.
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
# Last words of the names of output layers, and of those that are children of the model.
_OUTPUTS = re.compile(
    r"(^|_)(heads?|lmhead|embed_out|unembed(ding)?|logits?|classifier|policy|actor|critic|"
    r"action_net|mean|mu|pi|log_?std)$"
)
_OUTERMOST = ("output", "score")
_ROUTER, _GATE = re.compile("(^|_)router"), re.compile(r"(^|_)(gate|gating)$")
# Parameters of three dimensions that are no stacks of matrices, if none is a weight.
_NO_BANK = re.compile("embed|pos|tok|bias|mask|prompt")


@with_options
def MuonAdamW(  # noqa: D417
    model: nn.Module | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    *,
    adamw_lr: float | None = None,
    adamw_weight_decay: float | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    exclude: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    transposed: str | Iterable[str] = (),
    hidden: "HiddenMatrices | None" = None,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_coefficients: object = TABLES["standard"][0],
    ns_steps: int | None = None,
    adjust_lr_fn: str | None = "match_rms_adamw",
    ns_dtype: torch.dtype | str | None = None,
    split: Mapping[str, object] | None = None,
    element_beta: float | None = None,
    hyperball: bool = False,
    betas: tuple[Number, Number] = (0.9, 0.99),
    eps: float = 1e-6,
    row_beta: float | None = None,
    decouple_lr: bool = False,
    max_lr: float | None = None,
    maximize: bool = False,
    cautious_decay: bool = False,
    corrected_decay: bool = False,
    cautious: bool = False,
    hooks: Sequence[Any] = (),
    adamw_hooks: Sequence[Any] = (),
    **options: Unpack[Options],
) -> Mixed:
    """Return a `Mixed` with Muon for hidden matrices and AdamW for all other parameters.

    At level INFO, the logger "optimi_func" prints one line for each kind of parameter.
    `describe()` lists every parameter with its rule. To use MuonAdamW with transformers,
    pass optimizer_cls_and_kwargs=(lambda: MuonAdamW, {"lr": 1e-3}) to the Trainer.

    If n processes hold shards or copies of a matrix, one of these processes orthogonalizes
    the matrix. Matrices are assigned to processes so that each process has about the same
    amount of work. If the matrices are sharded, the processes exchange shards in two calls
    of `all_to_all_single` per step. Together, the two calls of `all_to_all_single` send
    2 (n - 1) / n^2 of all elements to each process. If every process has a copy of each
    matrix, there is one `all_gather` per step. This `all_gather` sends (n - 1) / n of
    all elements to each process. Every process has a copy of a matrix in two cases: the
    matrix has the placement Replicate, or it is a plain tensor and you pass
    `process_group`. A stack of matrices needs no communication if the shards contain
    complete matrices. If every process has a copy of a stack, the matrices of the stack
    are divided among the processes. Every process gathers all parameters that are
    offloaded, or that are sharded along two dimensions of a mesh. Before a step changes
    any tensor, each process sends 8 bytes, so that the processes can check that they
    all take the same step.

    Args:
        model: The model whose parameters are optimized. Parameters that do not require a
            gradient are not updated until they receive a gradient.
        lr: Learning rate of Muon, and of AdamW unless you pass adamw_lr. If adjust_lr_fn is
            not the default, Muon and AdamW need different learning rates.
        weight_decay: Coefficient of weight decay for hidden matrices, and for all other
            weights with at least two dimensions except embeddings. An output layer decays
            unless it is tied to an embedding.
        adamw_lr: Learning rate of the parameters that AdamW updates. None means lr.
        adamw_weight_decay: Coefficient of weight decay for all parameters that AdamW
            updates, as in torch. None means that AdamW also uses weight_decay. With None,
            embeddings, vectors (such as norm weights and biases) and parameters without
            "weight" in their name do not decay.
        lr_multipliers: Factors on lr or adamw_lr for some of the parameters. Each key is a
            parameter's name or a pattern (`fnmatch`). If several keys match a parameter,
            the first one is used. Parameters with the same factor share param groups.
        overrides: Different hyperparameters for some of the parameters, by name or pattern,
            for example {"*.bias": {"betas": (0.9, 0.95)}}. The inner dict contains options
            of Muon or AdamW, whichever updates the parameter: see `param_groups_by_name`.
        exclude: Names or patterns of parameters that are updated by AdamW instead of Muon:
            see `hidden_matrices`.
        include: Names or patterns of parameters that are updated by Muon instead of AdamW.
        transposed: Names or patterns of matrices that are stored as (inputs, outputs): see
            `hidden_matrices`, which recognizes transformers' Conv1D without this option.
        hidden: The result of `hidden_matrices` for the whole model. Pass this argument if
            `model` is only a part of the whole model, such as a pipeline stage. The whole
            model may be on the meta device. If you pass `hidden`, patterns may also match
            parameters of the whole model that are not in `model`.
        momentum: See `Muon`. The momentum can also be a schedule, such as
            schedules.linear(0.85, 0.95, 300).
        nesterov: See `Muon`.
        ns_coefficients: See `Muon`.
        ns_steps: See `Muon`.
        adjust_lr_fn: See `Muon`.
        ns_dtype: See `Muon`.
        split: See `Muon`. Pass a dict whose keys are names or patterns, for example
            {"*.qkv.weight": 3, "*.o_proj.weight": {"columns": 12}}. In `split`, rows are
            the outputs of a layer. If a layer stores its weight as (inputs, outputs), as in
            GPT-2, write {"rows": 3} instead of 3. If a weight is stored as (inputs,
            outputs), the layer's outputs are the columns of the stored tensor.
        element_beta: See `Muon`. A number turns on AdaMuon.
        hyperball: See `Muon`. With hyperball=True, hidden matrices do not decay, and lr is
            a fraction of their norms, so pass a separate adamw_lr for AdamW.
        hooks: Changes of the directions of hidden matrices: see `optimi_func.hooks`. With
            hooks that keep norms, such as [hooks.hyperball("matrix")], hidden matrices do
            not decay.
        adamw_hooks: The same for the parameters that AdamW updates.
        betas: See `AdamW`.
        eps: See `AdamW`.
        row_beta: See `NorMuon`. If you pass a row_beta, NorMuon is used instead of Muon.
        max_lr: The largest value of lr in its schedule. If adamw_lr or lr_multipliers scale
            the learning rate, max_lr is scaled by the same factor.

    If parameters are added to the model later, `add_param_group` chooses between Muon and
    AdamW in the same way as the constructor. Parameters outside the model, such as those of
    a separate head module, are updated by AdamW. A group can also set its rule, as in
    {"params": ..., "rule": "muon"}. In a group with a rule, the parameters need no names. A
    copy of the optimizer (made by deepcopy or pickle) has no reference to the model.

    All other arguments are shared by all optimizers: see `BaseOptimizer`. Muon does not
    accept cautious=True.

    If no hidden matrix is trainable, for example when you finetune only the head, AdamW
    updates all parameters and the logger prints a warning.

    Raises:
        TypeError: model is missing, or is not a module.
        ValueError: A hyperparameter is out of range, or a pattern selects nothing.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> print(MuonAdamW(model, lr=1e-3, ns_dtype="float32").describe())
    group  tensors  elements  parameters  moments  in codes  bytes    each
        0        1         8     float32  float32     0.0 %     64   8.000
        1        1        12     float32  float32     0.0 %    144  12.000
        2        2         7     float32  float32     0.0 %     84  12.000
      all        4        27                          0.0 %    292  10.815
    group 0 iterates in float32 (ns_dtype)
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
    own = dict(momentum=momentum, nesterov=nesterov, ns_dtype=ns_dtype, ns_steps=ns_steps)
    own |= dict(ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn)
    own |= dict(element_beta=element_beta, hyperball=hyperball, hooks=hooks)
    shared = dict(decouple_lr=decouple_lr, maximize=maximize, cautious=cautious)
    shared |= dict(cautious_decay=cautious_decay, corrected_decay=corrected_decay)
    matrices = muon if row_beta is None else partial(normuon, row_beta=row_beta)
    of_adamw = partial(adamw, betas=betas, eps=eps, hooks=adamw_hooks, **shared)
    second_lr = lr if adamw_lr is None else adamw_lr
    decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
    # Of each kind: see `_kinds`.
    hooks, adamw_hooks = (checked("MuonAdamW", x) for x in (hooks, adamw_hooks))
    own_decay = 0.0 if hyperball or any([x.keeps_norms for x in hooks]) else weight_decay
    decay = 0.0 if any([x.keeps_norms for x in adamw_hooks]) else decay
    rules = [(partial(matrices, **own, **shared), lr, own_decay)]
    rules += [(of_adamw, second_lr, decay), (of_adamw, second_lr, 0.0)]
    patterns = dict(exclude=exclude, include=include, transposed=transposed)
    chosen = _chosen(model, hidden, patterns)
    elsewhere = [] if hidden is None else [*hidden.kind_of]
    all_decay = adamw_weight_decay is not None
    kinds = _kinds(model, chosen, elsewhere, lr_multipliers, split, all_decay)
    made = partial(_made, lr, max_lr)
    parts = [(Named(names), made(*rules[how.kind], *how)) for how, names in kinds]
    _log_choice(model, chosen, warns=hidden is None)
    known = {*AdamW.keywords, *(Muon if row_beta is None else NorMuon).keywords}
    groups = _groups(model, elsewhere, overrides or {}, known)
    optimizer = Mixed(groups, *parts, **options)
    by_name = {"lr_multipliers": lr_multipliers, "split": split, "overrides": overrides}
    choice = None if hidden else patterns
    optimizer.chooser = LateChooser(model, choice, made, rules, by_name, all_decay)
    return optimizer


def _chosen(
    model: nn.Module, hidden: object, patterns: Mapping[str, Any]
) -> "HiddenMatrices":
    """Return the choice of hidden matrices that the user passed, or the default choice.

    Raises:
        TypeError: hidden is not what `hidden_matrices` returns.
        ValueError: hidden is combined with patterns, or a pattern selects nothing.
    """
    if not isinstance(hidden, HiddenMatrices | None):
        raise TypeError(f"hidden={hidden!r}: allowed is what hidden_matrices returns")
    if hidden and any(patterns.values()):
        raise ValueError(
            "exclude, include and transposed are options of the call that made hidden"
        )
    return hidden or hidden_matrices(model, **patterns)


def _log_choice(model: nn.Module, chosen: "HiddenMatrices", warns: bool) -> None:
    """Log the kind of each parameter. If `warns`, warn if no hidden matrix is trainable."""
    named = model.named_parameters()
    if warns and not any([p.requires_grad and chosen(n, p) for n, p in named]):
        _log.warning(
            "MuonAdamW: hidden_matrices selects no parameter to train, so that AdamW "
            "updates everything. include= names matrices for Muon"
        )
    for line in str(chosen).splitlines():
        _log.info("MuonAdamW: %s", line)


def _groups(
    model: nn.Module,
    elsewhere: list[str],
    overrides: Mapping[str, Mapping[str, Any]],
    known: set[str],
) -> list[Group]:
    """Return the param groups of the model, one for each set of overridden options.

    Args:
        model: The model.
        elsewhere: Names of parameters in other parts of the model, which a pattern in
            `overrides` may select, but which are in none of the groups.
        overrides: Options by names and patterns of parameters.
        known: The names of the options that may be overridden.
    """
    # In the place of other parts' parameters.
    other = torch.empty(0, dtype=torch.float32, device="cpu")
    pairs = [*model.named_parameters(), *[(name, other) for name in elsewhere]]
    groups = param_groups_by_name(pairs, overrides)
    for name in sorted({k for own in overrides.values() for k in own} - known):
        raise ValueError(f"overrides has {name!r}: allowed are {sorted(known)}")
    for group in groups:
        group["params"] = [pair for pair in group["params"] if pair[1] is not other]
    return groups


def _kinds(
    model: nn.Module,
    hidden: "HiddenMatrices",
    elsewhere: list[str],
    multipliers: Mapping[str, float] | None,
    split: Mapping[str, object] | None,
    all_decay: bool,
) -> "list[tuple[_Kind, list[str]]]":
    """Return each part's kind and the names of its parameters.

    The kinds are 0 for Muon, 1 for AdamW with weight decay, and 2 for AdamW without weight
    decay.
    """
    params = dict(model.named_parameters())
    every = [*params, *elsewhere]
    matrix = [name for name in every if hidden.kind(name) in MATRICES]
    factors = by_pattern("lr_multipliers", multipliers, every, 1.0)
    parts_of = by_pattern("split", split, matrix, None)
    kinds: dict[object, tuple[_Kind, list[str]]] = {}
    for name, p in params.items():
        weight = p.dim() > 1 and "weight" in name.split(".")[-1]
        weight = weight and hidden.kind(name) != EMBEDDED
        kind = 0 if name in parts_of else 2 - (all_decay or weight)
        transposed = hidden.kind(name) == TRANSPOSED
        own_split = _checked_split(name, parts_of.get(name), transposed)
        own = _Kind(kind, own_split, transposed, factors[name])
        key = kind, as_layout(own.split, transposed), own.factor  # two splits may be equal
        kinds.setdefault(key, (own, []))[1].append(name)
    return sorted(kinds.values(), key=lambda item: item[0].kind)


def _checked_split(name: str, split: Any, transposed: bool) -> Any:
    """Return the split, which has to name rows or columns if the matrix is transposed.

    In GPT-2, query, key and value are columns of the stored tensor, but rows of the matrix
    that Muon orthogonalizes. A number alone could mean columns or rows.
    """
    if transposed and split is not None and not isinstance(split, Mapping):
        raise ValueError(
            f"split={{{name!r}: {split!r}}}, whose layer stores (inputs, outputs): write "
            f'{{"rows": {split!r}}} to split its outputs, as the query, key and value of '
            f'GPT-2, or {{"columns": {split!r}}} to split its inputs'
        )
    return split


class _Kind(NamedTuple):
    kind: int
    split: Any
    transposed: bool
    factor: float


def _made(
    lr: float,
    max_lr: float | None,
    rule: Callable[..., FunctionalOptimizer],
    rate: float,
    decay: float,
    kind: int,
    split: object,
    transposed: bool,
    factor: float,
) -> FunctionalOptimizer:
    """Return a part's optimizer, with the lr of its rule multiplied by a factor."""
    check_number("multiplier of lr", "lr_multipliers", factor)
    scale = factor if rate is lr or not lr else factor * rate / lr
    most = max_lr if max_lr is None or scale == 1 else max_lr * scale
    rate = rate if factor == 1 else rate * factor
    layout = {} if kind else {"split": split, "transposed": transposed}
    return rule(lr=rate, max_lr=most, weight_decay=decay, **layout)


class LateChooser:
    """Chooses the kind of each parameter that is added to an existing MuonAdamW.

    Parameters of the model get the same kinds as in a new MuonAdamW for the model. All
    other parameters are updated by AdamW, because MuonAdamW does not know which layers they
    belong to.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: Mapping[str, Any] | None,
        made: Callable[..., FunctionalOptimizer],
        rules: Sequence[tuple[Callable[..., FunctionalOptimizer], float, float]],
        patterns: Mapping[str, Any],
        all_decay: bool,
    ) -> None:
        self._model: ref[nn.Module] | None = ref(model)
        self._choice, self._made, self._rules = choice, made, rules
        self._patterns: dict[str, dict[str, Any]] = {
            name: dict(x or {}) for name, x in patterns.items()
        }
        self._all_decay = all_decay

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the model, because copies do not refer to it."""
        return {**self.__dict__, "_model": None}

    def _paths(self) -> dict[int, str]:
        model = None if self._model is None else self._model()
        return {} if model is None else {id(p): n for n, p in model.named_parameters()}

    def names(self, params: list[Tensor]) -> list[str | None]:
        """Return the name of each parameter in the model, or None for other parameters."""
        paths = self._paths()
        return [paths.get(id(p)) for p in params]

    def parts(self, pairs: list[tuple[str, Tensor]], rule: str | None) -> list[Part]:
        """Return the parts for named parameters. `rule` is the group's rule or None."""
        matrices = self._made(*self._rules[0], *_Kind(0, None, False, 1.0))
        rules = [rule_name(matrices), "adamw"]
        if rule not in (None, *rules):
            raise ValueError(f"a group has rule={rule!r}: allowed are {rules}")
        kind_of = self._kinds(pairs)
        found: dict[object, Part] = {}
        for name, p in pairs:
            kind = kind_of.get(name, "")
            last = name.split(".")[-1]  # a number if it was given no name
            weight = p.dim() > 1 and ("weight" in last or last.isdigit())
            number = 2 - (self._all_decay or (weight and kind != EMBEDDED))
            if rule == rules[0] or (rule is None and kind in MATRICES):
                number = 0
            transposed = number == 0 and kind == TRANSPOSED
            split = self._of("split", name, None) if number == 0 else None
            split = _checked_split(name, split, transposed)
            factor = self._of("lr_multipliers", name, 1.0)
            how = _Kind(number, split, transposed, factor)
            options = self._of("overrides", name, {})
            key = number, as_layout(split, how.transposed), factor, id(options)
            if key not in found:
                value = self._made(*self._rules[number], *how)
                own = {k: x for k, x in options.items() if hasattr(value, k)}
                found[key] = Part(value, own, [])
            found[key].pairs.append((name, p))
            _log.info("MuonAdamW: %s is %s's", name, rule_name(found[key].value))
        return list(found.values())

    def _of(self, option: str, name: str, usual: Any) -> Any:
        plain, patterns = without_wrappers(name), self._patterns[option]
        return next((x for k, x in patterns.items() if fnmatchcase(plain, k)), usual)

    def _kinds(self, pairs: list[tuple[str, Tensor]]) -> dict[str, str]:
        """Map the given name of each parameter that is now in the model to its kind."""
        paths = self._paths()
        inside = [(name, path) for name, p in pairs if (path := paths.get(id(p)))]
        model = None if self._model is None else self._model()
        if model is None or not inside or self._choice is None:
            return {}
        known = list(map(without_wrappers, paths.values()))
        choice = {k: [x] if isinstance(x, str) else x for k, x in self._choice.items()}
        # Layers that these patterns were for may be gone.
        choice = {
            option: [x for x in some if any(fnmatchcase(name, x) for name in known)]
            for option, some in choice.items()
        }
        hidden = hidden_matrices(model, **choice)
        return {name: hidden.kind(path) for name, path in inside}


def NorMuonAdamW(  # noqa: D417
    model: nn.Module | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    *,
    row_beta: float = 0.95,
    **options: Any,
) -> Mixed:
    """Return a `MuonAdamW` that uses `NorMuon` instead of Muon.

    Args:
        model: The model whose trainable parameters are optimized.
        lr: See `MuonAdamW`, which also describes weight_decay and the other options.
        row_beta: See `NorMuon`.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> [group["rule"] for group in NorMuonAdamW(model, lr=1e-3).param_groups]
    ['normuon', 'adamw', 'adamw']
    """
    return MuonAdamW(model, lr, weight_decay, row_beta=row_beta, **options)


class HiddenMatrices:
    """The predicate that `hidden_matrices` returns. Its `str` has one line per kind."""

    __name__ = "hidden_matrices"

    def __init__(self, kinds: Mapping[str, list[str]]) -> None:
        self.kinds = dict(kinds)
        self.kind_of = {name: kind for kind, names in kinds.items() for name in names}

    def __call__(self, path: str, p: Tensor) -> bool:
        """Return True if the parameter with this name is a hidden matrix."""
        return self.kind(path) in MATRICES

    def kind(self, path: str) -> str:
        """Return the kind of the parameter with this name."""
        plain = without_wrappers(path)
        for name in (path, plain, plain.removeprefix("module.")):
            if name in self.kind_of:
                return self.kind_of[name]
        raise ValueError(f"hidden_matrices: the model has no parameter {path!r}")

    def __str__(self) -> str:
        """Return one line for each kind of parameter, with repeated layers listed once."""
        lines: list[str] = []
        for kind, names in self.kinds.items():
            alike = grouped(names, lambda name: re.sub(r"\d+", "*", name))
            labels = [xs[0] if len(xs) == 1 else key for key, xs in alike.items()]
            lines.append(f"{len(names)} {kind}: {', '.join(labels)}")
        return "\n".join(lines)


def hidden_matrices(
    model: nn.Module,
    *,
    exclude: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    transposed: str | Iterable[str] = (),
) -> HiddenMatrices:
    """Return a predicate that selects hidden matrices, for `Mixed` and `partition`.

    The predicate selects weights with at least two dimensions, stacks of matrices, and
    matrices of experts. A stack of matrices is a parameter with three dimensions, such as
    the weights of all experts in a layer. The predicate does not select embeddings, weights
    that are tied to an embedding, output layers, routers, gates, matrices with a single row
    or column, or weights of 1-d convolutions. The predicate also skips all other parameters
    without "weight" in their name, such as class tokens and positions.

    A layer is an output layer if it meets one of these conditions:

    - The model declares the layer as an output layer (get_output_embeddings in
      transformers, get_classifier in timm).
    - The layer has a typical name (lm_head, mtp_heads, unembed, logits, classifier,
      policy, actor, ...).
    - The layer is the last one in a head with several layers.
    - The layer is an nn.Linear with the same shape as the largest embedding.

    If no layer meets any of these conditions, the last nn.Linear is the output layer,
    but only if it is not inside a repeated block. In a pipeline stage or a backbone,
    the last nn.Linear is usually inside a repeated block.

    A layer is a router if its name contains "router". A layer named "gate" or "gating"
    counts as a gate only if no weight next to it has the same shape. The gate of a
    gated MLP is therefore selected as a hidden matrix. `print(hidden_matrices(model))`
    shows which parameters are selected.

    Muon treats a parameter with three dimensions as a stack of matrices, and orthogonalizes
    each matrix separately. Parameters with more dimensions, such as the weights of
    convolutions, are flattened into one matrix. However, expert weights with more than
    three dimensions raise an error.

    Some layers store their weight as (inputs, outputs): Conv1D in transformers' GPT-2,
    expert layers in transformers with the `is_transposed` attribute, and nn.ConvTranspose2d
    and nn.ConvTranspose3d without groups. print(hidden_matrices(model)) lists these layers
    on a separate line, and `MuonAdamW` orthogonalizes their transposed weights. In a
    `Mixed` or `partition`, add a part with `muon(transposed=True)` for these layers.

    Args:
        model: The model with the parameters.
        exclude: Names or patterns (`fnmatch`) of parameters that the predicate does not
            select.
        include: Names or patterns of parameters that the predicate selects, unless they
            match `exclude`.
        transposed: Names or patterns of selected parameters that are stored as (inputs,
            outputs). The layers listed above are recognized without this option.

    Raises:
        ValueError: A name or pattern matches no parameter, or `transposed` matches a
            parameter that is not selected. Expert weights have four or more dimensions,
            such as (layers, experts, rows, columns), and match neither `include` nor
            `exclude`.

    >>> layers = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
    >>> model = nn.Sequential(*layers)
    >>> chosen = hidden_matrices(model)
    >>> [name for name, p in model.named_parameters() if chosen(name, p)]
    ['1.weight']
    >>> print(chosen)
    1 hidden matrices: 1.weight
    1 embeddings: 0.weight
    2 vectors: *.bias
    1 output layers: 2.weight
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    plain = {without_wrappers(name): p for name, p in named.items()}
    explicit = dict.fromkeys(_matching("include", include, plain), HIDDEN)
    explicit |= dict.fromkeys(_matching("exclude", exclude, plain), "excluded")
    tables = [m for m in model.modules() if isinstance(m, EMBEDDINGS)]
    tied = {id(p) for table in tables for p in table.parameters()}
    outputs = _outputs(model, tables)
    turned = {*_matching("transposed", transposed, plain)}
    kinds: dict[str, list[str]] = {HIDDEN: []}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, p in module.named_parameters(recurse=False):
            name = without_wrappers(f"{prefix}.{short}" if prefix else short)
            kind = explicit.get(name) or _kind(name, p, module, plain)
            if explicit.get(name) != HIDDEN and id(p) in tied:
                kind = EMBEDDED
            elif name not in explicit and id(p) in outputs and p.dim() > 1:
                kind = "output layers"
            if kind == HIDDEN and (name in turned or _stores_inputs_first(module, p)):
                kind = TRANSPOSED
            kinds.setdefault(kind, []).append(name)
    if lost := turned.difference(kinds.get(TRANSPOSED, ())):
        raise ValueError(
            f"transposed selects {sorted(lost)}, of which none is a hidden matrix: allowed "
            f"are names and patterns of {kinds[HIDDEN][:5]} and the others"
        )
    return HiddenMatrices(kinds)


def _stores_inputs_first(module: nn.Module, p: Tensor) -> bool:
    """Return True if the weight of this layer is stored as (inputs, outputs)."""
    if isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
        return module.groups == 1
    if p.dim() == 3:
        return getattr(module, "is_transposed", False) is True
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _matching(
    option: str, patterns: str | Iterable[str], named: Mapping[str, Tensor]
) -> list[str]:
    names: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in named if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"{option}={pattern!r} is no parameter: allowed are names and patterns of "
                f"{list(named)[-5:]} and the others"
            )
        names += hits
    return names


def _kind(name: str, p: Tensor, module: nn.Module, named: Mapping[str, Tensor]) -> str:
    """Return the kind of a parameter that is neither an embedding nor an output layer."""
    *above, short = name.split(".")
    module_name = next((x for x in reversed(above) if not x.isdigit()), "")
    if p.dim() < 2:
        return "vectors"
    if isinstance(module, _CONVOLUTIONS):
        return "weights of 1-d convolutions"
    bank = (p.dim() == 3 and p.shape[0] > 1) or any("expert" in x for x in above)
    deep = p.dim() > 3 and "expert" in f"{module_name}.{short}"
    deep = deep and not hasattr(module, "kernel_size")
    no_bank = not (bank or deep) or _NO_BANK.search(short.lower())
    if "weight" not in short and no_bank:
        return "parameters not called a weight"
    if deep:
        raise ValueError(
            f"{name} has the shape {tuple(p.shape)}: allowed are experts of three "
            "dimensions, because Muon flattens more into one matrix, as a convolution's. "
            "Or name it in exclude=, for AdamW, or in include=, to have it flattened"
        )
    if _ROUTER.search(module_name.lower()) or _ROUTER.search(short.lower()):
        return "routers and gates"
    if _GATE.search(module_name.lower()):
        beside = ".".join(above[: len(above) - above[::-1].index(module_name) - 1])
        near = [q for n, q in named.items() if n.startswith(beside and f"{beside}.")]
        if not any(q is not p and q.shape == p.shape for q in near):
            return "routers and gates"
    small = min(sides(p.shape, _stores_inputs_first(module, p)))
    return HIDDEN if small > 1 else "matrices of one row or column"


def _outputs(model: nn.Module, tables: Sequence[nn.Module]) -> set[int]:
    layers: list[nn.Module] = []
    for name in ("get_output_embeddings", "get_classifier"):
        getter = getattr(model, name, None)
        layer = getter() if callable(getter) else None
        layers += [layer] if isinstance(layer, nn.Module) else []
    linear: list[nn.Linear] = []
    single: list[nn.Linear] = []
    for path, module in model.named_modules():
        *above, name = without_wrappers(path).removeprefix("module.").split(".")
        repeated, outermost = any(x.isdigit() for x in above), not above
        if isinstance(module, nn.Linear):
            linear.append(module)
            single += [] if repeated else [module]
        if (outermost and name in _OUTERMOST) or _OUTPUTS.search(
            name.lower().rstrip("0123456789_")
        ):
            layers += _last_layers(module, repeated)
    shapes = [table.weight.shape for table in tables if isinstance(table.weight, Tensor)]
    largest = max(shapes, default=torch.Size())
    if len({*largest}) == 2:  # a square is that of hidden layers too
        # In a repeated block it is hidden, as 4 * 64 beside 256 bytes.
        layers += [m for m in single if m.weight.shape == largest]
    # The last of a stage or a backbone is in one of its blocks, as those before it.
    last = linear[-1:] if linear[-1:] == single[-1:] else []
    return {id(p) for m in layers or last for p in m.parameters()}


def _last_layers(head: nn.Module, repeated: bool) -> Sequence[nn.Module]:
    """Return the last layers of a head. `repeated` is True in a repeated block."""
    inside = [*head.children()]
    if not inside:
        return [head] if any(p.dim() == 2 for p in head.parameters()) else []
    if repeated and not isinstance(head, nn.Sequential):
        return []  # they may be attention's
    if isinstance(head, nn.ModuleList | nn.ModuleDict):
        return [m for child in inside for m in _last_layers(child, repeated)]
    return [m for m in head.modules() if isinstance(m, nn.Linear)][-1:]
