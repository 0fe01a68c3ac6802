"""Fetch a data set from where it is published, going on where the last attempt stopped; checksums
decide what is kept.
"""

from __future__ import annotations

import errno
import hashlib
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .datasets import MNIST_GZIPPED, load
from .formats import DataError, MissingDataError

CHUNK = 2**18
TIMEOUT = 30.0  # seconds without a byte


class DownloadError(OSError):
    """A file could not be fetched; the message says which, why, and that the next attempt goes on
    where this one stopped.
    """


@dataclass(frozen=True, kw_only=True)
class Source:
    """One published file.

    Attributes:
        url: Where it is.
        digest: "md5:..." as its publisher gives it.
        into: Folder below the data folder, for the file itself or for what is in the archive.
    """

    url: str
    digest: str
    into: str = "."

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Source(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    "mnist": tuple(
        Source(
            url=f"https://ossci-datasets.s3.amazonaws.com/mnist/{file}",
            digest=digest,
            into="MNIST/raw",
        )
        for file, digest in MNIST_GZIPPED.items()
    ),
}


def get(
    name: str,
    root: Path,
    *,
    progress: Callable[[str, int, int | None], object] = lambda file, done, total: None,
) -> Path:
    """Fetch a data set that is not there yet.

    Args:
        name: "cifar10" or "mnist".
        root: The data folder.
        progress: Told the file, the bytes that are there and the bytes in all, if known.

    Returns:
        The folder.
    """
    try:
        load(name, root)
        return root
    except MissingDataError:
        pass
    if name not in SOURCES:
        raise DataError(
            f"{name} needs no download"
            if name in ("digits", "two-moons")
            else f"There is no data set {name!r}"
        )
    for source in SOURCES[name]:
        place = root / source.into
        place.mkdir(parents=True, exist_ok=True)
        archive = _fetch(source, place, progress)
        if archive.name.endswith(".tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
            archive.unlink()
    load(name, root)
    return root


def _fetch(source: Source, place: Path, progress: Callable[[str, int, int | None], object]) -> Path:
    """The file, whole and as published."""
    path = place / source.file
    part = place / f"{source.file}.part"
    if path.is_file() and _digest(path, source) == source.digest:
        return path
    try:
        _continue(source, part, progress)
    except urllib.error.HTTPError as error:
        # "range not satisfiable": the part is the whole already, or more than that
        if error.code != 416:
            raise DownloadError(f"{source.url} answered {error.code} {error.reason}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DownloadError(
                f"The disk of {place} is full, and {source.file} needs room; what is there stays."
            ) from error
        raise DownloadError(
            f"{source.url} was interrupted ({error}): the same command goes on where it stopped."
        ) from error
    if _digest(part, source) != source.digest:
        part.unlink()
        raise DataError(
            f"{source.url} is not what was published: its checksum is not "
            f"{source.digest}. Nothing of it was kept."
        )
    part.replace(path)
    return path


def _continue(
    source: Source, part: Path, progress: Callable[[str, int, int | None], object]
) -> None:
    """Append what is missing."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        source.url, headers={"Range": f"bytes={done}-"} if done else {}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if done and answer.status != 206:  # a server that knows no ranges starts over
            done = 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with part.open("ab" if done else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(source.file, done, total)
    if total is not None and done != total:
        raise DownloadError(f"the connection ended after {done:,} of {total:,} bytes")


def _digest(path: Path, source: Source) -> str:
    kind = source.digest.partition(":")[0]
    digest = hashlib.new(kind)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"
