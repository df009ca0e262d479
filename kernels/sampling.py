"""What a backend does for the sampler, and the plain torch twin. Knows rows of logits and weights; no requests.

Ids are places in a row. Of equal numbers the first one wins, everywhere.
"""

from typing import Final, Protocol

import torch

ONE: Final = 1 << 40
"""Weight of the most likely token; leaves int64 room for the sum over a vocabulary of 2**22 tokens."""


class SamplingKernels(Protocol):
    """R: rows, V: vocabulary size. All backends give the same bits."""

    def greatest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The greatest of each row of `logits` [R, V] float32 and its id: [R] float32, [R] int64. NaN counts as the
        greatest."""
        ...

    def token_weights(self, logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Weights [R, V] int64 in 0 .. ONE; the token at the peak has ONE, and a row masked entirely has none.

        `logits` [R, V], `peaks` [R] float32 without NaN and +inf, no logit above its row's peak; `temperatures` [R, 1]
        float64, above 0, however small.
        """
        ...

    def invert(self, weights: torch.Tensor, uniforms: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """The token [R] int64 in whose share of the summed weights each uniform falls, in vocabulary order.

            weights      3     0    2     5            total 10
            uniform   |-----|    |----|---------|      0.3 -> token 2, never token 1
                      0     3    3    5        10

        `weights` [R, V] int64, `uniforms` [R, 1] float64 in [0, 1), `otherwise` [R] for rows whose weights are all 0.
        """
        ...


class TorchSampling:
    """Implements `SamplingKernels` on any device."""

    def greatest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.max(dim=-1)
        return values, ids

    def token_weights(self, logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        return exact_weights(logits.double(), finite_peaks(peaks).unsqueeze(1), temperatures)

    def invert(self, weights: torch.Tensor, uniforms: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        sums = weights.cumsum(dim=-1)
        totals = sums[:, -1:]
        # Less than the total even where float64 rounds: a uniform is at most 1 - 2**-53, which takes half an ulp off.
        marks = (uniforms * totals).floor().to(torch.int64)
        token_ids = torch.searchsorted(sums, marks, right=True).squeeze(1)
        return torch.where(totals.squeeze(1) > 0, token_ids, otherwise)


def finite_peaks(peaks: torch.Tensor) -> torch.Tensor:
    """Peaks as float64, 0 for rows that are masked entirely: -inf - -inf would be NaN."""
    return torch.where(torch.isinf(peaks), 0.0, peaks.double())


def exact_weights(logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """floor(exp((logit - peak) / temperature) * ONE), int64, of float64 tensors of any shape."""
    return (torch.exp((logits - peaks) / temperatures) * ONE).to(torch.int64)
