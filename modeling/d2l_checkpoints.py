"""Converts the book's `BERTModel` to a d2l-bert model and back: the same weights under other names.

The model of d2l 1.0 has `relu`, no LayerNorm after the embeddings, and an untied decoder. A model that the other side
cannot express is refused, never approximated.
"""

import json
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from d2l_bert.messages import READ_ERRORS, UserError, explained, shortened
from d2l_bert.tokenization.wordpiece import pieces

from .configuration_d2l_bert import D2lBertConfig
from .conversion import check_finite, renamed
from .modeling_d2l_bert import D2lBertForPreTraining


# Parts of the names of weights in d2l-bert and in the book's model, for `renamed`; others are the same in both.
D2L_NAMES = (
    ("bert.embeddings.word_embeddings.", "encoder.token_embedding."),
    ("bert.embeddings.token_type_embeddings.", "encoder.segment_embedding."),
    ("bert.embeddings.position_embeddings.weight", "encoder.pos_embedding"),
    ("bert.encoder.layer.", "encoder.blks."),
    (".attention.query.", ".attention.W_q."),
    (".attention.key.", ".attention.W_k."),
    (".attention.value.", ".attention.W_v."),
    (".attention.output.", ".attention.W_o."),
    (".addnorm1.LayerNorm.", ".addnorm1.ln."),
    (".addnorm2.LayerNorm.", ".addnorm2.ln."),
    ("bert.pooler.dense.", "hidden.0."),
    ("mlm.dense.", "mlm.mlp.0."),
    ("mlm.LayerNorm.", "mlm.mlp.2."),
    ("mlm.decoder.", "mlm.mlp.3."),
)
POSITIONS = "encoder.pos_embedding"  # (1, T, H) there, (T, H) here

D2L_SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
    "mask_token": "<mask>",
}


def read_d2l(path: str | Path) -> dict[str, torch.Tensor]:
    """
    Read a state dict that `torch.save(net.state_dict(), path)` wrote, without running pickled code.

    Args:
        path: the file, or a folder with a file `pretrained.params`, as in the download of the book's BERT.

    Returns:
        The weights by their names in the `BERTModel`, which may have been wrapped in `DataParallel`.

    Raises:
        UserError: there is no such file, the file is not a state dict, or its weights have more bytes than the file.
    """
    path = Path(path, "pretrained.params") if Path(path).is_dir() else Path(path)
    way_out = "run the net on one batch, and save it with torch.save(net.state_dict(), path)"
    if not path.is_file():
        raise UserError(f"it is not a PyTorch state dict of tensors (No such file: {path}); {way_out}")
    # Pickled code, a truncated file, whole models and MXNet's format raise different exceptions. PyTorch's words for
    # them advise to run the code.
    if zipfile.is_zipfile(path):
        _refuse_packed(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        state = None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(
            f"it is not a PyTorch state dict of tensors (damaged, or other objects; code is never run); {way_out}"
        )
    state = {str(name).removeprefix("module."): value for name, value in state.items()}
    _check_bytes(state, path.stat().st_size)
    return state


def _refuse_packed(path):
    """Refuse a file that PyTorch has not written, in which a few bytes may be unpacked to gigabytes of zeros."""
    try:
        with zipfile.ZipFile(path) as opened:
            unpacked = sum(entry.file_size for entry in opened.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return  # PyTorch cannot read it either
    if unpacked > path.stat().st_size:
        raise UserError(f"it is packed, to {unpacked:,} bytes of weights; give the file that torch.save wrote")


# How many times the bytes of the weights may be in the file: a net may hold a weight under two names.
MOST_NAMES = 2


def _check_bytes(state, size):
    """
    Hold the weights against the bytes of their file, before any is copied: a view of one number, repeated, has any
    shape.
    """
    needed = 0
    for name, value in state.items():
        needed += value.numel() * value.element_size()
        if needed > MOST_NAMES * size:
            raise UserError(
                f"{shortened(name, 200)} has more numbers than the file holds ({size:,} bytes); save the net's own "
                f"weights, which are no views of others"
            )


def from_d2l(
    state: dict[str, torch.Tensor], num_attention_heads: int, tokens: list[str] | None = None
) -> D2lBertForPreTraining:
    """
    Convert the book's `BERTModel` (section 15.8.6) to a d2l-bert model.

    Hidden states and MLM logits stay the same. The two columns of the NSP logits are exchanged: label 1 means that B
    follows A in the book, and that B does not follow A in Hugging Face's BERT.

    Args:
        state: of the `BERTModel` of d2l 1.0, or of an older edition with the same names. The attention may have no
            biases, as in older editions; they become 0.
        num_attention_heads: the heads of the model, the only number that the weights do not show.
        tokens: the model's vocabulary in the order of the ids; `<pad>` gives the `pad_token_id`.

    Raises:
        ValueError: a weight is missing, unknown, not finite or of another shape, a lazy layer has no weights yet, the
            vocabulary belongs to another model, or a size of the model is out of range.
    """
    # KeyError: a weight is missing; RuntimeError: a lazy layer has no shape yet, or weights do not fit the model
    with explained(
        "its weights are not those of a d2l BERTModel",
        "give the state dict of a net that has seen a batch",
        LookupError,
        RuntimeError,
    ):
        embedding = state["encoder.token_embedding.weight"]
        if tokens and len(tokens) != embedding.shape[0]:
            raise UserError(
                f"the vocabulary has {len(tokens)} tokens and the model has {embedding.shape[0]}; give the vocabulary "
                f"that the model was trained with"
            )
        layers = sum(name.endswith("attention.W_q.weight") for name in state)
        intermediate_size = state["encoder.blks.0.ffn.dense1.weight"].shape[0]
        positions = state[POSITIONS].shape[1]
        segments = state["encoder.segment_embedding.weight"].shape[0]
        config = D2lBertConfig(
            vocab_size=embedding.shape[0],
            hidden_size=embedding.shape[1],
            num_hidden_layers=layers,
            num_attention_heads=num_attention_heads,
            intermediate_size=intermediate_size,
            max_position_embeddings=positions,
            type_vocab_size=segments,
            pad_token_id=tokens.index("<pad>") if tokens and "<pad>" in tokens else None,
        )
        if not any(name.endswith("attention.W_q.bias") for name in state):
            biases = {}
            for name, weight in state.items():
                if ".attention.W_" in name:
                    biases[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
            state = state | biases
        for name, value in state.items():
            if value.dtype != embedding.dtype:
                raise UserError(f"{name} would not come back as it was; save all weights in one precision")
        model = D2lBertForPreTraining(config).to(embedding.dtype).eval()
        ours = _with_nsp_exchanged(state | {POSITIONS: state[POSITIONS].squeeze(0)})
        model.load_state_dict(renamed(ours, D2L_NAMES, back=True))
        check_finite(model)
    return model


def to_d2l(model: D2lBertForPreTraining) -> dict[str, torch.Tensor]:
    """
    The state dict of the book's `BERTModel` that computes the same as `model`: the inverse of `from_d2l`.

    Raises:
        UserError: the book's `BERTModel` cannot express this model, for the reason in the message.
    """
    config = model.config
    cannot = "d2l's BERTModel cannot express this model: "
    way_out = "; train a model with --recipe d2l"
    if not isinstance(model, D2lBertForPreTraining):
        raise UserError(f"{cannot}it lacks the MLM head or the NSP head{way_out}")
    if config.hidden_act != "relu":
        raise UserError(f"{cannot}hidden_act is {config.hidden_act}, in the book relu{way_out}")
    if config.embedding_layer_norm:
        raise UserError(f"{cannot}it normalises the embeddings, the book does not{way_out}")
    if config.layer_norm_eps != 1e-5:
        raise UserError(f"{cannot}layer_norm_eps is {config.layer_norm_eps}, in the book 1e-05{way_out}")
    if config.type_vocab_size != 2:
        raise UserError(f"{cannot}it has {config.type_vocab_size} segment types, the book 2{way_out}")
    state = renamed(_with_nsp_exchanged(model.state_dict()), D2L_NAMES)
    return state | {POSITIONS: state[POSITIONS].unsqueeze(0)}


def _with_nsp_exchanged(state):
    """A state dict with the two labels of the NSP head exchanged, whose names are the same in both models."""
    return {name: value.flip(0) if name.startswith("nsp.") else value for name, value in state.items()}


def write_d2l(model: D2lBertForPreTraining, tokenizer, folder: Path) -> None:
    """
    Write `pretrained.params` and `vocab.json`, the two files that section 16.7.1 of the book loads a BERT from.

    Args:
        tokenizer: the model's tokenizer, whose tokens become `vocab.json` in the order of their ids, the special ones
            under d2l's names; None to leave out `vocab.json`.

    Raises:
        UserError: d2l cannot express the model, or an ordinary token has the name of one of d2l's special tokens.
    """
    torch.save(to_d2l(model), folder / "pretrained.params")
    if tokenizer is None:
        return
    new_names = {getattr(tokenizer, role): name for role, name in D2L_SPECIAL_TOKENS.items()}
    tokens = [new_names.get(token, token) for token in pieces(tokenizer)]
    if len(set(tokens)) < len(tokens):
        raise UserError(
            f"the vocabulary has an ordinary token with the name of a special token of d2l "
            f"({', '.join(new_names.values())}); rename the token in tokenizer.json"
        )
    tokens += [f"<unused-{index}>" for index in range(len(tokens), model.config.vocab_size)]
    (folder / "vocab.json").write_text(json.dumps(tokens))


def read_vocabulary(path: str | Path) -> list[str]:
    """
    The tokens of a d2l `Vocab`, in the order of their ids.

    Args:
        path: a .json file with `idx_to_token` (a list), or a text file with one token per line.

    Raises:
        UserError: there is no such file, or the file is not a vocabulary.
    """
    with explained(
        f"{path}: no list of tokens in the order of their ids, as JSON or a line each",
        "save the Vocab's idx_to_token with json.dump",
        *READ_ERRORS,
        TypeError,
        AttributeError,
    ):
        text = Path(path).read_text(encoding="utf-8-sig")
        tokens = json.loads(text) if Path(path).suffix == ".json" else text.removesuffix("\n").split("\n")
        is_list = isinstance(tokens, list) and all(token.strip() for token in tokens)
        if not is_list or len(set(tokens)) < len(tokens):
            raise UserError("a token is empty, or stands there twice")
        return tokens


def d2l_tokenizer(tokens: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """
    A tokenizer with the ids of a d2l `Vocab` (section 15.9).

    The tokenizer splits text at white space. It converts text to lower case if all tokens are in lower case.

    Args:
        tokens: in the order of their ids, with `<pad>`, `<unk>`, `<cls>`, `<sep>` and `<mask>`.
        max_length: longest sequence, in tokens.

    Raises:
        UserError: one of the five special tokens is missing.
    """
    missing = sorted({*D2L_SPECIAL_TOKENS.values()} - {*tokens})
    if missing:
        raise UserError(
            f"the vocabulary has no {', '.join(missing)}, which the tokenizer needs; convert without a vocabulary to "
            f"get the weights alone"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    if all(token == token.lower() for token in tokens):
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(token, ids[token]) for token in ("<cls>", "<sep>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **D2L_SPECIAL_TOKENS,
    )
