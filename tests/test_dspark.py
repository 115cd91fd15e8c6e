"""Drafting with the DSpark head: its nodes, its trees, what its windows hold, and the text that never depends on them."""

import copy

import pytest
import torch
from decoding import run
from heads import (
    PlainDSpark,
    dspark_settings,
    dspark_tensors,
    make_dspark_checkpoint,
    oracle_streams,
    write_checkpoint,
)
from oracle import TOLERANCE, build_model, generator, random_texts, tiny_config
from safetensors.torch import save_file
from test_heads import dequantise, quantise, quantise_trunk
from test_mtp import MadeUpRounds, assert_plain_text, assert_reuse
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.drafting.dspark import DSparkTreeGenerator
from hf_treespec.heads import detect_head, head_of, load_head, save_head


TREE = {"budget": 8, "top_k": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model whose checkpoint ships a DSpark head that is often right about it."""
    folder = make_dspark_checkpoint(tmp_path_factory.mktemp("dspark"))
    return hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder).eval())


def random_head(model, folder, bias: bool = False, **changes):
    settings = dspark_settings(model.config, **changes)
    tensors = dspark_tensors(model.config, settings, bias=bias)
    save_file(tensors, folder / "model.safetensors")
    config = copy.deepcopy(model.config)
    config.update(settings)
    return load_head(folder, config), tensors, settings


# What it drafts


@torch.no_grad()
@pytest.mark.parametrize(("chunk_size", "bias", "size"), [(7, False, 5), (64, True, 7)])
def test_every_node_agrees_with_plain_matrix_products(tmp_path, model, chunk_size, bias, size, monkeypatch):
    """Logits with the Markov term of the node's own token, and confidences; rows are ragged, one has no context."""
    head, tensors, settings = random_head(model, tmp_path, bias)
    seen = []
    add, survive = DSparkTreeGenerator._add_candidates, DSparkTreeGenerator._survival

    def record(self, logits, valid):
        seen.append([self._slot, logits, self._pool.frontiers[-1][0], valid])
        add(self, logits, valid)

    def record_survival(self, probabilities):
        survival = survive(self, probabilities)
        seen[-1].append((probabilities, survival))
        return survival

    monkeypatch.setattr(DSparkTreeGenerator, "_add_candidates", record)
    monkeypatch.setattr(DSparkTreeGenerator, "_survival", record_survival)
    config = TreeConfig(**TREE, depth=size)
    rounds = MadeUpRounds(
        model, head, config, random_texts(generator(1), (37, 9, 2, 1)), chunk_size, drafter=DSparkTreeGenerator
    )
    nodes = 0
    for index in range(6):
        rows = [0, 1, 2, 3] if index < 4 else [3, 0]
        texts = [rounds.texts[row] for row in rows]
        seen.clear()
        rounds.round(size, rows)
        pool = rounds.drafter._pool
        for i, text in enumerate(texts):
            streams = [stream[:-1] for stream in oracle_streams(model, text, head.taps)]
            plain = PlainDSpark(tensors, settings, model, streams)
            states = plain.block(text[-1], size)
            for slot, logits, parents, valid, (probabilities, survival) in seen:
                for column in valid[i].nonzero()[:, 0].tolist():
                    token = int(pool.tokens[i, parents[i, column]])
                    expected = plain.logits(states[slot], token)
                    difference = float((logits[i, column] - expected).abs().max() / expected.abs().max())
                    assert difference <= TOLERANCE, (index, rows[i], slot, difference)
                    confidence = float(plain.confidence(states[slot], token))
                    assert survival[i, column, 0] == pytest.approx(confidence, abs=1e-5)
                    others = (1 - confidence) * probabilities[i, column, 1:] / (1 - probabilities[i, column, 0])
                    assert torch.allclose(survival[i, column, 1:], others, atol=1e-5)
                    nodes += 1
    assert nodes >= 100, nodes


def best_first(plain: PlainDSpark, root: int, budget: int, depth: int, top_k: int) -> set[tuple[int, ...]]:
    """The tree that a heap grows: the most likely candidate is taken, and its children enter. Nodes as token paths."""
    states = plain.block(root, max(depth, plain.settings["dspark_block_size"]))
    heap, tree = [(1.0, ())], set()
    while heap and len(tree) < budget:
        chance, path = heap.pop(max(range(len(heap)), key=lambda entry: heap[entry][0]))
        tree.add(path)
        if len(path) == depth:
            continue
        parent = path[-1] if path else root
        state = states[len(path)]
        top = plain.logits(state, parent).softmax(-1).topk(top_k)
        confidence = float(plain.confidence(state, parent))
        first = float(top.values[0])
        for rank, (p, token) in enumerate(zip(top.values.tolist(), top.indices.tolist())):
            survival = confidence if rank == 0 else (1 - confidence) * p / (1 - first)
            heap.append((chance * min(survival, 0.999), (*path, token)))
    return tree


@torch.no_grad()
@pytest.mark.parametrize(("budget", "depth", "top_k"), [(8, 5, 3), (8, 5, 8), (20, 4, 4), (6, 5, 1), (3, 1, 5)])
def test_the_tree_is_the_optimum_of_its_estimate(tmp_path, model, budget, depth, top_k):
    head, tensors, settings = random_head(model, tmp_path)
    # Logits so peaked that trees are neither all broad nor all deep.
    texts = random_texts(generator(3), (21, 12, 33))
    config = TreeConfig(budget=budget, depth=depth, top_k=top_k)
    rounds = MadeUpRounds(model, head, config, texts, 64, drafter=DSparkTreeGenerator)
    tree = rounds.drafter.propose(None, torch.stack([text[-1] for text in texts]), depth)
    for row, text in enumerate(texts):
        plain = PlainDSpark(tensors, settings, model, [s[:-1] for s in oracle_streams(model, text, head.taps)])
        drafted = set()
        for node in tree.valid[row].nonzero()[:, 0].tolist():
            path = [n for n in tree.paths[row, node].tolist() if n > 0]
            drafted.add(tuple(tree.tokens[row, path].tolist()))
        assert drafted == best_first(plain, int(text[-1]), budget, depth, top_k), row


@pytest.mark.parametrize("changes", [{}, {"dspark_block_size": 3}], ids=str)
def test_default_depth_is_the_block_size(tmp_path, changes):
    model = build_model(tiny_config())
    settings = dspark_settings(model.config, **changes)
    folder = write_checkpoint(model, tmp_path, dspark_tensors(model.config, settings), settings=settings)
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder).eval())
    depths = []
    propose = DSparkTreeGenerator.propose
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            DSparkTreeGenerator, "propose", lambda self, *args: depths.append(args[2]) or propose(self, *args)
        )
        run(target, random_texts(generator(1), (9,)), 12, tree_config={"budget": 12})
        assert max(depths) == settings["dspark_block_size"]
        depths.clear()
        run(target, random_texts(generator(1), (9,)), 12, tree_config={"budget": 12, "depth": 7})
        assert max(depths) == 7


def test_deeper_than_the_block_warns_once(target, caplog):
    logging.set_verbosity_warning()
    hf_treespec_logger = "hf_treespec.generation"
    try:
        with caplog.at_level("WARNING", logger=hf_treespec_logger):
            for _ in range(2):
                run(target, random_texts(generator(1), (9,)), 4, tree_config={"budget": 8, "depth": 6})
            run(target, random_texts(generator(1), (9,)), 4, tree_config={"budget": 8})
    finally:
        logging.set_verbosity_error()
    assert len([r for r in caplog.records if "dspark_block_size" in r.message]) == 1


# The text


@pytest.mark.parametrize(
    "tree", [{"budget": 6, "top_k": 1}, TREE, {"budget": 8, "depth": 7}, {"budget": 8, "drafter": "dspark"}], ids=str
)
def test_trees_of_the_head_write_the_plain_text(target, tree):
    assert_plain_text(target, tree)


def test_a_reused_cache_holds_what_a_fresh_one_does(target):
    assert_reuse(target, TREE)


# The checkpoint


def test_saved_beside_its_trunk_it_is_found_again(target, tmp_path):
    head = head_of(target)
    target.save_pretrained(tmp_path)
    save_head(head, tmp_path)
    again = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert detect_head(tmp_path) == "dspark"
    loaded = head_of(again)
    assert loaded.settings() == head.settings()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, head.state_dict()[name]), name


def test_a_head_asked_for_as_the_other_kind(target):
    with pytest.raises(ValueError, match="DSpark head, which cannot be used as MTP.*drafter='auto'"):
        run(target, random_texts(generator(1), (5,)), tree_config={"budget": 4, "drafter": "mtp"})


FAULTS = {
    "missing key": ({"dspark_markov_rank": None}, lambda t: None, ["dspark_markov_rank", "missing"]),
    "a layer that is not there": ({"dspark_target_layer_ids": [1, 99]}, lambda t: None, ["99", "dspark_target_layer"]),
    "a noise token above": ({"dspark_noise_token_id": 97}, lambda t: None, ["dspark_noise_token_id", "97"]),
    "missing": (
        {},
        lambda t: [t.pop("mtp.0.main_norm.weight"), t.pop("mtp.1.attn.wkv.weight")],
        ["missing: `mtp.0.main_norm.weight`, `mtp.1.attn.wkv.weight`"],
    ),
    "misshapen": (
        {},
        lambda t: t.update({"mtp.2.markov_head.markov_w1.weight": torch.ones(97, 5)}),
        ["`mtp.2.markov_head.markov_w1.weight` has shape [97, 5] instead of [97, 12]"],
    ),
    "MTP": ({}, lambda t: t.update({"mtp.0.e_proj.weight": torch.ones(32, 32)}), ["`mtp.0.e_proj.weight`", "MTP"]),
}


@pytest.mark.parametrize(("changes", "change", "words"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_listed(model, tmp_path, changes, change, words):
    settings = dspark_settings(model.config)
    tensors = dspark_tensors(model.config, settings)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = copy.deepcopy(model.config)
    config.update(settings | changes)
    with pytest.raises(ValueError) as raised:
        load_head(tmp_path, config)
    for word in words:
        assert word in str(raised.value)


def test_a_quantised_head_of_the_official_layout(tmp_path):
    """FP8 and packed FP4, as the trunk around it; norms, the Markov head and the confidence head are not quantised."""
    # Experts whose rows are 32 long, so that an FP4 block fits.
    model = build_model(tiny_config(moe_intermediate_size=32))
    settings, stored = dspark_settings(model.config), {}
    for name, weight in dspark_tensors(model.config, settings).items():
        stored |= quantise(name, weight)
    assert stored["mtp.0.main_proj.weight"].dtype == stored["mtp.2.attn.wkv.weight"].dtype == torch.float8_e4m3fn
    assert stored["mtp.1.ffn.experts.3.w2.weight"].dtype == torch.int8
    write_checkpoint(model, tmp_path, stored, settings=settings)
    quantise_trunk(tmp_path)
    loaded = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    state = head_of(loaded).state_dict()
    for stage in range(3):
        weight = dequantise(f"mtp.{stage}.attn.wkv.weight", stored)
        assert torch.equal(state[f"layers.{stage}.self_attn.kv_proj.weight"], weight)
        down = [dequantise(f"mtp.{stage}.ffn.experts.{e}.w2.weight", stored) for e in range(4)]
        assert torch.equal(state[f"layers.{stage}.mlp.experts.down_proj"], torch.stack(down))
    assert torch.equal(state["main_proj.weight"], dequantise("mtp.0.main_proj.weight", stored))
    texts = random_texts(generator(9), (23, 5))
    output, written = run(loaded, texts, 12, tree_config=TREE)
    assert torch.equal(torch.cat(written), torch.cat(run(loaded, texts, 12, tree_config={"budget": 1})[1]))
    assert output.tree_stats["nodes"] > output.tree_stats["rounds"]
