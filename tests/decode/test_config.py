"""What a decode worker's settings say about preempted requests, and which contradict each other."""

import pytest

from decode.config import DEFAULT_SWAP_GIB, DecodeConfig
from kvtransfer.errors import SettingsError
from launcher.config import ServeConfig


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ({}, 0.0),
        ({"preemption_mode": "recompute"}, 0.0),
        ({"preemption_mode": "swap"}, DEFAULT_SWAP_GIB),
        ({"preemption_mode": "swap", "swap_space": 0.5}, 0.5),
    ],
)
def test_the_host_gives_memory_only_where_it_is_used(settings, gib):
    assert DecodeConfig(**settings).swap_gib == gib


@pytest.mark.parametrize("config", [DecodeConfig, ServeConfig])
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"swap_space": 4.0}, "--swap-space is for --preemption-mode swap"),
        ({"preemption_mode": "recompute", "swap_space": 4.0}, "--swap-space is for --preemption-mode swap"),
        ({"preemption_mode": "swap", "swap_space": 0.0}, "--swap-space"),
        ({"preemption_mode": "drop"}, "--preemption-mode"),
        ({"max_num_partial_prefills": 0}, "--max-num-partial-prefills"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config, settings, text):
    with pytest.raises(SettingsError, match=text):
        config(**settings)
