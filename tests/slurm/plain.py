"""A script that knows nothing of the API: torch.distributed alone."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(7 if len(sys.argv) > 1 and dist.is_available() else 0)
