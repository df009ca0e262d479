"""The choice of a backend."""

import importlib.abc
import logging
import sys

import pytest
import torch

from kernels.errors import KernelsError, UnavailableBackendError, UnknownBackendError
from kernels.reference import ReferenceKernels
from kernels.select import BACKEND_NAMES, select_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Missing(importlib.abc.MetaPathFinder):
    """Makes a package one that is not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def no_triton(monkeypatch):
    for name in [*sys.modules]:
        if name.startswith(("triton", "kernels.triton_backend")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing("triton"), *sys.meta_path])


def test_reference_runs_everywhere():
    for device in (CPU, CUDA):
        assert isinstance(select_kernels("reference", device), ReferenceKernels)


def test_auto_finds_a_backend_for_the_cpu_without_a_warning(caplog):
    assert select_kernels("auto", CPU).name in BACKEND_NAMES
    assert caplog.records == []


def test_auto_without_triton_warns_once_of_what_is_lost(no_triton, caplog):
    with caplog.at_level(logging.WARNING):
        assert select_kernels("auto", CUDA).name == "reference"
    (record,) = caplog.records
    assert "several times slower" in record.message
    assert "triton cannot be imported" in record.message


def test_triton_by_name_is_an_error_where_it_is_missing(no_triton):
    with pytest.raises(UnavailableBackendError, match="cannot be imported"):
        select_kernels("triton", CUDA)


def test_triton_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnavailableBackendError, match="C compiler"):
        select_kernels("triton", CUDA)


def test_the_native_kernels_are_for_cpus_only():
    with pytest.raises(UnavailableBackendError, match="device type 'cpu', not on 'cuda'"):
        select_kernels("cpu", CUDA)


def test_kv_in_another_format_is_not_for_the_native_kernels(caplog):
    with caplog.at_level(logging.WARNING):
        assert select_kernels("auto", CPU, converts_kv=True).name == "reference"
    (record,) = caplog.records
    assert "several times slower" in record.message
    assert "keep K and V in the format that the model computes in" in record.message
    with pytest.raises(UnavailableBackendError, match="the format that the model computes in"):
        select_kernels("cpu", CPU, converts_kv=True)
    assert select_kernels("reference", CPU, converts_kv=True).name == "reference"


def test_the_native_kernels_are_the_best_for_a_cpu():
    assert select_kernels("auto", CPU).name == "cpu"


def test_triton_is_refused_on_a_cpu_outside_of_the_interpreter():
    pytest.importorskip("triton")
    with pytest.raises(UnavailableBackendError, match="need a GPU"):
        select_kernels("triton", CPU)


def test_an_unknown_name_is_an_error_that_names_the_valid_ones():
    with pytest.raises(UnknownBackendError, match=r"'fast'.*auto, reference, cpu, triton"):
        select_kernels("fast", CPU)


def test_auto_on_an_unknown_device_type_is_an_error():
    with pytest.raises(UnknownBackendError, match="'meta'"):
        select_kernels("auto", torch.device("meta"))


def test_errors_have_one_root():
    assert all(issubclass(error, KernelsError) for error in (UnknownBackendError, UnavailableBackendError))
