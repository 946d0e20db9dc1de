"""Reads of uniform registers that some path reaches without having written them, in the SASS of one warp group.

ptxas 12.8 computes what two loops share of an address in the first one's preamble, though that loop may be skipped: the
second then reads what the register held before, and no message says so (pagedattn/kernels/prefill_sm90/README.md).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*(;|$)")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_GUARD = re.compile(r"^@(!?)(U?P\w+)\s+(.*)")
_TARGETS = ("U", "R2UR", "S2UR", "VOTEU")  # what begins so writes its first uniform register
_NO_TARGET = ("UISETP", "UPLOP3", "USETMAXREG", "UTMALDG", "UTMASTG", "UTMACMDFLUSH", "UBLKCP")


class Instruction(NamedTuple):
    """Where it stands, its text, what it reads and writes, and which instructions may come next."""

    address: int
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    after: tuple[int, ...]


def unwritten_reads(sass: str, begin: str) -> list[str]:
    """Instructions that read a uniform register which a path from the first one containing `begin` has not written,
    nor any instruction before that one in the listing."""
    code = _parse(sass)
    start = next(at for at, one in enumerate(code) if begin in one.text)
    written: dict[int, frozenset[int]] = {start: frozenset().union(*(one.writes for one in code[:start]))}
    todo = [start]
    while todo:
        at = todo.pop()
        leaves = written[at] | code[at].writes
        for after in code[at].after:
            meets = leaves if after not in written else leaves & written[after]
            if written.get(after) != meets:
                written[after] = meets
                todo.append(after)
    found = ((code[at], code[at].reads - has) for at, has in sorted(written.items()))
    return [f"{one.address:#x} {one.text}: UR{sorted(missing)}" for one, missing in found if missing]


def _parse(sass: str) -> list[Instruction]:
    lines, labels = [], {}
    for line in sass.splitlines():
        label = re.match(r"^\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(lines)
        match = _LINE.search(line)
        if match:
            lines.append((int(match[1], 16), match[2]))
    return [_instruction(at, address, text, labels, len(lines)) for at, (address, text) in enumerate(lines)]


def _instruction(at: int, address: int, text: str, labels: dict[str, int], count: int) -> Instruction:
    guard = _GUARD.match(text)
    body = guard[3] if guard else text
    name, _, operands = body.partition(" ")
    kind, wide = name.split(".")[0], name.endswith(".64") or ".WIDE" in name
    registers = [int(number) for number in _UNIFORM.findall(operands)]
    reads, writes = set(registers), set()
    if registers and kind.startswith(_TARGETS) and kind not in _NO_TARGET:
        writes = {registers[0], registers[0] + 1} if wide else {registers[0]}
        reads = set(registers[1:]) | (writes if guard else set())
    if kind in (
        "HGMMA",
        "QGMMA",
    ):  # a descriptor is two registers; two of them where both operands are in memory
        width = 2 if re.match(r"R\d+, R\d+,", operands) else 4
        reads |= {first + n for first in map(int, re.findall(r"gdesc\[UR(\d+)\]", operands)) for n in range(width)}
    target = re.search(r"\((\.L_x_\d+)\)", operands)
    following = () if at + 1 == count else (at + 1,)
    after: tuple[int, ...] = following
    if kind == "BRA":
        after = ((labels[target[1]],) if target else ()) + (following if guard else ())
    elif kind in ("EXIT", "BRX", "RET"):
        after = following if guard else ()
    return Instruction(address, text, frozenset(reads), frozenset(writes), after)
