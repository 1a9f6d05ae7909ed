"""What the processes of the distributed tests run; a spawned process imports it by name."""

import torch
from torch import nn

from nanorl import distributed
from nanorl.metrics import Metrics


def group_report(folder: str) -> dict:
    """Join the group, try each function of `distributed` once, and return what came out on this rank."""
    device = distributed.setup(torch.device("cpu"))
    try:
        return {"device": device.type, "rank": distributed.rank(), "world": distributed.world_size(),
                "main": distributed.is_main(), **exchanged(), **trained(device), **reported(folder)}
    finally:
        distributed.close()


def exchanged() -> dict:
    rank = distributed.rank()
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).T * (rank + 1)  # not contiguous
    before = mine.tolist()
    total = distributed.sum_over_ranks(mine)
    distributed.barrier()
    return {
        "int": distributed.sum_over_ranks(2**53 + rank),  # a float cannot hold 2**53 + 1
        "float": distributed.sum_over_ranks(0.1 + rank),
        "mean": distributed.mean_over_ranks(1 + rank),
        "tensor": total.tolist(),
        "detached": not total.requires_grad and mine.tolist() == before,
        "gathered": distributed.gather_objects([{"rank": rank}] * (rank + 1)),
        "broadcast": distributed.broadcast_object(f"from {rank}"),
        "shard": distributed.shard(list(range(5))),
    }


def trained(device: torch.device) -> dict:
    """Different first weights and data on each rank; the gradient with and without averaging."""
    rank = distributed.rank()
    raw = nn.Linear(1, 1, bias=False)
    nn.init.constant_(raw.weight, 5.0 + rank)
    model = distributed.wrap(raw, device)
    x = torch.full((1, 1), 1.0 + rank)
    with distributed.no_sync(model):
        model(x).sum().backward()
    alone = raw.weight.grad.item()
    raw.weight.grad = None
    model(x).sum().backward()
    return {"weight": raw.weight.item(), "alone": alone, "together": raw.weight.grad.item(),
            "unwrapped": model is not raw and distributed.unwrap(model) is raw}


def reported(folder: str) -> dict:
    """Both ranks log; only rank 0 may write."""
    with Metrics(folder, "toy", total=1) as metrics:
        metrics.log({"step": 1, "rank": distributed.rank()})
    return {}
