"""The heads as plain matrix products from its published equations, and checkpoints in the official layout."""

import json
import math
from pathlib import Path

import torch
from oracle import build_model, oracle_logits, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor


def _block_shapes(config) -> dict[str, tuple[int, ...]]:
    """Tensors of one decoder layer and what they are shaped like, without `mtp.<stage>.`."""
    width, hidden, lanes = config.hidden_size, config.moe_intermediate_size, config.hc_mult
    heads, dim, groups, rank = config.num_attention_heads, config.head_dim, config.o_groups, config.o_lora_rank
    mixes = (2 + lanes) * lanes
    shapes = {"attn_norm.weight": (width,), "ffn_norm.weight": (width,)}
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
    return shapes


def _output_shapes(config) -> dict[str, tuple[int, ...]]:
    width, lanes = config.hidden_size, config.hc_mult
    return {
        "norm.weight": (width,),
        "hc_head_fn": (lanes, lanes * width),
        "hc_head_base": (lanes,),
        "hc_head_scale": (1,),
    }


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=rng)
        norm = "norm" in name
        tensors[name] = 1 + 0.2 * values if norm else values * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
    return tensors


def head_tensors(config, seed: int = 5) -> dict[str, Tensor]:
    """Random tensors of an MTP head, named and shaped as in the official checkpoints, without `mtp.0.`."""
    width = config.hidden_size
    shapes = {f"{name}.weight": (width,) for name in ("enorm", "hnorm")}
    shapes |= {f"{name}.weight": (width, width) for name in ("e_proj", "h_proj")}
    return _random(shapes | _block_shapes(config) | _output_shapes(config), seed)


def dspark_settings(config, **changes) -> dict:
    """The `dspark_*` keys of a checkpoint: the taps are the last three layers, the last of which ends the trunk."""
    layers = config.num_hidden_layers
    settings = {"dspark_block_size": 5, "dspark_noise_token_id": config.vocab_size - 1, "dspark_markov_rank": 12}
    return settings | {"dspark_target_layer_ids": list(range(layers - 3, layers))} | changes


def dspark_tensors(config, settings: dict, seed: int = 6, stages: int = 3, bias: bool = False) -> dict[str, Tensor]:
    """Random tensors of a DSpark head in official names, `mtp.0.` and on."""
    width, rank, vocab = config.hidden_size, settings["dspark_markov_rank"], config.vocab_size
    shapes = {f"mtp.{stage}.{name}": shape for stage in range(stages) for name, shape in _block_shapes(config).items()}
    shapes["mtp.0.main_proj.weight"] = (width, width * len(settings["dspark_target_layer_ids"]))
    shapes["mtp.0.main_norm.weight"] = (width,)
    last = f"mtp.{stages - 1}."
    shapes |= {last + name: shape for name, shape in _output_shapes(config).items()}
    shapes |= {f"{last}markov_head.markov_{w}.weight": (vocab, rank) for w in ("w1", "w2")}
    shapes[last + "confidence_head.proj.weight"] = (1, width + rank)
    shapes |= {last + "confidence_head.proj.bias": (1,)} if bias else {}
    return _random(shapes, seed)


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


class PlainBlock:
    """One decoder layer, and what reads its output lanes."""

    def __init__(self, tensors: dict[str, Tensor], model) -> None:
        self.w = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = model.config
        self.table, self.vocabulary = model.model.embed_tokens.weight.double(), model.lm_head.weight.double()

    def collapse(self, x: Tensor) -> Tensor:
        mixes = self.w["hc_head_fn"] @ rms(x.flatten(), eps=self.config.rms_norm_eps)
        weights = torch.sigmoid(mixes * self.w["hc_head_scale"] + self.w["hc_head_base"]) + self.config.hc_eps
        return weights @ x

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

    def _site_input(self, x: Tensor, site: str) -> Tensor:
        pre, _, _ = self._mix(x, site)
        return rms(pre @ x, self.w[f"{site}_norm.weight"])

    def _site(self, x: Tensor, site: str, block) -> Tensor:
        _, post, comb = self._mix(x, site)
        return torch.outer(post, block(self._site_input(x, site))) + comb.T @ x

    def _rotated_key(self, y: Tensor, position: int) -> Tensor:
        return rotate(rms(self.w["attn.wkv.weight"] @ y, self.w["attn.kv_norm.weight"]), position, self.config)

    def _attend(self, y: Tensor, position: int, seen: list[Tensor]) -> Tensor:
        config = self.config
        residual = rms(self.w["attn.wq_a.weight"] @ y, self.w["attn.q_norm.weight"])
        query = rms((self.w["attn.wq_b.weight"] @ residual).view(config.num_attention_heads, -1))
        seen = torch.stack(seen)
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


class PlainHead(PlainBlock):
    """MTP on one text. Keys are kept by position; `step` at a position sees those of the window before it."""

    def __init__(self, tensors: dict[str, Tensor], model, streams: Tensor, following: Tensor) -> None:
        """`streams` `[L, lanes, D]` are the target's in front of `hc_head`, `following` `[L]` the token behind each."""
        super().__init__(tensors, model)
        self.keys = [self._key(self._fuse(t, s), p) for p, (t, s) in enumerate(zip(following, streams.double()))]

    def step(self, token: int, lanes: Tensor, position: int, keys: list[Tensor]):
        """Logits, output lanes, and `keys` (by position, up to this one) with this position's behind."""
        window = self.config.sliding_window
        x = self._fuse(token, lanes.double())
        keys = [*keys[:position], self._key(x, position)]
        x = self._site(x, "attn", lambda y: self._attend(y, position, keys[max(0, position - window + 1) :]))
        x = self._site(x, "ffn", self._experts)
        return self.vocabulary @ rms(self.collapse(x), self.w["norm.weight"]), x, keys

    def _key(self, x: Tensor, position: int) -> Tensor:
        return self._rotated_key(self._site_input(x, "attn"), position)

    def _fuse(self, token, lanes: Tensor) -> Tensor:
        embedded = self.w["e_proj.weight"] @ rms(self.table[token], self.w["enorm.weight"])
        return torch.stack([embedded + self.w["h_proj.weight"] @ rms(x, self.w["hnorm.weight"]) for x in lanes])


class PlainDSpark:
    """DSpark behind one text: `streams[t]` `[L, lanes, D]` are the outputs of the tapped layers."""

    def __init__(self, tensors: dict[str, Tensor], settings: dict, model, streams: list[Tensor]) -> None:
        stages = 1 + max(int(name.split(".")[1]) for name in tensors)
        parts = [{n[6:]: t for n, t in tensors.items() if n.startswith(f"mtp.{stage}.")} for stage in range(stages)]
        self.blocks = [PlainBlock(part, model) for part in parts]
        self.settings, self.window = settings, model.config.sliding_window
        first, self.last = self.blocks[0], self.blocks[-1]
        means = [torch.cat([s[p].double().mean(0) for s in streams]) for p in range(len(streams[0]))]
        self.main = [rms(first.w["main_proj.weight"] @ x, first.w["main_norm.weight"]) for x in means]

    def block(self, root: int, size: int) -> list[Tensor]:
        """The collapsed state of every slot of the block behind the text."""
        length, noise = len(self.main), self.settings["dspark_noise_token_id"]
        lanes = self.last.config.hc_mult
        x = [self.last.table[token].expand(lanes, -1) for token in [int(root)] + [noise] * (size - 1)]
        for block in self.blocks:
            context = range(max(0, length - self.window), length)
            keys = [block._rotated_key(self.main[p], p) for p in context]
            keys += [block._rotated_key(block._site_input(s, "attn"), length + i) for i, s in enumerate(x)]
            x = [
                block._site(s, "attn", lambda y, i=i: block._attend(y, length + i, keys))  # noqa: B023
                for i, s in enumerate(x)
            ]
            x = [block._site(s, "ffn", block._experts) for s in x]
        return [self.last.collapse(s) for s in x]

    def logits(self, state: Tensor, parent: int) -> Tensor:
        markov = self.last.w["markov_head.markov_w2.weight"] @ self.last.w["markov_head.markov_w1.weight"][parent]
        return self.last.vocabulary @ rms(state, self.last.w["norm.weight"]) + markov

    def confidence(self, state: Tensor, parent: int) -> Tensor:
        joined = torch.cat([state, self.last.w["markov_head.markov_w1.weight"][parent]])
        bias = self.last.w.get("confidence_head.proj.bias", torch.zeros(1))
        return torch.sigmoid(self.last.w["confidence_head.proj.weight"] @ joined + bias)[0]


def oracle_streams(model, text: Tensor, taps: list[int] | None = None) -> list[Tensor]:
    """Output streams `[T, lanes, D]` of the stock model's layers (the last by default)."""
    modules, seen = [*model.model.layers, model.model.hc_head], {}
    taps = [len(modules) - 2] if taps is None else taps
    handles = [
        modules[tap + 1].register_forward_pre_hook(lambda module, args, tap=tap: seen.update({tap: args[0][0]}))
        for tap in taps
    ]
    oracle_logits(model, text[None])
    for handle in handles:
        handle.remove()
    return [seen[tap] for tap in taps]


# Checkpoints


def official_name(name: str) -> str:
    """What the official checkpoints call a tensor that `save_pretrained` wrote."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def write_checkpoint(
    model, folder: Path, tensors: dict[str, Tensor], shards: int = 4, settings: dict | None = None
) -> Path:
    """`model` and its head (`mtp....` names) as a sharded checkpoint in official names, with an index."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (settings or {})))
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


def make_dspark_checkpoint(folder: Path) -> Path:
    """As `make_checkpoint`, with a DSpark head that looks at nothing but the token in front: its slots' states are far
    smaller than the Markov term, which is the trunk's own map from an embedding to the next token."""
    model = build_model(tiny_config())
    shrink_layers(model)
    width = model.config.hidden_size
    settings = dspark_settings(model.config, dspark_markov_rank=width)
    tensors = dspark_tensors(model.config, settings)
    tensors["mtp.2.norm.weight"] *= 0.05
    with torch.no_grad():
        lanes = model.model.embed_tokens.weight[:, None, None].expand(-1, 1, model.config.hc_mult, -1)
        tensors["mtp.2.markov_head.markov_w1.weight"] = model.model.norm(model.model.hc_head(lanes))[:, 0].contiguous()
        tensors["mtp.2.markov_head.markov_w2.weight"] = model.lm_head.weight.detach().clone()
    return write_checkpoint(model, folder, tensors, settings=settings)
