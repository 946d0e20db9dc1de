"""A GGUF file as a model folder: safetensors, tokenizer and generation config."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from ...errors import UnsupportedError
from .attention import import_transformers

_PACKAGES = ("gguf", "accelerate")
_REMEDY = "pip install 'pagedattn[chat]'"


def require_gguf() -> None:
    """UnsupportedError where a package is missing with which transformers reads GGUF; nothing is imported."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"converting a GGUF file needs {' and '.join(missing)}: {_REMEDY}")


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a model folder from a GGUF file: weights dequantised to `dtype`, the tokenizer with its chat template.

    Raises:
        UnsupportedError: transformers, gguf or accelerate is missing or too old.
    """
    require_gguf()
    transformers = import_transformers()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    try:
        # AutoTokenizer would read the whole file once more, for a config that a GGUF tokenizer does not need.
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(**source)
        # Newer releases keep some architectures' weights packed, unless told otherwise; older ones cannot.
        packing = getattr(transformers, "GgufConfig", None)
        options = {"quantization_config": packing(dequantize=True)} if packing else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, **options)
    except ImportError as error:
        raise UnsupportedError(f"converting a GGUF file failed: {error}; {_REMEDY}") from error
    # What is saved is not quantised any more, and must not say so.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
