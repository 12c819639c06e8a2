"""The benchmarks of losses, inference and start-up time, on tiny cases."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from printed import line_with, numbers

from benchmarks import inference, mlm_head, one_step, start_up, throughput
from d2l_bert import D2lBertConfig


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench_of", [throughput, inference, mlm_head])
def test_device_cuda_without_a_gpu_is_refused_in_one_line(bench_of, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--device=cuda"])
    with pytest.raises(SystemExit, match="--device cuda: PyTorch sees no GPU here.*") as refused:
        bench_of.main()
    assert "\n" not in refused.value.code and not capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Losses


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="PyTorch has it from 2.13 on")
def test_losses_are_compared_with_float64_in_error_time_and_memory(monkeypatch, capsys):
    options = "--loss --vocab_sizes 300 --hidden_sizes 16 --rows 40 --repetitions 1"
    monkeypatch.setattr(sys, "argv", ["mlm_head", *options.split()])
    mlm_head.main()
    printed = capsys.readouterr().out
    in_float32, in_bf16 = printed.split("bfloat16, H = 16, V = 300")
    errors = [re.findall(r"\d\.\de[-+]\d\d", text) for text in (in_float32, in_bf16)]
    # Three implementations; the errors of loss and two gradients, for random and for likely labels.
    assert [len(found) for found in errors] == [3 * 6] * 2
    assert max(map(float, errors[0])) < 1e-5 < 1e-4 < max(map(float, errors[1])) < 0.2
    assert printed.count("ms, ") == printed.count("MiB") == 2 * 3


def test_likely_labels_have_the_stated_probabilities():
    arguments = SimpleNamespace(rows=[10], device="cpu")
    states, weight, bias, labels = mlm_head.loss_inputs(torch.float32, 64, 500, True, arguments)
    chances = (states @ weight.T + bias).softmax(1)[torch.arange(len(labels)), labels]
    wanted = torch.tensor([0.02, 0.5, 0.9, 0.99, 0.998]).repeat(len(labels) // 5)
    torch.testing.assert_close(chances, wanted, rtol=0.02, atol=0.002)


def test_labels_of_every_position_hold_the_labels_of_the_masked_positions():
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.tensor([[7, 8, -100], [9, -100, -100]])}
    plain = one_step.labels_of_every_position(batch | {"masked_positions": torch.tensor([[4, 1, 0], [0, 0, 0]])})
    assert plain["labels"].tolist() == [[-100, 8, -100, -100, 7, -100], [9, *[-100] * 5]]
    assert "masked_positions" not in plain


# ---------------------------------------------------------------------------------------------------------------------
# Inference


@pytest.fixture
def options(books):
    return SimpleNamespace(
        corpus=[str(books)], device="cpu", dtype="float32", repetitions=1, texts=7, batch_size=3, vocab_size=400
    )


def test_inference_of_both_models_is_timed_on_texts_with_one_mask_each(options, capsys, monkeypatch):
    taken = iter([10, 1, 2, 4] * 100)
    monkeypatch.setattr(inference, "seconds", lambda work, device: work() is None or next(taken))
    inference.measure("small", options)
    lines = capsys.readouterr().out.splitlines()
    assert "7 texts" in lines[1]
    assert numbers(line_with(lines, "pipeline"))[6:9] == [0.1] * 3  # ours takes 10 s, stock BERT 1 s
    # Trials of ours: eager min(2, 4) s, sdpa min(10, 1) s; stock BERT's alike. The timed turns then take 2 and 4 s.
    assert numbers(line_with(lines, "fill-mask"))[6:9] == [2] * 3
    assert line_with(lines, "fill-mask").endswith("sdpa and sdpa attention")


def test_inference_in_batches_gives_what_each_text_gives_alone(options):
    config = D2lBertConfig(**inference.BERT, vocab_size=400, initializer_range=0.3)
    models = inference.make_models(config, options)
    texts, tokenizer = inference.masked_texts(options.corpus, 400, 64, 7)
    assert len(set(texts)) == 7 and all(text.count("[MASK]") == 1 for text in texts)
    assert len({len(tokenizer(text)["input_ids"]) for text in texts}) > 1
    batches = inference.make_batches(texts, tokenizer, options)
    assert [len(positions) for _, positions in batches] == [3, 3, 1]
    with torch.no_grad():
        for model in models.values():
            alone = [tokenizer(text, return_tensors="pt") for text in texts]
            states = [model.bert(**one).last_hidden_state[0].mean(0) for one in alone]
            masks = [one["input_ids"][0] == tokenizer.mask_token_id for one in alone]
            best = [model(**one).logits[0, mask].max() for one, mask in zip(alone, masks, strict=True)]
            embedded = inference.answer_all(inference.embed, model, batches)
            torch.testing.assert_close(embedded, torch.stack(states), atol=1e-4, rtol=1e-4)
            filled = inference.answer_all(inference.fill_masks, model, batches)
            torch.testing.assert_close(filled, torch.stack(best), atol=1e-4, rtol=1e-4)
            said = inference.pipeline_work(model, tokenizer, texts, options)()
            expected = [model(**one).logits[0, mask].softmax(-1).max() for one, mask in zip(alone, masks, strict=True)]
            torch.testing.assert_close(said, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_models_that_disagree_are_not_timed():
    same = torch.randn(7, 5)
    assert inference.check(same, same, "float32") == 0
    with pytest.raises(AssertionError, match="disagree by 1.0e-03"):
        inference.check(1.001 * same, same, "float32")
    assert inference.check(1.001 * same, same, "bfloat16") == pytest.approx(1e-3, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Start-up time


def test_processes_are_timed_from_start_to_end():
    commands = {"nothing": ["-S", "-c", ""], "a nap": ["-S", "-c", "import time; time.sleep(0.3)"]}
    taken = start_up.take_turns(commands, 2)
    assert {what: len(seconds) for what, seconds in taken.items()} == {"nothing": 2, "a nap": 2}
    assert 0 < min(taken["nothing"]) < 0.3 < min(taken["a nap"])


@pytest.mark.parametrize(
    ("imported", "helped", "reached"), [((4.2, 2.1, 4.0), (2.1, 2.3, 2.2), 2), ((4.8, 2.3, 4.4), (2.6, 2.4, 2.5), 0)]
)
def test_added_time_is_the_difference_within_a_turn(imported, helped, reached, monkeypatch, capsys):
    seconds = dict(zip(start_up.COMMANDS, [(4.0, 2.0, 4.0), imported, (2.0, 2.0, 2.0), helped], strict=True))
    monkeypatch.setattr(start_up, "take_turns", lambda commands, repetitions: seconds)
    monkeypatch.setattr(sys, "argv", ["start_up"])
    start_up.main()
    lines = capsys.readouterr().out.splitlines()
    shares = sorted(100 * (both / alone - 1) for both, alone in zip(imported, (4, 2, 4), strict=True))
    assert re.findall(r"[\d.]+%", lines[-2])[:3] == [f"{shares[at]:.1f}%" for at in (1, 0, 2)]
    assert f"--help adds {sorted(helped)[1] - 2:.2f} s" in lines[-1]
    assert sum("reached" in line for line in lines) == reached
    assert sum("MISSED" in line for line in lines) == 2 - reached
