"""The public messages to what a client asks, and back for the journal (answers: ``paceline.answer_wire``)."""

from __future__ import annotations

import hashlib

from cluster.contract.generation import (
    MAX_MESSAGES,
    MAX_TEXT_ARGUMENTS,
    MAX_TOOLS,
    Chat,
    ChatMessage,
    GenerationRequest,
    Prompt,
    ReceivedChoice,
    Resume,
    Tool,
    ToolChoice,
    check_count,
)
from paceline.errors import InvalidRequest
from paceline.parsing.answer import AnswerFormat, CallableTool
from paceline.request import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    SpeculationParams,
)
from paceline.rpc.unknown import read_known
from paceline.v1 import inference_pb2
from paceline.wire import (
    sampling_from_proto,
    sampling_to_proto,
    speculation_from_proto,
    speculation_to_proto,
    tool_call_from_proto,
)

PLAN_DIGEST_BYTES = 16
_TOOL_CHOICES: dict[inference_pb2.ToolChoice.ValueType, ToolChoice] = {
    inference_pb2.TOOL_CHOICE_AUTO: ToolChoice.AUTO,
    inference_pb2.TOOL_CHOICE_NONE: ToolChoice.NONE,
    inference_pb2.TOOL_CHOICE_REQUIRED: ToolChoice.REQUIRED,
    inference_pb2.TOOL_CHOICE_NAMED: ToolChoice.NAMED,
}


def generation_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """InvalidRequest when there is no prompt, which only a resume can do without, and for lists that are too long."""
    sampling = message.sampling
    check_count("stop", len(sampling.stop), MAX_STOP_STRINGS)
    check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS)
    check_count("bad_words", len(sampling.bad_words), MAX_BAD_WORDS)
    check_count("bad_token_ids", len(sampling.bad_token_ids), MAX_BAD_SEQUENCES)
    return GenerationRequest(
        prompt=_prompt(message),
        sampling=sampling_from_proto(sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        speculation=(
            speculation_from_proto(message.speculation) if message.HasField("speculation") else SpeculationParams()
        ),
        model=message.model,
        request_id=message.request_id,
        tenant=message.tenant,
        generation_id=message.generation_id,
        resume=_resume(message.resume) if message.HasField("resume") else None,
        priority=message.priority,
        answer_format=answer_format(message.answer_format) if message.HasField("answer_format") else None,
        truncate_prompt_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        truncation_side=message.truncation_side,
    )


def answer_format(message: inference_pb2.AnswerFormat) -> AnswerFormat:
    """InvalidRequest for lists that are too long. The names are checked where the request is planned."""
    check_count("answer_format.tools", len(message.tools), MAX_TOOLS)
    for i, tool in enumerate(message.tools):
        check_count(f"answer_format.tools[{i}].text_arguments", len(tool.text_arguments), MAX_TEXT_ARGUMENTS)
    tools = tuple(CallableTool(tool.name, tuple(tool.text_arguments)) for tool in message.tools)
    return AnswerFormat(message.tool_calls, message.reasoning, message.reasoning_open, tools, message.one_tool_call)


def _answer_format_message(form: AnswerFormat | None) -> inference_pb2.AnswerFormat | None:
    if form is None:
        return None
    tools = [inference_pb2.CallableTool(name=t.name, text_arguments=t.text_arguments) for t in form.tools]
    return inference_pb2.AnswerFormat(
        tool_calls=form.tool_calls,
        reasoning=form.reasoning,
        reasoning_open=form.reasoning_open,
        tools=tools,
        one_tool_call=form.one_tool_call,
    )


def _resume(message: inference_pb2.Resume) -> Resume:
    check_count("resume.choices", len(message.choices), MAX_N)
    choices = (
        ReceivedChoice(c.choice, c.next_index, tuple(c.token_ids), c.complete, c.num_prompt_logprobs)
        for c in message.choices
    )
    return Resume(message.plan_digest, tuple(choices))


def admitted_request(request: GenerationRequest) -> inference_pb2.GenerateRequest:
    """A request as admitted, with every default resolved; ``generation_request`` reads it back. It has no generation id
    and no resume."""
    assert isinstance(request.prompt, tuple)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=request.prompt),
        model=request.model,
        sampling=sampling_to_proto(request.sampling),
        speculation=speculation_to_proto(request.speculation),
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        answer_format=_answer_format_message(request.answer_format),
    )


def plan_digest(admitted: GenerationRequest) -> bytes:
    """Names everything that the text depends on, so that a resume that would make another one is refused. Takes a
    request as admitted."""
    message = admitted_request(admitted)
    message.ClearField("request_id")
    message.ClearField("priority")
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()[:PLAN_DIGEST_BYTES]


def resumable(generation_id: str, admitted: GenerationRequest) -> inference_pb2.Resumable:
    """What a client keeps of a stream to go on with it at another router."""
    seed = admitted.sampling.seed
    assert seed is not None  # every default is resolved
    return inference_pb2.Resumable(generation_id=generation_id, seed=seed, plan_digest=plan_digest(admitted))


def journal_entry(admitted: GenerationRequest) -> bytes:
    """A request as admitted, as the journal keeps it."""
    return admitted_request(admitted).SerializeToString(deterministic=True)


def from_journal_entry(entry: bytes) -> GenerationRequest:
    """The request of ``journal_entry``. Raises InvalidRequest for a field of a newer build."""
    return generation_request(read_known(inference_pb2.GenerateRequest, entry))


def _prompt(message: inference_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "chat":
            return _chat(message.chat)
        case _ if message.HasField("resume"):
            return ()
        case _:
            raise InvalidRequest("prompt", "must be given: text, token_ids or chat")


def _chat(message: inference_pb2.Chat) -> Chat:
    check_count("messages", len(message.messages), MAX_MESSAGES)
    check_count("tools", len(message.tools), MAX_TOOLS)
    for i, turn in enumerate(message.messages):
        check_count(f"messages[{i}].tool_calls", len(turn.tool_calls), MAX_TOOLS)
    return Chat(
        tuple(_chat_message(turn) for turn in message.messages),
        tuple(Tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in message.tools),
        _TOOL_CHOICES.get(message.tool_choice, ToolChoice.AUTO),
        message.tool_name,
        message.one_tool_call,
        message.continue_final_message,
        message.template_values,
        message.no_generation_prompt,
        message.reasoning_effort,
    )


def _chat_message(turn: inference_pb2.ChatMessage) -> ChatMessage:
    calls = tuple(tool_call_from_proto(call) for call in turn.tool_calls)
    return ChatMessage(turn.role, turn.content, calls, turn.tool_call_id, turn.name, turn.reasoning)


def tokenize_prompt(message: inference_pb2.TokenizeRequest) -> Prompt:
    """InvalidRequest when there is neither text nor chat."""
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "chat":
            return _chat(message.chat)
        case _:
            raise InvalidRequest("input", "must be given: text or chat")
