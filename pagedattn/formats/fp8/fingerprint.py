"""fingerprint: which weights file this is, without reading all of it."""

from __future__ import annotations

from pathlib import Path

import xxhash

_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10
_MAX_HEADER_BYTES = 100_000_000


def fingerprint(path: Path) -> str:
    """A hash of a safetensors file's size, its header, and 64 KiB at 16 offsets spread over its data.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))
        digest.update(header)
        begin = 8 + len(header)
        last = max(begin, size - _SAMPLE_BYTES)
        for sample in range(_SAMPLES):
            file.seek(begin + (last - begin) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
