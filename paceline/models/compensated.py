"""GPTQ (Frantar et al., arXiv 2210.17323): codes of 4 bits that make up for each other's errors on seen inputs."""

from __future__ import annotations

import torch

from paceline.models.quantization.round_to_nearest import GROUP_SIZE
from paceline.models.write_quantised import TOP, FourBits, four_bit_rows

DAMPING = 0.01  # of the mean of the Hessian's diagonal


def compensated(weight: torch.Tensor, hessian: torch.Tensor, group_size: int = GROUP_SIZE) -> FourBits:
    """The codes of a linear layer, input feature by input feature; the features that follow take up each one's error.

    weight: [out_features, in_features], floating; hessian: float64 [in_features, in_features], the sum of x x^T over
    the rows x that the layer saw. Scales and zero points of a group are those of the weights as they are when its turn
    comes. Features that were never seen become 0. group_size: input features that share a scale.
    """
    weight, factor = weight.float().clone(), _factor(hessian)
    weight[:, hessian.diagonal() == 0] = 0.0
    found = []
    for start in range(0, weight.shape[1], group_size):
        stop = min(start + group_size, weight.shape[1])
        codes, errors = _group(weight[:, start:stop], factor[start:stop, start:stop], group_size)
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
        found.append(codes)
    return FourBits.joined(found, dim=1)


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32: row j says how the features from j on share
    the error of j."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _group(weight: torch.Tensor, factor: torch.Tensor, group_size: int) -> tuple[FourBits, torch.Tensor]:
    """Codes of one group's features [rows, n], and their errors in units of the factor's diagonal, [rows, n]."""
    left, errors, codes = weight.clone(), torch.empty_like(weight), torch.empty_like(weight)
    nearest = four_bit_rows(weight, group_size)
    scales, zeros = nearest.scales.float().squeeze(1), nearest.zeros.float().squeeze(1)
    for j in range(weight.shape[1]):
        codes[:, j] = ((left[:, j] / scales).round() + zeros).clamp(0, TOP)
        errors[:, j] = (left[:, j] - (codes[:, j] - zeros) * scales) / factor[j, j]
        left[:, j + 1 :] -= errors[:, j : j + 1] * factor[j, j + 1 :]
    return FourBits(codes.to(torch.uint8), nearest.scales, nearest.zeros, group_size), errors
