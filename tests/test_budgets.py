"""Budget controllers on made-up rounds: what each must choose, by exhaustive search, and what it costs to choose."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from recorded import made_up_rounds

from hf_treespec.budgeting import speckv
from hf_treespec.budgeting.controllers import Level, sizes_up_to
from hf_treespec.budgeting.cost import CostController
from hf_treespec.budgeting.costs import CostTable, DraftPoint, FunctionCosts, VerifyPoint
from hf_treespec.budgeting.fallback import Fallback
from hf_treespec.budgeting.fit import fit_costs, held_out_error
from hf_treespec.budgeting.hindsight import sweep
from hf_treespec.budgeting.libra import LibraController, libra_lengths
from hf_treespec.budgeting.measuring import Measurement, MeasuringController
from hf_treespec.budgeting.replaying import RecordedTexts, replay
from hf_treespec.budgeting.rounds import RoundRecords


TABLES = {
    "flat": FunctionCosts(lambda n, b, c: np.ones_like(n), lambda levels, w, b: 0.05 * levels),
    "cpu": FunctionCosts(lambda n, b, c: 1 + 0.05 * (n - 1), lambda levels, w, b: 0.25 * levels),
    "staircase": FunctionCosts(lambda n, b, c: 1 + 0.9 * np.ceil((n - 1) / 4), lambda levels, w, b: 0.05 * levels),
}
FREE = FunctionCosts(lambda n, b, c: np.ones_like(n), lambda levels, w, b: 0.0 * levels)
RUINOUS = FunctionCosts(lambda n, b, c: 1 + 20.0 * (n > 1), lambda levels, w, b: 0.3 * levels)


def texts_of(first: float, count: int = 8, length: int = 96, **options) -> RecordedTexts:
    return RecordedTexts(made_up_rounds(count, length, 7, 3, first, **options))


def controller(costs, budget: int = 8) -> CostController:
    return CostController(costs, budget, 3)


def one_round(chooser, probabilities, levels=None, batch: int = 1):
    """Plans and drafts a round of one level that shows `probabilities` `[B, C]`, and returns the choice."""
    probabilities = np.asarray(probabilities, dtype=np.float32)
    assert chooser.plan(len(probabilities), 100, 1) == 1
    chooser.add(Level(probabilities[:, None], np.ones((len(probabilities), 1), dtype=np.float32)))
    return chooser.choose(probabilities)


@pytest.mark.parametrize("seed", range(4))
def test_the_chosen_prefix_is_the_best_one(seed):
    rng = np.random.default_rng(seed)
    staircase = rng.uniform(0.0, 0.6, 12).cumsum() + 1
    costs = FunctionCosts(lambda n, b, c: np.interp(n, np.arange(1, 13), staircase), lambda levels, w, b: 0.2 * levels)
    probabilities = rng.uniform(0.0, 1.0, (1, 20)) * 0.9
    choice = one_round(CostController(costs, 12, 20), probabilities)
    best = np.sort(probabilities[0])[::-1]
    sizes = [int(size) for size in sizes_up_to(12)]
    rates = {n: (1 + best[: n - 1].sum()) / (0.2 + staircase[n - 1]) for n in sizes}
    assert choice.columns == max(rates, key=rates.get) == choice.nodes[0]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_level_is_drafted_where_some_depth_below_pays(batch):
    """Behind one level of the first round, when all that is known of deeper ones is what is assumed at first."""
    rng, answers = np.random.default_rng(0), []
    for _ in range(40):
        staircase, level = rng.uniform(0.1, 0.6, 6).cumsum() + 1, rng.uniform(0.0, 0.6)
        costs = FunctionCosts(lambda n, b, c: np.interp(n, np.arange(1, 7), staircase), lambda s, w, b: level * s)  # noqa: B023
        probabilities = rng.uniform(0.0, 0.9, (batch, 1, 3))
        chooser = CostController(costs, 6, 3)
        chooser.plan(batch, 100, 4)
        chooser.add(Level(probabilities, np.ones((batch, 1))))
        pool = frontier = np.sort(probabilities[:, 0], 1).mean(0)
        rates = []
        for levels in range(1, 5):
            best = np.sort(pool)[::-1]
            rates.append(max((1 + best[: n - 1].sum()) / (level * levels + staircase[n - 1]) for n in range(1, 7)))
            pool = np.concatenate([pool, np.outer(0.8 ** (levels - 1) * np.array([0.8, 0.1, 0.05]), frontier).ravel()])
        answers.append(max(rates[1:]) >= rates[0])
        assert chooser.deeper() == answers[-1]
    assert 5 < sum(answers) < 35


def test_a_batch_shares_one_budget_where_padding_is_cheap():
    costs = FunctionCosts(lambda n, b, c: 1 + 0.12 * (n - 1), lambda levels, w, b: 0.1 * levels, padding=0.0)
    probabilities = [[0.9, 0.8, 0.7, 0.6], [0.05, 0.04, 0.03, 0.02], [0.5, 0.02, 0.01, 0.0]]
    choice = one_round(CostController(costs, 5, 4), probabilities)
    flat = [(p, row) for row, row_probabilities in enumerate(probabilities) for p in row_probabilities if p]
    best = {}
    for count in range(len(flat) + 1):
        taken = sorted(flat, reverse=True)[:count]
        rate = (3 + sum(p for p, _ in taken)) / (1.1 + 0.12 * count / 3)
        best[rate] = [1 + sum(row == r for _, r in taken) for row in range(3)]
    assert choice.nodes.tolist() == best[max(best)] and choice.columns == 5
    assert choice.nodes[0] > choice.nodes[2] > choice.nodes[1] == 1
    # Where a padding node costs what a node does, every row takes what there is room for.
    costs.padding = 1.0
    full = one_round(CostController(costs, 5, 4), probabilities)
    assert full.nodes.tolist() == [min(full.columns, 5), min(full.columns, 5), min(full.columns, 4)]


def test_nothing_is_taken_that_has_no_probability():
    choice = one_round(controller(FREE), [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert choice.nodes.tolist() == [2, 1] and choice.columns == 2


@pytest.mark.parametrize("first", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", TABLES)
def test_cost_reaches_the_best_fixed_tree(name, first):
    texts, costs = texts_of(first, count=16), TABLES[name]
    best = max(result.rate for result in sweep(texts, costs, 8).values())
    assert replay(texts, lambda: controller(costs), costs, 7).rate >= 0.97 * best


@pytest.mark.parametrize("name", ["cpu", "staircase"])
def test_cost_beats_every_fixed_tree_on_mixed_texts(name):
    """No one shape suits texts that are easy and texts that are not."""
    costs, sets = TABLES[name], [texts_of(first, seed=i) for i, first in enumerate((0.15, 0.95))]
    swept = [sweep(texts, costs, 8) for texts in sets]
    fixed = max(
        sum(s[shape].tokens.sum() for s in swept) / sum(s[shape].seconds.sum() for s in swept) for shape in swept[0]
    )
    ours = [replay(texts, lambda: controller(costs), costs, 7) for texts in sets]
    assert sum(r.tokens.sum() for r in ours) / sum(r.seconds.sum() for r in ours) > fixed


def test_free_verification_takes_the_cap():
    texts = texts_of(0.6)
    result = replay(texts, lambda: controller(FREE), FREE, 7)
    cap = sweep(texts, FREE, 8)[7, 8]
    assert (result.rounds == cap.rounds).all() and (result.nodes >= 0.97 * cap.nodes).all()


@pytest.mark.parametrize(
    ("costs", "options"),
    [
        (RUINOUS, {"first": 0.85}),
        (TABLES["cpu"], {"first": 0.6, "honest": 0.02}),
        (TABLES["staircase"], {"first": 0.6, "honest": 0.02}),
        (TABLES["cpu"], {"first": 0.02}),
    ],
    ids=["ruinous", "random drafter", "random drafter, staircase", "random drafter that knows it"],
)
def test_never_slower(costs, options):
    texts = texts_of(count=3, length=512, **options)
    result = replay(texts, lambda: controller(costs), costs, 7, make_fallback=Fallback)
    assert (result.seconds <= 1.03 * sweep(texts, costs, 8)[0, 1].seconds).all()


@pytest.mark.parametrize("batch", [1, 4])
def test_fallback_alone_is_hardly_slower(batch):
    """Without a cost table: a drafter that says nothing, full trees of eight nodes."""
    from hf_treespec.budgeting.controllers import FixedController

    costs, texts = TABLES["cpu"], texts_of(0.6, count=4, length=512, honest=0.02)
    result = replay(texts, lambda: FixedController(8), costs, 7, batch, Fallback)
    plain = replay(texts, lambda: FixedController(1), costs, 0, batch)
    assert (result.seconds <= 1.05 * plain.seconds).all()


@pytest.mark.parametrize("name", TABLES)
def test_a_perfect_drafter_keeps_its_gain(name):
    costs, texts = TABLES[name], texts_of(0.999, count=2, length=512, spread=0.0)
    plain = sweep(texts, costs, 8)[0, 1].rate
    best = max(result.rate for result in sweep(texts, costs, 8).values())
    ours = replay(texts, lambda: controller(costs), costs, 7, make_fallback=Fallback).rate
    assert ours / plain - 1 >= 0.97 * (best / plain - 1)


def test_libra_lengths_are_the_published_minimum():
    rng = np.random.default_rng(0)
    for alpha in (1.0, 2.1):
        q = rng.uniform(0.05, 1.0, (20, 6))
        expected = []
        for row in q:
            bounds = [math.floor(alpha * sum(math.prod(row[i : j + 1]) for j in range(i, 6)) + i) for i in range(6)]
            expected.append(min(6, *bounds))
        assert libra_lengths(q.cumprod(1), alpha).tolist() == expected
    assert libra_lengths(np.zeros((1, 3))).tolist() == [0]


def test_libra_extends_by_blocks_and_retreats():
    chooser = LibraController(16, block=2)
    chooser.plan(1, 100, 8)
    taken = 0
    for chance in (0.9, 0.8, 0.1, 0.05, 0.01, 0.001):
        chooser.add(Level(np.full((1, 1, 1), chance), np.ones((1, 1))))
        taken += 1
        if not chooser.deeper():
            break
    # Two blocks: the first was taken whole, the second was not.
    assert taken == 4
    assert chooser.choose(np.array([[0.9, 0.8, 0.1, 0.05]])).nodes[0] - 1 == libra_lengths(
        np.array([[0.9, 0.8, 0.1, 0.05]])
    )


def test_speckv_learns_what_its_features_tell():
    """Confident drafts are followed by accepted ones: the network says so, and cost in the denominator shortens."""
    rounds = made_up_rounds(4, 48, 8, 1, 0.9)
    unsure = made_up_rounds(4, 48, 8, 1, 0.2, seed=1)
    for part, entropy in ((rounds, 0.1), (unsure, 3.0)):
        part.entropies[:], part.confidences[:] = entropy, math.exp(-entropy)
        part.metadata["bits"] = 16.0
    features, rates = speckv.examples(RoundRecords.concatenate([rounds, unsure]))
    assert set(features[:, 5]) == set(speckv.LENGTHS) and ((rates >= 0) & (rates <= 1)).all()
    dear = FunctionCosts(lambda n, b, c: 1 + 0.5 * (n - 1), lambda levels, w, b: 0.3 * levels)
    chosen = {}
    predictor = speckv.train(features, rates, "tokens", 16.0)
    for objective, entropy in itertools.product(speckv.OBJECTIVES, (0.1, 3.0)):
        chooser = speckv.SpecKVController(replace(predictor, objective=objective), dear, 9, 1)
        chooser.plan(1, 100, 8)
        chooser.add(Level(np.ones((1, 1, 1)), np.ones((1, 1)), np.array([entropy]), np.array([math.exp(-entropy)])))
        chooser.observe([0], [1])
        chosen[objective, entropy] = chooser.plan(1, 100, 8)
    assert chosen["tokens", 0.1] == 8 and chosen["speed", 3.0] == 2
    assert chosen["speed", 0.1] <= chosen["tokens", 0.1] and chosen["speed", 3.0] <= chosen["tokens", 3.0]


def test_speckv_travels(tmp_path):
    features = np.random.default_rng(0).uniform(size=(50, 6))
    predictor = speckv.train(features, features[:, 0], "tokens", 4.0)
    predictor.save(tmp_path / "controller.safetensors")
    loaded = speckv.AcceptancePredictor.load(tmp_path / "controller.safetensors")
    assert (loaded(features) == predictor(features)).all() and (loaded.objective, loaded.bits) == ("tokens", 4.0)
    with pytest.raises(ValueError, match="speed"):
        speckv.train(features, features[:, 0], "fast", 4.0)
    with pytest.raises(ValueError, match="profile"):
        speckv.SpecKVController(speckv.train(features, features[:, 0], "speed", 4.0), None, 8, 1)


def test_a_profile_books_only_the_batches_that_it_is_of():
    measurement = Measurement(every_size=True)
    for batch in (1, 64):
        measurement.at(batch, 256)
    controller = MeasuringController(measurement, 8, 3)
    # Three of 64 rows have ended.
    for batch, measuring in ((64, True), (61, False), (1, True)):
        controller.plan(batch, 355, 3)
        assert controller.measuring == measuring
    assert [place for place in ((64, 256), (61, 355), (1, 256)) if measurement.place(*place) == place] == [
        (64, 256),
        (1, 256),
    ]


def test_a_table_returns_its_points_and_interpolates_between_them(tmp_path):
    points = [VerifyPoint(n, b, c, n * b + c / 100) for n in (1, 4, 5) for b in (1, 4) for c in (100, 300)]
    table = CostTable({"model": "m"}, points, [DraftPoint(2, 3, 1, 0.5), DraftPoint(4, 3, 1, 0.7)], padding=0.5)
    assert [table.verify(p.nodes, p.batch, p.context) for p in points] == [p.seconds for p in points]
    assert table.verify([2, 3, 7], 1, 100).tolist() == pytest.approx([3.0, 4.0, 8.0])
    assert table.verify([[4]], 2, 200).tolist() == [[pytest.approx(10.0)]]
    assert table.verify(5, 8, 500) == pytest.approx(45.0) and table.verify(1, 1, 10) == pytest.approx(2.0)
    assert table.draft([0, 1, 2, 3, 5], 3, 1).tolist() == pytest.approx([0.0, 0.25, 0.5, 0.6, 0.8])
    # Two rows of 5 and 1 nodes, padded to 5 columns: halfway between 3 and 5 nodes each.
    assert table.round(2, 3, np.array([5, 1]), 5, 100) == pytest.approx(0.5 + (8 + 12) / 2 - 1)
    # A batch that was measured at another context says nothing about the others.
    stray = CostTable(verify_points=[*points, VerifyPoint(1, 3, 900, 50.0)], draft_points=table.draft_points)
    assert stray.verify(1, 3, 900) == 50
    assert [stray.verify(n, b, c) for n, b, c in ((1, 1, 700), (4, 4, 900))] == [
        table.verify(n, b, c) for n, b, c in ((1, 1, 700), (4, 4, 900))
    ]
    table.save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    good = (tmp_path / "table.json").read_bytes()
    # Cut off, of another version, no text, impossible seconds.
    for bad in (b"", b"{}", b"[]", b"\xff\xfe", good[:-40], good.replace(b'"seconds": 2.0', b'"seconds": NaN')):
        assert bad != good
        (tmp_path / "other.json").write_bytes(bad)
        with pytest.raises(ValueError, match="other.json' is no cost table; write one"):
            CostTable.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="verify_points"):
        CostTable()


def test_the_fit_finds_the_parts_of_a_cost():
    points = [
        VerifyPoint(n, b, c, 2.0 + 0.1 * n * b + 0.01 * (6 * n * b) ** 0.5 + 1e-6 * b * c, (6 * n * b) ** 0.5, b * c)
        for n in range(1, 9)
        for b in (1, 4)
        for c in (100, 5000)
    ]
    fit = fit_costs(points)
    parts = {"fixed": 2.0, "node": 0.1, "expert": 0.01, "context_byte": 1e-6}
    assert fit.seconds == pytest.approx(parts, rel=1e-6) and held_out_error(points) < 1e-6
    # A part that is not there is 0, and none is negative.
    none = fit_costs([VerifyPoint(p.nodes, p.batch, p.context, 3 - 0.01 * p.nodes, 1.0, 1.0) for p in points])
    assert all(seconds >= 0 for seconds in none.seconds.values())


def test_rounds_travel(tmp_path):
    rounds = made_up_rounds(2, 5, 2, 2, 0.7)
    rounds.save(tmp_path / "rounds.safetensors")
    loaded = RoundRecords.load(tmp_path / "rounds.safetensors")
    assert all(torch.equal(tensor, rounds.tensors[name]) for name, tensor in loaded.tensors.items())
    assert loaded.metadata == rounds.metadata
    both = RoundRecords.concatenate([rounds, made_up_rounds(1, 5, 3, 2, 0.7)])
    assert both.texts.tolist() == [0] * 5 + [1] * 5 + [2] * 5 and (both.depths[:10, -1] == -1).all()
    with pytest.raises(ValueError, match="every position"):
        RecordedTexts(rounds.select(rounds.positions != 1))
