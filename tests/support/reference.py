"""Reference optimizers: plain float64 steps and loops from the papers' algorithm boxes.

A `*_move` is one step of a paper: from a parameter, its averages by the paper's letters
and a gradient, how the parameter moves and what the averages become.

The function that has the optimizer's name takes one parameter `p` and the list of its
gradients, one a step, and returns the list of parameter values after each step. Inputs
are never modified.

Common arguments: `lr` is a float, or a list with one float a step; `betas` is a tuple,
or a list with one tuple a step (the averages stay raw and the bias correction uses the
current beta); `maximize` negates the gradients before anything else.

Weight decay kinds, all computed from the parameter before the step:

    l2              g = g + weight_decay * p
    decoupled       p loses lr * weight_decay * p           (as torch.optim.AdamW)
    fully           p loses lr / max_lr * weight_decay * p  (the AdamW paper's form)
    corrected       p loses lr^2 / max_lr * weight_decay * p      (AdamC, arXiv 2506.02285)
    proximal        p = (p - step) / (1 + lr * weight_decay)              (only Adan)
    fully_proximal  p = (p - step) / (1 + lr / max_lr * weight_decay)     (only Adan)
    corrected_proximal  the same of lr^2 / max_lr * weight_decay          (only Adan)

`max_lr` defaults to a constant `lr`, and has to be given with a schedule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

Rate = float | list[float]
Pair = tuple[float, float]
Triple = tuple[float, float, float]
State = dict[str, Tensor]


@dataclass(frozen=True)
class At:
    """The numbers of one step."""

    t: int  # from 1
    lr: float
    lam: float | Tensor  # lambda_t, the share of p that decays
    betas: tuple[float, ...] = ()
    cautious: bool = False

    def masked(self, d: Tensor, g: Tensor) -> Tensor:
        """Cautious updates (Liang et al., arXiv 2411.16085): of d what goes with g.

        phi = 1 where d * g > 0, else 0;   d * phi / max(mean(phi), 1e-3)
        """
        if not self.cautious:
            return d
        phi = (d * g > 0).double()
        return d * phi / max(phi.mean().item(), 1e-3)


@dataclass(frozen=True)
class Common:
    """The options that every optimizer has."""

    lr: Rate = math.nan
    betas: tuple[float, ...] | list[tuple[float, ...]] = ()
    weight_decay: float = 0.0
    decay: str = "decoupled"
    max_lr: float | None = None
    maximize: bool = False
    cautious_decay: bool = False
    cautious: bool = False


# How the parameter moves, and its averages after.
Moved = tuple[Tensor, State]
Move = Callable[..., Moved]
Path = Callable[..., list[Tensor]]


def _path_of(
    move: Move,
    *letters: str,
    start: Callable[[Tensor], State] | None = None,
    direction: Move | None = None,
    **defaults: Any,
) -> Path:
    """Return the function of `p`, `grads` and options that gives p after each step.

    Options that are in `Common` are taken here, the others by `move`.

    Args:
        move: One step of the paper.
        letters: Averages that start at 0.
        start: The averages before the first step, in place of `letters`.
        direction: The move that shows the sign of the direction, if `move` does not.
        defaults: The defaults of `Common` for this optimizer.
    """
    usual = Common(**defaults)
    names = {field.name for field in fields(Common)}

    def path(p: Tensor, grads: list[Tensor], **options: Any) -> list[Tensor]:
        common = {name: options.pop(name) for name in names & options.keys()}
        own = partial(move, **options)
        shown = own if direction is None else partial(direction, **options)
        s = _zeros(p, *letters) if start is None else start(p)
        return _run(own, shown, s, p, grads, replace(usual, **common))

    return path


def _run(
    move: Move, direction: Move, s: State, p: Tensor, grads: list[Tensor], common: Common
) -> list[Tensor]:
    """Return p after each step.

    Cautious decay (arXiv 2510.12402): lambda is 0 where -d and -p point to different sides.
    """
    p, path = p.detach().double(), []
    weight_decay, max_lr = common.weight_decay, common.max_lr
    for i, grad in enumerate(grads):
        alpha = common.lr[i] if isinstance(common.lr, list) else common.lr
        beta = common.betas[i] if isinstance(common.betas, list) else common.betas
        if common.decay == "l2":
            lam = 0.0
        elif common.decay == "decoupled":
            lam = alpha * weight_decay
        elif common.decay == "fully" and max_lr is not None:
            lam = alpha / max_lr * weight_decay
        elif common.decay == "fully" and not isinstance(common.lr, list):
            lam = weight_decay
        elif common.decay == "corrected" and max_lr is not None:
            lam = alpha**2 / max_lr * weight_decay
        else:
            raise ValueError(f"decay {common.decay!r} is unknown, or misses its max_lr")
        g = -grad.detach().double() if common.maximize else grad.detach().double()
        if common.decay == "l2":
            g = g + weight_decay * p
        kept: float | Tensor = lam
        if common.cautious_decay:
            u, _ = direction(p, s, g, At(i + 1, alpha, 0.0, beta, common.cautious))
            unlike = ((u > 0) & (p > 0)) | ((u < 0) & (p < 0))
            kept = lam * (1 - unlike.double())
        u, s = move(p, s, g, At(i + 1, alpha, kept, beta, common.cautious))
        p = p + u
        path.append(p)
    return path


def _zeros(p: Tensor, *letters: str) -> State:
    return {letter: torch.zeros_like(p, dtype=torch.float64) for letter in letters}


def _averages(s: State, g: Tensor, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    """m_t and v_t, Adam's."""
    return b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g**2


def _corrected(m: Tensor, v: Tensor, t: int, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    """mhat_t and vhat_t, Adam's."""
    return m / (1 - b1**t), v / (1 - b2**t)


def _rectification(t: int, b2: float) -> float | None:
    """r_t of the RAdam paper, None where the variance is not tractable."""
    rho_inf = 2 / (1 - b2) - 1
    rho = rho_inf - 2 * t * b2**t / (1 - b2**t)
    if rho <= 5:
        return None
    top = (rho - 4) * (rho - 2) * rho_inf
    return math.sqrt(top / ((rho_inf - 4) * (rho_inf - 2) * rho))


def sgd_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    momentum: float = 0.0,
    dampening: bool | float = False,
    nesterov: bool = False,
    torch_init: bool = False,
) -> Moved:
    """SGD with momentum, and SGDW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 1).

    buf_0 = 0
    buf_t = mu * buf_{t-1} + (1 - tau) * g_t
    d_t   = buf_t, or with Nesterov g_t + mu * buf_t
    p_t   = p_{t-1} - lr * d_t - lambda_t * p_{t-1}

    dampening False: tau = 0. True: tau = mu, and torch_init starts buf_1 = g_1. A float
    is tau itself with buf_1 = g_1, as in torch. momentum = 0: d_t = g_t, always.
    The paper holds lr inside the buffer, which differs from this under a schedule.
    """
    if momentum == 0:
        return -at.lr * at.masked(g, g) - at.lam * p, s
    tau = momentum * dampening if isinstance(dampening, bool) else dampening
    given = not isinstance(dampening, bool) or (dampening and torch_init)
    start = at.t == 1 and given
    buf = g if start else momentum * s["buf"] + (1 - tau) * g
    d = g + momentum * buf if nesterov else buf
    return -at.lr * at.masked(d, g) - at.lam * p, {"buf": buf}


sgd = _path_of(sgd_move, "buf", decay="l2")


def adam_move(
    p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6, amsgrad: bool = False
) -> Moved:
    """Adam (Kingma & Ba, arXiv 1412.6980, Algorithm 1).

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    mhat_t = m_t / (1 - b1^t),  vhat_t = v_t / (1 - b2^t)
    p_t = p_{t-1} - lr * mhat_t / (sqrt(vhat_t) + eps) - lambda_t * p_{t-1}

    AMSGrad (Reddi et al., arXiv 1904.09237): vhat_t = max(v_1, ..., v_t) / (1 - b2^t);
    that paper has no bias correction, torch adds it after the maximum, as here.
    """
    m, v = _averages(s, g, *at.betas)
    new = {"m": m, "v": v}
    if amsgrad:
        new["v_max"] = v = torch.maximum(s["v_max"], v)
    m_hat, v_hat = _corrected(m, v, at.t, *at.betas)
    d = m_hat / (v_hat.sqrt() + eps)
    return -at.lr * at.masked(d, g) - at.lam * p, new


adam = _path_of(adam_move, "m", "v", "v_max", betas=(0.9, 0.99), decay="l2")


# AdamW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2): Adam, and decay from p alone.
# p_t = p_{t-1} - eta_t * (alpha * mhat_t / (sqrt(vhat_t) + eps) + wd * p_{t-1})
# with alpha the base learning rate and eta_t the schedule's multiplier. The paper is thus
# decay="fully" (lr = eta_t * alpha, max_lr = alpha). Libraries mean "decoupled" by AdamW:
# the decay term is lr * wd * p_{t-1}.
adamw = _path_of(adam_move, "m", "v", "v_max", betas=(0.9, 0.99), weight_decay=1e-2)


def adan_move(
    p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6, proximal: bool = True
) -> Moved:
    """Adan (Xie et al., arXiv 2208.06677, Algorithm 1); b here is the paper's 1 - beta.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * (g_t - g_{t-1})               with g_0 = g_1
    n_t = b3 * n_{t-1} + (1 - b3) * (g_t + b2 * (g_t - g_{t-1}))^2
    mhat, vhat, nhat: divided by 1 - b1^t, 1 - b2^t, 1 - b3^t
    d_t = (mhat_t + b2 * vhat_t) / (sqrt(nhat_t) + eps)
    p_t = (p_{t-1} - lr * d_t) / (1 + lambda_t)

    The bias corrections are the authors' code's; the paper's box has none.
    adam_wd=True: p_t = (1 - lambda_t) * p_{t-1} - lr * d_t. With "l2" g_t includes the
    decay, and so does the difference.
    """
    b1, b2, b3 = at.betas
    diff = (at.t > 1) * (g - s["g_prev"])  # a first NaN is in every average
    m = b1 * s["m"] + (1 - b1) * g
    v = b2 * s["v"] + (1 - b2) * diff
    n = b3 * s["n"] + (1 - b3) * (g + b2 * diff) ** 2
    m_hat, v_hat, n_hat = m / (1 - b1**at.t), v / (1 - b2**at.t), n / (1 - b3**at.t)
    d = at.masked((m_hat + b2 * v_hat) / (n_hat.sqrt() + eps), g)
    new = {"m": m, "v": v, "n": n, "g_prev": g}
    if proximal:
        return (p - at.lr * d) / (1 + at.lam) - p, new
    return -at.lr * d - at.lam * p, new


_adan = _path_of(
    adan_move, "m", "v", "n", "g_prev", betas=(0.98, 0.92, 0.99), weight_decay=2e-2
)


def adan(
    p: Tensor,
    grads: list[Tensor],
    *,
    decay: str = "proximal",
    adam_wd: bool = False,
    **options: Any,
) -> list[Tensor]:
    """The path of `adan_move`."""
    proximal = decay.endswith("proximal") and not adam_wd
    decay = "decoupled" if decay == "proximal" else decay.removesuffix("_proximal")
    return _adan(p, grads, decay=decay, proximal=proximal, **options)


def lion_average(s: State, g: Tensor, at: At) -> Tensor:
    """c_t of Lion."""
    b1, _ = at.betas
    return b1 * s["m"] + (1 - b1) * g


def lion_move(p: Tensor, s: State, g: Tensor, at: At) -> Moved:
    """Lion (Chen et al., arXiv 2302.06675, Algorithm 2).

    c_t = b1 * m_{t-1} + (1 - b1) * g_t
    p_t = p_{t-1} - lr * sign(c_t) - lambda_t * p_{t-1}           with sign(0) = 0
    m_t = b2 * m_{t-1} + (1 - b2) * g_t
    """
    _, b2 = at.betas
    d = at.masked(torch.sign(lion_average(s, g, at)), g)
    return -at.lr * d - at.lam * p, {"m": b2 * s["m"] + (1 - b2) * g}


lion = _path_of(lion_move, "m", betas=(0.9, 0.99))


def radam_move(p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6) -> Moved:
    """RAdam (Liu et al., arXiv 1908.03265, Algorithm 2).

    m_t, v_t, mhat_t, vhat_t as in Adam;  rho_inf = 2 / (1 - b2) - 1
    rho_t = rho_inf - 2 * t * b2^t / (1 - b2^t)
    if rho_t > 5:
        r_t = sqrt((rho_t - 4) * (rho_t - 2) * rho_inf
                   / ((rho_inf - 4) * (rho_inf - 2) * rho_t))
        p_t = p_{t-1} - lr * r_t * mhat_t / (sqrt(vhat_t) + eps) - lambda_t * p_{t-1}
    else:
        p_t = p_{t-1} - lr * mhat_t - lambda_t * p_{t-1}

    The paper rectifies from rho_t > 4 and has no eps; 5 and eps are the libraries'.
    """
    m, v = _averages(s, g, *at.betas)
    m_hat, v_hat = _corrected(m, v, at.t, *at.betas)
    r = _rectification(at.t, at.betas[1])
    d = m_hat if r is None else r * m_hat / (v_hat.sqrt() + eps)
    return -at.lr * at.masked(d, g) - at.lam * p, {"m": m, "v": v}


radam = _path_of(radam_move, "m", "v", betas=(0.9, 0.99), decay="l2")


def ranger_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-6,
    k: int = 6,
    alpha: float = 0.5,
) -> Moved:
    """Ranger: RAdam (arXiv 1908.03265) in Lookahead (Zhang et al., arXiv 1907.08610).

    slow_0 = p_0
    p_t = one RAdam step from p_{t-1}, its averages and t running on throughout
    if t is a multiple of k:
        slow = slow + alpha * (p_t - slow)
        p_t = slow
    """
    u, new = radam_move(p, s, g, at, eps)
    slow = s["slow"]
    if at.t % k == 0:
        slow = slow + alpha * (p + u - slow)
        u = slow - p
    return u, {**new, "slow": slow}


def _ranger_start(p: Tensor) -> State:
    return {**_zeros(p, "m", "v"), "slow": p.detach().double()}


def _before_pull(p: Tensor, s: State, g: Tensor, at: At, **own: Any) -> Moved:
    """RAdam's move: the direction, before Ranger pulls p back."""
    return radam_move(p, s, g, at, **{k: x for k, x in own.items() if k == "eps"})


ranger = _path_of(
    ranger_move, start=_ranger_start, direction=_before_pull, betas=(0.9, 0.99)
)


def stableadamw_move(p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6) -> Moved:
    """StableAdamW (Wortsman et al., arXiv 2304.13013, Algorithm 2).

    m_t, v_t, mhat_t, vhat_t as in Adam (the paper debiases the betas: the same numbers)
    RMS_t = sqrt(mean(g_t^2 / max(vhat_t, eps^2)))      over the whole tensor
    lr_t  = lr / max(1, RMS_t),  and lambda_t is divided likewise
    p_t   = p_{t-1} - lr_t * mhat_t / (sqrt(vhat_t) + eps) - lambda_t * p_{t-1}
    """
    m, v = _averages(s, g, *at.betas)
    m_hat, v_hat = _corrected(m, v, at.t, *at.betas)
    rms = math.sqrt((g**2 / v_hat.clamp(min=eps**2)).mean().item())
    clip = 1.0 if rms <= 1.0 else rms  # NaN too
    u = -at.lr * at.masked(m_hat / (v_hat.sqrt() + eps), g) - at.lam * p
    return u / clip, {"m": m, "v": v}


stableadamw = _path_of(stableadamw_move, "m", "v", betas=(0.9, 0.99), weight_decay=1e-2)


STANDARD = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    x: Tensor, table: tuple[Triple, ...] = (STANDARD,) * 5, eps: float = 1e-7
) -> Tensor:
    """The polynomials, one after the other, of the singular values of x / ||x||."""
    u, s, vt = torch.linalg.svd(x / max(x.norm().item(), eps), full_matrices=False)
    for a, b, c in table:
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ vt


def rms_scale(m: int, n: int) -> float:
    """With which an orthogonal matrix has AdamW's RMS, 0.2 (arXiv 2502.16982, eq. 4)."""
    return 0.2 * math.sqrt(max(m, n))


def tall_scale(m: int, n: int) -> float:
    """The first code's."""
    return math.sqrt(max(1, m / n))


def spectral_scale(m: int, n: int) -> float:
    """With which what enters as RMS 1 leaves as RMS 1 (arXiv 2310.17813)."""
    return math.sqrt(m / n)


def muon_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    momentum: float = 0.95,
    nesterov: bool = True,
    table: tuple[Triple, ...] = (STANDARD,) * 5,
    eps: float = 1e-7,
    scale: Callable[[int, int], float] = rms_scale,
    split: tuple[int, ...] | None = None,
) -> Moved:
    """Muon (Jordan et al. 2024; Liu et al., arXiv 2502.16982), as torch.optim has it.

    b_t = mu * b_{t-1} + (1 - mu) * g_t
    N_t = (1 - mu) * g_t + mu * b_t, or without Nesterov b_t
    O_t = U f(S) V^T of N_t = U S V^T, with f the iterated polynomial of S / ||S||
    p_t = p_{t-1} - lr * s(m, n) * O_t - lambda_t * p_{t-1}
    """
    b = momentum * s["b"] + (1 - momentum) * g
    d = (1 - momentum) * g + momentum * b if nesterov else b
    parts = [
        scale(*x.shape) * orthogonalized(x, table, eps)
        for x in d.flatten(1).split(split or (d.shape[0],))
    ]
    move = torch.cat(parts).reshape(p.shape)
    return -at.lr * move - at.lam * p, {"b": b}


muon = _path_of(muon_move, "b", weight_decay=0.1)


def adam_accumulation(
    p: Tensor,
    parts: Tensor,
    *,
    lr: float,
    betas: Pair,
    eps: float,
    weight_decay: float,
) -> Tensor:
    """AdamA, arXiv:2305.19982, with decoupled decay: where p ends.

    `parts[t, i]` is the i-th part of step t's gradient. m takes their sum and v the sum
    of their squares, after one decay each a step.
    """
    beta1, beta2 = betas
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, grads in enumerate(parts, start=1):
        m, v = beta1 * m, beta2 * v
        for g in grads:
            m = m + (1 - beta1) * g
            v = v + (1 - beta2) * g**2
        m_hat, v_hat = _corrected(m, v, t, beta1, beta2)
        p = p - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * p)
    return p


def lion_accumulation(p: Tensor, parts: Tensor, *, lr: float, betas: Pair) -> Tensor:
    """Lion with a gradient in parts: m takes all, the sign sees m before the last one."""
    beta1, beta2 = betas
    m = torch.zeros_like(p)
    for *first, last in parts:
        held = beta2 * m + (1 - beta2) * sum(first)
        p = p - lr * (beta1 / beta2 * held + (1 - beta1) * last).sign()
        m = held + (1 - beta2) * last
    return p


def nesterov_accumulation(
    p: Tensor, parts: Tensor, *, lr: float, momentum: float
) -> Tensor:
    """Nesterov with a gradient in parts: b takes all, and the last stands beside it."""
    b = torch.zeros_like(p)
    for grads in parts:
        b = momentum * b + grads.sum(0)
        p = p - lr * (grads[-1] + momentum * b)
    return p


def ademamix_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    alpha: float = 8.0,
    alpha_warmup: float = 0,
    beta3_warmup: float = 0,
) -> Moved:
    """AdEMAMix (Pagliardini et al., arXiv 2409.03137, Algorithm 1).

    alpha_t = min(t * alpha / T, alpha)
    b3_t = min(exp(ln b1 ln b3 / ((1 - t / T) ln b3 + (t / T) ln b1)), b3)
    m1_t = b1 * m1_{t-1} + (1 - b1) * g_t,   m2_t = b3_t * m2_{t-1} + (1 - b3_t) * g_t
    v_t as in Adam; m1hat and vhat corrected, m2 not
    p_t = p_{t-1} - lr * (m1hat_t + alpha_t * m2_t) / (sqrt(vhat_t) + eps)
          - lambda_t * p_{t-1}
    """
    b1, b2, b3 = at.betas
    if at.t < alpha_warmup:
        alpha = at.t * alpha / alpha_warmup
    if at.t < beta3_warmup:
        part = at.t / beta3_warmup
        log1, log3 = math.log(b1), math.log(b3)
        b3 = math.exp(log1 * log3 / ((1 - part) * log3 + part * log1))
    m1, v = _averages({"m": s["m1"], "v": s["v"]}, g, b1, b2)
    m2 = b3 * s["m2"] + (1 - b3) * g
    m1_hat, v_hat = _corrected(m1, v, at.t, b1, b2)
    d = (m1_hat + alpha * m2) / (v_hat.sqrt() + eps)
    return -at.lr * at.masked(d, g) - at.lam * p, {"m1": m1, "m2": m2, "v": v}


ademamix = _path_of(ademamix_move, "m1", "m2", "v", betas=(0.9, 0.999, 0.9999))


def adopt_move(p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6) -> Moved:
    """ADOPT (Taniguchi et al., arXiv 2411.02853, Algorithm 2, clipped).

    v_0 = g_0^2: nothing else happens at the first gradient
    m_t = b1 * m_{t-1} + (1 - b1) * clip(g_t / max(sqrt(v_{t-1}), eps), t^(1/4))
    p_t = p_{t-1} - lr * m_t - lambda_t * p_{t-1}
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    """
    b1, b2 = at.betas
    if at.t == 1:
        # A gradient that is no number is in both averages.
        return torch.zeros_like(p), {"m": 0 * g, "v": g**2}
    limit = (at.t - 1) ** 0.25
    m = b1 * s["m"] + (1 - b1) * (g / s["v"].sqrt().clamp(min=eps)).clamp(-limit, limit)
    d = at.masked(m, g)
    return -at.lr * d - at.lam * p, {"m": m, "v": b2 * s["v"] + (1 - b2) * g**2}


adopt = _path_of(adopt_move, "m", "v", betas=(0.9, 0.9999), decay="l2")


def lamb_move(p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6) -> Moved:
    """LAMB (You et al., arXiv 1904.00962, Algorithm 2, with phi(z) = z).

    m_t, v_t, mhat_t, vhat_t as in Adam
    r_t = mhat_t / (sqrt(vhat_t) + eps) + lambda * p_{t-1}
    p_t = p_{t-1} - lr * |p_{t-1}| / |r_t| * r_t          the ratio is 1 where a norm is 0
    """
    m, v = _averages(s, g, *at.betas)
    m_hat, v_hat = _corrected(m, v, at.t, *at.betas)
    u = -at.lr * at.masked(m_hat / (v_hat.sqrt() + eps), g) - at.lam * p
    size, length = p.norm().item(), u.norm().item()
    ratio = 1.0 if size == 0 or length == 0 else at.lr * size / length
    return ratio * u, {"m": m, "v": v}


lamb = _path_of(lamb_move, "m", "v", betas=(0.9, 0.999), weight_decay=1e-2)


def prodigy_start(p: Tensor) -> State:
    zero = torch.zeros((), dtype=torch.float64)
    scalars = {"d": zero, "d_max": zero, "r": zero}
    return {**_zeros(p, "m", "v", "s"), **scalars, "x0": p.clone()}


def prodigy_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    beta3: float | None = None,
    d0: float = 1e-6,
    d_coef: float = 1.0,
    growth_rate: float = math.inf,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    new_d_at_eps: bool = False,
) -> Moved:
    """Prodigy (Mishchenko & Defazio, arXiv 2306.06101, Algorithm 4; options of its code).

    r_t = b3 * r_{t-1} + gamma_t * d_{t-1}^2 * <g_t, x_0 - x_{t-1}>
    s_t = b3 * s_{t-1} + gamma_t * d_{t-1}^2 * g_t
    m_t = b1 * m_{t-1} + (1 - b1) * d_{t-1} * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * d_{t-1}^2 * g_t^2
    x_t = x_{t-1} - gamma_t * d_{t-1} * m_t / (sqrt(v_t) + d_{t-1} * eps)
    d_t = max(d_{t-1}, r_t / |s_t|_1)

    The code divides r and s by d0, and has d_t at eps (`new_d_at_eps`).
    """
    b1, b2 = at.betas
    b3 = math.sqrt(b2) if beta3 is None else beta3
    d, d_max = (s["d"].item(), s["d_max"].item()) if at.t > 1 else (d0, d0)
    bias = math.sqrt(1 - b2**at.t) / (1 - b1**at.t) if use_bias_correction else 1.0
    gamma = at.lr * bias
    m = b1 * s["m"] + (1 - b1) * d * g
    v = b2 * s["v"] + (1 - b2) * d**2 * g**2
    r = b3 * s["r"].item() + gamma * d**2 / d0 * (g * (s["x0"] - p)).sum().item()
    own = d**2 / d0 if safeguard_warmup and at.lr > 0 else gamma * d**2 / d0
    sums = b3 * s["s"] + own * g
    new = d
    if (norm := sums.abs().sum().item()) > 0:
        found = d_coef * r / norm
        d_max = max(d_max, found)
        new = min(d_max, growth_rate * (max(d, found) if d == d0 else d))
    u = -gamma * d * m / (v.sqrt() + (new if new_d_at_eps else d) * eps)
    scalars = {
        name: torch.tensor(x, dtype=torch.float64)
        for name, x in {"d": new, "d_max": d_max, "r": r}.items()
    }
    u = u - bias * d * at.lam * p
    return u, {"m": m, "v": v, "s": sums, "x0": s["x0"], **scalars}


prodigy = _path_of(prodigy_move, start=prodigy_start, betas=(0.9, 0.999))


def averaged(
    y: Tensor,
    s: State,
    n: Tensor,
    gamma: float,
    at: At,
    b1: float,
    r: float,
    weight_lr_power: float,
) -> Moved:
    """Schedule-Free (Defazio et al., arXiv 2405.15682, Algorithm 1; weights of its code).

    z_t = z_{t-1} - gamma_t * n_t,   n_t at y
    w_t = t^r * max(gamma_1, ..., gamma_t)^power,   c_t = w_t / (w_1 + ... + w_t)
    x_t = (1 - c_t) * x_{t-1} + c_t * z_t
    y_t = (1 - b1) * z_t + b1 * x_t

    `n` is gamma_t * n_t already.
    """
    z = s["z"] - n
    top = max(s["top"].item(), gamma)
    w = at.t**r * top**weight_lr_power
    total = s["W"].item() + w
    c = w / total if total > 0 else 0.0
    x = (1 - c) * s["x"] + c * z
    zero = 0 * s["W"]
    numbers = {"W": zero + total, "top": zero + top, "b1": zero + b1 * (total > 0)}
    return (1 - b1) * (z - y) + b1 * (x - y), {"z": z, "x": x, **numbers}


def averaging_start(p: Tensor, *letters: str) -> State:
    """Nothing has moved: z and x are the parameter."""
    y, zero = p.detach().double(), torch.zeros((), dtype=torch.float64)
    return {
        **{letter: torch.zeros_like(y) for letter in letters},
        "z": y.clone(),
        "x": y.clone(),
        "W": zero,
        "top": zero,
        "b1": zero,
    }


def _ramp(t: int, warmup_steps: int) -> float:
    return min(1.0, t / warmup_steps) if warmup_steps else 1.0


def schedule_free_sgd_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    momentum: float = 0.9,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Moved:
    """gamma_t = lr * min(1, t / warmup_steps),   n_t = g_t + lambda * y_t."""
    part = _ramp(at.t, warmup_steps)
    n = part * (at.lr * g + at.lam * p)
    return averaged(p, s, n, part * at.lr, at, momentum, r, weight_lr_power)


def schedule_free_adamw_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Moved:
    """As SGD's, with n_t = g_t / (sqrt(vhat_t) + eps) + lambda * y_t."""
    b1, b2 = at.betas
    v = b2 * s["v"] + (1 - b2) * g**2
    d = g / ((v / (1 - b2**at.t)).sqrt() + eps)
    part = _ramp(at.t, warmup_steps)
    n = part * (at.lr * d + at.lam * p)
    u, new = averaged(p, s, n, part * at.lr, at, b1, r, weight_lr_power)
    return u, {**new, "v": v}


def schedule_free_radam_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
    silent_sgd_phase: bool = True,
) -> Moved:
    """As AdamW's, with gamma_t = lr * r_t, r_t of RAdam (arXiv 1908.03265).

    Where rho_t <= 4 gamma_t is 0, or (silent_sgd_phase=False) lr and n_t = g_t + ...
    """
    b1, b2 = at.betas
    v = b2 * s["v"] + (1 - b2) * g**2
    rho_inf = 2 / (1 - b2) - 1
    rho = rho_inf - 2 * at.t * b2**at.t / (1 - b2**at.t)
    if rho > 4:
        top = (rho - 4) * (rho - 2) * rho_inf
        part = math.sqrt(top / ((rho_inf - 4) * (rho_inf - 2) * rho))
        d = g / ((v / (1 - b2**at.t)).sqrt() + eps)
    else:
        part, d = 0.0 if silent_sgd_phase else 1.0, g
    n = part * (at.lr * d + at.lam * p)
    u, new = averaged(p, s, n, part * at.lr, at, b1, r, weight_lr_power)
    return u, {**new, "v": v}


def _averaging_start_with_v(p: Tensor) -> State:
    return averaging_start(p, "v")


def _downhill(p: Tensor, s: State, g: Tensor, at: At, **own: Any) -> Moved:
    """A move whose sign is that of z's, but for decay."""
    del p, at, own
    return -g, s


schedule_free_sgd = _path_of(
    schedule_free_sgd_move, start=averaging_start, direction=_downhill
)


schedule_free_adamw = _path_of(
    schedule_free_adamw_move,
    start=_averaging_start_with_v,
    direction=_downhill,
    betas=(0.9, 0.999),
)


schedule_free_radam = _path_of(
    schedule_free_radam_move,
    start=_averaging_start_with_v,
    direction=_downhill,
    betas=(0.9, 0.999),
)
