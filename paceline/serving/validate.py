"""Whether a node can serve a sequence at all, asked before anything is reserved."""

from __future__ import annotations

from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest
from paceline.grammar.compile import CompiledGrammar
from paceline.grammar.cursor import GrammarCursor
from paceline.request import SequenceRequest


def check_request(runner: ModelRunner, request: SequenceRequest, num_slots: int) -> None:
    """Raise InvalidRequest naming the field that keeps this node from ever serving ``request``.

    num_slots: KV slots that it needs on this node.
    """
    params = request.params
    params.validate(runner.vocab_size)
    if params.seed is None:
        raise InvalidRequest("sampling.seed", "must be set when a request reaches a node")
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "must not be empty")
    predicted = request.speculation.prediction_token_ids
    given = {
        "prompt_token_ids": request.prompt_token_ids,
        "output_token_ids": request.output_token_ids,
        "prediction_token_ids": predicted,
    }
    for field, ids in given.items():
        for token_id in ids:
            if not 0 <= token_id < runner.vocab_size:
                raise InvalidRequest(field, f"token id {token_id} is outside the vocabulary of {runner.vocab_size}")
    if len(predicted) > runner.max_model_len:
        raise InvalidRequest("prediction_token_ids", f"at most {runner.max_model_len}, got {len(predicted)}")
    if params.max_tokens < 1:
        raise InvalidRequest("max_tokens", "must be at least 1 when a request reaches a node")
    if len(request.output_token_ids) >= params.max_tokens:
        raise InvalidRequest("output_token_ids", f"already has max_tokens ({params.max_tokens}) tokens")
    total = len(request.prompt_token_ids) + params.max_tokens
    if total > runner.max_model_len:
        raise InvalidRequest(
            "max_tokens", f"prompt and max_tokens are {total} tokens, the model takes {runner.max_model_len}"
        )
    pages = -(-num_slots // runner.page_size)
    if pages > (most := runner.allocator.part_pages):
        where = "" if runner.allocator.parts == 1 else " on each rank"
        raise InvalidRequest("max_tokens", f"needs {pages} KV pages, the node has {most}{where}")


async def compiled_grammar(runner: ModelRunner, request: SequenceRequest) -> CompiledGrammar | None:
    """The grammar of a request, compiled off the event loop, and checked against the output that it resumes; None where
    it has none. Raises InvalidRequest naming what is wrong, Overloaded where too many grammars wait."""
    asked = request.params.grammar
    if asked is None:
        return None
    grammar = await runner.grammars.compiled(asked)
    if request.output_token_ids:
        try:
            GrammarCursor(grammar).allowed(request.output_token_ids)
        except InvalidRequest as error:
            raise InvalidRequest("output_token_ids", f"do not follow the grammar: it {error.message}") from None
    return grammar
