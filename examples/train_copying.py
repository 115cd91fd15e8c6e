"""Teach a trained tiny target to copy a short block of its prompt, and leave it as it was otherwise.

    python train_copying.py --data DATA --target RUN/target/latest --texts RUN/chats.jsonl --out RUN/copying

`tiny_documents.py` says what DATA holds. More `--texts` may be given, what `hf-treespec train-head` keeps say. `--steps 0`
with several `--initial` writes their mean.

A model of this size does not find induction by itself in a few million tokens, so attention is shown where to look: two heads
of each of `PREVIOUS` at the token before, three of each of `INDUCTION` at the token behind the one that is being copied, as
far as the window reaches. On its own `texts` (JSON lines of `ids`) and on documents the divergence from the model that it
was is part of the loss.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from tiny_documents import ASSISTANT, BOS, EOS, LENGTH, SPECIAL_TOKENS, USER, read_documents
from torch import Tensor
from tqdm import tqdm
from train_tiny import Muon, export, logits_of, prepare
from transformers import DeepseekV4ForCausalLM, PreTrainedTokenizerFast


PREVIOUS, INDUCTION = {0: 2, 1: 2}, {2: 3, 3: 3, 5: 3}  # layer: guided heads
COPY_ROWS, KEPT_ROWS, WARMUP, SAVE_EVERY = 3, 2, 20, 50
SHORTEST = 6  # block, in tokens
CODE, TEXT = (
    ("code_python_stdlib", "code_mbpp_train"),
    ("prose_standardebooks", "docs_python", "math_gsm8k_train_chat"),
)
# Pieces of documents, beside the model's own texts.
PIECES = {"code_python_stdlib": 500, "prose_standardebooks": 250, "docs_python": 250, "math_synthetic": 1000}
REQUESTS = ("Repeat the following {}:", "Copy this {} exactly:", "Write the following {} again, unchanged:")
REQUESTS += ("Echo this {}:", "Repeat this {}:", "Print this {} again:", "Here is some {}. Repeat it word for word:")
# Token ids; whether the next token is to be copied; where that one stands (-1: nowhere).
Example = tuple[list[int], list[bool], list[int]]


class Copying:
    """Rows of copying: echoed code and text, and blocks that come again without a request, half of them of random tokens."""

    def __init__(self, documents: dict[str, list[str]], tokenizer, share: float, seed: int) -> None:
        self.documents, self.tokenizer, self.share, self.rng = documents, tokenizer, share, random.Random(seed)

    def snippet(self, kinds: tuple[str, ...], longest: int) -> str:
        """A few lines of a document, cut to `longest` tokens."""
        while True:
            lines = self.rng.choice(self.documents[self.rng.choice(kinds)]).split("\n")
            start = self.rng.randrange(len(lines))
            text = "\n".join(lines[start : start + self.rng.randint(1, 8)]).strip("\n")
            for marker in SPECIAL_TOKENS:
                text = text.replace(marker, "")
            ids = self.tokenizer.encode(text, add_special_tokens=False)[:longest]
            if len(ids) >= SHORTEST:
                return self.tokenizer.decode(ids)

    def request(self) -> Example:
        """A chat whose answer is a block of its prompt."""
        kind = "code" if self.rng.random() < 0.7 else "text"
        block = self.snippet(CODE if kind == "code" else TEXT, self.rng.randint(8, 46))
        block = f"```python\n{block}\n```" if kind == "code" else block
        request = f"{BOS}{USER}{self.rng.choice(REQUESTS).format(kind)}\n{block}{ASSISTANT}"
        prompt = self.tokenizer.encode(request, add_special_tokens=False)
        answer = self.tokenizer.encode(block + EOS, add_special_tokens=False)
        size = len(answer) - 1
        starts = [i for i in range(len(prompt) - size) if prompt[i : i + size] == answer[:-1]]
        if not starts:  # other tokens at its ends
            return self.request()
        outside = len(prompt) - 1
        sources = [-1] * outside + list(range(starts[0], starts[0] + size)) + [-1] * 2
        return prompt + answer, [False] * outside + [True] * (size + 1) + [False], sources

    def noise(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.rng.randrange(len(SPECIAL_TOKENS), len(self.tokenizer)) for _ in range(count)]

    def repetition(self) -> Example:
        """A block that comes two or three times, nothing asking for it."""
        rng, noise, size = self.rng, self.noise, self.rng.randint(6, 50)
        block = noise(size)
        if rng.random() < 0.5:
            block = self.tokenizer.encode(self.snippet(CODE + TEXT, size), add_special_tokens=False)[:size]
        ids, size = [self.tokenizer.bos_token_id, *noise(rng.randint(0, 12)), *block], len(block)
        copied, sources, last = [False] * len(ids), [-1] * len(ids), len(ids) - size
        for _ in range(rng.choice((1, 1, 2))):
            between = noise(rng.randint(0, 6)) if rng.random() < 0.3 else []
            ids += between + block
            copied += [False] * len(between) + [True] * (size - 1) + [False]
            sources += [-1] * len(between) + list(range(last + 1, last + size)) + [-1]
            last = len(ids) - size
        return ids, copied, sources

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """`count` packed rows: ids `[count, LENGTH + 1]`, what is copied and from where `[count, LENGTH]`."""
        packed = []
        for _ in range(count):
            ids, copied, sources = [], [], []
            while len(ids) <= LENGTH:
                example = self.repetition() if self.rng.random() < self.share else self.request()
                sources += [place + len(ids) if place >= 0 else -1 for place in example[2]]
                ids, copied = ids + example[0], copied + example[1]
            packed.append((ids[: LENGTH + 1], copied[:LENGTH], sources[:LENGTH]))
        return tuple(torch.tensor(part) for part in zip(*packed))


def kept_rows(texts: list[list[int]], documents: dict[str, list[str]], tokenizer, seed: int) -> Iterator[Tensor]:
    """Endless batches `[KEPT_ROWS, LENGTH]` of `texts` and of pieces of documents."""
    rng, texts = random.Random(seed), list(texts)
    for kind, count in PIECES.items():
        for document in rng.choices(documents[kind], k=count):
            start = rng.randrange(max(1, len(document) - 1600))
            ids = tokenizer.encode(document[start : start + 1600], add_special_tokens=False)
            texts.append([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
    while True:
        rows = []
        for _ in range(KEPT_ROWS):
            row = []
            while len(row) < LENGTH:
                row += rng.choice(texts)
            rows.append(row[:LENGTH])
        yield torch.tensor(rows)


def guide(heads: int) -> Callable:
    """The loss of a layer's first `heads` heads: -log of the attention that they pay to `module.columns`."""

    def loss(module, probabilities: Tensor) -> Tensor:
        columns, wanted = module.columns.clamp(min=0)[:, :, None, :, None], module.columns >= 0  # [B, blocks, window]
        paid = probabilities[:, :, :heads].gather(-1, columns.expand(-1, -1, heads, -1, -1)).squeeze(-1)
        return -((paid + 1e-4).log() * wanted[:, :, None]).sum() / (wanted.sum() + 1) / heads

    return loss


def columns(places: Tensor, window: int) -> Tensor:
    """Positions `[B, LENGTH]` as the columns of `train_tiny.windowed_attention`: a block sees the one before and itself."""
    own = torch.arange(LENGTH)
    found = places - (own // window - 1) * window
    seen = (places >= 0) & (own - places < window) & (found >= 0)
    return torch.where(seen, found, -1).unflatten(1, (-1, window))


def show(model, sources: Tensor) -> None:
    """Tells the guided layers where to look in the rows of copying, nowhere in the others."""
    before = (torch.arange(LENGTH) - 1).expand(len(sources), -1)
    for layers, places in ((PREVIOUS, before), (INDUCTION, sources)):
        wanted = F.pad(columns(places, model.config.sliding_window), (0, 0, 0, 0, 0, KEPT_ROWS), value=-1)
        for number in layers:
            model.model.layers[number].self_attn.columns = wanted


def mean_of(folders: list[Path]):
    """The model whose weights are the mean of those in `folders`."""
    models = [DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models)):
            parameters[0].copy_(torch.stack(parameters).mean(0))
    return models[0]


def optimizers_of(model, rate: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """With the peak rate of each. Norms and sinks of attention are to move fast: they decide how sharply a head looks."""
    matrices, norms, others = [], [], []
    for name, parameter in model.named_parameters():
        if "indexer" in name or "mlp.gate." in name:
            parameter.requires_grad_(False)
        elif parameter.ndim == 1 and "self_attn" in name and "compressor" not in name:
            norms.append(parameter)
        elif (
            parameter.ndim == 1
            or min(parameter.shape[-2:]) <= 8
            or any(part in name for part in ("embed_tokens", "lm_head", "position_bias", "hc"))
        ):
            others.append(parameter)
        else:
            matrices.append(parameter)
    adamw = [torch.optim.AdamW(p, lr=rate, betas=(0.9, 0.95), weight_decay=0.0) for p in (others, norms)]
    return [(Muon(matrices, {"lr": rate}), rate), (adamw[0], rate / 2), (adamw[1], 3 * rate)]


def main(
    data: Annotated[Path, typer.Option(help="folder of *.txt training files")],
    target: Annotated[Path, typer.Option(help="folder of the model to begin with")],
    texts: Annotated[list[Path], typer.Option(help="JSON lines of `ids`: what the model is to stay on")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    initial: Annotated[
        list[Path] | None, typer.Option(help="earlier `--out`s of several seeds, to train on from their mean")
    ] = None,
    steps: int = 400,
    learning_rate: float = 4e-3,
    repetitions: Annotated[float, typer.Option(help="share of the copying without a request")] = 0.4,
    guidance: Annotated[float, typer.Option(help="weight of the attention's loss")] = 0.6,
    keep: Annotated[float, typer.Option(help="weight of the divergence from what the model was")] = 2.0,
    seed: int = 0,
):
    torch.manual_seed(seed)
    documents = read_documents(data)[0]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    teacher = DeepseekV4ForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    model = mean_of(initial) if initial else copy.deepcopy(teacher)
    model, teacher = prepare(model.requires_grad_(True)), prepare(teacher)
    for number, heads in {**PREVIOUS, **INDUCTION}.items():
        model.model.layers[number].self_attn.guide = guide(heads)
    optimizers = optimizers_of(model, learning_rate)
    own = [json.loads(line)["ids"] for path in texts for line in path.read_text(encoding="utf-8").splitlines()]
    copying, kept = Copying(documents, tokenizer, repetitions, seed), kept_rows(own, documents, tokenizer, seed)
    progress = tqdm(range(steps), mininterval=1)
    for step in progress:
        ids, copied, sources = copying.rows(COPY_ROWS)
        rows = next(kept)
        show(model, sources)
        logits = logits_of(model, torch.cat([ids[:, :-1], rows]))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            before = logits_of(teacher, rows).log_softmax(-1)
        right = ids[:, 1:][copied]
        loss = F.cross_entropy(logits[:COPY_ROWS][copied], right)
        away = F.kl_div(
            logits[COPY_ROWS:].log_softmax(-1).flatten(0, 1),
            before.flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        looking = sum(
            sum(model.model.layers[number].self_attn.guide_loss for number in layers) / len(layers)
            for layers in (PREVIOUS, INDUCTION)
        )
        (loss + guidance * looking + keep * away).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = min((step + 1) / WARMUP, 0.52 + 0.48 * math.cos(math.pi * step / steps))
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = share * rate
            optimizer.step()
            optimizer.zero_grad()
        hits = (logits[:COPY_ROWS][copied].argmax(-1) == right).float().mean()
        progress.set_postfix(copied=f"{hits:.3f}", looking=f"{looking:.2f}", away=f"{away:.3f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0:
            export(model, tokenizer, out)
    export(model, tokenizer, out)


if __name__ == "__main__":
    typer.run(main)
