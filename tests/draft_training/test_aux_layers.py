"""Which layers of a target its heads are trained on."""

from __future__ import annotations

import pytest

from draft_training.start import aux_layers_of
from paceline.errors import ConfigError
from paceline.spec_decode.heads.formats.config import aux_config_ids, aux_input_layers


@pytest.mark.parametrize("num_layers", range(3, 41))
def test_three_distinct_layers_that_a_head_can_name(num_layers: int) -> None:
    layers = aux_layers_of(num_layers)
    assert sorted(set(layers)) == list(layers)
    assert 0 <= layers[0] < layers[-1] < num_layers
    assert aux_input_layers(aux_config_ids(layers)) == layers


def test_deep_targets_have_the_usual_ones() -> None:
    assert aux_layers_of(30) == (2, 15, 27)
    assert aux_layers_of(7) == (2, 3, 4)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_too_shallow_a_target_is_refused(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_layers} layers") as refused:
        aux_layers_of(num_layers)
    assert refused.value.key == "model"
