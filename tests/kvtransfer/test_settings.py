"""Flags and variables: which one wins, and that whatever is wrong is one line and exit code 2."""

from dataclasses import dataclass

import pytest

from decode.config import DecodeConfig
from gateway.config import GatewayConfig
from kvtransfer.command_line import parse
from kvtransfer.errors import SettingsError
from kvtransfer.settings import Settings, options, setting, to_flags
from kvtransfer.variables import KNOWN_VARIABLES
from launcher.config import FetchConfig, HealthConfig, ServeConfig
from launcher.generate_config import GenerateConfig
from launcher.worker_config import WorkerConfig
from prefill.config import PrefillConfig

CONFIGS = [
    GatewayConfig,
    PrefillConfig,
    DecodeConfig,
    WorkerConfig,
    ServeConfig,
    FetchConfig,
    HealthConfig,
    GenerateConfig,
]
NOT_FLAGS = {"KVSPLICE_CACHE"}


@dataclass(frozen=True, kw_only=True)
class Sample(Settings):
    port: int = setting(8000, "A port.", ge=0, le=65535)
    model: str = setting("tiny", "A model, 100% its own.", group="model")
    kv_cache_gib: float = setting(2.0, "A size.", ge=0.5)
    max_model_len: int | None = setting(None, "A length.", ge=1, default_text="the model's")
    insecure: bool = setting(False, "A switch.")
    gateway: tuple[str, ...] = setting((), "Some names.")
    dtype: str = setting("auto", "A choice.", choices=("auto", "float32"))
    default_seed: int | None = setting(None, "A seed.", flag="seed")


def parsed(argv=(), environ=None):
    return parse(Sample, list(argv), environ or {}, "kvsplice sample", "A sample.")


def error_of(capsys, argv=(), environ=None):
    with pytest.raises(SystemExit) as ended:
        parsed(argv, environ)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("kvsplice sample: error: ")
    assert err.count("\n") == 1
    return err


def test_defaults():
    assert parsed() == Sample()


def test_flag_beats_variable_beats_default():
    environ = {"KVSPLICE_PORT": "1", "KVSPLICE_MODEL": "from-environment", "HOME": "/nowhere"}
    assert parsed(["--port", "2"], environ) == Sample(port=2, model="from-environment")


def test_all_kinds_from_flags():
    argv = [
        "--kv-cache-gib",
        "0.5",
        "--max-model-len=7",
        "--insecure",
        "--gateway",
        "a,b",
        "--gateway",
        "c",
        "--dtype",
        "float32",
        "--seed",
        "-5",
    ]
    assert parsed(argv) == Sample(
        kv_cache_gib=0.5, max_model_len=7, insecure=True, gateway=("a", "b", "c"), dtype="float32", default_seed=-5
    )


def test_all_kinds_from_variables():
    environ = {
        "KVSPLICE_KV_CACHE_GIB": "0.5",
        "KVSPLICE_MAX_MODEL_LEN": "7",
        "KVSPLICE_INSECURE": "true",
        "KVSPLICE_GATEWAY": "a, b",
        "KVSPLICE_DTYPE": "float32",
        "KVSPLICE_SEED": "-5",
    }
    assert parsed([], environ) == Sample(
        kv_cache_gib=0.5, max_model_len=7, insecure=True, gateway=("a", "b"), dtype="float32", default_seed=-5
    )


def test_switch_off_beats_variable():
    assert parsed(["--no-insecure"], {"KVSPLICE_INSECURE": "1"}).insecure is False


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--porf", "1"], "--porf"),
        (["--por", "1"], "--por"),
        (["stray"], "stray"),
        (["--port"], "--port"),
        (["--port", "many"], "--port (KVSPLICE_PORT) must be a whole number, not 'many'"),
        (["--port", "1.5"], "must be a whole number"),
        (["--port", "65536"], "must be at most 65535, not 65536"),
        (["--port", "-1"], "must be at least 0, not -1"),
        (["--kv-cache-gib", "nan"], "must be finite"),
        (["--kv-cache-gib", "1e999"], "must be finite"),
        (["--kv-cache-gib", "big"], "must be a number, not 'big'"),
        (["--dtype", "float8"], "must be one of auto, float32, not 'float8'"),
        (["--gateway", "a,,b"], "must not be empty"),
        (["--model", ""], "--model (KVSPLICE_MODEL) must not be empty"),
        (["--model", "\n" * 3, "--port", "x" * 1000], "not 'xxx"),
    ],
)
def test_wrong_flags(capsys, argv, words):
    line = error_of(capsys, argv)
    assert words in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"KVSPLICE_PROT": "1"}, "unknown environment variable 'KVSPLICE_PROT'; did you mean KVSPLICE_PORT?"),
        ({"KVSPLICE_PORT": "x"}, "--port (KVSPLICE_PORT) must be a whole number, not 'x'"),
        ({"KVSPLICE_PORT": ""}, "KVSPLICE_PORT is set to nothing"),
        ({"KVSPLICE_INSECURE": "maybe"}, "must be true or false, not 'maybe'"),
    ],
)
def test_wrong_variables(capsys, environ, words):
    assert words in error_of(capsys, [], environ)


def test_variables_of_other_roles_are_passed_over():
    assert parsed([], {"KVSPLICE_LEASE_S": "5", "KVSPLICE_CACHE": "/nowhere"}) == Sample()


def test_help_shows_default_variable_and_group(capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "A port. [default: 8000] [env: KVSPLICE_PORT]" in text
    assert "A length. [default: the model's] [env: KVSPLICE_MAX_MODEL_LEN]" in text
    assert "--insecure, --no-insecure" in text
    assert "100% its own" in text
    assert "model: --model TEXT" in text


@pytest.mark.parametrize("config_class", CONFIGS)
def test_help_of_each_role_renders(capsys, config_class):
    with pytest.raises(SystemExit):
        parse(config_class, ["--help"], {}, "kvsplice role", "A role.")
    text = capsys.readouterr().out
    assert all(option.flag in text and option.variable in text for option in options(config_class))


def test_known_variables_are_those_of_the_roles():
    named = {option.variable for config_class in CONFIGS for option in options(config_class)}
    assert named | NOT_FLAGS == KNOWN_VARIABLES


@pytest.mark.parametrize("config_class", CONFIGS)
def test_a_variable_means_the_same_everywhere(config_class):
    """Roles share an environment, so a name must have one type and one meaning."""
    for option in options(config_class):
        for other in (other for peer in CONFIGS for other in options(peer)):
            if other.variable == option.variable:
                assert (other.name, other.kind, other.optional) == (option.name, option.kind, option.optional)
                assert (other.about.choices, other.about.ge, other.about.le) == (
                    option.about.choices,
                    option.about.ge,
                    option.about.le,
                )
                assert other.default == option.default


def test_to_flags_round_trip():
    config = Sample(port=1, model="a b", insecure=True, gateway=("x", "y"), default_seed=-3)
    argv = to_flags(Sample, vars(config))
    assert parsed(argv) == config
    assert not any(flag.startswith("--max-model-len") for flag in argv)


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        Sample().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config_class", "values", "words"),
    [
        (DecodeConfig, {"kv_host": "0.0.0.0", "kv_advertise_host": "a"}, "--insecure"),
        (DecodeConfig, {"kv_host": "0.0.0.0", "insecure": True}, "--kv-advertise-host is needed"),
        (DecodeConfig, {"kv_host": "tcp://1.2.3.4"}, "host name or an IP address"),
        (GatewayConfig, {"control_host": "10.0.0.1"}, "--insecure"),
        (DecodeConfig, {"kv_host": "10.0.0.1"}, "--curve-dir"),
        (GatewayConfig, {"curve_dir": "keys", "insecure": True}, "say one of them"),
        (DecodeConfig, {"curve_dir": "keys", "insecure": True}, "say one of them"),
        (PrefillConfig, {"curve_name": "prefill-0"}, "--curve-dir, which is missing"),
        (GatewayConfig, {"port": 8790}, "both 8790"),
        (GatewayConfig, {"served_model_name": ("a", "a")}, "twice"),
        (GatewayConfig, {"host": "http://x"}, "host name or an IP address"),
        (PrefillConfig, {"gateway": ()}, "at least one"),
        (PrefillConfig, {"gateway": ("localhost:1",)}, "tcp://HOST:PORT"),
        (PrefillConfig, {"gateway": ("tcp://0.0.0.0:1",)}, "tcp://HOST:PORT"),
        (PrefillConfig, {"gateway": ("tcp://a:99999",)}, "tcp://HOST:PORT"),
        (PrefillConfig, {"gateway": ("tcp://a:1", "tcp://a:1")}, "twice"),
        (PrefillConfig, {"heartbeat_interval_s": 5.0}, "longer than"),
        (ServeConfig, {"prefill": -1}, "at least 0"),
        (ServeConfig, {"decode": 0}, "at least 1"),
        (ServeConfig, {"prefill": 0, "default_mode": "disaggregated"}, "needs a prefill worker"),
        (GatewayConfig, {"default_mode": "remote"}, "one of"),
    ],
)
def test_contradictions(config_class, values, words):
    with pytest.raises(SettingsError, match=words):
        config_class(**values)


def test_keys_open_the_sockets_without_further_consent():
    assert GatewayConfig(control_host="10.0.0.1", curve_dir="keys").control_host == "10.0.0.1"
    config = DecodeConfig(kv_host="0.0.0.0", kv_advertise_host="decode.internal", curve_dir="keys", curve_name="d1")
    assert config.kv_dial_host == "decode.internal"
    with pytest.raises(SettingsError, match="--kv-advertise-host is needed"):
        DecodeConfig(kv_host="0.0.0.0", curve_dir="keys")


def test_consent_opens_the_sockets():
    config = DecodeConfig(kv_host="0.0.0.0", kv_advertise_host="decode.internal", insecure=True)
    assert config.kv_dial_host == "decode.internal"
    assert GatewayConfig(control_host="10.0.0.1", insecure=True).control_host == "10.0.0.1"
    assert PrefillConfig(gateway=("tcp://[::1]:5", "tcp://gateway:8790")).gateway[0] == "tcp://[::1]:5"


def test_served_names(tmp_path):
    assert GatewayConfig(model="org/name").served_names == ("org/name",)
    assert GatewayConfig(model=str(tmp_path / "x" / ".." / ".")).served_names == (str(tmp_path / "x" / ".." / "."),)
    assert GatewayConfig(model=str(tmp_path)).served_names == (tmp_path.name,)
    assert GatewayConfig(served_model_name=("a", "b")).served_names == ("a", "b")


def test_the_api_key_is_not_in_repr():
    assert "open-sesame" not in repr(GatewayConfig(api_key="open-sesame"))
    assert "open-sesame" not in repr(ServeConfig(api_key="open-sesame"))
