"""Converts checkpoints: those of d2l and stock BERT to d2l-bert models, and these to stock BERT and d2l's."""

from pathlib import Path

from transformers import BertConfig

from d2l_bert.messages import UserError, explained, reading_model
from d2l_bert.tokenization.existing_tokenizers import has_tokenizer, read_tokenizer
from d2l_bert.tokenization.wordpiece import save_tokenizer

from . import conversion, d2l_checkpoints
from .configuration_d2l_bert import D2lBertConfig


def convert(
    source: str,
    folder: Path,
    source_kind: str | None,
    target_kind: str | None,
    num_attention_heads: int | None = None,
    vocabulary: str | None = None,
) -> str:
    """
    Write a checkpoint as another kind of checkpoint, with its tokenizer if it has one.

    Args:
        source: a folder, a file of d2l's, or an id on the Hub.
        folder: an empty folder.
        source_kind, target_kind: `d2l` or `bert`, one of the two; None stands for a d2l-bert model.
        num_attention_heads: of a d2l model, whose checkpoint does not say it.
        vocabulary: the file of a d2l model's `Vocab`; the default is the vocab.json beside the checkpoint.

    Returns:
        What was written, for people.

    Raises:
        UserError: the source cannot be read, the other side cannot express the model, or the outputs of the two
            differ; an argument that belongs to a d2l model is missing, or there for another one.
    """
    is_from_d2l = source_kind == "d2l"
    if is_from_d2l != bool(num_attention_heads) or (vocabulary and not is_from_d2l):
        raise UserError(
            "--from d2l needs --num_attention_heads N, and may have --vocab; other conversions have neither"
        )
    unused = []
    if not is_from_d2l:
        with reading_model(source):
            model, unused = conversion.read_model(source, (BertConfig if source_kind == "bert" else D2lBertConfig,))
            tokenizer = read_tokenizer(source, model.config) if has_tokenizer(source) else None
    with explained(f"{source}: not converted", "", ValueError):
        if is_from_d2l:
            file = vocabulary or next(Path(source).glob("vocab.json"), None)
            tokens = file and d2l_checkpoints.read_vocabulary(file)
            model = d2l_checkpoints.from_d2l(d2l_checkpoints.read_d2l(source), num_attention_heads, tokens)
            tokenizer = tokens and d2l_checkpoints.d2l_tokenizer(tokens, model.config.max_position_embeddings)
        if target_kind == "d2l":
            d2l_checkpoints.write_d2l(model, tokenizer, folder)  # and a vocab.json
        else:
            model = conversion.to_bert(model) if target_kind == "bert" else model
            conversion.save_model(model, folder)
            if tokenizer:
                save_tokenizer(tokenizer, folder)
        if "bert" in (source_kind, target_kind):
            conversion.copy_sentence_transformer(source, folder)
    name = "d2l BERTModel" if target_kind == "d2l" else type(model).__name__
    said = [f"a {name} of {model.num_parameters():,} parameters"]
    if unused:
        said.append(f"left out, as a {name} has no such weights: {', '.join(unused)}")
    if not tokenizer:
        said.append("the source brings no tokenizer, so there is none")
    return "\n".join(said)
