"""Checkpoints of the book's `BERTModel` <-> ours: the same numbers under other names.

d2l 1.0's model is `relu`, no embedding LayerNorm, untied. What one of the two cannot express is refused, never
approximated.
"""

import json
import re
import warnings
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn.parameter import is_lazy
from transformers import PreTrainedTokenizerFast

from .configuration_d2l_bert import D2lBertConfig
from .conversion import filled, module_names
from .modeling_d2l_bert import D2lBertForPreTraining


# Our modules, and the same ones elsewhere; {n} is the number of a block.
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

LAZY = "a lazy layer has no weights yet; run the net on one batch before you save its state dict"


# ---------------------------------------------------------------------------------------------------------------------
# The book's model

D2L_SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
    "mask_token": "<mask>",
}


def read_d2l(path: str | Path) -> dict[str, torch.Tensor]:
    """
    A state dict that `torch.save(net.state_dict(), path)` wrote, read without running what it may have pickled.

    Args:
        path: the file; or a folder with `pretrained.params`, as the book publishes its own.

    Raises:
        ValueError: no such file, or one that holds something else.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "pretrained.params"
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give the file of the d2l state dict, or its folder")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle's protocol: it is read or refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle of code, a file cut short, MXNet's format: each has a class of its own
        if "UninitializedParameter" in str(error):
            raise ValueError(LAZY) from None
        raise ValueError(
            "it is no PyTorch state dict; save one with torch.save(net.state_dict(), path). "
            "Whole pickled models, MXNet and TensorFlow weights cannot be read"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it holds no state dict; save one with torch.save(net.state_dict(), path)")
    return state


def from_d2l(
    state_dict: dict[str, torch.Tensor], num_attention_heads: int, tokens: list[str] | None = None
) -> D2lBertForPreTraining:
    """
    The book's `BERTModel` (section 15.8.6) as ours: same encodings, same MLM logits, NSP logits with their two
    columns exchanged, since the book's label 1 means that B follows A and Hugging Face's means that it does not.

    Args:
        state_dict: of a d2l 1.0 `BERTModel`, or of an older edition with the same names. Wrapped in `DataParallel`
            it will do; without biases in its attention, as older editions can be, too.
        num_attention_heads: the one number that the weights do not tell.
        tokens: its vocabulary in the order of the ids; it tells which one pads.

    Raises:
        ValueError: a name is missing or unknown, a shape does not fit, a lazy layer never saw a batch, or the
            vocabulary is another model's.
    """
    state = {str(name).removeprefix("module."): value for name, value in state_dict.items()}
    for name, value in state.items():
        if is_lazy(value):
            raise ValueError(f"{name}: {LAZY}")
        if not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
            raise ValueError(
                f"{name}: holds no plain numbers but {value.dtype}, {value.layout}, {value.device}; save the state "
                f"dict of the net in float32, dense, on a CPU"
            )
    blocks = [int(found[1]) for name in state if (found := re.match(r"encoder\.blks\.(\d+)\.", name))]
    theirs_of = module_names(D2L_NAMES, max(blocks, default=-1) + 1)
    without_bias = not any(re.search(r"attention\.W_.\.bias$", name) for name in state)
    wanted = [f"{module}.{leaf}" for module in theirs_of.values() for leaf in _leaves(module)]
    _refuse_other_names(state, [*wanted, D2L_POSITIONS], optional=r"attention\.W_.\.bias$" if without_bias else None)
    vocab_size, hidden_size = _sizes(state, "encoder.token_embedding.weight", 2)
    intermediate_size, _ = _sizes(state, "encoder.blks.0.ffn.dense1.weight", 2)
    type_vocab_size, _ = _sizes(state, "encoder.segment_embedding.weight", 2)
    _, max_length, _ = _sizes(state, D2L_POSITIONS, 3)
    if tokens is not None and len(tokens) != vocab_size:
        raise ValueError(
            f"the vocabulary has {len(tokens)} tokens and the model {vocab_size}: it is another model's; give the one "
            f"that this model was trained with"
        )
    if num_attention_heads > 0 and hidden_size % num_attention_heads:
        raise ValueError(
            f"its hidden size of {hidden_size} is no multiple of {num_attention_heads} heads; give as "
            f"num_attention_heads the number that the net was made with"
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
    ours = {OUR_POSITIONS: state[D2L_POSITIONS].squeeze(0)}
    for our_module, their_module in theirs_of.items():
        for leaf in _leaves(their_module):
            value = state.get(f"{their_module}.{leaf}")
            ours[f"{our_module}.{leaf}"] = torch.zeros(hidden_size) if value is None else value
    return filled(D2lBertForPreTraining(config), _with_nsp_flipped(ours))


def to_d2l(model: D2lBertForPreTraining) -> dict[str, torch.Tensor]:
    """
    The state dict of the book's `BERTModel` that computes what `model` does; `from_d2l` the other way round.

    Raises:
        ValueError: the book's model cannot express this one; it says why.
    """
    config = model.config
    reasons = {
        "it has no next sentence and masked language model heads": not isinstance(model, D2lBertForPreTraining),
        f"hidden_act is {config.hidden_act}, the book's is relu": config.hidden_act != "relu",
        "it normalises its embeddings, the book does not": config.embedding_layer_norm,
        f"layer_norm_eps is {config.layer_norm_eps}, the book's is 1e-05": config.layer_norm_eps != 1e-5,
        f"it has {config.type_vocab_size} segment types, the book 2": config.type_vocab_size != 2,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"d2l's BERTModel cannot express this model: {reason}; train one of --recipe d2l for it, or convert "
                f"this one --to bert"
            )
    state = _with_nsp_flipped(model.state_dict())
    theirs = {D2L_POSITIONS: state[OUR_POSITIONS].unsqueeze(0)}
    for our_module, their_module in module_names(D2L_NAMES, config.num_hidden_layers).items():
        for leaf in _leaves(their_module):
            theirs[f"{their_module}.{leaf}"] = state[f"{our_module}.{leaf}"].clone()  # a tied matrix becomes two
    return theirs


def write_d2l(model: D2lBertForPreTraining, tokenizer, folder: Path) -> None:
    """Write `pretrained.params` and `vocab.json`, the two files that the book loads its own BERT from (16.7.1)."""
    torch.save(to_d2l(model), folder / "pretrained.params")
    if tokenizer is not None:
        tokens = d2l_vocabulary(tokenizer)
        tokens += [f"<unused-{index}>" for index in range(len(tokens), model.config.vocab_size)]
        (folder / "vocab.json").write_text(json.dumps(tokens))


def read_vocabulary(path: str | Path) -> list[str]:
    """
    The tokens of a d2l `Vocab`, in the order of their ids.

    Args:
        path: `idx_to_token` as a JSON list, `token_to_idx` as a JSON object, or text with a token a line.

    Raises:
        ValueError: no such file, or one that holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        tokens = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: the vocabulary cannot be read ({error.strerror}); give a file of tokens") from None
    except (ValueError, RecursionError):
        raise ValueError(
            f"{path}: the vocabulary is neither JSON nor UTF-8 text; save its idx_to_token with json.dump"
        ) from None
    if isinstance(tokens, dict) and sorted(tokens.values(), key=str) == sorted(range(len(tokens)), key=str):
        tokens = sorted(tokens, key=tokens.get)
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token.strip() for token in tokens):
        raise ValueError(
            f"{path}: a vocabulary is a list of tokens in the order of their ids, none of them empty; save its "
            f"idx_to_token with json.dump"
        )
    for index, token in enumerate(tokens):
        if any("\ud800" <= character <= "\udfff" for character in token):
            raise ValueError(
                f"{path}: token {index}, {ascii(token)}, holds half of a character (a surrogate); write the whole "
                f"character there"
            )
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise ValueError(
            f"{path}: the token {twice[0]!r} stands in the vocabulary twice; save the idx_to_token of the model's own "
            f"Vocab, which has each token once"
        )
    return tokens


def d2l_tokenizer(tokens: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """
    A tokenizer with the ids of a d2l `Vocab` (section 15.9): words between white space, lower case if all tokens are.

    Args:
        tokens: in the order of their ids. `<pad>`, `<unk>`, `<cls>`, `<sep>` and `<mask>` are found by name.
        max_length: longest sequence, in tokens.

    Raises:
        ValueError: one of the five is not there.
    """
    for token in D2L_SPECIAL_TOKENS.values():
        if token not in tokens:
            raise ValueError(
                f"the vocabulary makes no tokenizer, since it has no {token}; "
                f"leave it out to convert the weights alone"
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


def d2l_vocabulary(tokenizer) -> list[str]:
    """
    The tokens of any of our tokenizers for a d2l `Vocab`: in the order of their ids, the special ones by d2l's names.

    Raises:
        ValueError: a token that is not special has the name of one of d2l's.
    """
    ids = tokenizer.get_vocab()
    renamed = {getattr(tokenizer, role): name for role, name in D2L_SPECIAL_TOKENS.items()}
    tokens = [renamed.get(token, token) for token in sorted(ids, key=ids.get)]
    if len(set(tokens)) < len(tokens):
        raise ValueError(
            f"the vocabulary has an ordinary token with one of d2l's names, {', '.join(renamed.values())}; rename it "
            f"in tokenizer.json, or convert the model --to bert"
        )
    return tokens


def _with_nsp_flipped(state):
    return {name: value.flip(0) if name.startswith("nsp.") else value for name, value in state.items()}


def _sizes(state, name, dimensions):
    shape = tuple(state[name].shape)
    if len(shape) != dimensions:
        raise ValueError(
            f"{name}: has shape {shape}, and in a d2l BERTModel {dimensions} dimensions; give the state dict of its "
            f"BERTModel"
        )
    return shape


def _refuse_other_names(state, wanted, optional=None):
    for name in wanted:
        if name not in state and not (optional and re.search(optional, name)):
            raise ValueError(
                f"{name} is not in the state dict: it is not one of a d2l BERTModel; give that of its BERTModel"
            )
    for name in state:
        if name not in wanted:
            raise ValueError(f"{name}: a d2l BERTModel has no weight of this name; give that of its BERTModel")


def _leaves(module):
    return ("weight",) if module.endswith("embedding") else ("weight", "bias")
