"""What a whole ``condition_`` costs, beside what any such call must: one forward and backward pass
of the batch it is given.

    python -m benchmarks.whole [--models resnet50 swin_t] [--beside OTHER_CHECKOUT]

A call of a process that has conditioned another model before, split into

    capture    following the model in both modes, and one sample of the batch
    search     equations between labels, and their solution: the symmetries
    captured   the rest, where both are known: measuring, solving, comparing outputs, writing

``passes`` is the rest in forward and backward passes of the batch. ``rescale`` is ``rescale_``
without verification over ``mul_`` of all parameters; with gradients, which it moves too, over
``mul_`` of these as well. Importing the library is measured in processes of its own. ``--beside``
runs the whole call on another checkout too (``benchmarks.calls``), and prints how many times longer
that takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pathcond

from .calls import MODELS, build, measure_call, quickest, warm_up
from .measuring import commit_of, format_row, write


def measure(name: str) -> dict[str, Any]:
    """Seconds, and the ratios that are claimed."""
    from pathcond.lifting.lifting import capture_sample
    from pathcond.symmetry.captures import capture_all
    from pathcond.symmetry.symmetry import symmetry_of

    model, batch = build(name)
    prepared, graphs = pathcond.prepare(model, batch), capture_all(model, batch)
    symmetry = prepared.symmetry
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def one_pass() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    def condition_captured() -> None:
        model.load_state_dict(state)
        pathcond.condition_(model, prepared)

    def multiply(tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(1.0)

    # to and fro, so that weights stay where they are; with scales of 1 nothing would be written
    drawn = torch.rand(symmetry.num_units, generator=torch.Generator().manual_seed(0)) - 0.5
    scales = itertools.cycle((drawn, -drawn))

    def rescale() -> None:
        pathcond.rescale_(model, symmetry, next(scales), verify=False)

    parameters = list(model.parameters())
    seconds = {
        "pass": quickest(one_pass),
        "whole": measure_call(name),
        "capture": quickest(lambda: (capture_all(model, batch), capture_sample(model, batch))),
        "search": quickest(lambda: symmetry_of(model, graphs, normalization="batch")),
        "captured": quickest(condition_captured),
    }
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    seconds["rescale_with_gradients"] = quickest(rescale)
    seconds["mul_with_gradients"] = quickest(lambda: multiply([*parameters, *gradients]))
    model.zero_grad()
    seconds["rescale"] = quickest(rescale)
    seconds["mul"] = quickest(lambda: multiply(parameters))
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in parameters),
        **{f"seconds_{key}": value for key, value in seconds.items()},
        "passes": seconds["captured"] / seconds["pass"],
        "search_over_capture": seconds["search"] / seconds["capture"],
        "rescale_over_mul": seconds["rescale"] / seconds["mul"],
        "rescale_over_mul_with_gradients": seconds["rescale_with_gradients"]
        / seconds["mul_with_gradients"],
    }


def imports() -> dict[str, float]:
    """Seconds of importing the library and what a first call needs of it, over torch alone (by
    itself it imports next to nothing); and of the command line's help.
    """

    def process(*arguments: str) -> float:
        return quickest(
            lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        )

    alone = process("-c", "import torch")
    return {
        "seconds_torch": alone,
        "seconds_import_on_top": process("-c", "import pathcond; pathcond.condition_") - alone,
        "seconds_help": process("-m", "pathcond", "--help"),
    }


def beside(checkout: Path, models: list[str]) -> dict[str, float]:
    """Seconds of ``condition_`` with the library of another checkout, by model."""
    path = os.pathsep.join([str(checkout / "src"), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.calls", *models],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--beside", type=Path, help="another checkout of this repository")
    parser.add_argument("--out", default="benchmarks/whole.json")
    options = parser.parse_args()
    warm_up()
    rows = []
    for name in options.models:
        rows.append(measure(name))
        print(format_row(rows[-1]), flush=True)
    more: dict[str, Any] = {"imports": imports()}
    print(format_row(more["imports"]), flush=True)
    if options.beside:
        theirs = beside(options.beside, options.models)
        ours = {row["model"]: row["seconds_whole"] for row in rows}
        more["beside"] = {
            "commit": commit_of(options.beside),
            "times_longer": {name: theirs[name] / ours[name] for name in theirs},
        }
        print(format_row(more["beside"]["times_longer"]), flush=True)
    write(options.out, rows, **more)


if __name__ == "__main__":
    main()
