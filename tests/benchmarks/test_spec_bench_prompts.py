"""Prompt files and drafter lists: both formats, balance, bounds, and one clear error for whatever is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import Outputs, parse_batches
from benchmarks.speculation.drafter_specs import DraftRun, parse_drafters
from benchmarks.speculation.prompts import (
    GROUPS,
    Encoder,
    Prompt,
    balanced,
    drop_long,
    group_order,
    lengthened,
    read_prompts,
)
from paceline.errors import ConfigError, InvalidRequest


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def question(number: int, category: str = "qa", *turns: str) -> dict[str, Any]:
    return {
        "question_id": number,
        "category": category,
        "turns": list(turns) or [f"question {number}"],
        "reference": [],
    }


def test_both_formats_and_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path, question(81, "writing", "first", "second"), "", {"prompt": "plain", "source": "x"})
    assert read_prompts(path) == [
        Prompt("81", "writing", ("first", "second")),
        Prompt("line-3", "prompts", ("plain",)),
    ]


def test_mt_bench_is_one_group(tmp_path: Path) -> None:
    prompts = read_prompts(
        write(tmp_path, question(1, "humanities"), question(2, "rag"), question(3, "math_reasoning"))
    )
    assert [p.group for p in prompts] == ["mt_bench", "rag", "math_reasoning"]
    assert group_order(["zeta", "rag", "prompts", "mt_bench"]) == ["mt_bench", "rag", "prompts", "zeta"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "is not JSON"),
        ("[1]", "must be an object"),
        ({"text": "x"}, "has neither turns nor prompt"),
        ({"prompt": 7}, "prompt: must be text"),
        ({"prompt": " "}, "prompt: must be text"),
        (question(1) | {"turns": []}, "turns: must be a list"),
        (question(1) | {"turns": "x"}, "turns: must be a list"),
        (question(1) | {"turns": ["x", 3]}, r"turns\[1\]: must be text"),
        ({"question_id": 1, "turns": ["x"]}, "category: must be text"),
        ({"category": "qa", "turns": ["x"]}, "question_id: must be"),
        (question(1) | {"question_id": True}, "question_id: must be"),
        (question(5), "question_id: 5 stands on an earlier line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path, question(5), line)
    with pytest.raises(ConfigError, match=said) as caught:
        read_prompts(path)
    assert caught.value.key == "prompts"
    assert f"{path} line 2: " in caught.value.message


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(write(tmp_path, ""))
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(tmp_path / "latin")


def test_a_limit_is_balanced_over_groups_and_inside_them() -> None:
    names = ["writing"] * 5 + ["coding"] * 5 + ["stem"] * 5 + list(GROUPS[1:]) * 6
    prompts = [Prompt(str(i), name, ("x",)) for i, name in enumerate(names)]
    chosen = balanced(prompts, 3)
    assert Counter(p.group for p in chosen) == dict.fromkeys(GROUPS, 3)
    assert sorted(p.category for p in chosen if p.group == "mt_bench") == ["coding", "stem", "writing"]
    assert {p.group for p in chosen[:6]} == set(GROUPS)  # any beginning is balanced
    assert len(balanced(prompts)) == len(prompts)


class Letters:
    """A tokenizer of one token a character; its template says who speaks."""

    eos_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role'][0]}:{m['content']};" for m in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def encoder(tokenizer: object, *, chat: bool = True, longest: int = 100) -> Encoder:
    return Encoder(tokenizer, chat=chat, max_prompt_tokens=longest)  # type: ignore[arg-type]


def test_a_conversation_carries_the_answers() -> None:
    with_template, plain = encoder(Letters()), encoder(Letters(), chat=False)
    assert Letters().decode(with_template.encode(["a"], []) or ()) == "u:a;"
    assert Letters().decode(with_template.encode(["a", "b"], ["A"]) or ()) == "u:a;a:A;u:b;"
    assert Letters().decode(plain.encode(["a", "b"], ["A"]) or ()) == "a\nA\nb"


def test_questions_stand_behind_other_prompts_until_they_have_the_tokens() -> None:
    prompts = [Prompt("1", "qa", ("why", "so")), Prompt("2", "qa", ("aa bb cc dd",)), Prompt("3", "qa", ("x" * 40,))]
    long = lengthened(prompts, encoder(Letters()), 20)
    assert [p.turns[0] for p in long] == [
        "aa bb cc dd \n\nwhy",
        "so \n\naa bb cc dd",  # with one word more it would be longer
        "x" * 40,
    ]
    assert long[0].turns[1] == "so"
    with pytest.raises(ConfigError, match="shorter than 200 tokens"):
        lengthened(prompts, encoder(Letters(), longest=500), 200)


def test_long_prompts_are_dropped_and_counted() -> None:
    prompts = [Prompt(str(n), "qa" if n < 3 else "stem", ("x" * n,)) for n in range(1, 6)]
    kept, dropped = drop_long(prompts, encoder(Letters(), longest=5))  # "u:" and ";" are 3
    assert [p.prompt_id for p in kept] == ["1", "2"]
    assert dropped == {"mt_bench": 3}


def test_a_model_without_a_template_says_what_to_do() -> None:
    class Bare(Letters):
        def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
            raise InvalidRequest("messages", "this model has no chat template")

    with pytest.raises(ConfigError, match="--no-chat"):
        encoder(Bare()).encode(["a"], [])


# Drafters -------------------------------------------------------------------------------------------------------------


def test_items_with_options() -> None:
    runs = parse_drafters("none, ngram:k=8,mtp:path=heads/x,width=3 , ngram")
    assert runs == [
        DraftRun("none", "none"),
        DraftRun("ngram:k=8", "ngram", (("num_draft_tokens", "8"),)),
        DraftRun("mtp:path=heads/x,width=3", "mtp", (("drafter_path", "heads/x"), ("tree_width", "3"))),
        DraftRun("ngram", "ngram"),
    ]
    assert runs[1].config("m", threads=2).num_draft_tokens == 8
    assert runs[2].config("m").tree_width == 3


def test_the_baseline_is_always_there() -> None:
    assert [run.label for run in parse_drafters("ngram")] == ["none", "ngram"]
    assert [run.label for run in parse_drafters("ngram,none")] == ["ngram", "none"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none,,ngram", "an empty item"),
        ("k=8,ngram", "before any drafter"),
        ("nonsense", "'nonsense': drafter"),
        ("ngram:k=many", "'ngram:k=many': num_draft_tokens"),
        ("ngram:k=-1", "num_draft_tokens"),
        ("ngram:model=x", "'model=x' is none of k=, tree="),
        ("ngram:k", "'k' is none of"),
        ("ngram:k=", "'k=' is none of"),
        ("ngram:k=1,k=2", "k is given twice"),
        ("ngram,ngram", "listed twice"),
    ],
)
def test_a_bad_item_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_drafters(text)
    assert caught.value.key == "drafters"


def test_batch_sizes() -> None:
    assert parse_batches("4,1,2,4") == [1, 2, 4]
    for wrong in ("", "1,x", "0,1", "1000000"):
        with pytest.raises(ConfigError) as caught:
            parse_batches(wrong)
        assert caught.value.key == "batches"


def test_outputs_are_checked_before_the_work(tmp_path: Path) -> None:
    Outputs(json=tmp_path / "x.json").check()
    with pytest.raises(ConfigError, match="is no folder"):
        Outputs(markdown=tmp_path / "absent" / "x.md").check()
