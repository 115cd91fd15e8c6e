"""The documents say what the code does: examples run, the worked example's numbers and the documented names hold."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from oracle import build_model, tiny_config
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from typer.main import get_command

import hf_treespec
from hf_treespec import TokenTree, TreeCache, TreeConfig
from hf_treespec.batching import generate_batch
from hf_treespec.cli import app
from hf_treespec.ops import TreeGeometry
from hf_treespec.prefill import prefill
from hf_treespec.validation import REFUSED


torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
HOW = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def worked_tree() -> TokenTree:
    parents = torch.tensor([[0, 0, 0, 1, 2, 4]])
    return TokenTree.from_parents(torch.tensor([[40, 21, 22, 23, 24, 25]]), parents, max_depth=3)


def test_worked_example_code():
    (code,) = [block for block in code_blocks(HOW) if "assert" in block]
    exec(compile(code, "how-it-works.md", "exec"), {})


def test_worked_example_table():
    """Every row of "who sees what": entries by number and owner, window positions and nodes."""
    geometry = TreeGeometry(worked_tree(), None, torch.tensor([10]), max_length=10)
    entries = geometry.entry_visible(4, 0, 6)[0].tolist()
    window = geometry.window_bias(0, 6, window=4, ring_size=8)[0].isfinite().tolist()
    rows = re.findall(r"^\| (\d) \| (\d+) \| (\d): (entries .*?) \| (.*?) \|$", HOW, re.MULTILINE)
    assert len(rows) == 6
    for node, position, count, seen, near in rows:
        assert geometry.positions[0, int(node)] == int(position)
        assert sum(entries[int(node)]) == int(count) == (int(position) + 1) // 4
        owner = re.search(r"entry 2 of node (\d)", seen)
        assert entries[int(node)][2:] == [owner is not None and owner[1] == closer for closer in "12"]
        positions, nodes = near.replace(" from the ring", "").partition("node")[::2]
        slots = {int(number) % 8 for number in re.findall(r"\d+", positions)}
        columns = slots | {8 + int(number) for number in re.findall(r"\d", nodes)}
        assert {column for column, visible in enumerate(window[int(node)]) if visible} == columns


@torch.no_grad()
def test_worked_example_refresh():
    """The slots that accepting the path 0, 2, 4 writes, on a model with the example's window and ratio."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    config = tiny_config(sliding_window=4, compress_rates=rates)
    model = hf_treespec.enable(build_model(config))
    cache = TreeCache(config, rows=1, spare=4)
    prefill(model, cache, torch.arange(30, 41)[None], torch.tensor([10]))
    layer_idx = config.layer_types.index("compressed_sparse_attention")
    layer = cache.layers[layer_idx]
    before = [tensor.clone() for _, _, tensor in layer.tensors()]
    with cache.fork(worked_tree()) as fork:
        model(**fork.model_inputs())
        assert all(torch.equal(tensor, old) for (_, _, tensor), old in zip(layer.tensors(), before, strict=True))
        fork.refresh(torch.tensor([[0, 2, 4, -1]]), torch.tensor([3]))
    for (_, name, tensor), old in zip(layer.tensors(), before, strict=True):
        slots = (tensor != old).any(-1)[0].nonzero()[:, 0].tolist()
        size, expected = {"window": (8, [2, 3, 4]), "entries": (tensor.shape[1], [2])}.get(name, (12, [0, 10, 11]))
        assert (tensor.shape[1], slots) == (size, expected), name
    # Two entries were closed; that of node 2 is the second one, and it is that which is committed.
    closed = fork.scratch(layer_idx, "compressor.entries")[0]
    assert torch.equal(layer.streams["compressor"].entries[0, 2], closed[1])
    assert cache.lengths.tolist() == [13]
    assert cache.token_ids[0, 10:13].tolist() == [40, 22, 24]


def test_readme_quick_start(capsys):
    """The quick start, and the conversation that goes on from it."""
    code = "\n".join(code_blocks(README) + code_blocks(OPTIONS))
    exec(compile(code, "README.md, options.md", "exec"), {})
    assert "Write a function to add two numbers." in capsys.readouterr().out


def test_readme_lists_the_options():
    table = README.split("`tree_config` is a `TreeConfig` or a dict:")[1].split("Beside it")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in fields(TreeConfig)]
    assert f"| `budget` | {TreeConfig().budget} |" in table


def test_every_processor_and_refused_option_is_documented():
    named = set(re.findall(r"`(\w+)", OPTIONS))
    known = {cls.__name__ for cls in vars(logits_process).values() if _is_processor(cls)}
    assert known - named == set()
    assert set(REFUSED) - named == set()
    # What is named exists in transformers or here.
    own = {"seeds", "return_logprobs", "tree_config", "logprobs", "processed_logprobs", "row_independent"}
    options = set(vars(GenerationConfig())) | set(inspect.signature(GenerationMixin.generate).parameters) | own
    options |= set(inspect.signature(generate_batch).parameters) | set(vars(ContinuousBatchingConfig()))
    options |= {"input_ids", "attention_mask", "inputs_embeds", "position_ids", "cache", "assistant_tokenizer"}
    for row in re.findall(r"^\| (`[a-z].*?) \|", OPTIONS, re.MULTILINE):
        for name in re.findall(r"`([a-z]\w*)`", row):
            assert name in options | {"tokenizer", "stopping_criteria"}, name


def _is_processor(cls) -> bool:
    base = logits_process.LogitsProcessor
    return isinstance(cls, type) and issubclass(cls, base) and cls is not base


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_names_exist(document):
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"hf_treespec\.(\w+)\b(?!/)", text):
        assert hasattr(hf_treespec, name) or (ROOT / "hf_treespec" / name).is_dir(), name
    for path in re.findall(r"`(hf_treespec/[\w/.]+)`|\]\((docs/[\w.-]+)\)", text):
        assert (ROOT / next(filter(None, path))).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_commands_and_links_exist(document):
    text = document.read_text(encoding="utf-8")
    commands = get_command(app).commands
    for name, rest in re.findall(r"hf-treespec (\w[\w-]*)((?:\\\n|[^`\n])*)", text):
        options = {
            option for parameter in commands[name].params for option in parameter.opts + parameter.secondary_opts
        }
        assert set(re.findall(r"--[\w-]+", rest.partition("#")[0])) <= options, name
    for rest in re.findall(r"generate_distributed\.py ((?:\\\n|[^`\n])*)", text):
        source = (ROOT / "examples" / "generate_distributed.py").read_text(encoding="utf-8")
        for option in re.findall(r"--([\w-]+)", rest):
            assert re.search(rf"^    {option.replace('-', '_')}: Annotated", source, re.MULTILINE), option
    for path in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (document.parent / path).exists(), path
    for path in re.findall(r"(examples/[\w/.]+)", text):
        assert (ROOT / path).exists(), path
