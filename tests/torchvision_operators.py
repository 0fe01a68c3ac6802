"""torchvision's compiled operators do not load on a CPU-only torch; two schemas are all that its
import needs.
"""

import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _compiled() -> bool:
    spec = importlib.util.find_spec("torchvision")
    libraries = (
        list(Path(spec.origin).parent.glob("_C*.so")) if spec is not None and spec.origin else []
    )
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return bool(libraries)


if not _compiled():
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        LIBRARY.define(schema)
