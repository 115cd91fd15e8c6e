"""The `hf-treespec` command on tiny random checkpoints."""

import json
import shutil

import pytest
import torch
from oracle import build_model, tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_treespec import TreeConfig, __version__
from hf_treespec.cli import app
from hf_treespec.demo import PROMPTS, checkpoint, decode_rounds, load_pair
from hf_treespec.heads import detect_head
from hf_treespec.prompts import encode_prompts, read_prompts


torch.set_num_threads(1)
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 3, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template="{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Options `--model ... --assistant ...` of a random target and a draft that shares its first layer."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = byte_tokenizer()
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["hash_moe"]}
    for name, overrides in (("target", {}), ("draft", small)):
        build_model(tiny_config(**special, **overrides)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return ["--model", str(folder / "target"), "--assistant", str(folder / "draft")]


def invoke(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_demo_compares_and_draws(pair):
    result = invoke("demo", *pair, "--max-new-tokens", "8", "--budget", "5")
    assert result.exit_code == 0, result.output
    assert f"All 4 ways wrote the same {8 * len(PROMPTS)} tokens." in result.output
    assert "chain, depth 4" in result.output
    assert "5 nodes verified in one forward" in result.output
    assert "bonus: the target's own next token" in result.output


def test_demo_needs_drafts_and_checkpoints(pair):
    result = invoke("demo", *pair, "--budget", "1")
    assert result.exit_code == 1
    assert "at least 2 nodes" in result.output
    with pytest.raises(ValueError, match="no checkpoint 'missing'"):
        checkpoint("missing")


def test_decode_rounds_follow_generate(pair):
    target, _, tokenizer = load_pair(pair[1], pair[3])
    input_ids = encode_prompts(tokenizer, ["A tree"])["input_ids"]
    config = TreeConfig(budget=4, depth=3, top_k=1)
    # As its own assistant the target accepts every draft: 3 drafted tokens and the bonus per round.
    rounds = decode_rounds(target, target, input_ids, config, count=3)
    written = [current.predicted[node] for current in rounds for node in current.path]
    expected = target.generate(input_ids, max_new_tokens=len(written), do_sample=False, eos_token_id=None)
    assert [len(current.path) for current in rounds] == [4, 4, 4]
    assert written == expected[0, input_ids.shape[1] :].tolist()


def test_generate_writes_the_same_text_for_every_tree(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": "x/1", "set": "x", "turns": ["One\u2028line", "again"]}, {"prompt": "Two"}, {"prompt": "And three"}]
    prompts.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    texts = []
    for options in (["--budget", "1"], ["--budget", "6"], ["--budget", "5", "--top-k", "1", "--batch-size", "2"]):
        output = tmp_path / "texts.jsonl"
        common = [*pair, "--prompts", str(prompts), "--max-new-tokens", "12", "--output", str(output)]
        result = invoke("generate", *common, *options)
        assert result.exit_code == 0, result.output
        assert "accepted length" in result.output
        texts.append([json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line])
    assert [row["prompt"] for row in texts[0]] == ["One\u2028line", "Two", "And three"]
    assert (texts[0][0]["id"], texts[0][0]["set"]) == ("x/1", "x")
    assert all(row["text"] for row in texts[0])
    assert texts[0] == texts[1] == texts[2]


def test_generate_prints_texts(pair):
    result = invoke("generate", *pair[:2], "--prompt", "Hello", "--prompt", "World", "--max-new-tokens", "4", "--raw")
    assert result.exit_code == 0, result.output
    assert "--- Hello" in result.output and "--- World" in result.output
    assert "1.00 (0.00 without the bonus token)" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass `--prompt TEXT` or `--prompts FILE`"),
        (["--prompt", "x", "--budget", "4"], "pass `--assistant`"),
        (["--prompt", "x", "--budget", "-1"], "`budget` is -1"),
    ],
)
def test_generate_refuses_before_loading(options, message):
    result = invoke("generate", "--model", "missing", *options)
    assert result.exit_code == 1
    assert message in result.output


def test_generate_never_writes_over_its_prompts(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n', encoding="utf-8")
    result = invoke("generate", "--model", "missing", "--prompts", str(prompts), "--output", str(prompts))
    assert result.exit_code == 1 and "is the file of the prompts; name another" in result.output
    assert prompts.read_text(encoding="utf-8") == '{"prompt": "x"}\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "0"], "`--batches` has 0"),
        (["--contexts", "256,-1"], "`--contexts` has -1"),
    ],
)
def test_profile_refuses_before_loading(options, message):
    result = invoke("profile", "--model", "missing", *options)
    assert result.exit_code == 1 and message in result.output


def test_env_lists_versions():
    result = invoke("env")
    assert result.exit_code == 0
    for name in (__version__, torch.__version__, "transformers", "GPU", "torch threads"):
        assert name in result.output


def test_read_prompts(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("first\r\n\nsecond\u2028still second", encoding="utf-8", newline="")
    assert read_prompts(text) == [{"prompt": "first"}, {"prompt": "second\u2028still second"}]
    rows = tmp_path / "prompts.jsonl"
    for content, message in (
        ("", "no prompts"),
        ("\nnot json", "line 2 is not JSON"),
        ('{"a": 1}', "no prompt"),
        ("3", "no prompt"),
        ('{"turns": "hello"}', "no prompt"),
        ('{"turns": {"a": 1}}', "no prompt"),
    ):
        rows.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_prompts(rows)


def test_encode_prompts():
    tokenizer = byte_tokenizer()
    encoded = encode_prompts(tokenizer, ["abc", "a"])
    assert encoded["input_ids"].tolist()[1][:3] == [0, 0, tokenizer.bos_token_id]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert encode_prompts(tokenizer, ["abc"], chat=False)["input_ids"].shape == (1, 3)
    tokenizer.chat_template = None
    tokenizer.pad_token = None
    assert encode_prompts(tokenizer, ["abc", "a"])["input_ids"][1, 0] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompts(tokenizer, ["abc"], chat=True)


def test_train_head_then_generate_with_it(pair, tmp_path):
    """The head goes beside the model, `generate` finds it, and a second call has nothing left to do."""
    model, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    shutil.copytree(pair[1], model)
    data.write_text("".join(json.dumps({"prompt": f"prompt number {i}"}) + "\n" for i in range(12)))
    options = [
        "--model",
        str(model),
        "--data",
        str(data),
        "--output",
        str(model),
        "--work-dir",
        str(tmp_path / "work"),
    ]
    sizes = ["--steps", "4", "--batch-size", "4", "--max-new-tokens", "6"]
    for kind in ("mtp", "dspark"):
        own = ["--target-layer-ids", "1,2", "--block-size", "3"] if kind == "dspark" else []
        result = invoke("train-head", "--kind", kind, *options, *sizes, *own)
        assert result.exit_code == 0, result.output
        assert "tokens per round" in result.output
        assert detect_head(model) == kind
        result = invoke("generate", "--model", str(model), "--prompt", "Hello", "--max-new-tokens", "4", "--raw")
        assert result.exit_code == 0, result.output
        assert "nodes verified per round" in result.output
    # The text of one model serves both kinds; that of other prompts is refused.
    assert len(list((tmp_path / "work").glob("continuations-*.jsonl"))) == 1
    data.write_text('{"prompt": "another"}\n')
    result = invoke("train-head", "--kind", "mtp", *options, *sizes)
    assert result.exit_code == 1 and "continues another prompt" in result.output
    result = invoke("train-head", "--kind", "eagle", *options, *sizes)
    assert result.exit_code == 1 and "'eagle'" in result.output
    for wrong, words in (
        (["--kind", "mtp", "--block-size", "3"], "--block-size: an MTP head has none"),
        (["--kind", "dspark", "--initial", "x", "--markov-rank", "3"], "the head of 'x' has its own"),
        (["--kind", "dspark", "--target-layer-ids", "1,last"], "`--target-layer-ids` is '1,last'"),
    ):
        result = invoke("train-head", *wrong, *options, *sizes)
        assert result.exit_code == 1 and words in result.output, result.output


def test_generate_by_prompt_lookup(pair):
    """What needs neither a draft model nor a head."""
    options = ["--model", pair[1], "--prompt", "abcabcabc", "--max-new-tokens", "6", "--raw", "--drafter"]
    result = invoke("generate", *options, "ngram")
    assert result.exit_code == 0, result.output
    result = invoke("generate", *options, "eagle")
    assert result.exit_code == 1 and "`drafter` is 'eagle'" in result.output
