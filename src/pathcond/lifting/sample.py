"""What is captured of a model once, however often its weights change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..capture.nodes import Graph
from ..symmetry.sizes import Example
from ..symmetry.symmetry import Symmetry


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample's way through a model, and the whole example batch to measure on.

    Attributes:
        graph: Captured in eval mode on one sample.
        inputs: Per sample of the example batch, the values of the graph's inputs in order.
        parts: The same for modules that opaque ones call, on what the example feeds them. Paths end
            at opaque modules.
    """

    graph: Graph
    inputs: tuple[tuple[Any, ...], ...]
    parts: tuple[Sample, ...] = ()

    @property
    def all(self) -> list[Sample]:
        """This one and all parts."""
        return [self, *(inner for part in self.parts for inner in part.all)]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that ``condition_`` needs of a model besides its weights; it serves as long as the
    architecture stays.

    Attributes:
        symmetry: Its Symmetry.
        sample: One sample's way through it.
        whole_batch: The example batch with all its samples, where a criterion needs them and the
            Symmetry's example holds only the first ones; else None.
    """

    symmetry: Symmetry
    sample: Sample
    whole_batch: Any = None

    @property
    def symmetry_of_whole_batch(self) -> Symmetry:
        """The Symmetry, with all samples that were kept as its example."""
        if self.whole_batch is None:
            return self.symmetry
        given = Example(inputs=self.whole_batch)
        return replace(self.symmetry, examples=(given, *self.symmetry.examples[1:]))
