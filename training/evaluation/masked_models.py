"""Any masked language model of Transformers, ours or stock, with the MLM head at some positions only.

Shapes: B rows in a batch, T tokens in a row, P masked positions in a row, H hidden size, V vocabulary size.
"""

import copy
import inspect
import re

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PreTrainedTokenizerBase

from d2l_bert.messages import UserError, reading_model
from d2l_bert.modeling import conversion, loading
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForPreTrainingOutput
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.wordpiece import literal_json, literal_tokenizer


# The types of models that are pretrained with a head for pairs beside the MLM head; and what the names of the weights
# of that head contain.
TYPES_WITH_PAIR_HEAD = ("d2l-bert", "bert", "albert", "big_bird", "fnet", "megatron-bert", "mobilebert")
PAIR_HEAD = re.compile(r"pooler|seq_relationship|sop_classifier|^nsp\.")


class MaskedModel(torch.nn.Module):
    """
    A masked language model in float32 and in evaluation mode, with its tokenizer. Code beside the weights is not run.

    The model gets a head for pairs if its type has one, and the checkpoint has its weights. A d2l-bert model computes
    the MLM head at the masked positions only; a stock model everywhere.

    Args:
        name: a folder or an id on the Hub.
        title: what the model is called in results and messages; None for its name.

    Attributes:
        record: the content of the model's `run_config.json`, empty if it has none.
        task: the task of the head for pairs; None without such a head.
        most_positions: the length of the longest input.
        parameter_count: how many parameters the model has, without a head that the checkpoint lacks.
        backend: the tokenizer for single sentences, in which a "[MASK]" is text.

    Raises:
        UserError: the model cannot be read, is no masked language model, or has weights that are missing or not
            finite; or its tokenizer lacks a mask token.
    """

    def __init__(self, name: str, title: str | None = None):
        super().__init__()
        with reading_model(name):
            config, _ = loading.read_parts(AutoModelForMaskedLM, name)
            self.name = title or name
            self.record = loading.read_run_record(name)
        has_both = config.model_type in TYPES_WITH_PAIR_HEAD
        auto_class = AutoModelForPreTraining if has_both else AutoModelForMaskedLM
        self.model, self.tokenizer, missing = loading.load_pretrained(auto_class, name, PAIR_HEAD.search)
        self.parameter_count = sum(part.numel() for name, part in self.model.named_parameters() if name not in missing)
        self.eval()  # this module, too: code that restores its mode later would else turn dropout on
        if self.tokenizer.mask_token_id is None:
            raise UserError(
                f"{name}: its tokenizer has no mask token; put back the tokenizer that the model was trained with"
            )
        self.backend = literal_tokenizer(literal_json(self.tokenizer))
        self.most_positions = conversion.longest_input(self.model.base_model, self.tokenizer)
        self._arguments = set(inspect.signature(self.model.forward).parameters)
        if getattr(config, "type_vocab_size", None) == 1:
            self._arguments.discard("token_type_ids")  # such a model knows segment 0 alone
        objective = "sop" if config.model_type == "albert" else self.record.get("run", {}).get("objective")
        self.task = PAIR_TASKS.get(objective, PAIR_TASKS["nsp"]) if has_both and not missing else None

    def forward(
        self,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **_: torch.Tensor,
    ) -> D2lBertForPreTrainingOutput:
        """
        Args:
            input_ids: token ids (B, T).
            masked_positions: the positions to predict (B, P).
            attention_mask: 1 for a real token, 0 for padding (B, T); None if no row has padding.
            token_type_ids: 0 in segment A, 1 in segment B (B, T). Models without segments do not get them.
            _: the labels, which the batches of training have; they are not read.

        Returns:
            `prediction_logits` (B, P, V), and `seq_relationship_logits` (B, 2) of the head for pairs, or None.

        Raises:
            UserError: a logit is not finite.
        """
        inputs = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "masked_positions": masked_positions,
        }
        inputs = {name: tensor for name, tensor in inputs.items() if name in self._arguments and tensor is not None}
        outputs = self.model(input_ids=input_ids, **inputs, return_dict=True)
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        if "masked_positions" not in inputs:
            logits = logits.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        conversion.check_outputs(logits, f"{self.name}: ")
        pair_logits = outputs.get("seq_relationship_logits", outputs.get("sop_logits")) if self.task else None
        return D2lBertForPreTrainingOutput(prediction_logits=logits, seq_relationship_logits=pair_logits)

    def sentence_tokenizer(self) -> PreTrainedTokenizerBase:
        """
        The tokenizer for sentences that stand behind other sentences.

        Tokenizers of bytes, such as RoBERTa's, then put a space before a sentence. Others give the same ids anyway.
        """
        tokenizer = copy.deepcopy(self.tokenizer)
        if isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
        return tokenizer
