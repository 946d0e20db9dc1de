"""A decoder cut into shares gives the logits of the whole one, and each share reads its part of the checkpoint only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks, on_ranks
from tiny_models import hf_model, save

import pagedattn.engine.models.loader as loader
from pagedattn import CommonAttentionMetadata, plan_step
from pagedattn.engine.models.config import load_model_config
from pagedattn.engine.models.decoder import Decoder
from pagedattn.engine.models.folder import ModelFolder
from pagedattn.engine.models.loader import load_weights
from pagedattn.engine.models.sharding import ShardedDecoder, ShardSpec
from pagedattn.errors import UnsupportedError, WeightsError

CPU = torch.device("cpu")
TOKENS = torch.arange(7, 18, dtype=torch.int32)


def build(folder: Path, ranks: ThreadRanks | None, load_format: str = "auto") -> Decoder:
    """The decoder of a folder in float64, or a rank's share of it."""
    opened = ModelFolder(folder)
    options: dict[str, Any] = {"dtype": torch.float64, "device": CPU, "max_positions": 64, "block_size": 16}
    config = load_model_config(opened)
    model = Decoder(config, **options) if ranks is None else ShardedDecoder(ranks, config, **options)
    load_weights(model, opened, CPU, load_format)
    return model


@torch.inference_mode()
def logits(model: Decoder) -> torch.Tensor:
    """Of a prompt without a cache."""
    count = len(TOKENS)
    common = CommonAttentionMetadata.from_lengths([count], [count])
    metadata = plan_step(model.attention_layers(), {attn.kv_group: common for attn in model.attention_layers()})
    positions = torch.arange(count, dtype=torch.int32)
    return model.logits(model(TOKENS, positions, None, metadata))


CASES = [
    # model, changes, ranks
    ("qwen3", {}, 2),
    ("qwen3", {}, 4),  # two KV heads on four ranks
    ("qwen2", {"vocab_size": 511}, 2),  # biases of q, k, v; the last rank has fewer rows of the head
    ("llama3", {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 509}, 4),
    ("llama3", {"attention_bias": True, "mlp_bias": True}, 2),  # biases behind an all-reduce are added once
    ("mistral", {}, 4),
]


@pytest.mark.parametrize(("name", "changes", "size"), CASES)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_every_rank_has_the_logits_of_the_whole_model(
    name: str, changes: dict[str, Any], size: int, load_format: str, tmp_path: Path
) -> None:
    folder = save(hf_model(name, torch.float32, **changes), tmp_path)
    want = logits(build(folder, None, load_format))

    def work(ranks: ThreadRanks) -> tuple[torch.Tensor, dict[str, int], int]:
        model = build(folder, ranks, load_format)
        own = sum(p.numel() for key, p in model.named_parameters() if "proj" in key and key.endswith("weight"))
        return logits(model), ranks.counts, own

    for got, counts, _ in (results := on_ranks(size, work)):
        assert torch.equal(got, results[0][0]), "the ranks must not differ in a single bit"
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # norms compute in float32
        assert counts == {"all_reduce": 2 * 4, "all_gather": 1}
    assert got.shape == (len(TOKENS), changes.get("vocab_size", 512))


def test_only_the_share_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(hf_model("qwen3", torch.float32), tmp_path)
    read: dict[str, int] = {}
    real = loader.safe_open

    class Spy:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Spy:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def get_tensor(self, key: str) -> torch.Tensor:
            tensor = self.file.get_tensor(key)
            read[key] = tensor.numel()
            return tensor

        def get_slice(self, key: str) -> Any:
            whole = self.file.get_slice(key)

            class Part:
                def __getitem__(self, where: Any) -> torch.Tensor:
                    read[key] = whole[where].numel()
                    return whole[where]

            return Part()

    monkeypatch.setattr(loader, "safe_open", Spy)
    build(folder, None)
    whole = dict(read)
    build(folder, ThreadRanks(1, 4, None, []))  # type: ignore[arg-type]
    quarter = ("q_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    for key, count in read.items():
        if key.endswith(quarter) or key == "lm_head.weight":
            assert count * 4 == whole[key], key
        elif key.endswith(("k_proj.weight", "v_proj.weight")):
            assert count * 2 == whole[key], key  # two KV heads on four ranks
        else:
            assert count == whole[key], key
    assert len(read) == len(whole) == 4 * 11 + 3


def test_a_checkpoint_of_a_wrong_shape_is_refused_by_its_whole_shape(tmp_path: Path) -> None:
    folder = save(hf_model("qwen3", torch.float32), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text(encoding="utf-8").replace('"intermediate_size": 128', '"intermediate_size": 256'),
        encoding="utf-8",
    )
    with pytest.raises(WeightsError, match=r"down_proj.weight' must have shape \[64, 256\], got \[64, 128\]"):
        build(folder, ThreadRanks(0, 2, None, []))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "size", "why"),
    [
        ({}, 3, r"4 attention heads; possible: \[1, 2, 4\]"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, r"6 KV heads, or be a multiple.*possible: \[1, 2\]"),
        ({"intermediate_size": 130}, 4, r"intermediate_size of 130; possible: \[1, 2\]"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(
    changes: dict[str, int], size: int, why: str, tmp_path: Path
) -> None:
    save(hf_model("qwen3", torch.float32), tmp_path)
    config = replace(load_model_config(ModelFolder(tmp_path)), **changes)
    with pytest.raises(UnsupportedError, match=rf"tensor_parallel_size={size}.*{why}"):
        ShardSpec.of(config, 0, size)


def test_shares_cover_the_model_once(tmp_path: Path) -> None:
    save(hf_model("qwen3", torch.float32), tmp_path)
    config = replace(load_model_config(ModelFolder(tmp_path)), num_heads=16, num_kv_heads=4, vocab_size=1001)
    shares = [ShardSpec.of(config, rank, 8) for rank in range(8)]
    assert [head for share in shares for head in range(*share.heads)] == [*range(16)]
    assert [token for share in shares for token in range(*share.tokens)] == [*range(1001)]
    assert [share.kv_heads for share in shares] == [(rank // 2, rank // 2 + 1) for rank in range(8)]
    for share in shares:  # four query heads read one KV head
        assert {head // 4 for head in range(*share.heads)} == {*range(*share.kv_heads)}
