"""What the tensors of a head are called in a checkpoint.

Everything is driven by the parameters of our module: each knows where it is found, so that what is missing, what is
left over and what is written back follow from one table.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


PREFIX = "mtp."
_ANY_PREFIX = re.compile(r"^(?:model\.)?(mtp\.\d+\..*)$")
# Name in the module, without the decoder layer's own prefix -> name in the official checkpoints.
_OFFICIAL = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.kv_norm": "attn.kv_norm",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate": "ffn.gate",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "confidence": "confidence_head.proj",
}
# transformers' mapping of the trunk gives this norm back under another name than it has in the official checkpoints.
_SYNONYMS = {"attn.norm.weight": "attn.kv_norm.weight"}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# Companions of a quantised `x.weight`; the last two replace `.weight`.
_SCALE_SUFFIXES = ("_scale_inv", "_scale", ".scale")
# What only one kind of head has.
_DSPARK = re.compile(r"^mtp\.(?:[1-9]|0\.(?:main_|markov_head|confidence_head))")
_MTP = re.compile(r"^mtp\.0\.(?:[eh]norm|[eh]_proj)\.")


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor, and the part of the module's tensor that it fills."""

    name: str
    index: tuple = ()


def canonical(name: str) -> str | None:
    """A checkpoint's name as `mtp.<stage>....`, or `None` for what belongs to no head."""
    match = _ANY_PREFIX.match(name)
    if match is None:
        return None
    stage, rest = re.match(r"^(mtp\.\d+\.)(.*)$", match[1]).groups()
    return stage + _SYNONYMS.get(rest, rest)


def _staged(parameter: str, stages: int) -> tuple[str, str]:
    """The stage prefix under which a parameter of the module is stored, and its name there."""
    in_layer = re.match(r"^layers\.(\d+)\.(.*)$", parameter)
    if in_layer is not None:
        return f"{PREFIX}{in_layer[1]}.", in_layer[2]
    # What feeds the first stage belongs to it, what reads the last one to that.
    return (f"{PREFIX}0." if parameter.startswith("main_") else f"{PREFIX}{stages - 1}."), parameter


def official_pieces(parameter: str, shape: tuple[int, ...], stages: int) -> list[Piece]:
    """The official tensors that make up `parameter` of a head of so many stages; experts are stored one by one."""
    prefix, name = _staged(parameter, stages)
    experts = prefix + "ffn.experts."
    if name == _GATE_UP:
        half = shape[1] // 2
        parts = (("w1", slice(0, half)), ("w3", slice(half, 2 * half)))
        return [Piece(f"{experts}{e}.{w}.weight", (e, rows)) for e in range(shape[0]) for w, rows in parts]
    if name == _DOWN:
        return [Piece(f"{experts}{e}.w2.weight", (e,)) for e in range(shape[0])]
    stem, _, leaf = name.rpartition(".")
    official = _OFFICIAL.get(name)
    if official is None:
        official = f"{_OFFICIAL.get(stem, stem)}.{leaf}"
    return [Piece(prefix + official)]


def pieces(parameter: str, shape: tuple[int, ...], stages: int, present: Collection[str]) -> list[Piece]:
    """Where `parameter` is found: under the module's own name if the checkpoint has that, else the official ones."""
    own = "".join(_staged(parameter, stages))
    return [Piece(own)] if own in present else official_pieces(parameter, shape, stages)


def scale_of(name: str, present: Collection[str]) -> str | None:
    """The scale beside a quantised tensor, if there is one."""
    stem = name.removesuffix(".weight")
    candidates = (name + _SCALE_SUFFIXES[0], name + _SCALE_SUFFIXES[1], stem + _SCALE_SUFFIXES[2])
    return next((scale for scale in candidates if scale in present), None)


def stages(names: Collection[str]) -> int:
    """How many stages the head has."""
    return 1 + max((int(name.split(".")[1]) for name in names), default=-1)


def kind(settings: Mapping[str, Any], names: Collection[str]) -> str | None:
    """`"dspark"` or `"mtp"`, `None` without tensors; the number of `num_nextn_predict_layers` is 1 for both.

    Args:
        settings: the keys of the checkpoint's config.
        names: of the head's tensors.
    """
    if not names:
        return None
    return "mtp" if settings.get("dspark_block_size") is None else "dspark"


def only_of(kind: str, names: Collection[str]) -> list[str]:
    """Those names that only a head of this kind has."""
    return sorted(name for name in names if (_DSPARK if kind == "dspark" else _MTP).match(name))
