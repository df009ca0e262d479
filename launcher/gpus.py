"""Which GPUs the workers of one machine get."""

from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES takes them; none for `device` cpu."""
    if device == "cpu":
        return ()
    if VISIBLE in environ:
        return tuple(name.strip() for name in environ[VISIBLE].split(",") if name.strip())
    return tuple(str(index) for index in range(_count_gpus()))


def _count_gpus() -> int:
    """GPUs that the NVIDIA driver knows; 0 without a driver. torch would cost seconds to ask."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
