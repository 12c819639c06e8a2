"""Small masked language models of several kinds in folders, and minimal pairs in the words of the fixture `books`."""

import json
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from d2l_bert.tokenization.wordpiece import save_tokenizer


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def save_models(trained, books, folder):
    """Write stock models with random weights beside each other; returns their folders by name, `ours` among them."""
    tokenizer = AutoTokenizer.from_pretrained(trained)
    shared = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": tokenizer.pad_token_id}
    bytes_tokenizer = byte_tokenizer(books)
    distil = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    of_roberta = {"vocab_size": len(bytes_tokenizer), "max_position_embeddings": 66, "type_vocab_size": 1}
    made = {
        "bert": BertForPreTraining(BertConfig(**shared, **SIZES)),
        "mlm": BertForMaskedLM(BertConfig(**shared, **SIZES)),
        "distilbert": DistilBertForMaskedLM(DistilBertConfig(**shared, **distil)),
        "albert": AlbertForPreTraining(AlbertConfig(**shared, **SIZES, embedding_size=16)),
        "roberta": RobertaForMaskedLM(RobertaConfig(**of_roberta, **SIZES, pad_token_id=1)),
    }
    folders = {"ours": trained}
    for name, model in made.items():
        spread(model)
        folders[name] = folder / name
        model.save_pretrained(folders[name])
        save_tokenizer(bytes_tokenizer, folders[name]) if name == "roberta" else save_tokenizer(
            tokenizer, folders[name]
        )
    return folders


def spread(model, seed=0):
    """Give all parameters random values that matter: fresh ones make nearly equal scores."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.3, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1)


def byte_tokenizer(books):
    """A tokenizer of bytes as RoBERTa's: its mask token has the last id, and a word begins with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text() for path in sorted(books.iterdir())), trainer)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {
        "cls": "<s>",
        "bos": "<s>",
        "pad": "<pad>",
        "sep": "</s>",
        "eos": "</s>",
        "unk": "<unk>",
        "mask": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{f"{n}_token": token for n, token in names.items()})


def write_pairs(folder, paradigms=3, pairs=12, seed=0):
    """Write files as BLiMP's: pairs of sentences with two words swapped, or one word replaced; returns the folder."""
    rng = random.Random(seed)
    names = ["Anna", "Boris", "Clara", "Daniel", "Emma", "Felix"]
    things = ["apple", "basket", "candle", "drum", "engine", "umbrella"]
    places = ["garden", "kitchen", "harbour", "library"]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(paradigms):
        rows = []
        for _ in range(pairs + number):
            name, thing, place = rng.choice(names), rng.choice(things), rng.choice(places)
            good = f"{name} walked to the {place} with a {thing}."
            bad = rng.choice([f"{name} walked to a {place} with the {thing}.", good.replace("walked", "walk")])
            rows.append({"sentence_good": good, "sentence_bad": bad, "UID": f"made_up_{number}"})
            rows[-1]["linguistics_term"] = "articles" if number else "verbs"
        (folder / f"made_up_{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_pairs(folder):
    """The rows of all files, in the order of the files' names."""
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
