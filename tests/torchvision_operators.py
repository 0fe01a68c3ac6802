"""torchvision's compiled operators do not load on a CPU-only torch; two schemas are all that its import needs."""

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for schema in SCHEMAS:
    if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
        LIBRARY.define(schema)
