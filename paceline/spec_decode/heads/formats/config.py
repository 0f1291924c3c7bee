"""What the config.json of a draft head says (algorithms.md F), and the shapes of its tensors. Reads no file."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.spec_decode.heads.formats.layer import LayerShape, Shapes, refused

MAX_MTP_MODULES = 8


class HeadKind(enum.StrEnum):
    """Families of heads; each has one canonical set of tensor names, that of its public original."""

    EAGLE1 = "eagle1"  # F1; EAGLE-2 is the same weights with dynamic trees
    EAGLE3 = "eagle3"  # F2
    MEDUSA = "medusa"  # F4, FasterDecoding
    MTP = "mtp"  # F5, DeepSeek-V3


@dataclass(frozen=True)
class Eagle1Config:
    """EAGLE-1 and EAGLE-2 (algorithms.md C4, F1)."""

    shape: LayerShape
    vocab_size: int
    bias: bool = False  # on fc
    own_embedding: bool = False  # whether the file carries embed_tokens

    def tensor_shapes(self) -> Shapes:
        """Canonical names."""
        hidden = self.shape.hidden_size
        shapes: Shapes = {"fc.weight": (hidden, 2 * hidden)}
        if self.bias:
            shapes["fc.bias"] = (hidden,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, hidden)
        return shapes | self.shape.tensor_shapes("layers.0", hidden)


@dataclass(frozen=True)
class Eagle3Config:
    """EAGLE-3 (algorithms.md C6, F2, F3). The four variants are all off in the original."""

    shape: LayerShape
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None = None  # layers whose input rows it reads; None: the default of the paper's code
    norm_before_residual: bool = False  # the residual starts as hidden_norm(g), not as g
    norm_before_fc: bool = False  # one RMSNorm over the rows side by side: input_norm
    fc_norm: bool = False  # an RMSNorm for each of the rows: fc_norm.0, fc_norm.1, ...
    norm_output: bool = False  # the next step is fed the output after the final norm
    own_embedding: bool = False
    mapped: bool = True  # whether d2t and t2d are there; without them the draft vocabulary is the target's

    @property
    def num_aux(self) -> int:
        """Rows of the target per token."""
        return 3 if self.aux_layers is None else len(self.aux_layers)

    def tensor_shapes(self) -> Shapes:
        """Canonical names."""
        hidden, target = self.shape.hidden_size, self.target_hidden_size
        shapes: Shapes = {
            "fc.weight": (hidden, self.num_aux * target),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.num_aux * target,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(self.num_aux)}
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, hidden)
        if self.mapped:
            shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}
        return shapes | self.shape.tensor_shapes("midlayer", 2 * hidden)


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa (algorithms.md C3, F4), counted from the tensors: configs in the wild say less than there is."""

    hidden_size: int
    num_heads: int
    num_blocks: int
    draft_vocab_size: int = 0  # rows of each head's vocabulary matrix; 0: there is none, the target's LM head serves
    mapped: bool = False  # whether there is a token_map

    def tensor_shapes(self) -> Shapes:
        """Canonical names."""
        hidden, shapes = self.hidden_size, Shapes()
        for head in range(self.num_heads):
            for block in range(self.num_blocks):
                shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
                shapes[f"{head}.{block}.linear.bias"] = (hidden,)
            if self.draft_vocab_size:
                shapes[f"{head}.{self.num_blocks}.weight"] = (self.draft_vocab_size, hidden)
        return shapes | ({"token_map": (self.draft_vocab_size,)} if self.mapped else {})


@dataclass(frozen=True)
class MtpConfig:
    """MTP modules (algorithms.md C8, F5 to F8). The block is the target's own kind: ``shape`` is known where it is a
    plain decoder layer, else (latent attention, experts) the target's model checks it when it takes the tensors."""

    hidden_size: int
    first_layer: int  # module k's tensors are called model.layers.{first_layer + k}.*
    num_modules: int
    chained: bool = True  # module k reads the rows of module k - 1, not the target's (C8b); one module is reused
    shape: LayerShape | None = None
    reads_stream: bool = False  # the target's rows before its final norm, as MiMo's module does

    def joint_shapes(self, module: int) -> Shapes:
        """What every module has, whatever its block."""
        hidden = self.hidden_size
        shapes: Shapes = {
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
            "shared_head.norm.weight": (hidden,),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        return {f"model.layers.{self.first_layer + module}.{name}": shape for name, shape in shapes.items()}


HeadConfig = Eagle1Config | Eagle3Config | MedusaConfig | MtpConfig


def aux_input_layers(ids: object) -> tuple[int, ...] | None:
    """``eagle_aux_hidden_state_layer_ids`` as numbers of layers whose INPUT is read; None stays None.

    Two conventions are in the wild under this one name (sgl-project/sglang#25454). A list that begins with 1 counts
    outputs, as SpecForge writes it: [1, 29, 57] is the input of layers 2, 30, 58. Any other counts inputs, as
    speculators and vLLM do: [2, 30, 58]. Nothing but the first number tells them apart: the lowest row that is
    ever used is the input of layer 2.
    """
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise refused(f"eagle_aux_hidden_state_layer_ids must be a list of layer numbers, got {ids!r}")
    return tuple(i + 1 for i in ids) if ids[0] == 1 else tuple(ids)


def aux_config_ids(layers: Seq[int]) -> list[int]:
    """The list from which ``aux_input_layers`` makes ``layers``. Raises ConfigError where there is none."""
    if layers and layers[0] == 2:
        return [layer - 1 for layer in layers]
    if not layers or layers[0] == 1 or min(layers) < 0:
        raise refused(f"aux layers {list(layers)} have no form that every reader understands: begin above layer 1")
    return list(layers)
