"""One optimizer step is defined by the run: the same gradient however it is split; masks, labels and places right."""

import functools
import json
import math
import shutil

import pytest
import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer, BertTokenizer

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining

from .driving import (
    PEOPLE,
    PLACES,
    SMALL,
    SPECIALS,
    THINGS,
    command,
    end,
    error_lines,
    read_json,
    segments_of,
    start,
    watched,
    whole_ids,
    write_books,
    write_numbered,
    write_numbered_tokenizer,
)


NO_NOISE = ["--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0", "--max_grad_norm=1e6"]


def gradient_of_first_step(*options):
    """By parameter: the weights before the first optimizer step of a run and its gradient there; and its batches."""
    names, weights, gradients, forward = {}, {}, {}, D2lBertForPreTraining.forward

    def keep_weights(self, *arguments, **named):
        if not weights:
            names.update({parameter: name for name, parameter in self.named_parameters()})
            weights.update({name: tensor.clone() for name, tensor in self.state_dict().items()})
        return forward(self, *arguments, **named)

    def keep_gradient(optimizer, *_):
        if not gradients:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients.update({names[parameter]: parameter.grad.clone() for parameter in parameters})

    D2lBertForPreTraining.forward = functools.wraps(forward)(keep_weights)
    hook = register_optimizer_step_pre_hook(keep_gradient)
    try:
        with watched(D2lBertForPreTraining) as (trained, _):
            assert command("pretrain", *options) == 0
    finally:
        hook.remove()
        D2lBertForPreTraining.forward = forward
    return weights, gradients, trained


def test_a_step_has_the_same_gradient_however_it_is_split(texts, tmp_path):
    options = ["--corpus", texts, "--max_steps=1", *SMALL, *NO_NOISE, "--global_batch_size=16"]
    splits = (["--micro_batch_size=16"], ["--micro_batch_size=4"], ["--micro_batch_size=1"], ["--packing=true"])
    results = [
        gradient_of_first_step(*options, *split, f"--output_dir={tmp_path / str(number)}")
        for number, split in enumerate(splits)
    ]
    _, whole, batches = results[0]
    assert len(batches) == 1 and len(results[1][2]) >= 4 and len(results[2][2]) >= 12
    norm = torch.cat([tensor.flatten() for tensor in whole.values()]).norm()
    for _, gradient, _ in results[1:]:
        for name, tensor in whole.items():
            assert (gradient[name] - tensor).norm() < 1e-5 * norm, name


def test_rows_of_unknown_words_alone_are_trained_on_by_the_pair_task(model, texts, tmp_path):
    """Micro-batches without a token to predict split a step as any others do; a step of nothing else is no error."""
    for number, path in enumerate(sorted(shutil.copytree(texts, tmp_path / "texts").iterdir())):
        if number % 3:
            path.write_text(
                "".join("λ" if letter.isalpha() else letter for letter in path.read_text().replace(".", ""))
            )
    sizes = [option for option in SMALL if "vocab" not in option and "batch" not in option]
    options = ["--corpus", tmp_path / "texts", "--tokenizer", model, *sizes, *NO_NOISE, "--pairing=sentences"]
    options += ["--validation_corpus", texts, "--max_unknown_share=1"]
    splits = (["--micro_batch_size=16"], ["--micro_batch_size=1"], ["--packing=true"])
    (_, whole, _), (_, by_row, rows), (_, packed, _) = (
        gradient_of_first_step(
            *options, "--max_steps=1", "--global_batch_size=16", *split, f"--output_dir={tmp_path / str(number)}"
        )
        for number, split in enumerate(splits)
    )
    without = [batch for batch in rows if (batch["labels"] == -100).all()]
    assert 3 < len(without) < len(rows)
    norm = torch.cat([tensor.flatten() for tensor in whole.values()]).norm()
    for name, tensor in whole.items():
        for gradient in (by_row, packed):
            assert (gradient[name] - tensor).norm() < 1e-5 * norm, name
    options += ["--max_steps=12", "--global_batch_size=1", "--logging_steps=1", f"--output_dir={tmp_path / 'single'}"]
    with watched(D2lBertForPreTraining) as (trained, _):
        assert command("pretrain", *options) == 0
    has_target = [bool((batch["labels"] != -100).any()) for batch in trained]
    log = [json.loads(line) for line in (tmp_path / "single" / "training_log.jsonl").read_text().splitlines()]
    assert 0 < sum(has_target) < len(has_target) == 12
    assert ["loss" in row for row in log if "learning_rate" in row] == has_target
    assert read_json(tmp_path / "single" / "metrics.json")["train_skipped_steps"] == 0


def test_the_gradient_is_that_of_the_summed_losses_divided_once(texts, tmp_path):
    """In float64, from all logits and PyTorch's own cross-entropy, over all micro-batches of the step together."""
    options = ["--corpus", texts, "--max_steps=1", *SMALL, *NO_NOISE, "--micro_batch_size=2"]
    weights, gradient, batches = gradient_of_first_step(*options, f"--output_dir={tmp_path / 'out'}")
    assert len(batches) > 2
    model = D2lBertForPreTraining(D2lBertConfig.from_pretrained(tmp_path / "out"))
    model.load_state_dict(weights)
    model = model.double().eval()
    token_losses, pair_losses = [], []
    for batch in batches:
        outputs = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
        real = batch["labels"] != -100
        rows = torch.arange(len(real)).unsqueeze(1).expand_as(real)[real]
        logits = outputs.prediction_logits[rows, batch["masked_positions"][real]]
        token_losses.append(F.cross_entropy(logits, batch["labels"][real], reduction="none"))
        real = batch["next_sentence_label"] != -100
        pairs = outputs.seq_relationship_logits[real], batch["next_sentence_label"][real]
        pair_losses.append(F.cross_entropy(*pairs, reduction="none"))
    mlm, nsp = torch.cat(token_losses).mean(), torch.cat(pair_losses).mean()
    (mlm + nsp).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.cat([tensor.flatten() for tensor in expected.values()]).norm()
    for name, tensor in gradient.items():
        assert (tensor - expected[name]).norm() < 1e-4 * norm, name
    row = json.loads((tmp_path / "out" / "training_log.jsonl").read_text().splitlines()[0])
    assert row["mlm_loss"] == pytest.approx(mlm.item(), rel=1e-5) and row["nsp_loss"] == pytest.approx(
        nsp.item(), rel=1e-5
    )
    assert row["loss"] == pytest.approx((mlm + nsp).item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_train_the_weights_of_one(texts, tmp_path, engine):
    options = ["pretrain", "--corpus", texts, "--max_steps=6", *SMALL, *NO_NOISE, "--learning_rate=1e-4"]
    options += ["--logging_steps=1", "--num_hidden_layers=2"]
    assert command(*options, f"--output_dir={tmp_path / 'one'}") == 0
    words = [*options, "--micro_batch_size=2", f"--output_dir={tmp_path / 'two'}"]
    said = tmp_path / "said.txt"
    script = "on_fsdp.py" if engine == "fsdp2" else None
    assert end(start(words, script=script, processes=2, said=said)) == [0, 0], said.read_text()
    one, two = (D2lBertForPreTraining.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4, msg=name)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "training_log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    rows = [[row for row in log if "grad_norm" in row] for log in logs]
    for first, second in zip(*rows, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
    ends = [next(row for row in reversed(log) if "eval_mlm_loss" in row) for log in logs]
    assert ends[1]["eval_mlm_loss"] == pytest.approx(ends[0]["eval_mlm_loss"], rel=1e-4)
    assert ends[1]["eval_masked_tokens"] == ends[0]["eval_masked_tokens"]


# ---------------------------------------------------------------------------------------------------------------------
# What is in a batch


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A text of words that stand in it once, and its tokenizer: (folder, tokenizer, document of each word)."""
    folder = tmp_path_factory.mktemp("numbered")
    words = write_numbered(folder / "text", documents=60)
    tokenizer = write_numbered_tokenizer(folder / "tokenizer", words)
    document = {}
    for number, file in enumerate(sorted((folder / "text").iterdir())):
        for word in file.read_text().lower().replace(".", " ").split():
            document[int(word[1:]) + len(SPECIALS)] = number
    return folder / "text", tokenizer, document


def batches_of(numbered, output, *options, model_class=D2lBertForPreTraining):
    text, tokenizer, _ = numbered
    sizes = [option for option in SMALL if "vocab_size" not in option and "batch" not in option]
    words = ["pretrain", "--corpus", text, "--tokenizer", tokenizer, f"--output_dir={output}", *sizes]
    with watched(model_class) as seen:
        assert command(*words, "--hidden_size=8", "--intermediate_size=8", *options) == 0
    return seen


def without_stops(ids, stop):
    return [number for number in ids if number != stop]


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
def test_b_follows_a_where_the_label_says_so_and_is_of_another_pair_else(numbered, tmp_path, pairing):
    options = ["--max_steps=12", "--global_batch_size=32", f"--pairing={pairing}"]
    trained, _ = batches_of(numbered, tmp_path / "out", *options)
    document, stop = numbered[2], max(numbered[2]) + 1
    labels = []
    for batch in trained:
        for (a, b), label in zip(segments_of(batch), batch["next_sentence_label"].tolist(), strict=True):
            a, b = without_stops(a, stop), without_stops(b, stop)
            assert (label == -100) == (not b), "a row without a label is one segment"
            if label == -100 or not a or not b:
                continue
            labels.append(label)
            for segment in (a, b):  # a piece of the text as it stands there
                assert segment == list(range(segment[0], segment[0] + len(segment)))
                assert document[segment[0]] == document[segment[-1]]
            if label == 0:
                assert document[a[-1]] == document[b[0]] and b[0] == a[-1] + 1
            else:
                assert b[0] != a[-1] + 1
    assert len(labels) > 200 and 0.4 < sum(labels) / len(labels) < 0.6
    for batch in trained:  # whole rows of at most 48 tokens: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without a label
        ids, real = whole_ids(batch), batch["attention_mask"]
        assert ids.shape[1] <= 48 and (ids[:, 0] == 2).all()
        segments = 1 + (batch["next_sentence_label"] != -100).long()
        assert (ids.gather(1, real.sum(1, keepdim=True) - 1) == 3).all() and ((ids == 3).sum(1) == segments).all()


def test_documents_of_one_sentence_have_no_second_loss(tmp_path, capsys):
    """Nothing follows the only sentence of a document: a label could only be told from how a pair was cut."""
    texts = [f"{person} saw a {thing} in the {place}." for person in PEOPLE for thing in THINGS for place in PLACES]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["pretrain", "--corpus", rows, "--max_steps=3", *SMALL]
    assert command(*options, f"--output_dir={tmp_path / 'out'}") == 0
    assert "objective none" in capsys.readouterr().err
    assert read_json(tmp_path / "out" / "config.json")["architectures"] == ["D2lBertForMaskedLM"]
    assert not any("nsp" in name for name in read_json(tmp_path / "out" / "metrics.json"))
    assert command(*options, "--objective=nsp", f"--output_dir={tmp_path / 'asked'}") == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert "objective nsp" in line and "none" in line and not (tmp_path / "asked").exists()


def test_a_true_pair_that_fits_is_adjacent_to_the_word(numbered, tmp_path):
    """Sentences of at most 31 tokens, so that in single sentences nothing is cut where both fit."""
    trained, _ = batches_of(
        numbered, tmp_path / "out", "--max_steps=6", "--global_batch_size=32", "--pairing=sentences"
    )
    stop, checked = max(numbered[2]) + 1, 0
    for batch in trained:
        for (a, b), label in zip(segments_of(batch), batch["next_sentence_label"].tolist(), strict=True):
            if label == 0 and len(a) + len(b) < 40:
                assert a[-1] == stop and b[0] == without_stops(a, stop)[-1] + 1
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
def test_the_shares_of_masks_are_bert_s_and_labels_are_the_true_tokens(numbered, tmp_path, masking):
    options = ["--max_steps=25", "--global_batch_size=32", f"--masking={masking}", "--objective=none"]
    options.append("--mlm_probability=0.15")
    trained, _ = batches_of(numbered, tmp_path / "out", *options, model_class=D2lBertForMaskedLM)
    counts = dict.fromkeys(("tokens", "chosen", "mask", "kept", "random"), 0)
    for batch in trained:
        ids, whole = batch["input_ids"], whole_ids(batch)
        real = (batch["attention_mask"] == 1) & (whole >= len(SPECIALS))
        chosen = torch.zeros_like(real)
        rows, slots = (batch["labels"] != -100).nonzero(as_tuple=True)
        chosen[rows, batch["masked_positions"][rows, slots]] = True
        assert not (chosen & ~real).any(), "special tokens and padding are never predicted"
        assert (whole[~real & (batch["attention_mask"] == 1)] < len(SPECIALS)).all()
        kept = chosen & (ids == whole)
        random = chosen & ~kept & (ids != 4)
        assert (ids[random] >= len(SPECIALS)).all(), "a random token is an ordinary one"
        assert torch.equal(ids[~chosen], whole[~chosen])
        for name, where in (("tokens", real), ("chosen", chosen), ("mask", chosen & (ids == 4))):
            counts[name] += int(where.sum())
        counts["kept"] += int(kept.sum())
        counts["random"] += int(random.sum())
        for segment, _ in segments_of(batch):  # the true tokens are those of the text
            words = without_stops(segment, max(numbered[2]) + 1)
            assert words == list(range(words[0], words[0] + len(words))) if words else True
    assert counts["chosen"] / counts["tokens"] == pytest.approx(0.15, abs=0.01)
    for name, share in (("mask", 0.8), ("kept", 0.1), ("random", 0.1)):
        assert counts[name] / counts["chosen"] == pytest.approx(share, abs=0.03)


def test_whole_words_are_masked_whole(texts, tmp_path):
    """Of words of several pieces, all pieces are predicted or none."""
    sizes = [option for option in SMALL if "vocab" not in option]
    with watched(D2lBertForPreTraining) as (trained, _):
        options = [
            "--vocab_size=60",
            "--masking=whole_word",
            "--max_steps=6",
            *sizes,
            f"--output_dir={tmp_path / 'out'}",
        ]
        assert command("pretrain", "--corpus", texts, *options) == 0
    from transformers import AutoTokenizer

    pieces = AutoTokenizer.from_pretrained(tmp_path / "out").convert_ids_to_tokens(range(60))
    words = 0
    for batch in trained:
        whole = whole_ids(batch)
        rows, slots = (batch["labels"] != -100).nonzero(as_tuple=True)
        chosen = set(zip(rows.tolist(), batch["masked_positions"][rows, slots].tolist(), strict=True))
        for row, column in chosen:
            following = column + 1
            while following < whole.shape[1] and pieces[int(whole[row, following])].startswith("##"):
                assert (row, following) in chosen
                words += 1
                following += 1
    assert words > 50


@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
def test_an_unknown_word_is_seen_and_never_predicted_or_counted(tmp_path, masking):
    """Every third word is unknown, and stands where the words around it say; of the others, all are predicted."""
    words = write_numbered(tmp_path / "text", documents=30, seed=6)
    pieces = [*SPECIALS, *(f"w{number}" for number in range(words) if number % 3), "."]
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = (tmp_path / "text", tmp_path / "tokenizer", None)
    options = ["--mlm_probability=1", f"--masking={masking}", "--max_steps=3", "--eval_steps=3", "--packing=true"]
    options += ["--validation_corpus", tmp_path / "text", "--max_unknown_share=1"]
    trained, evaluated = batches_of(text, tmp_path / "out", "--global_batch_size=16", *options)
    evaluated = [batch for batch in evaluated if "labels" in batch][:-1]  # the last one is the example of the report
    counts, all_unknown, unknown = [], 0, tokenizer.unk_token_id
    for batch in [*trained, *evaluated]:
        whole = whole_ids(batch)
        predicted = torch.zeros_like(whole, dtype=torch.bool)
        rows, slots = (batch["labels"] != -100).nonzero(as_tuple=True)
        predicted[rows, batch["masked_positions"][rows, slots]] = True
        assert torch.equal(predicted, whole >= len(SPECIALS))
        assert (batch["input_ids"][whole == unknown] == unknown).all()
        assert not (batch["input_ids"][whole != unknown] == unknown).any(), "no random token is [UNK]"
        counts.append(int((whole >= len(SPECIALS)).sum()))
        all_unknown += int((whole == unknown).sum())
        for ids in whole.tolist():
            segment = []
            for piece in [*(pieces[number] for number in ids), "[SEP]"]:
                if piece in ("[UNK]", *pieces[len(SPECIALS) : -1]):
                    segment.append(None if piece == "[UNK]" else int(piece[1:]))
                elif piece != ".":  # the end of a segment, in which one word follows the other
                    known = [(place, number) for place, number in enumerate(segment) if number is not None]
                    first = known[0][1] - known[0][0] if known else 0
                    if known:
                        assert segment == [n if n % 3 else None for n in range(first, first + len(segment))]
                    segment = []
    assert all_unknown / (all_unknown + sum(counts)) == pytest.approx(0.3, abs=0.05)
    metrics = read_json(tmp_path / "out" / "metrics.json")
    assert metrics["eval_masked_tokens"] == sum(counts[len(trained) :])
    assert math.log(2) < metrics["eval_mlm_loss"] and metrics["eval_mlm_accuracy"] < 0.5, "[UNK] would be easy"
    stops = sum(path.read_text().count(".") for path in (tmp_path / "text").iterdir())
    known = torch.tensor([stops, *[1] * sum(number % 3 != 0 for number in range(words))])
    entropy = torch.distributions.Categorical(known / known.sum()).entropy().item()
    assert metrics["eval_token_entropy"] == pytest.approx(entropy, rel=1e-4)


def test_a_random_token_is_an_ordinary_one(texts, tmp_path):
    """Five of the 60 entries are special: if each entry were equally likely, some 14 of 200 random tokens would be."""
    sizes = [option for option in SMALL if "vocab" not in option and "batch" not in option]
    options = ["--vocab_size=60", "--max_steps=10", "--global_batch_size=32", f"--output_dir={tmp_path / 'out'}"]
    with watched(D2lBertForPreTraining) as (trained, _):
        assert command("pretrain", "--corpus", texts, *sizes, *options) == 0
    random = [
        batch["input_ids"][(batch["input_ids"] != whole_ids(batch)) & (batch["input_ids"] != 4)] for batch in trained
    ]
    assert sum(map(len, random)) > 100 and min(int(ids.min()) for ids in random if len(ids)) >= len(SPECIALS)


def test_masks_and_pairs_differ_from_epoch_to_epoch_and_are_those_of_the_seed(numbered, tmp_path):
    options = ["--max_steps=4", "--global_batch_size=64"]
    first, again, other = (
        batches_of(numbered, tmp_path / str(number), *options, f"--seed={seed}")[0]
        for number, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(x["input_ids"], y["input_ids"]) for x, y in zip(first, again, strict=True))
    assert any(x["input_ids"].shape != y["input_ids"].shape or not torch.equal(x["input_ids"], y["input_ids"])
               for x, y in zip(first, other, strict=False))  # fmt: skip


def test_a_batch_does_not_depend_on_worker_processes(numbered, tmp_path):
    options = ["--max_steps=3", "--global_batch_size=16", "--save_steps=3"]
    batches = [
        batches_of(numbered, tmp_path / str(workers), *options, f"--dataloader_num_workers={workers}")[0]
        for workers in (0, 2)
    ]
    for one, other in zip(*batches, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_held_out_documents_are_never_trained_on(numbered, tmp_path):
    trained, evaluated = batches_of(numbered, tmp_path / "out", "--num_train_epochs=1", "--global_batch_size=64")
    document, stop = numbered[2], max(numbered[2]) + 1

    def documents(batches):
        ids = {number for batch in batches for a, b in segments_of(batch) for number in [*a, *b]} - {stop}
        return {document[number] for number in ids}

    in_training, held_out = documents(trained), documents(batch for batch in evaluated if "labels" in batch)
    assert held_out and in_training and not in_training & held_out
    data = read_json(tmp_path / "out" / "run_config.json")["data"]
    assert data["train_documents"] + data["held_out_documents"] == len(set(document.values()))


# ---------------------------------------------------------------------------------------------------------------------
# What an epoch takes

# Of the training tokens, the share that is in some pair of the epoch, and how often a token is in it on average.
# (Figures of the code of November 2026, on the text of `epoch_text`.)
TAKES = {
    ("segments", "nsp"): (0.9342, 0.9342),
    ("segments", "sop"): (0.9402, 0.9402),
    ("segments", "none"): (1.0, 1.0045),
    ("sentences", "nsp"): (0.9992, 0.9992),
    ("sentences", "sop"): (1.0, 1.0),
    ("sentences", "none"): (1.0, 1.0016),
}


@pytest.fixture(scope="module")
def epoch_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epoch")
    words = write_numbered(folder / "text", documents=250, seed=3)
    return folder / "text", write_numbered_tokenizer(folder / "tokenizer", words), words


def what_an_epoch_takes(epoch_text, output, pairing, objective, monkeypatch):
    """The share of the training tokens that an epoch has in its pairs, and the mean number of times."""
    text, tokenizer, words = epoch_text
    model_class = D2lBertForMaskedLM if objective == "none" else D2lBertForPreTraining
    counts, forward = torch.zeros(words + len(SPECIALS) + 1, dtype=torch.long), model_class.forward

    def count(self, *arguments, **named):
        if self.training:
            real = named["attention_mask"] == 1
            counts.index_add_(0, whole_ids(named)[real], torch.ones(int(real.sum()), dtype=torch.long))
            # One row is enough to train.
            named = {
                name: value[:1] if torch.is_tensor(value) and value.dim() else value for name, value in named.items()
            }
        return forward(self, *arguments, **named)

    monkeypatch.setattr(model_class, "forward", count)
    sizes = [option for option in SMALL if not any(word in option for word in ("vocab", "batch", "seq_length"))]
    options = [
        *sizes,
        "--hidden_size=8",
        "--intermediate_size=8",
        "--max_position_embeddings=128",
        "--max_seq_length=128",
    ]
    options += [f"--pairing={pairing}", f"--objective={objective}", "--global_batch_size=16", "--num_train_epochs=1"]
    options += ["--max_eval_pairs=2", "--eval_steps=100000"]
    assert command("pretrain", "--corpus", text, "--tokenizer", tokenizer, f"--output_dir={output}", *options) == 0
    monkeypatch.undo()
    seen = counts[len(SPECIALS) : -1]  # without the full stop, which is not one place of the text
    tokens = read_json(output / "run_config.json")["data"]["train_words"]
    return int((seen > 0).sum()) / tokens, int(seen.sum()) / tokens


@pytest.mark.slow
@pytest.mark.parametrize("pairing, objective", TAKES)
def test_an_epoch_takes_its_share_of_the_tokens(epoch_text, tmp_path, monkeypatch, pairing, objective):
    share, times = what_an_epoch_takes(epoch_text, tmp_path / "out", pairing, objective, monkeypatch)
    expected_share, expected_times = TAKES[pairing, objective]
    assert share == pytest.approx(expected_share, abs=0.01)
    assert times == pytest.approx(expected_times, rel=0.02)


def test_the_same_segment_is_masked_anew_in_every_epoch(numbered, tmp_path):
    """Dynamic masking (RoBERTa, section 4.1): in two epochs each sentence is a segment twice."""
    options = ["--num_train_epochs=2", "--global_batch_size=64", "--objective=none", "--pairing=sentences"]
    options.append("--mlm_probability=0.15")  # constant: another share alone would give other places
    trained, _ = batches_of(numbered, tmp_path / "out", *options, model_class=D2lBertForMaskedLM)
    chosen = {}
    for batch in trained:
        for row, (segment, _) in enumerate(segments_of(batch)):
            places = batch["masked_positions"][row][batch["labels"][row] != -100].tolist()
            chosen.setdefault(tuple(segment), []).append(tuple(places))
    twice = [places for segment, places in chosen.items() if len(places) >= 2 and len(segment) > 8]
    assert len(twice) > 100
    assert sum(places[0] != places[1] for places in twice) > 0.8 * len(twice)


def test_a_run_that_learnt_little_or_repeated_a_small_text_says_so(texts, tmp_path, capsys):
    """Words seen are counted in passes; the loss is compared with the entropy of the held-out tokens."""
    few, held_out = write_books(tmp_path / "few", 4, seed=1), write_books(tmp_path / "held-out", 4, seed=2)
    sentences = ["--objective=none", "--pairing=sentences", f"--validation_corpus={held_out}"]

    def run(name, corpus, *options):
        folder = tmp_path / name
        words = ["pretrain", "--corpus", corpus, "--output_dir", folder, *SMALL, *sentences, *options]
        assert command(*words) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: ")]
        return folder, read_json(folder / "metrics.json"), notes

    folder, metrics, notes = run("short", texts, "--max_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " ".join(path.read_text() for path in held_out.iterdir())
    counts = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]).bincount().double()
    entropy = torch.distributions.Categorical(counts / counts.sum()).entropy().item()
    assert metrics["eval_token_entropy"] == pytest.approx(entropy)
    assert metrics["eval_mlm_loss"] > 0.9 * entropy and len(notes) == 1 and f"{entropy:.2f} nats" in notes[0]

    _, metrics, notes = run("long", few, "--num_train_epochs=25", "--global_batch_size=64")
    words = sum(len(path.read_text().split()) for path in few.iterdir())
    longest = 20  # words in a sentence; the last step takes 64 sentences
    assert 25 * words <= metrics["train_words_seen"] <= 25 * words + 64 * longest
    assert len(notes) == 1 and notes[0].startswith("Note: 25 passes over the text")

    _, metrics, notes = run("enough", texts, "--max_steps=150")
    assert metrics["eval_mlm_loss"] < 0.9 * entropy and not notes
