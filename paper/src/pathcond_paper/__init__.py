"""The paper's figures and tables, one module each, behind ``pathcond reproduce NAME``.

    jobs ──► together ──► run ──► rows ──► plot, table, claims
             (sweep.py: on processes or a Ray cluster)      (only read rows)

A *job* is what identifies a run, a dict of plain settings; ``run`` turns jobs that share the work
into results; a *row* is a job with its result, one line of the results file. So a killed sweep goes
on with the jobs that have no row.
"""

from __future__ import annotations

import importlib
from typing import cast

from .figure import Figure

FIGURES = {
    "toy": "one neuron: loss, lifted and parameter trajectories from three starts "
    "(fig:toy_example)",
    "mlp-depth": "MLPs with BatchNorm on CIFAR-10: epochs to 99 %, learning rates "
    "(fig:cifar10_fc, fig:conv_speed_all_lrs)",
    "cifar-nv": "fully convolutional network on CIFAR-10: train and test curves "
    "(fig:cifar10_conv, fig:generalize_all_lrs)",
    "autoencoder": "MNIST autoencoders: final loss over compression (fig:mnist_ae, "
    "fig:regimes_all_lrs)",
    "regimes": "size of the rescaling over uneven widths and variances (fig:regime_analysis)",
    "timing": "seconds of conditioning beside an epoch, over depth, by step (fig:timing, "
    "fig:timing_mlp)",
    "convergence": "sweeps of coordinate descent against the true optimum (fig:bcd_convergence)",
    "smooth": "GELU and SiLU: change of the outputs, training (fig:gelu_silu, fig:cifar10_fc_gelu)",
    "criteria": "toy examples on which criteria coincide (sec:minequivalenceex)",
    "tuned": "every method at its own best learning rate, beside a search over scales of layers "
    "(no figure of the paper)",
    "table1": "parameters, hidden units and paths of the paper's networks (tab:architecture_stats)",
}


def load(name: str) -> Figure:
    """Import the figure of that name; only then are its own imports paid for.

    Raises:
        KeyError: There is none.
    """
    if name not in FIGURES:
        raise KeyError(name)
    return cast(Figure, importlib.import_module(f"{__name__}.figures.{name.replace('-', '_')}"))
