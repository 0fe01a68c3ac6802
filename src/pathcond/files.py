"""Files that the command line writes: as a whole or not at all, and never in the place of a
device.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SpecialFileError(ValueError):
    """A path leads to a device, a pipe, a socket or a folder, which no file may replace."""


def refuse_special(path: Path) -> None:
    """Raise if what is at the path, or behind the link there, is not a regular file.

    >>> refuse_special(Path("no such file"))
    >>> refuse_special(Path(os.devnull))
    Traceback (most recent call last):
    pathcond.files.SpecialFileError: /dev/null is a device, a pipe or a socket, ...
    """
    if path.is_dir():
        raise SpecialFileError(f"{path} is a folder: name a file.")
    if path.exists() and not path.is_file():
        raise SpecialFileError(f"{path} is a device, a pipe or a socket, ...")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` to write to, which takes its place when the body is done.

    If the body fails the new file is removed. A link stays a link: the file behind it is replaced.
    """
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(prefix=".pathcond.", dir=target.parent)
    try:
        os.close(handle)
        yield Path(name)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # as any new file; temporary ones are private
        refuse_special(target)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
