"""The MTP head as plain matrix products from its published equations, and checkpoints in the official layout."""

import json
import math
from pathlib import Path

import torch
from oracle import build_model, oracle_logits, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor


def head_tensors(config, seed: int = 5) -> dict[str, Tensor]:
    """Random tensors of a head, named and shaped as in the official checkpoints, without `mtp.0.`."""
    width, hidden, lanes = config.hidden_size, config.moe_intermediate_size, config.hc_mult
    heads, dim, groups, rank = config.num_attention_heads, config.head_dim, config.o_groups, config.o_lora_rank
    mixes = (2 + lanes) * lanes
    shapes = {f"{name}.weight": (width,) for name in ("enorm", "hnorm", "norm", "attn_norm", "ffn_norm")}
    shapes |= {f"{name}.weight": (width, width) for name in ("e_proj", "h_proj")}
    shapes |= {"hc_head_fn": (lanes, lanes * width), "hc_head_base": (lanes,), "hc_head_scale": (1,)}
    for site in ("attn", "ffn"):
        shapes |= {f"hc_{site}_fn": (mixes, lanes * width), f"hc_{site}_base": (mixes,), f"hc_{site}_scale": (3,)}
    shapes |= {
        "attn.wq_a.weight": (config.q_lora_rank, width),
        "attn.wq_b.weight": (heads * dim, config.q_lora_rank),
        "attn.wkv.weight": (dim, width),
        "attn.wo_a.weight": (groups * rank, heads * dim // groups),
        "attn.wo_b.weight": (width, groups * rank),
        "attn.q_norm.weight": (config.q_lora_rank,),
        "attn.kv_norm.weight": (dim,),
        "attn.attn_sink": (heads,),
        "ffn.gate.weight": (config.n_routed_experts, width),
        "ffn.gate.bias": (config.n_routed_experts,),
    }
    for expert in (*(f"experts.{e}" for e in range(config.n_routed_experts)), "shared_experts"):
        shapes |= {f"ffn.{expert}.{w}.weight": (hidden, width) for w in ("w1", "w3")}
        shapes[f"ffn.{expert}.w2.weight"] = (width, hidden)
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=rng)
        norm = "norm" in name
        tensors[name] = 1 + 0.2 * values if norm else values * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
    return tensors


# The straight-line implementation. Everything is one position at a time, in float64.


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, config, sign: int = 1) -> Tensor:
    """RoPE on the trailing channels, neighbours paired, plain frequencies."""
    size = int(config.head_dim * config.partial_rotary_factor)
    theta = config.rope_parameters["main"]["rope_theta"]
    plain, turned = x[..., :-size], x[..., -size:]
    angle = sign * position * theta ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    a, b = turned[..., ::2], turned[..., 1::2]
    pairs = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([plain, pairs.flatten(-2)], -1)


class PlainHead:
    """The head on one text. Keys are kept by position; `step` at a position sees those of the window before it."""

    def __init__(self, tensors: dict[str, Tensor], model, streams: Tensor, following: Tensor) -> None:
        """`streams` `[L, lanes, D]` are the target's in front of `hc_head`, `following` `[L]` the token behind each."""
        self.w = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = model.config
        self.table, self.vocabulary = model.model.embed_tokens.weight.double(), model.lm_head.weight.double()
        self.keys = [self._key(self._fuse(t, s), p) for p, (t, s) in enumerate(zip(following, streams.double()))]

    def step(self, token: int, lanes: Tensor, position: int, keys: list[Tensor]):
        """Logits, output lanes, and `keys` (by position, up to this one) with this position's behind."""
        x = self._fuse(token, lanes.double())
        keys = [*keys[:position], self._key(x, position)]
        x = self._site(x, "attn", lambda y: self._attend(y, position, keys))
        x = self._site(x, "ffn", self._experts)
        mixes = self.w["hc_head_fn"] @ rms(x.flatten(), eps=self.config.rms_norm_eps)
        weights = torch.sigmoid(mixes * self.w["hc_head_scale"] + self.w["hc_head_base"]) + self.config.hc_eps
        return self.vocabulary @ rms(weights @ x, self.w["norm.weight"]), x, keys

    def _fuse(self, token, lanes: Tensor) -> Tensor:
        embedded = self.w["e_proj.weight"] @ rms(self.table[token], self.w["enorm.weight"])
        return torch.stack([embedded + self.w["h_proj.weight"] @ rms(x, self.w["hnorm.weight"]) for x in lanes])

    def _mix(self, x: Tensor, site: str):
        """How lanes are collapsed, how an output is spread over them, and how they are mixed."""
        lanes, eps = len(x), self.config.hc_eps
        z = self.w[f"hc_{site}_fn"] @ rms(x.flatten())
        base, scale = self.w[f"hc_{site}_base"], self.w[f"hc_{site}_scale"]
        pre = torch.sigmoid(z[:lanes] * scale[0] + base[:lanes]) + eps
        post = 2 * torch.sigmoid(z[lanes : 2 * lanes] * scale[1] + base[lanes : 2 * lanes])
        comb = (z[2 * lanes :] * scale[2] + base[2 * lanes :]).view(lanes, lanes).softmax(-1) + eps
        comb = comb / (comb.sum(0) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0) + eps)
        return pre, post, comb

    def _site(self, x: Tensor, site: str, block) -> Tensor:
        pre, post, comb = self._mix(x, site)
        return torch.outer(post, block(rms(pre @ x, self.w[f"{site}_norm.weight"]))) + comb.T @ x

    def _key(self, x: Tensor, position: int) -> Tensor:
        pre, _, _ = self._mix(x, "attn")
        collapsed = rms(pre @ x, self.w["attn_norm.weight"])
        return rotate(rms(self.w["attn.wkv.weight"] @ collapsed, self.w["attn.kv_norm.weight"]), position, self.config)

    def _attend(self, y: Tensor, position: int, keys: list[Tensor]) -> Tensor:
        config = self.config
        residual = rms(self.w["attn.wq_a.weight"] @ y, self.w["attn.q_norm.weight"])
        query = rms((self.w["attn.wq_b.weight"] @ residual).view(config.num_attention_heads, -1))
        seen = torch.stack(keys[max(0, position - config.sliding_window + 1) :])
        scores = rotate(query, position, config) @ seen.T / math.sqrt(config.head_dim)
        weights = torch.cat([scores, self.w["attn.attn_sink"][:, None]], 1).softmax(-1)[:, :-1]
        heads = rotate(weights @ seen, position, config, sign=-1)
        groups = heads.reshape(config.o_groups, -1)
        down = self.w["attn.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        return self.w["attn.wo_b.weight"] @ torch.cat([a @ b for a, b in zip(down, groups)])

    def _experts(self, y: Tensor) -> Tensor:
        config = self.config
        scores = torch.nn.functional.softplus(self.w["ffn.gate.weight"] @ y).sqrt()
        chosen = (scores + self.w["ffn.gate.bias"]).topk(config.num_experts_per_tok).indices.tolist()
        shares = scores[chosen] / (scores[chosen].sum() + 1e-20) * config.routed_scaling_factor
        routed = sum(share * self._expert(f"ffn.experts.{e}", y) for share, e in zip(shares, chosen))
        return routed + self._expert("ffn.shared_experts", y)

    def _expert(self, name: str, y: Tensor) -> Tensor:
        limit = self.config.swiglu_limit
        gate, up = (self.w[f"{name}.{w}.weight"] @ y for w in ("w1", "w3"))
        return self.w[f"{name}.w2.weight"] @ (
            torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        )


def oracle_streams(model, text: Tensor) -> Tensor:
    """The stock model's streams in front of `hc_head`, `[T, lanes, D]`."""
    seen = []
    handle = model.model.hc_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    oracle_logits(model, text[None])
    handle.remove()
    return seen[0]


# Checkpoints


def official_name(name: str) -> str:
    """What the official checkpoints call a tensor that `save_pretrained` wrote."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def write_checkpoint(model, folder: Path, tensors: dict[str, Tensor], shards: int = 4) -> Path:
    """`model` and its head (`mtp....` names) as a sharded checkpoint in official names, with an index."""
    model.save_pretrained(folder)
    single = folder / "model.safetensors"
    everything = {official_name(name): tensor for name, tensor in load_file(single).items()} | tensors
    single.unlink()
    names = sorted(everything)
    size = -(-len(names) // shards)
    weight_map = {}
    for i in range(shards):
        part, shard = names[i * size : (i + 1) * size], f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: everything[name].contiguous() for name in part}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"mtp.0.{name}": tensor for name, tensor in tensors.items()}


def shrink_layers(model) -> None:
    """Makes the next token depend mostly on the present one, as far as a random model can."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_b_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(0.1)


def bigram_head(model) -> dict[str, Tensor]:
    """A head that is often right about `shrink_layers`' model: it only hands on the embedding."""
    tensors = head_tensors(model.config)
    for name in tensors:
        if name.endswith(("wo_b.weight", "w2.weight")):
            tensors[name] *= 0.1
    tensors["e_proj.weight"] = torch.eye(model.config.hidden_size)
    tensors["h_proj.weight"] *= 0.1
    tensors["enorm.weight"] = torch.ones_like(tensors["enorm.weight"])
    tensors["norm.weight"] = model.model.norm.weight.detach().clone()
    for part in ("fn", "base", "scale"):
        tensors[f"hc_head_{part}"] = getattr(model.model.hc_head, f"hc_{part}").detach().clone()
    return tensors


def make_checkpoint(folder: Path) -> Path:
    """A model and a head that is often right about it, in the official layout."""
    model = build_model(tiny_config())
    shrink_layers(model)
    return write_checkpoint(model, folder, mtp(bigram_head(model)))
