"""What a loop overwrites is found in instructions as ptxas printed them."""

from __future__ import annotations

import pytest
from sass_loops import overwritten, product_loops

LOOP = """        /*0010*/                   LDSM.16.M88.4 R104, [R151+0x4000] ;   /* 0x0000 */
.L_x_15:
        /*0020*/                   HGMMA.64x64x16.F32 R24, R104, gdesc[UR32], RZ, !UPT, gsb0 ;
        /*0030*/                   {between}
        /*0040*/                   HGMMA.64x64x16.F32 R56, {weights}, gdesc[UR32].tnspB, R56, gsb0 ;
        /*0050*/              @!P5 BRA `(.L_x_15) ;
"""


@pytest.mark.parametrize(
    ("between", "weights", "found"),
    [
        ("F2FP.F16.F32.PACK_AB R104, R122, R123 ;", "R104", True),
        ("@P1 LDS.64 R102, [R13+0x3000] ;", "R112", False),
        ("@P1 LDS.128 R104, [R13+0x3000] ;", "R112", True),
        ("ISETP.GE.AND P4, PT, R105, 0x1, PT ;", "R112", False),
        ("STS [R104], R106 ;", "R112", False),
        ("F2FP.F16.F32.PACK_AB R112, R122, R123 ;", "R112", False),
    ],
)
@pytest.mark.parametrize("product", ["HGMMA.64x64x16.F32", "QGMMA.64x64x32.F32.E4M3.E4M3"])
def test_operands_of_the_next_round(between: str, weights: str, found: bool, product: str) -> None:
    text = LOOP.format(between=between, weights=weights).replace("HGMMA.64x64x16.F32", product)
    products = overwritten(text)
    assert [len(one) for one in product_loops(text)] == [3]
    assert [one.split(",")[1].strip() for one in products] == ["R104"] * found
