"""Tokenizer: a folder's tokenizer.json through the `tokenizers` library, imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pagedattn.errors import RequestError, WeightsError

from .folder import ModelFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_BYTES = 256 << 20


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        control_tokens: text to id of every special token; in plain text they would act as control tokens.
        named_tokens: `bos_token`, `eos_token`, ... of tokenizer_config.json, as text.
    """

    def __init__(self, backend: Backend, named_tokens: Mapping[str, str] | None = None) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.control_tokens = {token.content: index for index, token in added.items() if token.special}
        self.named_tokens = dict(named_tokens or {})

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> Tokenizer | None:
        """The tokenizer of a model folder; None where it has no tokenizer.json (token ids are used instead).

        Raises:
            WeightsError: the file is no tokenizer.
            UnsafePathError: the file leaves the folder or is no regular file.
        """
        text = folder.read_text("tokenizer.json", _MAX_BYTES)
        if text is None:
            return None
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise WeightsError(f"{folder.root / 'tokenizer.json'} cannot be read: {error}") from None
        return cls(backend, _named_tokens(folder.read_json("tokenizer_config.json") or {}))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of `eos_token`, where tokenizer_config.json names one."""
        index = self._backend.token_to_id(self.named_tokens.get("eos_token", ""))
        return () if index is None else (index,)

    def encode(self, text: str, *, add_special_tokens: bool = True, control: bool = True) -> list[int]:
        """Text to ids.

        Args:
            add_special_tokens: add what the tokenizer puts around a prompt, such as a first token.
            control: take the text of special tokens as those tokens; without, they are spelled out as plain text.

        Raises:
            RequestError: text that is not valid Unicode.
        """
        self._backend.encode_special_tokens = not control
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"prompt must be valid Unicode text: {error}") from None
        finally:
            self._backend.encode_special_tokens = False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no valid UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    named = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named
