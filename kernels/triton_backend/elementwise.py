"""Norms and activation: what is bound by memory alone. Roundings are those of `kernels.reference`, step by step."""

import torch
import triton
import triton.language as tl

from kernels.triton_backend.launch import Launch, next_power_of_2

NORM_ELEMENTS = 1024
"""Elements that one program of a norm takes at least: several rows if they are short, such as the heads of q and k."""
SILU_ELEMENTS = 2048


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, size: tl.constexpr, eps: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x [rows, size] float32 by its root mean square, rounded to `dtype`, times weight [1, size]."""
    variance = tl.sum(x * x, 1) / size
    normed = (x * tl.rsqrt(variance + eps)[:, None]).to(dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    output: tl.tensor,
    total: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    num_rows: tl.tensor,
    stride_outer: tl.tensor,
    stride_inner: tl.tensor,
    eps: tl.tensor,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Grid (row tiles,). Row i of x starts at (i // INNER) * stride_outer + (i % INNER) * stride_inner; all else is
    contiguous. With ADD, x + residual is what is normed, and goes to `total`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    real = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = (rows // INNER) * stride_outer + (rows % INNER) * stride_inner
    places = rows[:, None] * SIZE + columns[None, :]
    wide = tl.load(x + starts[:, None] + columns[None, :], mask=real, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns[None, :], mask=(columns < SIZE)[None, :], other=0.0)
    if ADD:
        wide += tl.load(residual + places, mask=real, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=real)
        wide = rounded.to(tl.float32)
    tl.store(output + places, _normed(wide, scales, SIZE, eps, output.dtype.element_ty), mask=real)


@triton.jit
def silu_mul_kernel(
    output: tl.tensor,
    gate_up: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid (rows, column tiles). gate_up: [rows, 2 * SIZE], gate in front; output: [rows, SIZE], contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.load(gate_up + row * stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * SIZE + columns, (activated * up).to(output.dtype.element_ty), mask=columns < SIZE)


def norm_launch(
    output: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> Launch:
    """The launch that fills `output`, and `total` if there is a `residual`. x: [..., N], of up to 3 dimensions that
    may be strided except for the last; everything else contiguous."""
    size = x.shape[-1]
    inner = x.shape[-2] if x.dim() == 3 else 1
    columns = next_power_of_2(size)
    rows = max(1, NORM_ELEMENTS // columns)
    num_rows = x.numel() // size
    arguments = {
        "output": output,
        "total": output if total is None else total,
        "x": x,
        "residual": x if residual is None else residual,
        "weight": weight,
        "num_rows": num_rows,
        "stride_outer": x.stride(0) if x.dim() > 1 else 0,
        "stride_inner": x.stride(1) if x.dim() == 3 else 0,
        "eps": eps,
        "INNER": inner,
        "SIZE": size,
        "COLUMNS": columns,
        "ROWS": rows,
        "ADD": residual is not None,
    }
    return Launch(rms_norm_kernel, (-(-num_rows // rows),), arguments, num_warps=min(16, max(4, columns // 512)))


def silu_mul_launch(output: torch.Tensor, gate_up: torch.Tensor) -> Launch:
    """The launch that fills `output` [T, N]."""
    num_rows, size = output.shape
    columns = min(SILU_ELEMENTS, next_power_of_2(size))
    arguments = {
        "output": output,
        "gate_up": gate_up,
        "stride": gate_up.stride(0),
        "SIZE": size,
        "COLUMNS": columns,
    }
    return Launch(silu_mul_kernel, (num_rows, -(-size // columns)), arguments)
