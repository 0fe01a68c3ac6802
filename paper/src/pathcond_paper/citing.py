"""Where in the paper something is said, for a reader who has it printed.

Claims name sections and figures by their labels in the LaTeX source, as comments do; what people
read names them by number.

>>> cite("It is faster (sec:faster, fig:cifar10_fc, left).")
'It is faster (Section 5.1, Figure 2, left).'
"""

from __future__ import annotations

import re

PLACES = {
    "def:path_lifting": "Appendix D",
    "eq:MinCondOrOpNormIsMinThetaNorm": "Appendix C",
    "eq:MinGradNormIsMinThetaNorm": "Appendix C",
    "eq:MinGradNormOrHessianTraceIsMinThetaInvNorm": "Appendix C",
    "eq:MinHessianTraceIsMinThetaNorm": "Appendix C",
    "fig:bcd_convergence": "Figure 8",
    "fig:cifar10_conv": "Figure 3",
    "fig:cifar10_fc": "Figure 2",
    "fig:cifar10_fc_gelu": "Figure 13",
    "fig:conv_speed_all_lrs": "Figure 9",
    "fig:gelu_silu": "Figure 12",
    "fig:generalize_all_lrs": "Figure 10",
    "fig:mnist_ae": "Figure 5",
    "fig:regime_analysis": "Figure 4",
    "fig:regimes_all_lrs": "Figure 11",
    "fig:timing": "Figure 6",
    "fig:timing_mlp": "Figure 7",
    "fig:toy_example": "Figure 1",
    "sec:add_faster": "Appendix K",
    "sec:add_generalize": "Appendix L",
    "sec:app_timing": "Appendix H.1",
    "sec:arch_stats": "Appendix I",
    "sec:bcd_nb": "Appendix H.2",
    "sec:experiments": "Section 5",
    "sec:faster": "Section 5.1",
    "sec:gelu": "Appendix O",
    "sec:generalize": "Section 5.2",
    "sec:minequivalenceex": "Appendix C",
    "sec:regimes": "Section 5.4",
    "sec:sketch_simple_example": "Section 2",
    "sec:timing": "Section 5.3",
    "subsec:algo": "Section 4.3",
    "tab:architecture_stats": "Table 1",
}
LABEL = re.compile(r"\b(?:def|eq|fig|(?:sub)?sec|tab):\w+")


def cite(text: str) -> str:
    """The text with numbers in place of the paper's labels; labels that it does not have stay."""
    return LABEL.sub(lambda found: PLACES.get(found[0], found[0]), text)
