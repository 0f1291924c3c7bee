"""Heads that ship with Paceline: all that are promised are there, small, with a card, and another reader agrees.

The other reader (``tests.support.plain_heads``) shares no code with the product; both run in float32 on rows of the
target.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_training.corpus import Sample
from draft_training.features import FeatureMaker
from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext
from paceline.models.hub import resolve_model
from paceline.models.llama import LlamaModel
from paceline.models.registry import load_target
from paceline.spec_decode.drafters.medusa import MedusaHeads
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.heads.detect import load_head, read_head
from paceline.spec_decode.heads.eagle import Eagle1Head, Eagle3Head
from paceline.spec_decode.heads.mtp import MtpHead, load_mtp
from paceline.spec_decode.heads.shipped import SHIPPED as ROOT
from paceline.text.tokenizer import Tokenizer
from tests.support import head_files
from tests.support.plain_heads import PlainHead, PlainMedusa, PlainMtp, PlainTarget, read_files, read_plain
from tests.support.tiny_model import tiny_spec, tiny_weights

# (model, drafter) that README and docs speak of: heads/MODEL/DRAFTER
SHIPPED = tuple(("smollm2-135m-instruct", name) for name in ("eagle3", "eagle", "mtp", "mtp3", "medusa"))
# What a folder of heads holds.
KINDS = {"eagle": "eagle1", "eagle3": "eagle3", "mtp": "mtp", "mtp3": "mtp", "medusa": "medusa"}
MTP_MODULES = {"mtp": 1, "mtp3": 3}
MOST_BYTES = 16_000_000  # of a file in the repository
CARD = (r"(?m)^- Corpus: [1-9]", r"(?m)^- Seen: [1-9][\d,]* (answer )?tokens")  # what a card says of its training
PROMPT = "What is the capital of France, and what is it famous for?"


@dataclass(frozen=True)
class Target:
    """A target in float32, for both readers, and a short text."""

    model: LlamaModel
    plain: PlainTarget
    token_ids: tuple[int, ...]

    def rows(self, aux_layers: tuple[int, ...]) -> Tensor:
        """What heads are given of the text but its last token: the captured rows side by side, or the final one."""
        maker = FeatureMaker(self.model, aux_layers or (0,), 64)
        (made,) = maker.rows([Sample(self.token_ids, ())])
        aux_width = made.features.shape[1] - self.model.spec.hidden_size
        return made.features[:-1, :aux_width] if aux_layers else made.features[:-1, aux_width:]


@functools.cache
def real_target(name: str) -> Target:
    folder = resolve_model(name)
    model = load_target(folder, torch.float32, torch.device("cpu"))
    assert isinstance(model, LlamaModel)
    head = model.embedding
    if not model.spec.tie_word_embeddings:
        head = load_file(folder / "model.safetensors")["lm_head.weight"].float()
    ids = Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": PROMPT}])
    config = json.loads((folder / "config.json").read_text())
    plain = PlainTarget(model.embedding, head, model.spec.num_layers, model.spec.rms_norm_eps, config)
    return Target(model, plain, tuple(ids))


@pytest.fixture(scope="module", autouse=True)
def unloaded_at_the_end() -> Iterator[None]:
    yield
    real_target.cache_clear()


@functools.cache
def tiny_target() -> Target:
    """The tiny Llama of ``tests.support.head_files``."""
    spec = tiny_spec(num_layers=6)
    spec = type(spec)(**{**vars(spec), "intermediate_size": head_files.WIDE})
    model = LlamaModel(spec, tiny_weights(spec, torch.float32), torch.float32, torch.device("cpu"))
    plain = PlainTarget(model.embedding, model.embedding, 6, spec.rms_norm_eps, head_files.mtp_config(6))
    return Target(model, plain, (5, 9, 3, 44, 17, 9, 3, 61, 80, 5, 9))


def disagreement(served: Path, read: Path, target: Target) -> float:
    """Largest difference of outputs and logits, by the largest value, of the served head and the one read plainly."""
    kind = read_head(read, torch.float32, first_layer=target.model.spec.num_layers).kind
    if kind == "medusa":
        rows = target.rows(())
        heads = MedusaHeads(target.model, read_head(served, torch.float32).tensors)
        return difference(heads.logits(rows), PlainMedusa(*read_files(read), target.plain).logits(rows))
    pairs: list[tuple[DraftHead, PlainHead]] = []
    if kind == "mtp":
        count = MTP_MODULES.get(served.name, 1)
        modules, _ = load_mtp(str(served), target.model, count, target.model.rope_table())
        for k, module in enumerate(modules):
            pairs.append((MtpHead(target.model, module), PlainMtp(*read_files(read), target.plain, module=k)))
    else:
        head, _ = load_head(served, target.model, len(target.model.kv_layers))
        pairs.append((head, read_plain(kind, read, target.plain)))
    return max(difference_of_rows(head, plain, target, len(pairs)) for head, plain in pairs)


def difference_of_rows(head: DraftHead, plain: PlainHead, target: Target, draft_layers: int) -> float:
    rows, tokens = target.rows(head.aux_layers), target.token_ids[1:]
    model, layer = target.model, head.kv_layers[0]
    num_heads = head.layer.shape.num_heads if isinstance(head, Eagle1Head | Eagle3Head) else model.spec.num_heads
    kv = KvPool(KvLayout((*model.kv_layers, *head.kv_layers * draft_layers), torch.float32), 1, len(tokens))
    batch = ForwardBatch.build([Segment.linear(tokens, 0, torch.arange(len(tokens), dtype=torch.int32))])
    attention = attention_for(model.device, num_heads, layer.num_kv_heads, layer.head_dim)
    outputs = head.forward(batch.token_ids, head.fuse(rows), ForwardContext.build(batch, kv, attention))
    expected = plain.rows(torch.tensor(tokens), plain.fuse(rows))
    wanted = plain.logits(expected)
    if head.token_map is not None:
        assert sorted(head.token_map.tolist()) == torch.isfinite(wanted[0]).nonzero().flatten().tolist()
        wanted = wanted[:, head.token_map]
    return max(difference(outputs, expected), difference(head.logits(outputs), wanted))


def difference(ours: Tensor, wanted: Tensor) -> float:
    assert ours.shape == wanted.shape
    assert bool(torch.isfinite(wanted).all())
    return float((ours - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def faults(folder: Path) -> list[str]:
    """What is wrong with a folder of heads as something that ships; empty when nothing is."""
    found = []
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        found.append("no safetensors file")
    found += [f"{file.name} has {file.stat().st_size:,} bytes" for file in weights if file.stat().st_size >= MOST_BYTES]
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    found += [f"README.md does not say {pattern!r}" for pattern in CARD if not re.search(pattern, text)]
    if folder.parent.name not in text:
        found.append(f"README.md does not name its target, {folder.parent.name}")
    return found


def broken_promises(root: Path, promised: tuple[tuple[str, str], ...]) -> list[str]:
    """Heads that are promised and not there, or there and not promised."""
    there = {(file.parent.parent.name, file.parent.name) for file in root.glob("*/*/config.json")}
    missing = [f"heads/{m}/{d} is in SHIPPED but not there: make it, or stop promising" for m, d in promised]
    unknown = [f"heads/{m}/{d} is there but not in SHIPPED: list it" for m, d in sorted(there - set(promised))]
    return [line for line, pair in zip(missing, promised, strict=True) if pair not in there] + unknown


def test_what_ships_is_what_is_promised() -> None:
    assert broken_promises(ROOT, SHIPPED) == []


@pytest.mark.real_model
@pytest.mark.parametrize(
    "folder", [pytest.param(f.parent, id=f"{f.parts[-3]}-{f.parts[-2]}") for f in sorted(ROOT.glob("*/*/config.json"))]
)
def test_another_reader_agrees_on_what_ships(folder: Path) -> None:
    assert faults(folder) == []
    target = real_target(folder.parent.name)
    kind = read_head(folder, torch.float32, first_layer=target.model.spec.num_layers).kind
    assert KINDS.get(folder.name) == kind, "the folder is named after another drafter"
    assert disagreement(folder, folder, target) < 1e-5


def tiny_head(folder: Path, drafter: str) -> Path:
    """Heads in a folder such as those that ship, card included."""
    if drafter == "medusa":
        head_files.put(folder, head_files.medusa(), {"medusa_num_heads": 3, "medusa_num_layers": 2})
    elif drafter in MTP_MODULES:
        modules = [head_files.at_layer(6 + k, head_files.mtp_module()) for k in range(MTP_MODULES[drafter])]
        config = head_files.mtp_config(6) | {"num_nextn_predict_layers": len(modules)}
        head_files.put(folder, {name: tensor for module in modules for name, tensor in module.items()}, config)
    else:
        head_files.put(folder, *(head_files.eagle1() if drafter == "eagle" else head_files.eagle3()))
    card = (
        f"# {drafter} heads for {folder.parent.name}\n\n- Corpus: 3 answers\n- Seen: 1,200 answer tokens in 7 steps\n"
    )
    (folder / "README.md").write_text(card)
    return folder


@pytest.mark.parametrize("drafter", KINDS)
def test_a_difference_of_the_readers_is_noticed(drafter: str, tmp_path: Path) -> None:
    folder = tiny_head(tmp_path / "tiny" / drafter, drafter)
    assert disagreement(folder, folder, tiny_target()) < 1e-5
    for name in load_file(folder / "model.safetensors"):
        if name in ("t2d", "d2t"):
            continue
        other = tmp_path / "other" / drafter
        shutil.copytree(folder, other, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, other / "model.safetensors")
        assert disagreement(other, folder, tiny_target()) > 1e-5, name


def test_faults_of_a_folder_are_named(tmp_path: Path) -> None:
    folder = tiny_head(tmp_path / "tiny" / "eagle3", "eagle3")
    assert faults(folder) == []
    assert faults(tiny_head(tmp_path / "tiny" / "medusa", "medusa")) == []
    (folder / "large.safetensors").write_bytes(bytes(MOST_BYTES))
    (folder / "README.md").write_text("# eagle3 heads\n\n- Seen: 0 answer tokens\n")
    assert len(faults(folder)) == 4
    assert "large.safetensors has 16,000,000 bytes" in faults(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    assert faults(folder)[0] == "no safetensors file"


def test_broken_promises_are_named(tmp_path: Path) -> None:
    tiny_head(tmp_path / "tiny" / "eagle3", "eagle3")
    assert broken_promises(tmp_path, (("tiny", "eagle3"),)) == []
    told = broken_promises(tmp_path, (("tiny", "mtp"),))
    assert [line.split(":")[0] for line in told] == [
        "heads/tiny/mtp is in SHIPPED but not there",
        "heads/tiny/eagle3 is there but not in SHIPPED",
    ]
