"""Simulations: analytic costs and drawn rounds equal hand-computed values, walks those of `replay`, the oracle is best."""

import numpy as np
import pytest
import torch
from test_cli import invoke

from hf_treespec.bench.simulation import CONTROLLERS, Simulation
from hf_treespec.budgeting.analytic import SHAPES, AnalyticCosts, Machine
from hf_treespec.budgeting.controllers import FixedController
from hf_treespec.budgeting.costs import FunctionCosts
from hf_treespec.budgeting.hindsight import Outcomes
from hf_treespec.budgeting.replaying import RecordedTexts, replay
from hf_treespec.budgeting.synthetic import PAPER_CHAINS, PAPER_LEVELS, constant_curve, draw_rounds
from hf_treespec.heads.alarm import expected_accepted, published_acceptance


# Of a forward, in made-up units: half of it fixed.
LINEAR = FunctionCosts(
    lambda nodes, batch, context: 1 + 0.1 * nodes * batch, lambda levels, width, batch: 0.1 * levels
)


@pytest.fixture(scope="module")
def flash() -> AnalyticCosts:
    return AnalyticCosts(SHAPES["v4-flash"], Machine(launch=0.0, sharded="all"))


@pytest.fixture(scope="module")
def trees():
    return draw_rounds([0.8, 0.6], depth=4, top_k=2, texts=8, length=48)


# Analytic costs


def test_sizes_are_those_of_the_model(flash):
    # 284B parameters stored in 160 GB, with 13B per token; so says the model card.
    assert 280e9 < flash.trunk.parameters < 290e9
    assert 150e9 < flash.trunk.stored_bytes < 170e9
    # One of 256 experts of 43 layers: three matrices of 4096 x 2048.
    assert flash.trunk.experts == 43 * 256 * 3 * 4096 * 2048


def test_distinct_experts(flash):
    assert flash.distinct_experts(1) == pytest.approx(6)
    # Exact for two independent draws of 6 of 256.
    assert flash.distinct_experts(2) == pytest.approx(12 - 36 / 256)
    assert 255.9 < flash.distinct_experts(1000) <= 256


def test_verification_reads_what_it_should(flash):
    """Memory alone at batch 1: experts on 8 GPUs, the rest on 8 or on each."""
    one, two = flash.verify([1, 2], 1, 1)
    expert = flash.trunk.expert_bytes / 256 / 8 / 4.8e12
    others = (flash.trunk.other_bytes - 129280 * 4096 * 2) / 8 / 4.8e12
    assert one == pytest.approx(6 * expert + others, rel=1e-3)
    assert two - one == pytest.approx((6 - 36 / 256) * expert, rel=1e-3)
    replicated = AnalyticCosts(SHAPES["v4-flash"], Machine(launch=0.0))
    assert replicated.verify(1, 1, 1) - one == pytest.approx(7 * others, rel=1e-3)
    # Arithmetic at thousands of tokens: twice the weights that each uses; attention to one token is nothing.
    many, more = flash.verify([8192, 16384], 1, 1)
    active = flash.trunk.others - 129280 * 4096 + flash.trunk.experts * 6 / 256
    assert more - many == pytest.approx(2 * active * 8192 / 8 / 1979e12, rel=0.02)
    # Rows read their own entries: 21 CSA layers score context / 4 of 128 and read at most 512 per node of 512 channels.
    near, far = (flash.verify(1, 1, context) for context in (65536, 131072))
    layers = flash.config.layer_types.count("compressed_sparse_attention")
    heavy = flash.config.layer_types.count("heavily_compressed_attention")
    entries = 65536 / 4 * 128 * layers + 65536 / 128 * 512 * heavy
    assert far - near == pytest.approx(2 * entries / 4.8e12, rel=1e-3)


def test_launches_and_drafts(flash):
    slow = AnalyticCosts(SHAPES["v4-flash"], Machine(launch=1e-6, sharded="all"))
    assert slow.verify(1, 1, 1) - flash.verify(1, 1, 1) == pytest.approx(43 * 98e-6)
    assert slow.draft(2, 1, 1) - flash.draft(2, 1, 1) == pytest.approx(2 * 148e-6)
    levels = flash.draft(np.arange(4), 1, 1)
    assert levels[0] == 0 and np.diff(levels) == pytest.approx(levels[1])
    # Behind the first level trees draft several nodes each, which read more experts.
    wide = flash.draft(np.arange(4), 2, 1)
    assert wide[1] == levels[1] and (wide[2:] > levels[2:]).all()
    block = AnalyticCosts(SHAPES["v4-flash"], Machine(launch=0.0, sharded="all"), "dspark").draft([0, 1, 5], 2, 1)
    # A block drafts all levels at once, but for the Markov term: a table of 256 x 129,280 each.
    assert block[0] == 0
    assert block[2] - block[1] == pytest.approx(4 * 256 * 129280 * 2 / 8 / 4.8e12)
    assert AnalyticCosts(SHAPES["v4-flash"], Machine(), "none").draft([3], 2, 1) == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AnalyticCosts(SHAPES["v4-flash"], Machine(), "eagle"), "`drafter` is 'eagle'"),
        (lambda: Machine(sharded="heads"), "`sharded` is 'heads'"),
        (lambda: Machine(gpus=0), "`gpus` is 0"),
        (lambda: constant_curve(9, 7), "not between 1 and 8"),
        (lambda: draw_rounds([1.2], 2, 2), "1.2 is no acceptance"),
        (lambda: published_acceptance("x", "eagle"), "'eagle'; allowed values"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Drawn rounds


def test_constant_curves_give_the_published_length():
    (rate,) = constant_curve(2.84, 7)
    assert sum(rate**depth for depth in range(8)) == pytest.approx(2.84)
    tokens, levels = published_acceptance("deepseek-ai/DeepSeek-V4-Flash", "mtp")
    assert tokens - 1 == expected_accepted("deepseek-ai/DeepSeek-V4-Flash", "mtp", levels)


def test_drawn_rounds_accept_as_they_say():
    rounds = draw_rounds([0.8, 0.5], depth=3, top_k=2, texts=40, length=100)
    accepted, probabilities = rounds.accepted.double(), rounds.probabilities.double()
    # One path at most is accepted, and its nodes' parents are.
    for depth in (1, 2, 3):
        assert (rounds.accepted & (rounds.depths == depth)).sum(1).max() == 1
    assert (rounds.accepted <= rounds.accepted.gather(1, rounds.parents)).all()
    assert (probabilities <= probabilities.gather(1, rounds.parents)).all()
    # 4,000 draws: means agree within four standard errors of at most 0.008.
    assert (accepted.mean(0) - probabilities.mean(0)).abs().max() < 0.032
    assert accepted[:, 1].mean() == pytest.approx(0.8, abs=0.03)
    chain = draw_rounds([0.8, 0.5], depth=3, top_k=1, texts=40, length=100)
    assert chain.accepted.double().mean(0)[1:].tolist() == pytest.approx([0.8, 0.4, 0.2], abs=0.03)


# Walks


@pytest.mark.parametrize("batch", [1, 3])
def test_fast_walks_are_the_fixed_controller_s(trees, batch):
    texts = RecordedTexts(trees)
    outcomes = Outcomes(texts, LINEAR, depth=4, budget=8)
    for depth, nodes in ((0, 1), (1, 2), (2, 6), (4, 8)):
        fast = outcomes.fixed(depth, nodes, batch)
        slow = replay(texts, lambda: FixedController(nodes), LINEAR, depth, batch)  # noqa: B023
        for name in ("tokens", "rounds", "nodes"):
            assert getattr(fast, name).tolist() == getattr(slow, name).tolist(), (depth, nodes, name)
        assert fast.seconds == pytest.approx(slow.seconds)


def test_the_oracle_is_best(trees):
    outcomes = Outcomes(RecordedTexts(trees), LINEAR, depth=4, budget=8)
    fixed = max(outcomes.fixed(depth, nodes, 2).rate for depth in range(5) for nodes in range(depth + 1, 9))
    assert outcomes.best(2).rate > 1.05 * fixed
    assert outcomes.best(2, nodes=4).rate <= outcomes.best(2).rate
    # Where verification is free and drafting too, it takes all there is.
    free = FunctionCosts(lambda nodes, batch, context: np.ones_like(nodes), lambda levels, width, batch: 0 * levels)
    outcomes = Outcomes(RecordedTexts(trees), free, depth=4, budget=40)
    assert outcomes.best(2).rate == pytest.approx(outcomes.fixed(4, 40, 2).rate)


def test_simulated_controllers(trees):
    chains = draw_rounds([0.8, 0.6], depth=4, top_k=1, texts=8, length=48)
    points = Simulation(trees, chains, LINEAR, 5).run([3, 5], [1, 4], CONTROLLERS)
    rates = {(p.controller, p.budget, p.batch): p.rate for p in points}
    assert len(points) == 2 * (1 + 2 * len(CONTROLLERS))
    for batch in (1, 4):
        # Plain decoding emits `batch` tokens in 1 + 0.1 batch.
        assert rates["budget=1", 1, batch] == pytest.approx(batch / (1 + 0.1 * batch))
        for budget in (3, 5):
            assert rates["oracle", budget, batch] == max(
                rates[name, budget, batch] for name in CONTROLLERS if name != "chain"
            )
            # The fixed depth is chosen knowing these few short texts, in which the controller still learns.
            assert rates["cost", budget, batch] > 0.9 * rates["fixed", budget, batch]
    with pytest.raises(ValueError, match="'psychic'"):
        Simulation(trees, chains, LINEAR, 5).run([3], [1], ["psychic"])


def test_the_paper_s_regularities():
    """On a V4-Flash-shaped table with acceptance as published; docs/benchmarks.md says what departs, and why."""
    costs = AnalyticCosts(SHAPES["v4-flash"], Machine(sharded="all"))
    lengths, gains, speeds = {}, {}, {}
    for name, tokens in PAPER_CHAINS.items():
        curve = constant_curve(tokens, PAPER_LEVELS)
        trees, chains = (
            Outcomes(RecordedTexts(draw_rounds(curve, 7, top_k, texts=192, length=32)), costs, 7, 8)
            for top_k in (2, 1)
        )
        plain = chains.fixed(0, 1, 4)
        for budget in (5, 6, 7, 8):
            tree, chain = trees.fixed(4, budget, 4), chains.fixed(budget - 1, budget, 4)
            length = [walk.tokens.sum() / walk.rounds.sum() for walk in (tree, chain)]
            lengths[name, budget] = length[0] / length[1]
            gains[name, budget], speeds[name, budget] = tree.rate / chain.rate, tree.rate / plain.rate
        # Shallow and wide beats deep and narrow.
        assert trees.fixed(4, 8, 4).rate > trees.fixed(7, 8, 4).rate
    # What a tree gains grows with its budget, in accepted length and in throughput.
    for table in (lengths, gains):
        means = [np.mean([table[name, budget] for name in PAPER_CHAINS]) for budget in (5, 6, 7, 8)]
        assert 1.08 < means[0] < means[1] < means[2] < means[3] < 1.35
    # The least predictable text gains most.
    assert lengths["sharegpt", 8] > max(lengths["gsm8k", 8], lengths["mbpp", 8])
    # Throughput itself flattens: each node adds less than the one before.
    steps = np.diff([np.mean([speeds[name, budget] for name in PAPER_CHAINS]) for budget in (5, 6, 7, 8)])
    assert steps[0] > steps[1] > steps[2] > 0


def test_the_gain_over_batch_is_an_inverted_u_behind_a_dip():
    """More rows first read more experts, then share them, and at last wait for arithmetic."""
    costs = AnalyticCosts(SHAPES["v4-flash"], Machine(sharded="all"))
    # Rounds of 8 nodes in steps of plain decoding; the accepted length does not depend on the batch.
    steps = {
        b: float((costs.draft(4, 2, b) + costs.verify(8, b, 512)) / costs.verify(1, b, 512))
        for b in (1, 16, 128, 1024)
    }
    assert steps[1] < steps[16] > 1.05 * steps[128] and steps[1024] > 1.3 * steps[128]


# The command


def test_simulate_command(tmp_path):
    options = [
        "--acceptance",
        "0.8,0.6",
        "--limit",
        "8",
        "--max-new-tokens",
        "16",
        "--budgets",
        "3",
        "--batches",
        "1,2",
    ]
    result = invoke("simulate", *options, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "throughput over budget=1" in result.output and "oracle" in result.output
    # Nothing is cut off in a narrow terminal.
    assert "…" not in result.output
    lines = (tmp_path / "simulation.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * (1 + len(CONTROLLERS))
    for name in ("throughput_over_batch", "throughput_over_budget", "tree_over_chain"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Pass recorded rounds"),
        (["--acceptance", "0.8,x"], "`--acceptance` is '0.8,x'"),
        (["--acceptance", "gsm8k", "--budgets", "1"], "`--budgets` starts at 2"),
        (["--acceptance", "gsm8k", "--gpu", "abacus"], "`--gpu` is 'abacus'"),
        (["--acceptance", "gsm8k", "--controllers", "psychic"], "allowed values are"),
        (["--rounds", "missing.safetensors"], "pass `--model` and `--prompts` to record them"),
        (["--acceptance", "gsm8k", "--costs", "missing.json"], "missing.json"),
        (["--acceptance", "gsm8k", "--limit", "4", "--max-new-tokens", "8", "--batches", "4"], "2 texts are walked"),
    ],
)
def test_simulate_refuses(options, message):
    result = invoke("simulate", *options)
    assert result.exit_code == 1 and message in result.output, result.output


def test_recorded_rounds_are_simulated_without_the_model(tmp_path):
    trees = draw_rounds([0.7], depth=2, top_k=2, texts=4, length=8)
    trees.save(tmp_path / "r.safetensors")
    draw_rounds([0.7], depth=2, top_k=1, texts=4, length=8).save(tmp_path / "r-chain.safetensors")
    options = ["--rounds", str(tmp_path / "r.safetensors"), "--budgets", "3", "--batches", "1"]
    result = invoke("simulate", *options, "--controllers", "fixed,cost")
    assert result.exit_code == 0, result.output
    assert torch.equal(type(trees).load(tmp_path / "r.safetensors").accepted, trees.accepted)
