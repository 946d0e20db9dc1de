"""`engine` and `bench`, installed as pagedattn.engine and pagedattn.bench, lie beside the library in a checkout."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_LIBRARY = Path(__file__).parent.parent


def load(name: str, library: Path = _LIBRARY) -> ModuleType:
    """`pagedattn.<name>`, also where nothing is installed: a checkout's own folder comes before any other.

    Raises:
        ModuleNotFoundError: it is neither installed nor in a checkout.
    """
    full, folder = f"pagedattn.{name}", library.parent / name
    beside = not (library / name).exists() and (library.parent / "setup.py").exists()
    if full in sys.modules or not beside or not (folder / "__init__.py").exists():
        return import_module(full)
    spec = spec_from_file_location(full, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{folder} cannot be imported as {full}")
    sys.modules[full] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(sys.modules["pagedattn"], name, module)
    return module
