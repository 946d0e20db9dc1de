"""The ranks of one model and what they do together."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

# No setting: the driver ends ranks that hang, by step_timeout and heartbeat_timeout. This limit only must not be first,
# as torch would end the process without a word to the driver.
_COLLECTIVE_LIMIT = timedelta(days=1)


class TPGroup(Protocol):
    """One rank's view of the group: `rank` of `size`, and the collectives, which every rank calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, in place; bit for bit the same on all ranks."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, m] of every rank, all of one shape, to [size, n, m]."""
        ...

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        ...


class ProcessTPGroup:
    """A group of processes, over NCCL on GPUs and gloo on CPUs. They meet at a file and listen on loopback only."""

    def __init__(self, rank: int, size: int, meeting_file: str, device: torch.device) -> None:
        """Join the group; returns when all ranks have.

        Args:
            meeting_file: a path that leads every rank to the same empty file, to be read and written by them alone.
            device: what tensors of this rank live on.
        """
        self.rank, self.size, self._device = rank, size, device
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = "lo"
        # torch's own watchdog would look into the store for the whole life of the group.
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        gpu = device.type == "cuda"
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=dist.FileStore(meeting_file, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=_COLLECTIVE_LIMIT,
            device_id=device if gpu else None,
        )
        # torch 2.13 renamed it and warns of the old name at each call.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self.smallest(0)  # takes the communicator's memory before anything is measured

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As `TPGroup.all_reduce`."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As `TPGroup.all_gather`."""
        out = x.new_empty(self.size * x.shape[0], x.shape[1])
        self._gather(out, x.contiguous())
        return out.view(self.size, *x.shape)

    def smallest(self, value: int) -> int:
        """As `TPGroup.smallest`."""
        held = torch.tensor([value], device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held.item())
