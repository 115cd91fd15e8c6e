"""Set-up of every test process: one thread (processes share the cores), no network, and the shared random models."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# No cost table of this machine decides what trees a test sees.
os.environ["HF_TREESPEC_CACHE"] = "/nowhere"

import copy  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402


# Kernels are interpreted where there is no device; nothing but tests of kernels asks for them there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from heads import make_checkpoint  # noqa: E402
from hypothesis import settings  # noqa: E402
from oracle import build_model, generator, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

import hf_treespec  # noqa: E402
from hf_treespec.budgeting import fallback  # noqa: E402
from hf_treespec.fork import ForkableCache  # noqa: E402


torch.set_num_threads(1)
# Nor does the clock: where rounds take no time, nothing is measured and nothing falls back.
fallback.clock = lambda: 0.0
logging.set_verbosity_error()
# Examples are the same in every run: a failure is never a matter of luck.
settings.register_profile("tests", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def model():
    """The random target, enabled. Tests must leave it as it is."""
    return hf_treespec.enable(build_model(tiny_config()))


@pytest.fixture(scope="session")
def drafter(model):
    """A DeepSeek-V4 assistant that is often right: the target with noise on its output."""
    noisy = hf_treespec.disable(copy.deepcopy(model))
    weight = noisy.lm_head.weight
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=generator(7)) * weight.std() * 0.3)
    return noisy


@pytest.fixture()
def loose_bounds(monkeypatch):
    """As on accelerators, where the host knows a bound of the lengths only, and works with columns that nothing fills."""
    reserve = ForkableCache.reserve

    def loose(self, length: int) -> None:
        reserve(self, length + 11)
        self.length_bound += 11

    monkeypatch.setattr(ForkableCache, "reserve", loose)
    return monkeypatch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a random model in the official layout, with an MTP head."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def target(checkpoint):
    """The checkpoint's model, enabled; its head is found by `generate` itself."""
    return hf_treespec.enable(AutoModelForCausalLM.from_pretrained(checkpoint).eval())
