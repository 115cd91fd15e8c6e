"""Finding, reading and writing the head of a checkpoint: names, dtypes, quantised layouts, and what is refused."""

import copy
import json

import pytest
import torch
from decoding import run
from heads import head_tensors, mtp, write_checkpoint
from oracle import build_model, generator, left_pad, random_texts, tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_treespec
from hf_treespec.heads import detect_head, head_of, load_head, save_head


TREE = {"budget": 8, "depth": 4, "top_k": 3}


# Loading


def test_the_head_is_read_once_and_is_no_part_of_the_model(target, tmp_path):
    head = head_of(target)
    assert head_of(target) is head
    assert not any("treespec" in name for name, _ in target.named_modules())
    copied = copy.deepcopy(target)
    assert torch.equal(head_of(copied).e_proj.weight, head.e_proj.weight) and head_of(copied) is not head
    target.save_pretrained(tmp_path)
    assert not any("mtp" in name for name in load_file(tmp_path / "model.safetensors"))
    hf_treespec.disable(copied)
    assert not any(isinstance(value, torch.nn.Module) or "treespec" in key for key, value in vars(copied).items())


def test_only_the_shards_of_the_head_are_read(checkpoint, target, tmp_path):
    weight_map = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {shard for name, shard in weight_map.items() if name.startswith("mtp.")}
    assert needed < set(weight_map.values())
    for name in ("config.json", "model.safetensors.index.json", *needed):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert detect_head(tmp_path) == "mtp"
    head = load_head(tmp_path, target.config)
    for name, value in head.state_dict().items():
        assert torch.equal(value, head_of(target).state_dict()[name]), name
    (tmp_path / needed.pop()).unlink()
    with pytest.raises(ValueError, match="[Ss]hard|missing"):
        load_head(tmp_path, target.config)


def test_both_namings_and_the_round_trip(target, tmp_path):
    head = head_of(target)
    state = {f"mtp.0.{name.removeprefix('layers.0.')}": value for name, value in head.state_dict().items()}
    own, written = tmp_path / "own", tmp_path / "written"
    own.mkdir()
    save_file(state, own / "model.safetensors")
    target.save_pretrained(written)
    save_head(head, written)
    with safe_open(written / "model-mtp.safetensors", "pt") as file:
        assert set(file.keys()) == set(mtp(head_tensors(target.config)))
    again = AutoModelForCausalLM.from_pretrained(written)
    for name, value in again.state_dict().items():
        assert torch.equal(value, target.state_dict()[name]), name
    for folder in (own, written):
        for name, value in load_head(folder, target.config).state_dict().items():
            assert torch.equal(value, head.state_dict()[name]), name


def test_the_heads_dtype_follows_the_model(checkpoint, target):
    head = load_head(checkpoint, target.config, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    layer = model.model.layers[-1].state_dict()
    for name, value in head.layers[0].state_dict().items():
        if name in layer:
            assert value.dtype == layer[name].dtype, name
    hf_treespec.enable(model.eval())
    output, _ = run(model, random_texts(generator(8), (9, 4)), 8, tree_config=TREE)
    assert output.tree_stats["rounds"] > 0 and head_of(model).e_proj.weight.dtype == torch.bfloat16


# Quantised checkpoints

LINEAR = ("e_proj", "h_proj", "main_proj", "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


def quantise(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as the official checkpoints store it: experts in packed FP4 with a scale per 32 columns of a row, other
    linear layers in FP8 with a scale per block."""
    stem = name.removesuffix(".weight")
    if stem.split(".")[-1] not in LINEAR or "compressor" in name or "indexer" in name:
        return {name: weight}
    if "experts." in name and "shared" not in name:
        rng = generator(len(name))
        packed = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 2), generator=rng, dtype=torch.uint8)
        exponents = torch.randint(122, 126, (weight.shape[0], max(1, weight.shape[1] // 32)), generator=rng)
        return {name: packed.view(torch.int8), f"{stem}.scale": exponents.to(torch.uint8).view(torch.float8_e8m0fnu)}
    rows, columns = weight.shape[0] // 8, weight.shape[1] // 8
    scale = torch.rand(rows, columns, generator=generator(len(name))).mul(4).floor().sub(6).exp2()
    blocks = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)
    quantised = (weight / blocks).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: quantised, f"{stem}.scale": scale.to(torch.float8_e8m0fnu)}


FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def dequantise(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    value = stored[name]
    scale = stored.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return value
    if value.dtype == torch.int8:
        codes = value.view(torch.uint8).long()
        value = torch.tensor(FP4)[torch.stack([codes % 16, codes // 16], -1).flatten(1)]
    scale = scale.float()
    block = [size // count for size, count in zip(value.shape, scale.shape)]
    return value.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def quantise_trunk(folder) -> None:
    """Rewrites a checkpoint with quantised weights outside the head, too."""
    weight_map = {}
    for shard in folder.glob("*.safetensors"):
        tensors = {}
        for name, value in load_file(shard).items():
            tensors |= {name: value} if name.startswith("mtp.") else quantise(name, value)
        save_file(tensors, shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e4m3", "scale_fmt": "ue8m0"}
    config |= {"expert_dtype": "fp4", "quantization_config": quantisation | {"dequantize": True}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("suffix", [".scale", ".weight_scale_inv"])
def test_a_quantised_head_of_the_official_layout(target, tmp_path, suffix):
    # Experts whose rows are 32 long, so that an FP4 block fits.
    model = build_model(tiny_config(moe_intermediate_size=32))
    stored = {}
    for name, weight in head_tensors(model.config).items():
        stored |= quantise(name, weight)
    assert {x.dtype for x in stored.values()} >= {torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8}
    renamed = {
        name.removesuffix(".scale") + suffix if name.endswith(".scale") else name: v for name, v in stored.items()
    }
    write_checkpoint(model, tmp_path, mtp(renamed))
    quantise_trunk(tmp_path)
    loaded = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    state = head_of(loaded).state_dict()
    weights = {name: dequantise(name, stored) for name in stored if not name.endswith(".scale")}
    assert torch.equal(state["layers.0.self_attn.kv_proj.weight"], weights["attn.wkv.weight"])
    experts = [[weights[f"ffn.experts.{e}.{w}.weight"] for w in ("w1", "w3")] for e in range(4)]
    assert torch.equal(state["layers.0.mlp.experts.gate_up_proj"], torch.stack([torch.cat(pair) for pair in experts]))
    down = [weights[f"ffn.experts.{e}.w2.weight"] for e in range(4)]
    assert torch.equal(state["layers.0.mlp.experts.down_proj"], torch.stack(down))
    texts = random_texts(generator(9), (23, 5))
    output, written = run(loaded, texts, 12, tree_config=TREE)
    assert output.tree_stats["nodes"] > output.tree_stats["rounds"]
    assert torch.equal(torch.cat(written), torch.cat(run(loaded, texts, 12, tree_config={"budget": 1})[1]))


# What is refused


def without(name):
    return lambda tensors: tensors.pop(name)


FAULTS = {
    "missing": (without("mtp.0.h_proj.weight"), ["missing", "`mtp.0.h_proj.weight`"]),
    "a missing expert": (without("mtp.0.ffn.experts.2.w3.weight"), ["missing", "`mtp.0.ffn.experts.2.w3.weight`"]),
    "extra": (
        lambda t: t.update({"mtp.0.attn.compressor.ape": torch.ones(4)}),
        ["unexpected", "`mtp.0.attn.compressor"],
    ),
    "one expert more": (
        lambda t: t.update({"mtp.0.ffn.experts.4.w1.weight": torch.ones(24, 32)}),
        ["unexpected", "`mtp.0.ffn.experts.4.w1.weight`"],
    ),
    "misshapen": (
        lambda t: t.update({"mtp.0.attn.wkv.weight": torch.ones(8, 32), "mtp.0.enorm.weight": torch.ones(3)}),
        ["`mtp.0.attn.wkv.weight` has shape [8, 32] instead of [16, 32]", "`mtp.0.enorm.weight`"],
    ),
    "no scale": (
        lambda t: t.update({"mtp.0.e_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)}),
        ["`mtp.0.e_proj.weight`", "without a scale"],
    ),
    "a scale of another size": (
        lambda t: t.update(
            {"mtp.0.e_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "mtp.0.e_proj.scale": torch.ones(5, 5)}
        ),
        ["`mtp.0.e_proj.weight`", "(5, 5)"],
    ),
    "another stage": (
        lambda t: t.update({"mtp.1.enorm.weight": torch.ones(32)}),
        ["DSpark", "`mtp.1.enorm.weight`", "budget=1"],
    ),
    "DSpark": (
        lambda t: t.update({"mtp.0.main_proj.weight": torch.ones(32, 96), "mtp.0.main_norm.weight": torch.ones(32)}),
        ["DSpark", "`mtp.0.main_norm.weight`, `mtp.0.main_proj.weight`", "assistant_model="],
    ),
    "none": (lambda t: t.clear() or t.update({"norm.weight": torch.ones(32)}), ["no draft head", "assistant_model="]),
}


@pytest.mark.parametrize(("change", "words"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_listed(target, tmp_path, change, words):
    tensors = mtp(head_tensors(target.config))
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as raised:
        load_head(tmp_path, target.config)
    for word in words:
        assert word in str(raised.value)


def test_the_config_says_dspark(target, tmp_path):
    save_file(mtp(head_tensors(target.config)), tmp_path / "model.safetensors")
    assert detect_head(tmp_path) == "mtp"
    (tmp_path / "config.json").write_text(json.dumps({"dspark_block_size": 5, "num_nextn_predict_layers": 1}))
    assert detect_head(tmp_path) == "dspark"
    with pytest.raises(ValueError, match="dspark_block_size"):
        load_head(tmp_path, target.config)


@pytest.mark.parametrize("drafter", ["auto", "mtp"])
def test_no_head(model, tmp_path, drafter):
    inputs = left_pad(random_texts(generator(1), (5,)))
    for path in ("", "no/such-model", str(tmp_path)):
        other = copy.copy(model)
        other.config = copy.deepcopy(model.config)
        other.config._name_or_path = path
        hf_treespec.enable(other)
        with pytest.raises(ValueError, match="assistant_model=.*budget=1"):
            other.generate(**inputs, max_new_tokens=4, tree_config={"budget": 8, "drafter": drafter})


def test_two_drafters_at_once(target):
    with pytest.raises(ValueError, match="assistant_model"):
        run(target, random_texts(generator(1), (5,)), tree_config={"drafter": "mtp"}, assistant_model=target)
    run(target, random_texts(generator(1), (5,)), 4, tree_config={"budget": 1, "drafter": "mtp"})
