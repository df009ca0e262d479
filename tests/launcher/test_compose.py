"""compose.yaml and Dockerfile: what each service runs is what our own parsers accept."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from decode.config import DecodeConfig
from gateway.config import GatewayConfig
from kvtransfer.command_line import parse
from kvtransfer.curve import CurveKeys
from launcher.cli import COMMANDS
from launcher.config import FetchConfig, HealthConfig
from launcher.keys import make_keys
from prefill.config import PrefillConfig

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = {
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "fetch-model": FetchConfig,
    "health": HealthConfig,
}
NODE = {"NODE_ADDRESS": "10.0.0.2", "GATEWAY_ADDRESS": "10.0.0.1"}
INNERMOST = re.compile(r"\$\{([A-Z_]+):-([^${}]*)\}")


def load(variables):
    """The services of compose.yaml with ${NAME:-default} filled in as docker compose does."""
    text = (ROOT / "compose.yaml").read_text()
    while INNERMOST.search(text):
        text = INNERMOST.sub(lambda match: variables.get(match[1]) or match[2], text)
    assert "${" not in text
    return yaml.safe_load(text)["services"]


def processes(variables):
    """The services that run our processes: all but the one that makes keys."""
    return {name: service for name, service in load(variables).items() if name != "keys"}


def command_config(service, environ=None):
    role, *argv = service["command"]
    return parse(CONFIGS[role], argv, environ or {}, f"kvsplice {role}", "")


def in_profile(profile):
    return {name for name, service in load({}).items() if profile in service["profiles"]}


def test_profiles():
    assert in_profile("prefill-node") == {"fetch-model", "gateway", "prefill"}
    assert in_profile("decode-node") == {"fetch-model", "decode"}
    assert in_profile("cpu") == {"fetch-model", "gateway", "prefill-cpu", "decode-cpu"}
    assert {profile for service in load({}).values() for profile in service["profiles"]} == {
        "prefill-node",
        "decode-node",
        "cpu",
        "keys",
    }


@pytest.mark.parametrize("name", sorted(processes({})))
def test_commands_are_accepted(name):
    service = load(NODE)[name]
    assert command_config(service).model == "smollm2-135m"
    assert service["env_file"] == [{"path": "kvsplice.env", "required": False}]


@pytest.mark.parametrize("name", sorted(processes({})))
def test_the_env_file_decides_the_model(name):
    """Neither a flag nor `environment`, which would win, stands in its way."""
    service = load(NODE)[name]
    assert "environment" not in service
    assert command_config(service, {"KVSPLICE_MODEL": "/models/other"}).model == "/models/other"


def test_variables_that_flags_beat_are_listed():
    services = processes(NODE).values()
    flags = {word.partition("=")[0] for service in services for word in service["command"] if word.startswith("--")}
    beaten = {f"KVSPLICE_{flag.removeprefix('--').replace('-', '_').upper()}" for flag in flags}
    text = (ROOT / "compose.yaml").read_text().partition("have no effect in it:")[2].partition("# WORKER_ID")[0]
    assert set(re.findall(r"KVSPLICE_\w+", text)) == beaten


def test_addresses_fit_each_other():
    services = load(NODE)
    gateway, prefill, decode = (command_config(services[name]) for name in ("gateway", "prefill", "decode"))
    assert prefill.gateway == (f"tcp://gateway:{gateway.control_port}",)
    assert decode.gateway == (f"tcp://10.0.0.1:{gateway.control_port}",)
    assert decode.kv_dial_host == "10.0.0.2"
    assert services["decode"]["ports"] == [f"10.0.0.2:{decode.kv_port}:{decode.kv_port}"]
    assert services["gateway"]["ports"] == [
        f"10.0.0.2:{gateway.port}:{gateway.port}",
        f"10.0.0.2:{gateway.control_port}:{gateway.control_port}",
    ]


def test_on_one_machine_nothing_is_published_but_http_and_control_on_loopback():
    services = load({})
    published = [port for name in in_profile("cpu") for port in services[name].get("ports", [])]
    assert sorted(published) == ["127.0.0.1:8000:8000", "127.0.0.1:8790:8790"]
    assert command_config(services["decode-cpu"]).kv_dial_host == "decode-cpu"


OWN_KEY = {
    "gateway": "gateway",
    "prefill": "prefill",
    "decode": "decode",
    "prefill-cpu": "prefill",
    "decode-cpu": "decode",
}


def mounted(service) -> dict[str, str]:
    """What a service gets beside the models: source by target."""
    mounts = service["volumes"][1:]
    for mount in mounts:
        assert mount["type"] == "bind"
        assert mount["read_only"] is True
        assert mount["bind"] == {"create_host_path": False}
    return {mount["target"]: mount["source"] for mount in mounts}


@pytest.mark.parametrize("name", sorted(OWN_KEY))
def test_each_process_gets_all_public_keys_and_its_own_private_one(name, tmp_path):
    """The folder that a container sees is one that its role can load, with nothing in it that it does not need."""
    make_keys([str(tmp_path / "host")])
    service = load({**NODE, "KEYS_FOLDER": str(tmp_path / "host")})[name]
    folder = Path(command_config(service).curve_dir)
    for target, source in mounted(service).items():
        inside = tmp_path / "container" / Path(target).relative_to(folder)
        inside.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if Path(source).is_dir() else shutil.copy)(source, inside)
    keys = CurveKeys.load(tmp_path / "container", OWN_KEY[name])
    assert set(keys.known) == {"gateway", "prefill", "decode", "worker"}
    assert [path.name for path in tmp_path.glob("container/private/*")] == [f"{OWN_KEY[name]}.key_secret"]
    if name != "gateway":
        keys.check_owns(command_config(service).worker_id)


def test_sockets_that_other_machines_reach_have_keys():
    for name, service in processes(NODE).items():
        assert not any("insecure" in word for word in service["command"])
        assert (name in OWN_KEY) == any("--curve-dir" in word for word in service["command"])
    assert load({})["gateway"]["volumes"][1]["source"] == "./keys/public"


def test_the_service_that_makes_keys():
    service = load({"KEYS_FOLDER": "/srv/keys"})["keys"]
    how, flag, script, _ = service["entrypoint"]
    assert (how, flag) == ("sh", "-c")
    assert script == 'kvsplice "$$@" && chown -R 1000:1000 /keys'  # $$: compose fills in what has one
    command, *words = service["command"]
    assert command in COMMANDS
    assert words == ["/keys"]
    assert service["volumes"] == ["/srv/keys:/keys"]
    assert service["network_mode"] == "none"
    assert re.search("--uid 1000 kvsplice", (ROOT / "Dockerfile").read_text())


def test_a_decode_node_without_its_addresses_is_refused(capsys):
    with pytest.raises(SystemExit):
        command_config(load({})["decode"])
    assert "--kv-advertise-host (KVSPLICE_KV_ADVERTISE_HOST) must not be empty" in capsys.readouterr().err


def test_gpus_are_reserved_where_they_are_used():
    for name, service in load(NODE).items():
        devices = [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
        wanted = {"resources": {"reservations": {"devices": devices}}} if name in ("prefill", "decode") else None
        assert service.get("deploy") == wanted, name


def test_the_grace_period_fits_the_drain():
    for name, service in processes(NODE).items():
        if name != "fetch-model":
            assert int(service["stop_grace_period"].rstrip("s")) > command_config(service).shutdown_timeout_s + 5


def test_roles_wait_for_the_model_and_share_its_volume():
    for name, service in processes(NODE).items():
        assert service["volumes"][0] == "models:/models"
        wanted = {} if name == "fetch-model" else {"fetch-model": {"condition": "service_completed_successfully"}}
        assert service["depends_on"] == wanted
        assert service["restart"] == ("no" if name == "fetch-model" else "unless-stopped")
    assert load({"MODEL_VOLUME": "./here"})["gateway"]["volumes"][0] == "./here:/models"


@pytest.mark.parametrize("name", sorted(set(processes({})) - {"fetch-model"}))
def test_health_checks_ask_about_the_service_itself(name):
    service = load(NODE)[name]
    how, program, command, *argv = service["healthcheck"]["test"]
    assert (how, program, command) == ("CMD", "kvsplice", "health")
    asked = parse(HealthConfig, argv, {}, "kvsplice health", "")
    assert asked.worker_id == (None if name == "gateway" else command_config(service).worker_id)
    assert asked.url.endswith(":8000")


def test_images():
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)) == {"base", "worker", "gateway"}
    used = {name: service["build"]["target"] for name, service in load({}).items()}
    assert {target for name, target in used.items() if name not in ("gateway", "keys")} == {"worker"}
    assert used["gateway"] == used["keys"] == "gateway"
    gateway_stage = dockerfile.partition("AS gateway")[2]
    assert "[gateway]" in gateway_stage
    assert "torch==" not in gateway_stage
    # The main index stays: one with builds of torch need not have the pinned versions of what torch depends on.
    assert '--extra-index-url "$TORCH_INDEX"' in dockerfile
    assert " --index-url" not in dockerfile


def test_the_build_context_has_all_that_is_copied():
    ignored = (ROOT / ".dockerignore").read_text()
    for line in re.findall(r"^COPY (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"\n!{source}\n" in ignored, source
