"""The files for operation name options, ports, paths, folders and metrics that exist.

Their own validators are not needed here: docs/operation.md says which have seen them.
"""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from ops_files import OPS, dashboard_expressions, metrics_in, read_yaml
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.server.config import ServerConfig
from memlm.server.http import app as http_app

pytestmark = pytest.mark.packaging

ROOT = OPS.parent
CONTAINERFILE = (ROOT / "Containerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
PROBES = {"/livez", "/readyz", "/health", "/metrics"}


def settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a server with these arguments would be started with. Fails for an unknown option, and for a wrong value."""
    done = CliRunner().invoke(app, ["serve", *arguments, "--print-config"], env=dict(environment or {}))
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def container_environment() -> dict[str, str]:
    block = re.findall(r"^ENV (.+?[^\\])$", CONTAINERFILE.split("FROM")[-1], re.MULTILINE | re.DOTALL)[0]
    found = dict(pair.split("=", 1) for pair in block.replace("\\\n", " ").split())
    return {name: value for name, value in found.items() if name.startswith("MEMLM_")}


def container_settings(arguments: Sequence[str]) -> dict[str, Any]:
    environment = container_environment()
    found = settings(arguments, environment)
    fields = {name: parameter for name, parameter in _options().items() if parameter in environment}
    assert len(fields) == len(environment), "a variable of the Containerfile is none of memlm serve"
    return found


def _options() -> dict[str, str]:
    """The environment variable of each option of `memlm serve`."""
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    return {name: f"MEMLM_SERVE_{name.upper().replace('-', '_')}" for name in re.findall(r"--([a-z0-9-]+)", shown)}


def test_the_container_serves_at_the_ports_that_it_exposes_and_asks_itself_for_its_health() -> None:
    found = container_settings(["--model", "/models/m"])
    exposed = re.search(r"^EXPOSE (.+)$", CONTAINERFILE, re.MULTILINE)[1].split()
    assert {found["port"], found["http_port"]} == set(map(int, exposed))
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", CONTAINERFILE).groups()
    assert (int(port), path) == (found["http_port"], "/readyz")
    assert re.search(r'^ENTRYPOINT \["memlm", "serve"\]$', CONTAINERFILE, re.MULTILINE)
    volume = re.search(r"^VOLUME (\S+)$", CONTAINERFILE, re.MULTILINE)[1]
    assert {found["store_dir"], found["session_dir"]} == {f"{volume}/stores", f"{volume}/sessions"}
    user = re.search(r"^USER (\d+)", CONTAINERFILE, re.MULTILINE)[1]
    assert f"--uid {user} " in CONTAINERFILE
    assert user != "0"


def test_the_container_has_the_torch_of_processors_unless_another_index_is_given() -> None:
    building = CONTAINERFILE.split("FROM")[1]
    index = re.search(r"^ARG TORCH_INDEX=(\S+)$", building, re.MULTILINE)[1]
    assert index == "https://download.pytorch.org/whl/cpu"
    assert '--extra-index-url "$TORCH_INDEX"' in building
    assert COMPOSE["services"]["memlm"]["build"]["args"] == {"TORCH_INDEX": f"${{TORCH_INDEX:-{index}}}"}


def test_the_container_gets_the_files_that_the_package_is_built_from_and_no_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rules = (ROOT / ".dockerignore").read_text().split()
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    packages = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    files = {"pyproject.toml", "constraints.txt", "MANIFEST.in", project["project"]["readme"]}
    assert kept == packages | files | set(project["project"]["license-files"])
    assert rules[0] == "*"
    assert not any(fnmatch(name, each) for each in kept for name in (".git", ".venv", "build", "tests"))
    extras = re.search(r"'\.\[(.+?)\]'", CONTAINERFILE)[1].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_the_composition_mounts_files_that_exist_and_scrapes_the_http_port() -> None:
    services, found = COMPOSE["services"], container_settings(["--model", "/models/m"])
    command = [word.replace("${MEMLM_MODEL:?name a folder or file in MEMLM_MODELS}", "m")
               for word in services["memlm"]["command"]]  # fmt: skip
    assert container_settings(command)["model"] == "/models/m"
    assert {port.split(":")[-1] for port in services["memlm"]["ports"]} == {str(found["port"]), str(found["http_port"])}
    mounts = dict[str, str]()
    for service in services.values():
        for volume in service["volumes"]:
            source, target = re.fullmatch(r"(\$\{.+?\}|[^:]+):([^:]+)(?::ro)?", volume).groups()
            mounts[target] = source
            assert source.startswith("${") or source in COMPOSE["volumes"] or (ROOT / source).is_file(), source
    prometheus = read_yaml("prometheus.yaml")
    for rules in prometheus["rule_files"]:
        assert mounts[f"/etc/prometheus/{rules}"] == f"./ops/{rules}"
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"memlm:{found['http_port']}"]}]
    assert COMPOSE["services"]["memlm"]["environment"] == {"MEMLM_SERVE_ALLOWED_HOSTS": "memlm"}
    (source,) = read_yaml("grafana-datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml("grafana-dashboards.yaml")["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounts[home] == "./ops/grafana.json"
    assert Path(home).parent == Path(provider["options"]["path"])
    assert _seconds(services["memlm"]["stop_grace_period"]) > ServerConfig(Path("m")).drain_s


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_unit_runs_a_command_that_exists_with_settings_that_hold() -> None:
    unit = (OPS / "memlm.service").read_text()
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    program, *words = lines["ExecStart"].split()
    assert Path(program).name == "memlm"
    assert words == ["serve", "--config", "/etc/memlm/server.toml"]
    found = settings(["--config", str(OPS / "server.toml")])
    state = f"/var/lib/{lines['StateDirectory']}"
    assert {found["store_dir"], found["session_dir"]} == {f"{state}/stores", f"{state}/sessions"}
    assert float(lines["TimeoutStopSec"]) > found["drain_s"]
    assert found["log_format"] == "json"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "memlm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "memlm.service"
    unit.write_text((OPS / "memlm.service").read_text().replace("/opt/memlm/bin/memlm", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_runs_the_container_with_probes_at_paths_and_ports_that_are_served() -> None:
    claim, service, deployment = yaml.safe_load_all((OPS / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = container_settings(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": found["port"], "http": found["http_port"]}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert probes["readiness"] == {"path": "/readyz", "port": "http"}
    assert probes["liveness"] == probes["startup"] == {"path": "/livez", "port": "http"}
    source = Path(http_app.__file__).read_text()
    assert all(f'"{path}"' in source for path in PROBES)
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["http"])
    user = int(re.search(r"^USER (\d+)", CONTAINERFILE, re.MULTILINE)[1])
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (user, True)
    assert pod["terminationGracePeriodSeconds"] > found["drain_s"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert found["model"].startswith(f"{mounts['models']}/")
    assert found["auth_file"].startswith(f"{mounts['tokens']}/")
    assert found["store_dir"].startswith(f"{mounts['data']}/")
    assert {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}, "name": "data"} in pod["volumes"]


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((OPS / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    assert len({panel["title"] for panel in panels}) == len(panels)
    grids = [panel["gridPos"] for panel in panels]
    places = {(grid["x"] + x, grid["y"] + y) for grid in grids for x in range(grid["w"]) for y in range(grid["h"])}
    assert len(places) == sum(grid["w"] * grid["h"] for grid in grids), "panels overlap"
    assert max(x for x, _ in places) < 24
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"} <= variables
    assert all(metrics_in(expression) for expression in dashboard_expressions().values())
