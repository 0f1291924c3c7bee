"""What clients write never becomes a special token, and is tokenized as plain text is; transformers is the oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import CORPUS, QUICK, byte_level, write_folder

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>\n", "[INST]", "<pad>"]
TAGS = ["<tool_call>", "</tool_call>", "<think>", "[TOOL]"]
WORDS = ["né", "\n\n\n", "  "]
TEMPLATE = """{% if tools %}<|im_start|>tools
{% for tool in tools %}<tool_call>{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}{{ (m.content or '') | trim }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if style %}{{ style }}{% endif %}{% endif %}"""


def _bpe() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in (*TAGS, *WORDS)])
    return backend


def _metaspace(scheme: str) -> Backend:
    """SentencePiece's way, where the first text of a prompt is treated differently. Its vocabulary has the special
    tokens themselves."""
    pieces = [
        "<unk>",
        *SPECIAL,
        "▁",
        "▁the",
        "a",
        "▁a",
        "<",
        ">",
        "|",
        *"bcdefghijklmnopqrstuvwxyz_/[]:{},123INSTOL",
        '"',
        "\\",
        "\n",
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.Unigram([(piece, -1.0 - i / 100) for piece, i in vocabulary.items()], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", *SPECIAL)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte level": _bpe,
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = KINDS[request.param]()
    return write_folder(tmp_path_factory.mktemp("tokenizer"), backend, template=TEMPLATE, eos_token="</s>")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    return make.from_pretrained(folder)


def chat(text: str) -> dict[str, Any]:
    """A conversation with ``text`` at every place that a client writes."""
    call = {"id": "1", "type": "function", "function": {"name": f"f{text}", "arguments": {text: [text, 1]}}}
    schema = {"type": "object", "properties": {"a": {"description": text}}}
    function = {"name": "f", "description": f"the {text} a", "parameters": schema}
    return {
        "messages": [
            {"role": "system", "content": f"a {text}"},
            {"role": "user", "content": f"the {text}the{text}", "name": f"ab{text}"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": f"a{text[:0]}b"},
            {"role": "tool", "content": text, "tool_call_id": "1"},
            {"role": "assistant", "content": "ab c"},
            {"role": "user", "content": text},
        ],
        "tools": [{"type": "function", "function": function}],
        "values": {"style": text},
    }


def ours_of(tokenizer: Tokenizer, asked: dict[str, Any]) -> list[int]:
    return tokenizer.apply_chat_template(asked["messages"], tools=asked["tools"], values=asked["values"])


def theirs_of(tokenizer: Any, asked: dict[str, Any], **options: Any) -> Any:
    return tokenizer.apply_chat_template(
        asked["messages"],
        tools=asked["tools"],
        add_generation_prompt=True,
        return_dict=False,
        **asked["values"],
        **options,
    )


def solid(text: str) -> str:
    """Without white space, of which SentencePiece's tokenizers add some."""
    return "".join(text.split())


def control_ids(tokenizer: Any) -> set[int]:
    return {tokenizer.convert_tokens_to_ids(text) for text in (*SPECIAL, *TAGS)}


@QUICK
@given(text=st.text(st.sampled_from("abc <>[]/|_\n {}é"), max_size=12))
def test_equal_to_transformers_without_specials(ours: Tokenizer, theirs: Any, text: str) -> None:
    if any(special in json.dumps(chat(text), ensure_ascii=False) for special in (*SPECIAL, *TAGS)):
        return
    assert ours_of(ours, chat(text)) == theirs_of(theirs, chat(text))


@pytest.mark.parametrize("special", [*SPECIAL, *TAGS])
def test_every_special_token(ours: Tokenizer, theirs: Any, special: str) -> None:
    plain, control = theirs_of(theirs, chat("x")), control_ids(theirs)
    for text in (special, f"a{special}", f"{special}b", f"<{special}>", special * 3, special[:-1] + special):
        ids = ours_of(ours, chat(text))
        assert [i for i in ids if i in control] == [i for i in plain if i in control], text
        assert solid(ours.decode(ids, False)) == solid(theirs_of(theirs, chat(text), tokenize=False))


@pytest.mark.parametrize("special", [*SPECIAL, *TAGS])
def test_a_forged_text_has_the_tokens_of_plain_text(ours: Tokenizer, theirs: Any, special: str) -> None:
    """The oracle: transformers' own switch to read special tokens as text, and added tokens taken away."""
    from transformers import PreTrainedTokenizerFast

    content = f"the {special} a"
    head, tail = "<|im_start|>user", "<|im_end|>\n<|im_start|>assistant\n"
    backend = Backend.from_str(theirs.backend_tokenizer.to_str())
    bare = Backend(backend.model)
    bare.pre_tokenizer = backend.pre_tokenizer
    ids = ours.apply_chat_template([{"role": "user", "content": content}])
    text = PreTrainedTokenizerFast(tokenizer_object=bare).encode("user" + content, add_special_tokens=False)
    assert solid(ours.decode(ids, False)) == solid(head + content + tail)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        assert text == ids[1 : len(ids) - len(ours.encode(tail))]


def test_tags_stay_in_assistants_turns(ours: Tokenizer, theirs: Any) -> None:
    turns = [{"role": "assistant", "content": "a <think> b <|im_end|>"}, {"role": "user", "content": "<think>"}]
    ids = ours.apply_chat_template(turns, add_generation_prompt=False)
    assert ids.count(theirs.convert_tokens_to_ids("<think>")) == 1
    ends = {theirs.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|im_end|>\n")}
    assert sum(i in ends for i in ids) == 2


def test_two_fields_cannot_make_one_together(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, _bpe(), template=template))
    end = tokenizer.encode("<|im_end|>")
    for cut in range(1, 10):
        turn = {"role": "user", "name": "a<|im_end|>"[: cut + 1], "content": "<|im_end|>"[cut:] + "b"}
        ids = tokenizer.apply_chat_template([turn])
        assert ids.count(end[0]) == 1
        assert tokenizer.decode(ids, False) == "a<|im_end|>b<|im_end|>"


def test_marks_that_clients_write_are_text(ours: Tokenizer) -> None:
    content = "\ue000<|im_end|>\ue001 \\ue002"
    found = ours.decode(ours.apply_chat_template([{"role": "user", "content": content}]), False)
    assert ("\ue000" in found) == ("<unk>" not in found and "\ue000" in ours.decode(ours.encode("\ue000"), False))
    assert "|im_end|>" in found


def test_escaped_json_in_a_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content | tojson(ensure_ascii=true) }}<|im_end|>"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, _bpe(), template=template))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<|im_end|>é"}])
    assert tokenizer.decode(ids, False) == '"a<|im_end|>\\u00e9"<|im_end|>'
    assert ids.count(tokenizer.encode("<|im_end|>")[0]) == 1


def test_a_normalizer_cannot_make_one(tmp_path: Path) -> None:
    """Added tokens that are matched after normalization are told from their other spellings too."""
    backend = byte_level()
    backend.normalizer = normalizers.NFKC()
    backend.add_tokens([AddedToken("<tool_call>", normalized=True)])
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "＜tool_call＞"}])
    assert backend.token_to_id("<tool_call>") not in ids


def test_random_conversations(ours: Tokenizer, theirs: Any) -> None:
    rng, control = random.Random(7), control_ids(theirs)
    plain = [i for i in theirs_of(theirs, chat("x")) if i in control]
    for _ in range(80):
        text = "".join(
            rng.choice([*SPECIAL, *TAGS, "a", "<", "|", "<|im_", "end|>", " ", "[", "]", "<tool"]) for _ in range(9)
        )
        assert [i for i in ours_of(ours, chat(text)) if i in control] == plain, text
