"""Whether a step waits for the device, which a CUDA graph cannot have it do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedattn.errors import UnsupportedError


def run_without_waiting(run: Callable[[], object]) -> None:
    """Run a step on the current stream; everything that it compiles or chooses must have been by an earlier run.

    torch looks for operations that wait (`.item()`, `nonzero`, copies to the host) here, before a capture: one that
    fails leaves the allocator's pool as it was in the middle of it.

    Raises:
        UnsupportedError: an operation of torch waits for the device.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise UnsupportedError(f"the model's own code waits for the device in a forward ({error})") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
