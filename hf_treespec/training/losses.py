"""What a head is trained on: the frozen model's own distribution, at every depth that the head will draft."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..heads import DSparkHead, MTPHead


# Deeper drafts matter only where all before them were accepted.
_DECAY = 0.8


@dataclass
class Features:
    """What the frozen model says of a batch of texts, right-padded.

    Attributes:
        ids, valid: tokens `[B, T]`, and which are real.
        written: which of them the model wrote itself, `[B, T]`.
        hidden_states: what the vocabulary projection takes, `[B, T, D]`.
        streams: output streams of the head's tapped layers, `[B, T, hc_mult, D]` each.
    """

    ids: Tensor
    valid: Tensor
    written: Tensor
    hidden_states: Tensor
    streams: list[Tensor]


def recursive_attention(module, query, key, value, attention_mask, scaling, earlier: list[Tensor], **kwargs):
    """The attention of a draft step over whole texts, every position being an anchor of its own.

    A query at position p of step s belongs to the text that ends at p - s: of that it sees the keys of step 0, and
    behind it one key of each later step, its own being the last.

    Args:
        query, key: `[B, H, T, D]` and `[B, 1, T, D]`, rotated.
        earlier: keys of the steps before, to which this step's are added.
    """
    earlier.append(key)
    step, count = len(earlier) - 1, query.shape[2]
    position = torch.arange(count, device=query.device)
    distance = position[:, None] - position
    seen = (distance >= step) & (distance < module.sliding_window)
    scores = [((query @ earlier[0].mT).float() * scaling).masked_fill(~seen, float("-inf"))]
    later = [F.pad(keys, (0, 0, step - i, 0))[:, :, :count] for i, keys in enumerate(earlier[1:], start=1)]
    scores += [(query * keys).sum(-1, keepdim=True).float() * scaling for keys in later]
    sinks = module.sinks.view(1, -1, 1, 1).expand(len(query), -1, count, -1)
    weights = torch.cat([*scores, sinks], -1).softmax(-1)[..., :-1].to(query.dtype)
    output = weights[..., :count] @ earlier[0]
    for i, keys in enumerate(later):
        output = output + weights[..., count + i, None] * keys
    return output.transpose(1, 2), None


def mtp_loss(model, head: MTPHead, features: Features, steps: int, temperature: float = 1.0) -> Tensor:
    """Divergence of each recursive step's distribution from the model's at a `temperature`, averaged with falling
    weights, where the model's own words go on: nothing is drafted in a prompt."""
    ids, written = features.ids, features.written
    positions = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    embedded = model.get_input_embeddings()(ids[:, 1:]).float()
    target = _log_probabilities(model, features.hidden_states[:, 1:], temperature)
    lanes, earlier, losses = features.streams[0][:, :-1], [], []
    for step in range(steps):
        # Position p predicts token p + 2, of which the model speaks at p + 1.
        lanes = head(head.fuse(embedded, lanes), positions, earlier=earlier)
        logits = model.lm_head(head.collapse(lanes).to(model.dtype))
        counted = written[:, 1:] & (positions >= step)
        losses.append(_divergence(logits[counted], target[counted]))
        lanes = F.pad(lanes, (0, 0, 0, 0, 1, 0))[:, :-1]
    return _decayed(torch.stack(losses))


def dspark_loss(
    model,
    head: DSparkHead,
    features: Features,
    anchors: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence of every slot's distribution, given the tokens before it, from the model's at a `temperature`, and the
    confidence head's cross-entropy.

    Args:
        anchors: blocks per text, at random places.
    """
    ids, device = features.ids, features.ids.device
    batch, size = len(ids), head.block_size
    slots, index = torch.arange(size, device=device), torch.arange(batch, device=device)[:, None, None]
    # Roots with a token before them and the whole block behind, as far as the text has room for both.
    room = (features.valid.sum(1, keepdim=True) - size - 1).clamp(min=1)
    uniform = torch.rand(batch, anchors, generator=generator).to(device)
    roots = 1 + (uniform * room).long()  # [B, A]
    places = roots[..., None] + slots  # [B, A, S]
    inside = (places < features.valid.sum(1)[:, None, None]) & (places < ids.shape[1] - 1)
    places = places.clamp(max=ids.shape[1] - 2)

    tokens = torch.where(slots == 0, ids[index, places], head.noise_token_id).flatten(1)
    context = head.context(features.streams)
    text = torch.arange(ids.shape[1], device=device).expand(batch, -1)
    distance = roots[..., None] - text[:, None]  # [B, A, T]
    seen = (distance > 0) & (distance <= head.config.sliding_window)
    same = torch.eye(anchors, dtype=torch.bool, device=device).repeat_interleave(size, 1)  # [A, A * S]
    mask = torch.cat([seen, same.expand(batch, -1, -1)], -1).repeat_interleave(size, 1)
    embedded = model.get_input_embeddings()(tokens).float()
    states = head(embedded, places.flatten(1), mask, head.window_keys(context, text)).view(batch, anchors, size, -1)

    markov = head.markov_w1(ids[index, places])  # [B, A, S, rank]
    logits = model.lm_head(head.norm(states).to(model.dtype)) + head.markov_w2(markov)
    target = _log_probabilities(model, features.hidden_states[index, places], temperature)
    losses, confidences = [], head.confidence_logit(states, markov)
    for slot in range(size):
        counted = inside[:, :, slot]
        draft, wanted = logits[:, :, slot][counted], target[:, :, slot][counted]
        losses.append(_divergence(draft, wanted))
        taken = draft.argmax(-1) == wanted.argmax(-1)
        guess = confidences[:, :, slot][counted].float()
        losses[-1] = losses[-1] + 0.3 * F.binary_cross_entropy_with_logits(guess, taken.float())
    return _decayed(torch.stack(losses))


@torch.no_grad()
def _log_probabilities(model, hidden_states: Tensor, temperature: float) -> Tensor:
    """The model's own distributions `[..., V]`, as logarithms."""
    return (model.lm_head(hidden_states).float() / temperature).log_softmax(-1)


def _divergence(logits: Tensor, target: Tensor) -> Tensor:
    """Mean KL(target || draft) of draft logits `[M, V]`."""
    return F.kl_div(logits.float().log_softmax(-1), target, reduction="batchmean", log_target=True)


def _decayed(losses: Tensor) -> Tensor:
    weights = _DECAY ** torch.arange(len(losses), device=losses.device)
    return (losses * weights).sum() / weights.sum()
