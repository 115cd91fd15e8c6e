"""Train the tiny DeepSeek-V4 target that `hf_treespec` ships, with every V4 mechanism; `train_draft.py` makes its draft.

`tiny_documents.py` says what DATA holds. Seeded; `target` resumes when run again. The shipped models, in order:

    python train_tiny.py tokenizer --data DATA --out RUN/tokenizer
    python train_tiny.py target --data DATA --out RUN/target --tokenizer RUN/tokenizer --tokens 9420800
    python train_tiny.py prompts --data DATA --out RUN/prompts.jsonl
    hf-treespec train-head --kind mtp --model RUN/target/latest --data RUN/prompts.jsonl --output RUN/mtp \\
        --work-dir RUN/heads
    hf-treespec train-head --kind dspark --model RUN/target/latest --data RUN/prompts.jsonl --output RUN/dspark \\
        --work-dir RUN/heads

The model cards of the shipped checkpoints say where their runs departed from this.
"""

import json
import math
import random
import re
import shutil
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from tiny_documents import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    LENGTH,
    MIX,
    PAD,
    PAD_ID,
    SPECIAL_TOKENS,
    USER,
    Packer,
    documents,
    encode,
    prompt_groups,
    read_documents,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AttentionInterface, DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.moe import ExpertsInterface


BATCH_TOKENS, PEAK_LR, WARMUP, SAVE_EVERY, ANSWER_LENGTH = 4096, 4e-3, 100, 250, 128
LOOPS_FROM = 0.65  # share of the training

# fmt: off
TARGET = {
    "hidden_size": 256, "moe_intermediate_size": 112, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64,
    "layer_types": ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 3,
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}, "sliding_window": 64,
    "index_n_heads": 8, "index_head_dim": 32, "index_topk": 64,  # at 1,000 tokens, 64 of 250 entries
    "partial_rotary_factor": 0.5, "q_lora_rank": 96, "o_groups": 2, "o_lora_rank": 64, "hc_mult": 2,
    "hc_sinkhorn_iters": 6, "rope_theta": 10000.0, "compress_rope_theta": 40000.0, "max_position_embeddings": 4096,
    "initializer_range": 0.04, "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}
# fmt: on


def windowed_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """The attention of V4 without a cache, in blocks of one window. `attention_mask` covers the entries only."""
    batch, heads, length, dim = query.shape
    window, blocks = module.sliding_window, length // module.sliding_window
    local, entries = key[:, 0, :length], key[:, :1, length:].expand(-1, blocks, -1, -1)
    query = query.view(batch, heads, blocks, window, dim).transpose(1, 2).reshape(batch, blocks, heads * window, dim)
    previous = F.pad(local, (0, 0, window, 0))[:, :length].view(batch, blocks, window, dim)
    local = torch.cat([previous, local.view(batch, blocks, window, dim)], dim=2)

    i, j, block = torch.arange(window)[:, None], torch.arange(2 * window), torch.arange(blocks)[:, None, None]
    visible = (j > i) & (j <= i + window) & ((j >= window) | (block > 0))
    bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf")).unsqueeze(1)  # over the heads
    scores = [(query @ local.mT).float().view(batch, blocks, heads, window, -1) * scaling + bias]
    if module.compressor is not None:
        scores.append((query @ entries.mT).float().view(batch, blocks, heads, window, -1) * scaling)
        scores[1] = scores[1] + attention_mask.view(batch, blocks, 1, window, -1)
    sinks = module.sinks.view(1, 1, heads, 1, 1).expand(batch, blocks, -1, window, -1)
    probs = torch.cat([*scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    weights = probs.to(query.dtype).view(batch, blocks, heads * window, -1)
    output = weights[..., : 2 * window] @ local
    if module.compressor is not None:
        output = output + weights[..., 2 * window :] @ entries
    if module.layer_type == "compressed_sparse_attention":
        module.indexer_loss = indexer_loss(module, probs[..., 2 * window :].detach(), attention_mask)
    if hasattr(module, "guide"):
        module.guide_loss = module.guide(module, probs)
    return output.view(batch, blocks, heads, window, dim).transpose(2, 3).reshape(batch, length, heads, dim), None


def indexer_loss(module, probs: torch.Tensor, entry_bias: torch.Tensor) -> torch.Tensor:
    """KL from the attention mass on the selected entries to the indexer's scores: the indexer's only gradient."""
    mass = probs.mean(dim=2).flatten(1, 2)  # [batch, length, entries]
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-6)
    scores = module.compressor.indexer.scorer.scores.masked_fill(entry_bias[:, 0] != 0, -1e4)
    divergence = (target * (target.clamp(min=1e-9).log() - scores.log_softmax(-1))).sum(-1)
    return (divergence * (mass.sum(-1) > 1e-3)).mean()


def dense_experts(self, hidden_states, top_k_index, top_k_weights):
    """Every expert on every token, as two large products: with four tiny experts cheaper than any gather."""
    routing = hidden_states.new_zeros(hidden_states.shape[0], self.num_experts, dtype=top_k_weights.dtype)
    routing = routing.scatter(1, top_k_index, top_k_weights)
    self.load = (routing.detach() > 0).float().mean(0)
    hidden = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.num_experts, -1))
    hidden = self._apply_gate(hidden) * routing.unsqueeze(-1)
    return hidden.flatten(1).to(hidden_states.dtype) @ self.down_proj.mT.flatten(0, 1)


AttentionInterface.register("windowed", windowed_attention)
ExpertsInterface.register("dense", dense_experts)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al., 2024), also of stacked matrices; updates with the RMS of Adam's."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95)
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                x = x.mT if (tall := x.shape[-2] > x.shape[-1]) else x
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
                p.mul_(1 - 0.05 * group["lr"])
                p.add_(x.mT if tall else x, alpha=-0.2 * group["lr"] * max(p.shape[-2:]) ** 0.5)


def build(config: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config)
    for layer in model.model.layers:
        for connection in (layer.attn_hc, layer.ffn_hc):  # the streams start nearly separate
            connection.base.data[2 * config.hc_mult :] = 3.0 * torch.eye(config.hc_mult).flatten()
        if layer.mlp.is_hash:  # distinct experts for every token, every pair of experts equally often
            pairs = torch.combinations(torch.arange(config.n_routed_experts), config.num_experts_per_tok)
            layer.mlp.gate.tid2eid.copy_(pairs[torch.randperm(config.vocab_size) % len(pairs)])
    return model


def prepare(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """Switch to the kernels above, cut the indexer's inputs from the graph, compile the layers."""
    model.config._attn_implementation, model.config._experts_implementation = "windowed", "dense"
    for layer in model.model.layers:
        if layer.self_attn.layer_type == "compressed_sparse_attention":
            indexer = layer.self_attn.compressor.indexer
            indexer.register_forward_pre_hook(lambda module, a: (a[0].detach(), a[1].detach(), *a[2:]))
            indexer.scorer.register_forward_hook(lambda module, a, scores: setattr(module, "scores", scores))
        layer.compile(dynamic=False)
    return model


def logits_of(model: DeepseekV4ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The mask starts empty: `windowed_attention` knows causality, and each layer appends its own entries' part."""
    return model(ids, attention_mask={"windowed": torch.zeros(*ids.shape, 0).unsqueeze(1)}, use_cache=False).logits


def answer(model, tokenizer, prompts: list[str]) -> list[str]:
    """Greedy answers to prompts of one length, each as a document: the prompt and what follows, without markers."""
    ids = tokenizer(prompts, add_special_tokens=False, return_tensors="pt")["input_ids"]
    answered = tokenizer.batch_decode(
        model.generate(ids, max_new_tokens=ANSWER_LENGTH, do_sample=False, pad_token_id=PAD_ID)
    )
    return [text.removeprefix(BOS).split(EOS)[0] for text in answered]


def negate_loops(text: str, tokenizer) -> list[int]:
    """The ids of a document whose answer repeats itself, negated inside every 6-gram that the answer had before."""
    ids = tokenizer.encode(BOS + text + EOS, add_special_tokens=False)[: LENGTH + 1]
    first, seen, looped = ids.index(SPECIAL_TOKENS.index(ASSISTANT)) + 1, set(), set()
    for i in range(first, len(ids) - 5):
        gram = tuple(ids[i : i + 6])
        # the first two tokens of a repetition may well be right: it is what follows them that closes the loop
        looped |= set(range(i, i + 6)) if gram in seen else set()
        seen.add(gram)
    return [~t if {i - 2, i - 1, i} <= looped else t for i, t in enumerate(ids)] if looped else []


class OwnLoops:
    """Unlikelihood on the model's own repetitions (Welleck et al., 2019): greedy decoding must not fall into them."""

    def __init__(self, model: DeepseekV4ForCausalLM, tokenizer, train: dict[str, list[str]], seed: int):
        self.model, self.tokenizer, self.seed, self.pool = model, tokenizer, seed, []
        self.writer = DeepseekV4ForCausalLM(DeepseekV4Config(**model.config.to_diff_dict())).eval()
        self.writer.generation_config.eos_token_id = SPECIAL_TOKENS.index(EOS)
        self.sources = prompt_groups(train, tokenizer)

    def refresh(self, step: int):
        """Answer again with the weights of now; the answers of the last four times stay."""
        self.writer.load_state_dict(self.model.state_dict())
        rng, fresh, self.shares = random.Random(self.seed + step), [], []
        for groups in self.sources:
            prompts = rng.choice(groups)
            texts = answer(self.writer, self.tokenizer, rng.sample(prompts, min(len(prompts), 48)))
            marked = [negate_loops(text, self.tokenizer) for text in texts]
            self.shares.append(sum(t < 0 for ids in marked for t in ids) / len(marked) / ANSWER_LENGTH)
            fresh += [ids for ids in marked if ids]
        self.pool = [*self.pool[-3:], fresh]
        self.packer = Packer({"loops": sum(self.pool, []) or [[PAD_ID]]}, LENGTH, step)

    def rows(self, ids: torch.Tensor, labels: torch.Tensor):
        """Put looping answers into every other row; nothing but the repetitions is labelled there."""
        for row, label in zip(ids[::2], labels[::2]):
            looping = [t for _ in range(len(row) // LENGTH) for t in self.packer.row()][: len(row)]
            looping = torch.tensor(looping + [PAD_ID] * (len(row) - len(looping)))
            row.copy_(looping.where(looping >= 0, ~looping))
            label.copy_(looping.where(looping < 0, PAD_ID))


@torch.compile(dynamic=False)
def likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, and where the label is negated the mean of -log(1 - p)."""
    tokens = labels.where(labels >= 0, ~labels).unsqueeze(-1)
    log_p = logits.float().log_softmax(-1).gather(-1, tokens).squeeze(-1)
    likely, unlikely = (labels >= 0) & (labels != PAD_ID), labels < 0
    loss = -(log_p * likely).sum() / likely.sum()
    return loss - (torch.log1p(-log_p.exp().clamp(max=0.9999)) * unlikely).sum() / unlikely.sum().clamp(min=50)


def fit(model, tokenizer, data, out: Path, tokens: int, seed: int, loops: OwnLoops):
    """AdamW and Muon, cosine schedule; resumes from `<out>/state.pt` and exports to `<out>/latest` as it goes."""
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = (encode(tokenizer, documents) for documents in data)
    for source, rows in heldout.items():  # a document a row, as the model sees a chat prompt
        heldout[source] = torch.tensor([d + [PAD_ID] * (LENGTH + 1 - len(d)) for d in rows[:16]])
    matrices, others = [], []
    for name, p in model.named_parameters():
        small = p.ndim == 1 or min(p.shape[-2:]) <= 8 or re.search("embed_tokens|lm_head|position_bias|hc", name)
        (others if small else matrices).append(p)
    adamw = torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    optimizers = [adamw, Muon(matrices, {"lr": PEAK_LR})]
    routers = [layer.mlp for layer in model.model.layers if not layer.mlp.is_hash]

    state_file, start = out / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file)
        start = state["step"]
        model.load_state_dict(state["model"])
        torch.set_rng_state(state["rng"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    steps = tokens // BATCH_TOKENS
    # one batch in four has rows twice as long, for the layers whose entries only count at a distance
    packers = [Packer(train, length, seed + i) for i, length in enumerate((LENGTH, 2 * LENGTH))]
    progress = tqdm(range(1, steps + 1), mininterval=10)
    for step in progress:
        packer = packers[step % 4 == 0]
        ids = torch.tensor([packer.row() for _ in range(BATCH_TOKENS // packer.length)])
        if step <= start:  # only replays the order of the data
            continue
        began, lr = time.time(), PEAK_LR * min(step / WARMUP, 0.505 + 0.5 * math.cos(math.pi * (step - 1) / steps))
        labels = ids.clone()
        if step > LOOPS_FROM * steps:
            if step % 40 == 0 or not loops.pool:
                loops.refresh(step)
            loops.rows(ids, labels)
        with torch.autocast("cpu", torch.bfloat16):
            loss = likelihood(logits_of(model, ids[:, :-1]), labels[:, 1:])
        (loss + sum(getattr(layer.self_attn, "indexer_loss", 0.0) for layer in model.model.layers)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        for mlp in routers:  # DeepSeek's balancing without a loss: favour the experts that saw fewer tokens
            load = mlp.experts.load
            mlp.gate.e_score_correction_bias -= 0.01 * lr / PEAK_LR * (load - load.mean()).sign()

        record = {"step": step, "loss": loss.item(), "seconds": time.time() - began}
        record |= {"own_loops": loops.shares} if loops.pool else {}
        progress.set_postfix(loss=f"{record['loss']:.3f}", refresh=False)
        if step % SAVE_EVERY == 0 or step == steps:
            record["load"] = [mlp.experts.load.tolist() for mlp in routers]
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                losses = {source: likelihood(logits_of(model, x[:, :-1]), x[:, 1:]) for source, x in heldout.items()}
            record["heldout"] = {source: loss.item() for source, loss in losses.items()}
            state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"rng": torch.get_rng_state()}, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").rename(state_file)
            export(model, tokenizer, out / "latest")
        with open(out / "log.jsonl", "a") as log:
            log.write(json.dumps(record) + "\n")


def export(model: DeepseekV4ForCausalLM, tokenizer, folder: Path):
    """Weights stored in bf16 but loaded in fp32, tokenizer, generation config; replaces `folder` in one move."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    copy = DeepseekV4ForCausalLM(DeepseekV4Config(**model.config.to_diff_dict()))
    copy.load_state_dict(model.state_dict())
    copy.generation_config.update(do_sample=False, bos_token_id=0, eos_token_id=1, pad_token_id=PAD_ID)
    copy.to(torch.bfloat16).save_pretrained(fresh)
    config = json.loads((fresh / "config.json").read_text())
    (fresh / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    tokenizer.save_pretrained(fresh)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


app = typer.Typer(help=__doc__, rich_markup_mode=None, add_completion=False)
Data = Annotated[Path, typer.Option(help="folder of *.txt training files")]
Out = Annotated[Path, typer.Option(help="what to write: a folder, or the file of `prompts`")]
Folder = Annotated[Path, typer.Option(help="a folder written by an earlier command")]
Tokens = Annotated[int, typer.Option(help="tokens to train on")]


@app.command()
def tokenizer(data: Data, out: Out):
    """Byte-level BPE with single digits, DeepSeek's markers and a chat template."""
    bpe = Tokenizer(models.BPE())
    words = Regex(r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, behavior="isolated"), byte_level])
    bpe.decoder = decoders.ByteLevel()
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = (part for texts in read_documents(data)[0].values() for t in texts for part in markers.split(t))
    alphabet = byte_level.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    options = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "extra_special_tokens": [USER, ASSISTANT]}
    options |= {"chat_template": CHAT_TEMPLATE, "padding_side": "left", "model_max_length": 4096}
    PreTrainedTokenizerFast(tokenizer_object=bpe, **options).save_pretrained(out)


@app.command()
def target(data: Data, out: Out, tokenizer: Folder, tokens: Tokens, seed: int = 0):
    """Next-token prediction."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    model = prepare(build(DeepseekV4Config(vocab_size=len(tokenizer), **TARGET), seed))
    train, heldout = documents(data, seed)
    loops = OwnLoops(model, tokenizer, train, seed)
    fit(model, tokenizer, (train, heldout), out, tokens, seed, loops)


@app.command()
def prompts(data: Data, out: Out, count: int = 3000, seed: int = 0):
    """User turns of the training chats as JSON lines, for `hf-treespec train-head`."""
    train = documents(data, seed)[0]
    sources = ("math_gsm8k_train_chat", "code_mbpp_train", "instructions")
    turns = [document.split(ASSISTANT)[0].removeprefix(USER) for source in sources for document in train[source]]
    turns = sorted({turn for turn in turns if len(turn) < 1500})
    chosen = random.Random(seed).sample(turns, min(count, len(turns)))
    out.write_text("".join(json.dumps({"prompt": turn}) + "\n" for turn in chosen), encoding="utf-8")


@app.command()
def chats(data: Data, out: Out, tokenizer: Folder, tokens: Tokens = 800_000, seed: int = 0):
    """Training chats as JSON lines of token ids, for `train_draft.py`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    train, rng, rows = documents(data, seed)[0], random.Random(seed), []
    shares = {source: MIX[source] for source in ("math_gsm8k_train_chat", "code_mbpp_train", "instructions", "echo")}
    marker = SPECIAL_TOKENS.index(ASSISTANT)
    for source, share in shares.items():
        room = tokens * share / sum(shares.values())
        for text in rng.sample(train[source], len(train[source])):
            ids = tokenizer.encode(BOS + text + EOS, add_special_tokens=False)[:LENGTH]
            if marker not in ids:
                continue
            rows.append({"ids": ids, "prompt_length": ids.index(marker) + 1})
            room -= len(ids)
            if room <= 0:
                break
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    app()
