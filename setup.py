"""Where the packages lie; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

library = find_packages(include=["pagedattn", "pagedattn.*"], exclude=["pagedattn.engine", "pagedattn.engine.*"])
engine = ["pagedattn.engine", *(f"pagedattn.engine.{name}" for name in find_packages("engine"))]
setup(
    packages=[*library, *engine],
    package_dir={"pagedattn.engine": "engine"},
    package_data={"pagedattn": ["py.typed"]},
)
