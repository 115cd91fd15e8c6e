"""`hf-treespec inspect` on hand-written configs of the official shapes, and on real folders. Nothing is downloaded."""

import json
import re
from pathlib import Path

import pytest
import torch
from heads import head_tensors, make_checkpoint, mtp, write_checkpoint
from oracle import build_model, tiny_config
from test_cli import invoke
from test_heads import quantise_trunk
from transformers import DeepseekV4ForCausalLM

from hf_treespec import TreeCache, checkpoint_files, inspection
from hf_treespec.checkpoint_files import CheckpointFiles
from hf_treespec.demo import checkpoint
from hf_treespec.footprint import cache_bytes, gpus_needed
from hf_treespec.heads import detect_head, load_head
from hf_treespec.inspection import inspect_checkpoint


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "sliding_window": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[128 if i % 2 else 4 for i in range(41)], 0],
    "quantization_config": FP8,
    "expert_dtype": "fp4",
}
DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
FLASH_0731 = {**FLASH, **DSPARK, "compress_ratios": [*FLASH["compress_ratios"], 0, 0]}
PRO = {
    **FLASH,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[128 if i % 2 else 4 for i in range(59)], 0],
}
BASE = {**FLASH, "expert_dtype": "fp8"}
UNQUANTISED = {key: value for key, value in FLASH.items() if key not in ("quantization_config", "expert_dtype")}
SHAPES = {"Flash": FLASH, "Flash-0731": FLASH_0731, "Pro": PRO, "Base": BASE, "bf16": UNQUANTISED}


def write(folder, settings, head: dict[int, list[str]] | None = None, total: int = 0, **files):
    """A checkpoint without weights: config, an index with these tensors of each stage's head, other files."""
    (folder / "config.json").write_text(json.dumps(settings))
    if head is not None:
        tensors = ["embed.weight", "layers.0.attn.kv_norm.weight", "head.weight"]
        tensors += [f"mtp.{stage}.{name}" for stage, names in head.items() for name in names]
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys(tensors, "model-00001-of-00046.safetensors"),
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


MTP_HEAD = {0: ["enorm.weight", "e_proj.weight", "e_proj.scale", "attn.wkv.weight"]}
DSPARK_HEAD = {
    0: ["main_proj.weight", "attn.wkv.weight"],
    1: ["attn.wkv.weight"],
    2: ["markov_head.markov_w1.weight", "confidence_head.proj.weight"],
}


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch):
    """Only small files are asked for, and none of them but by the function that may download."""
    asked = []
    find = CheckpointFiles.find

    def spy(files, name, download=True):
        # Not those of a test that loads a head.
        if type(files) is CheckpointFiles:
            asked.append((name, not download))
        return find(files, name, download)

    monkeypatch.setattr(CheckpointFiles, "find", spy)
    yield asked
    assert all(offline for name, offline in asked if name.endswith(".safetensors"))


# What is told


def test_flash(tmp_path):
    report = inspect_checkpoint(write(tmp_path, FLASH, MTP_HEAD, total=160_000_000_000))
    assert report.layers["count"] == 43
    assert report.layers["attention"] == {
        "sliding_attention": 2,
        "compressed_sparse_attention": 21,
        "heavily_compressed_attention": 20,
    }
    assert report.layers["ratios"] == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    assert report.layers["feed_forward"] == {"hash_moe": 3, "moe": 40}
    assert (report.head["kind"], report.head["stages"], report.head["tensors"]) == ("mtp", 1, 4)
    assert report.drafter["auto"] == "mtp" and "4 tensors are named `mtp.*`" in report.head["why"]
    assert (report.quantization["quant_method"], report.quantization["expert_dtype"]) == ("fp8", "fp4")
    assert report.sizes["stored_bytes"] == 160_000_000_000 and "index" in report.sizes["source"]
    # What the vendor says: 284B parameters, 13B active.
    assert round(report.sizes["parameters"] / 1e9) == 284
    assert round(report.sizes["active_parameters"] / 1e9) in (13, 14)
    assert (
        3e9 < report.sizes["head_bytes"] < 5e9 and report.sizes["head_loaded_bytes"] > 3 * report.sizes["head_bytes"]
    )


def test_flash_0731_has_dspark(tmp_path):
    report = inspect_checkpoint(write(tmp_path, FLASH_0731, DSPARK_HEAD))
    assert report.layers["count"] == 43
    assert (report.head["kind"], report.head["stages"], report.head["block_size"]) == ("dspark", 3, 5)
    assert report.head["target_layer_ids"] == [40, 41, 42]
    assert report.drafter["auto"] == "dspark" and "`dspark_block_size` 5" in report.head["why"]
    # The tensors say it too, where the config has no ratios behind the trunk's.
    settings = {key: value for key, value in FLASH_0731.items() if key != "compress_ratios"}
    assert inspect_checkpoint(write(tmp_path, settings, DSPARK_HEAD)).head["stages"] == 3
    # Three stages and the vocabulary tables of the Markov head.
    single = inspect_checkpoint(write(tmp_path, FLASH, MTP_HEAD)).sizes["head_parameters"]
    assert 2.9 < report.sizes["head_parameters"] / single < 3.2


def test_pro(tmp_path):
    report = inspect_checkpoint(write(tmp_path, PRO, MTP_HEAD))
    assert report.layers["attention"] == {"heavily_compressed_attention": 31, "compressed_sparse_attention": 30}
    assert round(report.sizes["parameters"] / 1e12, 1) == 1.6
    assert round(report.sizes["active_parameters"] / 1e9) in (49, 50)
    assert report.sizes["source"].startswith("config.json")
    counts = {(row["memory_gb"], row["weights"]): row["tp_plan"] for row in report.gpus}
    assert counts[24, "as stored"] is None


def test_base_stores_its_experts_in_fp8(tmp_path):
    base = inspect_checkpoint(write(tmp_path, BASE, MTP_HEAD))
    flash = inspect_checkpoint(write(tmp_path, FLASH, MTP_HEAD))
    assert base.sizes["parameters"] == flash.sizes["parameters"]
    assert 1.8 < base.sizes["stored_bytes"] / flash.sizes["stored_bytes"] < 2.0
    assert 150e9 < flash.sizes["stored_bytes"] < 170e9  # the official index says 160 GB
    plain = inspect_checkpoint(write(tmp_path, UNQUANTISED, {}))
    assert plain.sizes["stored_bytes"] == 2 * plain.sizes["parameters"]
    assert {row["weights"] for row in plain.gpus} == {"as stored"} and not plain.packages


@pytest.mark.parametrize("name", SHAPES)
def test_gpu_counts_are_consistent(tmp_path, name):
    report = inspect_checkpoint(write(tmp_path, SHAPES[name], MTP_HEAD))
    rows = {(row["memory_gb"], row["weights"]): row for row in report.gpus}
    memories = sorted({memory for memory, _ in rows})
    for column in ("tp_plan", "device_map"):
        for weights in {weights for _, weights in rows}:
            counts = [rows[memory, weights][column] or 10**9 for memory in memories]
            assert counts == sorted(counts, reverse=True)
        for memory in memories:
            if (memory, "dequantised") in rows:
                assert (rows[memory, "as stored"][column] or 0) <= (rows[memory, "dequantised"][column] or 10**9)
    # All GPUs together hold the weights.
    kept = report.sizes["stored_bytes"] - report.sizes["head_bytes"] + report.sizes["head_loaded_bytes"]
    for memory in memories:
        count = rows[memory, "as stored"]["device_map"]
        assert count is None or count * memory * 1e9 > kept


def test_a_config_alone(tmp_path):
    report = inspect_checkpoint(write(tmp_path, FLASH))
    assert report.head["kind"] is None and not report.head["known"]
    assert report.drafter["auto"] is None
    assert all(name in report.drafter["why"] for name in ("index", "assistant_model", "ngram", "budget=1"))
    # A DSpark checkpoint shows in its config.
    report = inspect_checkpoint(write(tmp_path, FLASH_0731))
    assert (report.head["kind"], report.head["stages"]) == ("dspark", 3)
    assert report.sizes["head_parameters"] > 0 and not [text for text in report.warnings if "mtp" in text]


def test_no_head(tmp_path):
    report = inspect_checkpoint(write(tmp_path, FLASH, {}))
    assert report.head["kind"] is None and report.head["known"]
    assert all(name in report.drafter["why"] for name in ("no tensor is named `mtp.*`", "assistant_model", "ngram"))
    assert report.sizes["head_parameters"] == report.sizes["head_bytes"] == 0


def test_heads_that_are_not_what_the_config_says(tmp_path):
    missing = inspect_checkpoint(write(tmp_path, FLASH_0731, {}))
    assert missing.head["kind"] is None and missing.drafter["auto"] is None
    assert any("the head is missing" in text for text in missing.warnings)
    strange = inspect_checkpoint(write(tmp_path, FLASH, DSPARK_HEAD))
    assert any("taken for 'mtp'" in text and "main_proj" in text for text in strange.warnings)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),
        ({"tokenizer_config__json": {"chat_template": "{{ messages }}"}}, ("chat template", None)),
        ({"tokenizer_config__json": {}, "chat_template__jinja": "x"}, ("chat template", None)),
        (
            {"tokenizer_config__json": {}, "encoding/encoding_dsv4__py": ""},
            ("DeepSeek's Python encoder", "encoding/encoding_dsv4.py"),
        ),
    ],
    ids=["none", "config", "jinja", "python"],
)
def test_chat_encoding(tmp_path, files, expected):
    (tmp_path / "encoding").mkdir()
    report = inspect_checkpoint(write(tmp_path, FLASH, MTP_HEAD, **files))
    assert (report.chat["encoding"], report.chat["where"]) == expected


def test_missing_packages(tmp_path, monkeypatch):
    folder = write(tmp_path, FLASH, MTP_HEAD)
    versions = {"kernels": None}
    monkeypatch.setattr(inspection, "version_of", versions.get)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device))
    report = inspect_checkpoint(folder)
    assert report.packages[0]["name"] == "kernels" and report.packages[0]["installed"] is None
    (warning,) = report.warnings
    assert "pip install kernels" in warning
    versions["kernels"] = "0.9"
    assert inspect_checkpoint(folder).warnings == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    (warning,) = inspect_checkpoint(folder).warnings
    assert "compute capability 8.9" in warning and "dequantise" in warning


class Hub:
    """Answers for the repository `owner/name` out of a folder; keeps what is asked for."""

    def __init__(self, folder, monkeypatch, listed: bool) -> None:
        self.folder, self.listed, self.downloads = folder, listed, []
        monkeypatch.setattr(checkpoint_files, "cached_file", self.cached_file)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda api, path: self.list_repo_files(path))

    def cached_file(self, path, name, local_files_only=False, **options):
        assert path == "owner/name"
        if local_files_only:
            return None
        self.downloads.append(name)
        return str(self.folder / name) if (self.folder / name).exists() else None

    def list_repo_files(self, path):
        if not self.listed:
            raise ConnectionError("offline")
        return [file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file()]


@pytest.mark.parametrize("listed", [True, False])
def test_of_a_repository_only_small_files_are_downloaded(tmp_path, monkeypatch, listed):
    (tmp_path / "encoding").mkdir()
    files = {"encoding/encoding_dsv4__py": "", "model-00001-of-00046__safetensors": ""}
    hub = Hub(write(tmp_path, FLASH_0731, DSPARK_HEAD, **files), monkeypatch, listed)
    report = inspect_checkpoint("owner/name")
    assert set(hub.downloads) == {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
    assert (report.drafter["auto"], report.head["stages"]) == ("dspark", 3)
    assert report.chat["encoding"] == ("DeepSeek's Python encoder" if listed else None)


# Real folders


SHIPPED = sorted(file.parent.name for file in checkpoint("tiny-target").parent.glob("*/model-mtp.safetensors"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_checkpoints(name):
    folder = checkpoint(name)
    report = inspect_checkpoint(folder)
    model = DeepseekV4ForCausalLM.from_pretrained(folder)
    assert report.sizes["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert report.sizes["stored_bytes"] == pytest.approx(files, rel=0.02)
    assert report.sizes["source"] == "the shards' headers"
    assert "BF16" in report.quantization["stored_bytes"]
    assert sum(report.layers["attention"].values()) == model.config.num_hidden_layers
    assert report.drafter["auto"] == report.head["kind"] == detect_head(folder)
    assert report.chat["encoding"] == "chat template" and report.warnings == []
    assert all(row["tp_plan"] == row["device_map"] == 1 for row in report.gpus)


def test_a_head_is_measured_where_its_shards_are(tmp_path):
    folder = make_checkpoint(tmp_path)
    report = inspect_checkpoint(folder)
    head = load_head(folder, tiny_config())
    numbers = sum(parameter.numel() for parameter in head.parameters())
    stored = 4 * sum(tensor.numel() for tensor in head.state_dict().values())
    assert report.drafter["auto"] == "mtp" and report.head["tensors"] > 30
    assert (report.sizes["head_parameters"], report.sizes["head_bytes"]) == (numbers, stored)
    # Of a checkpoint that is only partly here the headers say nothing.
    next(folder.glob("model-*.safetensors")).unlink()
    report = inspect_checkpoint(folder)
    assert report.head["kind"] == "mtp" and report.quantization["stored_bytes"] is None
    assert report.sizes["source"].startswith("config.json")


def test_quantised_tensors_show_in_the_headers(tmp_path):
    model = build_model(tiny_config(moe_intermediate_size=32))
    quantise_trunk(write_checkpoint(model, tmp_path, mtp(head_tensors(model.config))))
    report = inspect_checkpoint(tmp_path)
    assert report.quantization["stored_bytes"].keys() >= {"F8_E4M3", "F8_E8M0", "I8", "F32"}
    assert report.quantization["expert_dtype"] == "fp4" and report.packages[0]["name"] == "kernels"
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0.5 * files < report.sizes["stored_bytes"] < files


def test_cache_bytes_are_those_of_a_cache():
    """All tensors of a real cache, at a length that fills its capacity."""
    config = tiny_config()
    from rounds import filled_cache

    import hf_treespec

    model = hf_treespec.enable(build_model(config))
    cache = filled_cache(model, [torch.arange(64) % 96])
    held = sum(tensor.numel() * 4 for layer in cache.layers for _, _, tensor in layer.tensors())
    assert isinstance(cache, TreeCache) and cache_bytes(config, cache.capacity, 0, 4) == held
    assert cache_bytes(config, 10 * cache.capacity, 1, 2) > cache_bytes(config, 10 * cache.capacity, 0, 2)


def test_gpus_needed():
    assert gpus_needed(80, shared=70e9, replicated=0) == 1
    assert gpus_needed(80, shared=73e9, replicated=0) == 2  # a tenth stays free
    assert gpus_needed(80, shared=100e9, replicated=60e9) == 16
    assert gpus_needed(80, shared=100e9, replicated=73e9) is None
    assert gpus_needed(80, shared=100e9, replicated=0, largest=73e9) is None


# The command, and what it refuses


def test_the_command(tmp_path):
    folder = str(write(tmp_path, FLASH, MTP_HEAD, total=160_000_000_000))
    table = invoke("inspect", folder)
    assert table.exit_code == 0, table.output
    for text in ("compressed_sparse_attention", "MTP", "fp8", "284", "160", "kernels", "141 GB"):
        assert text in table.output, text
    result = invoke("inspect", folder, "--format", "json")
    assert json.loads(result.output) == inspect_checkpoint(folder).to_dict()
    assert invoke("inspect", folder, "--format", "yaml").exit_code == 2


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"model_type": "llama"}, ["'llama'", "deepseek_v4"]),
        ({"model_type": "deepseek_v41"}, ["'deepseek_v41'", "compression differs"]),
        ({}, ["None", "deepseek_v4"]),
        ({**FLASH, "compress_ratios": [0, 3]}, ["config.json", "3"]),
        ({**FLASH, "num_hidden_layers": 50}, ["config.json", "50"]),
        ([1], ["config.json", "list"]),
    ],
    ids=["llama", "v41", "empty", "ratio", "layers", "list"],
)
def test_other_configs_are_refused(tmp_path, settings, names):
    folder = write(tmp_path, settings)
    with pytest.raises(ValueError) as raised:
        inspect_checkpoint(folder)
    assert all(name in str(raised.value) for name in names), raised.value
    result = invoke("inspect", str(folder))
    assert result.exit_code == 1 and "Error:" in result.output


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("no-such-folder", ["no folder 'no-such-folder'", "owner/name"]),
        ("/no/such/folder", ["no folder"]),
        ("nobody/no-such-model", ["nobody/no-such-model", "Hub"]),
    ],
)
def test_paths_that_are_nothing(path, names):
    with pytest.raises(ValueError) as raised:
        inspect_checkpoint(path)
    assert all(name in str(raised.value) for name in names), raised.value


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"no `config.json` in that folder"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"`config.json` .* is not JSON"):
        inspect_checkpoint(tmp_path)


def test_the_support_matrix_has_these_numbers(tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "support-matrix.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) GB \| (.*) \|$", text, re.MULTILINE)
    assert {row[0] for row in rows} == {"Flash", "Flash-0731", "Pro", "Flash-Base"}
    for name, stored, cells in rows:
        settings = SHAPES[name.removeprefix("Flash-") if name == "Flash-Base" else name]
        report = inspect_checkpoint(write(tmp_path, settings, DSPARK_HEAD if name == "Flash-0731" else MTP_HEAD))
        assert round(report.sizes["stored_bytes"] / 1e9) == int(stored)
        counts = {row["memory_gb"]: row for row in report.gpus if row["weights"] == "as stored"}
        expected = [(counts[memory]["tp_plan"], counts[memory]["device_map"]) for memory in (80, 141, 192, 288)]
        assert cells.split(" | ") == [" / ".join(str(count or "-") for count in pair) for pair in expected]
    assert all(f'`"{drafter}"' in text for drafter in ("mtp", "dspark", "ngram"))
