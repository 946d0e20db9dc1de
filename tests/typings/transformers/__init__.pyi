# For pyright alone, which would read the code of all of its models: 2,700 files for a few names.
from typing import Any

def __getattr__(name: str) -> Any: ...
