"""TF32 and bfloat16 inside float32 products: switched off where rounding would hide what is being
measured.

torch keeps these settings as a tree: one for everything, one per backend, one per kind of operation
in it. What is not set follows the setting above it. ``torch.set_float32_matmul_precision`` and
``allow_tf32`` are an older way to write some of them, with notes of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..trees import tree_leaves
from .models import Inputs

Setting: TypeAlias = tuple[str, str]  # backend and kind of operation

EVERYTHING = ("generic", "all")
KINDS = ("matmul", "conv", "rnn")

_read = torch._C._get_fp32_precision_getter
_write = torch._C._set_fp32_precision_setter


@contextlib.contextmanager
def without_tf32(backends: Iterable[str]) -> Iterator[None]:
    """Run the body in full float32 precision, then set everything to what it was.

    Only what the body needs is written: torch's own default for convolutions on a GPU, TF32 unless
    a setting above says otherwise, could not be written back. So while the body runs on a GPU,
    reading ``torch.backends.cudnn.allow_tf32`` may fail.

    Args:
        backends: "cuda" for a GPU, "mkldnn" for a CPU.
    """
    backends = list(backends)
    own = _own_values(backends)
    written: list[Setting] = []
    products = "highest"
    try:
        # a backend before its kinds, most of which follow it
        for setting in own:
            if _read(*setting) != "ieee":
                written.append(setting)
                _write(*setting, "ieee")
        # Tunable products on a GPU read the older note, and fail where the two differ.
        if "cuda" in backends:
            products = torch.get_float32_matmul_precision()
            if products != "highest":
                written += [setting for setting in own if setting[1] == "matmul"]
                torch.set_float32_matmul_precision("highest")
        yield
    finally:
        if products != "highest":
            torch.set_float32_matmul_precision(products)
        for setting in written:
            _write(*setting, own[setting])


def _own_values(backends: Sequence[str]) -> dict[Setting, str]:
    """What each setting of some backends holds itself, "none" where it follows the one above: that
    is what it reads as while the one above is "none".
    """
    above = {EVERYTHING: _read(*EVERYTHING)}
    found: dict[Setting, str] = {}
    try:
        _write(*EVERYTHING, "none")
        for backend in backends:
            whole = (backend, "all")
            above[whole] = found[whole] = _read(*whole)
            _write(*whole, "none")
            found |= {(backend, kind): _read(backend, kind) for kind in KINDS}
    finally:
        for setting, value in above.items():
            _write(*setting, value)
    return found


def backends_of(model: nn.Module, example_inputs: Inputs) -> list[str]:
    """The backends that a model computes on, by where its tensors are."""
    held = [*model.parameters(), *model.buffers(), *tree_leaves(example_inputs)]
    on_gpu = any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in held)
    return ["mkldnn", "cuda"] if on_gpu else ["mkldnn"]
