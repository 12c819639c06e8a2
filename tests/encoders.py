"""Small encoders on disk, ours and stock ones, with a tokenizer."""

import torch
from conftest import SIZES
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, RobertaConfig, RobertaModel

from d2l_bert import D2lBertConfig, D2lBertForPreTraining, train_wordpiece
from d2l_bert.modeling.conversion import save_model
from d2l_bert.tokenization.wordpiece import save_tokenizer


WORDS = "the a crane is flying over an old tower while driver came home and left it near water again".split()
POSITIONS = 32


def write_encoders(folder):
    """Folders `ours`, `stock` and `roberta` with random weights that are large enough to make a difference."""
    tokenizer = train_wordpiece([" ".join(WORDS)] * 3, min_frequency=1)
    tokenizer.model_max_length = POSITIONS
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    sizes.pop("intermediate_size")
    torch.manual_seed(0)
    models = {
        "ours": D2lBertForPreTraining(D2lBertConfig(**sizes, intermediate_size=20, initializer_range=0.3)),
        "stock": BertModel(BertConfig(**sizes, intermediate_size=20, initializer_range=0.3)),
        # RoBERTa counts positions from the padding token's id + 1.
        "roberta": RobertaModel(
            RobertaConfig(
                **{**sizes, "max_position_embeddings": POSITIONS + 1 + tokenizer.pad_token_id},
                pad_token_id=tokenizer.pad_token_id,
                type_vocab_size=1,
                intermediate_size=20,
                initializer_range=0.3,
            )
        ),
    }
    for name, model in models.items():
        (folder / name).mkdir(parents=True)
        save_model(model, folder / name) if name == "ours" else model.save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name)
    return folder


def load(folder, **options):
    return AutoModel.from_pretrained(folder, **options).eval(), AutoTokenizer.from_pretrained(folder)
