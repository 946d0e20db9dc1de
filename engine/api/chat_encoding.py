"""encode_chat: messages to token ids, with control tokens only where the template put them.

A message that spells `<|im_end|>` must not end its turn. So control tokens in messages are marked before the template
runs, with two private-use characters that nothing else holds, and spelled out as plain text when the result is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagedattn.errors import RequestError

from ..models.tokenizer import Tokenizer
from .chat_template import ChatTemplate, to_json

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_INPUTS = ("image", "video", "audio")


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    allow_special_in_content: bool = False,
    **variables: Any,
) -> list[int]:
    """Messages to token ids. Special tokens spelled in messages or variables are plain text, unless allowed.

    Where a message does spell one, the text between control tokens is encoded piece by piece; every other prompt is
    encoded whole, as transformers does.

    Raises:
        RequestError: a part of a message brings an image, video or sound; else, with SecurityError, as
            `ChatTemplate.render`.
    """
    for message in messages:
        _refuse_other_parts(message)
    if allow_special_in_content or not tokenizer.control_tokens:
        return tokenizer.encode(template.render(messages, **variables), add_special_tokens=False)
    data = to_json({**variables, "messages": messages})
    begin, end = _unused_characters(json.loads(data), template.source + template.for_tools)
    control = sorted(tokenizer.control_tokens, key=len, reverse=True)
    marked = _mark(json.loads(data), control, begin, end)
    text = template.render(marked.pop("messages"), **marked)
    if begin not in text and end not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    return _encode_marked(text, tokenizer, begin, end)


def _refuse_other_parts(message: object) -> None:
    """RequestError for a part such as image, image_url or input_audio, which some templates render as text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and any(name in kind for name in _INPUTS):
            raise RequestError(f"content must be text, or parts of type text, got one of type {kind!r}; leave it out")


def _unused_characters(data: object, source: str) -> tuple[str, str]:
    used = set(source).union(json.dumps(data, ensure_ascii=False))
    free = (chr(point) for point in _PRIVATE_USE if chr(point) not in used)
    return next(free), next(free)


def _mark(value: Any, control: Sequence[str], begin: str, end: str) -> Any:
    """Put `begin` and `end` around each control token in the strings of plain data.

    The first part of one at the end of a string is marked too: a template that joins strings could complete it.
    """
    if isinstance(value, dict):
        return {key: _mark(item, control, begin, end) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, control, begin, end) for item in value]
    if not isinstance(value, str):
        return value
    pieces = re.split(f"({'|'.join(map(re.escape, control))})", value)
    last = pieces[-1]
    starts = {token[:size] for token in control for size in range(1, len(token))}
    cut = next((at for at in range(max(0, len(last) - len(control[0])), len(last)) if last[at:] in starts), len(last))
    pieces[-1:] = [last[:cut], last[cut:]]
    return "".join(f"{begin}{piece}{end}" if index % 2 and piece else piece for index, piece in enumerate(pieces))


def _encode_marked(text: str, tokenizer: Tokenizer, begin: str, end: str) -> list[int]:
    """Control tokens outside marks become ids; what lies between them is encoded as plain text."""
    control = sorted(tokenizer.control_tokens, key=len, reverse=True)
    ids: list[int] = []
    plain, marked = "", False

    def flush() -> None:
        if plain:
            ids.extend(tokenizer.encode(plain, add_special_tokens=False, control=False))

    for piece in re.split(f"({'|'.join(map(re.escape, [*control, begin, end]))})", text):
        if piece in (begin, end):
            marked = piece == begin
        elif piece in tokenizer.control_tokens and not marked:
            flush()
            ids.append(tokenizer.control_tokens[piece])
            plain = ""
        else:
            plain += piece
    flush()
    return ids
