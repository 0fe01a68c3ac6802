"""Training batch -> example inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ..capture.models import Inputs
from ..lifting.sample import Prepared


def inputs_of(batch: Any) -> Any:
    """The model's inputs in a training batch: a Tensor itself, the first element of a tuple or
    list.
    """
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, (tuple, list)) and batch:
        return batch[0]
    keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise TypeError(
        f"A training batch is a {type(batch).__name__}{keys}, and what of it the model takes is "
        "not known. Say it with "
        'PathCondCallback(inputs=lambda batch: batch["image"]), or give example_inputs.'
    )


def move_inputs(example_inputs: Inputs | Prepared, device: torch.device | str) -> Any:
    """Example inputs on a device; what ``prepare`` made stays where it is."""
    if isinstance(example_inputs, Prepared):
        return example_inputs
    # such as transformers' BatchEncoding, of which pytrees know nothing
    if isinstance(example_inputs, Mapping):
        example_inputs = dict(example_inputs)
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, example_inputs)


def first_batch(loader: Any) -> Any:
    """The batch that training begins with, drawn in this process; generators of the loader are left
    as they were.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate counts the passes over its own
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        # no worker is started for one batch, and none that persists is disturbed
        loader.num_workers = loader.timeout = 0
    states = [(generator, generator.get_state()) for generator in generators(loader)]
    try:
        for batch in loader:
            return batch
    finally:
        for generator, state in states:
            generator.set_state(state)
    raise ValueError(
        "The training data has no batch to take example inputs from: give "
        "PathCondCallback(example_inputs=...)"
    )


def generators(source: Any) -> list[torch.Generator]:
    """Those that a DataLoader and its samplers draw from, beside torch's own."""
    inner = [getattr(source, name, None) for name in ("sampler", "batch_sampler")]
    own = (
        [source.generator]
        if isinstance(getattr(source, "generator", None), torch.Generator)
        else []
    )
    return own + [
        generator for sampler in inner if sampler is not None for generator in generators(sampler)
    ]
