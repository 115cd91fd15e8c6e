"""`hf-treespec check` passes the real thing, and finds faults planted in every part of it."""

import json

import pytest
import torch
from oracle import build_model, generator, tiny_config
from test_cli import byte_tokenizer, invoke
from test_shipped import PROMPTS as SHIPPED_PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_treespec
from hf_treespec import TreeCache, TreeConfig, ops, selection
from hf_treespec.check import Comparison, DecodingCheck, Texts, _compare, check_decoding
from hf_treespec.check_report import to_dict, to_markdown
from hf_treespec.check_sampling import chi_square
from hf_treespec.demo import checkpoint
from hf_treespec.heads import MTPHead, attach_head
from hf_treespec.intervals import Interval
from hf_treespec.ops import TreeGeometry
from hf_treespec.oracle import oracle_logits
from hf_treespec.sampling import gumbel_noise
from hf_treespec.selection import TokenSelector


torch.set_num_threads(1)
PROMPTS = ["A prompt of some thirty characters", "Another one, which is a bit longer than", "3 and 4 are"]
SPECIAL = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def pair():
    """A random target and an assistant that is often right."""
    target, draft = (build_model(tiny_config(**SPECIAL)) for _ in range(2))
    weight = draft.lm_head.weight
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=generator(7)) * weight.std() * 0.3)
    return hf_treespec.enable(target), hf_treespec.enable(draft)


@pytest.fixture(scope="module")
def command(pair, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    for name, model in zip(("target", "draft"), pair):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": text, "answer": 7} for text in PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["--model", str(folder / "target"), "--assistant", str(folder / "draft"), "--prompts", str(prompts)]
    return [*options, "--limit", "2", "--max-new-tokens", "8", "--batch-size", "2", "--dtype", "bfloat16"]


def check(target, draft, prompts=PROMPTS, **options) -> DecodingCheck:
    options = {"max_new_tokens": 20, "batch_size": 2, "draws": 64, **options}
    return check_decoding(target, byte_tokenizer(), prompts, TreeConfig(budget=6, depth=3), draft, **options)


def test_the_real_thing_passes(pair):
    found = check(*pair, answers=["7", None, "7"])
    assert found.faults == [] and found.dtype == "float32"
    ways = [(item.way, item.reference) for item in found.comparisons]
    assert ways == [
        ("budget=1", "stock"),
        ("tree", "budget=1"),
        ("tree, batches of 2", "budget=1"),
        ("tree, sampled", "budget=1, sampled"),
        ("budget=1, batches of 2", "budget=1"),
    ]
    for item in found.comparisons:
        assert item.identical == len(PROMPTS) and item.gaps == [None] * len(PROMPTS)
    assert 1.2 < found.accepted_length.low <= found.accepted_length.value <= found.accepted_length.high
    assert found.expected_length is None
    assert found.sampler.draws == 64 * len(PROMPTS) and found.sampler.degrees > 20 and found.sampler.p_value > 0.001
    assert (found.answers.prompts, found.answers.given, found.answers.difference.value) == (2, True, 0)


def test_bf16_near_ties_are_no_faults(command):
    """Stock and our attention round at different places in bf16."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(command[place], dtype=torch.bfloat16).eval() for place in (1, 3)
    )
    found = check(hf_treespec.enable(target), draft, PROMPTS[:2], max_new_tokens=8)
    assert found.faults == [] and found.dtype == "bfloat16"
    # Rounding does not explain everything: the token that the model likes least is a fault.
    ids = torch.tensor([[7, 8, 9]])
    logits = oracle_logits(target, ids)[0, -1]
    texts = {"best": Texts([[int(logits.argmax())]]), "worst": Texts([[int(logits.argmin())]])}
    item = _compare(target, ids.tolist(), texts, "worst", "best")
    assert item.faults == [0] and item.gaps[0] > item.tolerances[0] > 0


# Faults


def stale_write(state, scratch, target, source, write=ops.scatter_path, **options) -> None:
    """A refresh that leaves the last of several tokens out."""
    write(state, scratch, *((target[:-1], source[:-1]) if len(target) > 1 else (target, source)), **options)


def wrong_phase(self, ratio, span, ring_size, pool_index=TreeGeometry.pool_index):
    """Pools one position too early."""
    rows, missing = pool_index(self, ratio, span, ring_size)
    return rows.roll(1, -1), missing


def stale_indexer(self, fork, plan, commit=TreeCache.commit) -> None:
    """Commits everything but the indexer's entries."""
    kept = [stream.entries for layer in self.layers for name, stream in layer.streams.items() if name == "indexer"]
    before = [entries.clone() for entries in kept]
    commit(self, fork, plan)
    for entries, old in zip(kept, before):
        entries.copy_(old)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "way"),
    [
        (ops, "scatter_path", stale_write, "tree"),
        (TreeGeometry, "pool_index", wrong_phase, "budget=1"),
        (TreeCache, "commit", stale_indexer, "budget=1"),
    ],
    ids=["corrupted refresh", "wrong phase", "stale indexer entry"],
)
def test_a_planted_fault_is_found(pair, monkeypatch, owner, name, fault, way):
    monkeypatch.setattr(owner, name, fault)
    found = check(*pair, PROMPTS[:2])
    assert any(f"float32: {way} leaves" in words for words in found.faults), found.faults


def flat_noise(seeds, positions, vocab_size):
    """Noise that is too weak, as if the temperature were 0.6."""
    return 0.6 * gumbel_noise(seeds, positions, vocab_size)


def draft_noise(self, logits, fork, entries=None, call=TokenSelector.__call__):
    """Other luck for trees than for single nodes."""
    return call(self, logits + 0.5 * logits.roll(1, -1) * (logits.shape[1] > 1), fork, entries)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "words"),
    [
        (selection, "gumbel_noise", flat_noise, "not drawn from the target's distribution"),
        (TokenSelector, "__call__", draft_noise, "tree, sampled leaves budget=1, sampled"),
    ],
    ids=["everywhere", "in trees"],
)
def test_a_biased_sampler_is_found(pair, monkeypatch, owner, name, fault, words):
    monkeypatch.setattr(owner, name, fault)
    found = check(*pair, max_new_tokens=6, draws=192)
    assert any(words in fault for fault in found.faults), found.faults


def test_chi_square_by_hand():
    """Bins expect 10, 6, and 4 + 2 + 2: what is left behind the last full bin joins it."""
    found, expected = torch.tensor([8.0, 9, 3, 4, 0]), torch.tensor([10.0, 6, 4, 2, 2])
    statistic, bins = chi_square(found, expected)
    assert bins == 3 and statistic == pytest.approx(4 / 10 + 9 / 6 + 1 / 8)


@pytest.fixture(scope="module")
def tapped():
    """A target of two layers of which only the first one matters, and a head that is this layer: a perfect drafter.

    The second layer writes into channel 0 alone, which the vocabulary projection ignores and the head suffers from: the
    head drafts well from the streams of the first layer, and badly from those of the second.
    """
    config = tiny_config(
        **SPECIAL, num_hidden_layers=2, layer_types=["sliding_attention"] * 2, mlp_layer_types=["moe"] * 2, hc_mult=1
    )
    model = build_model(config, seed=11)
    first, second = model.model.layers
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table[:, 0] = 0
        table.div_(table.square().mean(-1, keepdim=True).sqrt())
        model.lm_head.weight[:, 0] = 0
        for layer, silent in ((first, slice(0, 1)), (second, slice(1, None))):
            for weight in (layer.self_attn.o_b_proj.weight, layer.mlp.shared_experts.down_proj.weight):
                weight[silent] = 0
            layer.mlp.experts.down_proj[:, silent] = 0
    head = MTPHead(config).eval().requires_grad_(False)
    with torch.no_grad():
        head.enorm.weight.fill_(1)
        head.hnorm.weight.fill_(1)
        head.e_proj.weight.copy_(torch.eye(config.hidden_size))
        head.h_proj.weight.zero_()
        head.h_proj.weight[:, 0] = 100 * torch.randn(config.hidden_size, generator=generator(3))
        head.h_proj.weight[0] = 0
    parts = ((head.layers[0], first), (head.hc_head, model.model.hc_head), (head.norm, model.model.norm))
    for part, source in parts:
        part.load_state_dict(source.state_dict())
    head.taps = [0]
    return hf_treespec.enable(model), head


def test_a_wrong_head_tap_is_found(tapped, monkeypatch):
    target, head = tapped
    attach_head(target, head)
    right = check(target, None)
    assert right.faults == [] and right.accepted_length.low > 2.4
    # 40 % of one drafted token per round, for any head of this kind.
    assert right.expected_length == pytest.approx(1.4)
    monkeypatch.setattr(head, "taps", [1])
    wrong = check(target, None)
    (fault,) = wrong.faults
    assert "accepted length" in fault and "head tap" in fault
    # The text is right all the same.
    assert all(item.identical == len(PROMPTS) for item in wrong.comparisons)


def test_what_rounding_explains():
    item = Comparison(
        "tree", "budget=1", [None, 4, 2, 7], [None, 1e-6, float("inf"), float("nan")], [None, 1e-5, 0.0, 1e-5]
    )
    assert (item.identical, item.near_ties, item.faults) == (1, [1], [2, 3])
    found = DecodingCheck("float32", [item], Interval(1.5, 1.4, 1.6), 1.5, None)
    assert len(found.faults) == 1 and "3 of 4" not in found.faults[0] and "2 of 4" in found.faults[0]
    report = to_markdown({"model": "a"}, [found])
    assert "| tree (noise floor) | budget=1 | 1 | 1 | 2 |" in report
    assert "- fault: prompt 2 of tree, behind 2 tokens equal to budget=1's, gap one text ends, of which" in report
    assert (
        "- near-tie: prompt 1 of tree, behind 4 tokens equal to budget=1's, gap 1e-06, of which rounding explains 1e-05"
        in report
    )
    (written,) = json.loads(json.dumps(to_dict({}, [found]), allow_nan=False))["checks"]
    verdicts = [(row["prompt"], row["verdict"], row["gap"]) for row in written["comparisons"][0]["differences"]]
    assert verdicts == [(1, "near-tie", 1e-6), (2, "fault", None), (3, "fault", None)]


@pytest.mark.parametrize("measured", [Interval(1.2, 1.1, 1.3), Interval(1.2, 1.1, 1.6)])
def test_only_what_the_prompts_cannot_explain_is_too_short(measured):
    found = DecodingCheck("float32", [], measured, 1.5, None)
    assert bool(found.faults) == (measured.high < 1.5)


def test_prompt_lookup_needs_no_model(pair):
    config = TreeConfig(budget=4, drafter="ngram")
    found = check_decoding(pair[0], byte_tokenizer(), ["abcabcabc"], config, max_new_tokens=4, batch_size=2)
    assert found.faults == [] and found.expected_length is None


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["auto", "ngram"])
def test_the_shipped_pair_passes(drafter):
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(checkpoint("tiny-target")))
    draft = AutoModelForCausalLM.from_pretrained(checkpoint("tiny-draft")) if drafter == "auto" else None
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("tiny-target"))
    config = TreeConfig(budget=8, drafter=drafter)
    minimum = 1.5 if draft else None
    found = check_decoding(target, tokenizer, SHIPPED_PROMPTS[8:11], config, draft, None, 32, 3, None, minimum)
    assert found.faults == []
    assert all(item.identical == len(item.gaps) for item in found.comparisons)


def test_refusals(pair):
    with pytest.raises(ValueError, match="`prompts` is empty"):
        check_decoding(pair[0], byte_tokenizer(), [], TreeConfig(budget=4), pair[1])
    with pytest.raises(ValueError, match="at least 2 nodes"):
        check_decoding(pair[0], byte_tokenizer(), PROMPTS, TreeConfig(budget=1), pair[1])


# The command


def test_command_writes_reports(command, tmp_path):
    result = invoke("check", *command, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = (tmp_path / "check.md").read_text(encoding="utf-8")
    assert report.strip() in result.output
    for words in ("**Passed.**", "## float32", "## bfloat16", "Accepted length", "share that match the answers given"):
        assert words in report
    data = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert data["passed"] and [found["dtype"] for found in data["checks"]] == ["float32", "bfloat16"]


def test_command_fails_on_a_fault(command, monkeypatch):
    monkeypatch.setattr(TreeGeometry, "pool_index", wrong_phase)
    result = invoke("check", *command, "--no-fp32", "--dtype", "float32", "--minimum-length", "9")
    assert result.exit_code == 1
    assert "at least 9.00 was expected" in result.output
    assert "faults:**" in result.output and "budget=1 leaves stock" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "1"], "at least 2 nodes"),
        (["--dtype", "float31"], "`--dtype` is 'float31'"),
    ],
)
def test_command_refuses(command, options, message):
    result = invoke("check", *command, "--no-fp32", *options)
    assert result.exit_code == 1 and message in result.output
