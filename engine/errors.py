"""Exceptions of the engine.

EngineError
├── ModelError          a checkpoint cannot be served (unknown architecture, missing or surplus weight, bad config)
├── DeviceError         the device that was asked for is not there, or torch cannot use it
├── CapacityError       the KV pool or the device memory is too small for what was asked; says by how much
├── UsageError          a call that the state of an offline LLM does not allow: it is closed, or generating already
├── AccidentError       a request that this worker could not begin with, for no fault of the request: another may
├── OutOfBlocksError    an allocation did not fit (a scheduler's own matter; never reaches a client)
└── RejectedError       a request that this worker can never serve; `str(error)` is safe to show the client
    └── ArgumentTypeError   (a TypeError too) a program has given an LLM something of a wrong Python type
"""


class EngineError(Exception):
    """Root of all errors raised by `engine`."""


class ModelError(EngineError):
    """The checkpoint cannot be served; the message names the architecture, weight or field."""


class DeviceError(EngineError):
    """The device that was asked for cannot be used; the message names it."""


class CapacityError(EngineError):
    """What was asked does not fit the memory at hand."""


class OutOfBlocksError(EngineError):
    """The block pool has fewer free blocks than an allocation needs."""


class UsageError(EngineError):
    """The offline LLM is closed, or in the middle of another generation."""


class AccidentError(EngineError):
    """What a request needs could not be made here, which says nothing of the request."""


class RejectedError(EngineError):
    """The request can never be served here; the message is for the client."""


class ArgumentTypeError(RejectedError, TypeError):
    """An argument is of a Python type that the call does not take; the message names both."""
