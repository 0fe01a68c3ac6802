"""Exact elimination agrees with the null space of the same equations."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pathcond.rules.equations import Equations
from pathcond.rules.labels import ANY, FIXED


def ids(*labels: int) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int32)


@st.composite
def systems(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int]]]]:
    count = draw(st.integers(1, 8))
    label = st.integers(0, count)
    kinds = {"equate": 2, "pin": 1, "require": 3, "combine": 2}
    steps = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=8))
    return count, [(kind, [draw(label) for _ in range(kinds[kind])]) for kind in steps]


@given(systems())
def test_solutions_are_the_null_space(system: tuple[int, list[tuple[str, list[int]]]]) -> None:
    count, steps = system
    equations = Equations()
    equations.fresh(count, origin=None)
    rows = []
    for kind, chosen in steps:
        row = torch.zeros(count + 1 + len(steps), dtype=torch.float64)
        if kind == "equate":
            equations.equate(ids(chosen[0]), ids(chosen[1]), by=None)
            row[chosen[0]] += 1
            row[chosen[1]] -= 1
        elif kind == "pin":
            equations.pin(ids(chosen[0]), by=None, reason="")
            row[chosen[0]] += 1
        elif kind == "require":
            equations.require(
                [(1, ids(chosen[0])), (2, ids(chosen[1])), (-1, ids(chosen[2]))], by=None
            )
            for label, c in zip(chosen, (1, 2, -1), strict=True):
                row[label] += c
        else:  # the product is asked to be as large as its first factor squared
            made = equations.combine([(1, ids(chosen[0])), (1, ids(chosen[1]))], by=None)
            equations.require([(1, made), (-2, ids(chosen[0]))], by=None)
            row[chosen[1]] += 1
            row[chosen[0]] -= 1
        rows.append(row[: count + 1])
    matrix = torch.stack([*rows, torch.eye(count + 1, dtype=torch.float64)[FIXED]])
    solved = equations.solve()
    forms = [solved.form(label) for label in range(count + 1)]
    units = sorted({unit for form in forms for unit in form})
    assert len(units) == count + 1 - int(torch.linalg.matrix_rank(matrix))
    values = torch.randn(equations.count, dtype=torch.float64)
    t = torch.tensor(
        [sum(c * values[unit] for unit, c in form.items()) for form in forms], dtype=torch.float64
    )
    assert (matrix @ t).abs().max() < 1e-9
    assert all(isinstance(c, int) for form in forms for c in form.values())


def test_exact_zeros_say_nothing() -> None:
    equations = Equations()
    a, b = equations.fresh(2, origin=None)
    equations.equate(ids(int(a), ANY), ids(ANY, int(b)), by=None)
    assert equations.combine([(1, ids(ANY)), (1, a)], by=None).tolist() == [ANY]
    assert [len(equations.solve().form(int(x))) for x in (a, b)] == [1, 1]


def test_the_first_cause_is_kept() -> None:
    equations = Equations()
    a, b = equations.fresh(2, origin=None)
    equations.pin(a, by="softmax", reason="passes through softmax")
    equations.pin(b, by="output", reason="is an output")
    equations.equate(a, b, by="add")
    assert equations.solve().causes[int(a)].by == "softmax"


def test_a_cause_is_passed_on_in_the_same_words() -> None:
    equations = Equations()
    a, b, c = equations.fresh(3, origin=None)
    equations.pin(a, by="softmax", reason="passes through softmax")
    equations.require([(1, a), (1, b)], by="mul")
    equations.require([(1, b), (1, c)], by="mul")
    causes = equations.solve().causes
    told = "must balance a scale that is fixed: passes through softmax"
    assert [causes[int(label)].reason for label in (b, c)] == [told] * 2
