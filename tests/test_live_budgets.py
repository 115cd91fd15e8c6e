"""Budgets in live rounds: text never depends on them, drafters stay in step, and what is recorded is what happened."""

import copy
import itertools
import json
import logging
import sys

import numpy as np
import pytest
import torch
from decoding import run
from heads import make_dspark_checkpoint
from oracle import generator, random_texts

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.bench.replay import record, record_rounds, replay
from hf_treespec.budgeting import fallback, hindsight, replaying, speckv
from hf_treespec.budgeting.controllers import FixedController
from hf_treespec.budgeting.cost import CostController
from hf_treespec.budgeting.costs import CostTable, DraftPoint, FunctionCosts, VerifyPoint
from hf_treespec.budgeting.live import RoundBudget
from hf_treespec.budgeting.profiling import profile
from hf_treespec.budgeting.tables import drafter_name, find_table, table_key, table_path
from hf_treespec.drafting.candidates import CandidatePool


TEXTS = random_texts(generator(1), [5, 9, 12])
DRAFTERS = ("assistant", "mtp", "dspark", "ngram")


@pytest.fixture()
def ticking(monkeypatch):
    """A clock of which every look takes a second: rounds are measured, and speculation seems to lose."""
    ticks = itertools.count()
    monkeypatch.setattr(fallback, "clock", lambda: float(next(ticks)))
    return monkeypatch


@pytest.fixture(scope="module")
def models(model, drafter, target, tmp_path_factory):
    """The target and the other arguments of a call, by drafter."""
    from transformers import AutoModelForCausalLM

    folder = make_dspark_checkpoint(tmp_path_factory.mktemp("dspark"))
    dspark = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder).eval())
    return {
        "assistant": (model, {"assistant_model": drafter}),
        "mtp": (target, {}),
        "dspark": (dspark, {}),
        "ngram": (model, {}),
    }


def config_of(drafter: str, **options) -> dict:
    return {"budget": 8, "top_k": 3, "drafter": "ngram" if drafter == "ngram" else "auto", **options}


def train_speckv(model, drafter: str, arguments: dict) -> None:
    head = hf_treespec.heads.head_of(model) if drafter in ("mtp", "dspark") else None
    key = table_key(model, drafter_name(arguments.get("assistant_model"), head))
    features = np.random.default_rng(0).uniform(size=(40, 6))
    speckv.train(features, features[:, 0], "tokens", 32.0).save(speckv.controller_path(key))


@pytest.mark.parametrize(
    "drafter_kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in ("dspark", "ngram") else ()) for kind in DRAFTERS],
)
def test_text_does_not_depend_on_budgets(models, drafter_kind, ticking, tmp_path):
    ticking.setenv("HF_TREESPEC_CACHE", str(tmp_path))
    model, arguments = models[drafter_kind]
    for tokens, sampling in ((20, {}), (12, {"do_sample": True, "seeds": [3, 4]})):
        _, expected = run(model, TEXTS[:2], tokens, tree_config={"budget": 1}, **sampling)
        for controller in ("cost", "libra", "speckv", "fixed"):
            if controller == "speckv":
                if drafter_kind == "ngram":
                    continue
                train_speckv(model, drafter_kind, arguments)
            config = config_of(drafter_kind, controller=controller)
            output, texts = run(model, TEXTS[:2], tokens, tree_config=config, **arguments, **sampling)
            assert all(torch.equal(a, b) for a, b in zip(texts, expected)), (controller, sampling)
            # Something was chosen: not all rounds took all nodes.
            stats = output.tree_stats
            assert stats["nodes"] < 8 * stats["rounds"]


class Alternating(FixedController):
    """Decodes plainly for 0, 1, 2 or 3 rounds in turn between drafts."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.rounds = iter(itertools.cycle([1, 0, 1, 1, 0, 0, 1, 0, 0, 0]))
        self.drafted = []

    def plan(self, batch: int, context: int, depth: int) -> int:
        self.drafted.append(next(self.rounds) * depth)
        return self.drafted[-1]


@pytest.mark.parametrize("kind", ["deepseek_v4", "llama"])
def test_an_assistant_keeps_up_over_rounds_without_a_draft(model, kind, monkeypatch):
    """Against a drafter of its own kind that starts afresh: what is drafted after plain rounds is the same."""
    from decoding import make_assistant

    assistant = model if kind == "deepseek_v4" else make_assistant(kind)
    rounds = {}
    for name in ("alternating", "fixed"):
        chosen = Alternating(6) if name == "alternating" else None
        monkeypatch.setattr("hf_treespec.budgeting.live.make_controller", lambda *args, c=chosen: c)
        config = {"budget": 6, "top_k": 1, "record_rounds": True}
        output, _ = run(model, TEXTS, 48, tree_config=config, assistant_model=assistant)
        records = output.tree_stats["round_records"]
        # What the drafts said, by text and position: from wherever a round starts, the same.
        for row in range(len(records)):
            if records.depths[row].max() == 5:
                place = int(records.texts[row]), int(records.positions[row])
                rounds.setdefault(place, {})[name] = records.entropies[row]
    both = [found for found in rounds.values() if len(found) == 2]
    assert len(both) >= 5
    assert all(torch.allclose(found["alternating"], found["fixed"], atol=1e-4) for found in both)
    if kind == "deepseek_v4":
        monkeypatch.setattr("hf_treespec.budgeting.live.make_controller", lambda *args: Alternating(6))
        output, _ = run(model, TEXTS[:1], 48, tree_config={"budget": 6, "top_k": 1}, assistant_model=model)
        # The target itself drafts: all is accepted, whatever was skipped before.
        lengths = output.tree_stats["accepted_lengths"]
        assert lengths[6] >= 4 and sum(count for length, count in lengths.items() if length not in (1, 6)) <= 1


def test_fallback_switches_and_says_so(model, drafter, ticking, caplog):
    """A clock that goes fast in rounds that draft: plain decoding takes over, with one line."""
    seconds = {"now": 0.0}

    def begin(self, batch, context, depth, original=RoundBudget.begin):
        levels = original(self, batch, context, depth)
        seconds["round"] = 9.0 if levels else 1.0
        return levels

    def end(self, rows, emitted, original=RoundBudget.end, **options):
        seconds["now"] += seconds["round"]
        original(self, rows, emitted)

    ticking.setattr(RoundBudget, "begin", begin)
    ticking.setattr(RoundBudget, "end", end)
    ticking.setattr(fallback, "clock", lambda: seconds["now"])
    tree = {"budget": 4, "depth": 2}
    with caplog.at_level(logging.INFO, logger="hf_treespec"):
        output, _ = run(model, TEXTS[:1], 60, tree_config=tree, assistant_model=drafter)
    assert [r.message for r in caplog.records if "plain decoding for the next" in r.message]
    assert len([r for r in caplog.records if r.name.endswith("fallback")]) == 1
    # After the first few rounds and a probe, one token per round.
    assert output.tree_stats["accepted_lengths"][1] > 20 and output.tree_stats["rounds"] > 30


@pytest.mark.parametrize("drafter_kind", DRAFTERS)
def test_records_are_what_happened(models, drafter_kind):
    model, arguments = models[drafter_kind]
    config = config_of(drafter_kind, record_rounds=True, controller="fixed", fallback=False)
    output, texts = run(model, TEXTS, 24, tree_config=config, **arguments)
    records = output.tree_stats.pop("round_records")
    assert len(records) == output.tree_stats["rounds"] and (records.accepted[:, 0]).all()
    order = records.probabilities.sort(dim=1, descending=True, stable=True).indices[:, :8]
    emitted = (records.accepted & (records.probabilities > 0)).gather(1, order).sum(1)
    for row, text in enumerate(TEXTS):
        mine = records.texts == row
        positions = torch.cat([records.positions[mine], torch.tensor([24])])
        assert torch.equal(positions.diff(), emitted[mine]) and positions[0] == 0
        assert torch.equal(records.contexts[mine], len(text) - 1 + records.positions[mine])
    # Estimates fall from parent to child, one level at a time.
    above = records.parents
    exists = records.probabilities[:, 1:] > 0
    assert (records.probabilities.gather(1, above)[:, 1:] >= records.probabilities[:, 1:])[exists].all()
    assert (records.depths[:, 1:] - records.depths.gather(1, above)[:, 1:] == 1)[exists].all()
    assert records.metadata["top_k"] == (None if drafter_kind == "ngram" else 3)


def test_dense_records_replay_live_rounds(model, drafter):
    recording = record(model, [text.tolist() for text in TEXTS], 32)
    assistant = hf_treespec.enable(copy.deepcopy(drafter))
    config = TreeConfig(budget=8, depth=4, top_k=3)
    dense = replaying.RecordedTexts(record_rounds(recording, model, assistant, config))
    live = replay(recording, model, assistant, config)
    costs = FunctionCosts(lambda n, b, c: 1 + 0.1 * n, lambda levels, w, b: 0.2 * levels)
    walked = replaying.replay(dense, lambda: FixedController(8), costs, 4)
    swept = hindsight.sweep(dense, costs, 8)[4, 8]
    assert walked.rounds.tolist() == swept.rounds.tolist() and walked.seconds == pytest.approx(swept.seconds)
    # Estimates are learned along other rounds, so a tie of two candidates may fall otherwise.
    assert np.abs(walked.rounds - np.array([live.row_rounds[row] for row in range(3)])).max() <= 1


def test_a_cost_table_is_found_and_used(model, drafter, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path))
    key = table_key(model, drafter_name(drafter, None))
    options = {"tree_config": {"budget": 8, "depth": 4, "top_k": 3}, "assistant_model": drafter}
    fixed = run(model, TEXTS, 24, **options)[0].tree_stats
    for slope, most in ((0.0, 8), (30.0, 1)):
        points = [VerifyPoint(n, 1, 10, 1 + slope * (n > 1)) for n in (1, 2, 8)]
        CostTable(key, points, [DraftPoint(1, 3, 1, 0.1)]).save(table_path(key))
        table_path(key).touch()
        stats = run(model, TEXTS, 24, **options)[0].tree_stats
        assert max(stats["accepted_lengths"]) <= most
        assert stats["nodes"] == stats["rounds"] if most == 1 else stats["nodes"] > 4 * stats["rounds"]
    # One that is broken stops nobody who did not ask for it.
    table_path(key).write_text("{", encoding="utf-8")
    assert run(model, TEXTS, 24, **options)[0].tree_stats["nodes"] == fixed["nodes"]
    options["tree_config"]["controller"] = "cost"
    with pytest.raises(ValueError, match="is no cost table; write one with `hf-treespec profile`"):
        run(model, TEXTS, 24, **options)
    table_path(key).unlink()
    del options["tree_config"]["controller"]
    assert run(model, TEXTS, 24, **options)[0].tree_stats["nodes"] == fixed["nodes"]
    # A table of another drafter, dtype or machine is none.
    assert find_table({**key, "drafter": "mtp"}) is None and table_path(key) != table_path({**key, "threads": 99})


def test_profile_measures_every_shape(model, drafter, ticking, tmp_path):
    """With a clock of one tick per look, drafting and the rest of a round take one second each."""
    config = TreeConfig(budget=4, depth=2, top_k=2)
    table = profile(model, config, {}, drafter, batches=(1, 2), contexts=(16,), repeats=2)
    assert {(p.nodes, p.batch, p.context) for p in table.verify_points} == {
        (nodes, batch, 16) for nodes in (1, 2, 3, 4) for batch in (1, 2)
    }
    assert {(p.levels, p.width, p.batch) for p in table.draft_points} == {(s, 2, b) for s in (1, 2) for b in (1, 2)}
    assert all(point.seconds == 1.0 for point in [*table.verify_points, *table.draft_points])
    # Four layers of four experts, two per token: one node touches 8, many touch all 16.
    experts = {(point.nodes, point.batch): point.experts for point in table.verify_points}
    assert experts[1, 1] == 8 and 8 < experts[4, 2] <= 16
    assert all(point.runs >= 2 for point in table.verify_points)
    # The fit and how far it is off go with the table: here all rounds take one second.
    table.save(tmp_path / "table.json")
    fit = json.loads((tmp_path / "table.json").read_text())["fit"]
    assert fit["held_out_error"] < 0.1 and fit["seconds"]["fixed"] == pytest.approx(1.0, abs=0.1)
    assert CostTable.load(tmp_path / "table.json") == table


def test_decisions_do_not_grow_with_the_text():
    """Calls of Python and C functions per round, behind 64 rounds and behind 2,000."""
    costs = FunctionCosts(lambda n, b, c: 1 + 0.05 * (n - 1), lambda levels, w, b: 0.1 * levels)
    clock = itertools.count()
    budget = RoundBudget(torch.nn.Identity(), CostController(costs, 8, 3), fallback.Fallback())
    acceptance = torch.tensor([[[0.8, 0.1, 0.05]]])
    counts = []

    def one_round(position: int) -> None:
        fallback.clock, frozen = (lambda: float(next(clock))), fallback.clock
        levels = budget.begin(1, position, 7)
        pool = CandidatePool(torch.zeros(1, dtype=torch.long))
        for level in range(levels):
            width = pool._frontier_scores.shape[1]
            tokens = torch.zeros(1, width, 3, dtype=torch.long)
            pool.add_level(tokens, acceptance.expand(1, width, 3), acceptance.expand(1, width, 3))
            budget.controller.add(pool.last_level())
            if level + 1 == levels or not budget.controller.deeper():
                break
            pool.advance(3, 7, float("-inf"), torch.ones(1, 1, dtype=torch.bool))
        if levels:
            pool.best_tree(7, budget.controller)
        budget.end([0], [3 if levels else 1])
        fallback.clock = frozen

    for position in range(2032):
        calls = [0]
        if position % 2000 < 32:
            sys.setprofile(lambda frame, event, argument, calls=calls: calls.__setitem__(0, calls[0] + 1))
        one_round(position)
        sys.setprofile(None)
        counts.append(calls[0])
    early, late = np.sort(counts[8:32]), np.sort(counts[2008:2032])
    assert 0 < late.mean() <= 1.05 * early.mean() and late.max() <= 1.2 * early.max()
    assert len(budget.controller._curves) <= 8 * 12


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"controller": "clever"}, ["controller", "'clever'", "cost", "libra"]),
        ({"controller": None}, ["controller", "None"]),
        ({"fallback": 1}, ["fallback", "1", "True"]),
        ({"record_rounds": "yes"}, ["record_rounds", "'yes'"]),
        ({"controller": "speckv"}, ["speckv", "train-controller"]),
        ({"controller": "speckv", "drafter": "ngram"}, ["speckv", "prompt lookup"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(model, drafter, config, names):
    assistant = None if config.get("drafter") == "ngram" else drafter
    with pytest.raises(ValueError) as raised:
        run(model, TEXTS, 4, tree_config=config, assistant_model=assistant)
    assert all(name in str(raised.value) for name in names), raised.value
