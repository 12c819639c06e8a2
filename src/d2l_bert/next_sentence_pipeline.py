"""`pipeline("next-sentence-prediction")`: predicts whether the second text follows the first."""

from transformers import Pipeline

from d2l_bert.errors import UserError
from d2l_bert.modeling.modeling_d2l_bert import NSP_LABELS


class NextSentencePredictionPipeline(Pipeline):
    """
    Next sentence prediction (section 15.8.5.2), registered with Transformers by `import d2l_bert`.

        follows = pipeline("next-sentence-prediction", model="my-bert")
        follows({"text": "A crane is flying.", "text_pair": "It spreads its wings."})

    The pipeline returns `{"label": ..., "score": ...}`: the more probable label, `IsNext` or `NotNext`, and its
    probability. It returns a list for a list of pairs, and an iterator for a generator of pairs. To use two columns of
    a dataset, wrap them in `transformers.pipelines.pt_utils.KeyPairDataset(dataset, "first", "second")`.

    Args:
        truncation: cut a pair that is too long, as `tokenizer(..., truncation=)` does.
        max_length: the most tokens of a pair to keep; the default is the number of the model's positions.

    Raises:
        UserError: the model is not a `ForNextSentencePrediction`, a pair lacks one of its two texts, or a pair has
            more tokens than the model has positions.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        name = type(self.model).__name__
        if not name.endswith("ForNextSentencePrediction"):
            raise UserError(f"next-sentence-prediction needs a ForNextSentencePrediction model, got {name}")
        labels = self.model.config.id2label
        is_named = set(labels) == {0, 1} and labels[0] != "LABEL_0"  # a stock BERT has no names for its two labels
        self.labels = [labels[0], labels[1]] if is_named else list(NSP_LABELS)

    def _sanitize_parameters(self, truncation=None, max_length=None):
        given = {"truncation": truncation, "max_length": max_length}
        return {name: value for name, value in given.items() if value is not None}, {}, {}

    def preprocess(self, inputs, truncation=False, max_length=None):
        texts = [inputs.get(name) for name in ("text", "text_pair")] if isinstance(inputs, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f'a pair is {{"text": first, "text_pair": second}}, two strings; got {inputs!r:.80}')
        limit = self.model.config.max_position_embeddings
        if truncation:
            max_length = min(max_length or limit, limit)
        encoded = self.tokenizer(*texts, return_tensors="pt", truncation=truncation, max_length=max_length)
        length = encoded["input_ids"].shape[1]
        if length > limit:
            raise UserError(f"{texts[0][:40]!r}...: {length} tokens, and the model has {limit} positions; shorten it")
        return encoded

    def _forward(self, model_inputs):
        return self.model(**model_inputs)

    def postprocess(self, model_outputs):
        probabilities = model_outputs.logits[0].float().softmax(-1)
        best = int(probabilities.argmax())
        return {"label": self.labels[best], "score": float(probabilities[best])}
