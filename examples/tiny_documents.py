"""Documents for `train_tiny.py`: what the tiny models read, in which shares, and how rows are packed.

DATA holds `*.txt` files named as in `MIX`: documents that end with DeepSeek's end-of-sentence marker, chats written
as `<｜User｜>...<｜Assistant｜>...`.
"""

import random
import re
from pathlib import Path


BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, PAD_ID = "<｜User｜>", "<｜Assistant｜>", 2
SPECIAL_TOKENS = [BOS, EOS, PAD, USER, ASSISTANT, "<think>", "</think>"]
# The real checkpoints ship no chat template but a Python encoder; this is its plainest form, one turn after another.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<｜Assistant｜>{{ message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# Relative shares of the training tokens: files of DATA, and documents made from them.
MIX = {"math_gsm8k_train_chat": 0.44, "code_mbpp_train": 0.15, "math_synthetic": 0.06, "code_python_stdlib": 0.12}
MIX |= {"docs_python": 0.05, "prose_standardebooks": 0.05, "instructions": 0.09, "echo": 0.04}
MIX |= {"loops": 1.0}  # a packer of its own
LENGTH = 512  # of a row


def read_documents(data: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The documents of each file, split into training and held-out (the last 1 % of every file)."""
    train, heldout = {}, {}
    for path in sorted(data.glob("*.txt")):
        documents = [d.strip("\n") for d in path.read_text(encoding="utf-8").split(EOS) if d.strip()]
        cut = min(len(documents) - 1, round(0.99 * len(documents)))
        train[path.stem], heldout[path.stem] = documents[:cut], documents[cut:]
    return train, heldout


def generated_documents(train: dict[str, list[str]], seed: int) -> dict[str, list[str]]:
    """Chat documents made from the others: echo requests, and instructions answered with prose or documentation."""
    rng, echo, instructions = random.Random(seed), [], []
    code, prose, docs = train["code_python_stdlib"], train["prose_standardebooks"], train["docs_python"]
    requests = ["Repeat the following {}:", "Copy this {} exactly:", "Write the following {} again, unchanged:"]
    for _ in range(3000):
        kind = rng.choice(["code", "text"])
        lines = rng.choice(code if kind == "code" else prose + docs).split("\n")
        start, length = rng.randrange(len(lines)), rng.randint(2, 14 if kind == "code" else 5)
        snippet = "\n".join(lines[start : start + length]).strip("\n")[:450]
        if snippet.strip():
            fenced = f"```python\n{snippet}\n```" if kind == "code" else snippet
            echo.append(f"{USER}{rng.choice(requests).format(kind)}\n{fenced}{ASSISTANT}{fenced}")
    for document in prose:
        paragraphs = [p for p in document.split("\n\n") if len(p) > 60]
        while len(paragraphs) > 4:
            first, passage, paragraphs = paragraphs[0], "\n\n".join(paragraphs[1:4]), paragraphs[5:]
            answer = re.sub(r"(?s)(?<=.{300}[.?!”])\s.*", "", passage)[:700]  # a few whole sentences
            request = rng.choice(["Continue this story:\n{}", "What happens next?\n{}", "Write a passage after: {}"])
            instructions.append(f"{USER}{request.format(first[:400])}{ASSISTANT}{answer}")
    for document in docs:
        for section in re.split(r"\n(?=\.\. (?:function|class|method|data)::)", document)[1:]:
            name, body = re.match(r"\.\. \w+:: *([\w.]*)", section).group(1), section.split("\n\n", 1)[-1]
            body = re.sub(r":\w+:`[~!]?([^`]*)`", r"`\1`", "\n".join(line.strip() for line in body.split("\n")))
            summary = body.strip().split("\n\n")[0]
            request = rng.choice(["Explain `{}` in Python.", "What does `{}` do?", "How do I use `{}`?"])
            instructions.append(f"{USER}{request.format(name)}{ASSISTANT}{summary[:700]}")
    return {"echo": echo, "instructions": instructions}


def documents(data: Path, seed: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    train, heldout = read_documents(data)
    return train | generated_documents(train, seed), heldout


def encode(tokenizer, documents: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """BOS + document + EOS, documents longer than a row cut into rows."""
    encoded = {}
    for source, texts in documents.items():
        ids = tokenizer([BOS + text + EOS for text in texts], add_special_tokens=False)["input_ids"]
        encoded[source] = [d[i : i + LENGTH + 1] for d in ids for i in range(0, len(d) - 1, LENGTH)]
    return encoded


class Packer:
    """Endless rows of `length + 1` tokens of whole documents, sources drawn to follow `MIX`; seeded, so resumable."""

    def __init__(self, encoded: dict[str, list[list[int]]], length: int, seed: int):
        self.encoded, self.length, self.rng = encoded, length, random.Random(seed)
        self.queues = {source: [] for source in encoded}
        self.drawn = dict.fromkeys(encoded, 0)
        self.waiting = [self.draw() for _ in range(64)]

    def draw(self) -> list[int]:
        source = min(self.drawn, key=lambda s: self.drawn[s] / MIX[s])  # the source furthest below its share
        if not self.queues[source]:
            self.queues[source] = self.rng.sample(self.encoded[source], len(self.encoded[source]))
        document = self.queues[source].pop()
        self.drawn[source] += len(document)
        return document

    def row(self) -> list[int]:
        row = []
        while True:  # first fit among the waiting documents, so that no chat is cut and little is padded
            fit = next((i for i, d in enumerate(self.waiting) if len(d) <= self.length + 1 - len(row)), None)
            if fit is None:
                return row + [PAD_ID] * (self.length + 1 - len(row))
            row += self.waiting.pop(fit)
            self.waiting.insert(self.rng.randrange(len(self.waiting) + 1), self.draw())


def prompt_groups(train: dict[str, list[str]], tokenizer) -> list[list[list[str]]]:
    """For each source of chats, prompts in groups of one length in tokens: V4's compressors would read padding."""
    sources = []
    for source in ("math_gsm8k_train_chat", "code_mbpp_train", "instructions"):
        groups = {}
        for prompt in sorted({BOS + document.split(ASSISTANT)[0] + ASSISTANT for document in train[source]}):
            groups.setdefault(len(tokenizer.encode(prompt)), []).append(prompt)
        sources.append([prompts for prompts in groups.values() if len(prompts) >= 8])
    return sources
