"""Models that return objects: caches of keys and values, and classes of their own."""

from typing import Any

import pytest
import torch
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
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        scores = self.third(self.second(hidden).relu())
        return Found(scores, [hidden]) if self.kind == "found" else Hiding(scores)


def test_objects_are_looked_into() -> None:
    model, x = Returning("found").double(), torch.randn(4, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 5  # what is hidden first is returned
    before = model(x)
    rescale_at_random(model, symmetry)
    torch.testing.assert_close(model(x).scores, before.scores)
    torch.testing.assert_close(model(x).hidden, before.hidden)


def test_objects_that_hide_their_tensors_are_refused() -> None:
    with pytest.raises(pathcond.UnsupportedModelError, match="type Hiding, whose tensors"):
        pathcond.find_symmetry(Returning("hiding"), torch.randn(4, 3))
