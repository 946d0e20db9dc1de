"""Codebooks: the levels of least squared error for standard normal elements (Lloyd-Max), as small integers.

Lloyd's iteration moves each level to the mean of the normal distribution over the elements nearest to it, until none
moves. Its optimum is flat, so that levels on a curve are as good: code c of b bits stands for t = 2c - (2**b - 1), and
its level is t * (t**2 + LINEAR) / 2**SHIFT, with 16 levels t * (t**2 * (t**2 + CUBIC) + LINEAR) / 2**SHIFT, rounded.
Kernels compute that by three to five integer operations: a table in registers took twice as many and spilled (sm_90).
The numbers were found by trying all that give at most 127, which every dtype that kernels multiply in holds exactly.
They cost 0.11 % more squared error than the optimum with 16 levels, 0.05 % with 8 and 0.0001 % with 4, which
`tests/test_format_turboquant.py` computes. Sources: Lloyd (1957), Max (1960).
"""

from __future__ import annotations

import struct

LINEAR, SHIFT = {2: 42, 3: 182, 4: 159600}, {2: 4, 3: 5, 4: 15}
CUBIC = 86
# What the standard deviation of elements is, in units of their levels.
UNITS = {2: 6.621, 3: 23.699, 4: 38.425}


def levels_of(bits: int) -> tuple[int, ...]:
    """Those of codes 0, 1, ...: the same numbers, negative and positive."""
    levels = []
    for code in range(1 << bits):
        t = 2 * code - ((1 << bits) - 1)
        curve = t * t * (t * t + CUBIC) if bits == 4 else t * t
        levels.append((t * (curve + LINEAR[bits]) + (1 << SHIFT[bits] - 1)) >> SHIFT[bits])
    return tuple(levels)


LEVELS = {bits: levels_of(bits) for bits in UNITS}
# Of the four levels of 2 bits as float16, whose lower bytes are 0.
UPPER_BYTES = tuple(struct.pack("<4e", *LEVELS[2])[1::2])


# Device code as well, so that it may name nothing but its arguments.
def edge_of(levels: tuple[int, ...], unit: float, at: int, dim: int) -> float:
    """From which magnitude on the positive level `at` + 1 is nearer than level `at`, as a share of a row's length."""
    first = len(levels) // 2 + at
    return (levels[first] + levels[first + 1]) / (2 * unit) * dim**-0.5
