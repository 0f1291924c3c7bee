"""What two nodes compare before they pair (handoff.proto)."""

from __future__ import annotations

from paceline.engine.model_runner import ModelRunner
from paceline.grammar.tokens import version
from paceline.kvcache.layout import LayerOwner
from paceline.v1.handoff_pb2 import Fingerprint

HANDOFF_PROTOCOL = 3  # version of handoff.proto's meaning


def fingerprint_of(runner: ModelRunner) -> Fingerprint:
    """What a peer of this node must match: of the drafter, as much as what crosses depends on. Page size and draft
    length may differ."""
    contents, identity, layout = runner.handoff, runner.identity, runner.kv.layout
    mode = contents.mode
    if mode != "draft_kv":
        target = layout.layer_range(LayerOwner.TARGET)
        layout = layout.with_layers(layout.layers[target.start : target.stop])
    bound = mode == "draft_kv" or (mode == "hidden_states" and contents.fused)
    return Fingerprint(
        protocol=HANDOFF_PROTOCOL,
        model=identity.model,
        weights=identity.weights,
        dtype=str(layout.hidden_dtype).removeprefix("torch."),
        layout=layout.text(),
        drafter="" if mode == "none" else runner.drafter.name,
        drafter_modules=len(layout.layer_range(LayerOwner.DRAFT)),
        drafter_weights=identity.drafter_weights if bound else "",
        hidden_size=contents.hidden_size if mode == "draft_kv" else contents.row_width,
        handoff_mode=mode,
        checksum="crc32" if contents.checksum else "",
        kernels=identity.kernels,
        grammars=version(),
        quantize=identity.quantize,
        sums=identity.sums,
        kv_dtype=identity.kv_dtype,
        results=identity.results,
    )
