"""Reference optimizers: plain float64 steps and loops from the papers' algorithm boxes.

A `*_move` is one step of a paper: from a parameter, its averages by the paper's letters
and a gradient, how the parameter moves and what the averages become.

The function that has the optimizer's name takes one parameter `p` and the list of its
gradients, one a step, and returns the list of parameter values after each step. Inputs
are never modified. Beside it stand the options that `cases.py` tries, in every executor.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from cookbook import drawn_whole
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
Options = dict[str, Any]


def _path_of(
    move: Move,
    *letters: str,
    start: Callable[[Tensor], State] | None = None,
    direction: Move | None = None,
    tried: Sequence[Options | tuple[Options, Options]] = (),
    check: Options = MappingProxyType({}),
    still: int = 0,
    sensitive: bool = False,
    **defaults: Any,
) -> Path:
    """Return the function of `p`, `grads` and options that gives p after each step.

    Options that are in `Common` are taken here, the others by `move`.

    Args:
        move: One step of the paper.
        letters: Averages that start at 0.
        start: The averages before the first step, in place of `letters`.
        direction: The move that shows the sign of the direction, if `move` does not.
        tried: Options of the optimizer's own, of which each changes the answer. A pair has
            those of the package, and what they are for `move`.
        check: Arguments of `check_rule` for this optimizer, with their reason in a comment.
        still: Number of first gradients that move nothing, or nothing but decay.
        sensitive: True if steps depend on the last bits of gradients of low rank, as those
            by eigenvectors do where eigenvalues are equal.
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

    path.tried = [x if isinstance(x, tuple) else (x, x) for x in tried]
    path.check, path.still, path.sensitive = check, still, sensitive
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


sgd = _path_of(
    sgd_move,
    "buf",
    decay="l2",
    tried=[
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": True},
        {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.9, "dampening": True, "torch_init": True},
    ],
)


def mars_gradient(s: State, g: Tensor, at: At, mars: float) -> Tensor:
    """MARS (Yuan et al., arXiv 2411.10438, Algorithm 2 and 3, approximate).

    c_t = g_t + mars * b1 / (1 - b1) * (g_t - g_{t-1})            with g_0 = g_1
    c_t = c_t / ||c_t|| if ||c_t|| > 1, in the place of g_t
    """
    if not mars:
        return g
    b1, _ = at.betas
    c = g if at.t == 1 else g + mars * b1 / (1 - b1) * (g - s["g_prev"])
    return c / max(1.0, c.norm().item())


def adam_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-6,
    amsgrad: bool = False,
    mars: float = 0.0,
) -> Moved:
    """Adam (Kingma & Ba, arXiv 1412.6980, Algorithm 1).

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    mhat_t = m_t / (1 - b1^t),  vhat_t = v_t / (1 - b2^t)
    p_t = p_{t-1} - lr * mhat_t / (sqrt(vhat_t) + eps) - lambda_t * p_{t-1}

    AMSGrad (Reddi et al., arXiv 1904.09237): vhat_t = max(v_1, ..., v_t) / (1 - b2^t);
    that paper has no bias correction, torch adds it after the maximum, as here.
    """
    c = mars_gradient(s, g, at, mars)
    m, v = _averages(s, c, *at.betas)
    new = {"m": m, "v": v, "g_prev": g}
    if amsgrad:
        new["v_max"] = v = torch.maximum(s["v_max"], v)
    m_hat, v_hat = _corrected(m, v, at.t, *at.betas)
    d = m_hat / (v_hat.sqrt() + eps)
    return -at.lr * at.masked(d, g) - at.lam * p, new


AMSGRAD = [{"amsgrad": True}]
adam = _path_of(adam_move, "m", "v", "v_max", tried=AMSGRAD, betas=(0.9, 0.99), decay="l2")


# AdamW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2): Adam, and decay from p alone.
# p_t = p_{t-1} - eta_t * (alpha * mhat_t / (sqrt(vhat_t) + eps) + wd * p_{t-1})
# with alpha the base learning rate and eta_t the schedule's multiplier. The paper is thus
# decay="fully" (lr = eta_t * alpha, max_lr = alpha). Libraries mean "decoupled" by AdamW:
# the decay term is lr * wd * p_{t-1}.
adamw = _path_of(
    adam_move,
    *("m", "v", "v_max", "g_prev"),
    tried=[*AMSGRAD, {"mars": 0.025}],
    betas=(0.9, 0.99),
    weight_decay=1e-2,
)


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


def lion_move(p: Tensor, s: State, g: Tensor, at: At, mars: float = 0.0) -> Moved:
    """Lion (Chen et al., arXiv 2302.06675, Algorithm 2).

    c_t = b1 * m_{t-1} + (1 - b1) * g_t
    p_t = p_{t-1} - lr * sign(c_t) - lambda_t * p_{t-1}           with sign(0) = 0
    m_t = b2 * m_{t-1} + (1 - b2) * g_t
    """
    _, b2 = at.betas
    c = mars_gradient(s, g, at, mars)
    d = at.masked(torch.sign(lion_average(s, c, at)), g)
    return -at.lr * d - at.lam * p, {"m": b2 * s["m"] + (1 - b2) * c, "g_prev": g}


lion = _path_of(lion_move, "m", "g_prev", betas=(0.9, 0.99), tried=[{"mars": 0.5}])


def radam_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-6,
    torch_form: bool = False,
) -> Moved:
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
    torch_form: eps is added to sqrt(v_t), which is corrected after it.
    """
    if torch_form:
        eps = eps / math.sqrt(1 - at.betas[1] ** at.t)
    m, v = _averages(s, g, *at.betas)
    m_hat, v_hat = _corrected(m, v, at.t, *at.betas)
    r = _rectification(at.t, at.betas[1])
    d = m_hat if r is None else r * m_hat / (v_hat.sqrt() + eps)
    return -at.lr * at.masked(d, g) - at.lam * p, {"m": m, "v": v}


radam = _path_of(
    radam_move,
    "m",
    "v",
    tried=[{"torch_form": True, "eps": 1e-2}],
    betas=(0.9, 0.99),
    decay="l2",
)


def rmsprop_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
    tf_like: bool = False,
) -> Moved:
    """RMSprop (Hinton's lecture 6e; centered: Graves, arXiv 1308.0850, eq. 38 to 45).

    v_t = alpha * v_{t-1} + (1 - alpha) * g_t^2,   m_t likewise of g_t
    q_t = g_t / (sqrt(v_t) + eps), centered: g_t / (sqrt(v_t - m_t^2) + eps)
    b_t = momentum * b_{t-1} + q_t,   p_t = p_{t-1} - lr * b_t - lambda_t * p_{t-1}

    tf_like: v_0 = 1, and sqrt(v_t + eps) in place of sqrt(v_t) + eps.
    """
    before = torch.ones_like(p) if tf_like and at.t == 1 else s["v"]
    v = alpha * before + (1 - alpha) * g**2
    m = alpha * s["m"] + (1 - alpha) * g
    spread = v - m**2 if centered else v
    b = momentum * s["b"] + g / ((spread + eps).sqrt() if tf_like else spread.sqrt() + eps)
    return -at.lr * at.masked(b, g) - at.lam * p, {"v": v, "m": m, "b": b}


rmsprop = _path_of(
    rmsprop_move,
    *("v", "m", "b"),
    decay="l2",
    tried=[
        {"alpha": 0.9},
        {"momentum": 0.8},
        {"centered": True},
        {"tf_like": True},
        {"centered": True, "momentum": 0.8, "tf_like": True},
    ],
)


def adagrad_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    lr_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Moved:
    """Adagrad (Duchi, Hazan & Singer 2011, figure 1, diagonal).

    v_0 = the initial value,   v_t = v_{t-1} + g_t^2
    p_t = p_{t-1} - lr / (1 + (t - 1) * lr_decay) * g_t / (sqrt(v_t) + eps) - ...
    """
    v = s["v"] + (at.t == 1) * initial_accumulator_value + g**2
    d = g / (v.sqrt() + eps) / (1 + (at.t - 1) * lr_decay)
    return -at.lr * at.masked(d, g) - at.lam * p, {"v": v}


adagrad = _path_of(
    adagrad_move,
    "v",
    tried=[{"lr_decay": 0.1}, {"initial_accumulator_value": 0.5}],
    decay="l2",
)


def adadelta_move(
    p: Tensor, s: State, g: Tensor, at: At, rho: float = 0.9, eps: float = 1e-6
) -> Moved:
    """Adadelta (Zeiler, arXiv 1212.5701, Algorithm 1), whose step is multiplied by lr.

    v_t = rho * v_{t-1} + (1 - rho) * g_t^2
    d_t = sqrt(a_{t-1} + eps) / sqrt(v_t + eps) * g_t
    a_t = rho * a_{t-1} + (1 - rho) * d_t^2
    """
    v = rho * s["v"] + (1 - rho) * g**2
    d = (s["a"] + eps).sqrt() / (v + eps).sqrt() * g
    new = {"v": v, "a": rho * s["a"] + (1 - rho) * d**2}
    return -at.lr * at.masked(d, g) - at.lam * p, new


adadelta = _path_of(
    adadelta_move,
    "v",
    "a",
    tried=[{"rho": 0.7}],
    check={"eps": 1.0},  # steps that bfloat16 can show
    decay="l2",
)


def adamax_move(p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-8) -> Moved:
    """Adamax (Kingma & Ba, arXiv 1412.6980, Algorithm 2), with torch's eps.

    u_t = max(b2 * u_{t-1}, |g_t| + eps),   d_t = m_t / (1 - b1^t) / u_t
    """
    b1, b2 = at.betas
    m = b1 * s["m"] + (1 - b1) * g
    u = torch.maximum(b2 * s["u"], g.abs() + eps)
    d = m / (1 - b1**at.t) / u
    return -at.lr * at.masked(d, g) - at.lam * p, {"m": m, "u": u}


adamax = _path_of(adamax_move, "m", "u", betas=(0.9, 0.999), decay="l2")


def nadam_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    momentum_decay: float = 4e-3,
) -> Moved:
    """NAdam (Dozat 2016, Algorithm 2), with the warmup of mu that torch has from Keras.

    mu_t = b1 * (1 - 0.96^(t * momentum_decay) / 2),   M_t = mu_1 * ... * mu_t
    d_t = ((1 - mu_t) / (1 - M_t) * g_t + mu_{t+1} / (1 - M_{t+1}) * m_t)
          / (sqrt(v_t / (1 - b2^t)) + eps)
    """
    b1, b2 = at.betas
    mu, ahead = (b1 * (1 - 0.96 ** (i * momentum_decay) / 2) for i in (at.t, at.t + 1))
    product = mu * (1.0 if at.t == 1 else s["M"])
    m, v = _averages(s, g, b1, b2)
    d = (1 - mu) / (1 - product) * g + ahead / (1 - product * ahead) * m
    d = d / ((v / (1 - b2**at.t)).sqrt() + eps)
    new = {"m": m, "v": v, "M": torch.as_tensor(product, dtype=torch.float64)}
    return -at.lr * at.masked(d, g) - at.lam * p, new


nadam = _path_of(
    nadam_move, "m", "v", tried=[{"momentum_decay": 0.5}], betas=(0.9, 0.999), decay="l2"
)


def asgd_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
) -> Moved:
    """ASGD (Polyak & Juditsky 1992), with Bottou's steps, as in torch.

    eta_1 = lr,   eta_{t+1} = lr_t / (1 + lambd * lr_t * t)^alpha
    p_t = p_{t-1} - eta_t * (g_t + lambd * p_{t-1}) - lambda_t * p_{t-1}
    ax_t = ax_{t-1} + mu_t * (p_t - ax_{t-1}),   mu_t = 1 / max(1, t - 1 - t0)
    """
    eta = at.lr if at.t == 1 else s["eta"].item()
    u = -eta * at.masked(g + lambd * p, g) - at.lam * p
    mu = 1 / max(1, at.t - 1 - t0)
    after = torch.full((), at.lr / (1 + lambd * at.lr * at.t) ** alpha, dtype=torch.float64)
    return u, {"eta": after, "ax": s["ax"] + mu * (p + u - s["ax"])}


asgd = _path_of(
    asgd_move,
    "eta",
    "ax",
    tried=[{"lambd": 0.1}, {"lambd": 0.1, "alpha": 0.5}],
    decay="l2",
)


def rprop_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    etas: Pair = (0.5, 1.2),
    step_sizes: Pair = (1e-6, 50.0),
) -> Moved:
    """Rprop (Riedmiller & Braun 1993), without the weight's way back, as in torch.

    size_0 = lr;   size <- the bounded size * (b where g_t * g_{t-1} > 0, a where < 0)
    g_t <- 0 where g_t * g_{t-1} < 0;   p_t = p_{t-1} - sign(g_t) * size - ...
    """
    size = torch.full_like(p, at.lr) if at.t == 1 else s["size"]
    turned, kept = ((sign * g * s["g"] > 0).double() for sign in (-1, 1))
    size = size * (1 + turned * (etas[0] - 1) + kept * (etas[1] - 1))
    size = size.clamp(*step_sizes)
    now = g * (1 - turned)
    u = -at.masked(now.sign() * size, g) - at.lam * p
    return u, {"g": now, "size": size}


rprop = _path_of(
    rprop_move,
    "g",
    "size",
    tried=[{"etas": (0.3, 1.5)}, {"step_sizes": (1e-3, 0.1)}],
    # The least step size does not follow lr, and is taken with lr=0 too.
    check={"allowed": {"lr of 0": 1e-5}},
)


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
    ranger_move,
    start=_ranger_start,
    direction=_before_pull,
    tried=[{"k": 4}, {"alpha": 0.8}],
    betas=(0.9, 0.99),
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
    scale: Callable[[int, int], float] | None = rms_scale,
    split: tuple[int, ...] | None = None,
    columns: bool = False,
    repeats: int = 1,
    transposed: bool = False,
    row_beta: float | None = None,
    element_beta: float | None = None,
    hyperball: bool = False,
) -> Moved:
    """Muon (Jordan et al. 2024; Liu et al., arXiv 2502.16982), as torch.optim has it.

    b_t = mu * b_{t-1} + (1 - mu) * g_t
    N_t = (1 - mu) * g_t + mu * b_t, or without Nesterov b_t
    O_t = U f(S) V^T of N_t = U S V^T, with f the iterated polynomial of S / ||S||
    p_t = p_{t-1} - lr * s(m, n) * O_t - lambda_t * p_{t-1}

    NorMuon (Li et al., arXiv 2510.05491, Algorithm 1) has in place of O_t
    N_t * ||O_t|| / ||N_t||,   N_t = O_t / (sqrt(r_t) + 1e-10) by rows,
    r_t = row_beta * r_{t-1} + (1 - row_beta) * mean_j O_ij^2

    AdaMuon (Si et al., arXiv 2507.11005) has O_t of sign(N_t), and in place of O_t
    A_t * sqrt(min(m, n)) / ||A_t||,   A_t = O_t / (sqrt(v_t) + 1e-8),
    v_t = element_beta * v_{t-1} + (1 - element_beta) * O_t^2

    PolarGrad (Lau et al., arXiv 2505.21799; scale None) has s = <N_t, O_t>.

    Hyperball (Wen et al., arXiv 2606.16899): with R = ||p_{t-1}|| and u_t the update,
    p_t = R * y / ||y||,   y = p_{t-1} - lr * R * u_t / ||u_t||
    """
    b = momentum * s["b"] + (1 - momentum) * g
    d = (1 - momentum) * g + momentum * b if nesterov else b
    new = {"b": b, "r": s["r"].clone(), "v": s["v"].clone()}
    moves = torch.zeros_like(p)
    seen = [as_matrix(y, transposed) for y in (d, p, new["v"], new["r"], moves)]
    for rows, across in parts_of(seen[0], split, columns, repeats):
        x, w, v, r = (y[rows][:, across] for y in seen[:4])
        o = orthogonalized(x if element_beta is None else x.sign(), table, eps)
        factor = (x * o).sum() if scale is None else scale(*x.shape)
        if element_beta is not None:
            v = element_beta * v + (1 - element_beta) * o.square()
            a = o / (v.sqrt() + 1e-8)
            o = a * math.sqrt(min(x.shape)) / (a.norm() + 1e-8)
        if row_beta is not None:
            r = row_beta * r + (1 - row_beta) * o.square().mean(1, keepdim=True)
            n = o / (r.sqrt() + 1e-10)
            o = n * o.norm() / (n.norm() + 1e-10)
        move = -at.lr * factor * o
        if hyperball:
            y = w - at.lr * w.norm() * o / o.norm()
            move = y * (w.norm() / y.norm()) - w
        block = torch.tensor(rows).unsqueeze(1), torch.tensor(across)
        for y, value in zip(seen[2:], (v, r, move)):
            y[block] = value
    return moves - at.lam * p, new


def as_matrix(x: Tensor, transposed: bool) -> Tensor:
    """A view with outputs as rows, of a matrix or a convolution with one channel in."""
    x = x.flatten(1) if x.dim() > 2 else x
    return x.T if transposed else x


def parts_of(
    x: Tensor, split: tuple[int, ...] | None, columns: bool, repeats: int
) -> list[tuple[list[int], list[int]]]:
    """The rows and columns of each part, counted one by one."""
    every = [list(range(n)) for n in x.shape]
    ends: list[list[int]] = [[] for _ in split or (0,)]
    at = 0
    for _ in range(repeats):
        for part, size in zip(ends, split or (x.shape[columns],)):
            part += range(at, at + size)
            at += size
    assert at == x.shape[columns]
    return [(every[0], part) if columns else (part, every[1]) for part in ends]


def _rows(p: Tensor) -> State:
    made = torch.zeros_like(p, dtype=torch.float64)
    return {"b": made, "r": made, "v": made}


CUBIC = (1.5, -0.5, 0.0)
LAST = (2.0, -1.5, 0.5)
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_EXPRESS = (
    # Of a matrix divided by 1.02 times its norm.
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
muon = _path_of(
    muon_move,
    start=_rows,
    weight_decay=0.1,
    tried=[
        {"momentum": 0.8},
        {"nesterov": False},
        {"eps": 5.0},
        ({"ns_steps": 3}, {"table": (STANDARD,) * 3}),
        ({"ns_coefficients": CUBIC}, {"table": (CUBIC,) * 5}),
        ({"ns_coefficients": [CUBIC, STANDARD]}, {"table": (CUBIC, STANDARD)}),
        ({"ns_coefficients": "quintic"}, {"table": QUINTIC}),
        ({"ns_coefficients": "polar_express"}, {"table": POLAR_EXPRESS}),
        ({"adjust_lr_fn": "original"}, {"scale": tall_scale}),
        ({"adjust_lr_fn": "rms_to_rms"}, {"scale": spectral_scale}),
        {"split": (3, 4)},
        ({"split": {"columns": (2, 3)}}, {"split": (2, 3), "columns": True}),
        (
            {"transposed": True, "adjust_lr_fn": "original"},
            {"transposed": True, "scale": tall_scale},
        ),
        ({"split": 7}, {"split": (1,) * 7}),
        ({"ns_coefficients": "deepseek"}, {"table": (STANDARD,) * 8 + (LAST,) * 2}),
        ({"adjust_lr_fn": "nuclear"}, {"scale": None}),
        {"element_beta": 0.9},
        {"hyperball": True, "weight_decay": 0.0},
        {"hyperball": True, "weight_decay": 0.0, "element_beta": 0.9, "split": (3, 4)},
    ],
)
normuon = _path_of(
    partial(muon_move, row_beta=0.95),
    start=_rows,
    weight_decay=0.1,
    # Small rows are divided, which shows the rounding of bfloat16 gradients.
    check={"allowed": {"bfloat16": 0.2, "bfloat16 exact": 0.2}},
    tried=[
        {"row_beta": 0.5},
        {"row_beta": 0.0},
        {"split": (3, 4)},
        ({"split": {"columns": (2, 3)}}, {"split": (2, 3), "columns": True}),
        {"transposed": True},
        {"nesterov": False},
        ({"adjust_lr_fn": "nuclear"}, {"scale": None}),
        {"hyperball": True, "weight_decay": 0.0},
    ],
)


def scion_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    momentum: float = 0.9,
    nesterov: bool = False,
    norm: str = "spectral",
    radius: float = 1.0,
    eps: float = 1e-7,
) -> Moved:
    """Scion (Pethick et al., arXiv 2502.07529, Algorithms 1 and 2, tables 2 and 3).

    b_t = mu * b_{t-1} + (1 - mu) * g_t                            mu = 1 - alpha
    p_t = p_{t-1} - lr * radius * L(b_t) - lambda_t * p_{t-1}
    L(b) = sqrt(m / n) * O of a matrix, b / RMS(b) of a vector, or sign(b) / n

    lambda_t = lr is the constrained variant, 0 the unconstrained.
    """
    b = momentum * s["b"] + (1 - momentum) * g
    d = (1 - momentum) * g + momentum * b if nesterov else b
    if norm == "sign":
        u = torch.sign(d) / (d.shape[1:].numel() if d.dim() > 1 else 1)
    elif d.dim() > 1:
        x = d.flatten(1)
        u = (math.sqrt(x.shape[0] / x.shape[1]) * orthogonalized(x, eps=eps)).reshape(
            d.shape
        )
    else:
        u = d * math.sqrt(d.numel()) / max(d.norm().item(), eps)
    return -at.lr * radius * u - at.lam * p, {"b": b}


scion = _path_of(
    scion_move,
    "b",
    weight_decay=1.0,
    tried=[
        {"norm": "sign"},
        {"radius": 3.0},
        {"momentum": 0.5},
        {"nesterov": True},
        {"eps": 5.0},
        {"weight_decay": 0.0},
    ],
)


def _along(matrix: Tensor, x: Tensor, k: int) -> Tensor:
    """A matrix times x along its side k."""
    return torch.tensordot(matrix, x, ([1], [k])).movedim(0, k)


def _products(x: Tensor, k: int) -> Tensor:
    """The products of the rows of x along its side k."""
    others = [i for i in range(x.dim()) if i != k]
    return torch.tensordot(x, x, (others, others))


def _merged(g: Tensor, s: State, shape: tuple[int, ...] | None) -> tuple[Tensor, State]:
    """The gradient and the averages in another shape."""
    g = g.reshape(shape or g.shape)
    return g, {name: x.reshape(g.shape) if name in "mv" else x for name, x in s.items()}


def _in_bases(x: Tensor, s: State, back: bool = False) -> Tensor:
    """x with each side k times Q_k, or times its transpose."""
    for k in range(x.dim()):
        if (q := s.get(f"Q{k}")) is not None:
            x = torch.tensordot(x, q, ([0], [int(back)]))
        else:
            x = x.permute(*range(1, x.dim()), 0)
    return x


def soap_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    shampoo_beta: float = -1.0,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    merged: tuple[int, ...] | None = None,
    precondition_1d: bool = False,
    normalize_grads: bool = False,
    correct_bias: bool = True,
) -> Moved:
    """SOAP (Vyas et al., arXiv 2409.11321), as in the authors' code.

    The first gradient makes L_k and Q_k = eigenvectors(L_k), and moves nothing. After it,
    with t counted from the second and k the dimensions of the shape `merged`,

    G_t = g_t in the bases Q;   m_t, v_t = Adam's averages of G_t
    N_t = m_t / (sqrt(v_t) + eps) * sqrt(1 - beta2^t) / (1 - beta1^t), back from the bases
    p_t = p_{t-1} - lr * N_t - lambda_t * p_{t-1}
    L_k = beta3 * L_k + (1 - beta3) * (the products of g_t's rows along k)

    Where t is a multiple of the frequency, the columns of Q_k and the entries of v_t along
    k are sorted by the diagonal of Q_k^T L_k Q_k; then Q_k = the Q of QR(L_k Q_k), and m_t
    is turned from the old bases into the new.
    """
    shape, b1, b2 = g.shape, *at.betas
    lone = g.dim() < 2 and not precondition_1d
    g, s = _merged(g, s, merged)
    sides = [k for k, n in enumerate(g.shape) if n <= max_precond_dim and not lone]
    move, t = torch.zeros_like(p), at.t - 1
    if t > 0:
        m, v = _averages(s, _in_bases(g, s), b1, b2)
        d = _in_bases(m / (v.sqrt() + eps), s, back=True)
        if normalize_grads:
            d = d / d.square().mean().sqrt()
        if correct_bias:
            d = d * math.sqrt(1 - b2**t) / (1 - b1**t)
        s, move = {**s, "m": m, "v": v}, d.reshape(shape)
    s = dict(s)
    b3 = b2 if shampoo_beta < 0 else shampoo_beta
    for k in sides:
        s[f"L{k}"] = b3 * s.get(f"L{k}", torch.zeros(())) + (1 - b3) * _products(g, k)
        if t == 0:
            s[f"Q{k}"] = torch.linalg.eigh(s[f"L{k}"])[1].flip(1)
    if t > 0 and t % precondition_frequency == 0:
        m = _in_bases(s["m"], s, back=True)
        for k in sides:
            q = s[f"Q{k}"]
            order = (q.T @ s[f"L{k}"] @ q).diagonal().argsort(descending=True)
            s["v"] = s["v"].index_select(k, order)
            s[f"Q{k}"] = torch.linalg.qr(s[f"L{k}"] @ q[:, order])[0]
        s["m"] = _in_bases(m, s)
    s = {name: x.reshape(shape) if name in "mv" else x for name, x in s.items()}
    return -at.lr * move - at.lam * p, s


soap = _path_of(
    soap_move,
    "m",
    "v",
    betas=(0.95, 0.95),
    weight_decay=0.01,
    # Bases of gradients of low rank depend on their last bits.
    check={"max_precond_dim": 1},
    still=1,
    sensitive=True,
    tried=[
        {"shampoo_beta": 0.8},
        {"precondition_frequency": 3},
        {"max_precond_dim": 5},
        {"normalize_grads": True},
        {"correct_bias": False},
    ],
)


def shampoo_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: float = 1e-8,
    shampoo_beta: float = -1.0,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    merged: tuple[int, ...] | None = None,
    precondition_1d: bool = False,
    normalize_grads: bool = False,
    correct_bias: bool = True,
    kl: bool = False,
    graft: bool | None = None,
) -> Moved:
    """Shampoo (Gupta et al., arXiv 1802.09568), by averages and with Adam's length.

    L_k = b3 * L_k + (1 - b3) * (the products of g_t's rows along k),   k one of K sides > 1
    m_t, v_t and the step a_t are Adam's, from the second gradient on
    R_k = (L_k / (1 - b3^t) + 1e-6 * the largest eigenvalue)^(-1/2K),   u_t = m_t R_1 R_2
    p_t = p_{t-1} - lr * u_t * ||a_t|| / ||u_t|| - lambda_t * p_{t-1}

    The first gradient makes the roots, and each step after which the frequency has passed.

    KL-Shampoo (Lin et al., arXiv 2509.03378), as in its authors' code: S_k = Q_k D_k Q_k^T,
    Delta_k = (n_k / numel) * (the products of the rows along k of g_t times S_j^(-1/2)
    along each other j);   L_k = b3 * L_k + (1 - b3) * Delta_k,
    D_k = b3 * D_k + (1 - b3) * diag(Q_k^T Delta_k Q_k)
    u_t = Q [Q^T m_t / (sqrt(D_1 x D_2 x ...) + eps)],   Q_k = the Q of QR(L_k Q_k)

    where D_k begins as 0.1, and its roots are at least 1 / min(max(10, n_k), 4000).
    """
    shape, (b1, b2), t = g.shape, at.betas, at.t - 1
    b3 = b2 if shampoo_beta < 0 else shampoo_beta
    lone = g.dim() < 2 and not precondition_1d
    g, s = _merged(g, s, merged)
    sides = [k for k, n in enumerate(g.shape) if 1 < n <= max_precond_dim and not lone]
    move, old = torch.zeros_like(g), dict(s)
    if t > 0:
        s["m"], s["v"] = _averages(s, g, b1, b2)
        m, v = s["m"], s["v"]
        if correct_bias:
            m, v = _corrected(m, v, t, b1, b2)
        move = adam = m / (v.sqrt() + eps)
        if sides and kl:
            scale = torch.ones_like(g)
            for k in sides:
                scale = (scale.movedim(k, -1) * s[f"D{k}"].sqrt()).movedim(-1, k)
            move = _in_bases(_in_bases(m, s) / (scale + eps), s, back=True)
        elif sides:
            move = m
            for k in sides:
                move = _along(s[f"R{k}"], move, k)
        if sides and (not kl if graft is None else graft):
            move = move * adam.norm() / max(move.norm().item(), 1e-300)
        if normalize_grads:
            move = move / move.square().mean().sqrt().clamp(min=1e-154)
    due = t > 0 and t % precondition_frequency == 0
    for k in sides:
        y, n = g, g.shape[k]
        for j in sides if kl and t > 0 else []:
            q, d = old[f"Q{j}"], old[f"D{j}"]
            y = y if j == k else _along(q @ d.rsqrt().diag() @ q.T, y, j)
        delta = _products(y, k) * (n / g.numel() if kl else 1.0)
        factor = s[f"L{k}"] = b3 * s.get(f"L{k}", torch.zeros(())) + (1 - b3) * delta
        if kl and t == 0:
            s[f"Q{k}"] = torch.linalg.eigh(factor)[1].flip(1)
            s[f"D{k}"] = torch.full((n,), 0.1, dtype=torch.float64)
        elif kl:
            q = s[f"Q{k}"]
            d = b3 * s[f"D{k}"] + (1 - b3) * (q.T @ delta @ q).diagonal()
            s[f"D{k}"] = d.clamp(min=min(max(10, n), 4000) ** -2)
            s[f"Q{k}"] = torch.linalg.qr(factor @ q)[0] if due else q
        elif t == 0 or due:
            d, q = torch.linalg.eigh(factor / (1 - b3**at.t) if correct_bias else factor)
            d = d.clamp(min=0) + 1e-6 * d.max()
            s[f"R{k}"] = q @ (d ** (-0.5 / len(sides))).diag() @ q.T
    s = {name: x.reshape(shape) if name in "mv" else x for name, x in s.items()}
    return -at.lr * move.reshape(shape) - at.lam * p, s


shampoo = _path_of(
    shampoo_move,
    "m",
    "v",
    betas=(0.9, 0.98),
    weight_decay=0.01,
    # Bases of gradients of low rank depend on their last bits.
    check={"max_precond_dim": 1},
    still=1,
    sensitive=True,
    tried=[
        {"shampoo_beta": 0.8},
        {"precondition_frequency": 3},
        {"max_precond_dim": 5},
        {"graft": False},
        {"kl": True},
        {"kl": True, "graft": True, "correct_bias": False},
        {"normalize_grads": True},
        {"correct_bias": False},
    ],
)


def kron_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    momentum: float = 0.9,
    precond_lr: float = 0.1,
    precond_update_prob: float = 0.03,
    precond_flat_start: float = 500.0,
    max_size_triangular: int = 8192,
    seed: int = 0,
) -> Moved:
    """PSGD Kron (Li, arXiv 1512.04202), as in kron_torch, which fits at random steps.

    m_t = mu * m_{t-1} + (1 - mu) * g_t;   d = m_t / (1 - mu^t)
    At some steps a = (x Q_k) d, b = (x Q_k^-T) v, and with products of their rows along k
    Q_k = Q_k - lr_Q * triu(A_k - B_k) Q_k / |A_k + B_k|, of a diagonal the diagonals
    u = (x Q_k^T Q_k) d
    p_t = p_{t-1} - lr * u * min(1, 1.1 / rms(u)) - lambda_t * p_{t-1}

    |X| is max|X| times |X'(X'x) / |X'x||, X' = X / max|X| and x its longest row.
    """
    s, t = dict(s), at.t
    s["m"] = momentum * s["m"] + (1 - momentum) * g
    d = (s["m"] / (1 - momentum**t)).reshape(g.shape or (1,))
    sides = [*enumerate(d.shape)]
    for k, n in sides:
        s.setdefault(f"Q{k}", torch.eye(n, dtype=torch.float64))
    share = math.exp((precond_flat_start + 1 - t) / (2 * precond_flat_start))
    if t * 0.6180339887498949 % 1 < max(precond_update_prob, share):
        (b,) = drawn_whole(seed, t - 1, 0, tuple(d.shape))
        a = d
        for k, _ in sides:
            a = _along(s[f"Q{k}"], a, k)
            b = _along(torch.linalg.inv(s[f"Q{k}"]).T, b, k)
        for k, n in sides:
            aa, bb = (_products(x, k) for x in (a, b))
            if g.dim() > 1 and 1 < n <= max_size_triangular:
                most = (aa + bb).abs().max()
                whole = (aa + bb) / most
                x = whole @ whole[whole.square().sum(1).argmax()]
                size = most * (whole @ (x / x.norm())).norm()
            else:
                aa, bb = (x.diagonal().diag() for x in (aa, bb))
                size = (aa + bb).max()
            change = (aa - bb).triu() @ s[f"Q{k}"] / size
            s[f"Q{k}"] = s[f"Q{k}"] - precond_lr * change
    u = d
    for k, _ in sides:
        u = _along(s[f"Q{k}"].T @ s[f"Q{k}"], u, k)
    u = u * min(1.0, 1.1 / (u.square().mean().sqrt().item() + 1e-6))
    return -at.lr * u.reshape(p.shape) - at.lam * p, s


kron = _path_of(
    kron_move,
    "m",
    tried=[
        {"momentum": 0.5},
        {"precond_lr": 0.2},
        {"precond_update_prob": 0.3, "precond_flat_start": 2.0},
        {"max_size_triangular": 5},
        {"seed": 3},
    ],
)


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


ademamix = _path_of(
    ademamix_move,
    *("m1", "m2", "v"),
    tried=[{"alpha": 2.0}, {"alpha_warmup": 40}, {"beta3_warmup": 40}],
    betas=(0.9, 0.999, 0.9999),
)


def adopt_move(p: Tensor, s: State, g: Tensor, at: At, eps: float = 1e-6) -> Moved:
    """ADOPT (Taniguchi et al., arXiv 2411.02853, Algorithm 2, clipped).

    v_0 = g_0^2: nothing else happens at the first gradient
    m_t = b1 * m_{t-1} + (1 - b1) * clip(g_t / max(sqrt(v_{t-1}), eps), t^(1/4))
    p_t = p_{t-1} - lr * m_t - lambda_t * p_{t-1}
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    """
    b1, b2 = at.betas
    if at.t == 1:
        # A gradient that is NaN is in both averages. The authors' m has it one step later.
        return torch.zeros_like(p), {"m": s["m"] + g.clamp(0.0, 0.0), "v": g**2}
    limit = (at.t - 1) ** 0.25
    m = b1 * s["m"] + (1 - b1) * (g / s["v"].sqrt().clamp(min=eps)).clamp(-limit, limit)
    d = at.masked(m, g)
    return -at.lr * d - at.lam * p, {"m": m, "v": b2 * s["v"] + (1 - b2) * g**2}


adopt = _path_of(
    adopt_move,
    "m",
    "v",
    tried=[{"eps": 2.0}],
    # Differences cross a kink of the clip, which derivatives do not see.
    check={"steps": 12, "allowed": {"derivatives": 0.02}},
    still=1,
    betas=(0.9, 0.9999),
    decay="l2",
)


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


def adafactor_move(
    p: Tensor,
    s: State,
    g: Tensor,
    at: At,
    eps: tuple[float, float] = (1e-30, 1e-3),
    clip_threshold: float = 1.0,
    decay_rate: float = -0.8,
    beta1: float | None = None,
    scale_parameter: bool = False,
    relative_step: bool = False,
    torch_form: bool = False,
) -> Moved:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235, Algorithms 4 and 5).

    b_t = 1 - t^rate,   G = g_t^2 + eps1
    R_t = b_t * R_{t-1} + (1 - b_t) * mean_j G_ij,   C_t of mean_i G_ij
    V_ij = R_i * C_j / mean(R);   of a vector V_t = b_t * V_{t-1} + (1 - b_t) * G
    U = g_t / sqrt(V),   Uhat = U / max(1, RMS(U) / d)
    p_t = p_{t-1} - alpha_t * Uhat - lambda_t * p_{t-1}
    alpha_t = rho_t * max(eps2, RMS(p_{t-1})),   rho_t = min(lr, 1 / sqrt(t))

    Without scale_parameter alpha_t = rho_t, and without relative_step rho_t = lr. With
    beta1 the mean of alpha_t * Uhat moves p. torch's form has G = g_t^2, a mean(R) of at
    least eps1, and a sqrt(V) of at least eps1.
    """
    eps1, eps2 = eps
    b = 1 - at.t**decay_rate
    big = g**2 + (0.0 if torch_form else eps1)
    new = dict(s)
    if g.dim() < 2:
        v = new["V"] = b * s["V"] + (1 - b) * big
    else:
        r = new["R"] = b * s["R"] + (1 - b) * big.mean(-1)
        c = new["C"] = b * s["C"] + (1 - b) * big.mean(-2)
        share = r.mean(-1).clamp(min=eps1 if torch_form else 0.0)
        v = r[..., :, None] * c[..., None, :] / share[..., None, None]
    u = g / (v.sqrt().clamp(min=eps1) if torch_form else v.sqrt())
    u = u / max(1.0, u.square().mean().sqrt().item() / clip_threshold)
    alpha = min(at.lr, at.t**-0.5) if relative_step or torch_form else at.lr
    if scale_parameter or torch_form:
        alpha *= max(eps2, p.square().mean().sqrt().item())
    u = alpha * u
    if beta1 is not None:
        u = new["m"] = beta1 * s["m"] + (1 - beta1) * u
    return -u - at.lam * p, new


def _factors(p: Tensor) -> State:
    made = torch.zeros_like(p, dtype=torch.float64)
    if p.dim() < 2:
        return {"V": made, "m": made}
    return {"R": made[..., 0], "C": made[..., 0, :], "m": made}


adafactor = _path_of(
    adafactor_move,
    start=_factors,
    tried=[
        {"eps": (0.1, 1e-3)},
        {"eps": (1e-30, 3.0), "scale_parameter": True},
        {"clip_threshold": 0.5},
        {"decay_rate": -0.6},
        {"scale_parameter": True},
        {"eps": (0.3, 1e-3), "torch_form": True},
    ],
)


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


prodigy = _path_of(
    prodigy_move,
    start=prodigy_start,
    betas=(0.9, 0.999),
    # d follows differences of weights, which shows the rounding of bfloat16.
    check={"allowed": {"bfloat16": 0.2, "bfloat16 exact": 0.2}},
    tried=[
        {"beta3": 0.9},
        {"d0": 0.1},
        {"d_coef": 2.0},
        {"growth_rate": 1.02},
        {"use_bias_correction": True},
        {"safeguard_warmup": True},
    ],
)


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
    schedule_free_sgd_move,
    start=averaging_start,
    direction=_downhill,
    tried=[{"r": 0.5}, {"weight_lr_power": 1.0, "warmup_steps": 15}, {"momentum": 0.7}],
)


schedule_free_adamw = _path_of(
    schedule_free_adamw_move,
    start=_averaging_start_with_v,
    direction=_downhill,
    betas=(0.9, 0.999),
    tried=[
        {"r": 0.5},
        {"weight_lr_power": 1.0, "warmup_steps": 15},
        {"weight_lr_power": 0},
    ],
)


schedule_free_radam = _path_of(
    schedule_free_radam_move,
    start=_averaging_start_with_v,
    direction=_downhill,
    betas=(0.9, 0.999),
    # The first steps at the usual lr are below what bfloat16 can show.
    check={"steps": 12, "lr": 0.5},
    still=4,
    tried=[{"r": 0.5}, {"weight_lr_power": 1.0}, {"silent_sgd_phase": False}],
)
