"""The choice of a backend."""

import pytest
import torch

from kernels.reference import ReferenceKernels
from kernels.select import BACKEND_NAMES, UnknownBackendError, select_kernels


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_every_name_gives_a_backend_on_the_cpu(name):
    assert isinstance(select_kernels(name, torch.device("cpu")), ReferenceKernels)


def test_auto_needs_no_gpu_to_choose_for_one():
    assert select_kernels("auto", torch.device("cuda")).name == "reference"


def test_an_unknown_name_is_an_error_that_names_the_valid_ones():
    with pytest.raises(UnknownBackendError, match=r"'fast'.*auto, reference"):
        select_kernels("fast", torch.device("cpu"))


def test_auto_on_an_unknown_device_type_is_an_error():
    with pytest.raises(UnknownBackendError, match="'meta'"):
        select_kernels("auto", torch.device("meta"))
