"""Python's side of `source/sampling.cpp`."""

from typing import Final

import torch

from kernels.cpu.library import Library, check_layout
from kernels.sampling import TorchSampling, exact_weights, finite_peaks

_ROOM: Final = 256
"""Weights of a row that may be in doubt; a row of real logits has one in a hundred steps."""


class NativeSampling:
    """Implements `kernels.sampling.SamplingKernels`.

    Weights are whole numbers, cut off below the point. Where the native exp is so near to one that torch's might be on
    the other side of it, torch's decides: so the weights are the twin's, whatever either exp does with the last bit.
    So it is with the log of a race whose two first arrive almost at once.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._twin = TorchSampling()

    def greatest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_layout(torch.float32, logits)
        rows, vocab_size = logits.shape
        values, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        addresses = values.data_ptr(), ids.data_ptr()
        self._library.greatest(logits.data_ptr(), rows, vocab_size, *addresses, torch.get_num_threads())
        return values, ids

    def token_weights(self, logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        finite = finite_peaks(peaks)
        check_layout(torch.float32, logits)
        check_layout(torch.float64, finite, temperatures)
        rows, vocab_size = logits.shape
        assert finite.shape == (rows,), finite.shape
        assert temperatures.shape == (rows, 1), temperatures.shape
        weights = torch.empty(rows, vocab_size, dtype=torch.int64)
        doubts = torch.empty(rows, _ROOM + 1, dtype=torch.int64)  # how many, and where
        self._library.token_weights(
            logits.data_ptr(), rows, vocab_size, finite.data_ptr(), temperatures.data_ptr(),
            weights.data_ptr(), doubts.data_ptr(), _ROOM, torch.get_num_threads(),
        )  # fmt: skip
        for row, count in enumerate(doubts[:, 0].tolist()):
            if count > 0:
                places = doubts[row, 1 : count + 1] if count <= _ROOM else torch.arange(vocab_size)
                doubtful = logits[row, places].double()
                weights[row, places] = exact_weights(doubtful, finite[row], temperatures[row])
        return weights

    def race(self, weights: torch.Tensor, keys: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        check_layout(torch.int64, weights, keys, otherwise)
        rows, vocab_size = weights.shape
        assert keys.shape == (rows, 1), keys.shape
        assert otherwise.shape == (rows,), otherwise.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self._library.race(
            weights.data_ptr(), rows, vocab_size, keys.data_ptr(), otherwise.data_ptr(), ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        doubtful = ids < 0
        if bool(doubtful.any()):
            ids[doubtful] = self._twin.race(weights[doubtful], keys[doubtful], otherwise[doubtful])
        return ids
