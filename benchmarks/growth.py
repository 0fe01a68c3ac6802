"""How the whole call grows with the model: decoder-only transformers of 1e6 to 1e9 parameters.

    python -m benchmarks.growth [--sizes 1e6 1e7] [--device cuda] [--dtype bfloat16] [--out FILE]

Every size is built from a configuration, with a gated (SiLU) or a ReLU feed-forward, and
conditioned in a process of its own on two sequences of 128 tokens:

    seconds       a ``condition_`` of a process that has conditioned another model before
    memory        largest number of bytes held beside the model, over the bytes of its parameters
    exponent      growth of the seconds from the size before: 1 is linear

The model of 1e7 parameters is also conditioned in shards, over two processes on the CPU
(``fully_shard``), and ``find_symmetry`` runs on one of 7e9 parameters on the meta device, where
nothing is allocated. Processors without bfloat16 take hundreds of times as long in it as in
float32, which is the default for that reason.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import pathcond

from .measuring import GpuMemory, PeakMemory, file_of, format_row, write

FeedForward = Literal["gated", "relu"]
TOKENS = (2, 128)


@dataclass(frozen=True)
class Config:
    """A decoder: width and number of its layers, heads of attention, and words."""

    width: int
    layers: int
    heads: int
    words: int


CONFIGS = {
    "1e6": Config(width=128, layers=4, heads=4, words=1_000),
    "1e7": Config(width=320, layers=6, heads=5, words=4_000),
    "1e8": Config(width=768, layers=12, heads=12, words=10_000),
    "1e9": Config(width=2048, layers=18, heads=16, words=20_000),
    "7e9": Config(width=4096, layers=33, heads=32, words=32_000),
}
SHARDED, ON_META = "1e7", "7e9"


class Attention(nn.Module):
    """Causal self-attention; queries and keys are rotated by their places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def rotate(x: Tensor) -> Tensor:
    """Pairs of channels, each turned by an angle that grows with the place."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    speeds = torch.exp(-math.log(1e4) / half * torch.arange(half, device=x.device))
    angles = places[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Gated(nn.Module):
    """SiLU of one map times another, as language models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 64) * 64
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to what comes in."""

    def __init__(self, config: Config, feed_forward: FeedForward) -> None:
        super().__init__()
        width = config.width
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, config.heads)
        self.feed_forward = (
            Gated(width)
            if feed_forward == "gated"
            else nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.feed_forward(self.norms[1](x))
        return out


class Decoder(nn.Module):
    """Words in, scores of the next word out."""

    def __init__(self, config: Config, feed_forward: FeedForward) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.words, config.width)
        self.blocks = nn.ModuleList(Block(config, feed_forward) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def build(size: str, feed_forward: FeedForward, device: str, dtype: str) -> tuple[Decoder, Tensor]:
    """The model and its tokens, both made on the device."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = Decoder(CONFIGS[size], feed_forward)
            return model, torch.randint(CONFIGS[size].words, TOKENS)
    finally:
        torch.set_default_dtype(default)


def describe(size: str, feed_forward: FeedForward, model: nn.Module) -> dict[str, Any]:
    """The columns that every row begins with."""
    parameters = list(model.parameters())
    return {
        "size": size,
        "feed_forward": feed_forward,
        **asdict(CONFIGS[size]),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


def measure(size: str, feed_forward: FeedForward, device: str, dtype: str) -> dict[str, Any]:
    """One size, in this process: its time, then once more its memory."""
    pathcond.condition_(*build("1e6", feed_forward, device, dtype))
    model, tokens = build(size, feed_forward, device, dtype)
    start = time.perf_counter()
    report = pathcond.condition_(model, tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    with GpuMemory() if device == "cuda" else PeakMemory(model) as memory:
        pathcond.condition_(model, tokens)
    return {
        **describe(size, feed_forward, model),
        "device": device,
        "units": len(report.log_scales),
        "seconds": seconds,
        "memory": memory.peak / sum(p.numel() * p.element_size() for p in model.parameters()),
        **{f"seconds_{step}": value for step, value in report.seconds.items()},
        "output_change": report.output_change_eval,
    }


def measure_apart(**arguments: str) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    code = (
        "import json, sys; from benchmarks import growth; "
        "print(json.dumps(growth.measure(**json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure_sharded(feed_forward: FeedForward) -> dict[str, Any]:
    """The time of two processes with half of every parameter each, beside one with all of them."""
    model, tokens = build(SHARDED, feed_forward, "cpu", "float32")
    prepared = pathcond.prepare(model, tokens)
    start = time.perf_counter()
    alone = pathcond.condition_(model, prepared)
    seconds = time.perf_counter() - start
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        processes = [
            context.Process(target=_condition_shards, args=(rank, folder, feed_forward, queue))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = [queue.get() for _ in processes]
        for process in processes:
            process.join()
    greatest = float(alone.log_scales.abs().max())
    return {
        **describe(SHARDED, feed_forward, model),
        "device": "cpu, 2 shards",
        "seconds": max(each["seconds"] for each in found),
        "seconds_alone": seconds,
        "difference": max(abs(each["greatest"] - greatest) for each in found),
    }


def _condition_shards(
    rank: int, folder: str, feed_forward: FeedForward, queue: multiprocessing.Queue[Any]
) -> None:
    """One of two processes; both captured before they sharded."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    model, tokens = build(SHARDED, feed_forward, "cpu", "float32")
    prepared = pathcond.prepare(model, tokens)
    for layer in [*model.blocks, model]:
        fully_shard(layer)
    start = time.perf_counter()
    report = pathcond.condition_(model, prepared)
    seconds = time.perf_counter() - start
    queue.put({"seconds": seconds, "greatest": float(report.log_scales.abs().max())})
    distributed.destroy_process_group()


def search_on_meta(feed_forward: FeedForward) -> dict[str, Any]:
    """Symmetries of a model that is never allocated."""
    model, tokens = build(ON_META, feed_forward, "meta", "bfloat16")
    start = time.perf_counter()
    symmetry = pathcond.find_symmetry(model, tokens)
    seconds = time.perf_counter() - start
    with PeakMemory(model) as memory:
        pathcond.find_symmetry(model, tokens)
    return {
        **describe(ON_META, feed_forward, model),
        "device": "meta",
        "units": symmetry.num_units,
        "seconds": seconds,
        "memory": memory.peak / sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def exponent(row: dict[str, Any], smaller: dict[str, Any]) -> float:
    """With which power of the parameters the seconds grow."""
    return math.log(row["seconds"] / smaller["seconds"]) / math.log(
        row["parameters"] / smaller["parameters"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", default=["1e6", "1e7", "1e8"], choices=list(CONFIGS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        print(format_row(row), flush=True)
        rows.append(row)
        # after every row: the last ones take longest
        write(options.out or file_of("growth", options.device), rows)

    kinds: tuple[FeedForward, ...] = ("gated", "relu")
    for kind in kinds:
        smaller: dict[str, Any] | None = None
        for size in options.sizes:
            row = measure_apart(
                size=size, feed_forward=kind, device=options.device, dtype=options.dtype
            )
            tell(row | ({"exponent": exponent(row, smaller)} if smaller else {}))
            smaller = row
        if options.device == "cpu":
            tell(measure_sharded(kind))
            tell(search_on_meta(kind))


if __name__ == "__main__":
    main()
