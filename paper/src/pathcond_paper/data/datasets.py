"""What the experiments train on, by name.

>>> x, y = load("two-moons").train
>>> tuple(x.shape), sorted(y.unique().tolist())
((1000, 2), [0, 1])
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .formats import DataError, MissingDataError, cifar_binary, cifar_python, idx, read_verified

# Checksums of the files as they are published, by their names in the official layouts.
CIFAR_BINARY = {
    "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR_PYTHON = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}
MNIST = {
    "train-images-idx3-ubyte": (
        "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    "train-labels-idx1-ubyte": (
        "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    "t10k-images-idx3-ubyte": (
        "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
    "t10k-labels-idx1-ubyte": (
        "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
}
MNIST_GZIPPED = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
# Where the files of a version may lie below the folder that is given.
LAYOUTS: dict[str, list[tuple[tuple[str, ...], dict[str, str]]]] = {
    "cifar10": [
        (("cifar-10-batches-bin", "."), CIFAR_BINARY),
        (("cifar-10-batches-py", "."), CIFAR_PYTHON),
    ],
    "mnist": [(("MNIST/raw", "mnist", "."), MNIST), (("MNIST/raw", "mnist", "."), MNIST_GZIPPED)],
}
DATASETS = ("cifar10", "mnist", "digits", "two-moons", "python-help")
CONTEXT = 64  # tokens of a piece of text


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images or points with their classes, or text with the characters that come next.

    Attributes:
        name: One of ``DATASETS``.
        train, test: (inputs, classes): images uint8 (n, channels, height, width), points float32
            (n, features), text int64 (n, length); classes int64, of text (n, length).
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def folder(given: Path | None = None) -> Path:
    """Where data sets lie: as given, or $PATHCOND_DATA, or the user's cache."""
    return given or Path(os.environ.get("PATHCOND_DATA") or Path.home() / ".cache" / "pathcond")


def load(name: str, root: Path | None = None) -> Dataset:
    """Read a data set; nothing is fetched.

    Args:
        name: One of ``DATASETS``.
        root: Folder that holds it in one of the official layouts; default $PATHCOND_DATA or the
            user's cache.

    Raises:
        MissingDataError: It is not there; the message says the command that gets it.
        DataError: A file is truncated or altered; the message names it.
    """
    if name in GENERATED:
        return GENERATED[name]()
    if name not in LAYOUTS:
        raise DataError(f"There is no data set {name!r}: choose one of {', '.join(DATASETS)}")
    place, checksums = _find_files(name, folder(root))
    contents = {
        file: (read_verified(place / file, digest), place / file)
        for file, digest in checksums.items()
    }
    if name == "mnist":
        train_x, train_y, test_x, test_y = (idx(*contents[file]) for file in checksums)
        return Dataset(
            name=name,
            train=_match(train_x[:, None], train_y, place),
            test=_match(test_x[:, None], test_y, place),
        )
    read = cifar_binary if checksums is CIFAR_BINARY else cifar_python
    batches = [read(*contents[file]) for file in checksums]
    images, labels = (torch.cat(parts) for parts in zip(*batches[:-1], strict=True))
    return Dataset(name=name, train=_match(images, labels, place), test=_match(*batches[-1], place))


def _match(images: Tensor, labels: Tensor, place: Path) -> tuple[Tensor, Tensor]:
    if len(images) != len(labels):
        raise DataError(
            f"{place} holds {len(images):,} images and {len(labels):,} labels that belong together"
        )
    return images, labels.long()


def _find_files(name: str, root: Path) -> tuple[Path, dict[str, str]]:
    """The first folder that holds all files of a version, and their checksums."""
    partly = []
    for places, checksums in LAYOUTS[name]:
        for place in places:
            present = [file for file in checksums if (root / place / file).is_file()]
            if len(present) == len(checksums):
                return root / place, checksums
            if present:
                partly.append(
                    f"{root / place} lacks "
                    f"{', '.join(file for file in checksums if file not in present)}"
                )
    why = "; ".join(partly) or f"{root} holds none of its official layouts"
    raise MissingDataError(
        f"{name} is not here: {why}. Get it by\n  pathcond data get {name} --dir {root}"
    )


def _digits() -> Dataset:
    """1,797 handwritten digits as (n, 1, 8, 8), the last 297 for testing.

    The same as scikit-learn's, kept here so that a quick run needs torch alone. E. Alpaydin and C.
    Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (CC BY 4.0).
    """
    file = Path(__file__).with_name("digits.bin.gz")
    # Each row has 64 pixels from 0 to 16, then the class
    rows = torch.frombuffer(bytearray(gzip.decompress(file.read_bytes())), dtype=torch.uint8).view(
        -1, 65
    )
    x = rows[:, :64].reshape(-1, 1, 8, 8) * 15
    y = rows[:, 64].long()
    return Dataset(name="digits", train=(x[:1500], y[:1500]), test=(x[1500:], y[1500:]))


def _two_moons() -> Dataset:
    """Scikit-learn's two interleaved half circles."""
    from sklearn.datasets import make_moons

    points, labels = make_moons(2000, noise=0.1, random_state=0)
    x = torch.tensor(points, dtype=torch.float32)
    y = torch.tensor(labels)
    return Dataset(name="two-moons", train=(x[:1000], y[:1000]), test=(x[1000:], y[1000:]))


def _python_help() -> Dataset:
    """The text of Python's own ``help()``, ASCII characters as tokens, the last tenth for testing.

    It comes with the interpreter (``pydoc_data``), and differs a little from version to version.
    """
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pieces = (len(tokens) - 1) // CONTEXT
    x, y = (tokens[k : k + pieces * CONTEXT].view(pieces, CONTEXT) for k in (0, 1))
    kept = pieces * 9 // 10
    return Dataset(name="python-help", train=(x[:kept], y[:kept]), test=(x[kept:], y[kept:]))


GENERATED: dict[str, Callable[[], Dataset]] = {
    "digits": _digits,
    "two-moons": _two_moons,
    "python-help": _python_help,
}
