"""`hf-treespec bench`: runs hold what `generate` did, summaries equal hand-computed values, and benchmarks go on."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from oracle import build_model, generator, tiny_config
from test_cli import byte_tokenizer, invoke

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.bench.measure import OBSERVED, Bench, Workload
from hf_treespec.bench.memory import peak_memory
from hf_treespec.bench.plots import draw
from hf_treespec.bench.report import overview
from hf_treespec.bench.runs import Run, RunLog
from hf_treespec.bench.summary import pool_sets, summarize
from hf_treespec.bench.ways import Cell, Drafter, Shapes, make_drafters, make_ways, parse_shape
from hf_treespec.prompts import load_prompts


PROMPTS = ["The sum", "A", "of things"]
CELLS = [Cell("letters", 2, 0.0), Cell("letters", 2, 1.0)]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer):
    """A random target that ends some texts."""
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 9}
    return hf_treespec.enable(build_model(tiny_config(**special), seed=1))


@pytest.fixture(scope="module")
def draft(target):
    noisy = build_model(target.config, seed=1)
    with torch.no_grad():
        weight = noisy.lm_head.weight
        weight.add_(torch.randn(weight.shape, generator=generator(3)) * weight.std() * 0.3)
    return noisy


@pytest.fixture(scope="module")
def ways(draft):
    return make_ways([Drafter("noisy", "assistant", draft)], Shapes((4,), (2,), (2,), (2,)))


@pytest.fixture(scope="module")
def measured(target, tokenizer, ways, tmp_path_factory) -> RunLog:
    log = RunLog(tmp_path_factory.mktemp("bench"), {"model": "random"})
    bench = Bench(target, tokenizer, ways, Workload({"letters": PROMPTS}, max_new_tokens=8))
    bench.run(CELLS, 2, log, lambda turns, name: turns)
    return log


def test_ways_are_the_shapes_once(draft):
    drafter = Drafter("noisy", "assistant", draft)
    names = [way.name for way in make_ways([drafter], Shapes((1, 4, 5), (None, 2, 3), (2,), (2, 3)))]
    assert names == ["stock", "budget=1", "s1_k1_d2", "s2_k1_d3", "s3_k1_d4", "s4_k1_d5"] + [
        "s3_k2_d4",
        "s2_k2_d4",
        "s4_k2_d5",
        "s2_k2_d5",
        "s3_k2_d5",
    ]
    bare = make_ways([drafter], Shapes((4,), (2,), (2,), (2, 3), ("fixed", "cost"), baselines=False))
    assert [way.name for way in bare] == ["budget=1", "s2_k2_d4", "s2_k2_d4_cost"]
    # Users have the fallback; fixed rows are what they say.
    assert [way.tree_config.fallback for way in bare[1:]] == [False, True]
    assert parse_shape("s3_k2_d4") == (3, 2, 4) and parse_shape("budget=1") is None


def test_turns_take_prompts_in_order():
    workload = Workload({"letters": PROMPTS}, 4)
    assert [workload.batch(Cell("letters", 2, 0.0), turn) for turn in (OBSERVED, 0, 1)] == [
        PROMPTS[:2],
        PROMPTS[:2],
        [PROMPTS[2], PROMPTS[0]],
    ]


def test_runs_hold_what_generate_did(measured, ways, target, tokenizer):
    assert len(measured.runs) == len(CELLS) * 3 * len(ways)
    for run in measured.runs:
        assert 0 < run.prefill_seconds < run.seconds
        if run.way == "stock":
            continue
        assert run.tokens == sum(length * count for length, count in run.accepted_lengths.items())
        assert run.rounds == sum(run.accepted_lengths.values())
        assert set(run.time) == {"draft", "build", "verify", "accept", "refresh"}
        assert sum(run.time.values()) < run.seconds - run.prefill_seconds
        assert (run.distinct_experts is None) == (run.repetition != OBSERVED)
        assert run.peak_bytes > 2**20
        assert 0 < run.forward_seconds < run.seconds - run.prefill_seconds
    # Greedy or with equal seeds, all of ours write the same.
    for turn in {run.turn for run in measured.runs}:
        texts = {run.text for run in measured.runs if run.turn == turn and run.way != "stock"}
        assert len(texts) == 1, turn
    assert len({run.text for run in measured.runs if run.way == "budget=1"}) > 2
    (greedy,) = (run for run in measured.runs if run.turn == (CELLS[0], 1) and run.way == "budget=1")
    ids = tokenizer(
        ["<bos>" + PROMPTS[2], "<bos>" + PROMPTS[0]], padding=True, padding_side="left", return_tensors="pt"
    )
    inputs = {name: ids[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    stats = target.generate(**inputs, **options, tree_config=TreeConfig(budget=1)).tree_stats
    assert (greedy.tokens, greedy.rounds) == (stats["emitted_tokens"], stats["rounds"])


def test_an_interrupted_benchmark_goes_on(measured, ways, target, tokenizer):
    path = measured.path
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # The last turn lost its last way, and that line is cut.
    path.write_text("".join(lines[:-1]) + lines[-1][:40], encoding="utf-8")
    log = RunLog(path.parent, {"model": "random"})
    again = []
    workload = Workload({"letters": PROMPTS}, max_new_tokens=8)

    def progress(turns, name: str):
        again.extend(turns)
        return turns

    Bench(target, tokenizer, ways, workload).run(CELLS, 2, log, progress)
    assert again == [(CELLS[1], 1)]
    assert [(run.turn, run.key, run.text) for run in log.runs if run.way != "stock"] == [
        (run.turn, run.key, run.text) for run in measured.runs if run.way != "stock"
    ]
    with path.open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(measured.runs)
    assert RunLog(path.parent, {"model": "random"}).runs == log.runs
    with pytest.raises(ValueError, match="`model` 'random', this one has 'other'"):
        RunLog(path.parent, {"model": "other"})


def run_of(way: str, repetition: int, seconds: float, rounds: int, **other) -> Run:
    drafter = "" if way in ("stock", "budget=1") else "mtp"
    time = {} if way == "stock" else {"draft": 0.1, "verify": 0.2}
    values = {"prefill_seconds": 0.5, "tokens": 60, "nodes": 0, "accepted_lengths": {2: rounds}, "time": time}
    values |= {"forward_seconds": None if way == "stock" else 0.25}
    values |= {"distinct_experts": 3.5, "peak_bytes": 7, "text": "a", "repeated_share": 0.25, **other}
    return Run("x", 1, 0.0, repetition, drafter, way, seconds, rounds=rounds, **values)


def test_summaries_are_what_runs_come_to():
    seconds = {"stock": 8.0, "budget=1": 4.0, "s1_k1_d2": 2.0, "s3_k1_d4": 3.0, "s2_k2_d4": 1.5}
    rounds = {"stock": 60, "budget=1": 60, "s1_k1_d2": 40, "s3_k1_d4": 30, "s2_k2_d4": 20}
    runs = [
        run_of(way, turn, seconds[way] * (1 + turn % 2), rounds[way]) for turn in range(OBSERVED, 4) for way in seconds
    ]
    runs[-1].text = "b"
    found = {summary.way: summary for summary in summarize(runs)}
    tree = found["s2_k2_d4"]
    # Each turn is a pair: that every other one takes twice as long changes no gain.
    assert {base: gain.value for base, gain in tree.speed_gains.items()} == pytest.approx(
        {"stock": 8 / 1.5, "budget=1": 4 / 1.5, "matched chain": 2.0, "best chain": 2 / 1.5}
    )
    assert tree.speed_gains["matched chain"].low == pytest.approx(2.0)
    assert tree.accepted_length.value == 3
    assert tree.length_gain.value == pytest.approx(50)
    assert tree.tokens_per_second == pytest.approx((60 / 1.5 + 60 / 3) / 2)
    assert tree.decode_tokens_per_second == pytest.approx((60 / 1.0 + 60 / 2.5) / 2)
    # Four turns took 9 s, of which 2 s prefill, 1.2 s drafting and verification, and 1 s forwards.
    assert tree.time == pytest.approx({"draft": 100 / 60, "verify": 200 / 60, "host": 5800 / 240})
    assert tree.step_costs == pytest.approx({"draft": 1.5, "verify": 3.0}) and tree.implied_gain == pytest.approx(
        2 / 3
    )
    assert tree.outside_forwards == pytest.approx(6 / 7)
    assert tree.round_overhead == pytest.approx(5.8 / 7)
    assert tree.same_text == 0.8 and tree.accepted_lengths == {2: 80} and tree.repeated_share == 0.25
    assert found["s3_k1_d4"].length_gain is None and set(found["budget=1"].speed_gains) == {"stock"}
    assert found["s1_k1_d2"].speed_gains.keys() == {"stock", "budget=1"}
    assert (found["stock"].outside_forwards, found["budget=1"].implied_gain) == (None, None)
    assert found["stock"].round_overhead is None


def test_a_controller_is_compared_with_the_best_fixed_way_over_all_sets():
    seconds = {"stock": 1.0, "budget=1": 3.0, "s1_k1_d2": 2.5, "s2_k2_d4": 2.0, "s2_k2_d4_cost": 1.5}
    runs = [run_of(way, turn, seconds[way], 20) for turn in range(OBSERVED, 2) for way in seconds]
    # On the other set all take twice as long.
    runs += [replace(run, prompt_set="y", seconds=2 * run.seconds, tokens=30) for run in runs]
    assert len(summarize(runs)) == 2 * len(seconds)
    pooled = {summary.way: summary for summary in summarize(pool_sets(runs))}
    cost = pooled["s2_k2_d4_cost"]
    assert cost.cell == Cell("x, y", 1, 0.0) and len(pooled) == len(seconds)
    assert cost.speed_gains["best fixed"].value == pytest.approx(2 / 1.5)
    assert "best fixed" not in pooled["s2_k2_d4"].speed_gains
    # 60 tokens a turn on one set, 30 on the other, 20 rounds each.
    assert cost.accepted_length.value == pytest.approx(90 / 40)
    assert cost.tokens_per_second == pytest.approx((60 / 1.5 + 30 / 3.0) / 2)


@pytest.mark.parametrize("way", ["s2_k2_d4_cost", "s3_k1_d4_cost"], ids=["tree", "chain"])
def test_reports_without_baselines(tmp_path, way):
    runs = [run_of(name, turn, 1.0, 20) for turn in range(OBSERVED, 2) for name in ("budget=1", way)]
    summaries = summarize(runs)
    assert summaries[1].speed_gains.keys() == {"budget=1", "best fixed"}
    table = "".join(overview(summaries, summarize(pool_sets(runs))))
    assert way in table and "over matched chain" not in table
    # The figures set trees against chains.
    assert bool(draw(tmp_path, summaries)) == ("k2" in way)


def test_peak_memory_sees_what_was_held():
    with peak_memory() as small:
        pass
    with peak_memory() as large:
        torch.ones(64 * 2**20 // 4)
    assert 50 * 2**20 < large.bytes - small.bytes < 90 * 2**20


def test_drafters_by_name(target, draft):
    assert [d.setting for d in make_drafters(target, {"x": draft}, ["ngram"])] == ["assistant", "ngram"]
    with pytest.raises(ValueError, match="'eagle'; allowed values"):
        make_drafters(target, {}, ["eagle"])


def test_prompts_of_a_data_set(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "One?"}\n{"question": "Two?"}\n')
    assert [row["prompt"] for row in load_prompts(f"{tmp_path}")] == ["One?", "Two?"]
    with pytest.raises(ValueError, match="no split 'train'"):
        load_prompts(f"{tmp_path}:default:train")
    with pytest.raises(ValueError, match="no file"):
        load_prompts("missing.jsonl")


@pytest.fixture(scope="module")
def folder(target, draft, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "letters.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return folder


def test_bench_command_reports_and_draws(folder, tmp_path):
    options = ["--model", str(folder / "target"), "--assistant", str(folder / "draft"), "--drafter", "ngram"]
    options += ["--prompts", str(folder / "letters.jsonl"), "--output", str(tmp_path), "--pairs", "2"]
    options += ["--budgets", "3", "--batches", "1,2", "--temperatures", "0", "--max-new-tokens", "6"]
    result = invoke("bench", *options)
    assert result.exit_code == 0, result.output
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Toy checkpoint" in report and "Not yet run on real weights" in report
    assert "### letters, temperature 0" in report and "| 2 | draft | s2_k3_d3 |" in report
    # The table to quote is printed too; what is the same in all of its rows is left out.
    start = report.index("| batch | drafter | way | tokens/s | over budget=1 | over stock |")
    assert report[start : report.index("\n\n", start)] in result.output
    for name in ("accepted_length", "throughput_gain", "draft_strength", "round_time"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in report
    # Nothing is left to do, and other settings are refused.
    runs = (tmp_path / "runs.csv").read_text(encoding="utf-8")
    assert invoke("bench", *options).exit_code == 0
    assert (tmp_path / "runs.csv").read_text(encoding="utf-8") == runs
    result = invoke("bench", *options, "--ignore-eos")
    assert result.exit_code == 1 and "`ignore_eos` False, this one has True" in result.output


def test_runs_of_unknown_settings_are_not_gone_on_with(tmp_path):
    (tmp_path / "settings.json").write_text('{"model": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match="holds a benchmark with `model` 'x', this one has 'y': pass another"):
        RunLog(tmp_path, {"model": "y"})
    (tmp_path / "settings.json").write_text('{"model": "x', encoding="utf-8")
    with pytest.raises(ValueError, match="settings.json cannot be read .*: pass another `--output`"):
        RunLog(tmp_path, {"model": "x"})
    (tmp_path / "settings.json").rename(tmp_path / "runs.csv")
    with pytest.raises(ValueError, match="holds runs but no settings.json .*: pass another `--output`"):
        RunLog(tmp_path, {"model": "x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass `--prompts FILE_OR_DATASET` or `--paper`"),
        (["--prompts", "x.jsonl", "--budgets", "8,many"], "`--budgets` is '8,many'"),
        (["--prompts", "x.jsonl", "--budgets", "0"], "`budget` is 0"),
        (["--prompts", "x.jsonl", "--batches", "0"], "a batch holds at least one prompt"),
        (["--prompts", "x.jsonl", "--temperatures", "-1"], "allowed are 0 (greedy) and above"),
        (["--prompts", "x.jsonl", "--temperatures", "nan"], "allowed are 0 (greedy) and above"),
        (["--prompts", "x.jsonl"], "ships no draft head"),
    ],
)
def test_bench_refuses_before_loading(tmp_path, options, message):
    result = invoke("bench", "--model", "missing", "--output", str(tmp_path), "--no-plots", *options)
    assert result.exit_code == 1 and message in result.output, result.output
