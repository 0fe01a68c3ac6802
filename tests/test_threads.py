"""Several threads at once: each gets what it would get alone, and the process is left as it was."""

import copy
import logging
import random
import sys
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import pathcond

from .cases import Calls


def network(width: int) -> nn.Module:
    torch.manual_seed(width)
    layers = [
        nn.Linear(3, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(width, 2),
    ]
    return nn.Sequential(*layers)


def process_state() -> tuple:
    torch_logger = logging.getLogger("torch")
    filters = [list(handler.filters) for handler in torch_logger.handlers]
    return sys.stderr, torch_logger.level, filters, list(warnings.filters), random.getstate()


def test_threads_get_what_they_would_get_alone() -> None:
    x = torch.randn(8, 3)
    models = [network(width) for width in (4, 5, 6, 7)]
    alone = [copy.deepcopy(model) for model in models]
    for model in alone:
        pathcond.condition_(model, x)
    before, random_state = process_state(), torch.get_rng_state()
    errors: list[BaseException] = []
    together: dict[tuple[int, int], nn.Module] = {}

    def work(number: int) -> None:
        try:
            for turn in range(4):
                model = copy.deepcopy(models[number])
                pathcond.condition_(model, x)
                together[number, turn] = model
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(together) == 16
    for (number, _), model in together.items():
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, alone[number].state_dict()[name]), name
    assert process_state() == before
    assert torch.equal(torch.get_rng_state(), random_state)


def refused(self: nn.Module, x: Tensor) -> Tensor:
    h = nn.functional.linear(x, self.a.weight)
    return h if h.sum() > 0 else x


def test_what_fails_leaves_the_process_as_it_was_too() -> None:
    x = torch.randn(8, 3)
    before = process_state()
    found: list[type] = []

    def work(number: int) -> None:
        for _ in range(4):
            try:
                pathcond.condition_(
                    Calls(refused, a=nn.Linear(3, 3)) if number % 2 else network(4), x
                )
                found.append(type(None))
            except pathcond.UnsupportedModelError as error:
                found.append(type(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        sorted(kind.__name__ for kind in found) == ["NoneType"] * 8 + ["UnsupportedModelError"] * 8
    )
    assert process_state() == before


def test_other_threads_keep_their_stderr(capsys: pytest.CaptureFixture) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        speaker = threading.Thread(target=lambda: sys.stderr.write("from elsewhere\n"))
        speaker.start()
        speaker.join()
        sys.stderr.write("from here\n")
        return self.a(x)

    pathcond.find_symmetry(Calls(forward, a=nn.Linear(3, 3)), torch.randn(8, 3))
    shown = capsys.readouterr().err
    assert "from elsewhere" in shown
    assert "from here" not in shown
