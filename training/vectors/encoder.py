"""Loads any encoder that Transformers has, ours or a stock one, with its tokenizer, to look at its hidden states."""

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from d2l_bert.errors import UserError, reading_model, reading_tokenizer
from d2l_bert.modeling import conversion
from d2l_bert.tokenization.existing import has_tokenizer, stock_tokenizer


def load_encoder(name: str, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    The encoder of a model, without heads, in float32 and in evaluation mode; and its tokenizer.

    Args:
        name: a folder or an id on the Hub. Code that stands beside the model is not run.
        options: further arguments of `AutoModel.from_pretrained`.

    Raises:
        UserError: the model or its tokenizer cannot be loaded, weights are missing or not finite, the model is no
            encoder, or the tokenizer has more tokens than the model.
    """
    logging.disable_progress_bar()  # Transformers shows a bar for the weights
    with reading_model(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if conversion.is_decoder(config):
            raise UserError(f"it is a {config.model_type} model with a decoder; give an encoder, such as a BERT")
        if not has_tokenizer(name):
            raise UserError("it has no tokenizer: no tokenizer.json and no vocab.txt; save one there, or copy it")
        with reading_tokenizer(name):
            tokenizer = stock_tokenizer(name)
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"its tokenizer has no padding token ({config.model_type}); give an encoder, such as a BERT"
            )
        model, missing, _ = conversion.load_and_compare(AutoModel, name, trust_remote_code=False, **options)
        if missing := sorted(weight for weight in missing if "pooler" not in weight):  # the pooler is not used
            raise UserError(f"it has no weights for {missing[0]}; save the model there again with save_pretrained")
        if len(tokenizer) > (known := model.get_input_embeddings().num_embeddings):
            raise UserError(
                f"its tokenizer has {len(tokenizer)} tokens and the model {known}; put back the tokenizer that the "
                f"model was trained with"
            )
    return model.float().eval(), tokenizer


def best_device() -> torch.device:
    """The accelerator of this machine if PyTorch sees one, else the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
