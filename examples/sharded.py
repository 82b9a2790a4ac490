"""Train one model on all GPUs of a machine, or without a GPU on the CPU.

torchrun --standalone --nproc-per-node 2 examples/sharded.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from optimi_func import AdamW, clip_grad_norm_

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
count = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device, (count,))  # starts NCCL, or gloo
first = dist.get_rank() == 0

torch.manual_seed(0)  # the same weights in every process
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
model.to(device, torch.bfloat16)
fully_shard(model, mesh=mesh)  # first, because it replaces the parameters
optimizer = AdamW(model.named_parameters(), lr=1e-2, compile=False)

torch.manual_seed(1 + dist.get_rank())  # other data in each process
for step in range(101):
    x = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    y = x.float().mean(1, keepdim=True)
    loss = (model(x).float() - y).square().mean()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        total = loss.detach().clone()
        dist.all_reduce(total)
        if first:
            print(f"step {step:3}: loss {total.item() / count:.4f}")

weight = model[0].weight
if first:
    own, whole = tuple(weight.to_local().shape), tuple(weight.shape)
    print(f"each of {count} processes has {own} of a weight of {whole}")
dist.destroy_process_group()
