"""What a backend is tested with: a float64 oracle, case factories, tolerances, and the conformance kit.

`CASES`, `MLA_CASES`, `make_problem` and `check` are for a test per case: `check(Backend, make_problem(case))`.
`interpreted`, `has_triton`, `csrc_status`, `csrc_op` and `path_of` say what can run here, and on which path.
"""

from ..runtime.op_registry import csrc_op, csrc_status, has_triton, interpreted, path_of
from .case import Case
from .cases import CASES, MLA_CASES
from .compare import assert_close
from .conformance import check, conformance
from .mla_oracle import mla_absorbed_oracle, mla_expanded_oracle
from .oracle import attention_oracle
from .problem import Problem, make_problem
from .report import Report

__all__ = [
    "CASES",
    "MLA_CASES",
    "Case",
    "Problem",
    "Report",
    "assert_close",
    "attention_oracle",
    "check",
    "conformance",
    "csrc_op",
    "csrc_status",
    "has_triton",
    "interpreted",
    "make_problem",
    "mla_absorbed_oracle",
    "mla_expanded_oracle",
    "path_of",
]
