"""OpenVINO as a peer of ``paceline bench peers``: what its process is told, its rows, and our head in its format."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import bench, install, openvino_worker, servers
from benchmarks.peers.bench import Figures, PeersPlan, run
from benchmarks.peers.engines import Groups, Timing
from benchmarks.peers.servers import OPENVINO_PYTHON, openvino_folder
from benchmarks.serving.workload import Ask

MODEL = "smollm2-135m-instruct"
GRAPH = f"<rt_info>{install.HEAD_MARK}<optimum/></rt_info>"


def test_what_openvino_drafts_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutants: a head beside copied tokens; another number of tokens; answers past their end."""
    built: list[tuple[str, dict[str, Any]]] = []
    asked: list[SimpleNamespace] = []

    def pipeline(model: str, scheduler: object, device: str, properties: dict[str, Any]) -> SimpleNamespace:
        built.append((model, properties))
        return SimpleNamespace(get_tokenizer=lambda: None)

    def timed(pipeline: object, tokenizer: object, config: SimpleNamespace, group: object) -> list[object]:
        asked.append(config)
        return []

    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=pipeline,
        draft_model=lambda folder, device, **properties: (folder, properties["INFERENCE_PRECISION_HINT"]),
    )
    core = SimpleNamespace(get_property=lambda device, name: ["BF16"])
    modules = {"openvino_genai": genai, "openvino": SimpleNamespace(Core=lambda: core)}
    monkeypatch.setattr(openvino_worker, "import_module", modules.__getitem__)
    monkeypatch.setattr(openvino_worker, "timed", timed)
    job = {"model": "m", "threads": 2, "slots": 8, "context": 64, "precision": "bf16", "groups": [[["text", 3]]]}
    for drafting in ("", "prompt lookup", "a head"):
        told = job | {"drafting": drafting, "draft_tokens": 4, "ignore_eos": not drafting}
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(told)))
        openvino_worker.main()
    drafts = [{key: value for key, value in p.items() if key in ("prompt_lookup", "draft_model")} for _, p in built]
    assert drafts == [{}, {"prompt_lookup": True}, {"draft_model": ("a head", "bf16")}]
    assert [vars(config) for config in asked] == [
        {"ignore_eos": True, "do_sample": False},
        {"ignore_eos": False, "do_sample": False, "num_assistant_tokens": 4, "max_ngram_size": 3},
        {"ignore_eos": False, "do_sample": False, "num_assistant_tokens": 4},
    ]
    assert capsys.readouterr().out == "[[]]" * 3


def test_rows_of_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: the warm-up counts; a head that is not there is asked for; the head's row has n-grams' figures."""
    rates = {"": 0.1, "prompt lookup": 0.05, str(tmp_path / f"{MODEL}-openvino-eagle3"): 0.025}  # seconds a token

    def in_process(
        weights: Path, precision: str, drafting: str = "", *, ignore_eos: bool = True
    ) -> Callable[[Groups], list[list[Timing]]]:
        def ask(groups: Groups) -> list[list[Timing]]:
            assert (weights, precision, ignore_eos) == (tmp_path / f"{MODEL}-openvino-bf16", "bf16", False)
            steps = [9.0 if group[0].text == "warm" else rates[drafting] for group in groups]
            return [[Timing([0.5, 0.5 + 10 * step], 11, 4)] for step in steps]

        return ask

    monkeypatch.setattr(bench, "in_process", in_process)
    monkeypatch.setattr(servers, "HOME", tmp_path)
    monkeypatch.setattr(bench, "OPENVINO_PYTHON", tmp_path / "bin" / "python")
    warm, decode, long = ([Ask(0, 0.0, text, 4, 11, 0)] for text in ("warm", "question", "long"))
    plan = PeersPlan(decode, long, warm, "kept texts", 11, 4)

    def rows() -> list[tuple[str, float | None, float | None, str]]:
        found = run(plan, MODEL, Path(MODEL), ["openvino"], lambda done, most, what: None).rows

        def rate(figures: Figures | None) -> float | None:
            return round(figures.tokens_per_s, 6) if figures else None

        return [(row.name, rate(row.plain), rate(row.drafted), row.reason.partition(":")[0]) for row in found]

    assert rows() == [("openvino", None, None, f"{tmp_path}/installed is not there")]
    (tmp_path / "installed").touch()
    openvino_folder(MODEL, "bf16").mkdir()
    assert rows() == [("openvino", 10.0, 20.0, ""), ("openvino, our head", 10.0, None, "openvino, our head")]
    openvino_folder(MODEL, "eagle3").mkdir()
    assert rows() == [("openvino", 10.0, 20.0, ""), ("openvino, our head", 10.0, 40.0, "")]


def test_a_head_for_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts layers by their outputs. Mutants: by their inputs; a head that is there stays; no tokenizer."""
    graphs = [GRAPH, GRAPH, GRAPH.replace("True", "False")]

    def step(*command: str, environment: dict[str, str] | None = None) -> None:
        assert command[0] == str(OPENVINO_PYTHON.with_name("optimum-cli"))
        assert json.loads((Path(command[4]) / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
        assert "--trust-remote-code" in command
        Path(command[-1]).mkdir()
        (Path(command[-1]) / "openvino_model.xml").write_text(graphs.pop(0))

    monkeypatch.setattr(servers, "HOME", tmp_path)
    monkeypatch.setattr(install, "run", step)
    openvino_folder(MODEL, "bf16").mkdir()
    (openvino_folder(MODEL, "bf16") / "openvino_tokenizer.xml").write_text("the model's")
    written = openvino_folder(MODEL, "eagle3")
    for _ in range(2):  # the second time over the first
        install.export_head(MODEL)
        assert '<hidden_layers_list value="1, 14, 26" />' in (written / "openvino_model.xml").read_text()
        assert (written / "openvino_tokenizer.xml").read_text() == "the model's"
    with pytest.raises(install.Failed, match="does not say once"):
        install.export_head(MODEL)
    assert not written.exists()
    install.export_head("a model without a head")
