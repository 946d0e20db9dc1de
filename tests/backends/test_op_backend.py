"""The backends over `ops.paged_attention`, called without a layer's checks."""

from __future__ import annotations

import pytest
import torch

from pagedattn import AttentionCall, AttentionSpec, CommonAttentionMetadata
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.registry import get_backend
from pagedattn.errors import InvalidInputError


@pytest.mark.parametrize("backend", ["TORCH", "TRITON"])
def test_neither_cache_nor_keys(backend: str) -> None:
    rows = torch.randn(3, 2, 16)
    impl = get_backend(backend).impl(AttentionSpec(num_heads=2, head_dim=16))
    metadata = AttentionMetadata(CommonAttentionMetadata.from_lengths([3], [3]))
    for key, value in ((None, None), (rows, None), (None, rows)):
        with pytest.raises(InvalidInputError, match=r"^key and value must be given where there is no kv_cache"):
            impl.forward(AttentionCall(rows, None, key, value), metadata)
