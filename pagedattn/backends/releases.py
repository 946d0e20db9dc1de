"""Which releases of a library an adapter serves, and what to install where another is found."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..runtime.distributions import release_of


@dataclass(frozen=True, slots=True)
class Releases:
    """From `oldest` to the end of the series (major.minor) of `newest`, the newest whose interface was compared."""

    distribution: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    @property
    def installed(self) -> str | None:
        """The release that is here, as `release_of`."""
        return release_of(self.distribution)

    @property
    def requirement(self) -> str:
        """What pip is to be given: `flashinfer-python>=0.6.13,<0.8`."""
        major, minor = _series(self.newest)
        return f"{self.distribution}>={self.oldest},<{major}.{minor + 1}"

    def refusal(self, found: str) -> str:
        """Why release `found` is not served; empty where it is."""
        if precedence(found) < precedence(self.oldest):
            return f"{self.distribution} {found} is older than {self.oldest}"
        if _series(found) > _series(self.newest):
            return f"{self.distribution} {found} is of a newer series than {self.newest}, the newest tried"
        return ""


def precedence(release: str) -> tuple[tuple[int, ...], int, int]:
    """What releases sort by: 4.0.0b36 is before 4.0.0, and 2.8.3.post2 and 2.8.3+cu13 are as 2.8.3."""
    match = re.match(r"(\d+(?:\.\d+)*)(?:\.?(a|b|rc)(\d+))?", release)
    if match is None:
        return (), 0, 0
    numbers = [*map(int, match[1].split(".")), 0, 0]
    return tuple(numbers[:3]), ("a", "b", "rc", None).index(match[2]), int(match[3] or 0)


def _series(release: str) -> tuple[int, ...]:
    return precedence(release)[0][:2]
