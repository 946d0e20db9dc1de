"""A few instructions of PTX, carried out by numpy: the inline assembly of Gluon kernels without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Registers = dict[str, np.ndarray[Any, Any]]
_HALVES = re.compile(r"\{\s*(\S+?)\s*,\s*(\S+?)\s*\}")


def run(text: str, inputs: Sequence[np.ndarray[Any, Any]], outputs: int) -> list[np.ndarray[Any, Any]]:
    """The outputs $0, $1, .. of a block of instructions whose later operands are the inputs, uint32: uint32, or uint16
    of halves."""
    registers: Registers = {f"${outputs + at}": value for at, value in enumerate(inputs)}
    for instruction in text.strip().strip("{}").split(";"):
        name, _, rest = instruction.strip().partition(" ")
        if name and not name.startswith("."):
            _carry_out(name, rest.strip(), registers)
    return [registers[f"${at}"] for at in range(outputs)]


def _carry_out(name: str, rest: str, registers: Registers) -> None:
    if name == "mov.b32" and (halves := _HALVES.search(rest)) and not rest.startswith("{"):
        low, high = (registers[one].astype(np.uint32) for one in halves.groups())
        registers[rest.split(",")[0]] = low | high << 16
        return
    if name == "mov.b32" and (halves := _HALVES.match(rest)):
        word = _value(rest.split(",")[-1], registers)
        registers[halves[1]], registers[halves[2]] = word.astype(np.uint16), (word >> 16).astype(np.uint16)
        return
    to, *operands = (one.strip() for one in rest.split(","))
    registers[to] = _INSTRUCTIONS[name](*(_value(one, registers) for one in operands))


def _value(operand: str, registers: Registers) -> np.ndarray[Any, Any]:
    operand = operand.strip()
    return registers[operand] if operand in registers else np.array(int(operand, 0), np.uint32)


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    word = np.zeros(a.shape, np.uint32)
    for at in range(4):
        chosen = selector >> np.uint32(4 * at) & np.uint32(15)
        byte = both >> (8 * (chosen & 7)).astype(np.uint64) & np.uint64(255)
        byte = np.where(chosen & 8, np.where(byte & 128, 255, 0), byte)
        word |= byte.astype(np.uint32) << np.uint32(8 * at)
    return word


def _by_table(a: Any, b: Any, c: Any, table: Any) -> Any:
    word = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for at in range(8):
        if int(table) >> at & 1:
            word |= (a if at & 4 else ~a) & (b if at & 2 else ~b) & (c if at & 1 else ~c)
    return word


def _of_halves(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on two float16 of a word each, rounded once: float64 has sums of their products exactly."""

    def carried_out(*words: Any) -> Any:
        words = np.broadcast_arrays(*words)
        halves = (np.ascontiguousarray(x)[..., None].view(np.float16).astype(np.float64) for x in words)
        return operation(*halves).astype(np.float16).view(np.uint32)[..., 0]

    return carried_out


def _halves_of(high: Any, low: Any) -> Any:
    both = np.stack((low, high), -1).view(np.float32)
    return both.astype(np.float16).view(np.uint32)[..., 0]


def _to_e4m3(halves: Any) -> Any:
    """Two float16 of a word as codes, in 16 bits."""
    both = torch.from_numpy(np.ascontiguousarray(halves)[..., None].view(np.float16).copy()).float()
    return both.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(np.uint16)[..., 0]


def _from_e4m3(codes: Any) -> Any:
    both = torch.from_numpy(np.ascontiguousarray(codes)[..., None].view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return both.half().numpy().view(np.uint32)[..., 0]


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": _permuted,
    "lop3.b32": _by_table,
    "shl.b32": lambda a, count: a << count,
    "shr.u32": lambda a, count: a >> count,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "add.rn.f16x2": _of_halves(lambda a, b: a + b),
    **dict.fromkeys(("sub.f16x2", "sub.rn.f16x2"), _of_halves(lambda a, b: a - b)),
    "mul.rn.f16x2": _of_halves(lambda a, b: a * b),
    "fma.rn.f16x2": _of_halves(lambda a, b, c: a * b + c),
    "mul.rn.f32": lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32),
    "cvt.rn.f16x2.f32": _halves_of,
    "cvt.rn.satfinite.e4m3x2.f16x2": _to_e4m3,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
}
