"""Which operands of `wgmma` a loop overwrites, by the SASS of a kernel.

ptxas (12.8) gave weights the registers of queries that were loaded before a loop over keys, so that from its second
round on queries were the weights of the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ADDRESS = re.compile(r"/\*[0-9a-fx ]*\*/")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"BRA .*`\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"[HQ]GMMA\S* R\d+, R(\d+),")
_WRITE = re.compile(r"^\s*(?:@!?U?P\d+ )?([A-Z][\w.]*) (?:!?U?P\w+, )*R(\d+)\b")
_NO_WRITE = ("ST", "RED", "BAR", "BRA", "HGMMA", "QGMMA", "LDGSTS", "ISETP", "FSETP", "HSETP")


def overwritten(sass: str) -> list[str]:
    """Products in loops whose first operand is in registers that the loop does not write before them, but after."""
    return [
        product.strip()
        for body in _loops([_ADDRESS.sub("", line) for line in sass.splitlines()])
        for at, product in enumerate(body)
        if (found := _PRODUCT.search(product))
        and ({int(found[1]) + i for i in range(4)} - _written(body[:at])) & _written(body[at + 1 :])
    ]


def _loops(lines: list[str]) -> Iterator[list[str]]:
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    for at, line in enumerate(lines):
        if (found := _BRANCH.search(line)) and labels.get(found[1], at) < at:
            yield lines[labels[found[1]] : at]


def _written(lines: list[str]) -> set[int]:
    found = (_WRITE.match(line) for line in lines)
    return {
        int(one[2]) + i for one in found if one and not one[1].startswith(_NO_WRITE) for i in range(_registers(one[1]))
    }


def _registers(instruction: str) -> int:
    if ".128" in instruction or instruction.startswith("LDSM"):
        return 4
    return 2 if ".64" in instruction or "WIDE" in instruction or instruction == "CS2R" else 1
