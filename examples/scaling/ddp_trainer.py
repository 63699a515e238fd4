"""The same training by hand: PyTorch's DistributedDataParallel, without Phalanx but for the epoch's times.

torchrun --nproc-per-node=4 ddp_trainer.py -c config/base.yaml -c config/ddp.yaml
"""

import os

import torch
import torch.distributed as dist
from data import dataset, loader
from model import MODELS
from options import one_process_unless_launched, parse
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import phalanx


def main():
    args = parse(__doc__)
    one_process_unless_launched()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend or ("nccl" if cuda else "gloo"))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.rnd_seed)
    images, classes = dataset(args)
    sampler = DistributedSampler(images, shuffle=args.shuff, seed=args.rnd_seed, drop_last=True)
    train = loader(args, images, sampler)
    model = MODELS[args.model](classes).to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    model = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    loss_fn = nn.CrossEntropyLoss()
    model.train()

    timer = phalanx.EpochTimer(
        "ddp", dataset=len(images), batch_size=args.batch_size, parameters=parameters, precision="fp32",
        folder=args.epoch_time_directory,
    )  # fmt: skip
    for epoch in timer.epochs(args.epochs):
        sampler.set_epoch(epoch)
        images.set_epoch(epoch)
        for index, (batch, labels) in enumerate(train):
            batch, labels = batch.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = loss_fn(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and index % args.log_int == 0:
                print(f"epoch {epoch}, step {index}, loss {loss.item():.4f}", flush=True)

    final = loss.detach()
    dist.all_reduce(final)
    if rank == 0:
        print(f"loss of the last step {final.item() / world_size:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
