"""Residual networks (He et al., 2015, arXiv:1512.03385) without torchvision, and a small one for CPUs."""

from torch import nn


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Convolutions whose result is added to their input."""

    def __init__(self, inputs, outputs, stride, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )

    def forward(self, images):
        return nn.functional.relu(self.layers(images) + self.shortcut(images))


def basic(inputs, width, stride):
    """Two 3 × 3 convolutions: ResNet-18."""
    layers = (
        *(conv(inputs, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU()),
        *(conv(width, width, 3), nn.BatchNorm2d(width)),
    )
    return Block(inputs, width, stride, layers), width


def bottleneck(inputs, width, stride):
    """1 × 1, 3 × 3 and 1 × 1, with the stride in the middle one: ResNet-50 and ResNet-152."""
    layers = (
        *(conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU()),
        *(conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU()),
        *(conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
    )
    return Block(inputs, 4 * width, stride, layers), 4 * width


def resnet(block, counts, classes):
    layers = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            made, channels = block(channels, 64 << stage, 2 if stage and not index else 1)
            layers.append(made)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def tiny(classes):
    """For trying the commands on a CPU: 10 thousand parameters, and no BatchNorm, so that runs of any size agree."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5, 4), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, classes)),
    )


MODELS = {
    "tiny": tiny,
    "resnet18": lambda classes: resnet(basic, (2, 2, 2, 2), classes),
    "resnet50": lambda classes: resnet(bottleneck, (3, 4, 6, 3), classes),
    "resnet152": lambda classes: resnet(bottleneck, (3, 8, 36, 3), classes),
}
