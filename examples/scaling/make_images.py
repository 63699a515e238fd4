"""Make JPEG files in folders, one a class, for people without ImageNet: stripes, whose direction is the class.

python make_images.py images --classes 4 --count 64
"""

import argparse
import math
from pathlib import Path

import numpy
from PIL import Image


def stripes(number, classes, size, random):
    """An image of class `number`: its stripes' direction; width, place, colours and noise are random."""
    rows, columns = numpy.mgrid[0:size, 0:size]
    angle = math.pi * number / classes
    along = rows * math.sin(angle) + columns * math.cos(angle)
    wave = numpy.sin(along * random.uniform(0.2, 0.5) + random.uniform(0, 6))
    colours = random.uniform(40, 110, 3)
    image = 128 + wave[..., None] * colours + random.normal(0, 12, (size, size, 3))
    return Image.fromarray(image.clip(0, 255).astype("uint8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--count", type=int, default=64, help="images of each class")
    parser.add_argument("--size", type=int, default=96, help="pixels along an edge")
    args = parser.parse_args()
    random = numpy.random.default_rng(0)
    for number in range(args.classes):
        folder = args.folder / f"class{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(args.count):
            stripes(number, args.classes, args.size, random).save(folder / f"{index:05}.jpg", quality=90)
    print(f"{args.classes * args.count} images of {args.classes} classes in {args.folder}")


if __name__ == "__main__":
    main()
