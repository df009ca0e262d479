"""The bugs that the simulation has to find: one line each, in the real code, of the kind that people write."""

from tests.simulation.mutants_of_control import IN_CONTROL, IN_FAILOVER, IN_GATEWAY
from tests.simulation.mutants_of_losses import IN_LOSSES
from tests.simulation.mutants_of_second_lines import SECOND_LINES
from tests.simulation.mutants_of_workers import (
    IN_DECODE,
    IN_ENGINE,
    IN_GROUPS,
    IN_PREFILL,
    IN_SHARING,
    IN_SWAPPING,
)

_IN_WORKERS = (*IN_ENGINE, *IN_SHARING, *IN_GROUPS, *IN_SWAPPING, *IN_PREFILL, *IN_DECODE)
MUTANTS = (*_IN_WORKERS, *IN_LOSSES, *IN_CONTROL, *IN_GATEWAY, *IN_FAILOVER)
ALL = (*MUTANTS, *SECOND_LINES)
MOST_SEEDS = 600
"""Each of `MUTANTS` is found by one of the first so many seeds."""
