"""Converts the book's `BERTModel` to a d2l-bert model and back: the same weights under other names.

The model of d2l 1.0 has `relu`, no LayerNorm after the embeddings, and an untied decoder. A model that the other side
cannot express is refused, never approximated.
"""

import json
import re
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .configuration_d2l_bert import D2lBertConfig
from .conversion import filled, module_names
from .modeling_d2l_bert import D2lBertForPreTraining


# Names of modules in d2l-bert and in the book's model; {n} is the number of a block.
D2L_NAMES = (
    ("bert.embeddings.word_embeddings", "encoder.token_embedding"),
    ("bert.embeddings.token_type_embeddings", "encoder.segment_embedding"),
    ("bert.encoder.layer.{n}.attention.query", "encoder.blks.{n}.attention.W_q"),
    ("bert.encoder.layer.{n}.attention.key", "encoder.blks.{n}.attention.W_k"),
    ("bert.encoder.layer.{n}.attention.value", "encoder.blks.{n}.attention.W_v"),
    ("bert.encoder.layer.{n}.attention.output", "encoder.blks.{n}.attention.W_o"),
    ("bert.encoder.layer.{n}.addnorm1.LayerNorm", "encoder.blks.{n}.addnorm1.ln"),
    ("bert.encoder.layer.{n}.ffn.dense1", "encoder.blks.{n}.ffn.dense1"),
    ("bert.encoder.layer.{n}.ffn.dense2", "encoder.blks.{n}.ffn.dense2"),
    ("bert.encoder.layer.{n}.addnorm2.LayerNorm", "encoder.blks.{n}.addnorm2.ln"),
    ("bert.pooler.dense", "hidden.0"),
    ("mlm.dense", "mlm.mlp.0"),
    ("mlm.LayerNorm", "mlm.mlp.2"),
    ("mlm.decoder", "mlm.mlp.3"),
    ("nsp.output", "nsp.output"),
)
OUR_POSITIONS, D2L_POSITIONS = "bert.embeddings.position_embeddings.weight", "encoder.pos_embedding"

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

    Raises:
        ValueError: there is no such file, or the file is not a state dict.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "pretrained.params"
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give the file of the d2l state dict, or its folder")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of unusual pickle protocols
            state = torch.load(path, map_location="cpu", weights_only=True)
        if all(isinstance(value, torch.Tensor) for value in state.values()):
            return state
    except Exception:  # pickled code, a truncated file and MXNet's format raise different exceptions
        pass
    raise ValueError(
        "it is not a PyTorch state dict of tensors; run the net on one batch, and save it with "
        "torch.save(net.state_dict(), path). Whole pickled models, MXNet and TensorFlow weights cannot be read"
    )


def from_d2l(
    state_dict: dict[str, torch.Tensor], num_attention_heads: int, tokens: list[str] | None = None
) -> D2lBertForPreTraining:
    """
    Convert the book's `BERTModel` (section 15.8.6) to a d2l-bert model.

    Hidden states and MLM logits stay the same. The two columns of the NSP logits are exchanged: label 1 means that B
    follows A in the book, and that B does not follow A in Hugging Face's BERT.

    Args:
        state_dict: of the `BERTModel` of d2l 1.0, or of an older edition with the same names. The model may have been
            wrapped in `DataParallel`. The attention may have no biases, as in older editions; they become 0.
        num_attention_heads: the heads of the model, the only number that the weights do not show.
        tokens: the model's vocabulary in the order of the ids; `<pad>` gives the `pad_token_id`.

    Raises:
        ValueError: a name is missing or unknown, a shape does not fit, a lazy layer has no weights yet, or the
            vocabulary belongs to another model.
    """
    state = {str(name).removeprefix("module."): value for name, value in state_dict.items()}
    blocks = [int(found[1]) for name in state if (found := re.match(r"encoder\.blks\.(\d+)\.", name))]
    names = _names_of_weights(max(blocks, default=-1) + 1)
    without_bias = {name for name in names if re.search(r"attention\.W_.\.bias$", name)}
    if without_bias & state.keys():
        without_bias = set()
    try:
        different = sorted((names.keys() ^ state.keys()) - without_bias)
        if different:
            raise ValueError(f"{different[0]} is only in one of both")
        vocab_size, hidden_size = state["encoder.token_embedding.weight"].shape
        intermediate_size, _ = state["encoder.blks.0.ffn.dense1.weight"].shape
        type_vocab_size, _ = state["encoder.segment_embedding.weight"].shape
        _, max_length, _ = state[D2L_POSITIONS].shape
    except (KeyError, ValueError, RuntimeError) as error:  # RuntimeError: a lazy layer without weights
        raise ValueError(
            f"its weights are not those of a d2l BERTModel ({error}); give the state dict of one that has seen a batch"
        ) from None
    if tokens is not None and len(tokens) != vocab_size:
        raise ValueError(
            f"the vocabulary has {len(tokens)} tokens and the model has {vocab_size}; give the vocabulary that the "
            f"model was trained with"
        )
    config = D2lBertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=len(set(blocks)),
        num_attention_heads=num_attention_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_length,
        type_vocab_size=type_vocab_size,
        pad_token_id=tokens.index("<pad>") if tokens and "<pad>" in tokens else None,
    )
    state |= {name: torch.zeros(hidden_size) for name in without_bias}
    state[D2L_POSITIONS] = state[D2L_POSITIONS].squeeze(0)
    ours = {names[name]: value for name, value in state.items()}
    return filled(D2lBertForPreTraining(config), _with_nsp_flipped(ours))


def to_d2l(model: D2lBertForPreTraining) -> dict[str, torch.Tensor]:
    """
    The state dict of the book's `BERTModel` that computes the same as `model`: the inverse of `from_d2l`.

    Raises:
        ValueError: the book's `BERTModel` cannot express this model, for the reason in the message.
    """
    config = model.config
    reasons = {
        "this model lacks the MLM head or the NSP head": not isinstance(model, D2lBertForPreTraining),
        f"hidden_act is {config.hidden_act}, in the book relu": config.hidden_act != "relu",
        "this model normalises the embeddings, the book does not": config.embedding_layer_norm,
        f"layer_norm_eps is {config.layer_norm_eps}, in the book 1e-05": config.layer_norm_eps != 1e-5,
        f"this model has {config.type_vocab_size} segment types, the book 2": config.type_vocab_size != 2,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"d2l's BERTModel cannot express this model: {reason}; train a model with --recipe d2l, or convert "
                f"this model --to bert"
            )
    state = _with_nsp_flipped(model.state_dict())
    # Cloned, so that a tied matrix becomes two matrices.
    theirs = {name: state[ours].clone() for name, ours in _names_of_weights(config.num_hidden_layers).items()}
    return {**theirs, D2L_POSITIONS: theirs[D2L_POSITIONS].unsqueeze(0)}


def write_d2l(model: D2lBertForPreTraining, tokenizer, folder: Path) -> None:
    """
    Write `pretrained.params` and `vocab.json`, the two files that section 16.7.1 of the book loads a BERT from.

    Args:
        tokenizer: the model's tokenizer, whose tokens become `vocab.json` in the order of their ids, the special ones
            under d2l's names; None to leave out `vocab.json`.

    Raises:
        ValueError: d2l cannot express the model, or an ordinary token has the name of one of d2l's special tokens.
    """
    torch.save(to_d2l(model), folder / "pretrained.params")
    if tokenizer is not None:
        ids = tokenizer.get_vocab()
        new_names = {getattr(tokenizer, role): name for role, name in D2L_SPECIAL_TOKENS.items()}
        tokens = [new_names.get(token, token) for token in sorted(ids, key=ids.get)]
        if len(set(tokens)) < len(tokens):
            raise ValueError(
                f"the vocabulary has an ordinary token with the name of a special token of d2l "
                f"({', '.join(new_names.values())}); rename the token in tokenizer.json, or convert the model "
                f"--to bert"
            )
        tokens += [f"<unused-{index}>" for index in range(len(tokens), model.config.vocab_size)]
        (folder / "vocab.json").write_text(json.dumps(tokens))


def read_vocabulary(path: str | Path) -> list[str]:
    """
    The tokens of a d2l `Vocab`, in the order of their ids.

    Args:
        path: a .json file with `idx_to_token` (a list), or a text file with one token per line.

    Raises:
        ValueError: there is no such file, or the file is not a vocabulary.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        tokens = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
        json.dumps(tokens, ensure_ascii=False).encode()  # raises if a token has half of a character (a surrogate)
        if isinstance(tokens, list) and all(token.strip() for token in tokens) and len(set(tokens)) == len(tokens):
            return tokens
        reason = "a token is empty, or stands there twice"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = error
    raise ValueError(
        f"{path}: no list of tokens in the order of their ids, as JSON or a line each ({reason}); save the Vocab's "
        f"idx_to_token with json.dump"
    )


def d2l_tokenizer(tokens: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """
    A tokenizer with the ids of a d2l `Vocab` (section 15.9).

    The tokenizer splits text at white space. It converts text to lower case if all tokens are in lower case.

    Args:
        tokens: in the order of their ids, with `<pad>`, `<unk>`, `<cls>`, `<sep>` and `<mask>`.
        max_length: longest sequence, in tokens.

    Raises:
        ValueError: one of the five special tokens is missing.
    """
    for token in D2L_SPECIAL_TOKENS.values():
        if token not in tokens:
            raise ValueError(
                f"the vocabulary has no {token}, which the tokenizer needs; convert without a vocabulary to get the "
                f"weights alone"
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


def _with_nsp_flipped(state):
    """A state dict with the two labels of the NSP head exchanged."""
    return {name: value.flip(0) if name.startswith("nsp.") else value for name, value in state.items()}


def _names_of_weights(layers):
    """The names of our weights by those of the book's model, for a number of blocks."""
    names = {D2L_POSITIONS: OUR_POSITIONS}
    for ours, theirs in module_names(D2L_NAMES, layers).items():
        for parameter in ("weight",) if theirs.endswith("embedding") else ("weight", "bias"):
            names[f"{theirs}.{parameter}"] = f"{ours}.{parameter}"
    return names
