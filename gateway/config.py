"""Settings of the gateway."""

from dataclasses import dataclass
from pathlib import Path

from kvtransfer.addresses import check_host, check_private_bind, is_loopback
from kvtransfer.errors import SettingsError
from kvtransfer.settings import ProcessSettings, Settings, like, setting


def check_admin(host: str, enable_admin: bool, api_key: str | None, admin_key: str | None) -> None:
    """Raises SettingsError for admin calls that anybody could make, and for an admin key that clients know."""
    if admin_key is not None and admin_key == api_key:
        raise SettingsError("--admin-key is the same as --api-key: say --enable-admin if clients may make admin calls")
    if enable_admin and api_key is None and admin_key is None and not is_loopback(host):
        raise SettingsError(
            f"--host={host} can be reached from other machines, and --enable-admin without a key lets anybody there "
            "switch workers: give an --admin-key or an --api-key"
        )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Settings):
    """The HTTP face: what it serves, where it listens, and its bounds. Times are in seconds."""

    model: str = setting(
        "smollm2-135m",
        "Model whose tokenizer and chat template to use: the embedded default's name, a local Hugging Face folder, or "
        "a hub name.",
        group="model",
        metavar="PATH_OR_NAME",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names that requests may use; the first one stands in answers.",
        group="model",
        metavar="NAME[,NAME]",
        default_text="the model's name",
    )
    default_seed: int | None = like(ProcessSettings, "default_seed")
    host: str = setting("127.0.0.1", "Address of the HTTP server.", group="network", metavar="HOST")
    port: int = setting(8000, "Port of the HTTP server; 0 takes any free one.", group="network", ge=0, le=65535)
    api_key: str | None = setting(
        None,
        "Key that clients must send as a bearer token; the variable keeps it out of process lists.",
        group="network",
        metavar="KEY",
        default_text="no key needed",
        secret=True,
    )
    enable_admin: bool = setting(
        False,
        "Answer calls under /admin/, which list the workers and switch their roles; they need the API key, if there is "
        "one.",
        group="network",
    )
    admin_key: str | None = setting(
        None,
        "Key that calls under /admin/ must send instead of the API key; with it, --enable-admin is not needed.",
        group="network",
        metavar="KEY",
        default_text="as --enable-admin says",
        secret=True,
    )
    control_host: str = setting("127.0.0.1", "Address that workers dial.", group="network", metavar="HOST")
    control_port: int = setting(8790, "Port that workers dial.", group="network", ge=1, le=65535)
    curve_dir: str | None = like(ProcessSettings, "curve_dir")
    insecure: bool = like(ProcessSettings, "insecure")
    max_body_bytes: int = setting(8 << 20, "Largest request body, in bytes.", group="bounds", ge=1024, le=1 << 30)
    max_connections: int = setting(512, "Most open HTTP connections.", group="bounds", ge=1, le=1 << 20)
    max_concurrent_requests: int = setting(
        256, "Most requests in work; more get an error at once.", group="bounds", ge=1, le=1 << 20
    )
    stream_buffer_tokens: int = setting(
        4096, "Tokens kept for a client that reads slowly; past it the request is cancelled.", group="bounds", ge=1
    )
    default_mode: str = setting(
        "auto",
        "Where prompts are computed, unless a request says so in X-KVSplice-Mode: disaggregated on a prefill worker, "
        "local on the decode worker itself, auto on either (see --local-prefill-threshold).",
        group="modes",
        choices=("auto", "disaggregated", "local"),
    )
    local_prefill_threshold: int = setting(
        64,
        "In auto mode, decode computes a prompt itself if all but so many tokens are in its cache; 0: only if there is "
        "no prefill worker.",
        group="modes",
        ge=0,
        le=1 << 20,
    )
    head_timeout_s: float = setting(
        10.0, "Seconds that a client has to send the head of a request.", group="timing", ge=0.1, le=3600
    )
    request_timeout_s: float = setting(
        600.0, "Longest life of a request once dispatched, in seconds.", group="timing", ge=0.1
    )
    first_token_timeout_s: float = setting(
        300.0, "Longest wait for the first token, in seconds.", group="timing", ge=0.1
    )
    max_retries: int = setting(
        3,
        "How often a request whose worker is lost or fails is tried again, from where its output stands; 0: never.",
        group="failover",
        ge=0,
        le=100,
    )
    failover_timeout_s: float = setting(
        30.0, "Longest wait of such a request for workers that can go on with it, in seconds.", group="failover", ge=0
    )
    dead_after_s: float = setting(
        2.0, "A worker that is silent for so many seconds is given up.", group="timing", ge=0.1, le=3600
    )
    stalled_after_s: float = setting(
        60.0,
        "A worker whose engine stands still for so many seconds gets no more requests.",
        group="timing",
        ge=0.1,
        le=86400,
    )
    shutdown_timeout_s: float = setting(
        10.0, "Seconds that running requests get to end after SIGTERM.", group="timing", ge=0, le=3600
    )
    log_level: str = like(ProcessSettings, "log_level")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host("--host", self.host)
        check_private_bind("--control-host", self.control_host, self.curve_dir, self.insecure)
        check_admin(self.host, self.enable_admin, self.api_key, self.admin_key)
        if self.port == self.control_port:
            raise SettingsError(f"--port and --control-port are both {self.port}: they need a port each")
        if len(set(self.served_model_name)) != len(self.served_model_name):
            raise SettingsError("--served-model-name names the same model twice")

    @property
    def takes_admin_calls(self) -> bool:
        return self.enable_admin or self.admin_key is not None

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may use, never empty. A local folder is known by its last part, not by its path."""
        return self.served_model_name or (Path(self.model).resolve().name if Path(self.model).is_dir() else self.model,)
