"""Compressed labels behave as the full tensor of labels would."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathcond.rules import labels as lb
from pathcond.rules.labels import ANY, FIXED, Labels
from pathcond.rules.values import Scaling


@st.composite
def compressed(draw: st.DrawFn) -> Labels:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    stored = [size if draw(st.booleans()) else 1 for size in shape]
    ids = torch.arange(torch.Size(stored).numel(), dtype=torch.int32).view(stored)
    return Labels(ids, shape)


def reshapes(labels: Labels, data: st.DataObject) -> list[int]:
    """A random shape with the same number of elements."""
    left, shape = torch.Size(labels.shape).numel(), [1] * data.draw(st.integers(0, 2))
    while left > 1:
        factor = data.draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0]))
        shape.append(factor)
        left //= factor
    return data.draw(st.permutations(shape)) or [1]


@given(compressed(), st.data())
def test_reshape_is_the_reshape_of_the_full_tensor(labels: Labels, data: st.DataObject) -> None:
    shape = reshapes(labels, data)
    assert torch.equal(lb.reshape(labels, shape).full, labels.full.reshape(shape))


@given(compressed(), st.randoms(use_true_random=False))
def test_views_are_views_of_the_full_tensor(labels: Labels, random: object) -> None:
    order = list(range(len(labels.shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    got = lb.through_view(lambda ids: ids.permute(order).unsqueeze(0)[..., :1], labels)
    assert torch.equal(got.full, labels.full.permute(order).unsqueeze(0)[..., :1])
    assert got.ids.numel() <= labels.ids.numel()


@given(compressed(), st.integers(-4, 3))
def test_concatenation_is_that_of_the_full_tensors(labels: Labels, axis: int) -> None:
    axis %= len(labels.shape)
    other = Labels(labels.ids + 100, labels.shape)
    for parts in ([labels, other], [labels, labels]):
        assert torch.equal(
            lb.concatenate(parts, axis).full, torch.cat([part.full for part in parts], axis)
        )


def test_a_reshape_of_channels_stays_small() -> None:
    channels = Labels(torch.arange(8, dtype=torch.int32).view(1, 8, 1, 1), (32, 8, 5, 5))
    shuffled = lb.reshape(
        lb.through_view(lambda i: i.transpose(1, 2), lb.reshape(channels, (32, 2, 4, 5, 5))),
        (32, 8, 5, 5),
    )
    assert shuffled.ids.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_zeros_and_infinities_fit_every_scale() -> None:
    labels = lb.of_value(torch.tensor([0.0, 1.0, -float("inf"), float("nan")]))
    assert labels.ids.tolist() == [ANY, FIXED, ANY, FIXED]


@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 2), ()])
def test_whether_a_scaling_changes_anything_is_that_of_the_full_tensors(shape: tuple) -> None:
    generator = torch.Generator().manual_seed(0)
    found = set()
    for _ in range(200):
        sides = [
            torch.randint(
                2, [size if torch.rand((), generator=generator) < 0.5 else 1 for size in shape]
            ).to(torch.int32)
            for _ in range(2)
        ]
        scaling = Scaling(shape, *sides)
        assert scaling.changes == bool((sides[0].expand(shape) != sides[1].expand(shape)).any())
        found.add(scaling.changes)
    assert found == {False, True}
