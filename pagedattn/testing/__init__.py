"""What a backend is tested with: a float64 oracle, case factories, tolerances, and the conformance kit."""

from .case import Case
from .compare import assert_close
from .conformance import Report, conformance
from .oracle import attention_oracle
from .problem import Problem, make_problem

__all__ = ["Case", "Problem", "Report", "assert_close", "attention_oracle", "conformance", "make_problem"]
