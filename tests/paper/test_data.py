"""Official formats in miniature, a loopback server, and every way in which a file can be wrong."""

import gzip
import hashlib
import http.server
import pickle
import socketserver
import struct
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from pathcond.cli.commands import app
from pathcond_paper import data
from pathcond_paper.data import datasets, downloading, formats

IMAGES = torch.randint(
    0, 256, (24, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.arange(24) % 10
DIGITS = torch.randint(
    0, 256, (7, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


def idx(array: Tensor) -> bytes:
    return (
        b"\0\0\x08"
        + bytes([array.dim()])
        + struct.pack(f">{array.dim()}I", *array.shape)
        + array.numpy().tobytes()
    )


def digest(kind: str, content: bytes) -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files in all official formats, with their checksums in place of the published ones."""
    root = tmp_path / "published"
    binary, python, raw = (
        root / "cifar-10-batches-bin",
        root / "cifar-10-batches-py",
        root / "MNIST" / "raw",
    )
    for folder in (binary, python, raw):
        folder.mkdir(parents=True)
    for i, (name, of_python) in enumerate(
        zip(datasets.CIFAR_BINARY, datasets.CIFAR_PYTHON, strict=True)
    ):
        x, y = IMAGES[4 * i : 4 * i + 4], LABELS[4 * i : 4 * i + 4]
        content = b"".join(
            bytes([int(label)]) + image.numpy().tobytes() for image, label in zip(x, y, strict=True)
        )
        (binary / name).write_bytes(content)
        monkeypatch.setitem(datasets.CIFAR_BINARY, name, digest("sha256", content))
        content = pickle.dumps(
            {
                b"data": x.reshape(4, -1).numpy(),
                b"labels": y.tolist(),
                b"batch_label": b"one of six",
            }
        )
        (python / of_python).write_bytes(content)
        monkeypatch.setitem(datasets.CIFAR_PYTHON, of_python, digest("md5", content))
    arrays = (
        DIGITS,
        torch.arange(7, dtype=torch.uint8),
        DIGITS[:3],
        torch.arange(3, dtype=torch.uint8),
    )
    for plain, gzipped, array in zip(datasets.MNIST, datasets.MNIST_GZIPPED, arrays, strict=True):
        (raw / plain).write_bytes(idx(array))
        monkeypatch.setitem(datasets.MNIST, plain, digest("sha256", idx(array)))
        content = gzip.compress(idx(array))
        (raw / gzipped).write_bytes(content)
        monkeypatch.setitem(datasets.MNIST_GZIPPED, gzipped, digest("md5", content))
    return root


def only(published: Path, tmp_path: Path, *files: str) -> Path:
    root = tmp_path / "only"
    for file in files:
        for path in published.glob(file):
            target = root / path.relative_to(published)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return root


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("cifar10", "cifar-10-batches-bin/*"),
        ("cifar10", "cifar-10-batches-py/*"),
        ("mnist", "MNIST/raw/*-ubyte"),
        ("mnist", "MNIST/raw/*.gz"),
    ],
)
def test_every_official_layout_is_read(
    name: str, files: str, published: Path, tmp_path: Path
) -> None:
    root = only(published, tmp_path, files)
    loaded = data.load(name, root)
    if name == "cifar10":
        assert torch.equal(loaded.train[0], IMAGES[:20])
        assert torch.equal(loaded.train[1], LABELS[:20])
        assert torch.equal(loaded.test[0], IMAGES[20:])
    else:
        assert torch.equal(loaded.train[0], DIGITS[:, None])
        assert torch.equal(loaded.test[1], torch.arange(3))
    inside = next(root.glob(files)).parent  # the folder of the files itself may be given too
    assert torch.equal(data.load(name, inside).train[0], loaded.train[0])
    victim = sorted(root.glob(files))[0]
    whole = victim.read_bytes()
    for wrong in (whole[:-1], whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]):
        victim.write_bytes(wrong)
        with pytest.raises(data.DataError, match=victim.name):
            data.load(name, root)
    victim.unlink()
    with pytest.raises(
        data.MissingDataError, match=rf"lacks {victim.name}(.|\n)*pathcond data get {name} --dir"
    ):
        data.load(name, root)


def test_formats_are_checked_even_where_no_checksum_is_known(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for read, wrong in (
        (formats.cifar_binary, b""),
        (formats.cifar_binary, bytes(3072)),
        (formats.cifar_binary, b"\x0a" + bytes(3072)),  # an eleventh class
        (formats.cifar_python, b"no pickle"),
        (
            formats.cifar_python,
            pickle.dumps({b"data": numpy.zeros((2, 5), "uint8"), b"labels": [1, 2]}),
        ),
        # a pickle that asks for something else than arrays
        (formats.cifar_python, pickle.dumps(Path)),
        (formats.idx, b"\0\0\x09\x01" + bytes(9)),
        (formats.idx, idx(DIGITS)[:-1]),
        (formats.idx, gzip.compress(idx(DIGITS))[:-9]),
        (formats.idx, b""),
    ):
        with pytest.raises(data.DataError, match="file"):
            read(wrong, path)


def test_digits_and_moons_need_no_download() -> None:
    x, y = data.load("digits").train
    assert x.shape == (1500, 1, 8, 8)
    assert x.dtype == torch.uint8
    assert int(x.max()) == 240
    assert sorted(y.unique().tolist()) == list(range(10))
    assert data.load("two-moons").test[0].shape == (1000, 2)
    with pytest.raises(data.DataError, match="cifar10, mnist, digits, two-moons"):
        data.load("imagenet")


def test_digits_are_those_of_scikit_learn() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    images, labels = load_digits(return_X_y=True)
    digits = data.load("digits")
    found = torch.cat([digits.train[0], digits.test[0]])
    assert torch.equal(found.view(-1, 64).double(), torch.from_numpy(images) * 15)
    assert torch.equal(torch.cat([digits.train[1], digits.test[1]]), torch.from_numpy(labels))


# -- fetching --------------------------------------------------------------------------------------


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; breaks off after ``limit`` bytes of an answer, and understands ranges if
    asked to.
    """

    root, limit, ranges = Path(), None, True
    asked: list[str | None]

    def do_GET(self) -> None:
        content = (
            (self.root / self.path.lstrip("/")).read_bytes()
            if (self.root / self.path.lstrip("/")).is_file()
            else None
        )
        if content is None:
            self.send_error(404, "not here")
            return
        asked = self.headers.get("Range")
        self.asked.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.limit])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    handler = type("Handler", (Server,), {"root": published, "asked": []})
    with tarfile.open(published / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(published / "cifar-10-batches-bin", "cifar-10-batches-bin")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as listening:
        address = f"http://127.0.0.1:{listening.server_address[1]}"
        archive = published / "cifar-10-binary.tar.gz"
        sources = {
            "cifar10": (
                downloading.Source(
                    url=f"{address}/{archive.name}", digest=digest("md5", archive.read_bytes())
                ),
            ),
            "mnist": tuple(
                downloading.Source(
                    url=f"{address}/MNIST/raw/{file}", digest=known, into="MNIST/raw"
                )
                for file, known in datasets.MNIST_GZIPPED.items()
            ),
        }
        monkeypatch.setattr(downloading, "SOURCES", sources)
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield handler
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_fetched_once_from_the_command_line(
    name: str, server: type[Server], tmp_path: Path
) -> None:
    root = tmp_path / "fetched"
    for _ in range(2):
        result = CliRunner().invoke(app, ["data", "get", name, "--dir", str(root)])
        assert result.exit_code == 0, result.output
        assert f"{name} is in {root}" in result.stdout
    # the second time nothing is asked for
    assert len(server.asked) == (1 if name == "cifar10" else 4)
    assert len(data.load(name, root).train[0]) > 0
    assert not list(root.rglob("*.part"))
    assert not list(root.rglob("*.tar.gz"))


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_fetch_goes_on_where_it_stopped(
    ranges: bool, server: type[Server], tmp_path: Path
) -> None:
    server.limit, server.ranges = 1000, ranges
    with pytest.raises(
        data.DownloadError,
        match=r"cifar-10-binary.tar.gz was interrupted .* "
        r"goes on where it stopped",
    ):
        data.get("cifar10", tmp_path / "fetched")
    part = tmp_path / "fetched" / "cifar-10-binary.tar.gz.part"
    assert part.stat().st_size == 1000
    server.limit = None
    data.get("cifar10", tmp_path / "fetched")
    assert server.asked == [None, "bytes=1000-"]
    assert not part.exists()


def test_what_was_altered_on_the_way_is_not_kept(server: type[Server], tmp_path: Path) -> None:
    archive = server.root / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    result = CliRunner().invoke(app, ["data", "get", "cifar10", "--dir", str(tmp_path / "fetched")])
    assert result.exit_code == 2
    assert "is not what was published" in result.stderr
    assert not any(path.is_file() for path in (tmp_path / "fetched").rglob("*"))


def test_a_part_that_is_whole_needs_no_more(server: type[Server], tmp_path: Path) -> None:
    part = tmp_path / "fetched" / "cifar-10-binary.tar.gz.part"
    part.parent.mkdir()
    part.write_bytes((server.root / "cifar-10-binary.tar.gz").read_bytes())
    data.get("cifar10", tmp_path / "fetched")
    assert len(data.load("cifar10", tmp_path / "fetched").test[0]) == 4


def test_answers_that_are_none(
    server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.root / "cifar-10-binary.tar.gz").unlink()
    with pytest.raises(data.DownloadError, match="answered 404"):
        data.get("cifar10", tmp_path / "fetched")
    nobody = downloading.Source(url="http://127.0.0.1:9/cifar-10-binary.tar.gz", digest="md5:0")
    monkeypatch.setattr(downloading, "SOURCES", {"cifar10": (nobody,)})
    result = CliRunner().invoke(app, ["data", "get", "cifar10", "--dir", str(tmp_path / "fetched")])
    assert result.exit_code == 2
    assert "was interrupted" in result.stderr
    for name in ("digits", "imagenet"):
        assert CliRunner().invoke(app, ["data", "get", name]).exit_code == (
            0 if name == "digits" else 2
        )


def test_a_full_disk_is_said(
    server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloading, "_continue", full)
    with pytest.raises(data.DownloadError, match=r"disk of .* is full"):
        data.get("cifar10", tmp_path / "fetched")
