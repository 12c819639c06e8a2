"""Every head: stock BERT's outputs, weights of other heads, compiling, Trainer, pipelines, the longest input."""

import copy
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import HEADS, SIZES
from safetensors.torch import load_file
from small_models import every_head, make_rows, of_head, stacked
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import d2l_bert
from d2l_bert import D2lBertConfig, PretrainingLoss
from d2l_bert.__main__ import main
from d2l_bert.folders import write_json
from d2l_bert.modeling.conversion import from_bert, longest_input
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.records import read_record


@every_head
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_outputs_and_loss_are_those_of_stock_bert(head, attention, act):
    """Hidden states and attentions, too. (Without LayerNorm on the embeddings, tests/promises has the equations.)"""
    torch.manual_seed(0)
    options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
    options |= {"initializer_range": 0.3, "layer_norm_eps": 0.03, "hidden_act": act}
    config = BertConfig(**SIZES, **options, tie_word_embeddings=act == "gelu", attn_implementation=attention)
    bert = getattr(transformers, f"Bert{head}")(config).eval()
    model = from_bert(copy.deepcopy(bert))
    model.set_attn_implementation(attention)
    batch = stacked(make_rows(head))
    asked = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    expected = bert(**batch, **asked)
    outputs = model(**batch, **asked)
    expected = {name: value for name, value in expected.items() if name != "cross_attentions"}
    torch.testing.assert_close({name: outputs[name] for name in expected}, expected, atol=1e-5, rtol=1e-4)
    usual = model(**batch)
    plain = model(**batch, return_dict=False)
    torch.testing.assert_close(plain[:2], bert(**batch, return_dict=False)[:2], atol=1e-5, rtol=1e-4)
    model.config.return_dict = False
    assert isinstance(model(**batch), tuple)
    assert torch.equal(model(**batch, return_dict=True)[0], usual[0])


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        *((head, None) for head in HEADS if head != "Model"),
        *(("ForSequenceClassification", problem) for problem in ("regression", "multi_label_classification")),
    ],
)
def test_the_loss_of_a_model_in_float64_is_exact_in_float64(head, problem):
    """As its gradient is: by differences of losses, which float32 would round to nothing."""
    options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
    if problem:
        options = {"num_labels": 1 if problem == "regression" else 3, "problem_type": problem}
    model = of_head(head, **options).double().eval()
    batch = stacked(make_rows(head))
    if problem:
        batch["labels"] = torch.rand(len(batch["input_ids"]), model.config.num_labels, dtype=torch.float64)
    weight = model.bert.encoder.layer[0].addnorm1.LayerNorm.bias
    step = 1e-6 * torch.eye(len(weight), dtype=torch.float64)[0]
    loss = model(**batch).loss
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight += step
        more = model(**batch).loss
        weight -= 2 * step
        less = model(**batch).loss
    assert loss.dtype == torch.float64
    difference = float((more - less) / 2e-6)
    assert difference == pytest.approx(float(gradient[0]), rel=1e-5, abs=1e-8)


@every_head
def test_any_head_loads_from_any_other_and_only_missing_weights_are_new(head, tmp_path):
    of_head(head).save_pretrained(tmp_path)

    def in_encoder(weights):
        return {name.removeprefix("bert."): value for name, value in weights.items()}

    stored = in_encoder(load_file(tmp_path / "model.safetensors"))
    for other in HEADS:
        loaded, report = getattr(d2l_bert, f"D2lBert{other}").from_pretrained(tmp_path, output_loading_info=True)
        weights = in_encoder(loaded.state_dict())
        missing = {name.removeprefix("bert.") for name in report.pop("missing_keys")}
        assert missing == weights.keys() - stored.keys(), other
        assert not any(report.values()), other
        for name in weights.keys() & stored.keys():
            assert torch.equal(weights[name], stored[name]), (other, name)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling, flex attention

PACKED = {
    "input_ids": torch.arange(5, 19).view(2, 7),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 0]] * 2),
    "sequence_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 0]] * 2),
    "cls_positions": torch.tensor([[0, 3]] * 2),
    "masked_positions": torch.tensor([[1, 2], [4, 5]]),
    "labels": torch.tensor([[7, 8], [9, -100]]),
    "next_sentence_label": torch.tensor([[0, 1], [1, 0]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_training_step_compiles_without_a_graph_break(backend):
    model = of_head("ForPreTraining", num_hidden_layers=1).train()
    eager = model(**PACKED)
    eager.loss.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend=backend)(**PACKED).loss
    loss.backward()
    torch.testing.assert_close(loss, eager.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_flash_attention_and_kernels_of_the_hub_are_refused_with_what_to_give(name):
    with pytest.raises(ValueError, match=f"attn_implementation {name} .*; give sdpa, .* varlen"):
        of_head("ForPreTraining", attn_implementation=name)
    model = of_head("ForPreTraining")
    with pytest.raises(ValueError, match=f"attn_implementation {name} .*; give sdpa, .* varlen"):
        model.set_attn_implementation(name)


@pytest.mark.slow
def test_flex_attention_equals_eager_attention_on_packed_rows():
    model = of_head("ForPreTraining", num_hidden_layers=1, attn_implementation="eager")
    inputs = PACKED
    real = (inputs["sequence_ids"] != 0)[..., None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex attention warns if it is not compiled
        expected = model(**inputs, output_hidden_states=True)
        model.set_attn_implementation("flex_attention")
        outputs = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(outputs.loss, expected.loss)
    states = outputs.hidden_states[-1]
    torch.testing.assert_close(states * real, expected.hidden_states[-1] * real)


# ---------------------------------------------------------------------------------------------------------------------
# Under Transformers' Trainer: micro-batches, PretrainingLoss


def trained_once(head, rows, batch_size, accumulation, folder, **options):
    """Loss and gradients of one optimizer step on `rows` under Transformers' Trainer."""
    model = of_head(head, **options)
    gradient = {}

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradient[name] = parameter.grad.clone()

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Catch()])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    if head == "ForPreTraining":
        trainer.compute_loss_func = PretrainingLoss(trainer)
    return trainer.train().training_loss, gradient


@pytest.mark.parametrize(
    ("head", "options", "to_labels"),
    [
        ("ForPreTraining", {}, None),
        ("ForMaskedLM", {}, None),
        ("ForNextSentencePrediction", {}, None),
        ("ForTokenClassification", {"num_labels": 3}, None),
        ("ForQuestionAnswering", {}, None),
        ("ForMultipleChoice", {}, None),
        ("ForSequenceClassification", {"num_labels": 3}, None),
        ("ForSequenceClassification", {"num_labels": 1}, lambda label: label * 1.7),
        (
            "ForSequenceClassification",
            {"num_labels": 3},
            lambda label: torch.nn.functional.one_hot(label, 3).float(),
        ),
    ],
)
def test_under_trainer_every_split_into_micro_batches_gives_one_gradient(head, options, to_labels, tmp_path):
    rows = make_rows(head)
    if to_labels is not None:
        rows = [{**row, "labels": to_labels(row["labels"])} for row in rows]
    # Trainer counts `labels`. Question answering has none, so its micro-batches must be equally large.
    splits = [(4, 2), (1, 8)] if head == "ForQuestionAnswering" else [(3, 3), (1, 8)]
    whole_loss, whole = trained_once(head, rows, 8, 1, tmp_path, **options)
    direct = of_head(head, **options).train()
    direct(**stacked(rows)).loss.backward()
    assert whole.keys() == {name for name, p in direct.named_parameters() if p.grad is not None}
    for name, parameter in direct.named_parameters():
        if name in whole:
            torch.testing.assert_close(whole[name], parameter.grad, atol=1e-6, rtol=1e-4)
    for batch_size, accumulation in splits:
        loss, gradient = trained_once(head, rows, batch_size, accumulation, tmp_path, **options)
        assert loss == pytest.approx(whole_loss, rel=1e-5)
        for name, value in whole.items():
            torch.testing.assert_close(gradient[name], value, atol=1e-6, rtol=1e-4)


def test_a_step_without_pair_labels_trains_on_its_masked_tokens(tmp_path):
    rows = [{**row, "next_sentence_label": torch.tensor(-100)} for row in make_rows("ForPreTraining")]
    loss, gradient = trained_once("ForPreTraining", rows, 2, 4, tmp_path)
    batch = {name: value for name, value in stacked(rows).items() if name != "next_sentence_label"}
    assert loss == pytest.approx(of_head("ForPreTraining")(**batch).loss.item(), rel=1e-5)
    assert all(value.isfinite().all() for value in gradient.values())


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines: our next-sentence-prediction, and Transformers' own


def test_two_texts_are_answered_in_the_labels_of_what_the_model_was_trained_to_tell(trained, tmp_path, capsys):
    """A model of SOP, by its record, tells the order; the same probabilities as NSP's for the two labels."""
    record = read_record(trained / "run_config.json")
    shares = []
    for objective in ("nsp", "sop"):
        folder = tmp_path / objective
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
        write_json(folder / "run_config.json", {**record, "run": {**record["run"], "objective": objective}})
        assert main(["next-sentence", str(folder), "Anna walked home.", "Hugo came."]) == 0
        shown = {}
        for line in capsys.readouterr().out.splitlines():
            share, name = line.split()[:2]
            shown[name] = share
        shares.append([shown[label] for label in PAIR_TASKS[objective].labels])
    assert shares[0] == shares[1]


def test_two_labels_of_one_name_are_refused(trained, tmp_path, fails):
    folder = shutil.copytree(trained, tmp_path / "m", ignore=shutil.ignore_patterns("checkpoint-*"))
    write_json(folder / "config.json", {**read_record(folder / "config.json"), "id2label": {"0": "A", "1": "A"}})
    assert "id2label has 'A' twice" in fails("next-sentence", folder, "Anna walked home.", "Hugo came.")


# ---------------------------------------------------------------------------------------------------------------------
# `longest_input`: a model runs on an input of that many tokens, and fails on one with a token more


UNLIMITED = SimpleNamespace(model_max_length=int(1e30))
TYPES = ["bert", "distilbert", "albert", "electra", "roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text"]


def config_of(model_type, **settings):
    if model_type == "d2l":
        return D2lBertConfig(**{**SIZES, "vocab_size": 50, "max_position_embeddings": 20, **settings})
    names = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "embedding_size": 16, "num_hidden_groups": 1}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **names}
    known = AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in sizes.items() if hasattr(known, name)}
    given = {"vocab_size": 50, "max_position_embeddings": 20, "pad_token_id": 3, **sizes, **settings}
    return AutoConfig.for_model(model_type, **given)


@pytest.mark.parametrize("model_type", ["d2l", *TYPES])
def test_a_model_runs_on_the_longest_input_and_on_no_longer_one(model_type):
    config = config_of(model_type)
    model = AutoModel.from_config(config).eval()
    limit = longest_input(model, UNLIMITED)
    with torch.no_grad():
        model(input_ids=torch.full((1, limit), 7))
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            model(input_ids=torch.full((1, limit + 1), 7))
    with torch.device("meta"):
        assert longest_input(AutoModel.from_config(config), UNLIMITED) == limit
