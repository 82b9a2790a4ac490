"""Numbers of a rule that are trees: each part of the parameters has its own."""

import copy
import pickle
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import optimi_func
from optimi_func import adagrad, adamw, adamw_init, adamw_step, prodigy, sgd
from optimi_func.rules import Optimizer
from optimi_func.transforms import inject

_random = torch.Generator().manual_seed(0)


def _tree(dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Tensor] | Tensor]:
    w, b, head = (torch.randn(n, generator=_random, dtype=dtype) for n in (6, 3, 4))
    return {"body": {"w": w.view(3, 2), "b": b}, "head": head}


PARAMS, *GRADS = [_tree() for _ in range(5)]
DOUBLES, *DOUBLE_GRADS = [_tree(torch.float64) for _ in range(4)]


def _run(optimizer, params=PARAMS, grads=GRADS, **how):
    state = optimizer.init(params, **how)
    for g in grads:
        params, state = optimizer.step(params, g, state)
    return params, state


class Own(Optimizer):
    """A rule whose state starts from one of its numbers."""

    beta: float = 0.5
    first: float = 1.0

    class State(NamedTuple):
        v: Tensor

    def init(self, p: Tensor):
        return self.State(torch.zeros_like(p) + self.first)

    def direction(self, g: Tensor, s: State, t: float):
        v = self.beta * s.v + (1 - self.beta) * g
        return v, self.State(v)


CASES = [
    (adamw, {"betas": ((0.9, 0.99), (0.8, 0.9)), "eps": (1e-8, 1e-2)}, {}),
    (adamw, {"lr": (0.1, 0.2), "eps": (1e-8, 1e-2)}, {"state_dtype": torch.float64}),
    (sgd, {"momentum": (0.9, 0.5)}, {}),
    (adagrad, {"initial_accumulator_value": (0.1, 1.0)}, {}),
    (optimi_func.rprop, {"etas": ((0.5, 1.2), (0.4, 1.5))}, {}),
    (optimi_func.schedule_free_adamw, {"betas": ((0.9, 0.99), (0.8, 0.9))}, {}),
    (optimi_func.adafactor, {"decay_rate": (-0.8, -0.5)}, {}),
    (optimi_func.muon, {"momentum": (0.95, 0.5)}, {}),
    (Own.pure, {"beta": (0.9, 0.1), "first": (0.0, 2.0)}, {}),
]


@pytest.mark.parametrize(("make", "numbers", "how"), CASES)
def test_each_part_steps_as_it_does_alone(make, numbers, how) -> None:
    params = {"body": {"w": PARAMS["body"]["w"]}, "head": PARAMS["body"]["w"] + 1.0}
    grads = [{"body": {"w": g["body"]["w"]}, "head": g["body"]["w"]} for g in GRADS]
    trees = {k: {"body": x, "head": y} for k, (x, y) in numbers.items()}
    whole = make(**{"lr": 0.1, **trees})
    again = pickle.loads(pickle.dumps(whole)) if make is adamw else copy.deepcopy(whole)
    found, state = _run(again, params, grads, **how)
    for i, name in enumerate(params):
        part = make(**{"lr": 0.1, **{k: x[i] for k, x in numbers.items()}})
        own = {name: params[name]}
        alone, kept = _run(part, own, [{name: g[name]} for g in grads], **how)
        points = part.eval_params(alone, kept), again.eval_params(found, state)
        torch.testing.assert_close(points[0][name], points[1][name], rtol=0, atol=0)
        torch.testing.assert_close(found[name], alone[name], rtol=0, atol=0)
        torch.testing.assert_close(
            torch.utils._pytree.tree_leaves(state.leaves[name]),
            torch.utils._pytree.tree_leaves(kept.leaves[name]),
            rtol=0,
            atol=0,
        )
        usual = make(**{"lr": 0.1, **{k: x[1 - i] for k, x in numbers.items()}})
        other, _ = _run(usual, own, [{name: g[name]} for g in grads], **how)
        changed = [(x - y).abs().max() > 1e-6 for x, y in zip(_flat(alone), _flat(other))]
        assert all(changed)


def _flat(tree) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def test_a_leaf_of_the_tree_may_be_a_tensor_and_a_schedule() -> None:
    eps = {"body": {"w": 1e-3, "b": 1e-2}, "head": 0.1}
    usual = _run(adamw(lr=0.1, eps=eps), DOUBLES, DOUBLE_GRADS)
    b = torch.tensor(1e-2, dtype=torch.float64)
    odd = {"body": {"w": lambda t: 1e-3 + 0 * t, "b": b}, "head": 0.1}
    for made in (adamw(lr=0.1, eps=odd), inject(adamw(lr=0.1, eps=eps))):
        torch.testing.assert_close(_run(made, DOUBLES, DOUBLE_GRADS)[0], usual[0])
    compiled = torch.compile(
        lambda p, g, s: adamw_step(p, g, s, lr=0.1, eps=eps), backend="eager"
    )
    state, once = adamw_init(DOUBLES), adamw(lr=0.1, eps=eps)
    got = compiled(DOUBLES, DOUBLE_GRADS[0], state)[0]
    torch.testing.assert_close(got, once.step(DOUBLES, DOUBLE_GRADS[0], state)[0])


def test_derivatives_and_members_by_a_leaf_of_the_tree() -> None:
    def loss(beta: Tensor) -> Tensor:
        betas = {"body": {"w": (0.9, 0.99), "b": (beta, 0.9)}, "head": (0.5, 0.9)}
        found, _ = _run(adamw(lr=0.1, betas=betas), DOUBLES, DOUBLE_GRADS)
        return sum((x**2).sum() for x in _flat(found))

    at, h = torch.tensor(0.6, dtype=torch.float64), 1e-6
    slope = (loss(at + h) - loss(at - h)) / (2 * h)
    assert slope.abs() > 1e-3
    torch.testing.assert_close(grad(loss)(at), slope, rtol=1e-6, atol=1e-8)
    several = torch.tensor([0.2, 0.6], dtype=torch.float64)
    torch.testing.assert_close(vmap(loss)(several), torch.stack([*map(loss, several)]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: adamw(eps={"body": 0.1, "head": -1.0}), r"eps=-1.*\(in eps\['head'\]\)"),
        (lambda: adamw(betas={"body": (0.9, 1.5)}), r"betas\[1\]=1\.5.*betas\['body'\]"),
        (lambda: adamw(eps={"body": 0.1}).init(PARAMS), r"eps is no prefix.*\['head'\]"),
        (lambda: adamw(eps={}).init(PARAMS), "eps is no prefix|Invalid epsilon: eps"),
        (lambda: adamw(amsgrad={"body": True, "head": True}), "Invalid amsgrad: amsgrad="),
        (lambda: sgd(lr=0.1, momentum={"body": 0.0, "head": 0.5}), "tree of momentum.*sgd"),
        (lambda: prodigy(betas={"body": (0.9, 0.99)}), "tree of betas, but prodigy has"),
        (lambda: optimi_func.AdamW([torch.ones(1)], eps={"w": 0.1}), "Invalid eps: eps="),
    ],
)
def test_what_a_tree_cannot_be_is_refused_by_name(make, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_a_tree_that_does_not_fit_is_refused_by_the_step_too() -> None:
    params = {"body": torch.ones(2), "head": torch.ones(1)}
    state = adamw_init(params)
    with pytest.raises(ValueError, match=r"betas is no prefix of params.*\['head'\]"):
        adamw_step(params, params, state, betas={"body": (0.9, 0.99)})


def test_each_number_of_a_tree_is_warned_of() -> None:
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2).bfloat16()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = sgd(lr=0.1, momentum={"w": 0.9, "b": 0.999})
        made.step(params, params, made.init(params))
        made = adamw(lr=0.1, betas={"w": (0.9, 0.9), "b": (0.999, 0.9)})
        made.step(params, params, made.init(params))
    assert ["0.999" in str(x.message) for x in caught] == [True]
