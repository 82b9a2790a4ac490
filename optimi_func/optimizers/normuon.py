"""NorMuon (Li et al. 2025): Muon whose steps have rows of about equal length."""

from typing import NamedTuple

from torch import Tensor

from optimi_func.core.layout import Layout, sides
from optimi_func.core.math import norm
from optimi_func.optimizers.muon import Muon
from optimi_func.rules import Float, Moment, Shaped, functions, root
from optimi_func.state.convert import Counterparts

__all__ = ["NorMuon", "normuon", "normuon_init", "normuon_step"]


class NorMuon(Muon, name="normuon"):
    """NorMuon: Muon whose steps have rows of about equal length.

        O  = X of Muon, before s
        r <- row_beta * r + (1 - row_beta) * mean over columns of O^2
        N  = O / (sqrt(r) + 1e-10)
        p <- p - lr * s * N * ||O|| / (||N|| + 1e-10) - lr * weight_decay * p

    A Muon step has equal singular values, but some of its rows are much longer than others.
    Each row belongs to one neuron of the layer. NorMuon divides each row by its average
    length in recent steps, and then scales the whole step back to the norm of Muon's step.
    r stores one value for each row, in float32 or wider. r starts at 0 and needs no bias
    correction, because dividing by ||N|| removes the bias. If a matrix is sharded, NorMuon
    uses the norm of the complete matrix. Each matrix of a stack, and each part of a
    `split`, has its own norm. If `split` divides the columns, r has one column for each
    part. With transposed=True, the rows are the outputs of the layer.

    Args:
        row_beta: Fraction of r that carries over from one step to the next, in [0, 1).
        element_beta: An option of Muon that NorMuon does not accept.

    Arguments not named here are described under `Muon`, or under `BaseOptimizer` if all
    optimizers share them.

    References:
        Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491.

    >>> w = torch.eye(2, requires_grad=True)
    >>> options = {"weight_decay": 0.0, "ns_dtype": "float32", "compile": False}
    >>> optimizer = NorMuon([w], lr=0.1, **options)
    >>> (w * torch.tensor([[3.0, 0.0], [3.0, 1.0]])).sum().backward()
    >>> optimizer.step()
    >>> (w.detach() - torch.eye(2)).norm(dim=1)  # of both rows
    tensor([0.0250, 0.0250])
    """

    row_beta: Float = Float(0.95, "row beta", below=1.0)

    counterparts = Counterparts()

    class State(NamedTuple):  # pyright: ignore[reportIncompatibleMethodOverride]
        momentum_buffer: Moment  # b
        second_momentum_buffer: Shaped  # r, one number a row

    def init(self, p: Tensor):
        stack = p.shape[:1] if p.dim() == 3 else ()
        rows, _ = sides(p.shape, self.transposed)
        parts = self.layout.parts if self.layout.columns else 1
        count = parts if isinstance(parts, int) else len(parts)
        return self.State._make((None, (*stack, rows, count)))

    @property
    def layout_of_squares(self) -> Layout:
        if not self.layout.columns:
            return self.layout._replace(transposed=False)
        parts = self.layout.parts  # a column of r for each
        return Layout(parts if isinstance(parts, int) else (1,) * len(parts), True)

    def check(self) -> None:
        super().check()
        if self.element_beta is not None:
            raise ValueError(
                f"Invalid element_beta: element_beta={self.element_beta!r}: allowed is "
                "None, because NorMuon divides by rows; Muon takes it"
            )

    def scaled(self, y: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        assert v is not None
        o = self.orthogonalized(y)
        lengths = norm(o, dim=-1, keepdim=True)
        means = lengths.square() / max(1, o.shape[-1])
        v = self.row_beta * v + (1 - self.row_beta) * means
        even = 1.0 / (root(v) + 1e-10)
        pair = lengths, lengths * even
        before, after = (norm(z, dim=(-2, -1), keepdim=True) for z in pair)
        return o * (even * (self.scale(y, o) * before / (after + 1e-10))), v


normuon, normuon_init, normuon_step = functions(NorMuon)
