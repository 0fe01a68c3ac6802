"""Models that return objects (caches of keys and values, classes of their own) or keep what they
compute.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributions as D
import transformers
from torch import Tensor, nn

import pathcond

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=6,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def rescale_at_random(model: nn.Module, symmetry: pathcond.Symmetry) -> None:
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    pathcond.rescale_(model, symmetry, log_scales)


def test_what_is_cached_stays_and_serves_the_next_call() -> None:
    """A cache that was filled before the rescaling may be read after it."""
    model = llama()
    symmetry = pathcond.find_symmetry(model, {"input_ids": TOKENS})
    assert symmetry.num_units == 12  # gated feed-forwards: six hidden units a layer
    assert any("returned in a cache" in str(pin.reason) for pin in symmetry.pinned)
    expected = model(TOKENS).logits[:, -1]
    cache = model(TOKENS[:, :-1], use_cache=True).past_key_values
    rescale_at_random(model, symmetry)
    found = model(TOKENS[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_without_a_cache_keys_and_values_are_free() -> None:
    model = llama()
    inputs = {"input_ids": TOKENS, "use_cache": False}
    symmetry = pathcond.find_symmetry(model, inputs)
    assert symmetry.num_units > 12
    expected = model(**inputs).logits
    rescale_at_random(model, symmetry)
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-10, atol=1e-12)


def test_no_paths_end_in_a_cache() -> None:
    model = llama()
    with_cache, without = (
        pathcond.diag_g(model, {"input_ids": TOKENS, "use_cache": use}) for use in (True, False)
    )
    for name, g in without.items():
        torch.testing.assert_close(with_cache[name], g)


class Found:
    """Of a type that torch does not know."""

    def __init__(self, scores: Tensor, hidden: list[Tensor]) -> None:
        self.scores = scores
        self.hidden = hidden
        self.parent: Any = self


class Hiding:
    """One that nobody can look into."""

    __slots__ = ("scores",)

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class Returning(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 2)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.wrap(hidden, self.third(self.second(hidden).relu()))


class Items(list):
    """A list that torch does not know."""


class Table(dict):
    """A mapping that may have attributes too."""

    note: Any = None


def table(hidden: Tensor, scores: Tensor) -> Table:
    made = Table(scores=scores)
    made.note = hidden
    return made


def output(hidden: Tensor, scores: Tensor) -> transformers.modeling_outputs.BaseModelOutput:
    made = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=scores)
    made.note = hidden
    return made


def noted(hidden: Tensor, scores: Tensor) -> Tensor:
    scores.note = hidden
    return scores


WRAPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an object": lambda hidden, scores: Found(scores, [hidden]),
    "a list of its own": lambda hidden, scores: (Items([hidden]), scores),
    "one in an object": lambda hidden, scores: Found(scores, Items([hidden])),
    "a set": lambda hidden, scores: ({hidden}, scores),
    "an attribute of a mapping": table,
    "an attribute of a known output": output,
    "an attribute of a tensor": noted,
    "a key": lambda hidden, scores: {hidden: 1, "scores": scores},
    "a transform": lambda hidden, scores: (
        scores,
        D.TransformedDistribution(
            D.Normal(torch.zeros_like(hidden), 1.0), [D.AffineTransform(hidden, 1.0)]
        ),
    ),
}


@pytest.mark.parametrize("what", WRAPS)
def test_what_is_returned_inside_of_something_is_kept(what: str) -> None:
    model, x = Returning(WRAPS[what]).double(), torch.randn(4, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 5  # and not those of ``first``, which are returned


class Closed:
    def __init__(self, scores: Tensor) -> None:
        self.read = lambda: scores


@pytest.mark.parametrize(
    "kind", [Hiding, Closed, ValueError, lambda y: (y for y in [y]), partial(partial, torch.add)]
)
def test_objects_that_hide_their_tensors_are_refused(kind: Callable[[Tensor], Any]) -> None:
    model = Returning(lambda hidden, scores: kind(scores))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(pathcond.UnsupportedModelError, match="whose tensors cannot be seen"):
        pathcond.condition_(model, torch.randn(4, 3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Remembering(nn.Module):
    """Keeps a hidden layer for its next call, or for the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 2)
        self.kind = kind
        self.kept: Any = [] if kind == "list" else {} if kind == "dict" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.kind == "list":
            self.kept.append(hidden)
        elif self.kind == "dict":
            self.kept["hidden"] = [hidden]
        elif self.kind == "object in an object":
            self.kept = SimpleNamespace(state=SimpleNamespace(found=Found(x, hidden)))
        elif self.kind == "six deep":
            self.kept = {"a": [{"b": [{"c": (hidden,)}]}]}
        elif self.kind == "partial":
            self.kept = partial(torch.norm, hidden)
        elif self.kind == "default":
            self.kept = lambda h=hidden: h.norm()
        elif self.kind == "attribute of a weight":
            self.first.weight.kept = hidden
        elif self.kind == "module":
            self.kept = [nn.Module()]
            self.kept[0].hidden = hidden
        else:
            self.kept = Found(x, [hidden]) if self.kind == "object" else hidden
        return self.third(self.second(hidden).relu())


WAYS_TO_KEEP = [
    "attribute",
    "list",
    "dict",
    "object",
    "object in an object",
    "six deep",
    "partial",
    "default",
    "attribute of a weight",
    "module",
]


@pytest.mark.parametrize("kind", WAYS_TO_KEEP)
def test_what_is_kept_in_an_attribute_is_held(kind: str) -> None:
    symmetry = pathcond.find_symmetry(Remembering(kind).double(), torch.randn(4, 3).double())
    assert symmetry.num_units == 5


def test_a_cache_among_the_inputs_is_refused_and_stays_as_it_is() -> None:
    model = llama()
    cache = model(TOKENS[:, :-1], use_cache=True).past_key_values
    with pytest.raises(pathcond.UnsupportedModelError, match="leave past_key_values out"):
        pathcond.condition_(model, {"input_ids": TOKENS[:, -1:], "past_key_values": cache})
    assert cache.get_seq_length() == TOKENS.shape[1] - 1


@pytest.mark.parametrize("words", [repr, lambda h: str(h.tolist()), lambda h: repr(h).encode()])
def test_text_that_is_made_of_a_hidden_layer_is_not_changed(words: Callable[..., Any]) -> None:
    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            h = torch.relu(self.a(x))
            return self.b(h), words(h)

    model, x = Spoken(), torch.randn(6, 4)
    before = model(x)
    with contextlib.suppress(pathcond.RescalingError, pathcond.UnsupportedModelError):
        pathcond.condition_(model, x)
    assert model(x)[1] == before[1]
