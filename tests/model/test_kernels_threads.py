"""Cores are our helpers' while a token is computed, and torch's again afterwards."""

import threading

import pytest
import torch

from decodescope.generate import Decoding, Limits
from decodescope.model import kernels
from decodescope.model.checkpoint import load_model
from decodescope.model.decoder import CausalLM
from decodescope.model.kernels import helpers_alone
from decodescope.model.kernels.threads import threads
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler

compiled = pytest.mark.skipif(
    kernels.available().instructions is None, reason="needs a C compiler; ends where there is one"
)


@pytest.fixture
def three():
    """Threads for torch; a fixture of all tests takes them back."""
    torch.set_num_threads(3)


def test_inside_torch_keeps_to_one_thread_and_products_take_all(three):
    with helpers_alone():
        assert (torch.get_num_threads(), threads()) == (1, 3)
    assert (torch.get_num_threads(), threads()) == (3, 3)


def test_whatever_happens_inside_torch_has_its_threads_back(three):
    with pytest.raises(KeyError), helpers_alone():
        raise KeyError
    assert (torch.get_num_threads(), threads()) == (3, 3)


def test_passes_side_by_side_leave_every_thread_what_it_had(three):
    both_inside, first_out, seen = threading.Barrier(2), threading.Event(), {}

    def work(name: str) -> None:
        with helpers_alone():
            both_inside.wait(10)
            if name == "second":
                first_out.wait(10)
            inside = torch.get_num_threads(), threads()
        first_out.set()
        seen[name] = inside, (torch.get_num_threads(), threads())

    pair = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for each in pair:
        each.start()
    for each in pair:
        each.join()
    assert seen["second"] == ((1, 3), (3, 3))
    assert seen["first"][0] == (1, 3) and seen["first"][1][1] == 3
    assert (torch.get_num_threads(), threads()) == (3, 3)


def in_passes(model: CausalLM, prompt: list[int]) -> list[tuple[int, int]]:
    """Threads of torch and of products in the last layer, pass by pass."""
    seen: list[tuple[int, int]] = []
    hook = model.model.norm.register_forward_hook(lambda *_: seen.append((torch.get_num_threads(), threads())))
    decoding = Decoding(model, [prompt], [Sampler(SamplingParams())], Limits(3))
    while decoding.active:
        decoding.forward()
        decoding.choose()
    hook.remove()
    return seen


@compiled
@pytest.mark.parametrize(("dtype", "decoding"), [("bfloat16", (1, 3)), ("float32", (3, 3))])
def test_few_tokens_by_kernels_have_torch_on_one_thread_and_prompts_have_not(three, tiny_folders, dtype, decoding):
    model = load_model(tiny_folders["qwen2-gqa"], dtype)[0]
    assert in_passes(model, list(range(40))) == [(3, 3), decoding, decoding]
    assert (torch.get_num_threads(), threads()) == (3, 3)
