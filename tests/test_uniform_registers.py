"""The check for uniform registers that a path reads unwritten finds what ptxas did, and nothing where it did not."""

from __future__ import annotations

import pytest
from uniform_registers import unwritten_reads

SKIPPED = """
        /*0000*/                   R2UR UR5, R0 ;
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   UIADD3 UR24, UP0, UR5, 0x2, URZ ;
.L_x_1:
        /*0040*/                   UIADD3 UR16, UP0, UR24, 0x2, URZ ;
        /*0050*/                   EXIT ;
"""
LOOP = """
        /*0000*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*0010*/                   UMOV UR8, URZ ;
        /*0020*/                   UMOV.64 UR10, URZ ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0040*/                   UIADD3 UR9, UP0, UR8, 0x2, URZ ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_a_write_that_a_path_skips() -> None:
    assert unwritten_reads(SKIPPED, "USETMAXREG") == ["0x40 UIADD3 UR16, UP0, UR24, 0x2, URZ: UR[24]"]


def test_half_a_descriptor() -> None:
    found = unwritten_reads(LOOP, "USETMAXREG")
    assert found == ["0x30 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT: UR[9]"]


@pytest.mark.parametrize("written_first", ["/*0015*/ UMOV UR24, URZ ;\n", "/*0005*/ R2UR UR24, R1 ;\n"])
def test_written_on_every_path(written_first: str) -> None:
    """Also where that is before the part that is looked at."""
    place = "/*0020*/" if "0015" in written_first else "/*0010*/"
    assert unwritten_reads(SKIPPED.replace(place, written_first + place), "USETMAXREG") == []
