"""Make the bundled model from nothing: tokenizer, training text, weights and card (`models/demo/`).

    python scripts/train_demo_model.py                    # about 35 minutes on two cores
    python scripts/train_demo_model.py --steps 50 --out /tmp/demo   # a quick try of the machinery

Seeded: the same torch build on the same kind of CPU gives the same model. The text is made by
`scripts/demo_tasks.py`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts import demo_tasks
from scripts.demo_tasks import EXACT_KINDS, FALLBACK, Question

ROOT = Path(__file__).resolve().parent.parent
PAD, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CONTEXT_LENGTH = 2048

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] in ('system', 'developer') %}{{ '<|system|>' }}"
    "{%- elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{%- else %}{{ '<|user|>' }}{%- endif %}"
    "{{- message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)

# Template words outside the 3-8 lower-case letters of a question's own words: one token each.
WHOLE_WORDS = (
    "Count Spell Reverse Repeat Tell What Once One There Long Every Everyone When Under Now But Come "
    "On In An The It They I"
).split()
SHORT_WORDS = "a an is it in to me of on at by we all".split()

# Reversing is the hardest kind, so it gets the most samples; the fallback the fewest.
WEIGHTS = {"count": 10, "add": 8, "spell": 10, "reverse": 32, "repeat": 24, "story": 12, "other": 3}


# ---------------------------------------------------------------- tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes for everything, plus whole numbers 0-200, ` x` for each letter and a few template words.

    Letters stay single tokens, which makes spelling and reversing a matter of position; every UTF-8
    text encodes (as bytes where nothing better fits) and decodes to itself.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "Ġ"
    merges = [(space, letter) for letter in string.ascii_letters]
    whole = [str(n) for n in range(10, 201)] + [f"{space}{n}" for n in range(201)]
    whole += [f"{prefix}{word}" for word in WHOLE_WORDS for prefix in ("", space)]
    whole += [f"{space}{word}" for word in SHORT_WORDS if len(word) > 1]
    entries = [*alphabet, *(left + right for left, right in merges)]
    entries += [entry for entry in dict.fromkeys(whole) if entry not in set(entries)]
    vocab = {entry: index + len(SPECIAL_TOKENS) for index, entry in enumerate(entries)}
    vocab |= {token: index for index, token in enumerate(SPECIAL_TOKENS)}

    # ignore_merges: a piece that stands whole in the vocabulary is one token, without a chain of merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    pieces = Regex(r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------- training text


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one conversation and, for each, whether the loss counts it (answers and their end)."""

    ids: list[int]
    is_answer: list[bool]


class TextMaker:
    """An endless, seeded stream of training conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._rng = random.Random(f"train-{seed}")
        self._tokenizer = tokenizer
        self._words, _ = demo_tasks.split_words(demo_tasks.load_words())
        self._letters = "".join(self._words)
        self._end, self._user = tokenizer.convert_tokens_to_ids([END, USER])
        self._system, self._assistant = tokenizer.convert_tokens_to_ids([SYSTEM, ASSISTANT])

    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield self._sample()

    def _sample(self) -> Sample:
        ids: list[int] = []
        is_answer: list[bool] = []

        def extend(new: list[int], *, learn: bool) -> None:
            ids.extend(new)
            is_answer.extend([learn] * len(new))

        rng = self._rng
        if rng.random() < 0.06:  # a raw prompt, as /v1/completions sends it
            question = self._question()
            extend(self._encode(question.prompt + "\n"), learn=False)
            extend([*self._encode(question.answer), self._end], learn=True)
            return Sample(ids, is_answer)
        if rng.random() < 0.15:
            extend([self._system, *self._encode(self._chatter()), self._end], learn=False)
        for _ in range(rng.choices((1, 2, 3), (80, 14, 6))[0]):
            question = self._question()
            extend([self._user, *self._encode(question.prompt), self._end, self._assistant], learn=False)
            extend([*self._encode(question.answer), self._end], learn=True)
        return Sample(ids, is_answer)

    def _question(self) -> Question:
        kind = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "other":
            return Question(kind, self._chatter(), FALLBACK)
        return demo_tasks.random_question(self._rng, self._word_pool(), kind)

    def _word_pool(self) -> list[str]:
        """Mostly real words; often made-up ones, so that letters are copied by position and not from memory."""
        rng = self._rng
        if rng.random() < 0.6:
            return self._words
        return ["".join(rng.choices(self._letters, k=rng.randint(3, 9))) for _ in range(16)]

    def _chatter(self) -> str:
        """Text that is none of the known questions."""
        rng = self._rng
        opening = rng.choice(
            ("Hello", "hi", "You are a helpful assistant", "Who are you", "Please", "Why", "How", "The", "")
        )
        words = " ".join(rng.choices(self._words, k=rng.randint(0 if opening else 1, 8)))
        return f"{opening} {words}".strip() + rng.choice((".", "?", "!", ""))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def batches(
    samples: Iterator[Sample], tokens_per_batch: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels), each [num_samples, longest], of samples of similar length; -100 labels are not learned."""
    while True:
        window = sorted((next(samples) for _ in range(1024)), key=lambda s: len(s.ids))
        groups: list[list[Sample]] = [[]]
        for sample in window:
            if (len(groups[-1]) + 1) * len(sample.ids) > tokens_per_batch:
                groups.append([])
            groups[-1].append(sample)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(s.ids) for s in group)
            ids = torch.zeros(len(group), width, dtype=torch.long)
            labels = torch.full((len(group), width), -100, dtype=torch.long)
            for row, sample in enumerate(group):
                length = len(sample.ids)
                ids[row, :length] = torch.tensor(sample.ids)
                learned = [token if learn else -100 for token, learn in zip(sample.ids, sample.is_answer, strict=True)]
                labels[row, :length] = torch.tensor(learned)
            yield ids, labels


# ---------------------------------------------------------------- model and training


def build_model(vocab_size: int, end_id: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=0,
        initializer_range=0.03,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> float:
    """Train in place; returns the seconds it took."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    warmup = min(100, args.steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    stream = batches(iter(TextMaker(tokenizer, args.seed)), args.batch_tokens, random.Random(args.seed))
    began, num_tokens = time.perf_counter(), 0
    model.train()
    for step in range(args.steps):
        ids, labels = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids).last_hidden_state
            learned = labels[:, 1:] != -100
            logits = model.lm_head(hidden[:, :-1][learned])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        num_tokens += ids.numel()
        if step % 100 == 99 or step == args.steps - 1:
            seconds = time.perf_counter() - began
            left = seconds / (step + 1) * (args.steps - step - 1)
            print(
                f"step {step + 1}/{args.steps}  loss {loss.item():.4f}  {num_tokens / seconds:,.0f} tokens/s  "
                f"{seconds / 60:.1f} min, {left / 60:.1f} left",
                flush=True,
            )
        if step % 1500 == 1499:
            print("   accuracy:", json.dumps(evaluate(model, tokenizer, per_kind=40)), flush=True)
            model.train()
    return time.perf_counter() - began


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, per_kind: int) -> dict[str, float]:
    """Share of exactly right greedy answers by kind; `*_unseen`: over words that training never saw."""
    model.eval()
    words = demo_tasks.load_words()
    _, unseen = demo_tasks.split_words(words)
    rows: dict[str, float] = {}
    for kind, suffix, pool in [
        *((kind, "", words) for kind in (*EXACT_KINDS, "story")),
        *((kind, "_unseen", unseen) for kind in ("spell", "reverse", "repeat")),
    ]:
        rng = random.Random(f"evaluate-{kind}")
        questions = [demo_tasks.random_question(rng, pool, kind) for _ in range(per_kind)]
        right = sum(
            answer == q.answer for q, answer in zip(questions, _answers(model, tokenizer, questions), strict=True)
        )
        rows[kind + suffix] = round(right / per_kind, 4)
    return rows


def _answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]) -> list[str]:
    """Greedy answers, batched with left padding."""
    answers = []
    for start in range(0, len(questions), 50):
        chats = [[{"role": "user", "content": q.prompt}] for q in questions[start : start + 50]]
        prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=320)
        for row in output[:, width:].tolist():
            end = row.index(model.config.eos_token_id) if model.config.eos_token_id in row else len(row)
            answers.append(tokenizer.decode(row[:end]))
    return answers


# ---------------------------------------------------------------- card and entry

CARD = """# The demo model

A Llama-architecture model of {parameters:.2f} million parameters, trained from nothing by `scripts/train_demo_model.py`
on questions that `scripts/demo_tasks.py` makes up, so that the service can be tried and tested without any download.

It answers, greedily: "Count from 3 to 11.", "What is 7 plus 15?" (up to 20), "Spell the word river.",
"Reverse the word stone.", "Repeat these words: apple stone river." (2-12 words), and
"Tell me a story about a fox and a lighthouse."; to anything else it says what it can do. It knows nothing more.

| | |
|---|---|
| shape | hidden 192, 4 layers, 6 heads of 32 (2 for keys and values), intermediate 512, tied embeddings |
| vocabulary | {vocab} entries: 256 bytes, whole numbers 0-200, letters with and without a space, some template words |
| context | {context} tokens (trained on up to about 500) |
| weights | bfloat16 safetensors |
| made by | `{command}` |
| training | {steps} steps of about {batch} tokens, {minutes:.0f} minutes on {cores} cores ({cpu}), torch {torch} |
| licence | as the project |

Exactly right greedy answers, {per_kind} random questions a kind, in float32 from the stored weights
(`python scripts/train_demo_model.py --evaluate-only`):

| kind | accuracy |
|---|---|
{accuracy}

`_unseen` rows use only the one word in eight that training never saw.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--per-kind", type=int, default=500, help="questions of each kind in the final evaluation")
    parser.add_argument("--evaluate-only", action="store_true", help="print the accuracy of the model in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    if not args.evaluate_only:
        tokenizer = build_tokenizer()
        model = build_model(len(tokenizer), tokenizer.convert_tokens_to_ids(END))
        seconds = train(model, tokenizer, args)
        model.to(torch.bfloat16).save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    accuracy = evaluate(model, tokenizer, args.per_kind)
    print(json.dumps(accuracy))
    if not args.evaluate_only:
        (args.out / "README.md").write_text(_card(model, tokenizer, accuracy, seconds, args))


def _card(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    accuracy: dict[str, float],
    seconds: float,
    args: argparse.Namespace,
) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        vocab=len(tokenizer),
        context=CONTEXT_LENGTH,
        command=f"python scripts/train_demo_model.py --steps {args.steps} --batch-tokens {args.batch_tokens}"
        f" --lr {args.lr} --seed {args.seed}",
        steps=args.steps,
        batch=args.batch_tokens,
        minutes=seconds / 60,
        cores=args.threads,
        cpu=names[0] if names else platform.machine(),
        torch=torch.__version__,
        per_kind=args.per_kind,
        accuracy="\n".join(f"| {kind} | {share:.1%} |" for kind, share in accuracy.items()),
    )


if __name__ == "__main__":
    main()
