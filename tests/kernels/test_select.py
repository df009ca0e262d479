"""The choice of a backend."""

import pytest
import torch

from kernels.select import BACKEND_NAMES, UnknownBackendError, select_kernels


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_every_name_gives_a_backend_on_the_cpu(name):
    assert select_kernels(name, torch.device("cpu")).name == ("cpu" if name == "auto" else name)


def test_the_native_backend_is_for_cpus_only():
    with pytest.raises(UnknownBackendError, match="'cpu' run on device type 'cpu', not on 'cuda'"):
        select_kernels("cpu", torch.device("cuda"))


def test_auto_needs_no_gpu_to_choose_for_one():
    assert select_kernels("auto", torch.device("cuda")).name == "reference"


def test_an_unknown_name_is_an_error_that_names_the_valid_ones():
    with pytest.raises(UnknownBackendError, match=r"'fast'.*auto, reference, cpu"):
        select_kernels("fast", torch.device("cpu"))


def test_auto_on_an_unknown_device_type_is_an_error():
    with pytest.raises(UnknownBackendError, match="'meta'"):
        select_kernels("auto", torch.device("meta"))
