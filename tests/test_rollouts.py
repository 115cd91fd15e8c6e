"""Reinforcement learning on an enabled model: TRL's rollouts go through trees, and follow the weights as they change."""

import copy

import pytest
import torch
from datasets import Dataset
from oracle import build_model, generator, random_texts, tiny_config
from peft import LoraConfig, get_peft_model
from test_batching import generated, one_by_one
from test_cli import byte_tokenizer
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import hf_treespec


# Of names that peft and TRL still use.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

# As `GRPOTrainer` and `RLOOTrainer` (TRL 1.16) make them; each prompt stands there once per completion.
CONFIG = {"max_new_tokens": 10, "do_sample": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2]}
CONFIG |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
CONFIG |= {"cache_implementation": None, "disable_compile": True}
PROMPTS = [text.tolist() for text in random_texts(generator(6), (11, 5)) for _ in range(2)]


def roll_out(model):
    """`use_transformers_continuous_batching=True`: the call of these trainers, word for word."""
    with torch.no_grad():
        all_outputs = model.generate_batch(
            PROMPTS,
            generation_config=GenerationConfig(**CONFIG),
            continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.5),
            progress_bar=False,
        )
        model.train()
    return all_outputs


def train(model, texts: list[list[int]]) -> None:
    """One step, large enough that the texts change."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    ids = torch.tensor([text for text in texts if len(text) == CONFIG["max_new_tokens"]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_rollouts_are_those_of_the_weights_of_the_moment(adapter):
    target = build_model(tiny_config(eos_token_id=2, bos_token_id=1))
    model = get_peft_model(target, LoraConfig(target_modules=["q_b_proj", "o_b_proj"], r=4)) if adapter else target
    hf_treespec.set_default(hf_treespec.enable(model), {"budget": 5, "drafter": "ngram"})
    model.train()
    written = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs = roll_out(model)
        written.append(generated(outputs))
        assert len(PROMPTS) < outputs.tree_stats["rounds"] < outputs.tree_stats["nodes"]
        # A model that never knew other weights.
        fresh = build_model(tiny_config(eos_token_id=2, bos_token_id=1))
        now = copy.deepcopy(model)
        fresh.load_state_dict((now.merge_and_unload() if adapter else now).state_dict())
        seeds, config = outputs.tree_stats["seeds"], GenerationConfig(**CONFIG)
        assert written[-1] == one_by_one(hf_treespec.enable(fresh), PROMPTS, seeds, generation_config=config)
        assert model.training
        train(model, written[-1])
    # The seeds were the same, the weights were not.
    assert written[0] != written[1]
    assert len({tuple(text) for text in written[0]}) == len(PROMPTS)


@pytest.mark.parametrize("batched", [True, False])
def test_two_steps_of_grpo(tmp_path, batched):
    """The real trainer, with `generate_batch` and with `generate`."""
    trl = pytest.importorskip("trl", reason="needs `pip install 'hf-treespec[trl]'`")
    tokenizer = byte_tokenizer()
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = hf_treespec.enable(build_model(tiny_config(**special)))
    hf_treespec.set_default(model, {"budget": 5, "drafter": "ngram"})
    initial, calls = copy.deepcopy(model), []
    name = "generate_batch" if batched else "generate"
    bound = getattr(model, name)

    def watched(*args, **options):
        calls.append((args, options, bound(*args, **options)))
        return calls[-1][-1]

    setattr(model, name, watched)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        use_transformers_continuous_batching=batched,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=CONFIG["max_new_tokens"],
        learning_rate=1e-2,
        # TRL 1.16 looks for a field that this architecture's config does not have.
        router_aux_loss_coef=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": [f"prompt {number}" for number in range(8)]}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert len(calls) == 2 and len(trainer.state.log_history) > 0
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), initial.parameters())]
    assert sum(changed) > 100
    if batched:
        (prompts,), options, outputs = calls[0]
        config = options["generation_config"]
        assert generated(outputs) == one_by_one(
            initial, prompts, outputs.tree_stats["seeds"], generation_config=config
        )
