"""Exit codes of the command lines, and which error leads to which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import EnergyRangeError, FailedRunsError, RescalingError, UnsupportedModelError

NOTHING_TO_RESCALE = 1
WRONG_USAGE = 2
UNSUPPORTED = 3
REFUSED = 4
RUNS_FAILED = 5
INTERRUPTED = 130


def exit_code(error: Exception) -> int | None:
    """The exit code for an error whose message is enough for a user; None for all others.

    >>> exit_code(ValueError("--only x")), exit_code(ZeroDivisionError())
    (2, None)
    """
    if isinstance(error, UnsupportedModelError | EnergyRangeError):
        return UNSUPPORTED
    if isinstance(error, RescalingError):
        return REFUSED
    if isinstance(error, FailedRunsError):
        return RUNS_FAILED
    # Targets, files and settings
    if isinstance(error, ValueError | ImportError | OSError):
        return WRONG_USAGE
    return None


@contextmanager
def exit_codes() -> Iterator[None]:
    """Errors with a known cause become one message and an exit code."""
    import typer

    try:
        yield
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code) from error
