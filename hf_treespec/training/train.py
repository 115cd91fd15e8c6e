"""`hf-treespec train-head`: a draft head for a model, from what the model itself writes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AttentionInterface

from ..cache import TreeCache
from ..heads import DraftHead, DSparkHead, MTPHead, StreamTaps
from ..tree import TokenTree
from .losses import Features, dspark_loss, mtp_loss, recursive_attention


AttentionInterface.register("treespec_recursive", recursive_attention)
SAVE_EVERY = 100
_RECURSIVE_STEPS = 4
_SCALES = tuple(0.3 + 0.05 * i for i in range(21))
# Token ids, and how many of them are the prompt.
Text = tuple[list[int], int]


def new_head(model, kind: str, settings: dict[str, Any], seed: int) -> DraftHead:
    """A head to train, in fp32: what it shares with the model's own parts starts as theirs.

    Args:
        kind: `"mtp"` or `"dspark"`.
        settings: the `dspark_*` keys, for DSpark.
    """
    torch.manual_seed(seed)
    head = MTPHead(model.config) if kind == "mtp" else DSparkHead(model.config, settings, confidence_bias=False)
    width = model.config.hidden_size
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(parameter)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=model.config.initializer_range)
        else:
            torch.nn.init.zeros_(parameter)
    last = model.model.layers[-1].state_dict()
    for layer in head.layers:
        own = layer.state_dict()
        layer.load_state_dict({name: value for name, value in last.items() if name in own}, strict=False)
    head.hc_head.load_state_dict(model.model.hc_head.state_dict())
    head.norm.load_state_dict(model.model.norm.state_dict())
    if kind == "mtp":
        with torch.no_grad():
            head.h_proj.weight.copy_(torch.eye(width))
    return head.float().to(model.device)


def held_out_count(texts: list) -> int:
    """How many of the texts, the last ones, are not trained on: 2 %."""
    return max(1, round(0.02 * len(texts)))


def train_head(
    model,
    head: DraftHead,
    rows: list[Text],
    state_path: Path,
    steps: int,
    batch_size: int,
    max_length: int,
    learning_rate: float,
    seed: int,
    bf16: bool = False,
    teacher_temperature: float = 1.0,
) -> list[float]:
    """Muon and AdamW on the divergence from the frozen model, cosine schedule; resumes from `state_path`. At the end the
    logits are scaled to fit the model's at temperature 1.

    Args:
        model: the target, enabled. Its parameters are not trained.
        head: trained in place.
        rows: texts (token ids, prompt length); the last 2 % are held out.
        steps: optimizer steps in all, each of `batch_size` texts, of which the last `max_length` tokens are taken.
        bf16: whether the head's products are in bf16; its weights and the model stay as they are.
        teacher_temperature: of the model's distributions. Below 1 the head learns the first choices rather than the
            rest: greedy verification asks for no more.

    Returns:
        Held-out losses, one at each save.
    """
    texts = [_cut(ids, prompt_length, max_length) for ids, prompt_length in rows]
    held_out = held_out_count(texts)
    if len(texts) - held_out < batch_size:
        raise ValueError(f"{len(texts)} texts are too few: a batch takes {batch_size}, {held_out} are held out.")
    texts, held_out_texts = texts[:-held_out], texts[-held_out:]
    trained = [parameter.requires_grad_() for parameter in head.parameters()]
    optimizers = _optimizers(head, learning_rate)
    first, history = 0, []
    if state_path.exists():
        state = torch.load(state_path)
        head.load_state_dict(state["head"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, history = state["step"], state["history"]
    learner, warmup = _Learner(model, head, bf16, teacher_temperature), max(1, min(100, steps // 10))
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=f"train {head.kind}", mininterval=1)
    with _frozen(model):
        for step in bar:
            decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
            loss = learner.loss(_batch(texts, batch_size, step, seed), step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / warmup, decay)
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
                with torch.no_grad():
                    history.append(float(learner.loss(held_out_texts[:batch_size], 0)))
                state = {"head": head.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
                torch.save({**state, "step": step + 1, "history": history}, state_path.with_suffix(".tmp"))
                state_path.with_suffix(".tmp").replace(state_path)
                bar.set_postfix(loss=f"{loss.item():.3f}", held_out=f"{history[-1]:.3f}")
    head.requires_grad_(False).eval()
    _fit_scale(head, _Learner(model, head), held_out_texts[:batch_size])
    return history


@torch.no_grad()
def _fit_scale(head: DraftHead, learner: "_Learner", texts: list[Text]) -> None:
    """Scales the head's logits so that they diverge least from the model's at temperature 1, on `texts`: a teacher at
    another temperature leaves its own mark on them, and draft probabilities are taken for what they say."""
    now, losses = 1.0, {}
    for factor in _SCALES:
        head.scale_logits(factor / now)
        now, losses[factor] = factor, float(learner.loss(texts, 0))
    head.scale_logits(min(losses, key=losses.get) / now)


def _cut(ids: list[int], prompt_length: int, max_length: int) -> Text:
    """The last tokens of a text: what the model wrote is what is trained on, and a prompt may be long."""
    dropped = max(0, len(ids) - max_length)
    return ids[dropped:], max(0, prompt_length - dropped)


def _optimizers(head: DraftHead, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of linear layers, AdamW for everything else; one learning rate suits both."""
    matrices = [m.weight for m in head.modules() if type(m) is torch.nn.Linear and min(m.weight.shape) > 1]
    others = [p for p in head.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


@contextmanager
def _frozen(model) -> Iterator[None]:
    """The model's parameters take no gradients meanwhile."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _batch(texts: list[Text], batch_size: int, step: int, seed: int) -> list[Text]:
    """The texts of a step: every epoch is one random order, batches are of similar length."""
    per_epoch = len(texts) // batch_size
    epoch, number = divmod(step, per_epoch)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    # Sorted within groups of 16 batches: little padding, and still random.
    group = 16 * batch_size
    batches = []
    for start in range(0, per_epoch * batch_size, group):
        members = sorted(order[start : min(start + group, per_epoch * batch_size)], key=lambda i: len(texts[i][0]))
        batches += [members[i : i + batch_size] for i in range(0, len(members), batch_size)]
    shuffled = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return [texts[i] for i in batches[shuffled[number]]]


class _Learner:
    """Turns texts into a loss: the frozen model's streams in, the head's divergence out."""

    def __init__(self, model, head: DraftHead, bf16: bool = False, temperature: float = 1.0) -> None:
        self.model, self.head, self.bf16, self.temperature = model, head, bf16, temperature
        self.taps = StreamTaps(model, head.taps)
        head.config._attn_implementation = "treespec_recursive"

    def loss(self, texts: list[Text], step: int) -> Tensor:
        features = self._see(texts)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16):
            return self._loss(features, step)

    def _loss(self, features: Features, step: int) -> Tensor:
        if isinstance(self.head, MTPHead):
            return mtp_loss(self.model, self.head, features, _RECURSIVE_STEPS, self.temperature)
        anchors = max(1, features.ids.shape[1] // self.head.block_size)
        generator = torch.Generator().manual_seed(step)
        return dspark_loss(self.model, self.head, features, anchors, generator, self.temperature)

    @torch.no_grad()
    def _see(self, texts: list[Text]) -> Features:
        device, width = self.model.device, max(len(text) for text, _ in texts)
        lengths, prompts = torch.tensor([(len(text), prompt) for text, prompt in texts], device=device).T
        ids = torch.tensor([text + text[-1:] * (width - len(text)) for text, _ in texts], device=device)
        cache = TreeCache(self.model.config, len(texts), device=ids.device)
        tree = TokenTree.chain(ids, lengths)
        with self.taps.attached(), cache.fork(tree) as fork:
            hidden_states = self.model.model(**fork.model_inputs()).last_hidden_state
            written = tree.valid & (torch.arange(width, device=device) >= prompts[:, None])
            # The head is trained in fp32, whatever the model's dtype is.
            return Features(ids, tree.valid, written, hidden_states, [stream.float() for stream in self.taps.take()])
