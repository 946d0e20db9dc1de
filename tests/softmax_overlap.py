"""What ptxas made of the loops over keys: does the softmax still run beside the products it was written beside?"""

from __future__ import annotations

import re

_LABEL, _CODE = re.compile(r"\.(L_x_\d+):"), re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);")
_BACK = re.compile(r"BRA.*`\(\.(L_x_\d+)\)")


def softmax_beside_products(sass: str) -> list[float]:
    """For each innermost loop with products: the share of its exponentials that stand before it waits for the last of
    them, in the order of the code."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _CODE.search(line):
            code.append(found[1].strip())
    loops = []
    for end, text in enumerate(code):
        back = _BACK.search(text)
        if back and labels.get(back[1], end) < end:
            loops.append((labels[back[1]], end))
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] for b in loops if b != a)]
    shares = []
    for begin, end in inner:
        body = code[begin:end]
        waits = [i for i, text in enumerate(body) if "WARPGROUP.DEPBAR" in text and text.endswith("0x0")]
        exponentials = [i for i, text in enumerate(body) if "MUFU.EX2" in text]
        if waits and exponentials and any("HGMMA" in text for text in body):
            shares.append(round(sum(i < waits[-1] for i in exponentials) / len(exponentials), 2))
    return shares
