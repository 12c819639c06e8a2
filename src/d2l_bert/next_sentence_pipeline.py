"""`pipeline("next-sentence-prediction")`: does the second text follow the first?"""

from transformers import Pipeline


class NextSentencePredictionPipeline(Pipeline):
    """
    Next sentence prediction (section 15.8.5.2), registered with Transformers by `import d2l_bert`.

        follows = pipeline("next-sentence-prediction", model="my-bert")
        follows({"text": "A crane is flying.", "text_pair": "It spreads its wings."})

    The answer is `{"label": ..., "score": ...}`, the likelier label, `IsNext` or `NotNext`, and its probability; for
    a list of pairs a list of answers. Other keyword arguments, such as `truncation=True`, go to the tokenizer.

    Raises:
        ValueError: a pair without its two texts, or one longer than the model's positions.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, **tokenizer_kwargs):
        return tokenizer_kwargs, {}, {}

    def preprocess(self, inputs, **tokenizer_kwargs):
        if not isinstance(inputs, dict) or set(inputs) != {"text", "text_pair"}:
            raise ValueError('a pair is {"text": first, "text_pair": second}, got ' + repr(inputs))
        encoded = self.tokenizer(**inputs, return_tensors="pt", **tokenizer_kwargs)
        length, limit = encoded["input_ids"].shape[1], self.model.config.max_position_embeddings
        if length > limit:
            raise ValueError(
                f"{inputs['text'][:40]!r}...: {length} tokens, and the model has {limit} positions; shorten it"
            )
        return encoded

    def _forward(self, model_inputs):
        return self.model(**model_inputs)

    def postprocess(self, model_outputs):
        probabilities = model_outputs.logits[0].float().softmax(-1)
        best = int(probabilities.argmax())
        return {"label": self.model.config.id2label[best], "score": float(probabilities[best])}
