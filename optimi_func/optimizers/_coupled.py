"""The base class of those of torch.optim's optimizers whose decay joins the gradient."""

from dataclasses import KW_ONLY

from optimi_func.rules import Body


class Coupled(Body):
    """Base class of optimizers whose decay joins the gradient, unless it is decoupled."""

    _: KW_ONLY
    decouple_wd: bool = False

    def usual_decay(self):
        return "decoupled" if self.decouple_wd else "l2"
