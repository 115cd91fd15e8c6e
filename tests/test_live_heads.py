"""The head of a live model: attached, copied, watched."""

import copy
import pickle

import pytest
import torch
from decoding import run
from heads import make_checkpoint, make_dspark_checkpoint
from oracle import build_model, generator, left_pad, random_texts, tiny_config
from rounds import assert_same_state
from test_check import tapped  # noqa: F401
from transformers import AutoModelForCausalLM

import hf_treespec
from hf_treespec.heads import MTPHead, head_of
from hf_treespec.heads.alarm import AcceptanceAlarm, expected_accepted


TREE = {"budget": 6}


def test_a_model_without_a_head_takes_another_checkpoint_s(checkpoint, target):
    """A fine-tuned trunk, saved through transformers, has lost its head."""
    alone = hf_treespec.enable(copy.deepcopy(hf_treespec.disable(copy.deepcopy(target))))
    alone.config._name_or_path = ""
    texts = random_texts(generator(1), (9, 4))
    with pytest.raises(ValueError, match="No draft head"):
        run(alone, texts, tree_config=TREE)
    hf_treespec.attach_head(alone, checkpoint)
    output, written = run(alone, texts, tree_config=TREE)
    expected, by_target = run(target, texts, tree_config=TREE)
    assert torch.equal(torch.cat(written), torch.cat(by_target))
    assert output.tree_stats["accepted_lengths"] == expected.tree_stats["accepted_lengths"]
    for copied in (copy.deepcopy(alone), pickle.loads(pickle.dumps(alone))):
        assert run(copied, texts, tree_config=TREE)[0].tree_stats["rounds"] == expected.tree_stats["rounds"]
    hf_treespec.attach_head(alone, head_of(target))
    assert head_of(alone) is head_of(target)
    hf_treespec.enable(hf_treespec.disable(alone))
    with pytest.raises(ValueError, match="No draft head"):
        run(alone, texts, tree_config=TREE)


def test_what_cannot_be_attached(model, target):
    other = tiny_config(hidden_size=64)
    for head, words in ((3, "`head` is 3"), (MTPHead(other), "`hidden_size` is 64 instead of 32")):
        with pytest.raises(ValueError, match=words):
            hf_treespec.attach_head(model, head)
    with pytest.raises(ValueError, match="enable"):
        hf_treespec.attach_head(build_model(tiny_config()), head_of(target))
    hf_treespec.attach_head(target, head_of(target))
    try:
        with pytest.raises(ValueError, match="'dspark'.*of kind 'mtp'"):
            run(target, random_texts(generator(1), (5,)), tree_config={"budget": 4, "drafter": "dspark"})
    finally:
        hf_treespec.enable(hf_treespec.disable(target))


def test_a_cache_knows_whose_keys_it_holds(checkpoint, target):
    """Another head's keys would never show but in what is accepted."""
    other = hf_treespec.load_head(checkpoint, target.config)
    with torch.no_grad():
        other.layers[0].self_attn.kv_proj.weight.neg_()
    texts = random_texts(generator(1), (30, 21))
    first, texts = run(target, texts, tree_config=TREE)
    try:
        # The first head is gone by now, and its keys with it.
        hf_treespec.attach_head(target, other)
        fresh, _ = run(target, texts, tree_config=TREE)
        again, _ = run(target, texts, tree_config=TREE, cache=first.cache)
        assert_same_state(again.cache, fresh.cache)
        hf_treespec.attach_head(target, hf_treespec.load_head(checkpoint, target.config))
        pickled = pickle.loads(pickle.dumps(again.cache))
        assert run(target, texts, tree_config=TREE, cache=pickled)[0].cache is pickled
    finally:
        hf_treespec.enable(hf_treespec.disable(target))


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_heads_sample_and_copy_rows(kind, tmp_path):
    """Left-padded, several sequences per prompt, and a second turn on a pickled cache: the text of `budget=1`."""
    folder = {"mtp": make_checkpoint, "dspark": make_dspark_checkpoint}[kind](tmp_path)
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder).eval())
    batch = left_pad(random_texts(generator(2), (9, 4, 17)))
    options = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2, "seeds": list(range(6))}
    options |= {"max_new_tokens": 16, "return_dict_in_generate": True}
    plain = target.generate(**batch, **options, tree_config={"budget": 1})
    output = target.generate(**batch, **options, tree_config=TREE)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.tree_stats["rounds"] < plain.tree_stats["rounds"]
    mask = torch.cat([batch["attention_mask"].repeat_interleave(2, 0), torch.ones(6, 16, dtype=torch.long)], 1)
    second = {"attention_mask": mask, "max_new_tokens": 8}
    expected = target.generate(plain.sequences, **second, tree_config={"budget": 1})
    cache = pickle.loads(pickle.dumps(output.cache))
    assert torch.equal(target.generate(output.sequences, **second, tree_config=TREE, cache=cache), expected)


def test_an_attached_head_follows_the_model_s_dtype(checkpoint):
    model = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval())
    hf_treespec.attach_head(model, hf_treespec.load_head(checkpoint, model.config))
    output, _ = run(model, random_texts(generator(1), (9, 4)), tree_config=TREE)
    assert output.tree_stats["nodes"] > output.tree_stats["rounds"]
    head = head_of(model)
    assert head.e_proj.weight.dtype == torch.bfloat16 and head.enorm.weight.dtype == torch.float32
    assert torch.equal(head_of(copy.deepcopy(model)).e_proj.weight, head.e_proj.weight)


def test_short_and_steered_calls_do_not_raise_the_alarm(target, caplog):
    """Where a path cannot be long, or processors decide, rejected drafts say nothing about the head."""
    texts = random_texts(generator(3), (7,) * 50)
    with caplog.at_level("WARNING", logger="hf_treespec.heads.alarm"):
        for _ in range(5):
            run(target, texts, 1, tree_config=TREE)
            run(target, texts[:4], 30, tree_config=TREE, suppress_tokens=list(range(3, 90)))
    assert not caplog.records


def test_the_streams_of_a_wrong_layer_raise_the_alarm(tapped, caplog, monkeypatch):  # noqa: F811
    """A head that is right about nearly everything, as long as it sees the layer it was made for."""
    target, head = tapped
    texts = random_texts(generator(3), (9,) * 8)
    for taps, warnings in ((head.taps, 0), ([1], 1)):
        monkeypatch.setattr(head, "taps", taps)
        hf_treespec.attach_head(target, head)
        caplog.clear()
        with caplog.at_level("WARNING", logger="hf_treespec.heads.alarm"):
            for _ in range(3):
                run(target, texts, 40, tree_config={"budget": 4, "top_k": 1})
        assert len(caplog.records) == warnings
        assert all("wrong layers" in record.getMessage() for record in caplog.records)


def test_use_mtp_is_transformers_name_for_the_head(target):
    texts = random_texts(generator(1), (9, 4))
    expected, written = run(target, texts, tree_config={"budget": 6, "drafter": "mtp"})
    output, again = run(target, texts, tree_config=TREE, use_mtp=True)
    assert torch.equal(torch.cat(again), torch.cat(written))
    assert output.tree_stats["accepted_lengths"] == expected.tree_stats["accepted_lengths"]
    for options, words in (
        ({"use_mtp": 3}, "`use_mtp` is 3"),
        ({"use_mtp": True, "tree_config": {"budget": 4, "drafter": "ngram"}}, "beside `drafter='ngram'`"),
        ({"use_mtp": True, "assistant_model": target}, "beside `assistant_model`"),
    ):
        with pytest.raises(ValueError, match=words):
            run(target, texts, **{"tree_config": TREE, **options})


# The alarm


def test_expected_acceptance():
    flash = "deepseek-ai/DeepSeek-V4-Flash"
    assert expected_accepted(flash, "mtp", 3) == expected_accepted(flash, "mtp", 9) == pytest.approx(1.7)
    assert expected_accepted(flash, "mtp", 1) == pytest.approx(1.7 / 3)
    assert expected_accepted("somebody/else", "dspark", 5) == pytest.approx(1.5)


@pytest.mark.parametrize(("accepted", "warns"), [(0, True), (133, True), (137, False), (400, False)])
def test_the_alarm_waits_and_warns_once(caplog, accepted, warns):
    """At 200 rounds of depth 3 a Flash head should have 340 drafts accepted; two fifths of that are 136."""
    alarm = AcceptanceAlarm("deepseek-ai/DeepSeek-V4-Flash", "mtp")
    with caplog.at_level("WARNING", logger="hf_treespec.heads.alarm"):
        alarm.count(199, 0, 0)
        alarm.count(150, accepted, 3)
        assert not caplog.records
        for _ in range(3):
            alarm.count(50, 0, 3)
    assert len(caplog.records) == warns
    if warns:
        for cause in ("not primed", "wrong layers", "converted", "chat markers"):
            assert cause in caplog.text
