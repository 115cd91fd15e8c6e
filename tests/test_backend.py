"""Which implementation runs, and whole rounds and calls on the kernels."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from oracle import build_model, generator, left_pad, random_texts, tiny_config
from rounds import append, assert_same_state, filled_cache, random_path, random_tree, run_round

import hf_treespec
from hf_treespec import TreeCache, ops
from hf_treespec.ops import backend
from hf_treespec.prefill import prefill


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_kernels_on_cuda_only(monkeypatch):
    assert ops.resolve_backend("auto", CPU) == ops.resolve_backend("torch", CUDA) == "torch"
    assert ops.resolve_backend("auto", CUDA) == ops.resolve_backend("triton", CUDA) == "triton"
    monkeypatch.setattr(backend, "kernels_installed", lambda: False)
    assert ops.resolve_backend("auto", CUDA) == "torch"
    with pytest.raises(ValueError, match=r"pip install 'hf-treespec\[triton\]'"):
        ops.resolve_backend("triton", CUDA)


def test_kernels_asked_for_without_a_device(monkeypatch, model):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device.*'cpu'.*`'auto'` or `'torch'`"):
        ops.resolve_backend("triton", CPU)
    with patch.object(model, "forward", side_effect=AssertionError("computed")):
        with pytest.raises(ValueError, match="needs a CUDA device"):
            model.generate(torch.tensor([[1, 2]]), tree_config={"budget": 1, "backend": "triton"})


@pytest.mark.parametrize("width", [{"head_dim": 24}, {"index_head_dim": 8}, {"hc_mult": 3}])
def test_widths_that_kernels_refuse(width):
    config = tiny_config(**width)
    assert TreeCache(config, 1).backend_on(CUDA) == "torch"
    assert TreeCache(tiny_config(), 1).backend_on(CUDA) == "triton"
    (name,) = width
    with pytest.raises(ValueError, match=rf"`{name}` \({width[name]}\).*powers of two"):
        hf_treespec.enable(build_model(config)).generate(
            torch.tensor([[1, 2]]), tree_config={"budget": 1, "backend": "triton"}, max_new_tokens=1
        )


def test_the_package_runs_without_triton():
    """Nothing of Triton is imported unless kernels are asked for."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from hf_treespec import TokenTree, ops
tree = TokenTree.chain(torch.tensor([[1, 2]]))
path, lengths = ops.accept(tree.tokens, tree.paths, tree.valid, torch.tensor([[2, 5]]))
assert lengths.tolist() == [2]
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_rounds_on_kernels_leave_the_state_of_rounds_in_torch(model):
    rng = generator(4)
    texts = random_texts(rng, (27, 9))
    caches = [filled_cache(model, texts) for _ in range(2)]
    caches[0].backend = "triton"
    for style, rows in (("deep", None), ("wide", torch.tensor([1]))):
        tree = random_tree(rng, 2 if rows is None else 1, 5, style, ragged=True)
        path, lengths = random_path(rng, tree)
        logits = [run_round(model, cache, tree, path, lengths, rows) for cache in caches]
        torch.testing.assert_close(logits[0][tree.valid], logits[1][tree.valid], atol=2e-5, rtol=2e-5)
        texts = append(texts, tree, path, lengths, rows)
        assert_same_state(*caches)
    assert_same_state(caches[0], filled_cache(model, texts))


@pytest.mark.slow
def test_a_prompt_longer_than_the_rings(model):
    """Of a chunk that overwrites a ring only the last positions are written, each slot once."""
    texts = random_texts(generator(6), (15,))
    cache = TreeCache(model.config, 1, spare=2, backend="triton")
    with torch.no_grad():
        prefill(model, cache, torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor([15]))
    assert_same_state(cache, filled_cache(model, texts, spare=2))


def test_generate_on_kernels_writes_the_text_of_torch(model, drafter):
    inputs = left_pad(random_texts(generator(1), (9, 6)))
    options = {"assistant_model": drafter, "tree_config": {"budget": 4, "depth": 2}, "max_new_tokens": 4}
    cache = TreeCache(model.config, 2, backend="triton")
    kernels = model.generate(**inputs, **options, cache=cache)
    assert cache.lengths.tolist() == [12, 9]  # it was used
    assert torch.equal(kernels, model.generate(**inputs, **options))
