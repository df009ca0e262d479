"""How a worker that can't start ends."""

import pytest

from engine.errors import CapacityError, DeviceError, ModelError
from engine.startup import failures_in_one_line
from kernels.errors import KernelsError
from kvtransfer.errors import SettingsError


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingsError, 2), (KernelsError, 2), (DeviceError, 2), (CapacityError, 2), (ModelError, 1)],
)
def test_one_line_and_an_exit_code(capsys, error, code):
    with pytest.raises(SystemExit) as ended, failures_in_one_line("kvsplice prefill"):
        raise error("--x is\ntoo much")
    assert ended.value.code == code
    assert capsys.readouterr().err == "kvsplice prefill: error: --x is too much\n"
