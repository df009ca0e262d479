"""Checkpoints from the Hugging Face hub. The import is lazy: a local folder needs no hub client."""

from pathlib import Path
from typing import Final

from launcher.errors import ModelUnavailableError

DESCRIPTION_FILES: Final = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
WEIGHT_FILES: Final = ("*.safetensors",)
SECOND_COPIES: Final = ("original/*", "consolidated*", "onnx/*")


def download_snapshot(name: str, weights: bool) -> Path:
    """The local folder of hub model `name`, downloaded if need be. Raises ModelUnavailableError."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = [*DESCRIPTION_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(SECOND_COPIES))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelUnavailableError(
            f"--model: {name} is no local folder, and the hub does not give it; "
            "check the name, the network, and HF_TOKEN if access is restricted"
        ) from error
    return Path(folder)
