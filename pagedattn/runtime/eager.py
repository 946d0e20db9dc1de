"""Whether a call may bypass torch's dispatcher: it is not compiled, traced, transformed or profiled."""

from __future__ import annotations

import torch

try:
    _modes = torch._C._len_torch_dispatch_stack
    _transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
    _tracing = torch._C._get_tracing_state
    _profiling = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
except AttributeError:  # a torch that names them otherwise: every call is dispatched
    _modes = _transform = _tracing = _profiling = None

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_compiling = torch.compiler.is_dynamo_compiling


def can_bypass_dispatcher() -> bool:
    """Whether no compiler, dispatch mode (fake tensors, export), functorch transform, trace or profiler is at work."""
    if _compiling() or _modes is None or _transform is None or _tracing is None or _profiling is None:
        return False
    return not _profiling() and not _modes() and _transform() is None and _tracing() is None


def is_plain_call(args: tuple[object, ...]) -> bool:
    """Whether torch would only call the implementation with these arguments of an op."""
    if not can_bypass_dispatcher():
        return False
    for arg in args:
        kind = type(arg)
        if kind in _PLAIN:
            if arg.is_meta or arg.is_neg():  # type: ignore[attr-defined]
                return False
        elif kind is list or isinstance(arg, torch.Tensor):  # lists hold tensors that would have to be looked at
            return False
    return True
