"""What TRITON builds for a step: which kernels it names, and whose workspace its calls use."""

from __future__ import annotations

import pytest
import torch

from pagedattn import AttentionSpec, CommonAttentionMetadata
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.triton import metadata as triton_metadata
from pagedattn.backends.triton.metadata import TritonMetadata, TritonMetadataBuilder
from pagedattn.kernels.decode import cascade
from pagedattn.kernels.prefill_sm90 import support, tile_schedule
from pagedattn.ops.attention_plan import Work
from pagedattn.runtime.workspace import COUNTERS

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of what a kernel fills
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16, block_size=16)


def step(*query_lens: int, keys: int = 400, device: torch.device = CPU) -> CommonAttentionMetadata:
    table = torch.zeros(len(query_lens), 512, dtype=torch.int32, device=device)
    return CommonAttentionMetadata.from_lengths(query_lens, [keys] * len(query_lens), table)


def workspace(metadata: AttentionMetadata) -> torch.Tensor | None:
    assert isinstance(metadata, TritonMetadata)
    return metadata.workspace


@pytest.mark.parametrize(
    ("lens", "text"),
    [
        ((1, 1), "decode kernel: 2 sequences (16 programs, tiles of 128 keys)"),
        ((1, 5, 16), "decode kernel: 3 sequences (42 programs, tiles of 64 keys)"),
        (
            (1, 1, 40),
            "decode kernel: 2 sequences (16 programs, tiles of 128 keys), "
            "prefill kernel: 1 sequences (the portable one: no Hopper GPU)",
        ),
        ((40, 1), "prefill kernel: 2 sequences (the portable one: no Hopper GPU)"),
        ((0, 0), "nothing to do"),
    ],
)
def test_it_says_which_kernels_run(lens: tuple[int, ...], text: str) -> None:
    assert TritonMetadataBuilder(SPEC, CPU).build(step(*lens)).describe() == text


def test_launches_are_planned_once_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, real = [], triton_metadata.launches

    def launches(*args: int, **facts: bool) -> list[Work]:
        planned.append(args)
        return real(*args, **facts)

    monkeypatch.setattr(triton_metadata, "launches", launches)
    metadata = TritonMetadataBuilder(SPEC, CPU).build(step(1, 1, 40))
    assert metadata.describe().count("kernel") == 2 and len(planned) == 1


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("shared", [0, 384])
@pytest.mark.parametrize("lens", [(1, 1, 40), (1,) * 80, (8,) * 80, (8,) * 20, (40, 33), (0, 1, 16)], ids=len)
def test_a_step_is_planned_as_the_op_will_run_it(
    lens: tuple[int, ...], shared: int, capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured metadata know less than their step: not how many decode, unless all do."""
    monkeypatch.setattr(support, "why_not_here", lambda device: "")
    monkeypatch.setattr(cascade, "SAVED_BYTES", 0)
    for keys in (400, 3000):
        common = step(*lens, keys=keys, device=DEVICE).replace(shared_prefix_len=shared)
        metadata = TritonMetadataBuilder(SPEC, DEVICE).build(common, capture=capture)
        assert isinstance(metadata, TritonMetadata)
        built, joined = metadata.common, metadata.prefix is None
        assert metadata.launches == triton_metadata._launches(SPEC, built, joined)
        prefilled = sum(work.last - work.first for work in metadata.launches if work.kernel == "prefill")
        assert (metadata.items is not None) == (prefilled > 0)
        assert not prefilled or {sequence for *_, sequence in listed(metadata)} <= {*range(prefilled)}


def test_prompts_on_long_contexts_without_the_kernel_for_hopper() -> None:
    """Launches of the decode kernel, planned as the op runs them, with room for both."""
    for lens in ((40,), (1, 1, 40)):
        metadata = TritonMetadataBuilder(SPEC, CPU).build(step(*lens, keys=3000))
        assert isinstance(metadata, TritonMetadata) and metadata.items is None
        assert [(work.kernel, work.longest) for work in metadata.launches][-1] == ("decode", 40)
        assert metadata.describe().count("decode kernel") == len({*lens}) and metadata.workspace is not None
        longest = triton_metadata._configs(SPEC, metadata.common, metadata.launches[-1], None)
        assert metadata.workspace.numel() >= longest[0].workspace


def test_several_tokens_of_many_sequences_are_the_prompt_kernels_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "why_not_here", lambda device: "")
    monkeypatch.setattr(cascade, "SAVED_BYTES", 0)
    builder = TritonMetadataBuilder(SPEC, DEVICE)
    many = step(*[8] * 80, device=DEVICE)
    assert builder.build(many).describe() == "prefill kernel: 80 sequences (for Hopper)"
    sharing = builder.build(many.replace(shared_prefix_len=384))
    assert sharing.describe().startswith("decode kernel: 80 sequences") and sharing.shares_prefix
    assert "decode kernel" in builder.build(step(*[8] * 20, device=DEVICE)).describe()


def test_a_deterministic_step_has_no_workspace() -> None:
    metadata = TritonMetadataBuilder(SPEC.replace(deterministic=True), CPU).build(step(1, 1))
    assert (
        workspace(metadata) is None
        and metadata.describe() == "prefill kernel: 2 sequences (the portable one: deterministic)"
    )


def test_one_workspace_that_grows() -> None:
    builder = TritonMetadataBuilder(SPEC, CPU)
    first, again, small = (workspace(builder.build(step(*lens))) for lens in ((1, 1), (1, 1), (1,)))
    assert first is not None and first is again is small
    assert not first[: 3 * COUNTERS].any()
    large = workspace(builder.build(step(*[1] * 8, keys=8000)))
    assert large is not None and large.numel() > first.numel()
    assert workspace(builder.build(step(1, 1))) is large
    assert workspace(builder.build(step(40))) is None


def test_a_captured_step_keeps_its_own() -> None:
    builder = TritonMetadataBuilder(SPEC, CPU)
    eager = workspace(builder.build(step(1, 1)))
    captured = builder.build(step(1, 1), capture=True)
    mine = workspace(captured)
    assert mine is not None and mine is not eager
    builder.build(step(*[1] * 8, keys=8000), capture=True)
    assert builder.build(step(1, 1, keys=90), into=captured) is captured and workspace(captured) is mine


def test_a_step_first_built_inside_a_capture_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What zeroes its counters is only recorded then, and runs when that one graph does."""
    builder = TritonMetadataBuilder(SPEC, CPU)
    monkeypatch.setattr(triton_metadata, "_is_being_captured", lambda device: True)
    first, second = (workspace(builder.build(step(1, 1))) for _ in range(2))
    assert first is not None and second is not None and first is not second
    monkeypatch.undo()
    later = workspace(builder.build(step(1, 1)))
    assert later is not first and later is not second


def listed(metadata: AttentionMetadata) -> list[list[int]]:
    """First token, tokens and sequence of each item."""
    assert isinstance(metadata, TritonMetadata) and metadata.items is not None
    entries = metadata.items[2 : 2 + int(metadata.items[1, 0])]
    return entries[:, [0, 1, 4]].tolist()


def test_on_hopper_prompts_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "why_not_here", lambda device: "")
    spec = SPEC.replace(dtype=torch.float16, head_dim=64, block_size=None)
    builder = TritonMetadataBuilder(spec, DEVICE)
    metadata = builder.build(step(1, 1, 400, 33, keys=1500, device=DEVICE))
    assert "prefill kernel: 2 sequences (for Hopper" in metadata.describe()
    tokens = tile_schedule.tokens_of(spec.gqa_ratio)
    expected = [[2 + done, min(tokens, 400 - done), 0] for done in range(0, 400, tokens)][::-1]
    expected += [[402 + done, min(tokens, 33 - done), 1] for done in range(0, 33, tokens)][::-1]
    assert sorted(listed(metadata)) == sorted(expected)
    joined = builder.build(step(1, 1, 400, device=DEVICE))
    assert joined.describe() == "prefill kernel: 3 sequences (for Hopper)" and [0, 1, 0] in listed(joined)
    assert support.why_not_shape(spec.dtype, spec.dtype, 64, 64, None, False) == ""
    captured = builder.build(step(40, 33, device=DEVICE), capture=True)
    builder.build(step(20, device=DEVICE), into=captured)
    assert sum(count for _, count, _ in listed(captured)) == 20
    assert isinstance(captured, TritonMetadata)
    captured.common.query_start_loc[1:] += 7
    builder.device_update(captured)
    assert sum(count for _, count, _ in listed(captured)) == 27
