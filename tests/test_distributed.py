"""`examples/generate_distributed.py`: several processes write what one writes, go on after an interruption, end together."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from accelerate import PartialState
from oracle import build_model, tiny_config
from test_cli import byte_tokenizer


EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "generate_distributed.py"
# Not a multiple of two processes: the shares of the last step are ragged.
PROMPTS = [f"prompt number {number}" for number in range(7)]
# Environment variables that a launcher sets would make the processes of a nested one join the wrong group.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random target, saved, and prompts."""
    folder = tmp_path_factory.mktemp("distributed")
    tokenizer = byte_tokenizer()
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    build_model(tiny_config(**special)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = "".join(json.dumps({"id": number, "prompt": text}) + "\n" for number, text in enumerate(PROMPTS))
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_distributed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    PartialState._reset_state()


def options(folder: Path, output: Path) -> dict:
    """The target drafts for itself: every draft is right."""
    target = str(folder / "target")
    paths = {"model": target, "assistant": target, "prompts": folder / "prompts.jsonl", "output": output}
    return {**paths, "max_new_tokens": 12, "batch_size": 2, "batches_per_save": 1, "budget": 4}


def launch(folder: Path, output: Path, **changes) -> subprocess.Popen:
    """Two processes under torchrun."""
    given = options(folder, output) | changes
    arguments = [item for name, value in given.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPT), "--cpu", *arguments]
    return subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def run_alone(script, folder: Path, output: Path, **changes) -> list[dict]:
    script.main(**(options(folder, output) | {"dtype": "auto", "cpu": True} | changes))
    return read(output)


# accelerate's own way to try a script on several CPU processes. It forks, which a process with threads should not do.
DEBUG_LAUNCHER = """
import json, runpy, sys
from functools import partial
from pathlib import Path
from accelerate import debug_launcher

script, options = sys.argv[1], json.loads(sys.argv[2])
options |= {name: Path(options[name]) for name in ("prompts", "output")}
debug_launcher(partial(runpy.run_path(script)["main"], cpu=True, **options), num_processes=2)
"""


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_processes_write_what_one_writes(script, folder, tmp_path, capsys):
    process = launch(folder, tmp_path / "two.jsonl")
    expected = run_alone(script, folder, tmp_path / "one.jsonl")
    assert "rank 0: 7 prompts" in capsys.readouterr().out
    assert [row["prompt"] for row in expected] == PROMPTS and all(row["text"] for row in expected)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert read(tmp_path / "two.jsonl") == expected
    # Steps of four prompts: two and two, two and one.
    assert "rank 0: 4 prompts" in said and "rank 1: 3 prompts" in said
    assert not list(tmp_path.glob("*.partial"))


def test_the_debug_launcher_writes_what_one_process_writes(script, folder, tmp_path):
    given = json.dumps(options(folder, tmp_path / "two.jsonl"), default=str)
    command = [sys.executable, "-c", DEBUG_LAUNCHER, str(SCRIPT), given]
    done = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "rank 0: 4 prompts" in done.stdout and "rank 1: 3 prompts" in done.stdout
    assert read(tmp_path / "two.jsonl") == run_alone(script, folder, tmp_path / "one.jsonl")


def test_it_goes_on_where_it_was(script, folder, tmp_path, monkeypatch):
    output, decoded = tmp_path / "texts.jsonl", []
    expected = run_alone(script, folder, output)
    output.write_text("".join(json.dumps(row) + "\n" for row in expected[:3]), encoding="utf-8")
    decode = script.decode

    def watched(target, tokenizer, rows, *rest):
        decoded.extend(row["prompt"] for row in rows)
        return decode(target, tokenizer, rows, *rest)

    monkeypatch.setattr(script, "decode", watched)
    assert run_alone(script, folder, output) == expected
    assert decoded == PROMPTS[3:]
    run_alone(script, folder, output)
    assert decoded == PROMPTS[3:]


def test_an_interrupted_write_changes_nothing(script, tmp_path, monkeypatch):
    output = tmp_path / "texts.jsonl"
    script.write_atomically(output, [{"text": "first"}])

    def stop(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        script.write_atomically(output, [{"text": "second"}])
    assert read(output) == [{"text": "first"}]


def test_another_runs_output_is_refused(script, folder, tmp_path):
    output = tmp_path / "texts.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    settings = {"model": "m", "max_new_tokens": 3}
    whole = [{**settings, **row, "text": "x"} for row in rows]
    for changed, message in (
        ([{**whole[0], "model": "other"}], "line 1, has another model"),
        ([whole[0], {**whole[1], "prompt": "c"}], "line 2, has another prompt"),
        ([{**whole[0], "max_new_tokens": 4}], "another max_new_tokens"),
        ([*whole, whole[0]], "3 rows for 2 prompts"),
    ):
        script.write_atomically(output, changed)
        with pytest.raises(ValueError, match=message):
            script.read_output(output, rows, settings)
    script.write_atomically(output, whole)
    assert script.read_output(output, rows, settings) == whole
    assert script.read_output(tmp_path / "none.jsonl", rows, settings) == []


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_can_go_on(script, folder, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"prompt": f"prompt {n}"}) + "\n" for n in range(400)), encoding="utf-8")
    output = tmp_path / "texts.jsonl"
    process = launch(folder, output, prompts=many)
    deadline = time.monotonic() + 300
    while not output.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ()["RANK"] == "1"]
    victim.kill()
    killed = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert process.returncode != 0 and f"Signal 9 (SIGKILL) received by PID {victim.pid}" in said
    written = read(output)
    assert 4 <= len(written) < 400
    # With another number of processes.
    rows = many.read_text(encoding="utf-8").splitlines()[: len(written) + 1]
    many.write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert run_alone(script, folder, output, prompts=many)[:-1] == written


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others(folder, tmp_path):
    output = tmp_path / "texts.jsonl"
    output.write_text(json.dumps({"prompt": "another"}) + "\n", encoding="utf-8")
    process = launch(folder, output)
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and "has another model; move it away or name another" in said


def test_configs_are_what_accelerate_takes():
    from accelerate.commands.config.config_args import load_config_from_file

    sizes = {"cpu_2_processes": 2, "one_node_8_gpus": 8, "two_nodes_16_gpus": 16}
    files = sorted((EXAMPLES / "configs").glob("*.yaml"))
    assert [file.stem for file in files] == sorted(sizes)
    for file in files:
        loaded = load_config_from_file(str(file))
        assert loaded.num_processes == sizes[file.stem] and loaded.distributed_type == "MULTI_GPU"
