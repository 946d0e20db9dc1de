"""Planning FlashInfer's wrappers: whose plan each holds, and the scratch memory they share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CapacityError, InvalidInputError, UnsupportedError

_ALIGNMENT = 16  # of a workspace; releases after 0.6.13 refuse another
START_BYTES, MOST_BYTES, INT_BYTES = 128 << 20, 2 << 30, 8 << 20
_OVERFLOW = re.compile(r"Buffer overflow when allocating memory for (\S+) with size (\d+).*? only (\d+) bytes")


@dataclass(slots=True)
class Workspace:
    """Scratch for partial results [bytes] uint8, zeroed; the calls of one stream never overlap, so they share it."""

    buffer: torch.Tensor
    owned: bool = True

    def grow(self, need: int) -> None:
        """Double, until `need` bytes fit.

        Raises:
            CapacityError: the caller gave the buffer, or it would exceed 2 GiB.
        """
        size = self.buffer.numel()
        if not self.owned:
            remedy = "pass one that large, or None for one that grows"
            raise CapacityError(f"workspace has {size} bytes, FlashInfer needs at least {need} for this step; {remedy}")
        size *= 2
        while size < need:
            size *= 2
        if size > MOST_BYTES:
            limit = f"workspaces end at {MOST_BYTES}"
            raise CapacityError(f"FlashInfer needs {need} bytes for this step, {limit}; use fewer sequences per step")
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=self.buffer.device)


_shared: dict[tuple[torch.device, int], Workspace] = {}


def shared_workspace(device: torch.device) -> Workspace:
    """The workspace of all builders on `device` and its current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _shared:
        _shared[device, stream] = Workspace(torch.zeros(START_BYTES, dtype=torch.uint8, device=device))
    return _shared[device, stream]


def given_workspace(buffer: torch.Tensor) -> Workspace:
    """A caller's buffer, zeroed; it never grows.

    Raises:
        InvalidInputError: it is not contiguous uint8 [bytes], or not aligned to 16 bytes.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidInputError("workspace", "contiguous uint8 [bytes]", f"{buffer.dtype} {list(buffer.shape)}")
    if buffer.data_ptr() % _ALIGNMENT:
        got = f"an address of {buffer.data_ptr() % _ALIGNMENT} modulo {_ALIGNMENT}"
        raise InvalidInputError("workspace", f"aligned to {_ALIGNMENT} bytes", got, "pass a whole tensor")
    return Workspace(buffer.zero_(), owned=False)


class Slot:
    """One wrapper, made at its first plan. It holds one plan at a time: `owner` is the part of a step it is for."""

    def __init__(self, make: Callable[[torch.Tensor], Any], workspace: Callable[[], Workspace]) -> None:
        self._make, self._workspace = make, workspace
        self._buffer: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self.wrapper: Any = None
        self.owner: Part | None = None
        self.captured = False  # a graph has recorded where the buffer lies: it stays

    def plan(self, part: Part) -> None:
        """Plan `part`, with a larger workspace where it needs one.

        Raises:
            CapacityError: the step needs more scratch than there may be.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the wrapper's pinned staging buffer is written by the host from here on
        workspace = self._workspace()
        self.owner = None
        while True:
            if not self.captured:
                self._bind(workspace.buffer)
            try:
                self.wrapper.plan(**part.arguments)
                break
            except Exception as error:  # the library's errors have no type of their own
                self._make_room(workspace, error)
        device = workspace.buffer.device
        if device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))
        self.owner = part

    def _bind(self, buffer: torch.Tensor) -> None:
        if self.wrapper is None:
            self.wrapper = self._make(buffer)
        elif buffer is not self._buffer and not hasattr(self.wrapper, "reset_workspace_buffer"):
            self.wrapper = self._make(buffer)  # the one of latent rows
        elif buffer is not self._buffer:
            integers = torch.empty(INT_BYTES, dtype=torch.uint8, device=buffer.device)
            self.wrapper.reset_workspace_buffer(buffer, integers)
        self._buffer = buffer

    def _make_room(self, workspace: Workspace, error: Exception) -> None:
        """Grow the workspace by what `error` says is missing; any other error is raised again."""
        found = _OVERFLOW.search(str(error))
        if found is None or self._buffer is None:
            raise error
        name, size, left = found[1], int(found[2]), int(found[3])
        if "_tmp_" not in name and "_partial_o" not in name and "_partial_lse" not in name:
            reason = f"FlashInfer's {INT_BYTES} bytes for schedules cannot hold {name} ({size} bytes)"
            raise CapacityError(f"{reason}; use fewer sequences or tokens per step") from error
        need = self._buffer.numel() - left + size + _ALIGNMENT
        if self.captured:
            has = self._buffer.numel()
            remedy = "capture again with a workspace that large"
            raise CapacityError(f"the captured workspace has {has} bytes, this step needs {need}; {remedy}") from error
        workspace.grow(need)


@dataclass(slots=True, eq=False)
class Part:
    """Rows first..last of a step, one wrapper's work: the arguments of its plan, kept to plan again."""

    kind: str  # decode, prefill or dense
    slot: Slot
    first: int
    last: int
    num_seqs: int
    num_keys: int
    arguments: dict[str, Any]

    def wrapper(self) -> Any:
        """The wrapper, planned for this part: again, if another step has planned it since.

        Raises:
            UnsupportedError: it would have to be planned inside a CUDA graph.
        """
        if self.slot.owner is not self:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    "this metadata's plan was replaced by a later build, and FlashInfer cannot plan while a CUDA graph "
                    "is captured; build with capture=True"
                )
            self.slot.plan(self)
        return self.slot.wrapper

    def describe(self) -> str:
        """Kind, kernel and number of sequences."""
        wrapper = self.slot.wrapper
        if wrapper is None:
            return f"{self.kind}, {self.num_seqs} sequences without keys"
        kernel = getattr(wrapper, "_backend", "auto")
        if self.kind == "decode":
            kernel = (
                f"{'fa2' if kernel == 'auto' else kernel} tensor cores" if wrapper.use_tensor_cores else "CUDA cores"
            )
        return f"{self.kind} {kernel}, {self.num_seqs} sequences" + (" (captured)" if self.slot.captured else "")
