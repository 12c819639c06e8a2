"""Checkpoints of the book's `BERTModel` and of stock BERT <-> ours: the same numbers under other names.

Three models compute the same thing where their settings meet. d2l 1.0's is `relu`, no embedding LayerNorm, untied;
stock BERT's normalises its embeddings. What one of them cannot express is refused, never approximated.
"""

import functools
import json
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn.parameter import is_lazy
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file, logging

from . import modeling_d2l_bert
from .configuration_d2l_bert import ACTIVATIONS, D2lBertConfig
from .modeling_d2l_bert import D2lBertForMultipleChoice, D2lBertForPreTraining, D2lBertModel, D2lBertPreTrainedModel


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
BERT_NAMES = (
    ("embeddings.word_embeddings", "embeddings.word_embeddings"),
    ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings"),
    ("embeddings.position_embeddings", "embeddings.position_embeddings"),
    ("embeddings.LayerNorm", "embeddings.LayerNorm"),
    ("encoder.layer.{n}.attention.query", "encoder.layer.{n}.attention.self.query"),
    ("encoder.layer.{n}.attention.key", "encoder.layer.{n}.attention.self.key"),
    ("encoder.layer.{n}.attention.value", "encoder.layer.{n}.attention.self.value"),
    ("encoder.layer.{n}.attention.output", "encoder.layer.{n}.attention.output.dense"),
    ("encoder.layer.{n}.addnorm1.LayerNorm", "encoder.layer.{n}.attention.output.LayerNorm"),
    ("encoder.layer.{n}.ffn.dense1", "encoder.layer.{n}.intermediate.dense"),
    ("encoder.layer.{n}.ffn.dense2", "encoder.layer.{n}.output.dense"),
    ("encoder.layer.{n}.addnorm2.LayerNorm", "encoder.layer.{n}.output.LayerNorm"),
    ("pooler.dense", "pooler.dense"),
    ("mlm.dense", "cls.predictions.transform.dense"),
    ("mlm.LayerNorm", "cls.predictions.transform.LayerNorm"),
    ("mlm.decoder", "cls.predictions.decoder"),
    ("nsp.output", "cls.seq_relationship"),
    ("classifier", "classifier"),
    ("qa_outputs", "qa_outputs"),
)
PRETRAINING_PARTS = ("cls.predictions", "cls.seq_relationship", "bert.pooler")
BIASES = {"cls.predictions.bias", "cls.predictions.decoder.bias"}
SENTENCE_TRANSFORMER_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
# Heads that one checkpoint may hold together, whichever of them it is named after.
PRETRAINED = ("BertModel", "BertForMaskedLM", "BertForNextSentencePrediction", "BertForPreTraining")
ANEW = "save the model there again with save_pretrained, or copy its files anew"
OTHER_BERT = "give another BERT, or use this one with Transformers as it is"
LAZY = "a lazy layer has no weights yet; run the net on one batch before you save its state dict"
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")
D2L_SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
    "mask_token": "<mask>",
}


# ---------------------------------------------------------------------------------------------------------------------
# The book's model


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
                f"dict of the net in float32, dense, on a processor"
            )
    blocks = [int(found[1]) for name in state if (found := re.match(r"encoder\.blks\.(\d+)\.", name))]
    theirs_of = _names(D2L_NAMES, max(blocks, default=-1) + 1)
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
    return _filled(D2lBertForPreTraining(config), _with_nsp_flipped(ours))


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
    for our_module, their_module in _names(D2L_NAMES, config.num_hidden_layers).items():
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


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT


def read_bert(name: str) -> tuple[PreTrainedModel, list[str]]:
    """
    A stock BERT with all the heads that its checkpoint holds.

    Args:
        name: a folder or an id on the Hub; `model.safetensors` or `pytorch_model.bin`, of which only tensors are read.

    Returns:
        The model, and the names in the checkpoint that it has no place for.

    Raises:
        ValueError: it is not a BERT, or holds no weights that PyTorch reads.
        OSError: nothing there.
    """
    folder = Path(name)
    if folder.is_file():
        raise ValueError("it is a file; give the folder that holds it and its config.json")
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(
            "it holds no model.safetensors and no pytorch_model.bin, and TensorFlow weights are not read; save the "
            "model there from PyTorch with save_pretrained"
        )
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not isinstance(config, BertConfig):
        mend = "it is ours already, so take it as it is" if isinstance(config, D2lBertConfig) else "give a stock BERT"
        raise ValueError(f"it is a {config.model_type} model, not a bert one; {mend}")
    _bert_numbers(config)  # what we cannot be is refused before gigabytes are read
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    if _our_class(model_class) is None or model_class.__name__ in PRETRAINED:
        model_class = BertForPreTraining  # it shows which heads there are
    model, missing, unexpected = load_and_compare(model_class, name)
    if model_class is BertForPreTraining:
        without_mlm, without_nsp, without_pooler = (lacks(model, missing, part) for part in PRETRAINING_PARTS)
        if without_mlm or without_nsp:
            heads = {(True, False): "ForNextSentencePrediction", (False, True): "ForMaskedLM", (True, True): "Model"}
            model_class = getattr(transformers, "Bert" + heads[without_mlm, without_nsp])
            options = {"add_pooling_layer": False} if without_mlm and without_nsp and without_pooler else {}
            model, missing, unexpected = load_and_compare(model_class, name, **options)
    if BIASES <= set(dict(model.named_parameters(remove_duplicate=False))) and len(missing & BIASES) == 1:
        # One bias under two names, of which only one was saved.
        predictions = model.cls.predictions
        kept = predictions.bias if "cls.predictions.decoder.bias" in missing else predictions.decoder.bias
        predictions.bias = predictions.decoder.bias = kept
        missing -= BIASES
    if missing:
        raise ValueError(f"it has no weights for {sorted(missing)[0]}; {ANEW}")
    for key in sorted(unexpected):
        if re.match(r"(bert\.)?(encoder\.layer|embeddings)\.", key):
            raise ValueError(
                f"its config.json has no place for {key}: it is another model's; put back the one that was saved with "
                f"the weights"
            )
    return model, sorted(unexpected)


def read_ours(name: str) -> D2lBertPreTrainedModel:
    """
    A model of ours with the heads that it was saved with.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        ValueError: it is another model.
        OSError: nothing there.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    model_class = getattr(modeling_d2l_bert, (config.architectures or ["D2lBertForPreTraining"])[0], None)
    if not isinstance(config, D2lBertConfig) or model_class is None:
        mend = "give a model of d2l-bert"
        if isinstance(config, BertConfig):
            mend = "it is stock BERT already, and --from bert makes it ours"
        if isinstance(config, D2lBertConfig):
            raise ValueError(
                f"its config.json names a class that d2l-bert has not, {config.architectures[0]}; put back the one "
                f"that was saved with the weights"
            )
        raise ValueError(f"it is a {config.model_type} model, not a d2l-bert one; {mend}")
    model, missing, _ = load_and_compare(model_class, name)
    if model_class is D2lBertModel and lacks(model, missing, "pooler"):
        model, missing, _ = load_and_compare(model_class, name, add_pooling_layer=False)
    if missing:
        raise ValueError(f"it has no weights for {sorted(missing)[0]}; {ANEW}")
    return model


def has_tokenizer(name: str) -> bool:
    """Whether a tokenizer lies beside a model, in a folder or on the Hub."""
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in TOKENIZER_FILES)


def stock_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    A tokenizer of one of Transformers' own classes. Code that lies beside it is never run.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        ValueError: its class is not one of Transformers', but is defined by that code.
        Exception: whatever `AutoTokenizer` raises for what it cannot load.
    """
    settings = get_tokenizer_config(name)
    # Transformers would load such a tokenizer in a class of its own choice wherever it knows the model beside it.
    if settings.get("auto_map") and not hasattr(transformers, settings.get("tokenizer_class") or ""):
        raise ValueError(
            "auto_map in its tokenizer_config.json asks for code of its own, which is never run; give a stock "
            "BertTokenizer"
        )
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    tokenizer.init_kwargs.pop("auto_map", None)  # it would be saved again, without the code that it names
    return tokenizer


def read_tokenizer(name: str, config):
    """
    The tokenizer beside a model, or None if there is none.

    Raises:
        ValueError: it has tokens that the model does not have.
    """
    if not has_tokenizer(name):
        return None
    try:
        tokenizer = stock_tokenizer(name)
    except Exception as error:  # each kind of damage has a class of its own
        raise ValueError(
            f"its tokenizer cannot be read ({str(error):.150}); put back the model's own, or take it out"
        ) from None
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the model's own, "
            f"or take it out"
        )
    return tokenizer


def copy_sentence_transformer(name: str, folder: Path) -> None:
    """
    Copy what makes a sentence-transformers model of an encoder (pooling, lengths, prompts), if `name` brings it.

    Raises:
        ValueError: its list of modules is damaged, or names a place that is not below it.
    """
    listed = cached_file(name, "modules.json", _raise_exceptions_for_missing_entries=False)
    if listed is None:
        return
    try:
        parts = [module["path"] for module in json.loads(Path(listed).read_text(encoding="utf-8")) if module["path"]]
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            "its modules.json is no list of sentence-transformers modules; put back the one that was saved, or take "
            "it out"
        ) from None
    for part in parts:
        if not isinstance(part, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", part):
            raise ValueError(
                f"its modules.json names {part!r}, which is no folder below it; put back the one that was saved, or "
                f"take it out"
            )
    patterns = [*SENTENCE_TRANSFORMER_FILES, *(f"{part}/*" for part in parts)]
    source = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=patterns))
    for file in SENTENCE_TRANSFORMER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    for part in parts:
        if (source / part).is_dir():  # a module without numbers of its own, such as Normalize, need not have one
            shutil.copytree(source / part, folder / part, dirs_exist_ok=True)


def from_bert(model: PreTrainedModel) -> D2lBertPreTrainedModel:
    """
    A stock BERT as ours, with the same head; the weights are the same numbers, bit for bit.

    Raises:
        ValueError: a BERT that our switches cannot express; it says why.
    """
    our_class = _our_class(type(model))
    if our_class is None:
        raise ValueError(f"{type(model).__name__} is none of the BERTs that d2l-bert has; {OTHER_BERT}")
    config = D2lBertConfig(
        **{**_bert_numbers(model.config), "tie_word_embeddings": _is_tied(model)},
        embedding_layer_norm=True,
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        problem_type=model.config.problem_type,
    )
    ours = our_class(config, **_pooling(model))
    return _filled(
        ours,
        _renamed(model, {theirs: our for our, theirs in _bert_names(our_class, config.num_hidden_layers).items()}),
    )


def to_bert(model: D2lBertPreTrainedModel) -> PreTrainedModel:
    """
    Ours as a stock BERT, usable where no code of ours is; the weights are the same numbers, bit for bit.

    Raises:
        ValueError: stock BERT cannot express this model.
    """
    if not model.config.embedding_layer_norm:
        raise ValueError(
            "stock BERT cannot express this model: it normalises the sum of the embeddings, which this one does not "
            "(embedding_layer_norm is false); load it with d2l_bert or trust_remote_code=True"
        )
    shared = [name for name in D2lBertConfig.__annotations__ if name != "embedding_layer_norm"]
    config = BertConfig(
        **{**{name: getattr(model.config, name) for name in shared}, "tie_word_embeddings": _is_tied(model)},
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        problem_type=model.config.problem_type,
    )
    bert = getattr(transformers, type(model).__name__.removeprefix("D2l"))(config, **_pooling(model))
    state = _renamed(model, _bert_names(type(model), config.num_hidden_layers))
    if "cls.predictions.decoder.bias" in state:  # stock BERT has it under two names
        state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    return _filled(bert, state)


def _our_class(bert_class):
    if bert_class is None or not bert_class.__name__.startswith("Bert"):
        return None
    return getattr(modeling_d2l_bert, "D2l" + bert_class.__name__, None)


def _bert_numbers(config):
    """The fields of ours that a BertConfig has too, if ours mean the same."""
    if config.is_decoder or config.add_cross_attention:
        raise ValueError(
            f"this BERT is a decoder (is_decoder, add_cross_attention), and d2l-bert has encoders only; {OTHER_BERT}"
        )
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise ValueError(
            f"this BERT has {positions} position embeddings, and d2l-bert has absolute ones only; {OTHER_BERT}"
        )
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"this BERT has hidden_act {config.hidden_act}, and d2l-bert has {', '.join(ACTIVATIONS)} only; "
            f"{OTHER_BERT}"
        )
    numbers = {name: getattr(config, name) for name in D2lBertConfig.__annotations__ if hasattr(config, name)}
    D2lBertConfig(**numbers)  # refuses numbers that no BERT has
    return numbers


def load_and_compare(model_class, name: str, **options) -> tuple[PreTrainedModel, set[str], set[str]]:
    """
    `from_pretrained` without its report: the model, the names that the checkpoint lacks, and those it has too many.

    Raises:
        ValueError: a weight of another shape than the configuration says.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        model, report = model_class.from_pretrained(name, output_loading_info=True, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            "a weight has another shape than its config.json says; put back the config.json that was saved with it"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    return model, set(report["missing_keys"]), set(report["unexpected_keys"])


def lacks(model: PreTrainedModel, missing: set[str], part: str) -> bool:
    """Whether all weights of a part are missing."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(f"{part}.")}
    tied = {name for name in names if name.endswith("decoder.weight")} if _is_tied(model) else set()
    return names - tied <= missing


def _is_tied(model):
    """Whether the decoder is the embedding; where there is no decoder, whether the configuration says so."""
    decoder = model.get_output_embeddings()
    if decoder is None:
        return model.config.tie_word_embeddings
    return decoder.weight is model.get_input_embeddings().weight


def _pooling(model):
    has_none = getattr(model, "pooler", ...) is None
    return {"add_pooling_layer": False} if has_none else {}


# ---------------------------------------------------------------------------------------------------------------------
# Names


def _names(table, layers):
    """Our module -> theirs, written out for every block."""
    return {
        ours.format(n=n): theirs.format(n=n)
        for ours, theirs in table
        for n in (range(layers) if "{n}" in ours else [""])
    }


def _bert_names(our_class, layers):
    names = _names(BERT_NAMES, layers)
    if our_class is D2lBertForMultipleChoice:
        names["scorer"] = names.pop("classifier")
    return names


def _leaves(module):
    return ("weight",) if module.endswith("embedding") else ("weight", "bias")


def _renamed(model, names):
    """The state dict of `model` under other names; the encoder's prefix `bert.` stays where it is."""
    state = {}
    for name, value in model.state_dict().items():
        prefix = "bert." if name.startswith("bert.") else ""
        module, leaf = name.removeprefix(prefix).rsplit(".", 1)
        if module in names:
            state[f"{prefix}{names[module]}.{leaf}"] = value
        elif name != "cls.predictions.bias":  # the decoder's bias, once more
            raise ValueError(f"{name}: d2l-bert knows no weight of this name; take it out, and save the model again")
    return state


def _refuse_other_names(state, wanted, optional=None):
    for name in wanted:
        if name not in state and not (optional and re.search(optional, name)):
            raise ValueError(
                f"{name} is not in the state dict: it is not one of a d2l BERTModel; give that of its BERTModel"
            )
    for name in state:
        if name not in wanted:
            raise ValueError(f"{name}: a d2l BERTModel has no weight of this name; give that of its BERTModel")


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


def _filled(model, state):
    """`model` with the weights of `state`, in its precision; every weight, and no other."""
    for name, value in model.state_dict().items():
        if name in state and state[name].shape != value.shape:
            raise ValueError(
                f"{name}: has shape {tuple(state[name].shape)}, where {tuple(value.shape)} is wanted by the other "
                f"weights; save all of one model again"
            )
    model.to(functools.reduce(torch.promote_types, {value.dtype for value in state.values()}))
    model.load_state_dict(state, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
    return model.eval()
