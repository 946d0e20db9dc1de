"""Report: what the conformance kit found, for a test to raise and for a person to read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_MOST = 5  # reasons shown where everything was refused
_LONGEST = 300  # characters of one failure or reason that `describe` shows


@dataclass(slots=True)
class Report:
    """What ran, what the backend refused (with its own reasons), and what failed."""

    passed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    features: Counter[str] = field(default_factory=Counter)  # what refused cases asked for, a case maybe for several
    backend: str = ""
    device: str = ""

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing failed."""
        return bool(self.passed) and not self.failed

    def raise_for_failures(self) -> None:
        """Raise AssertionError naming every failed case; also where nothing ran at all."""
        if self.failed:
            raise AssertionError("\n".join(f"{case}: {why}" for case, why in self.failed.items()))
        if not self.passed:
            raise AssertionError(f"the backend refused every case: {self.refused}")

    def describe(self) -> str:
        """The verdict, every failure in a line, and what refused cases asked for."""
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.refused)} refused"
        verdict = "conforms" if self.ok else "does not conform" if self.failed else "refused every case"
        lines = [f"{self.backend} on {self.device}: {verdict} ({counts})"]
        lines += [f"  failed {case}: {_short(why.removeprefix(f'{case}: '))}" for case, why in self.failed.items()]
        if self.features:
            told = ", ".join(f"{feature} ({count})" for feature, count in self.features.most_common())
            lines.append(f"  cases refused, by what they ask for: {told}")
        if not self.passed:
            lines += [f"  refused: {_short(why)}" for why in dict.fromkeys(self.refused.values())][:_MOST]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
