"""Every head under the contract of Transformers: stock BERT's losses, Trainer's counts, saving, loading, compiling."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from conftest import HEADS, SIZES
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import BertConfig, Trainer, TrainerCallback, TrainingArguments, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertForPreTraining, D2lBertForSequenceClassification, PretrainingLoss
from d2l_bert.modeling import configuration_d2l_bert, modeling_d2l_bert
from d2l_bert.modeling.bert_checkpoints import from_bert
from d2l_bert.modeling.modeling_d2l_bert import MaskLM
from d2l_bert.modeling.saving import AUTO_MAP


pytestmark = pytest.mark.usefixtures("one_thread")

every_head = pytest.mark.parametrize("head", HEADS)


def ours(head, **options):
    torch.manual_seed(0)
    model = getattr(d2l_bert, f"D2lBert{head}")(D2lBertConfig(**{**SIZES, **options}))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that a lost one shows
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_rows(head, count=8, num_labels=3):
    """Examples of 12 tokens, of which 4 to 11 are real, with unequal numbers of labels in each."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        row = {
            "input_ids": torch.randint(5, 40, (12,), generator=draw),
            "token_type_ids": torch.tensor([0] * 5 + [1] * 7),
            "attention_mask": (torch.arange(12) < 4 + number % 8).long(),
        }
        tags = torch.randint(0, 40 if head in ("ForPreTraining", "ForMaskedLM") else num_labels, (12,), generator=draw)
        tags[1 + number % 5 :] = -100
        if head in ("ForPreTraining", "ForMaskedLM", "ForTokenClassification"):
            row["labels"] = tags
        if head == "ForPreTraining":
            row["next_sentence_label"] = torch.tensor(-100 if number == 3 else number % 2)
        if head == "ForMultipleChoice":
            row = {name: torch.stack([value, value.flip(0), value.roll(3)]) for name, value in row.items()}
        if head in ("ForNextSentencePrediction", "ForMultipleChoice"):
            row["labels"] = torch.tensor(number % 2)
        if head == "ForSequenceClassification":
            row["labels"] = torch.tensor(number % num_labels)
        if head == "ForQuestionAnswering":
            row |= {"start_positions": torch.tensor(number % 4), "end_positions": torch.tensor(2 + number % 7)}
        rows.append(row)
    return rows


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT's outputs and losses


def stock_pair(head, **options):
    """A stock BERT with random weights, and ours made of it."""
    torch.manual_seed(0)
    bert = getattr(transformers, f"Bert{head}")(BertConfig(**{**SIZES, **options})).eval()
    return bert, from_bert(copy.deepcopy(bert))


@every_head
def test_outputs_and_loss_are_stock_berts(head):
    options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
    bert, model = stock_pair(head, **options)
    batch = stacked(make_rows(head))
    expected, outputs = bert(**batch), model(**batch)
    assert set(expected.keys()) <= set(outputs.keys())
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, atol=1e-6, rtol=1e-5)
    plain = model(**batch, return_dict=False)
    assert isinstance(plain, tuple) and torch.equal(plain[0], outputs[0])
    model.config.return_dict = False
    plain = model(**batch)
    assert isinstance(plain, tuple) and torch.equal(plain[0], outputs[0])
    assert torch.equal(model(**batch, return_dict=True)[0], outputs[0])


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels", "inferred"),
    [
        (None, 3, [0, 2, 1], "single_label_classification"),
        ("single_label_classification", 3, [0, -100, 1], None),
        (None, 3, [[0.0, 1, 1], [1, 0, 0], [0, 0, 1]], "multi_label_classification"),
        ("multi_label_classification", 1, [[1.0], [0], [1]], None),
        (None, 1, [0.5, -2.0, 1.0], "regression"),
        (None, 1, [[0.5], [-2.0], [1.0]], "regression"),
        ("regression", 3, [[0.5, 1, 2], [3, -1, 0], [0, 0, 1.5]], None),
    ],
)
def test_every_problem_type_has_stock_berts_loss(problem_type, num_labels, labels, inferred):
    bert, model = stock_pair("ForSequenceClassification", num_labels=num_labels, problem_type=problem_type)
    batch = {"input_ids": torch.arange(30).view(3, 10), "labels": torch.tensor(labels)}
    torch.testing.assert_close(model(**batch).loss, bert(**batch).loss)
    assert model.config.problem_type == bert.config.problem_type == (inferred or problem_type)


def test_one_class_with_binary_cross_entropy_takes_labels_with_or_without_a_column():
    model = ours("ForSequenceClassification", num_labels=1, problem_type="multi_label_classification")
    ids, labels = torch.arange(30).view(3, 10), torch.tensor([1.0, 0.0, 1.0])
    logits = model(ids).logits
    by_hand = -(labels * logits[:, 0].sigmoid().log() + (1 - labels) * (1 - logits[:, 0].sigmoid()).log()).mean()
    for shape in ((3,), (3, 1)):
        torch.testing.assert_close(model(ids, labels=labels.view(shape)).loss, by_hand)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3), (1, 3)])
def test_labels_of_another_shape_than_the_classes_are_refused(shape):
    model = ours("ForSequenceClassification", num_labels=4, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"labels of shape .* do not fit logits of shape \(3, 4\)"):
        model(torch.arange(30).view(3, 10), labels=torch.zeros(shape))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"])
@pytest.mark.parametrize(("classifier_dropout", "share"), [(None, 0.4), (0.7, 0.7), (0.0, 0.0)])
def test_classifiers_drop_out_what_they_see(head, classifier_dropout, share):
    model = ours(head, hidden_dropout_prob=0.4, classifier_dropout=classifier_dropout, hidden_size=96).train()
    seen = []
    last = model.scorer if head == "ForMultipleChoice" else model.classifier
    last.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    shape = (4, 2, 16) if head == "ForMultipleChoice" else (4, 16)
    model(torch.randint(0, 40, shape))
    assert (seen[0] == 0).float().mean().item() == pytest.approx(share, abs=0.1)


@every_head
def test_every_head_wants_exactly_one_of_input_ids_and_inputs_embeds(head):
    ids = torch.arange(12).view((2, 2, 3) if head == "ForMultipleChoice" else (4, 3))
    model = ours(head)
    for given in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(*ids.shape, 24)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**given)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    for name, value in model(ids).items():
        assert torch.equal(embedded[name], value), name


def test_a_refused_call_leaves_the_problem_open():
    model = ours("ForSequenceClassification", num_labels=2)
    with pytest.raises(ValueError, match="do not fit"):
        model(torch.arange(10)[None], labels=torch.tensor([[1.0]]))
    assert model.config.problem_type is None
    assert model(torch.arange(10)[None], labels=torch.tensor([1])).loss > 0


def test_classes_may_be_a_column_and_any_whole_numbers():
    model, ids = ours("ForNextSentencePrediction"), torch.arange(30).view(3, 10)
    expected = model(ids, labels=torch.tensor([0, 1, 1])).loss
    for labels in (torch.tensor([[0], [1], [1]]), torch.tensor([0, 1, 1], dtype=torch.int32)):
        assert torch.equal(model(ids, labels=labels).loss, expected)


def test_positions_to_predict_have_a_row_for_each_sequence():
    with pytest.raises(ValueError, match=r"\(B, P\)"):
        ours("ForMaskedLM")(torch.arange(10)[None], masked_positions=torch.tensor([1, 2]))


@pytest.mark.parametrize("change", [{"hidden_act": "silu"}, {"num_attention_heads": 5}, {"problem_type": "ranking"}])
def test_a_configuration_changed_while_loading_is_checked_too(change, tmp_path):
    ours("ForSequenceClassification").save_pretrained(tmp_path)
    with pytest.raises((ValueError, StrictDataclassError), match=next(iter(change))):
        D2lBertForSequenceClassification.from_pretrained(tmp_path, **change)


def test_an_answer_that_was_cut_off_does_not_count():
    model = ours("ForQuestionAnswering")
    ids, starts, ends = torch.arange(20).view(2, 10), torch.tensor([3, 10]), torch.tensor([4, 99])
    loss = model(ids, start_positions=starts, end_positions=ends).loss
    alone = model(ids[:1], start_positions=starts[:1], end_positions=ends[:1]).loss
    torch.testing.assert_close(loss, alone)


def test_the_nsp_head_names_its_labels_and_leaves_those_of_others_alone(tmp_path):
    config = D2lBertConfig(**SIZES)
    assert d2l_bert.D2lBertForNextSentencePrediction(config).config.id2label == {0: "IsNext", 1: "NotNext"}
    assert D2lBertForSequenceClassification(config).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    ours("ForPreTraining").save_pretrained(tmp_path)
    assert D2lBertForSequenceClassification.from_pretrained(tmp_path).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


def trained_once(head, rows, batch_size, accumulation, folder, own_loss=True, **options):
    """Loss and gradient of one optimizer step on `rows` under Trainer."""
    model, gradient = ours(head, **options), {}

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            gradient.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

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
    if head == "ForPreTraining" and own_loss:
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
def test_every_accumulation_split_has_one_gradient_under_trainer(head, options, to_labels, tmp_path):
    rows = make_rows(head)
    if to_labels is not None:
        rows = [{**row, "labels": to_labels(row["labels"])} for row in rows]
    # Trainer counts `labels`, which questions do not have: their micro-batches must be of one size.
    splits = [(4, 2), (1, 8)] if head == "ForQuestionAnswering" else [(3, 3), (1, 8)]
    whole_loss, whole = trained_once(head, rows, 8, 1, tmp_path, **options)
    direct = ours(head, **options).train()
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


@pytest.mark.parametrize("head", ["ForPreTraining", "ForMaskedLM"])
def test_under_trainer_a_training_step_makes_no_scores_of_every_position(head, tmp_path, monkeypatch):
    scored, as_is = [], MaskLM.forward
    monkeypatch.setattr(MaskLM, "forward", lambda self, states: (scored.append(states.shape), as_is(self, states))[1])
    trained_once(head, make_rows(head), 4, 2, tmp_path)
    assert not scored


def test_without_the_loss_function_trainer_takes_the_mean_of_the_pretraining_models_micro_batches(tmp_path):
    model, rows = ours("ForPreTraining"), make_rows("ForPreTraining")
    rows = rows[:3] + rows[4:8]  # the one without a label for its pair has no loss of its own
    loss, _ = trained_once("ForPreTraining", rows, 1, 7, tmp_path, own_loss=False)
    means = [model(**stacked([row])).loss.item() for row in rows]
    assert loss == pytest.approx(sum(means) / 7, rel=1e-5)


def test_a_step_without_a_labelled_pair_trains_on_its_masked_tokens(tmp_path):
    rows = [{**row, "next_sentence_label": torch.tensor(-100)} for row in make_rows("ForPreTraining")]
    loss, gradient = trained_once("ForPreTraining", rows, 2, 4, tmp_path)
    batch = {name: value for name, value in stacked(rows).items() if name != "next_sentence_label"}
    assert loss == pytest.approx(ours("ForPreTraining")(**batch).loss.item(), rel=1e-5)
    assert all(value.isfinite().all() for value in gradient.values())


@pytest.mark.parametrize("name", ["labels", "next_sentence_label"])
def test_the_loss_of_both_heads_says_which_labels_it_lacks(name, tmp_path):
    rows = [{key: value for key, value in row.items() if key != name} for row in make_rows("ForPreTraining")]
    with pytest.raises(ValueError, match=f"PretrainingLoss needs {name}"):
        trained_once("ForPreTraining", rows, 4, 2, tmp_path)


def test_trainer_evaluates_the_pretraining_model(tmp_path):
    model, rows = ours("ForPreTraining"), make_rows("ForPreTraining")
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_eval_batch_size=8)
    trainer = Trainer(model, arguments, eval_dataset=rows, compute_metrics=lambda prediction: {"n": 1.0})
    trainer.compute_loss_func = PretrainingLoss(trainer)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(model(**stacked(rows)).loss.item(), rel=1e-5)
    tokens, pairs = trainer.predict(rows).predictions
    assert tokens.shape == (8, 12, 40) and pairs.shape == (8, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Saving and loading


@every_head
def test_any_head_loads_from_any_other_and_initialises_only_what_is_missing(head, tmp_path):
    ours(head).save_pretrained(tmp_path)
    stored = {name.removeprefix("bert."): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    for other in HEADS:
        loaded, report = getattr(d2l_bert, f"D2lBert{other}").from_pretrained(tmp_path, output_loading_info=True)
        weights = {name.removeprefix("bert."): value for name, value in loaded.state_dict().items()}
        missing = {name.removeprefix("bert.") for name in report.pop("missing_keys")}
        assert missing == weights.keys() - stored.keys() and not any(report.values()), other
        for name in weights.keys() & stored.keys():
            assert torch.equal(weights[name], stored[name]), (other, name)


@every_head
def test_whatever_saves_a_model_leaves_its_code_beside_it(head, tmp_path):
    model = ours(head)
    model.save_pretrained(tmp_path / "first")
    type(model).from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for folder in (tmp_path / "first", tmp_path / "second"):
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoConfig"] == "configuration_d2l_bert.D2lBertConfig"
        assert f"modeling_d2l_bert.D2lBert{head}" in auto_map.values()
        for module in (modeling_d2l_bert, configuration_d2l_bert):
            source = Path(module.__file__)
            assert (folder / source.name).read_bytes() == source.read_bytes()


def test_the_folder_of_a_run_names_every_head_for_readers_without_the_package():
    classes = {name.rsplit(".", 1)[1] for name in AUTO_MAP.values()}
    assert classes == {"D2lBertConfig", *(f"D2lBert{head}" for head in HEADS)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_head
def test_half_precision_loads_and_runs(head, dtype, tmp_path):
    model = ours(head, initializer_range=0.02)
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    batch = stacked(make_rows(head, num_labels=2))
    full, outputs = model(**batch), half(**batch)
    for name, value in outputs.items():
        torch.testing.assert_close(value.float(), full[name], atol=0.05, rtol=0.05)


def test_shards_offload_and_device_map_give_the_same_outputs(tmp_path):
    model = ours("ForPreTraining")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = torch.arange(20).view(2, 10)
    expected = model(ids).prediction_logits
    assert torch.equal(D2lBertForPreTraining.from_pretrained(tmp_path)(ids).prediction_logits, expected)
    on_cpu = D2lBertForPreTraining.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(on_cpu(ids).prediction_logits, expected)
    blocks = {"bert.encoder.layer.1": "disk", "bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu"}
    placed = {**blocks, "bert.pooler": "cpu", "mlm": "cpu", "nsp": "disk"}
    offloaded = D2lBertForPreTraining.from_pretrained(tmp_path, device_map=placed, offload_folder=tmp_path / "disk")
    assert next(offloaded.bert.encoder.layer[1].parameters()).device.type == "meta"
    assert torch.equal(offloaded(ids).prediction_logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_keep_their_rows_and_their_tie(tied):
    model = ours("ForMaskedLM", tie_word_embeddings=tied)
    ids = torch.arange(20).view(2, 10)
    before, decoder = model(ids).logits, model.get_output_embeddings().weight.clone()
    model.resize_token_embeddings(45)
    assert model.config.vocab_size == 45 and model(ids).logits.shape == (2, 10, 45)
    torch.testing.assert_close(model(ids).logits[..., :40], before)
    assert torch.equal(model.get_output_embeddings().weight[:40], decoder)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


# ---------------------------------------------------------------------------------------------------------------------
# Compiling, exporting, other attention


def packed_batch():
    return {
        "input_ids": torch.arange(5, 19).view(2, 7),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 0]] * 2),
        "sequence_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 0]] * 2),
        "cls_positions": torch.tensor([[0, 3]] * 2),
        "masked_positions": torch.tensor([[1, 2], [4, 5]]),
        "labels": torch.tensor([[7, 8], [9, -100]]),
        "next_sentence_label": torch.tensor([[0, 1], [1, 0]]),
    }


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_training_step_compiles_without_a_graph_break(backend):
    model = ours("ForPreTraining", num_hidden_layers=1).train()
    eager = model(**packed_batch())
    eager.loss.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend=backend)(**packed_batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, eager.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], atol=1e-5, rtol=1e-4)


@every_head
def test_an_exported_head_takes_other_sizes(head):
    model = ours(head)
    batches = [{name: value[:rows] for name, value in stacked(make_rows(head)).items()} for rows in (2, 5)]
    batches = [{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")} for batch in batches]
    batches[1] = {name: torch.cat([value, value], dim=-1) for name, value in batches[1].items()}
    dynamic = torch.export.Dim.DYNAMIC
    sizes = {name: {0: dynamic, value.dim() - 1: dynamic} for name, value in batches[0].items()}
    exported = torch.export.export(model, (), batches[0], dynamic_shapes=sizes).module()
    for name, value in exported(**batches[1]).items():
        torch.testing.assert_close(value, model(**batches[1])[name])


def test_packed_rows_with_masked_positions_export():
    model, batch = ours("ForPreTraining"), packed_batch()
    exported = torch.export.export(model, (), batch).module()
    torch.testing.assert_close(exported(**batch).loss, model(**batch).loss)


def test_flex_attention_equals_eager_on_packed_rows():
    model, inputs = ours("ForPreTraining", num_hidden_layers=1, attn_implementation="eager"), packed_batch()
    real = (inputs["sequence_ids"] != 0)[..., None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather be compiled
        expected = model(**inputs, output_hidden_states=True)
        model.set_attn_implementation("flex_attention")
        outputs = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.hidden_states[-1] * real, expected.hidden_states[-1] * real)


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines


@pytest.fixture(scope="module")
def tokenizer(trained):
    return transformers.AutoTokenizer.from_pretrained(trained)


def test_next_sentence_pipeline_gives_the_models_label_and_probability(trained):
    predict = pipeline("next-sentence-prediction", model=str(trained))
    pairs = [
        {"text": "Anna walked to the garden.", "text_pair": "The apple was red."},
        {"text": "The drum was old.", "text_pair": "Hugo painted the drum."},
    ]
    model = d2l_bert.D2lBertForNextSentencePrediction.from_pretrained(trained).eval()
    for pair, answer in zip(pairs, predict(pairs), strict=True):
        with torch.no_grad():
            share = model(**predict.tokenizer(pair["text"], pair["text_pair"], return_tensors="pt")).logits.softmax(-1)
        assert answer == {"label": ["IsNext", "NotNext"][share.argmax()], "score": pytest.approx(share.max().item())}
        assert predict(pair) == answer
    for wrong in (
        {"text": "Anna walked."},
        {"text": "Anna walked.", "text_pair": None},
        {"text": ["Anna walked.", "Hugo left."], "text_pair": ["The drum was old.", "The apple was red."]},
        "Anna walked.",
    ):
        with pytest.raises(ValueError, match="two strings"):
            predict(wrong)
    with pytest.raises(ValueError, match="needs a ForNextSentencePrediction model, got D2lBertForMaskedLM"):
        d2l_bert.NextSentencePredictionPipeline(
            model=d2l_bert.D2lBertForMaskedLM.from_pretrained(trained), tokenizer=predict.tokenizer
        )
    with pytest.raises(ValueError, match="64 positions; shorten it"):
        predict({"text": "garden " * 90, "text_pair": "drum"})
    predict.tokenizer.model_max_length = int(1e30)  # as where a folder has a vocabulary alone
    long = predict({"text": "garden " * 90, "text_pair": "drum"}, truncation=True)
    assert long["label"] in ("IsNext", "NotNext")


def test_stock_pipelines_take_our_heads(trained, tokenizer):
    text = "Anna walked to the garden."
    states = pipeline("feature-extraction", model=str(trained))(text, return_tensors=True)
    model = d2l_bert.D2lBertModel.from_pretrained(trained).eval()
    with torch.no_grad():
        torch.testing.assert_close(states, model(**tokenizer(text, return_tensors="pt")).last_hidden_state)
    for task, head in (
        ("text-classification", "ForSequenceClassification"),
        ("token-classification", "ForTokenClassification"),
    ):
        model = getattr(d2l_bert, f"D2lBert{head}").from_pretrained(
            trained, id2label={0: "good", 1: "bad", 2: "odd"}, label2id={"good": 0, "bad": 1, "odd": 2}
        )
        answers = pipeline(task, model=model, tokenizer=tokenizer)(text)
        with torch.no_grad():
            shares = model.eval()(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        best = shares if task == "text-classification" else shares[1]
        answer = answers[0]
        assert answer.get("label", answer.get("entity")) == model.config.id2label[int(best.argmax())]
        assert answer["score"] == pytest.approx(best.max().item(), rel=1e-4)


@pytest.mark.skipif(
    "question-answering" not in PIPELINE_REGISTRY.get_supported_tasks(),
    reason="this transformers has no such pipeline",
)
def test_the_question_answering_pipeline_takes_our_head(trained, tokenizer):
    model = d2l_bert.D2lBertForQuestionAnswering.from_pretrained(trained)
    context = "Anna walked to the garden."
    answer = pipeline("question-answering", model=model, tokenizer=tokenizer)(question="Who?", context=context)
    assert answer["answer"] in context
