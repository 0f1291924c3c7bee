"""Fields of OpenAI, vLLM and SGLang that are not offered: those that are ignored, and those that are refused.

One that cannot change the text is ignored, whatever it says; the answer's header ``x-paceline-ignored`` and a counter
name it. One that would change the text, or that asks for something in the answer, is refused by name, unless its value
means the same as leaving it out: clients send all their defaults.
"""

from __future__ import annotations

from typing import Annotated, Any

from cluster.frontdoor.json_models import Ignored, JsonObject, Neutral

Unsupported = Annotated[Any, Neutral()]
OnlyFalse = Annotated[Any, Neutral(False)]
OnlyTrue = Annotated[Any, Neutral(True)]
OnlyNone = Annotated[Any, Neutral([])]


class IgnoredFields(JsonObject):
    """Fields of both endpoints that cannot change the text."""

    # OpenAI's: who asks, how it is billed, what is kept, and hints that may make an answer sooner.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    # Names of the request. Here it is the header x-request-id that gives one.
    request_id: Ignored = None
    rid: Ignored = None
    session_id: Ignored = None
    custom_labels: Ignored = None
    # How another server computes and sends what it answers.
    stream_interval: Ignored = None
    guided_decoding_backend: Ignored = None
    ec_transfer_params: Ignored = None
    bootstrap_host: Ignored = None
    bootstrap_port: Ignored = None
    bootstrap_room: Ignored = None
    data_parallel_rank: Ignored = None
    routed_dp_rank: Ignored = None
    disagg_prefill_dp_rank: Ignored = None
    extra_key: Ignored = None
    ngram_corpus_id: Ignored = None
    # About what is not there: other decoders of text, images.
    spaces_between_special_tokens: Ignored = None
    routed_experts_prompt_start: Ignored = None
    routed_experts_start_len: Ignored = None
    return_mm_kwargs: Ignored = None
    media_io_kwargs: Ignored = None
    mm_processor_kwargs: Ignored = None
    images_config: Ignored = None


class RefusedFields(JsonObject):
    """Fields of both endpoints that would change the answer."""

    # Other ways to search and to sample.
    use_beam_search: OnlyFalse = None
    length_penalty: Annotated[Any, Neutral(1.0)] = None
    early_stopping: OnlyFalse = None
    watermarking: OnlyFalse = None
    allowed_token_ids: Unsupported = None
    logits_processors: OnlyNone = None
    custom_logit_processor: Unsupported = None
    custom_params: Annotated[Any, Neutral({})] = None
    vllm_xargs: Annotated[Any, Neutral({})] = None
    # Other ends.
    stop_regex: OnlyNone = None
    repetition_detection: Unsupported = None
    thinking_token_budget: Annotated[Any, Neutral(-1)] = None
    # Other prompts and models.
    kv_transfer_params: Annotated[Any, Neutral({})] = None  # may bring the prompt's tokens
    session_params: Unsupported = None
    prompt_embeds: Unsupported = None
    lora_path: Unsupported = None
    moderation: Unsupported = None
    # Formats that have no name among those that are offered.
    structural_tag: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    # More, or less, in the text and in the answer.
    detokenize: OnlyTrue = None
    logprob_token_ids: Unsupported = None
    return_hidden_states: OnlyFalse = None
    return_routed_experts: OnlyFalse = None
    return_cached_tokens_details: OnlyFalse = None
    return_token_offsets: OnlyFalse = None


class RefusedChatFields(RefusedFields):
    """Those of chats alone besides."""

    audio: Unsupported = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    verbosity: Annotated[Any, Neutral("medium")] = None
    web_search_options: Unsupported = None
    add_special_tokens: OnlyFalse = None  # the template has them
    chat_template: Unsupported = None
    documents: OnlyNone = None
    input_ids: Unsupported = None
    task: Unsupported = None
    use_audio_in_video: OnlyFalse = None
    include_reasoning: OnlyTrue = None
    separate_reasoning: OnlyTrue = None
    stream_reasoning: OnlyTrue = None
    return_meta_info: OnlyFalse = None
    return_prompt_text: OnlyFalse = None
    return_prompt_token_ids: OnlyFalse = None
