"""On the Distance between Two Neural Networks and the Stability of
Learning, Bernstein et al. 2020 (arXiv:2002.03432).

x = (x - lr |x| / |g| g) / sqrt(1 + lr^2)

Use Fromage to train GANs, image models and transformers with a single
learning rate near 0.01. The division by sqrt(1 + lr^2) keeps the norm of a
weight from growing.
"""

from torch import Tensor

from optimi_func.rules import Optimizer, root


class Fromage(Optimizer):
    def measure(self, mean, g: Tensor, x: Tensor):
        return {
            "ratio": root(mean(x * x)) / root(mean(g * g)).clamp_min(1e-12)
        }

    def direction(self, g: Tensor, ratio: Tensor):
        return ratio * g

    def after(self, x: Tensor, u: Tensor):
        return (x + u) / (1 + self.lr**2) ** 0.5 - x
