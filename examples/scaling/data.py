"""Images in folders, one folder a class, as ImageNet is laid out; or synthetic ones."""

import math
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet's channels, as usual
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder(Dataset):
    """`<folder>/<class>/<image>`, augmented in the usual way: cropped, scaled to `size` × `size` pixels, mirrored.

    How depends on seed, epoch and image alone: the same in any number of processes, whoever deals the images out.
    """

    def __init__(self, folder, size, seed=0):
        root = Path(folder)
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            sys.exit(
                f"data_dir={str(folder)!r} holds no images: expected <data_dir>/<class>/<image>.jpg, as in ImageNet's "
                "train/. make_images.py makes some; --synthetic needs none"
            )
        self.size, self.seed = size, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # also for loading processes that live on

    def __len__(self):
        return len(self.files)

    def set_epoch(self, epoch):
        if get_worker_info() is not None:  # told by who loads: of this loading process alone
            self.epoch = torch.tensor(0)
        self.epoch.fill_(epoch)

    def __getitem__(self, index):
        from PIL import Image  # pip install pillow; random images don't need it

        path, label = self.files[index]
        with Image.open(path) as image:
            image = image.convert("RGB")
        random = torch.Generator().manual_seed(hash((self.seed, self.epoch.item(), index)))
        crop = random_crop(image.width, image.height, random)
        pixels = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=crop)
        if torch.rand((), generator=random) < 0.5:
            pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)
        return (image.permute(2, 0, 1).float() / 255 - MEAN) / DEVIATION, label


def random_crop(width, height, random):
    """(left, upper, right, lower) of 8% to 100% of the area, between 3:4 and 4:3, anywhere in the image."""
    for _ in range(10):
        area = width * height * torch.empty(()).uniform_(0.08, 1, generator=random).item()
        ratio = torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3), generator=random).exp().item()
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            break
    else:  # of a long, narrow image a square
        wide = high = min(width, height)
    left = torch.randint(width - wide + 1, (), generator=random).item()
    upper = torch.randint(height - high + 1, (), generator=random).item()
    return left, upper, left + wide, upper + high


class Synthetic(Dataset):
    """As many random images as one likes, repeated from a few in memory: no reading, no decoding, no augmentation.

    What is left of loading: putting batches together, passing them between processes and copying them to the device.
    """

    classes = tuple(str(number) for number in range(1000))

    def __init__(self, count, size):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(64, 3, size, size, generator=generator)
        self.count = count

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        pass  # the same in each

    def __getitem__(self, index):
        return self.images[index % len(self.images)], index % len(self.classes)


class Chosen(Subset):
    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)


def dataset(args):
    """What `data_dir`, `synthetic` and `subset_size` ask for, and the number of classes."""
    if args.synthetic:
        made = Synthetic(args.subset_size or 1_281_167, args.image_size)  # as many as ImageNet has for training
        return made, len(made.classes)
    images = ImageFolder(args.data_dir, args.image_size, args.rnd_seed)
    classes = len(images.classes)
    if args.subset_size is None:
        return images, classes
    if not 0 < args.subset_size <= len(images):
        sys.exit(f"subset_size={args.subset_size}: expected 1 to {len(images)}, the images in {args.data_dir}, or null")
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.rnd_seed))
    return Chosen(images, chosen[: args.subset_size].tolist()), classes


def loader(args, images, sampler=None):
    """`batch_size` is per process. A sampler says which images are this process's; else Phalanx deals them out."""
    made = DataLoader(
        images,
        batch_size=args.batch_size,
        shuffle=args.shuff if sampler is None else None,
        sampler=sampler,
        num_workers=args.nworker,
        prefetch_factor=args.prefetch if args.nworker else None,
        persistent_workers=args.nworker > 0,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,  # all batches alike, so that all steps take the same time
    )
    if not len(made):
        count = len(images if sampler is None else sampler)
        sys.exit(
            f"batch_size={args.batch_size}: this process has {count} images, not one batch; use more images or smaller "
            "batches"
        )
    return made
