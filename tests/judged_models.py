"""Small masked language models of several kinds in folders, and minimal pairs in the words of the fixture `books`."""

import json
import random

from promises.driving import PEOPLE, PLACES, THINGS
from small_models import spread
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
    of_bytes = byte_tokenizer(books)
    shared = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": tokenizer.pad_token_id}
    distil = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    of_roberta = {"vocab_size": len(of_bytes), "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
    made = {
        "bert": (BertForPreTraining(BertConfig(**shared, **SIZES)), tokenizer),
        "mlm": (BertForMaskedLM(BertConfig(**shared, **SIZES)), tokenizer),
        "distilbert": (DistilBertForMaskedLM(DistilBertConfig(**shared, **distil)), tokenizer),
        "albert": (AlbertForPreTraining(AlbertConfig(**shared, **SIZES, embedding_size=16)), tokenizer),
        "roberta": (RobertaForMaskedLM(RobertaConfig(**of_roberta, **SIZES)), of_bytes),
    }
    for name, (model, its_tokenizer) in made.items():
        spread(model)
        model.save_pretrained(folder / name)
        save_tokenizer(its_tokenizer, folder / name)
    return {"ours": trained, **{name: folder / name for name in made}}


def byte_tokenizer(books):
    """A tokenizer of bytes as RoBERTa's: its mask token has the last id, and a word begins with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text() for path in sorted(books.iterdir())), trainer)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, mask_token="<mask>")


# Names of paradigms that BLiMP has, and of such that it has not.
OF_BLIMP = ("principle_A_domain_1", "adjunct_island", "wh_island")
MADE_UP = ("made_up_0", "made_up_1", "made_up_2")


def write_pairs(folder, paradigms=3, pairs=12, seed=0, names=MADE_UP, phenomena=("verbs", "articles")):
    """Write files as BLiMP's: pairs of sentences with two words swapped, or one word replaced; returns the folder."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(paradigms):
        rows = []
        for _ in range(pairs + number):
            name = rng.choice(PEOPLE).title()
            thing = rng.choice(THINGS)
            place = rng.choice(PLACES)
            good = f"{name} walked to the {place} with a {thing}."
            bad = rng.choice([f"{name} walked to a {place} with the {thing}.", good.replace("walked", "walk")])
            rows.append({"sentence_good": good, "sentence_bad": bad, "UID": names[number]})
            rows[-1]["linguistics_term"] = phenomena[bool(number)]
        (folder / f"{names[number]}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_pairs(folder):
    """The rows of all files, in the order of the files' names."""
    rows = []
    for file in sorted(folder.iterdir()):
        rows += map(json.loads, file.read_text().splitlines())
    return rows
