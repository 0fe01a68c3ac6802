"""The paper's networks, as plain chains of torch modules with torch's own initialisation.

mlp           3072 - 500 - 500 - 500 - 10 by default (``sec:faster``); any widths
autoencoder   784 - 784/c - 784/c² and back (``sec:regimes``)
cifar_nv      the fully convolutional network of Gitman and Ginsburg, 2017 (``sec:generalize``)
resnet        ResNet-18, -34, -50 for ImageNet; same parameters in the same order as torchvision's
resnet18_c    ResNet-18 for CIFAR with learned shortcuts everywhere (``sec:timing``)
vgg16         VGG-16 for ImageNet; same parameters in the same order as torchvision's

>>> sum(parameter.numel() for parameter in mlp().parameters())
2042510
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


def mlp(
    hidden: Sequence[int] = (500, 500, 500),
    *,
    inputs: int = 3072,
    outputs: int = 10,
    batch_norm: bool = False,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """A fully connected network on flattened images.

    Args:
        hidden: Widths of the hidden layers.
        inputs: Number of input values.
        outputs: Number of outputs.
        batch_norm: Put a BatchNorm behind every hidden linear layer, in place of its bias.
        activation: Makes the activation behind every hidden layer.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers.append(nn.Linear(inputs, width, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(activation())
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def autoencoder(compression: int, *, inputs: int = 784) -> nn.Sequential:
    """The MNIST autoencoder n - n/c - n/c² - n/c - n; its unevenness grows with the compression
    factor c.
    """
    narrow = inputs // compression
    return mlp((narrow, narrow // compression, narrow), inputs=inputs, outputs=inputs)


def cifar_nv(
    num_classes: int = 10,
    *,
    inputs: int = 3,
    width: int = 128,
    final_norm: bool = False,
    bias: bool = False,
) -> nn.Sequential:
    """CIFAR-NV on images: three blocks of three convolutions.

    The last convolution of the first two blocks has a BatchNorm, the last of the third is the
    classifier, whose outputs pass a ReLU as well. The paper's 2,616,576 parameters are 2,615,808
    weights and the 2·(128 + 256) of these two norms.

    Args:
        num_classes: Outputs.
        inputs: Channels of the images.
        width: Channels of the first block.
        final_norm: Put a BatchNorm behind the classifier, as the paper's text does. Without it a
            class may die in training: a ReLU that is never active.
        bias: Give all convolutions a bias, as the network that the authors trained has.
    """

    def convolution(channels: int, outputs: int, kernel: int) -> nn.Conv2d:
        return nn.Conv2d(channels, outputs, kernel, padding=kernel // 2, bias=bias)

    channels = width
    wider = 2 * width
    widest = 5 * width // 2
    return nn.Sequential(
        convolution(inputs, channels, 3),
        nn.ReLU(),
        convolution(channels, channels, 3),
        nn.ReLU(),
        convolution(channels, channels, 3),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        convolution(channels, wider, 3),
        nn.ReLU(),
        convolution(wider, wider, 3),
        nn.ReLU(),
        convolution(wider, wider, 3),
        nn.BatchNorm2d(wider),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        convolution(wider, widest, 3),
        nn.ReLU(),
        convolution(widest, widest, 1),
        nn.ReLU(),
        convolution(widest, num_classes, 1),
        *([nn.BatchNorm2d(num_classes)] if final_norm else []),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class Residual(nn.Module):
    """relu(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


RESNET_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


def resnet(depth: int, *, num_classes: int = 1000) -> nn.Sequential:
    """ResNet-18, -34 or -50: basic blocks up to 34, bottlenecks (stride on the 3×3) at 50."""
    if depth not in RESNET_STAGES:
        raise ValueError(f"depth={depth}; choose one of {', '.join(map(str, RESNET_STAGES))}.")
    stem = [*_conv_and_norm(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    return _residual_network(stem, RESNET_STAGES[depth], num_classes, bottleneck=depth >= 50)


def resnet18_c(num_classes: int = 10) -> nn.Sequential:
    """ResNet-18 of type C for CIFAR: a 3×3 stem without pooling, and a learned 1×1 shortcut in
    every block.

    With no identity to tie them, every block's output has scales of its own: 3,904 channels in all.
    """
    stem = [*_conv_and_norm(3, 64, 3), nn.ReLU()]
    return _residual_network(stem, RESNET_STAGES[18], num_classes, learned_shortcuts=True)


def vgg16(num_classes: int = 1000) -> nn.Sequential:
    """VGG-16 without BatchNorm."""
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    layers += [
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
    ]
    return nn.Sequential(*layers, nn.Linear(4096, num_classes))


def _residual_network(
    stem: Sequence[nn.Module],
    stages: Sequence[int],
    num_classes: int,
    *,
    bottleneck: bool = False,
    learned_shortcuts: bool = False,
) -> nn.Sequential:
    """Stages of residual blocks; each stage but the first halves the image and doubles the
    width.
    """
    layers = list(stem)
    channels = 64
    for stage, blocks in enumerate(stages):
        width = 64 * 2**stage
        outputs = 4 * width if bottleneck else width
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            sizes = (
                [(width, 1, 1), (width, 3, stride), (outputs, 1, 1)]
                if bottleneck
                else [(width, 3, stride), (outputs, 3, 1)]
            )
            learned = learned_shortcuts or stride > 1 or channels != outputs
            shortcut = (
                nn.Sequential(*_conv_and_norm(channels, outputs, 1, stride=stride))
                if learned
                else nn.Identity()
            )
            layers.append(Residual(_body(channels, sizes), shortcut))
            channels = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )


def _body(channels: int, sizes: Sequence[tuple[int, int, int]]) -> nn.Sequential:
    """Normalised convolutions of the given (outputs, kernel, stride), with ReLU between them."""
    layers: list[nn.Module] = []
    for outputs, kernel, stride in sizes:
        layers += [*_conv_and_norm(channels, outputs, kernel, stride=stride), nn.ReLU()]
        channels = outputs
    return nn.Sequential(*layers[:-1])


def _conv_and_norm(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    """A convolution that keeps the image's size (over its stride), without bias, and a
    BatchNorm.
    """
    return nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False
    ), nn.BatchNorm2d(outputs)
