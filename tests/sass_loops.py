"""The loops of a kernel that multiply matrices, by its SASS, and which operands of `wgmma` they overwrite.

ptxas (12.8) gave weights the registers of queries that were loaded before a loop over keys, so that from its second
round on queries were the weights of the one before.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"/\*[0-9a-fx ]*\*/")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"BRA .*`\((\.L_x_\d+)\)")
_MULTIPLIED = re.compile(r"\b[HQ]G?MMA\b")
_NAME = re.compile(r"^\s*(?:@!?U?P\d+ )?([A-Z][\w.]*)")
_PRODUCT = re.compile(r"[HQ]GMMA\S* R\d+, R(\d+),")
_WRITE = re.compile(r"^\s*(?:@!?U?P\d+ )?([A-Z][\w.]*) (?:!?U?P\w+, )*R(\d+)\b")
_NO_WRITE = ("ST", "RED", "BAR", "BRA", "HGMMA", "QGMMA", "LDGSTS", "ISETP", "FSETP", "HSETP")


def overwritten(sass: str) -> list[str]:
    """Products in loops whose first operand is in registers that the loop does not write before them, but after."""
    lines = [_ADDRESS.sub("", line) for line in sass.splitlines()]
    return [
        product.strip()
        for first, last in _spans(lines)
        for body in [lines[first:last]]
        for at, product in enumerate(body)
        if (found := _PRODUCT.search(product))
        and ({int(found[1]) + i for i in range(4)} - _written(body[:at])) & _written(body[at + 1 :])
    ]


def product_loops(sass: str) -> list[list[str]]:
    """Names of the instructions of each loop that multiplies matrices and has no such loop inside."""
    lines = [_ADDRESS.sub("", line) for line in sass.splitlines()]
    spans = [(first, last) for first, last in _spans(lines) if any(_MULTIPLIED.search(x) for x in lines[first:last])]
    inner = (one for one in spans if not any(one[0] <= x[0] and x[1] <= one[1] and x != one for x in spans))
    return [[found[1] for line in lines[a:b] if (found := _NAME.match(line))] for a, b in inner]


def _spans(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line of each loop, to the farthest branch that goes back to its first."""
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    ends = dict[int, int]()
    for at, line in enumerate(lines):
        if (found := _BRANCH.search(line)) and labels.get(found[1], at) < at:
            ends[labels[found[1]]] = at
    return [*ends.items()]


def _written(lines: list[str]) -> set[int]:
    found = (_WRITE.match(line) for line in lines)
    return {
        int(one[2]) + i for one in found if one and not one[1].startswith(_NO_WRITE) for i in range(_registers(one[1]))
    }


def _registers(instruction: str) -> int:
    if ".128" in instruction or instruction.startswith("LDSM"):
        return 4
    return 2 if ".64" in instruction or "WIDE" in instruction or instruction == "CS2R" else 1
