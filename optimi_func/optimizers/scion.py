"""Scion (Pethick et al. 2025): steps of fixed length in a norm that suits the layer."""

from dataclasses import KW_ONLY

from torch import Tensor

from optimi_func.core.math import norm
from optimi_func.optimizers.muon import Muon
from optimi_func.rules import Float, functions
from optimi_func.state.convert import Counterparts

__all__ = ["Scion", "scion", "scion_init", "scion_step"]


class Scion(Muon, name="scion"):
    """Scion: take fixed-length steps along the momentum, in a norm that suits the layer.

        b <- momentum * b + (1 - momentum) * g
        p <- p - lr * radius * L(b) - lr * weight_decay * p

    L(b) has a norm of 1. For a matrix with m rows and n columns, L(b) is sqrt(m / n) times
    Muon's X, or sign(b) / n if norm="sign". For a vector, L(b) is b divided by the root
    mean square of b. With a weight_decay of 1, parameters that begin inside the ball of the
    given radius stay inside the ball. With these norms, the same lr and radius work for
    models of all widths.

    Args:
        weight_decay: Factor on lr * p. The value 1 selects the paper's constrained variant,
            and 0 selects the unconstrained variant.
        momentum: Fraction of b that carries over from one step to the next, in [0, 1). This
            momentum is 1 minus the momentum in the authors' code.
        norm: The norm in which steps are measured: "spectral", or "sign" for output layers
            and embeddings.
        radius: Factor on the step, and the radius of the ball that contains the parameters.

    Arguments not named here are described under `Muon`, or under `BaseOptimizer` if all
    optimizers share them.

    References:
        Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs",
        arXiv:2502.07529.

    >>> w = torch.ones(2, requires_grad=True)
    >>> optimizer = Scion([w], lr=0.1, radius=3.0, compile=False)
    >>> optimizer.step((2 * w).sum().backward)
    >>> w.detach()  # 0.9 * 1 - 0.1 * 3
    tensor([0.6000, 0.6000])
    """

    weight_decay: Float = Float(1.0)
    momentum: Float = Float(0.9, "momentum", below=1.0)
    nesterov: bool = False
    adjust_lr_fn: str | None = "rms_to_rms"
    _: KW_ONLY
    norm: str = "spectral"
    radius: Float = Float(1.0, "radius")

    counterparts = Counterparts(torch_counts_steps=False)

    def check(self) -> None:
        super().check()
        if self.norm not in ("spectral", "sign"):
            raise ValueError(
                f"Invalid norm: norm={self.norm!r}: allowed are 'spectral' and 'sign'"
            )

    def matrices(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().matrices(x) if x.dim() > 1 else (x.reshape(-1, 1),)

    def joined(self, parts: list[Tensor], like: Tensor) -> Tensor:
        return (
            super().joined(parts, like) if like.dim() > 1 else parts[0].reshape(like.shape)
        )

    def scaled(self, y: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        m, n = y.shape[-2:]
        if self.norm == "sign":
            return y.sign() * (self.radius / max(n, 1)), v
        if n == 1:  # a vector, whose one singular value is its norm
            length = norm(y, dim=(-2, -1), keepdim=True).clamp_min(self.eps)
            return y * (m**0.5 * self.radius / length), v
        u, v = super().scaled(y, v)
        return u * self.radius, v

    def refuses(self, p: Tensor) -> str | None:
        return super().refuses(p) if p.dim() > 1 else None


scion, scion_init, scion_step = functions(Scion)
