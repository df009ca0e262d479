"""Exceptions of the wire.

TransferError
├── ProtocolError        a peer sent something this protocol does not allow; its connection pays, nobody else
│   └── MessageError     bytes that do not decode into a known message within the limits
│       └── IdentityError    a message under the name of a worker that the sender's key does not speak for
├── LossError            KV was lost or damaged more often than it is sent again; its transfer fails, the link lives
└── SettingsError        a flag, an environment variable or a file given by the operator is wrong
"""


class TransferError(Exception):
    """Root of all errors raised by `kvtransfer`."""


class ProtocolError(TransferError):
    """A peer broke the protocol (wrong order, range, size or identity)."""


class MessageError(ProtocolError):
    """Bytes from a peer do not decode into a message."""


class IdentityError(MessageError):
    """A peer goes by the name of a worker that is another's."""


class LossError(TransferError):
    """KV of one transfer was lost or damaged too often."""


class SettingsError(TransferError):
    """A setting is unknown, malformed or contradicts another one; printed as one line, exit code 2."""
