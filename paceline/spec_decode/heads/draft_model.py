"""Load a draft model: a whole model of its own on the draft layers of the target's pages (algorithms.md C1)."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerOwner
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.digest import weights_digest
from paceline.models.hub import resolve_model
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.models.registry import model_class, open_checkpoint


def load_draft_model(path: str, target: TargetModel, first_layer: int) -> tuple[LlamaModel, str]:
    """The draft model and a digest of its weights, in the target's dtype and on its device.

    path: a folder, a name that ``paceline pull`` knows, or a hub id. first_layer: the pool's layer that holds its
    layer 0, so the number of the target's. Raises ConfigError.
    """
    if not path:
        raise ConfigError("drafter_path", "the draft_model drafter needs the folder, name or hub id of a model")
    folder = resolve_model(path)
    spec = ModelSpec.from_folder(folder)
    if model_class(spec.family) is not LlamaModel:
        raise ConfigError("drafter_path", f"{path}: a {spec.family} model cannot draft, only the Llama family")
    bag = WeightBag(open_checkpoint(folder, target.dtype)).rounded(target.quantize)
    model = LlamaModel(spec, bag, target.dtype, target.device, first_layer, LayerOwner.DRAFT)
    bag.finish()
    return model, weights_digest(folder)
