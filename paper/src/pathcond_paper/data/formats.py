"""Official file formats: CIFAR-10's binary and python versions, MNIST's idx. A file that is not
what it should be is named.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IDX_BYTES = 0x08  # the type of unsigned bytes
CIFAR_RECORD = 1 + 3 * 32 * 32


class DataError(ValueError):
    """A file of a data set is truncated, altered or of another format; the message names it."""


class MissingDataError(DataError):
    """Files of a data set are not there; the message says the command that gets them."""


def read_verified(path: Path, digest: str | None) -> bytes:
    """The content of a file whose checksum is as it should be.

    Args:
        path: The file.
        digest: "md5:..." or "sha256:..."; None if none is known.
    """
    content = path.read_bytes()
    if digest is not None:
        kind, _, expected = digest.partition(":")
        if hashlib.new(kind, content).hexdigest() != expected:
            raise DataError(
                f"{path} is truncated or altered: its {kind} is not {expected}. "
                "Delete it and fetch it again."
            )
    return content


def cifar_binary(content: bytes, name: Path) -> tuple[Tensor, Tensor]:
    """Records of one label byte and 3,072 image bytes, channel first: (n, 3, 32, 32) and (n,)
    uint8.
    """
    if not content or len(content) % CIFAR_RECORD:
        raise DataError(
            f"{name} has {len(content):,} bytes, no whole number of CIFAR-10 records "
            f"of {CIFAR_RECORD:,} bytes"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).clone(), _labels(records[:, 0].clone(), name)


def cifar_python(content: bytes, name: Path) -> tuple[Tensor, Tensor]:
    """A pickled dict of ``data`` and ``labels``, read without running anything that it asks for."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        images = torch.from_numpy(batch[b"data"].copy())
        labels = torch.tensor(batch[b"labels"], dtype=torch.uint8)
    except Exception as error:  # whatever a pickle that is none can raise
        raise DataError(f"{name} is no batch of CIFAR-10's python version: {error}") from error
    if images.dtype != torch.uint8 or images.shape != (len(labels), CIFAR_RECORD - 1):
        raise DataError(
            f"{name} holds images of shape {tuple(images.shape)} for {len(labels):,} labels"
        )
    return images.view(-1, 3, 32, 32), _labels(labels, name)


class _ArraysOnly(pickle.Unpickler):
    """Knows what an array of numbers is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ("_reconstruct", "ndarray", "dtype", "encode") or module.partition(".")[
            0
        ] not in ("numpy", "_codecs"):
            raise DataError(f"it asks for {module}.{name}, which has no place in a batch of images")
        return super().find_class(module, name)


def idx(content: bytes, name: Path) -> Tensor:
    """An array of unsigned bytes after a header of its shape, gzipped or not."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise DataError(f"{name} is truncated or altered: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != IDX_BYTES:
        raise DataError(f"{name} is no idx file of unsigned bytes")
    axes = content[3]
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{axes}I", content[4:start]) if len(content) >= start else ()
    if not shape or len(content) - start != torch.Size(shape).numel():
        raise DataError(
            f"{name} is truncated or altered: {len(content) - start:,} bytes for an "
            f"array of {shape}"
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


def _labels(labels: Tensor, name: Path) -> Tensor:
    if int(labels.max()) > 9:
        raise DataError(
            f"{name} is altered: it has a label {int(labels.max())}, and there are ten classes"
        )
    return labels
