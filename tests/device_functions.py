"""Device functions of Gluon as Python's, of torch tensors, and inline assembly by `ptx.py`: what has no layout."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from triton.language import constexpr
from triton.runtime.jit import JITFunction


class Values(torch.Tensor):
    """A tensor that has a layout, which says nothing."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


def values(x: torch.Tensor) -> Values:
    return x.as_subclass(Values)


def as_python(monkeypatch: pytest.MonkeyPatch, modules: Sequence[ModuleType]) -> None:
    """Have the device functions and constants of modules be Python's for a test."""
    for module in modules:
        for name, found in [*vars(module).items()]:
            if isinstance(found, JITFunction):
                monkeypatch.setattr(module, name, found.fn)
            elif isinstance(found, constexpr):
                monkeypatch.setattr(module, name, found.value)
        if hasattr(module, "gl"):
            monkeypatch.setattr(module, "gl", LANGUAGE)


def _assembly(
    text: str, constraints: str, inputs: Sequence[torch.Tensor], dtypes: Any, is_pure: bool, pack: int
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    given = torch.broadcast_tensors(*(x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in inputs))
    shape, outputs = given[0].shape, constraints.count("=")
    words = []
    for x in given:
        flat = x.contiguous().as_subclass(torch.Tensor).flatten().numpy().view(np.uint32)
        each = max(pack * x.element_size() // 4, 1)  # registers of an operand
        words += [np.ascontiguousarray(flat[at::each]) for at in range(each)]
    found = ptx.run(text, words, outputs)
    kinds = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    tensors = [
        values(torch.from_numpy(np.ascontiguousarray(x)).view(_dtype(kind)).reshape(shape))
        for x, kind in zip(found, kinds, strict=True)
    ]
    return tuple(tensors) if isinstance(dtypes, tuple) else tensors[0]


def _dtype(kind: Any) -> torch.dtype:
    """Of one of Triton's, or of torch's."""
    return kind if isinstance(kind, torch.dtype) else {"fp16": torch.float16, "int32": torch.int32}[kind.name]


def _layout(registers: Any, lanes: Any, warps: Any, blocks: Any, shape: Any) -> SimpleNamespace:
    return SimpleNamespace(reg_bases=registers, lane_bases=lanes, warp_bases=warps, shape=shape)


LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x,
    float16=torch.float16,
    float32=torch.float32,
    int32=torch.int32,
    float8e4nv=torch.float8_e4m3fn,
    DistributedLinearLayout=_layout,
    SliceLayout=lambda *_: None,
    DotOperandLayout=lambda *_: None,
    inline_asm_elementwise=_assembly,
    arange=lambda first, end, layout: torch.arange(first, end, dtype=torch.int32),
    zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
    full_like=torch.full_like,
    where=torch.where,
    max=torch.amax,
    maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
    exp2=torch.exp2,
    join=lambda a, b: torch.stack((a, b), -1),
    split=lambda x: x.unbind(-1),
    expand_dims=torch.unsqueeze,
    broadcast=torch.broadcast_tensors,
    convert_layout=lambda x, *_, **__: x,
    static_range=range,
)
