"""Mistral's tekken.json: its tokens against a plain BPE by ranks and transformers' own converter, its folders, and what
is refused."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import ConfigError, InvalidRequest
from paceline.grammar.tokens import GrammarTokens
from paceline.models import hub, tekken_folder
from paceline.models.config import ModelSpec
from paceline.models.digest import weights_digest
from paceline.text import tekken
from paceline.text.tekken import tekken_tokenizer
from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_model import tiny_spec
from tests.support.tiny_tokenizers import CORPUS, QUICK, stream
from tests.support.untrained_heads import write_tiny_model

# How published files split text, as JSON has it.
PATTERN: str = json.loads(
    r'"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+'
    r"|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    r'|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"'
)
NAMED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>", "[THINK]"]
ACROSS = (b"12", b"e q", b", ", b"\nx")  # tokens that no word has
SHIFT, MADE, CUT = 24, 160, 40  # ids of control tokens; tokens beside the bytes, and how many of them do not count
SIZE = SHIFT + 256 + MADE - CUT
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
TEXTS = [
    *CORPUS,
    "",
    "The theThe THE tHe don't 1234 1½² ٣٤  \n\n \t x\r\ny",
    "日本語のテキスト🦊🚀é e\u0301 \u200b\ufeff\ufffd ǅabc ʰx İstanbul",
    "https://example.com/a//b/\n/c <html>&amp;</html> f(x) -> [y, z];",
    "a" * 300 + " " * 70 + "\n" * 30 + "!" * 50,
]
CHARACTERS = "theTHE qui\n\r\t /.,'!1½Ⅷ٣é\u0301日本ไท🦊\u200bǅʰİß\xa0<s>[INST]"


# -- the oracle: BPE by ranks, and the words that the pattern finds --


def joined(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [bytes([byte]) for byte in word]
    while found := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def words(text: str) -> list[bytes]:
    return [word.encode() for word in regex.findall(PATTERN, text)]


def plain_ids(text: str, tokens: Sequence[bytes], shift: int) -> list[int]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    parts = [part for word in words(text) for part in ([word] if word in ranks else joined(word, ranks))]
    return [shift + ranks[part] for part in parts]


# -- files --


BYTES = [bytes([byte]) for byte in range(256)]


@cache
def trained() -> tuple[bytes, ...]:
    """The bytes, ACROSS, and the tokens that BPE makes of CORPUS."""
    counts = Counter(word for text in CORPUS for word in words(text))
    tokens = [*BYTES, *ACROSS]
    while len(tokens) < 256 + MADE:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        pairs: Counter[bytes] = Counter()
        for word, count in counts.items():
            for a, b in pairwise(joined(word, ranks)):
                pairs[a + b] += count
        tokens.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
    return tuple(tokens)


def entries(tokens: Sequence[bytes]) -> list[dict[str, Any]]:
    texts = [base64.b64encode(token).decode() for token in tokens]
    return [{"rank": i, "token_bytes": text, "token_str": None} for i, text in enumerate(texts)]


def raw_of(tokens: Sequence[bytes], named: Sequence[str] | None = NAMED, size: int = SIZE) -> dict[str, Any]:
    config = {"pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": size}
    raw = {"config": config | {"default_num_special_tokens": SHIFT, "version": "v7"}, "vocab": entries(tokens)}
    if named is not None:
        raw["special_tokens"] = [{"rank": i, "token_str": t, "is_control": i != 7} for i, t in enumerate(named)]
    return raw


def write_tekken(folder: Path, raw: Any = None, **settings: Any) -> Path:
    """A model folder as far as a tokenizer needs it. raw: what is in the file; settings: of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = raw if isinstance(raw, bytes) else json.dumps(raw or raw_of(trained())).encode()
    (folder / "tekken.json").write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tekken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_HOME", str(folder / "home"))
        return Tokenizer.from_folder(hub.resolve_model(str(write_tekken(folder / "m", chat_template=TEMPLATE))))


def expected_ids(text: str) -> list[int]:
    return [1, *plain_ids(text, trained()[: SIZE - SHIFT], SHIFT)]


def pieces() -> st.SearchStrategy[str]:
    """A character, or the text of a token."""
    texts = {token.decode(errors="ignore") for token in trained()}
    return st.sampled_from([*CHARACTERS, *sorted(texts)])


def read_back(ours: Tokenizer, ids: list[int]) -> tuple[str, str]:
    """The text of ids at once and token by token."""
    return ours.decode(ids), stream(ours, ids)[0]


class TestTokens:
    """Mutants: ids are not shifted; merges by other orders; the vocabulary is not cut; there is no pattern; no token
    begins a prompt."""

    def test_ids_are_those_of_ranks(self, ours: Tokenizer) -> None:
        assert len(set(trained())) == 256 + MADE
        assert any(len(token.decode(errors="ignore")) == 1 < len(token) for token in trained())
        assert plain_ids("the", trained(), 0) != plain_ids("the", trained()[:256], 0)
        for text in TEXTS:
            assert (ids := ours.encode(text)) == expected_ids(text)
            assert read_back(ours, ids) == (text, text)
        whole = [plain_ids(text, trained(), SHIFT) for text in TEXTS]
        assert whole != [ours.encode(text)[1:] for text in TEXTS]  # the cut is seen
        assert ours.vocab_size == SIZE

    @QUICK
    @given(pieces=st.lists(st.deferred(pieces), max_size=40))
    def test_ids_of_any_text(self, ours: Tokenizer, pieces: list[str]) -> None:
        """Tokens beside each other, which are joined inside a word alone. Mutant: no pattern."""
        text = "".join(pieces)
        assume(not any(name in text for name in NAMED))
        assert (ids := ours.encode(text)) == expected_ids(text)
        assert read_back(ours, ids) == (text, text)

    def test_ranks_in_any_order(self) -> None:
        """Tokens before what they are made of, tokens that nothing leads to, tokens that are made in several ways."""
        rng = random.Random(1)
        for _ in range(150):
            made = {"".join(rng.choices("aab", k=rng.randint(2, 5))).encode() for _ in range(rng.randint(2, 16))}
            tokens = [*BYTES, *rng.sample(sorted(made), len(made))]
            content = json.dumps(raw_of(tokens, size=SHIFT + len(tokens))).encode()
            tokenizer, _ = tekken_tokenizer(content, Path("tekken.json"))
            for size in (*range(2, 12), 40):
                text = "".join(rng.choices("aab", k=size))
                assert tokenizer.encode(text).ids == plain_ids(text, tokens, SHIFT), (tokens[256:], text)

    def test_equal_to_transformers(self, ours: Tokenizer, tmp_path: Path) -> None:
        from transformers.integrations.mistral.tokenizer import MistralConverter

        make: Any = MistralConverter
        theirs = make(str(write_tekken(tmp_path) / "tekken.json")).converted()
        for text in [*TEXTS, "a[INST]b</s><SPECIAL_20>"]:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids, text
        for i in range(SIZE):
            assert ours.decode([i], skip_special_tokens=False) == theirs.decode([i], skip_special_tokens=False)
            assert ours.decode([i]) == theirs.decode([i], skip_special_tokens=True)

    def test_equal_files_make_equal_tokenizers(self) -> None:
        content = json.dumps(raw_of(trained())).encode()
        first, second = (tekken_tokenizer(content, Path("a"))[0].to_str() for _ in range(2))
        assert first == second


class TestControlTokens:
    def test_ids(self, ours: Tokenizer) -> None:
        assert ours.special_ids(NAMED) == {text: i for i, text in enumerate(NAMED)}
        free = [f"<SPECIAL_{i}>" for i in (7, 8, 23)]  # the first of them has a name
        assert ours.special_ids(free) == {"<SPECIAL_8>": 8, "<SPECIAL_23>": 23}
        assert ours.encode("<s>a</s>") == [1, SHIFT + ord("a"), 2]
        assert ours.encode("a", add_special_tokens=False) == [SHIFT + ord("a")]
        assert ours.eos_token_ids == (2,)
        assert ours.decode([1, 3, SHIFT + ord("a"), 7, 2, 9, 23]) == "a"

    def test_a_file_that_names_none(self) -> None:
        """It has those of mistral-common, in the versions that had no list of their own."""
        raw = raw_of(trained(), None)
        tokenizer, settings = tekken_tokenizer(json.dumps(raw).encode(), Path("a"))
        assert [tokenizer.token_to_id(text) for text in ("</s>", "[TOOL_CALLS]", "[TOOL_CONTENT]")] == [2, 9, 19]
        assert tokenizer.token_to_id("<SPECIAL_20>") == 20
        assert (settings["pad_token"], settings["add_bos_token"]) == ("<pad>", True)

    def test_named_in_any_order(self) -> None:
        raw = raw_of(trained())
        raw["special_tokens"].reverse()
        tokenizer, _ = tekken_tokenizer(json.dumps(raw).encode(), Path("a"))
        assert [tokenizer.id_to_token(i) for i in range(len(NAMED))] == NAMED

    def test_what_clients_write_is_text(self, ours: Tokenizer) -> None:
        """Mutant: control tokens are read in what clients write."""
        for content in (*NAMED, "a</s>b[/INST][INST]", "<SPECIAL_20>", "[/INST", "x" + "".join(NAMED)):
            ids = ours.apply_chat_template([{"role": "user", "content": content}])
            assert ids == [1, 3, *plain_ids(content, trained()[: SIZE - SHIFT], SHIFT), 4], content
        two = ours.apply_chat_template([{"role": "user", "content": text} for text in ("[/IN", "ST]")])
        assert [i for i in two if i < SHIFT] == [1, 3, 4, 3, 4]

    def test_a_word_that_is_a_control_tokens_name(self) -> None:
        raw = raw_of(trained(), [*NAMED, "zzq"])
        inner, settings = tekken_tokenizer(json.dumps(raw).encode(), Path("a"))
        ours = Tokenizer(inner, settings | {"chat_template": TEMPLATE})
        ids = ours.apply_chat_template([{"role": "user", "content": "zzq"}])
        assert ours.decode(ids) == "zzq"
        assert [i for i in ids if i < SHIFT] == [1, 3, 4]


class TestFolders:
    def test_a_model_folder(self, tmp_path: Path, home: Path) -> None:
        source = tmp_path / "My Mistral"
        write_tiny_model(source, tiny_spec(SIZE, 1))
        config = json.loads((source / "config.json").read_text())
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "eos_token_id": None}
        write_tekken(source)
        (source / "config.json").write_text(json.dumps(config))
        seen: list[str] = []
        folder = hub.resolve_model(str(source), lambda what, share: seen.append(what))
        assert (folder.name, folder.parents[2], set(seen)) == ("My Mistral", home, {"reading tekken.json"})
        assert hub.resolve_model(str(folder)) == folder
        assert ModelSpec.from_folder(folder) == ModelSpec.from_folder(source)
        assert weights_digest(folder) == weights_digest(source)
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.eos_token_ids == GrammarTokens.from_folder(folder, SIZE).eos_token_ids == (2,)
        with pytest.raises(InvalidRequest, match="this model has no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
        (tmp_path / "own.jinja").write_text(TEMPLATE)
        tokenizer = Tokenizer.from_folder(folder, str(tmp_path / "own.jinja"))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == [1, 3, SHIFT + ord("a"), 4]

    @pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
    def test_a_template_beside_it(self, tmp_path: Path, name: str) -> None:
        folder = hub.resolve_model(str(write_tekken(tmp_path / "m")))
        text = TEMPLATE if name.endswith("jinja") else json.dumps({"chat_template": TEMPLATE})
        (tmp_path / "m" / name).write_text(text)
        assert hub.resolve_model(str(tmp_path / "m")) == folder  # another link in it
        assert Tokenizer.from_folder(folder).template.source == TEMPLATE
        (tmp_path / "m" / name).unlink()
        hub.resolve_model(str(tmp_path / "m"))
        assert not (folder / name).is_symlink()

    def test_what_the_settings_say_goes_first(self, tmp_path: Path) -> None:
        for adds, ids in ((False, [SHIFT + ord("a")]), (None, [1, SHIFT + ord("a")])):
            settings = {"eos_token": "[/INST]", "add_bos_token": adds, "bos_token": None, "chat_template": "x"}
            tokenizer = Tokenizer.from_folder(hub.resolve_model(str(write_tekken(tmp_path / str(adds), **settings))))
            assert (tokenizer.eos_token_ids, tokenizer.template.source) == ((4,), "x")
            assert tokenizer.encode("a") == ids

    def test_made_once(self, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = hub.resolve_model(str(write_tekken(tmp_path / "m")))
        with monkeypatch.context() as patch:
            patch.setattr(tekken_folder, "tekken_tokenizer", None)
            assert hub.resolve_model(str(tmp_path / "m")) == folder
        write_tekken(tmp_path / "m", raw_of(trained(), size=SIZE - 1))
        other = hub.resolve_model(str(tmp_path / "m"))
        assert Tokenizer.from_folder(other).vocab_size == SIZE - 1
        third = hub.resolve_model(str(write_tekken(tmp_path / "m", eos_token="<unk>")))
        again = hub.resolve_model(str(write_tekken(tmp_path / "m", eos_token="<pad>")))
        assert len({folder, other, third, again}) == 4
        assert [path.name for path in (home / "tekken").iterdir()] == [again.parent.name]

    def test_two_at_once(self, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process makes the folder meanwhile."""
        source, write = write_tekken(tmp_path / "m"), tekken_folder._write

        def late(*given: Any) -> None:
            monkeypatch.setattr(tekken_folder, "_write", write)
            hub.resolve_model(str(source))
            write(*given)

        monkeypatch.setattr(tekken_folder, "_write", late)
        folder = hub.resolve_model(str(source))
        assert Tokenizer.from_folder(folder).vocab_size == SIZE
        assert [path.name for path in (home / "tekken").iterdir()] == [folder.parent.name]

    def test_a_tokenizer_json_goes_first(self, tmp_path: Path) -> None:
        write_tekken(tmp_path, b"no JSON")
        (tmp_path / "tokenizer.json").write_text("{}")
        assert hub.resolve_model(str(tmp_path)) == tmp_path

    def test_of_a_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub
        from huggingface_hub.utils._paths import filter_repo_objects

        def snapshot(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **options: Any) -> str:
            offered = ["tekken.json", "consolidated.safetensors"]
            wanted = filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
            assert list(wanted) == ["tekken.json"]
            return str(write_tekken(tmp_path / name))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert Tokenizer.from_folder(hub.resolve_model(f"owner/name@{'0' * 40}")).encode("a") == [1, SHIFT + ord("a")]

    def test_a_home_that_cannot_be_written(self, tmp_path: Path, home: Path) -> None:
        home.write_text("")
        with pytest.raises(ConfigError, match="could not be written"):
            hub.resolve_model(str(write_tekken(tmp_path / "m")))


# -- what is refused --


def changed(*places: Any, value: Any, named: Sequence[str] | None = NAMED) -> Callable[[], bytes]:
    """The file with another value at a place: names and indexes."""

    def content() -> bytes:
        raw: Any = raw_of(trained(), named)
        inner = raw
        for place in places[:-1]:
            inner = inner[place]
        inner[places[-1]] = value
        return json.dumps(raw).encode()

    return content


TOKEN = {"rank": 300, "token_bytes": "YWI=", "token_str": None}
REFUSED: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "no UTF-8": (b'{"config": "\xff"}', "it is not JSON with a config"),
    "no JSON": (b"{", "it is not JSON with a config"),
    "too deep": (b"[" * 200_000, "it is not JSON with a config"),
    "a number of many digits": (b'{"config": ' + b"9" * 5000 + b"}", "it is not JSON with a config"),
    "a list": (b"[]", "it is not JSON with a config"),
    "no config": (b'{"vocab": []}', "it is not JSON with a config"),
    "a config of no object": (b'{"vocab": [], "config": 1}', "it is not JSON with a config"),
    "no size": (b'{"vocab": [], "config": {"pattern": ""}}', "it is not JSON with a config"),
    "a pattern that takes for ever": (changed("config", "pattern", value="(a|a)+b"), r"config\.pattern is not the one"),
    "a pattern that is none": (changed("config", "pattern", value="("), r"config\.pattern is not the one"),
    "no pattern": (changed("config", "pattern", value=None), r"config\.pattern is not the one"),
    "a size below the bytes": (changed("config", "default_vocab_size", value=SHIFT + 255), "expected a whole number"),
    "a size that is none": (changed("config", "default_vocab_size", value=1e9), "expected a whole number"),
    "a size of too many": (changed("config", "default_vocab_size", value=1 << 40), "expected a whole number"),
    "a size beyond the vocabulary": (changed("config", "default_vocab_size", value=SIZE + CUT + 1), "vocab is not a"),
    "control tokens below 0": (changed("config", "default_num_special_tokens", value=-1), "expected a whole number"),
    "true control tokens": (changed("config", "default_num_special_tokens", value=True), "expected a whole number"),
    "more control tokens": (changed("config", "default_num_special_tokens", value=7), "not a list of at most 7"),
    "too many control tokens": (changed("config", "default_num_special_tokens", value=1 << 30), "expected a whole"),
    "control tokens of no list": (changed("special_tokens", value={"a": 1}), "not a list of at most"),
    "a control token of no object": (changed("special_tokens", 3, value=[1]), "one that is not ASCII"),
    "an empty control token": (changed("special_tokens", 3, "token_str", value=""), "one that is not ASCII"),
    "a control token of letters": (changed("special_tokens", 3, "token_str", value="é"), "one that is not ASCII"),
    "a long control token": (changed("special_tokens", 3, "token_str", value="a" * 600), "one that is not ASCII"),
    "a control token twice": (changed("special_tokens", 3, "token_str", value="<s>"), "has a text twice"),
    "a free id's name": (changed("special_tokens", 3, "token_str", value="<SPECIAL_20>"), "has a text twice"),
    "a hole in control tokens": (changed("special_tokens", 3, "rank", value=20), "expected a whole number from 0 to 7"),
    "a control token's rank twice": (changed("special_tokens", 3, "rank", value=4), "8 tokens with 7 ranks"),
    "a control token that is a token": (changed("special_tokens", 3, "token_str", value="a"), "a control token too"),
    "no control tokens": (changed("config", "version", value="v11", named=None), r"config\.version is 'v11', not in"),
    "a vocabulary of no list": (changed("vocab", value={"a": 1}), "vocab is not a list of"),
    "a token of no object": (changed("vocab", 300, value=1), "where the token of rank 300 should be"),
    "a hole in ranks": (changed("vocab", 300, value=TOKEN | {"rank": 301}), "where the token of rank 300 should be"),
    "a rank that is true": (changed("vocab", 1, "rank", value=True), "where the token of rank 1 should be"),
    "no bytes": (changed("vocab", 300, value={"rank": 300}), "has no token_bytes in base64"),
    "bytes that are a number": (changed("vocab", 300, "token_bytes", value=7), "has no token_bytes in base64"),
    "bytes that are no base64": (changed("vocab", 300, "token_bytes", value="Y*I="), "has no token_bytes in base64"),
    "base64 of letters": (changed("vocab", 300, "token_bytes", value="é"), "has no token_bytes in base64"),
    "an empty token": (changed("vocab", 300, "token_bytes", value=""), "has 0 bytes, expected 1 to 512"),
    "a long token": (changed("vocab", 300, "token_bytes", value="YWFh" * 200), "has 600 bytes, expected 1 to 512"),
    "a byte that is missing": (changed("vocab", 97, "token_bytes", value="YWI="), "expected the byte of this value"),
    "a token twice": (changed("vocab", 300, "token_bytes", value="YQ=="), "ranks 97 and 300 have the same bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path, home: Path) -> None:
    content, why = REFUSED[name]
    with pytest.raises(ConfigError, match=why) as refused:
        hub.resolve_model(str(write_tekken(tmp_path / "m", content if isinstance(content, bytes) else content())))
    assert str(tmp_path / "m" / "tekken.json") in str(refused.value)
    assert len(str(refused.value)) < 600
    assert list((home / "tekken").iterdir()) == []


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: no bound of a file's size; none of the work that long tokens make."""
    source = write_tekken(tmp_path / "m")
    monkeypatch.setattr(tekken, "MAX_WORK", sum(len(token) ** 2 for token in trained()[: SIZE - SHIFT]) - 1)
    with pytest.raises(ConfigError, match=r"tekken\.json cannot be read as Mistral's tokenizer: its tokens are so"):
        hub.resolve_model(str(source))
    monkeypatch.setattr(tekken, "MAX_FILE_BYTES", (source / "tekken.json").stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"tekken\.json cannot be read as Mistral's tokenizer: it has more than"):
        hub.resolve_model(str(source))


def test_a_sound_file_is_not_refused() -> None:
    assert isinstance(tekken_tokenizer(changed("x", value=1)(), Path("a"))[0], tokenizers.Tokenizer)


@pytest.mark.parametrize(("text", "why"), [("[]", "is not a JSON object"), ("{", "is not JSON")])
def test_settings_that_cannot_be_read(tmp_path: Path, text: str, why: str) -> None:
    write_tekken(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json {why}"):
        hub.resolve_model(str(tmp_path / "m"))
