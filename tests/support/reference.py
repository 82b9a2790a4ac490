"""Reference optimizers: plain float64 loops written from the papers' algorithm boxes.

Each function takes one parameter `p` and the list of its gradients, one a step, and
returns the list of parameter values after each step. Inputs are never modified.

Common arguments: `lr` is a float, or a list with one float a step; `betas` is a tuple,
or a list with one tuple a step (the averages stay raw and the bias correction uses the
current beta); `maximize` negates the gradients before anything else.

Weight decay kinds, all computed from the parameter before the step:

    l2              g = g + weight_decay * p
    decoupled       p loses lr * weight_decay * p           (as torch.optim.AdamW)
    fully           p loses lr / max_lr * weight_decay * p  (the AdamW paper's form)
    proximal        p = (p - step) / (1 + lr * weight_decay)              (only Adan)
    fully_proximal  p = (p - step) / (1 + lr / max_lr * weight_decay)     (only Adan)

`max_lr` defaults to a constant `lr`, and has to be given with a schedule.
"""

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

Rate = float | list[float]
Pair = tuple[float, float]
Triple = tuple[float, float, float]
T = TypeVar("T")


def _steps(
    grads: list[Tensor],
    maximize: bool,
    lr: Rate,
    betas: T | list[T],
    weight_decay: float,
    decay: str,
    max_lr: float | None,
) -> Iterator[tuple[int, Tensor, float, float, T]]:
    """Each step's t, gradient, lr, lambda (the share of p that decays) and betas."""
    for i, grad in enumerate(grads):
        alpha = lr[i] if isinstance(lr, list) else lr
        beta = betas[i] if isinstance(betas, list) else betas
        if decay == "l2":
            lam = 0.0
        elif decay == "decoupled":
            lam = alpha * weight_decay
        elif decay == "fully" and max_lr is not None:
            lam = alpha / max_lr * weight_decay
        elif decay == "fully" and not isinstance(lr, list):
            lam = weight_decay
        else:
            raise ValueError(f"decay {decay!r} is unknown, or misses its max_lr")
        g = -grad.detach().double() if maximize else grad.detach().double()
        yield i + 1, g, alpha, lam, beta


def _rectification(t: int, b2: float) -> float | None:
    """r_t of the RAdam paper, None where the variance is not tractable."""
    rho_inf = 2 / (1 - b2) - 1
    rho = rho_inf - 2 * t * b2**t / (1 - b2**t)
    if rho <= 5:
        return None
    top = (rho - 4) * (rho - 2) * rho_inf
    return math.sqrt(top / ((rho_inf - 4) * (rho_inf - 2) * rho))


def sgd(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    momentum: float = 0.0,
    dampening: bool | float = False,
    nesterov: bool = False,
    torch_init: bool = False,
    weight_decay: float = 0.0,
    decay: str = "l2",
    max_lr: float | None = None,
    maximize: bool = False,
) -> list[Tensor]:
    """SGD with momentum, and SGDW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 1).

    buf_0 = 0
    buf_t = mu * buf_{t-1} + (1 - tau) * g_t
    d_t   = buf_t, or with Nesterov g_t + mu * buf_t
    p_t   = p_{t-1} - lr * d_t - lambda_t * p_{t-1}

    dampening False: tau = 0. True: tau = mu, and torch_init starts buf_1 = g_1. A float
    is tau itself with buf_1 = g_1, as in torch. momentum = 0: d_t = g_t, always.
    The paper holds lr inside the buffer, which differs from this under a schedule.
    """
    p = p.detach().double()
    if isinstance(dampening, bool):
        tau = momentum if dampening else 0.0
        first_is_gradient = dampening and torch_init
    else:
        tau = dampening
        first_is_gradient = True
    buf, path = torch.zeros_like(p), []
    steps = _steps(grads, maximize, lr, None, weight_decay, decay, max_lr)
    for t, grad, alpha, lam, _ in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        if momentum == 0:
            d = g
        else:
            start = t == 1 and first_is_gradient
            buf = g if start else momentum * buf + (1 - tau) * g
            d = g + momentum * buf if nesterov else buf
        p = p - alpha * d - lam * p
        path.append(p)
    return path


def adam(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Pair | list[Pair] = (0.9, 0.99),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    decay: str = "l2",
    max_lr: float | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
) -> list[Tensor]:
    """Adam (Kingma & Ba, arXiv 1412.6980, Algorithm 1).

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    mhat_t = m_t / (1 - b1^t),  vhat_t = v_t / (1 - b2^t)
    p_t = p_{t-1} - lr * mhat_t / (sqrt(vhat_t) + eps) - lambda_t * p_{t-1}

    AMSGrad (Reddi et al., arXiv 1904.09237): vhat_t = max(v_1, ..., v_t) / (1 - b2^t);
    that paper has no bias correction, torch adds it after the maximum, as here.
    """
    p = p.detach().double()
    m = v = v_max = torch.zeros_like(p)
    path = []
    steps = _steps(grads, maximize, lr, betas, weight_decay, decay, max_lr)
    for t, grad, alpha, lam, (b1, b2) in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        v_max = torch.maximum(v_max, v)
        m_hat = m / (1 - b1**t)
        v_hat = (v_max if amsgrad else v) / (1 - b2**t)
        p = p - alpha * m_hat / (v_hat.sqrt() + eps) - lam * p
        path.append(p)
    return path


def adamw(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Pair | list[Pair] = (0.9, 0.99),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    decay: str = "decoupled",
    max_lr: float | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
) -> list[Tensor]:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2).

    m_t, v_t, mhat_t, vhat_t as in Adam, from the gradient without weight decay
    p_t = p_{t-1} - eta_t * (alpha * mhat_t / (sqrt(vhat_t) + eps) + wd * p_{t-1})

    with alpha the base learning rate and eta_t the schedule's multiplier. The paper is
    thus decay="fully" (lr = eta_t * alpha, max_lr = alpha). Libraries mean "decoupled"
    by AdamW: the decay term is lr * wd * p_{t-1}.
    """
    return adam(
        p,
        grads,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decay=decay,
        max_lr=max_lr,
        amsgrad=amsgrad,
        maximize=maximize,
    )


def adan(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Triple | list[Triple] = (0.98, 0.92, 0.99),
    eps: float = 1e-6,
    weight_decay: float = 2e-2,
    decay: str = "proximal",
    max_lr: float | None = None,
    adam_wd: bool = False,
    maximize: bool = False,
) -> list[Tensor]:
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
    p = p.detach().double()
    proximal = decay in ("proximal", "fully_proximal") and not adam_wd
    decay = {"proximal": "decoupled", "fully_proximal": "fully"}.get(decay, decay)
    m = v = n = g_prev = torch.zeros_like(p)
    path = []
    steps = _steps(grads, maximize, lr, betas, weight_decay, decay, max_lr)
    for t, grad, alpha, lam, (b1, b2, b3) in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        diff = g - g_prev if t > 1 else torch.zeros_like(g)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * diff
        n = b3 * n + (1 - b3) * (g + b2 * diff) ** 2
        m_hat, v_hat, n_hat = m / (1 - b1**t), v / (1 - b2**t), n / (1 - b3**t)
        d = (m_hat + b2 * v_hat) / (n_hat.sqrt() + eps)
        p = (p - alpha * d) / (1 + lam) if proximal else p - alpha * d - lam * p
        g_prev = g
        path.append(p)
    return path


def lion(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Pair | list[Pair] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay: str = "decoupled",
    max_lr: float | None = None,
    maximize: bool = False,
) -> list[Tensor]:
    """Lion (Chen et al., arXiv 2302.06675, Algorithm 2).

    c_t = b1 * m_{t-1} + (1 - b1) * g_t
    p_t = p_{t-1} - lr * sign(c_t) - lambda_t * p_{t-1}           with sign(0) = 0
    m_t = b2 * m_{t-1} + (1 - b2) * g_t
    """
    p = p.detach().double()
    m, path = torch.zeros_like(p), []
    steps = _steps(grads, maximize, lr, betas, weight_decay, decay, max_lr)
    for _, grad, alpha, lam, (b1, b2) in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        c = b1 * m + (1 - b1) * g
        p = p - alpha * torch.sign(c) - lam * p
        m = b2 * m + (1 - b2) * g
        path.append(p)
    return path


def radam(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Pair | list[Pair] = (0.9, 0.99),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    decay: str = "l2",
    max_lr: float | None = None,
    maximize: bool = False,
) -> list[Tensor]:
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
    p = p.detach().double()
    m = v = torch.zeros_like(p)
    path = []
    steps = _steps(grads, maximize, lr, betas, weight_decay, decay, max_lr)
    for t, grad, alpha, lam, (b1, b2) in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        r = _rectification(t, b2)
        d = m_hat if r is None else r * m_hat / (v_hat.sqrt() + eps)
        p = p - alpha * d - lam * p
        path.append(p)
    return path


def ranger(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Pair | list[Pair] = (0.9, 0.99),
    eps: float = 1e-6,
    k: int = 6,
    alpha: float = 0.5,
    weight_decay: float = 0.0,
    decay: str = "decoupled",
    max_lr: float | None = None,
    maximize: bool = False,
) -> list[Tensor]:
    """Ranger: RAdam (arXiv 1908.03265) in Lookahead (Zhang et al., arXiv 1907.08610).

    slow_0 = p_0
    p_t = one RAdam step from p_{t-1}, its averages and t running on throughout
    if t is a multiple of k:
        slow = slow + alpha * (p_t - slow)
        p_t = slow
    """
    p = p.detach().double()
    m = v = torch.zeros_like(p)
    slow, path = p, []
    steps = _steps(grads, maximize, lr, betas, weight_decay, decay, max_lr)
    for t, grad, lr_t, lam, (b1, b2) in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        r = _rectification(t, b2)
        d = m_hat if r is None else r * m_hat / (v_hat.sqrt() + eps)
        p = p - lr_t * d - lam * p
        if t % k == 0:
            slow = slow + alpha * (p - slow)
            p = slow
        path.append(p)
    return path


def stableadamw(
    p: Tensor,
    grads: list[Tensor],
    *,
    lr: Rate,
    betas: Pair | list[Pair] = (0.9, 0.99),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    decay: str = "decoupled",
    max_lr: float | None = None,
    maximize: bool = False,
) -> list[Tensor]:
    """StableAdamW (Wortsman et al., arXiv 2304.13013, Algorithm 2).

    m_t, v_t, mhat_t, vhat_t as in Adam (the paper debiases the betas: the same numbers)
    RMS_t = sqrt(mean(g_t^2 / max(vhat_t, eps^2)))      over the whole tensor
    lr_t  = lr / max(1, RMS_t),  and lambda_t is divided likewise
    p_t   = p_{t-1} - lr_t * mhat_t / (sqrt(vhat_t) + eps) - lambda_t * p_{t-1}
    """
    p = p.detach().double()
    m = v = torch.zeros_like(p)
    path = []
    steps = _steps(grads, maximize, lr, betas, weight_decay, decay, max_lr)
    for t, grad, alpha, lam, (b1, b2) in steps:
        g = grad + weight_decay * p if decay == "l2" else grad
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        rms = math.sqrt((g**2 / v_hat.clamp(min=eps**2)).mean().item())
        clip = max(1.0, rms)
        p = p - alpha / clip * m_hat / (v_hat.sqrt() + eps) - lam / clip * p
        path.append(p)
    return path


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
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
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
