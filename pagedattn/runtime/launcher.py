"""Launches of Triton kernels without Triton's own dispatch, which looks at each argument anew (11 us for 45 of them).

`Launcher` finds the compiled kernel of a launch by one dictionary lookup. What it returns, a `Launch`, is made again
with other tensors of the same layout by `Replay`, which looks nothing up at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .. import env
from .launch_abi import KNOWN, Entry, PlacedDescriptor, entry_of
from .op_registry import interpreted

if interpreted():
    from . import interpreter as _interpreter  # noqa: F401 - it mends on import

_MOST_KERNELS = 4096
_recordings = local()  # of each thread: the list that launches are added to while `recording`
_LONG = 1 << 31  # from here on an integer is an int64 to Triton
_runtime = knobs.runtime
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # without the latter's 0.2 us


def hooked() -> bool:
    """Whether a profiler wants to see every launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


Place = tuple[int, int, int]  # positions in a launch's arguments and in the values, and an offset in bytes
_FAR = 1 << 63


class Launch(NamedTuple):
    """A launch that was made. The compiled kernel was called with `head`, the grid, the stream, ..., and `values`, the
    kernel's arguments, tensors as addresses. scratch: positions in args of tensors that hold nothing between calls, and
    which one each is."""

    device: int
    entry: Entry
    head: list[Any]
    values: list[Any]
    args: Sequence[Any]
    varying: Sequence[tuple[int, int]]  # positions in args, and in the values that `Replay` is given
    scratch: Sequence[tuple[int, int]] = ()

    def repeatable(self) -> bool:
        """Whether the kernel was compiled for aligned tensors, as `Replay` gives it."""
        tensors = [at for at, _ in self.varying if isinstance(self.args[at], torch.Tensor)]
        return bool(tensors) and not any(self.values[at] & 15 for at in tensors)

    def places(self, bases: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor] = ()) -> list[Place] | None:
        """Where `Replay` puts what varies: positions in arguments and in values, and offsets in bytes.

        Args:
            bases: what the call was made with, in the order of `varying`. others: whose addresses follow the values,
                for arguments that lie elsewhere.

        Returns:
            None where an argument lies in no tensor, or in one that is not aligned as what `Replay` is given.
        """
        found = list[Place]()
        for at, index in self.varying:
            arg = self.args[at]
            if isinstance(arg, int | float):
                found.append((at, index, 0))
            elif arg is not None:
                start = (arg.base if _is_descriptor(arg) else arg).data_ptr()
                able = ((index, bases[index]), *enumerate(others, len(bases)))
                # The nearest one: a block has keys and values, so that the one lies in the other.
                near = [(_distance(start, base), number) for number, base in able if base is not None]
                distance, number = min(near, default=(_FAR, 0))
                if distance == _FAR:
                    return None
                found.append((at, number, distance))
        return found


@contextmanager
def recording() -> Iterator[list[Launch | None]]:
    """Every launch by a `Launcher` of this thread meanwhile; None for one that cannot be made again."""
    before, launches = getattr(_recordings, "launches", None), []
    _recordings.launches = launches
    try:
        yield launches
    finally:
        _recordings.launches = before


class Launcher:
    """A Triton kernel, and what it was compiled to for every kind of launch so far.

    A kind is every integer's value (its size alone where the kernel says `do_not_specialize`), every tensor's dtype and
    alignment, constants, options and device: finer than what Triton specialises on, so that what is found is what
    Triton would choose. Triton itself serves the first launch of a kind, and every launch in the interpreter, under a
    profiler's hooks or of a version not known here.

    Args:
        varying: names of tensor, tensor descriptor and float parameters that a `Launch` can be given anew; those that
            the kernel does not have are passed over. `more_x` is a second descriptor of tensor x.
        scratch: names of tensors and descriptors, not among the varying ones, that hold nothing before the first and
            after the last launch of a call: kernels that share them have them in one order.
    """

    def __init__(self, kernel: Any, varying: Sequence[str] = (), scratch: Sequence[str] = ()) -> None:
        self._kernel = kernel
        self._names: list[str] = kernel.arg_names
        tensors = [name.removeprefix("more_") for name in self._names]
        self._scratch = [(at, scratch.index(name)) for at, name in enumerate(self._names) if name in scratch]
        self._varying = [
            (at, varying.index(name)) for at, name in enumerate(tensors) if name in varying and name not in scratch
        ]
        self._direct = KNOWN and env.replay() and isinstance(kernel, JITFunction)
        self._any_value = {param.num for param in kernel.params if param.do_not_specialize} if self._direct else set()
        self._entries: dict[tuple[Any, ...], Entry] = {}

    def __call__(
        self,
        grid: Sequence[int],
        args: Sequence[Any],
        constants: dict[str, Any],
        fixed: Sequence[str] = (),
        **options: Any,
    ) -> Launch | None:
        """Launch on the current device, which must be that of the tensors, and its current stream.

        Args:
            args: the kernel's parameters before the constants: tensors or tensor descriptors (the first of all is one),
                numbers and None.
            constants: the tl.constexpr parameters, always in one order.
            fixed: names of varying parameters that are not to vary when this launch is made again.

        Returns:
            How to do so again with other varying arguments, or None where that cannot be.
        """
        launch = self._launch(grid, args, constants, options)
        if launch is not None and fixed:
            launch = launch._replace(varying=[one for one in launch.varying if self._names[one[0]] not in fixed])
        launches = getattr(_recordings, "launches", None)
        if launches is not None:
            # What cannot be made again keeps no tensors: they may be large, and are to be freed before the next launch.
            launches.append(launch if launch is not None and launch.varying else None)
        return launch

    def _launch(
        self, grid: Sequence[int], args: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
    ) -> Launch | None:
        if not self._direct or hooked() or self._kernel.pre_run_hooks:
            self._dispatch(grid, args, constants, options)
            return None
        device = (args[0].base if _is_descriptor(args[0]) else args[0]).device.index or 0
        kind: list[Any] = [device, *constants.values(), *options.values()]
        values: list[Any] = []
        for at, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                values.append(address)
                kind += (arg.dtype, not address & 15)
                continue
            values.append(arg)
            if type(arg) is float:  # not specialised on
                kind.append(float)
            elif type(arg) is int:
                kind.append(-_LONG <= arg < _LONG if at in self._any_value else arg)
            elif _is_descriptor(arg):
                kind.append((type(arg), arg.base.dtype, *arg.block_shape, repr(getattr(arg, "layout", None))))
            else:  # with its type: True would equal 1
                kind.append((type(arg), arg))
        key = tuple(kind)
        entry, stream = self._entries.get(key), driver.active.get_current_stream(device)
        sizes = (*grid, 1, 1)[:3]
        values += [None] * (len(self._names) - len(args))  # constants are compiled in
        if entry is not None:
            head = [*sizes, stream, *entry.head]
            if entry.packed:
                entry.call(*head, values)
            else:
                entry.call(*head, *values)
            return self._made(device, entry, head, values, args)
        compiled = self._dispatch(grid, args, constants, options)
        if compiled is None or compiled.metadata.target.backend != "cuda":
            return None
        entry = entry_of(compiled)
        if len(self._entries) >= _MOST_KERNELS:
            self._entries.clear()
        self._entries[key] = entry
        return self._made(device, entry, [*sizes, stream, *entry.head], values, args)

    def _made(self, device: int, entry: Entry, head: list[Any], values: list[Any], args: Sequence[Any]) -> Launch:
        return Launch(device, entry, head, values, args, self._varying, self._scratch)

    def _dispatch(
        self, grid: Sequence[int], args: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        """Launch by Triton itself; returns the compiled kernel."""
        if isinstance(self._kernel, JITFunction):
            # Triton 3.10 rounds products before it adds them unless it is asked not to, and 3.9 warns of that.
            options.setdefault("enable_fp_fusion", True)
        return self._kernel[tuple(grid)](*args, **constants, **options)


class Replay:
    """Launches made in a row, to be made again for other tensors of the same dtypes, shapes, strides and device."""

    def __init__(self, launches: Sequence[Launch], places: Sequence[Sequence[Place]] | None = None) -> None:
        """places: of each launch, as `Launch.places` gives them; where not given, values are arguments."""
        self._device = launches[0].device
        self._stream = driver.active.get_current_stream
        # What is called with what, and where values go: as they are, and as addresses of tensor descriptors.
        self._made: list[tuple[Entry, list[Any], list[Any], list[Place], list[Place]]] = []
        self._kept: list[Any] = []  # tensors whose addresses do not vary
        scratch: dict[int, torch.Tensor] = {}
        for number, launch in enumerate(launches):
            vary = [(at, index, 0) for at, index in launch.varying] if places is None else list(places[number])
            for at, which in launch.scratch:
                if isinstance(launch.args[at], torch.Tensor):
                    scratch.setdefault(which, launch.args[at])
                vary.append((at, -1 - which, 0))  # behind the values, counted from the end
            vary = [one for one in vary if launch.args[one[0]] is not None]
            varied = {at for at, *_ in vary}
            self._kept += [x for at, x in enumerate(launch.args) if at not in varied and isinstance(x, torch.Tensor)]
            described = [one for one in vary if _is_descriptor(launch.args[one[0]])]
            given = [one for one in vary if not _is_descriptor(launch.args[one[0]])]
            values = launch.values.copy()
            for at, *_ in described:  # without its tensor
                values[at] = PlacedDescriptor(values[at], 0)
            self._made.append((launch.entry, launch.head, values, given, described))
        about = [scratch.get(which) for which in range(max(scratch, default=-1) + 1)]
        self._scratch = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in reversed(about)]

    def __call__(self, addresses: int, values: Sequence[Any]) -> bool:
        """Launch with these values in the order of `varying`; `addresses` is all of theirs or-ed together.

        Returns:
            False, and nothing is launched, where the kernels were not compiled for these or a profiler is watching.
        """
        if addresses & 15 or hooked():
            return False
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(addresses, values)
        stream = self._stream(self._device)
        if self._scratch:
            fresh = [None if x is None else torch.empty_strided(*x[:2], dtype=x[2], device=x[3]) for x in self._scratch]
            values = (*values, *(None if x is None else x.data_ptr() for x in fresh))
        for entry, head, arguments, given, described in self._made:
            head, made = head.copy(), arguments.copy()
            head[3] = stream
            for at, index, offset in given:
                made[at] = values[index] + offset
            for at, index, offset in described:
                made[at] = PlacedDescriptor(arguments[at], values[index] + offset)
            if entry.packed:
                entry.call(*head, made)
            else:
                entry.call(*head, *made)
        return True


def _distance(address: int, tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to an address; _FAR for one outside, or of a tensor that is not aligned."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    distance = address - tensor.data_ptr()
    inside = 0 <= distance < (last + 1) * tensor.element_size()
    return distance if inside and not tensor.data_ptr() & 15 else _FAR


def _is_descriptor(arg: Any) -> bool:
    """Whether it is a TensorDescriptor, Triton's or Gluon's; its base stands where the varying tensor starts."""
    return hasattr(arg, "block_shape")
