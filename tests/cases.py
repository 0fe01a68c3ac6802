"""Small networks of every family, each with a batch of inputs. Names are stable: tests refer to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pathcond.lifting.lifting import capture_sample, diag_g
from pathcond.lifting.sample import Prepared, Sample
from pathcond.symmetry.captures import Captured, capture_all
from pathcond.symmetry.symmetry import symmetry_of

CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}
# To all others the value of ``normalization`` makes no difference: test_symmetry.py holds that.
NORMED = (
    "batch_norm_mlp",
    "conv_bn_conv",
    "convnext",
    "densenet",
    "group_and_instance_norm",
    "llama",
    "mobilenet_v3",
    "norms_without_parts",
    "regnet",
    "resnet",
    "rms_norm_module",
    "tracked_instance_norm",
    "unet",
    "vit",
)


def case(build: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    CASES[build.__name__] = build
    return build


def families(normalizations: Sequence[str]) -> list[Any]:
    """Every family with every value of ``normalization``. One without norms takes one of the
    values, by turns; `make test-all` takes all.
    """
    found = []
    for turn, name in enumerate(sorted(CASES)):
        chosen = normalizations[turn % len(normalizations)]
        for value in normalizations:
            repeats = name not in NORMED and value != chosen
            found.append(pytest.param(name, value, marks=[pytest.mark.slow] if repeats else []))
    return found


def make(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A case in float64 with random statistics, gains and biases."""
    from .zoo import as_double, randomise

    torch.manual_seed(seed)
    model, inputs = CASES[name]()
    model = model.double().eval()
    randomise(model, seed)
    return model, as_double(inputs)


@cache
def prepared(name: str, normalization: str, approximate: bool = False) -> Prepared:
    """A case as ``pathcond.prepare`` captures it; its weights do not matter. Captured once for all
    tests.
    """
    model, _ = make(name)
    symmetry = symmetry_of(
        model, _captured(name), normalization=normalization, approximate=approximate
    )  # type: ignore[arg-type]
    return Prepared(symmetry=symmetry, sample=_sample(name))


def diagonal(name: str) -> dict[str, Tensor]:
    """diag(G) of a case, measured once for all tests."""
    return {parameter: values.clone() for parameter, values in _diagonal(name).items()}


@cache
def _diagonal(name: str) -> dict[str, Tensor]:
    return diag_g(make(name)[0], _sample(name))


@cache
def _captured(name: str) -> list[Captured]:
    return capture_all(*make(name))


@cache
def _sample(name: str) -> Sample:
    return capture_sample(*make(name))


class Calls(nn.Module):
    """Modules by name and a forward given as a function of (self, *inputs)."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self._function(self, *inputs)


def images(channels: int = 2, size: int = 8) -> Tensor:
    return torch.randn(4, channels, size, size)


@case
def mlp() -> Any:
    return nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)
    ), torch.randn(6, 3)


@case
def mlp_without_bias() -> Any:
    layers = [
        nn.Linear(3, 4, bias=False),
        nn.LeakyReLU(),
        nn.Linear(4, 5, bias=False),
        nn.PReLU(),
        nn.Linear(5, 2, bias=False),
    ]
    return nn.Sequential(*layers), torch.randn(6, 3)


@case
def batch_norm_mlp() -> Any:
    layers = [
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Linear(4, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 2),
    ]
    return nn.Sequential(*layers), torch.randn(6, 3)


@case
def conv_bn_conv() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
    ), images()


@case
def vgg_with_flatten() -> Any:
    features = [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
    ]
    return nn.Sequential(
        *features,
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0),
        nn.Linear(5, 2),
    ), images()


class Residual(nn.Module):
    def __init__(self, width: int, inner: int, norm: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=not norm)
        self.bn1 = nn.BatchNorm2d(inner) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=not norm)
        self.bn2 = nn.BatchNorm2d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x
        return F.relu(out, inplace=True)


@case
def resnet() -> Any:
    stem = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*stem, Residual(4, 3), Residual(4, 5), *head), images()


@case
def resnet_without_norm() -> Any:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), Residual(4, 3, norm=False), Residual(4, 5, norm=False), *head
    ), images()


@case
def densenet() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in ((self.n1, self.c1), (self.n2, self.c2)):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.head(F.relu(self.n3(x)).mean((2, 3)))

    parts = {
        "stem": nn.Conv2d(2, 3, 3),
        "n1": nn.BatchNorm2d(3),
        "c1": nn.Conv2d(3, 2, 3, padding=1, bias=False),
    }
    parts |= {
        "n2": nn.BatchNorm2d(5),
        "c2": nn.Conv2d(5, 2, 3, padding=1, bias=False),
        "n3": nn.BatchNorm2d(7),
    }
    return Calls(forward, **parts, head=nn.Linear(7, 3)), images()


@case
def regnet() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.bn(self.grouped(F.relu(self.reduce(x)))).relu()
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return self.head((x + self.expand(y * gate)).relu().mean((2, 3)))

    return Calls(
        forward,
        stem=nn.Conv2d(2, 4, 3),
        reduce=nn.Conv2d(4, 6, 1),
        grouped=nn.Conv2d(6, 6, 3, padding=1, groups=3),
        bn=nn.BatchNorm2d(6),
        down=nn.Conv2d(6, 2, 1),
        up=nn.Conv2d(2, 6, 1),
        expand=nn.Conv2d(6, 4, 1),
        head=nn.Linear(4, 2),
    ), images()


@case
def shufflenet() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for depthwise, pointwise in ((self.d1, self.p1), (self.d2, self.p2)):
            a, b = x.chunk(2, dim=1)
            x = torch.cat((a, pointwise(depthwise(b)).relu()), 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return self.head(x.mean([2, 3]))

    return Calls(
        forward,
        stem=nn.Conv2d(2, 8, 3),
        d1=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        p1=nn.Conv2d(4, 4, 1),
        d2=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        p2=nn.Conv2d(4, 4, 1),
        head=nn.Linear(8, 2),
    ), images()


@case
def mobilenet_v3() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.bn0(self.stem(x)).relu()
        y = F.relu(self.bn1(self.expand(x)))
        y = F.relu(self.bn2(self.depthwise(y)))
        gate = F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        x = x + self.bn3(self.project(gate * y))
        return self.head(F.hardswish(self.pre(x.mean((2, 3)))))

    return Calls(
        forward,
        stem=nn.Conv2d(2, 3, 3, bias=False),
        bn0=nn.BatchNorm2d(3),
        expand=nn.Conv2d(3, 5, 1, bias=False),
        bn1=nn.BatchNorm2d(5),
        depthwise=nn.Conv2d(5, 5, 3, padding=1, groups=5, bias=False),
        bn2=nn.BatchNorm2d(5),
        down=nn.Conv2d(5, 2, 1),
        up=nn.Conv2d(2, 5, 1),
        project=nn.Conv2d(5, 3, 1, bias=False),
        bn3=nn.BatchNorm2d(3),
        pre=nn.Linear(3, 4),
        head=nn.Linear(4, 2),
    ), images()


@case
def convnext() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.down(F.relu(self.up(self.norm(y)))) * self.layer_scale
        x = x + y.permute(0, 3, 1, 2)
        return self.head(self.norm2(x.mean((2, 3))))

    return Calls(
        forward,
        stem=nn.Conv2d(2, 4, 2, stride=2),
        depthwise=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        norm=nn.LayerNorm(4),
        up=nn.Linear(4, 6),
        down=nn.Linear(6, 4),
        layer_scale=nn.Parameter(torch.randn(4)),
        norm2=nn.LayerNorm(4),
        head=nn.Linear(4, 2),
    ), images()


class SelfAttention(nn.Module):
    """Fused query, key and value; heads by reshape, as in timm."""

    def __init__(self, width: int = 4, heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(n, tokens, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(n, tokens, width))


@case
def vit() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.relu(self.up(self.norm2(x))))
        return self.head(self.norm3(x)[:, 0])

    return Calls(
        forward,
        patches=nn.Conv2d(2, 4, 4, stride=4),
        token=nn.Parameter(torch.randn(1, 1, 4)),
        positions=nn.Parameter(torch.randn(1, 5, 4)),
        norm1=nn.LayerNorm(4),
        attention=SelfAttention(),
        norm2=nn.LayerNorm(4),
        up=nn.Linear(4, 6),
        down=nn.Linear(6, 4),
        norm3=nn.LayerNorm(4),
        head=nn.Linear(4, 2),
    ), images()


@case
def unet() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        top = F.relu(self.bn1(self.enter(x)))
        bottom = F.relu(self.deep(F.max_pool2d(top, 2)))
        up = F.relu(self.up(bottom))
        return self.leave(F.relu(self.bn2(self.merge(torch.cat([top, up], 1)))))

    return Calls(
        forward,
        enter=nn.Conv2d(2, 3, 3, padding=1),
        bn1=nn.BatchNorm2d(3),
        deep=nn.Conv2d(3, 4, 3, padding=1),
        up=nn.ConvTranspose2d(4, 3, 2, stride=2),
        merge=nn.Conv2d(6, 3, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(3),
        leave=nn.Conv2d(3, 1, 1),
    ), images()


class RMSNorm(nn.Module):
    """Written out, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps)).to(x.dtype)


def rotate(x: Tensor, positions: int, width: int) -> Tensor:
    options = {"dtype": x.dtype, "device": x.device}
    frequencies = 1.0 / 10 ** (torch.arange(width // 2, **options) / width)
    angles = torch.outer(torch.arange(positions, **options), frequencies)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * cos + half * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary embeddings, and a gated feed-forward."""

    def __init__(self, width: int = 8, heads: int = 2, inner: int = 6) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, self.size, bias=False)
        self.v = nn.Linear(width, self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            p(h).view(n, tokens, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = rotate(q, tokens, self.size), rotate(k, tokens, self.size)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(n, tokens, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@case
def llama() -> Any:
    return nn.Sequential(
        nn.Embedding(11, 8), LlamaBlock(), RMSNorm(8), nn.Linear(8, 3, bias=False)
    ), torch.randint(0, 11, (3, 5))


@case
def conv_1d_and_3d() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.relu(self.a(x)).unflatten(2, (2, 3, 2))
        return self.c(F.relu(self.b(x)).flatten(1))

    return Calls(
        forward, a=nn.Conv1d(2, 3, 1), b=nn.Conv3d(3, 4, 2), c=nn.Linear(8, 2)
    ), torch.randn(4, 2, 12)


@case
def transposed_grouped() -> Any:
    layers = [
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose1d(6, 2, 1),
    ]
    model = nn.Sequential(*layers[:4], nn.Flatten(2), layers[4])
    return model, images(size=4)


@case
def pixel_shuffle() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.ReLU(),
        nn.PixelShuffle(2),
        nn.Conv2d(2, 3, 3),
        nn.ReLU(),
        nn.Conv2d(3, 1, 1),
    ), images()


@case
def spellings_of_relu() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer, relu in (
            (self.a, torch.relu),
            (self.b, lambda h: h.relu_()),
            (self.c, lambda h: h.clamp(min=0)),
        ):
            x = relu(layer(x))
        return self.d(x)

    return Calls(
        forward, a=nn.Linear(3, 3), b=nn.Linear(3, 4), c=nn.Linear(4, 3), d=nn.Linear(3, 2)
    ), torch.randn(6, 3)


@case
def bare_parameters() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(x @ self.w + self.b) * self.scale
        return F.linear(h, self.v.t()) @ self.u.view(2, 2)

    return Calls(
        forward,
        w=nn.Parameter(torch.randn(3, 4)),
        b=nn.Parameter(torch.randn(4)),
        scale=nn.Parameter(torch.randn(4)),
        v=nn.Parameter(torch.randn(4, 2)),
        u=nn.Parameter(torch.randn(4)),
    ), torch.randn(6, 3)


@case
def product_of_branches() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) * F.relu(self.b(x)))

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(3, 4), c=nn.Linear(4, 2)), torch.randn(
        6, 3
    )


@case
def square() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(h * h) + self.c(h**3)

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(4, 2)), torch.randn(
        6, 3
    )


@case
def used_twice() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(F.relu(self.shared(F.relu(self.shared(x)))))

    return Calls(
        forward, shared=nn.Linear(3, 3, bias=False), out=nn.Linear(3, 2, bias=False)
    ), torch.randn(6, 3)


@case
def siamese() -> Any:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.cat([self.net(x), self.net(y)], -1))

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())
    return Calls(forward, net=net, out=nn.Linear(6, 2)), (torch.randn(6, 3), torch.randn(6, 3))


@case
def also_an_output() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        h = F.relu(self.a(x))
        return self.b(h), h[:, :2]

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), torch.randn(6, 3)


@case
def tied_embedding() -> Any:
    def forward(self: Any, tokens: Tensor) -> Tensor:
        h = F.relu(self.a(self.embedding(tokens)))
        return F.linear(self.b(h), self.embedding.weight)

    return Calls(
        forward, embedding=nn.Embedding(7, 3), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ), torch.randint(0, 7, (5, 4))


@case
def group_and_instance_norm() -> Any:
    layers = [
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3),
        nn.InstanceNorm2d(3, affine=True),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Conv2d(3, 2, 1)), images()


@case
def tracked_instance_norm() -> Any:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 1)), images()


@case
def norms_without_parts() -> Any:
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Conv2d(4, 3, 3)]
    return nn.Sequential(
        *layers, nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU(), nn.Conv2d(3, 2, 1)
    ), images()


@case
def rms_norm_module() -> Any:
    return nn.Sequential(
        nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)
    ), torch.randn(6, 3)


@case
def relu_gated() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = self.up(x).split(4, dim=-1)
        return self.down(F.relu(a) * b)

    return Calls(forward, up=nn.Linear(3, 8), down=nn.Linear(4, 2)), torch.randn(6, 3)


@case
def batched_experts() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(torch.einsum("nd,edh->enh", x, self.up))
        return torch.bmm(h, self.down).sum(0)

    return Calls(
        forward, up=nn.Parameter(torch.randn(2, 3, 4)), down=nn.Parameter(torch.randn(2, 4, 2))
    ), torch.randn(6, 3)


@case
def index_and_pad() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        h = F.pad(h[:, [3, 0, 1]], (0, 1)) + F.pad(h[:, 2:], (2, 0))
        return self.b(h.flip(1))

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), torch.randn(6, 3)


@case
def packed_attention() -> Any:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        mixed, _ = self.attention(x, y, y, need_weights=False)
        return self.out(F.relu(mixed))

    return Calls(
        forward, attention=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 2)
    ), (
        torch.randn(3, 4, 4),
        torch.randn(3, 5, 4),
    )


@case
def self_edge() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        h = h + F.relu(self.b(h))
        return self.c(h)

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2)), torch.randn(
        6, 3
    )


@case
def slice_assignment() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        z = torch.zeros_like(h)
        z[:, 1:3] = h[:, 2:]
        first = z[:, :2]
        z[:, 2:].add_(F.relu(self.b(x)))
        return self.c(z) + self.d(first) + self.e(h[:, :2])

    parts = {
        "a": nn.Linear(3, 4),
        "b": nn.Linear(3, 2),
        "c": nn.Linear(4, 2),
        "d": nn.Linear(2, 2),
        "e": nn.Linear(2, 2),
    }
    return Calls(forward, **parts), torch.randn(6, 3)


@case
def part_of_a_bias_cleared() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        bias = self.a.bias.clone()
        bias[1:3].zero_()
        return self.b(F.relu(F.linear(x, self.a.weight, bias)))

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), torch.randn(6, 3)


@case
def relu_rnn() -> Any:
    """Two layers in both directions; the final states are read too."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out, states = self.rnn(x)
        return self.head(out[:, -1]) + self.last(states[3])

    rnn = nn.RNN(2, 3, num_layers=2, nonlinearity="relu", bidirectional=True, batch_first=True)
    return Calls(forward, rnn=rnn, head=nn.Linear(6, 2), last=nn.Linear(3, 2)), torch.randn(4, 3, 2)


@case
def recurrences_from_zeros() -> Any:
    """An RNNCell, and the same written out; states begin at zero, and weights read that first."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 3)
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
            h = F.relu(self.w(step) + self.u(h))
        return self.head(torch.cat([h, state], 1))

    cell = nn.RNNCell(2, 3, nonlinearity="relu", bias=False)
    parts = {"w": nn.Linear(2, 3), "u": nn.Linear(3, 3), "head": nn.Linear(6, 2)}
    return Calls(forward, cell=cell, **parts), torch.randn(4, 3, 2)


EDGES = torch.tensor([[0, 1, 2, 3, 3, 4, 2], [1, 0, 3, 2, 4, 1, 0]])


@case
def graph_network() -> Any:
    """Messages along edges that are an input: sums, means and maxima of neighbours."""

    def forward(self: Any, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        h = F.relu(self.a(x))
        h = F.relu(self.b(torch.zeros_like(h).index_add(0, target, h.index_select(0, source))))
        places = target[:, None].expand(-1, 3)
        mean = h.new_zeros(h.shape).scatter_reduce(0, places, h[source], "mean")
        largest = torch.zeros(h.shape, dtype=x.dtype).scatter_reduce(0, places, h[source], "amax")
        total = h.scatter_add(0, places, h[source])
        return self.c(mean) + self.d(largest) + self.e(total)

    heads = {name: nn.Linear(3, 2) for name in "cde"}
    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 3), **heads), (torch.randn(5, 3), EDGES)


@case
def assignments_by_index() -> Any:
    """Rows that an input chooses are written, channels that the program chooses are."""

    def forward(self: Any, x: Tensor, order: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        rows = h.new_zeros(h.shape)
        rows[order] = h
        columns = torch.zeros_like(h)
        columns[:, [2, 0, 3, 1]] = h
        copied = h.index_copy(0, order[:2], h[:2])
        return self.b(rows) + self.c(columns) + self.d(copied)

    heads = {name: nn.Linear(4, 2) for name in "bcd"}
    return Calls(forward, a=nn.Linear(3, 4), **heads), (
        torch.randn(5, 3),
        torch.tensor([4, 2, 0, 1, 3]),
    )


@case
def weight_normed() -> Any:
    norm = nn.utils.parametrizations.weight_norm
    first, second = norm(nn.Conv2d(2, 4, 3)), norm(nn.Conv2d(4, 4, 3, groups=2))
    head = [
        nn.Flatten(),
        norm(nn.Linear(16, 3)),
        nn.ReLU(),
        norm(nn.Linear(3, 3), dim=1),
        nn.ReLU(),
    ]
    model = nn.Sequential(
        first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(2), *head, nn.Linear(3, 2)
    )
    return model, images()


@case
def masked_weights() -> Any:
    """As torch.nn.utils.prune and MADE have it: a buffer of zeros and ones times the weight."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.mask.to(x.dtype) * self.a.weight, self.a.bias))
        return F.linear(h, self.b.weight * self.mask.t(), self.b.bias)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 3))
    model.register_buffer("mask", torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]]))
    return model, torch.randn(6, 3)


@case
def gains_plus_zero() -> Any:
    """Gains with an offset that may be turned off, as ``unit_offset`` of x-transformers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x)) * (self.gain.weight[0] + 0.0)
        return self.b(h) - F.linear(h, self.c.weight - 0, self.c.bias)

    gain = nn.Linear(4, 1, bias=False)
    return Calls(forward, a=nn.Linear(3, 4), gain=gain, b=nn.Linear(4, 2), c=nn.Linear(4, 2)), (
        torch.randn(6, 3)
    )


@case
def embedding_bags() -> Any:
    def forward(self: Any, tokens: Tensor, x: Tensor) -> Tensor:
        weighted = self.sum(tokens, per_sample_weights=F.relu(self.w(x)))
        return self.a(weighted) + self.b(self.mean(tokens)) + self.c(self.max(tokens))

    bags = {mode: nn.EmbeddingBag(7, 3, mode=mode) for mode in ("sum", "mean", "max")}
    heads = {name: nn.Linear(3, 2) for name in "abc"}
    return Calls(forward, w=nn.Linear(3, 4), **bags, **heads), (
        torch.randint(0, 7, (5, 4)),
        torch.randn(5, 3),
    )


@case
def unpooling() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        pooled, places = F.max_pool2d(F.relu(self.a(x)), 2, return_indices=True)
        return self.c(F.max_unpool2d(F.relu(self.b(pooled)), places, 2))

    parts = {"a": nn.Conv2d(2, 3, 3), "b": nn.Conv2d(3, 3, 1), "c": nn.Conv2d(3, 2, 1)}
    return Calls(forward, **parts), images()


@case
def products_of_inputs() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h, gated = F.relu(self.a(x)), F.glu(self.gate(x))
        pairs = F.relu(self.pairs(h, gated))
        mixed = torch.einsum("ni,ij,jk->nk", h, self.u, self.v)
        return self.b(pairs) + torch.tensordot(mixed, self.w, dims=([1], [1]))

    matrices = {"u": (4, 2), "v": (2, 3), "w": (2, 3)}
    parts = {name: nn.Parameter(torch.randn(shape)) for name, shape in matrices.items()}
    layers = {
        "a": nn.Linear(3, 4),
        "gate": nn.Linear(3, 6),
        "pairs": nn.Bilinear(4, 3, 3),
        "b": nn.Linear(3, 2),
    }
    return Calls(forward, **layers, **parts), torch.randn(6, 3)
