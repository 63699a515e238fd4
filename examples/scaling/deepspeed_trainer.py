"""The same training by hand: DeepSpeed, without Phalanx but for the epoch's times.

deepspeed deepspeed_trainer.py --deepspeed -c config/base.yaml -c config/deepspeed.yaml
"""

import deepspeed
import torch
import torch.distributed as dist
from data import dataset, loader
from model import MODELS
from options import one_process_unless_launched, parse
from torch import nn
from torch.utils.data import DistributedSampler

import phalanx


def main():
    args = parse(__doc__)
    one_process_unless_launched()
    cuda = torch.cuda.is_available()
    if not cuda:  # it would compile a collective for the CPU, for most of a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(args.backend or ("nccl" if cuda else "gloo"))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.rnd_seed)
    images, classes = dataset(args)
    sampler = DistributedSampler(images, shuffle=args.shuff, seed=args.rnd_seed, drop_last=True)
    train = loader(args, images, sampler)
    model = MODELS[args.model](classes)
    parameters = sum(weight.numel() for weight in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        config={
            "train_micro_batch_size_per_gpu": args.batch_size,
            "gradient_clipping": 0.0,  # it clips at 1.0 unless told
            "zero_optimization": {"stage": args.zero_stage},
            "zero_allow_untested_optimizer": True,  # SGD on shares of parameters is SGD
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    loss_fn = nn.CrossEntropyLoss()

    timer = phalanx.EpochTimer(
        "deepspeed", dataset=len(images), batch_size=args.batch_size, parameters=parameters, precision="fp32",
        folder=args.epoch_time_directory,
    )  # fmt: skip
    for epoch in timer.epochs(args.epochs):
        sampler.set_epoch(epoch)
        images.set_epoch(epoch)
        for index, (batch, labels) in enumerate(train):
            batch = batch.to(engine.device, non_blocking=True)
            loss = loss_fn(engine(batch), labels.to(engine.device, non_blocking=True))
            engine.backward(loss)
            engine.step()
            if rank == 0 and index % args.log_int == 0:
                print(f"epoch {epoch}, step {index}, loss {loss.item():.4f}", flush=True)

    final = loss.detach()
    dist.all_reduce(final)
    if rank == 0:
        print(f"loss of the last step {final.item() / world_size:.6f}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
