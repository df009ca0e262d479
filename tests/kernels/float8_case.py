"""A pool in float8 with scales far from 1, different for K, V and each head; and the numbers that it stands for."""

import math

import torch

from kernels.face import KvScales
from tests.kernels.paged_case import PagedCase, exact_attention

FLOAT8 = torch.float8_e4m3fn


def scales_for(num_kv_heads: int, device: torch.device | str = "cpu") -> KvScales:
    """Key scales from 1/500 up, value scales from 50 down; no two are equal."""
    steps = torch.arange(num_kv_heads, dtype=torch.float32, device=device)
    return KvScales(0.002 * 3.0**steps, 50.0 * 0.3**steps)


def to_codes(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest codes of numbers [..., G, D], ties to even, found by looking at all codes there are."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    exact = codes.double()[:127]  # 0 and up to 448; 127 is NaN
    wanted = (numbers.float() / scale.unsqueeze(-1)).double()
    above = torch.searchsorted(exact, wanted.abs()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = exact[above] - wanted.abs(), wanted.abs() - exact[below]
    closer = torch.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    index = torch.where(wanted.abs() >= exact[126], torch.full_like(closer, 126), closer)
    found = torch.where(wanted.isnan(), torch.full_like(index, 127), index + 128 * wanted.signbit())
    return codes.view(torch.uint8)[found].view(FLOAT8)


def numbers_of(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What stored tokens [..., G, D] stand for, float64."""
    return stored.double() * scale.double().unsqueeze(-1)


class Float8Case:
    """`case` with its pools in float8. The tokens are as large as the scales, so that all codes are in use."""

    def __init__(self, case: PagedCase) -> None:
        self.case = case
        self.scales = scales_for(case.k_pool.shape[2])
        self.k_pool, self.keys = self._store(case.k_pool, case.keys, self.scales.key)
        self.v_pool, self.values = self._store(case.v_pool, case.values, self.scales.value)

    @staticmethod
    def _store(
        pool: torch.Tensor, tokens: list[torch.Tensor], scale: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The pool of what was about 1 before and is about 20 times its scale now, and each row's numbers, float64."""
        spread = 20.0 * scale.unsqueeze(-1)
        stored = to_codes(pool.float() * spread, scale)
        return stored, [numbers_of(to_codes(t.float() * spread, scale), scale) for t in tokens]

    def arguments(self, window: int | None) -> tuple:
        """Of an attention, with a scale that keeps the scores about 1 for the middle head."""
        case = self.case
        return case.query, self.k_pool, self.v_pool, case.rows, self.score_scale, window, None, self.scales

    @property
    def score_scale(self) -> float:
        middle = self.scales.key[len(self.scales.key) // 2].item()
        return self.case.scale / (20.0 * middle)

    def expected(self, window: int | None) -> torch.Tensor:
        """[T, H, D] float64, from the definition on the numbers that are stored."""
        outputs, begin = [], 0
        for query_len, keys, values in zip(self.case.rows.host_query_lens, self.keys, self.values, strict=True):
            query = self.case.query[begin : begin + query_len]
            outputs.append(exact_attention(query, keys, values, self.score_scale, window))
            begin += query_len
        return torch.cat(outputs)


def all_kinds_of_numbers() -> torch.Tensor:
    """Every code's number and both neighbours of every tie in float32, small, large and endless ones; [n] float32."""
    exact = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()[:127]
    ties = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, bound)) for bound in (0.0, math.inf)]
    generator = torch.Generator().manual_seed(8)
    spread = torch.randn(4000, generator=generator) * torch.randn(4000, generator=generator).mul(4).exp()
    ends = torch.tensor([464.0, 480.0, 1e9, math.inf, math.nan, 1e-30, 0.0])
    numbers = torch.cat([exact, ties, *beside, spread, ends])
    return torch.cat([numbers, -numbers])
