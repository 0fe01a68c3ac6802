"""What is refused before a GPU comes to it is what a CPU refuses."""

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture import indices, outputs
from pathcond.capture.indices import AsOnCPU, as_on_cpu
from pathcond.lifting import lifting
from pathcond.symmetry import captures, sizes

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")  # once in a process, "is in beta"

FILE = indices.__file__
ROWS = 5


def some_indices(random_: random.Random, *shape: int) -> Tensor:
    """Whole numbers, in some draws beyond either end of five rows."""
    low, high = random_.choice([(0, ROWS), (-2, ROWS), (0, ROWS + 1), (-ROWS, ROWS)])
    generator = torch.Generator().manual_seed(random_.randrange(10**6))
    return torch.randint(low, high, shape, generator=generator)


def some_values(random_: random.Random, *shape: int) -> Tensor:
    """Numbers that are probabilities in half of the draws."""
    generator = torch.Generator().manual_seed(random_.randrange(10**6))
    values = torch.rand(shape, generator=generator)
    values.flatten()[0] = random_.choice([0.0, 0.5, 1.0, -0.1, 1.1, torch.nan, torch.inf])
    return values


def pairs() -> Tensor:
    return torch.rand(ROWS, 3)


CALLS: dict[str, Callable[[random.Random], object]] = {
    "gather": lambda r: pairs().gather(0, some_indices(r, 2, 3)),
    "index_select": lambda r: pairs().index_select(0, some_indices(r, 4)),
    "index_select, a number": lambda r: torch.rand(()).index_select(0, some_indices(r, 1)),
    "index_add": lambda r: pairs().index_add(0, some_indices(r, 2), torch.ones(2, 3)),
    "index_copy": lambda r: pairs().index_copy(0, some_indices(r, 2), torch.ones(2, 3)),
    "index_fill": lambda r: pairs().index_fill(0, some_indices(r, 2), 1.0),
    "index_reduce": lambda r: pairs().index_reduce(0, some_indices(r, 2), torch.ones(2, 3), "amax"),
    "scatter": lambda r: pairs().scatter(0, some_indices(r, 2, 3), torch.ones(2, 3)),
    "scatter_, in place": lambda r: pairs().scatter_(0, some_indices(r, 2, 3), 1.0),
    "scatter_add": lambda r: pairs().scatter_add(0, some_indices(r, 2, 3), torch.ones(2, 3)),
    "scatter_reduce": lambda r: pairs().scatter_reduce(
        0, some_indices(r, 2, 3), torch.ones(2, 3), "sum"
    ),
    "index": lambda r: pairs()[some_indices(r, 2, 2)],
    "index of the last axis": lambda r: torch.rand(3, ROWS)[:, some_indices(r, 2)],
    "index behind a mask": lambda r: torch.rand(2, 3, ROWS)[
        torch.ones(2, 3, dtype=torch.bool), some_indices(r, 6)
    ],
    "index_put": lambda r: pairs().index_put((some_indices(r, 2),), torch.ones(3)),
    "assignment": lambda r: pairs().__setitem__(some_indices(r, 2), torch.ones(3)),
    "_index_put_impl": lambda r: torch.ops.aten._index_put_impl(
        pairs(), [some_indices(r, 2)], torch.ones(3)
    ),
    "_unsafe_index": lambda r: torch.ops.aten._unsafe_index(pairs(), [some_indices(r, 2)]),
    "_unsafe_index_put": lambda r: torch.ops.aten._unsafe_index_put(
        pairs(), [some_indices(r, 2)], torch.ones(3)
    ),
    "take": lambda r: torch.rand(ROWS).take(some_indices(r, 2)),
    "put": lambda r: torch.rand(ROWS).put(some_indices(r, 2), torch.ones(2)),
    "embedding": lambda r: F.embedding(some_indices(r, 2, 2), pairs()),
    "embedding, renormed": lambda r: F.embedding(some_indices(r, 2), pairs(), max_norm=1.0),
    "embedding_bag": lambda r: F.embedding_bag(some_indices(r, 2, 2), pairs()),
    "embedding_bag, to be trained": lambda r: F.embedding_bag(
        some_indices(r, 2, 2), pairs().requires_grad_()
    ),
    "embedding_bag, one after the other": lambda r: F.embedding_bag(
        torch.zeros(ROWS, dtype=torch.long), pairs(), some_indices(r, 2)
    ),
    "embedding_bag, with the end": lambda r: F.embedding_bag(
        torch.zeros(ROWS, dtype=torch.long), pairs(), some_indices(r, 3), include_last_offset=True
    ),
    "cross_entropy": lambda r: F.cross_entropy(torch.rand(4, ROWS), some_indices(r, 4)),
    "cross_entropy of one": lambda r: F.cross_entropy(torch.rand(ROWS), some_indices(r)),
    "cross_entropy, some ignored": lambda r: F.cross_entropy(
        torch.rand(4, ROWS), some_indices(r, 4), ignore_index=-2
    ),
    "cross_entropy of shares": lambda r: F.cross_entropy(torch.rand(4, ROWS), torch.rand(4, ROWS)),
    "nll_loss": lambda r: F.nll_loss(torch.rand(4, ROWS), some_indices(r, 4)),
    "nll_loss of aten": lambda r: torch.ops.aten.nll_loss(torch.rand(4, ROWS), some_indices(r, 4)),
    "nll_loss2d": lambda r: torch.ops.aten.nll_loss2d(
        torch.rand(2, ROWS, 3, 3), some_indices(r, 2, 3, 3)
    ),
    "cross_entropy of pixels": lambda r: F.cross_entropy(
        torch.rand(2, ROWS, 2, 2), some_indices(r, 2, 2, 2)
    ),
    "multi_margin_loss": lambda r: F.multi_margin_loss(torch.rand(4, ROWS), some_indices(r, 4)),
    "multilabel_margin_loss": lambda r: F.multilabel_margin_loss(
        torch.rand(2, ROWS), some_indices(r, 2, ROWS)
    ),
    "max_unpool2d": lambda r: torch.ops.aten.max_unpool2d(
        torch.rand(1, 1, 1, 2), some_indices(r, 1, 1, 1, 2), [1, ROWS]
    ),
    "max_unpool3d": lambda r: torch.ops.aten.max_unpool3d(
        torch.rand(1, 1, 1, 1, 2), some_indices(r, 1, 1, 1, 1, 2), [1, 1, ROWS], [1] * 3, [0] * 3
    ),
    "masked_scatter": lambda r: pairs().masked_scatter(
        torch.rand(ROWS, 1) < r.random(), torch.rand(r.randrange(1, 16))
    ),
    "masked_scatter of a row": lambda r: torch.rand(3).masked_scatter(
        torch.ones(2, 3, dtype=torch.bool), torch.rand(r.randrange(1, 12))
    ),
    "bernoulli": lambda r: torch.bernoulli(some_values(r, 3)),
    "bernoulli_": lambda r: torch.rand(3).bernoulli_(some_values(r, 3)),
    "dropout": lambda r: F.dropout(pairs(), r.choice([0.0, 0.5, 1.0])),
    "poisson": lambda r: torch.poisson(some_values(r, 3)),
    "repeat_interleave": lambda r: pairs().repeat_interleave(some_indices(r, ROWS), 0),
    "repeat_interleave, so many": lambda r: torch.rand(2, 3).repeat_interleave(
        some_indices(r, 1), 0, output_size=4
    ),
    "repeat_interleave, all of it": lambda r: torch.rand(ROWS).repeat_interleave(
        some_indices(r, ROWS)
    ),
    "repeat_interleave, a number": lambda r: pairs().repeat_interleave(r.randrange(3), 0),
    "binary_cross_entropy": lambda r: F.binary_cross_entropy(some_values(r, 3), torch.ones(3)),
    "multinomial": lambda r: torch.multinomial(some_values(r, 2, 3), 1),
    "multinomial of zeros": lambda r: torch.multinomial(torch.full((2,), r.choice([0.0, 1.0])), 1),
    "_assert_async": lambda r: torch._assert_async(torch.tensor(r.choice([True, False]))),
}

NEVER_REFUSED = ("cross_entropy of shares", "dropout", "repeat_interleave, a number")


def refused_by(
    call: Callable[[random.Random], object], seed: int, *, watched: bool, inference: bool = False
) -> str:
    """Who refuses a call: nobody, torch, or what looks at it before."""
    torch.manual_seed(seed)
    try:
        with torch.inference_mode(inference), AsOnCPU() if watched else nullcontext():
            call(random.Random(seed))
    except (IndexError, RuntimeError) as error:
        return "us" if traceback.extract_tb(error.__traceback__)[-1].filename == FILE else "torch"
    return ""


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_cpu_refuses_is_refused_before_the_call(name: str, inference: bool) -> None:
    outcomes = {
        tuple(
            refused_by(CALLS[name], seed, watched=watched, inference=inference)
            for watched in (False, True)
        )
        for seed in range(40)
    }
    assert outcomes == ({("", "")} if name in NEVER_REFUSED else {("", ""), ("torch", "us")})


def test_every_call_that_is_looked_at_is_held_against_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met = set()

    class Met(dict[str, object]):
        def get(self, family: str, default: object = None) -> object:
            met.add(family)
            return super().get(family, default)

    families = {*indices.READS, *indices.VALUES}
    monkeypatch.setattr(indices, "READS", Met(indices.READS))
    for inference in (False, True):
        for call in CALLS.values():
            refused_by(call, 0, watched=True, inference=inference)
    assert families <= met


class RelativePositions(nn.Module):
    """Attention with a bias by distance, of which there are as many as for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.bias = nn.Parameter(torch.randn(7, 4))
        self.head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] < 8:
            raise ValueError("for images of 8 by 8")
        h = self.patches(x).flatten(2).mT
        place = torch.arange(x.shape[-1] // 2, device=x.device)
        distance = place[:, None] - place + 3
        return self.head(h + self.bias[distance].mean()).mean(1)


class Graph(nn.Module):
    """Every node receives from others, which the example batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges.unbind(1)
        h = self.layers(x)
        return h.index_add(0, receiver, h[sender])


EDGES = torch.tensor([[0, 1], [1, 0], [5, 2], [3, 4], [2, 5], [4, 3]])


@contextmanager
def as_on_a_gpu() -> Iterator[list[str]]:
    """Models on a CPU are treated as if they were on a GPU; the calls that are refused there."""
    refused = []

    def look(name: str, index: Tensor, count: int, from_end: bool) -> None:
        try:
            look_at(name, index, count, from_end)
        except IndexError:
            refused.append(name)
            raise

    look_at = indices._require_within
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "_require_within", look)
        for module in (captures, lifting, outputs, sizes):
            patch.setattr(module, "as_on_cpu", lambda model: AsOnCPU())
        yield refused


def test_sizes_beyond_a_table_inside_a_model_never_come_to_the_device() -> None:
    """A GPU would end the process at these."""
    model, images = RelativePositions(), torch.randn(2, 3, 8, 8)
    usual = pathcond.find_symmetry(model, images)
    with as_on_a_gpu() as refused:
        watched = pathcond.find_symmetry(model, images)
    assert set(refused) == {"aten::index.Tensor"}
    assert watched.num_units == usual.num_units == 8
    assert [tuple(e.inputs.shape) for e in watched.examples] == [
        tuple(e.inputs.shape) for e in usual.examples
    ]


def test_a_batch_cut_where_it_must_not_be_never_comes_to_the_device() -> None:
    model, inputs = Graph(), (torch.randn(6, 3), EDGES)
    usual = pathcond.diag_g(model, inputs)
    with as_on_a_gpu() as refused:
        watched = pathcond.diag_g(model, inputs)
    assert set(refused) == {"aten::index_add"}
    assert all(torch.equal(values, watched[name]) for name, values in usual.items())


def test_models_on_a_cpu_or_without_values_are_run_as_they_are() -> None:
    assert isinstance(as_on_cpu(nn.Linear(2, 2)), nullcontext)
    assert isinstance(as_on_cpu(nn.Linear(2, 2, device="meta")), nullcontext)
    with AsOnCPU():
        F.embedding(torch.full((2,), 7, device="meta"), torch.ones(7, 2, device="meta"))
