"""Any masked language model of Transformers, ours or stock, with the MLM head at some positions only.

Shapes: B rows in a batch, T tokens in a row, P masked positions in a row, H hidden size, V vocabulary size.
"""

import copy
import inspect
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from d2l_bert.errors import UserError, reading_model
from d2l_bert.folders import read_json
from d2l_bert.model_cards.card import RUN_FILE
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForPreTrainingOutput
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training.load import load_pretrained, read_parts


# The two ways to the same logits may differ by rounding alone: this much of the largest logit.
ROUNDING = 1e-3

PROBE_TEXT = "It was the first of them."


class MaskedModel(nn.Module):
    """
    A masked language model in float32 and in evaluation mode, with its tokenizer.

    The MLM head runs at the masked positions only. A d2l-bert model has an argument for that. Of a stock model, the
    encoder runs as usual, a hook keeps the hidden states (B, P, H) at the masked positions, and the model's own head
    goes on from there.

    Args:
        name: the folder or Hub id.
        model: with an MLM head, and perhaps a head for pairs.
        has_pair_head: whether the checkpoint has the weights of a head for pairs.
        record: the content of the model's `run_config.json`; empty if it has none.

    Raises:
        UserError: the tokenizer lacks a mask token or does not fit the model, predictions are not finite, or the MLM
            head reads other positions than the one that it predicts.
    """

    def __init__(
        self, name: str, model: nn.Module, tokenizer: PreTrainedTokenizerBase, has_pair_head: bool, record: dict
    ):
        super().__init__()
        self.name, self.tokenizer, self.record = name, tokenizer, record
        self.model = model
        self.eval()  # of this module, too: what restores a module's mode would else turn dropout on
        self._arguments = inspect.signature(model.forward).parameters
        self._positions = None
        if "masked_positions" not in self._arguments:
            model.base_model.register_forward_hook(self._keep_masked_positions)
        self.task = None  # known after the first forward pass
        self._check_tokenizer()
        outputs = self._try_out()
        if has_pair_head:
            of_record = PAIR_TASKS.get(record.get("run", {}).get("objective"), PAIR_TASKS["nsp"])
            self.task = PAIR_TASKS["sop"] if outputs.get("sop_logits") is not None else of_record

    def forward(
        self,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
    ) -> D2lBertForPreTrainingOutput:
        """
        Args:
            input_ids: token ids (B, T).
            masked_positions: the positions to predict (B, P).
            attention_mask: 1 for a real token, 0 for padding (B, T); None if no row has padding.
            token_type_ids: 0 in segment A, 1 in segment B (B, T). Models without segments do not get them.
            labels, next_sentence_label: not used; the batches of training have them.

        Returns:
            `prediction_logits` (B, P, V), and `seq_relationship_logits` (B, 2) of the head for pairs, or None.
        """
        outputs = self._outputs(input_ids, masked_positions, attention_mask, token_type_ids)
        pair_logits = None
        if self.task is not None:
            pair_logits = outputs.get("seq_relationship_logits", outputs.get("sop_logits"))
        return D2lBertForPreTrainingOutput(prediction_logits=_mlm_logits(outputs), seq_relationship_logits=pair_logits)

    def _outputs(self, input_ids, masked_positions, attention_mask=None, token_type_ids=None):
        optional = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        optional = {n: tensor for n, tensor in optional.items() if n in self._arguments and tensor is not None}
        if "masked_positions" in self._arguments:
            return self.model(input_ids=input_ids, masked_positions=masked_positions, **optional)
        self._positions = masked_positions
        try:
            return self.model(input_ids=input_ids, **optional, return_dict=True)
        finally:
            self._positions = None

    def _keep_masked_positions(self, encoder, arguments, output):
        """The forward hook of a stock encoder: replaces the hidden states (B, T, H) by those that the head reads."""
        if self._positions is None:
            return None
        hidden_states = output[0]
        kept = hidden_states.gather(1, self._positions.unsqueeze(-1).expand(-1, -1, hidden_states.shape[-1]))
        if isinstance(output, tuple):
            return (kept, *output[1:])
        output[next(iter(output))] = kept
        return output

    def _check_tokenizer(self):
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"its tokenizer is a {type(tokenizer).__name__}, without a tokenizer.json; give a model with one"
            )
        if tokenizer.mask_token_id is None:
            raise UserError("its tokenizer has no mask token; put back the tokenizer that the model was trained with")

    @torch.no_grad()
    def _try_out(self):
        """The outputs for a short text, after comparing the logits of both ways to compute them."""
        ids = torch.tensor([self.tokenizer(PROBE_TEXT)["input_ids"]])
        positions = torch.tensor([[ids.shape[1] - 2, 1, 2]])
        outputs = self._outputs(ids, positions)
        kept, everywhere = _mlm_logits(outputs), _mlm_logits(self.model(input_ids=ids, return_dict=True))
        expected = everywhere[:, positions[0]]
        if not everywhere.isfinite().all():
            raise UserError("its weights give predictions that are not finite; give an earlier checkpoint")
        if kept.shape != expected.shape or (kept - expected).abs().max() > ROUNDING * expected.abs().max():
            raise UserError(
                f"the MLM head of this {self.model.config.model_type} model reads other positions than the one that "
                f"it predicts, and is not evaluated; give a model whose head reads its own position, as BERT's does"
            )
        return outputs

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def most_positions(self) -> int:
        """The most tokens in a row, special tokens included; `sys.maxsize` if there is no limit."""
        return longest_input(self.model.base_model, self.tokenizer) or sys.maxsize

    def backend(self) -> Tokenizer:
        """A copy of the tokenizer without truncation and padding, which reads a "[MASK]" in a text as text."""
        backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        return backend

    def sentence_tokenizer(self) -> PreTrainedTokenizerBase:
        """
        The tokenizer for sentences that stand behind other sentences.

        Tokenizers of bytes, such as RoBERTa's, then put a space before a sentence. Others give the same ids anyway.
        """
        tokenizer = copy.deepcopy(self.tokenizer)
        before = tokenizer.backend_tokenizer.pre_tokenizer
        if isinstance(before, pre_tokenizers.ByteLevel):
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
                add_prefix_space=True, use_regex=before.use_regex
            )
        return tokenizer


def _mlm_logits(outputs):
    logits = outputs.get("prediction_logits")
    return outputs["logits"] if logits is None else logits


def load_masked_model(name: str) -> MaskedModel:
    """
    A masked language model with its tokenizer, from a folder or the Hub. Code beside the weights is never run.

    The model gets a head for pairs if `AutoModelForPreTraining` has a class with both heads for its type, and the
    checkpoint has the weights of both.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: the model cannot be read, is no masked language model, or has weights that are missing or not
            finite; or as in `MaskedModel`.
    """
    with reading_model(name):
        config, _ = read_parts(AutoModelForMaskedLM, name)
        mlm_class, both_class = (
            _class_of(mapping, config) for mapping in (MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING)
        )
        mlm_weights = _weights_of(mlm_class, config)
        has_both = both_class not in (None, mlm_class) and mlm_weights < _weights_of(both_class, config)
    auto_class = AutoModelForPreTraining if has_both else AutoModelForMaskedLM
    model, tokenizer, missing = load_pretrained(auto_class, name, lambda weight: weight not in mlm_weights)
    with reading_model(name):
        path = cached_file(name, RUN_FILE, _raise_exceptions_for_missing_entries=False)
        record = read_json(Path(path)) if path else {}
        return MaskedModel(name, model, tokenizer, has_both and not missing, record)


def _class_of(mapping, config):
    """The class that an Auto class has for a configuration; None if it has none."""
    found = mapping.get(type(config), None)
    return found[0] if isinstance(found, (tuple, list)) else found


def _weights_of(model_class, config):
    """The names of a model's weights. No memory is taken for the weights."""
    with torch.device("meta"):
        return set(model_class(config).state_dict())


def check_lengths(models: list[MaskedModel], max_seq_length: int | None, default: int) -> int:
    """
    The length of rows for all models: `max_seq_length`, or else `default`, but at most every model's positions.

    Raises:
        UserError: `max_seq_length` exceeds the positions of a model.
    """
    shortest = min(models, key=lambda model: model.most_positions)
    if max_seq_length is not None and max_seq_length > shortest.most_positions:
        raise UserError(
            f"max_seq_length {max_seq_length}: {shortest.name} has {shortest.most_positions} positions; give at most "
            f"this many"
        )
    return max_seq_length or min(default, shortest.most_positions)
