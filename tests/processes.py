"""Processes that start in no time: forked from one that has imported what they need and has no
threads. Spawned ones import torch anew, which takes longer than most of what they are asked to do.
"""

from torch import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "tests.test_distributed",
        "tests.paper.figure_for_tests",
        "pathcond_paper.sweep.engines",
        # loaded at first use only
        "pathcond.condition",
        "torch._dynamo",
    ]
)
