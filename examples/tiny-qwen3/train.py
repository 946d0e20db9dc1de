"""Train the tiny Qwen3 model of this folder on corpus.txt and write it as a Hugging Face checkpoint.

python train.py [--steps N] [--seed N] [--out FOLDER]

One CPU core is enough. The model is meant to memorise: the run fails unless the saved bfloat16 checkpoint, read
back in float32 and in bfloat16, gives every article and every answer of the corpus word for word.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The trainer numbers the special tokens from 0 in the order in which it gets them.
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
END_OF_TEXT_ID, TURN_END_ID = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB_SIZE = 512
# (rows, tokens) of a training batch. Most batches are cheap and short; every fourth is one window as long as the
# context, or else the model falls apart at distances that it never saw.
SHORT, LONG = (8, 256), (1, 2048)
LONG_EVERY = 4
PEAK_LR = 3e-3
WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True)
class Corpus:
    """The articles, the (question, answer) pairs and the system prompt of corpus.txt."""

    articles: list[str]
    pairs: list[tuple[str, str]]
    system: str


def read_corpus(path: Path) -> Corpus:
    """Split the file at empty lines; inside a part a line break counts as a space."""
    articles: list[str] = []
    pairs: list[tuple[str, str]] = []
    system = ""
    for part in path.read_text(encoding="utf-8").split("\n\n"):
        text = " ".join(part.split())
        if text.startswith("S: "):
            system = text.removeprefix("S: ")
        elif text.startswith("Q: "):
            question, answer = text.removeprefix("Q: ").split(" A: ", 1)
            pairs.append((question, answer))
        else:
            articles.append(text)
    return Corpus(articles, pairs, system)


def messages_of(question: str, system: str | None) -> list[dict[str, str]]:
    """A chat that ends with the user's question."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": question}]


def build_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every byte is in the vocabulary, so any text goes through and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [
        *corpus.articles,
        *(text for pair in corpus.pairs for text in pair),
        corpus.system,
        "user\nassistant\nsystem\n",
    ]
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=LONG[1]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_model() -> Qwen3ForCausalLM:
    """About 0.85 million parameters, 1.7 MB in bfloat16."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=LONG[1],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    return Qwen3ForCausalLM(config)


def chat_ids(tokenizer: PreTrainedTokenizerFast, question: str, answer: str | None, system: str | None) -> list[int]:
    """Tokens of a rendered chat; without an answer it stops where the assistant begins to speak."""
    messages = messages_of(question, system)
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None))
    return tokenizer.encode(text, add_special_tokens=False)


class Windows:
    """Endless training windows: documents in random order, the first one entered at a random sentence."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._random = random.Random(seed)
        # Each article is kept once whole and once for every later sentence, as the tail that starts there.
        self._articles: list[list[list[int]]] = []
        for article in corpus.articles:
            starts = [0, *(match.end() for match in re.finditer(r"(?<=[.?!]) ", article))]
            self._articles.append([tokenizer.encode(article[start:] + END_OF_TEXT) for start in starts])
        self._chats = [
            [chat_ids(tokenizer, question, answer, system) for system in (None, corpus.system)]
            for question, answer in corpus.pairs
        ]

    def _document(self) -> list[int]:
        # Half of all tokens should come from whole articles, and chats are about a fifth as long.
        if self._random.random() < 0.5:
            return self._random.choice(self._random.choice(self._chats))
        tails = self._random.choice(self._articles)
        return tails[0] if self._random.random() < 0.5 else self._random.choice(tails)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        """Yield `steps` tensors [rows, tokens + 1] int64."""
        for step in range(1, steps + 1):
            rows, tokens = LONG if step % LONG_EVERY == 0 else SHORT
            yield torch.tensor([self._window(tokens + 1) for _ in range(rows)])

    def _window(self, tokens: int) -> list[int]:
        window: list[int] = []
        while len(window) < tokens:
            window += self._document()
        return window[:tokens]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to 1 % of the peak."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LR * warm * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * step / steps)))


def train(model: Qwen3ForCausalLM, windows: Windows, steps: int) -> None:
    """Run `steps` of AdamW on the model, in place."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    model.train()
    progress = tqdm(windows.batches(steps), total=steps, desc="training", unit="step", mininterval=2.0)
    for step, batch in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = batch.to(model.device)
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bfloat16, configs, tokenizer and chat template into `out`."""
    model.generation_config = GenerationConfig(
        eos_token_id=[TURN_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    model.bfloat16().save_pretrained(out)
    # The writer makes it private to its owner, unlike every other file of the folder.
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    # transformers 5 writes a class name that earlier releases do not know; both know this one.
    config_path = out / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def cases_of(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[int]]]:
    """(prompt, expected continuation) in tokens: each article after its first sentence, each answer twice."""
    cases: list[tuple[list[int], list[int]]] = []
    for article in corpus.articles:
        ids = tokenizer.encode(article + END_OF_TEXT)
        cut = len(tokenizer.encode(article[: article.index(". ") + 1]))
        cases.append((ids[:cut], ids[cut:]))
    for question, answer in corpus.pairs:
        for system in (None, corpus.system):
            prompt = chat_ids(tokenizer, question, None, system)
            cases.append((prompt, tokenizer.encode(answer + TURN_END)))
    return cases


def greedy(model: Qwen3ForCausalLM, prompt: list[int], limit: int) -> list[int]:
    """At most `limit` tokens after the prompt, the end token included."""
    # Pyright 1.1 cannot match the model to the protocol of the generation mixin.
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=limit)  # pyright: ignore[reportAttributeAccessIssue]
    return tokens[0, len(prompt) :].tolist()


@torch.inference_mode()
def check(out: Path, corpus: Corpus, dtype: torch.dtype) -> int:
    """Reload the checkpoint in `dtype`, print how well it remembers, and return the number of wrong continuations."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = Qwen3ForCausalLM.from_pretrained(out, dtype=dtype).eval()
    cases = cases_of(corpus, tokenizer)
    losses: list[torch.Tensor] = []
    gaps: list[torch.Tensor] = []
    wrong = 0
    for prompt, expected in tqdm(cases, desc=f"checking {dtype}", unit="text"):
        target = torch.tensor(expected)
        logits = model(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
        top = logits.topk(2).values
        gaps.append(top[:, 0] - top[:, 1])
        wrong += greedy(model, prompt, len(expected) + 8) != expected
    gap = torch.cat(gaps)
    quantiles = torch.quantile(gap, torch.tensor([0.01, 0.5])).tolist()
    print(
        f"{dtype}: loss {torch.cat(losses).mean():.4f} after the prompt, {len(cases) - wrong} of {len(cases)} "
        f"texts word for word; gap between the two best logits: "
        f"median {quantiles[1]:.2f}, 1st percentile {quantiles[0]:.2f}, smallest {gap.min():.2f}"
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()

    # One thread, so that a seed gives the same weights however many cores the machine has.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    corpus = read_corpus(HERE / "corpus.txt")
    tokenizer = build_tokenizer(corpus)
    model = build_model()
    train(model, Windows(corpus, tokenizer, args.seed), args.steps)
    save(model, tokenizer, args.out)
    wrong = sum(check(args.out, corpus, dtype) for dtype in (torch.float32, torch.bfloat16))
    if wrong:
        raise SystemExit(f"{wrong} texts were not remembered; train longer, for example --steps {args.steps * 2}")


if __name__ == "__main__":
    main()
