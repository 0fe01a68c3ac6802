"""Settings of TF32: off while outputs are compared, then what they were, however they were made."""

import json
import subprocess
import sys

# One after the other in one process: each meets what the ones before have left. The first ones
# leave alone torch's own default for convolutions, which could not be set again.
SETTINGS = (
    "pass",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'bf16'",
    "torch.backends.fp32_precision = 'none'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'none'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.cudnn.fp32_precision = 'ieee'",
    "torch.backends.cudnn.fp32_precision = 'none'",
    "torch.backends.mkldnn.set_flags(_fp32_precision='bf16')",
    "torch.backends.mkldnn.set_flags(_fp32_precision='none')",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.fp32_precision = 'none'",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.cuda.matmul.allow_tf32 = False",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.set_float32_matmul_precision('highest')",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cudnn.allow_tf32 = True",
    "torch.backends.cudnn.conv.fp32_precision = 'none'",
    "torch.backends.fp32_precision = 'tf32'",
)

PROGRAM = """
import contextlib, json, sys
import torch, pathcond
from pathcond.capture.tf32 import without_tf32

KINDS = [(backend, kind) for backend in ("cuda", "mkldnn")
         for kind in ("all", "matmul", "conv", "rnn")]
GETTERS = {
    "everything": lambda: torch.backends.fp32_precision,
    **{str(at): lambda at=at: torch._C._get_fp32_precision_getter(*at) for at in KINDS},
    "conv": lambda: torch.backends.cudnn.conv.fp32_precision,
    "products": torch.get_float32_matmul_precision,
    "matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
}

def read(getter):
    try:
        return getter()
    except RuntimeError:
        return "raises"

def table():
    "What each getter says: now, and if the setting above all were another one."
    kept = torch.backends.fp32_precision
    found = []
    for above in (kept, "none", "ieee", "tf32"):
        torch.backends.fp32_precision = above
        found.append({name: read(getter) for name, getter in GETTERS.items()})
    torch.backends.fp32_precision = kept
    return found

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
wrong = []
for setting in json.loads(sys.argv[1]):
    exec(setting)
    before = table()
    pathcond.condition_(model, torch.randn(8, 4))
    if table() != before:
        wrong.append((setting, "condition_"))
    with contextlib.suppress(KeyError), without_tf32(["mkldnn", "cuda"]):
        inside = {at: torch._C._get_fp32_precision_getter(*at) for at in KINDS}
        if {*inside.values()} != {"ieee"} or torch.backends.cuda.matmul.allow_tf32:
            wrong.append((setting, f"inside: {inside}"))
        raise KeyError
    if table() != before:
        wrong.append((setting, "without_tf32"))
print(json.dumps(wrong))
"""


def test_every_setting_is_what_it_was_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(SETTINGS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
