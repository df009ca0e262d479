"""Log lines of every process: one format, to stderr."""

import logging


def configure_logging(level: str) -> None:
    """Sends records of `level` ("debug" ... "error") and above to stderr, with local time and the module's name."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S", force=True
    )
