"""What a backend does for the sampler, and the plain torch twin. Knows rows of logits and weights; no requests.

Ids are places in a row. Of equal numbers the first one wins, everywhere.
"""

from typing import Final, Protocol

import torch

ONE: Final = 1 << 40
"""Weight of the most likely token; leaves int64 room for the sum over a vocabulary of 2**22 tokens."""

# SplitMix64's constants, as torch's int64 has them.
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_MIX: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_MIX: Final = 0x94D049BB133111EB - (1 << 64)


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

    def race(self, weights: torch.Tensor, keys: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """The token [R] int64 that arrives first, where token v of a row arrives at

            -log1p(-u) / weight    u = token_noise(key)[v], so -log1p(-u) is exponentially distributed with mean 1

        Token v wins with probability weight / sum of the row's weights; one of weight 0 never does. (The exponential
        race, or Gumbel-max trick; Maddison, Tarlow, Minka, "A* Sampling", 2014.) Unlike the inversion of summed
        weights, where an error in one logit moves the shares of all tokens behind it, an error of e in the logits
        changes the winner only if the second arrives within about e of the first.

        `weights` [R, V] int64, `keys` [R, 1] int64 of any bits, `otherwise` [R] for rows whose weights are all 0.
        """
        ...


class TorchSampling:
    """Implements `SamplingKernels` on any device."""

    def greatest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.max(dim=-1)
        return values, ids

    def token_weights(self, logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        return exact_weights(logits.double(), finite_peaks(peaks).unsqueeze(1), temperatures)

    def race(self, weights: torch.Tensor, keys: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        arrivals = -torch.log1p(-token_noise(keys, weights.shape[-1])) / weights
        soonest, token_ids = arrivals.min(dim=-1)
        return torch.where(torch.isfinite(soonest), token_ids, otherwise)


def token_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Numbers [R, V] float64 in (0, 1), odd multiples of 2**-53: the first V of SplitMix64 started at `keys` [R, 1].

    (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.) Integers wrap around.
    """
    bits = keys + torch.arange(1, vocab_size + 1, device=keys.device) * _GOLDEN_GAMMA
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST_MIX
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND_MIX
    bits = bits ^ _shift_right(bits, 31)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _shift_right(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Torch repeats the sign of int64; the generator's integers have none."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def finite_peaks(peaks: torch.Tensor) -> torch.Tensor:
    """Peaks as float64, 0 for rows that are masked entirely: -inf - -inf would be NaN."""
    return torch.where(torch.isinf(peaks), 0.0, peaks.double())


def exact_weights(logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """floor(exp((logit - peak) / temperature) * ONE), int64, of float64 tensors of any shape."""
    return (torch.exp((logits - peaks) / temperatures) * ONE).to(torch.int64)
