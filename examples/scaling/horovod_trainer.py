"""The same training by hand: Horovod, without Phalanx but for the epoch's times.

horovodrun -np 4 python horovod_trainer.py -c config/base.yaml -c config/horovod.yaml
"""

import horovod.torch as hvd
import torch
from data import dataset, loader
from model import MODELS
from options import parse
from torch import nn
from torch.utils.data import DistributedSampler

import phalanx


def main():
    args = parse(__doc__)
    hvd.init()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(args.rnd_seed)
    images, classes = dataset(args)
    sampler = DistributedSampler(images, hvd.size(), hvd.rank(), shuffle=args.shuff, seed=args.rnd_seed, drop_last=True)
    train = loader(args, images, sampler)
    model = MODELS[args.model](classes).to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    loss_fn = nn.CrossEntropyLoss()
    model.train()

    timer = phalanx.EpochTimer(
        "horovod", dataset=len(images), batch_size=args.batch_size, parameters=parameters, precision="fp32",
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
            if hvd.rank() == 0 and index % args.log_int == 0:
                print(f"epoch {epoch}, step {index}, loss {loss.item():.4f}", flush=True)

    final = hvd.allreduce(loss.detach(), name="final")
    if hvd.rank() == 0:
        print(f"loss of the last step {final.item():.6f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
