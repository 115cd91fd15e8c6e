"""An enabled model in the hands of others: adapters, training loops, other processes."""

import copy

import pytest
import torch
from decoding import TREE, run
from oracle import assert_greedy, build_model, generator, left_pad, random_texts, tiny_config
from peft import LoraConfig, get_peft_model

import hf_treespec


# peft asks transformers for a name on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

PROMPTS = random_texts(generator(41), (17, 9))
LENGTHS = [len(text) for text in PROMPTS]
NEW = 14


def tuned(model, seed: int = 0):
    """The model with a LoRA adapter, random and large, on every kind of linear layer that is read in a round."""
    torch.manual_seed(seed)
    targets = ["q_a_proj", "q_b_proj", "kv_proj", "gate_proj", "o_b_proj", "weights_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=3, target_modules=targets, init_lora_weights=False)).eval()


@pytest.mark.parametrize("first", ["enable", "wrap"])
def test_lora(first, drafter):
    """Trees write the adapted model's own text, wrapped before or after `enable`, and without the adapter the base's."""
    base = build_model(tiny_config())
    plain = hf_treespec.enable(copy.deepcopy(base))
    untuned = run(plain, PROMPTS, NEW, tree_config={"budget": 1})[1]
    model = tuned(hf_treespec.enable(base)) if first == "enable" else hf_treespec.enable(tuned(base))
    assert hf_treespec.is_enabled(model)
    options = {"tree_config": TREE, "assistant_model": drafter}
    output, texts = run(model, PROMPTS, NEW, **options)
    assert_greedy(model, texts, LENGTHS)
    assert not torch.equal(torch.cat(texts), torch.cat(untuned))
    assert output.tree_stats["nodes"] > output.tree_stats["rounds"]
    with model.disable_adapter():
        assert torch.equal(torch.cat(run(model, PROMPTS, NEW, **options)[1]), torch.cat(untuned))
    # Another adapter, and this one merged into the weights.
    torch.manual_seed(1)
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    assert_greedy(model, run(model, PROMPTS, NEW, **options)[1], LENGTHS)
    model.set_adapter("default")
    merged = model.merge_and_unload()
    assert_greedy(merged, run(merged, PROMPTS, NEW, **options)[1], LENGTHS)
    assert not hf_treespec.is_enabled(hf_treespec.disable(merged))


def test_a_tuned_model_drafts_for_its_base(model):
    """As in self-speculation with an adapter: both are enabled, neither disturbs the other."""
    assistant = tuned(hf_treespec.disable(copy.deepcopy(model)))
    texts = run(model, PROMPTS, NEW, tree_config=TREE, assistant_model=assistant)[1]
    assert_greedy(model, texts, LENGTHS)
    assert not hf_treespec.is_enabled(assistant)


@pytest.mark.parametrize("adapter", [False, True], ids=["", "lora"])
def test_generate_backward_step(adapter, drafter):
    """As reinforcement learning does: the gradients of an enabled model are those of one that never was, in every
    step, and its next samples come from the new weights."""
    models = []
    for enabled in (True, False):
        model = build_model(tiny_config())
        model = tuned(model) if adapter else model
        models.append(hf_treespec.enable(model) if enabled else model)
    enabled, other = (model.train() for model in models)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.3) for m in models]
    samples = []
    for step in range(3):
        options = {"do_sample": True, "top_k": 0, "seeds": [step, step + 10]}
        output, texts = run(enabled, PROMPTS, NEW, tree_config=TREE, assistant_model=drafter, **options)
        assert not output.sequences.requires_grad
        assert all(parameter.grad is None for parameter in enabled.parameters())
        plain = hf_treespec.enable(copy.deepcopy(other))
        assert torch.equal(
            torch.cat(run(plain, PROMPTS, NEW, tree_config={"budget": 1}, **options)[1]), torch.cat(texts)
        )
        samples.append(texts[1])
        for model in models:
            model(input_ids=texts[1][None], labels=texts[1][None]).loss.backward()
        for parameter, parameter_ in zip(enabled.parameters(), other.parameters()):
            assert (parameter.grad is None) == (parameter_.grad is None)
            assert parameter.grad is None or torch.equal(parameter.grad, parameter_.grad)
        assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in enabled.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert enabled.training
    # The weights did move: the last sample's seeds give another text with the first weights.
    first = hf_treespec.enable(tuned(build_model(tiny_config())) if adapter else build_model(tiny_config()))
    assert not torch.equal(run(first, PROMPTS, NEW, tree_config={"budget": 1}, **options)[1][1], samples[-1])


def _generate(model, inputs, options, answers) -> None:
    torch.set_num_threads(1)
    output = model.generate(**inputs, **options)
    answers.put((output.sequences.tolist(), output.tree_stats["rounds"]))


def test_spawned_processes(model, drafter):
    """The enabled model is sent to another process (weights in shared memory); both generate."""
    options = {"tree_config": TREE, "assistant_model": drafter, "max_new_tokens": NEW, "do_sample": False}
    options["return_dict_in_generate"] = True
    inputs = left_pad(PROMPTS)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_generate, args=(copy.deepcopy(model), inputs, options, answers))
    process.start()
    expected = model.generate(**inputs, **options)
    sequences, rounds = answers.get(timeout=300)
    process.join()
    assert process.exitcode == 0
    assert sequences == expected.sequences.tolist() and rounds == expected.tree_stats["rounds"]
