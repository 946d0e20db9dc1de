"""Models for `bench.vllm_compare`: tiny ones that are trained as examples/tiny-qwen3 is, and shapes without weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-qwen3"
# Beside the recipe's own: a window and a soft cap (every second layer), and sinks (with a window in every second one).
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-gemma2": (
        "Gemma2",
        {"sliding_window": 64, "attn_logit_softcapping": 20.0, "final_logit_softcapping": None}
        | {"query_pre_attn_scalar": 128, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "tiny-gpt-oss": (
        "GptOss",
        # vLLM insists on yarn there; this one is the plain embedding.
        {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "beta_fast": 32.0}
            | {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 2048}
        },
    ),
    "tiny-deepseek": (
        "DeepseekV2",
        # Rows of 512 + 64 elements, as all kernels for latent attention want them; no experts.
        {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 2}
        | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 128},
    ),
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3",
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}
        | {"max_position_embeddings": 40960},
    ),
    "llama-8b": (
        "Llama",
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
        | {"max_position_embeddings": 131072},
    ),
}
FETCHED = "smollm2"  # a real one, as `pagedattn fetch` makes it
NAMES = ("tiny-qwen3", FETCHED, *_TINY, *SHAPES)


# What the tiny ones have in common with the recipe's model.
_TAKEN = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "max_position_embeddings")
_TAKEN += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "attention_bias")


@cache
def recipe() -> ModuleType:
    """examples/tiny-qwen3/train.py."""
    spec = importlib.util.spec_from_file_location("tiny_qwen3_train", EXAMPLE / "train.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{EXAMPLE / 'train.py'}: run this in the checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def model_folder(name: str, folder: Path, steps: int = 1200) -> Path:
    """The checkpoint of a name, trained or written into `folder` where it is not there yet."""
    if name == "tiny-qwen3":
        return EXAMPLE
    out = folder / name
    if not (out / "config.json").exists():
        if name == FETCHED:
            subprocess.run([sys.executable, "-m", "pagedattn", "fetch", FETCHED, str(out)], check=True)
        elif name in _TINY:
            train(name, out, steps)
        else:
            _write_shape(*SHAPES[name], out)
    return out


def train(name: str, out: Path, steps: int) -> None:
    """Train a tiny model on the corpus of the recipe, with the recipe's tokenizer and windows."""
    tiny, (family, options) = recipe(), _TINY[name]
    import transformers

    base = {key: value for key, value in tiny.build_model().config.to_dict().items() if key in _TAKEN}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **base | {"num_attention_heads": 4, "num_key_value_heads": 2} | options
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).to("cuda" if torch.cuda.is_available() else "cpu")
    corpus = tiny.read_corpus(EXAMPLE / "corpus.txt")
    tokenizer = tiny.build_tokenizer(corpus)
    tiny.train(model, tiny.Windows(corpus, tokenizer, 0), steps)
    tiny.save(model, tokenizer, out)
    if family in ("GptOss", "DeepseekV2"):
        _name_as_vllm_does(out)


def _name_as_vllm_does(out: Path) -> None:
    """Rename experts and write the head out: vLLM 0.24 reads neither its own old names nor tied ones of these
    families."""
    from safetensors.torch import load_file, save_file

    weights = load_file(out / "model.safetensors")
    weights = {name.replace(".mlp.experts.", ".mlp.experts.routed_experts."): one for name, one in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@cache
def prompts() -> list[tuple[list[int], list[int]]]:
    """(prompt, what follows in the corpus) in tokens of the tiny models."""
    tiny = recipe()
    corpus = tiny.read_corpus(EXAMPLE / "corpus.txt")
    return tiny.cases_of(corpus, tiny.build_tokenizer(corpus))


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def chats(folder: Path) -> list[list[int]]:
    """The corpus' questions as prompts of a model that can chat, in its tokens."""
    tokenizer, tiny = tokenizer_of(folder), recipe()
    asked = [[{"role": "user", "content": question}] for question, _ in tiny.read_corpus(EXAMPLE / "corpus.txt").pairs]
    return [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"] for one in asked
    ]


def _write_shape(family: str, options: dict[str, Any], out: Path) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    config.architectures, config.dtype = [f"{family}ForCausalLM"], "bfloat16"
    config.save_pretrained(out)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}), encoding="utf-8")


def main() -> None:
    """`python -m bench.vllm_models NAME FOLDER`: one process per model, to train several at once."""
    model_folder(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
