"""A DeepSpeed script in the form of DeepSpeed's own examples: it knows nothing of what launches it here.

Gradient descent for y = 2x from weight 0, over x = 0 … 7 dealt to the ranks.
"""

import argparse
import json

import deepspeed
import torch
import torch.distributed as dist

# What those examples need not do: DeepSpeed would compile a collective for the CPU, for most of a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
parser.add_argument("--steps", type=int, default=1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
local_rank_said = args.local_rank

deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
engine, optimizer, _, _ = deepspeed.initialize(
    args=args,
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    config={
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
x = torch.arange(8.0)[dist.get_rank() :: dist.get_world_size()].reshape(-1, 1)
for _ in range(args.steps):
    loss = ((engine(x) - 2 * x) ** 2).mean()
    engine.backward(loss)
    engine.step()
answer = [local_rank_said, engine.local_rank, model.weight.item()]
answers = [None] * dist.get_world_size()
dist.all_gather_object(answers, answer)
if dist.get_rank() == 0:
    print(json.dumps({"size": dist.get_world_size(), "ranks": answers}), flush=True)
dist.destroy_process_group()
