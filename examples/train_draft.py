"""Distil an ordinary draft model, one Llama layer, from what a target says about its own answers.

    python train_tiny.py prompts --data DATA --out RUN/prompts.jsonl
    hf-treespec train-head ... --data RUN/prompts.jsonl --work-dir RUN/heads    # writes the answers
    python train_tiny.py chats --data DATA --tokenizer RUN/tokenizer --out RUN/chats.jsonl
    python train_draft.py watch --target RUN/target/latest --texts RUN/heads/continuations-*.jsonl --out RUN/answers.pt
    python train_draft.py watch --target RUN/target/latest --texts RUN/chats.jsonl --out RUN/chats.pt
    python train_draft.py train --seen RUN/answers.pt --seen RUN/chats.pt --out RUN/draft

Any causal model of the target's vocabulary can draft. On a CPU a draft step costs its operators and its weights, so one
plain layer, and a narrow one. The target is run once over the texts; its likeliest tokens at every position are kept.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from train_tiny import Muon
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


LIKELIEST, PEAK_LR, WARMUP, HELD_OUT = 48, 4e-3, 50, 64
# Weaker drafts that are kept, by the share of the training behind them.
KEEP_AT = (0.01, 0.03, 0.1, 0.3)
# Weight of the positions inside the prompt: nothing is drafted there, but more is seen.
PROMPT_WEIGHT = 0.25
# fmt: off
DRAFT = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.04,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}
# fmt: on

RunPath = Annotated[Path, typer.Option(help="a file or folder of the run")]
app = typer.Typer(help=__doc__, rich_markup_mode=None, add_completion=False)


@app.command()
@torch.no_grad()
def watch(target: RunPath, texts: RunPath, out: RunPath, batch_size: int = 16):
    """The target's likeliest tokens behind every token of `texts`, JSON lines of `ids` and `prompt_length`."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    rows = [json.loads(line) for line in texts.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: len(row["ids"]))
    seen = []
    for start in tqdm(range(0, len(rows), batch_size)):
        batch = rows[start : start + batch_size]
        # What is behind the end of a text changes nothing before it.
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["ids"]) for row in batch], batch_first=True)
        likeliest = model(ids, use_cache=False).logits.log_softmax(-1).topk(LIKELIEST)
        for row, values, tokens in zip(batch, likeliest.values.half(), likeliest.indices.short()):
            length = len(row["ids"])
            seen.append({**row, "log_probabilities": values[:length].clone(), "tokens": tokens[:length].clone()})
    torch.save(seen, out)


def batches(rows: list[dict], tokens: int, rng: random.Random) -> Iterator[list[dict]]:
    """Batches of at most `tokens` tokens, padding included, epoch after epoch."""
    while True:
        order, made = rng.sample(rows, len(rows)), []
        for start in range(0, len(order), 256):
            batch: list[dict] = []
            for row in sorted(order[start : start + 256], key=lambda row: len(row["ids"])):
                if (len(batch) + 1) * len(row["ids"]) > tokens:
                    made.append(batch)
                    batch = []
                batch.append(row)
            made.append(batch)
        yield from rng.sample(made, len(made))


def divergence(model, batch: list[dict], temperature: float, prompt_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """KL from the target's likeliest tokens, sharpened: greedy decoding takes the first of them, nothing else.

    Also how many of the answers' tokens the draft would have guessed, and how many there are.
    """

    def padded(values: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    ids = padded([torch.tensor(row["ids"]) for row in batch])
    inside = padded([torch.ones(len(row["ids"]), dtype=torch.bool) for row in batch])
    first = torch.tensor([row["prompt_length"] - 1 for row in batch])
    answer = (torch.arange(ids.shape[1]) >= first[:, None])[inside]
    tokens = padded([row["tokens"] for row in batch])[inside].long()
    wanted = (padded([row["log_probabilities"] for row in batch])[inside].float() / temperature).log_softmax(-1)
    logits = model.lm_head(model.model(ids, use_cache=False).last_hidden_state[inside])
    guessed = logits.log_softmax(-1).gather(-1, tokens)
    weights = torch.where(answer, 1.0, prompt_weight)
    loss = ((wanted.exp() * (wanted - guessed)).sum(-1) * weights).sum() / weights.sum()
    return loss, ((logits.argmax(-1) == tokens[:, 0]) & answer).sum(), answer.sum()


@torch.no_grad()
def held_out_agreement(model, rows: list[dict]) -> float:
    parts = [divergence(model, rows[start : start + 16], 1.0, 0.0)[1:] for start in range(0, len(rows), 16)]
    hits, count = (sum(part) for part in zip(*parts))
    return float(hits / count)


@app.command()
def train(
    seen: Annotated[list[Path], typer.Option(help="files that `watch` wrote; of the first some texts are held out")],
    out: RunPath,
    target: Annotated[Path, typer.Option(help="folder whose tokenizer goes with the draft")],
    initial: Annotated[Path | None, typer.Option(help="draft model to train on")] = None,
    steps: int = 2000,
    batch_tokens: int = 4096,
    temperature: float = 0.5,
    seed: int = 0,
):
    """AdamW and Muon with a cosine schedule."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(target)
    if initial is None:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **DRAFT))
    else:
        model = LlamaForCausalLM.from_pretrained(initial, dtype=torch.float32)
    answers, *others = [torch.load(path) for path in seen]
    rng.shuffle(answers)
    held_out, rows = answers[:HELD_OUT], sum(others, answers[HELD_OUT:])
    tables = {id(p) for p in (model.model.embed_tokens.weight, model.lm_head.weight)}
    matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in tables]
    rest = [p for p in model.parameters() if p.ndim == 1 or id(p) in tables]
    optimizers = [
        Muon(matrices, {"lr": PEAK_LR}),
        torch.optim.AdamW(rest, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    kept = {round(steps * share): f"at-{100 * share:.0f}" for share in KEEP_AT}
    progress = tqdm(zip(range(steps), batches(rows, batch_tokens, rng)), total=steps, mininterval=1)
    for step, batch in progress:
        loss, *_ = divergence(model, batch, temperature, PROMPT_WEIGHT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min((step + 1) / WARMUP, 0.505 + 0.495 * math.cos(math.pi * step / steps))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = PEAK_LR * rate
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 in kept:
            export(model, tokenizer, out / kept[step + 1])
        if (step + 1) % 100 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}", agreement=f"{held_out_agreement(model, held_out):.3f}")
    print(
        f"held out: {100 * held_out_agreement(model, held_out):.1f} % of the answers' tokens are the draft's first guess"
    )
    export(model, tokenizer, out)


def export(model: LlamaForCausalLM, tokenizer, folder: Path):
    """Stored in bf16, loaded in fp32."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.update(do_sample=False, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    copy.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    app()
