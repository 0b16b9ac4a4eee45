"""What stands in the files of a monitoring folder: Prometheus, Grafana, and the two in containers."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from decodescope.locale import LANGUAGES, catalogue
from decodescope.monitor.alerts import EXAMPLES, alert_groups
from decodescope.monitor.rules import ENGINES, Pace, recording_groups
from decodescope.monitor.yaml_text import commented, yaml_text

PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.13.0", "grafana/grafana:13.1.0"
PROMETHEUS_ADDRESS, GRAFANA_ADDRESS = "127.0.0.1:9090", "127.0.0.1:3000"
TOKEN, PASSWORD = "secrets/token", "secrets/grafana_password"
USUAL_ADDRESSES = {  # where these servers listen unless told otherwise
    "decodescope": "127.0.0.1:8000",
    "vllm": "127.0.0.1:8000",
    "sglang": "127.0.0.1:30000",
    "llamacpp": "127.0.0.1:8080",
}
_GRAFANA_LANGUAGES = {"en": "en-US", "zh": "zh-Hans"}
_DASHBOARDS = "/etc/grafana/dashboards"


@dataclass(frozen=True, slots=True)
class Watched:
    """What to watch: addresses by engine; and the file with our servers' token, as Prometheus is to name it."""

    addresses: Mapping[str, Sequence[str]]
    token_file: str
    pace: Pace


def prometheus_yml(watched: Watched) -> str:
    """The configuration of Prometheus; engines that are not watched stand in it as examples, switched off."""
    pace = watched.pace
    head = {
        "global": {
            "scrape_interval": pace.scrape,
            "scrape_timeout": pace.span(10),
            "evaluation_interval": pace.scrape,
        },
        "rule_files": ["rules/*.yml"],
    }
    jobs = {engine: yaml_text([_job(engine, watched)]) for engine in ENGINES}
    shown = [text if watched.addresses.get(engine) else commented(text) for engine, text in jobs.items()]
    return yaml_text(head) + "scrape_configs:\n" + "".join(shown)


def _job(engine: str, watched: Watched) -> dict[str, object]:
    """llama-server has metrics only when started with --metrics."""
    token = {"authorization": {"type": "Bearer", "credentials_file": watched.token_file}}
    addresses = list(watched.addresses.get(engine) or (USUAL_ADDRESSES[engine],))
    return {
        "job_name": engine,
        **(token if engine == "decodescope" else {}),
        "static_configs": [{"targets": addresses}],
    }


def recording_yml(pace: Pace) -> str:
    """The recording rules."""
    return yaml_text({"groups": recording_groups(pace)})


def alerts_yml(language: str, pace: Pace) -> str:
    """The alert rules, and below them those that are only examples."""
    examples = [rule for group in alert_groups(language, pace, EXAMPLES) for rule in _rules(group)]
    below = "".join(f"      {line}\n" for line in yaml_text(examples).splitlines())
    return yaml_text({"groups": alert_groups(language, pace)}) + commented(below)


def _rules(group: Mapping[str, object]) -> Sequence[object]:
    rules = group["rules"]
    assert isinstance(rules, list)
    return rules


def datasource_yml(watched: Watched) -> str:
    """Grafana's data source; the `run_id` of an exemplar leads to the run of the first server."""
    first = (*watched.addresses.get("decodescope", ()), USUAL_ADDRESSES["decodescope"])[0]
    # Grafana would fill in a variable where there is one dollar.
    runs = {"name": "run_id", "url": f"http://{first}/runs/$${{__value.raw}}", "urlDisplayLabel": "run"}
    source = {
        "name": "Prometheus",
        "uid": "decodescope-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://{PROMETHEUS_ADDRESS}",
        "isDefault": True,
        "jsonData": {
            "timeInterval": watched.pace.scrape,
            "httpMethod": "POST",
            "exemplarTraceIdDestinations": [runs],
        },
    }
    return yaml_text({"apiVersion": 1, "datasources": [source]})


def dashboards_yml() -> str:
    """Where Grafana finds the dashboards."""
    provider = {"name": "decodescope", "type": "file", "options": {"path": _DASHBOARDS}}
    return yaml_text({"apiVersion": 1, "providers": [provider]})


def dashboard_file(language: str) -> str:
    """The name of a dashboard's file."""
    return f"decodescope.{language}.json"


def compose_yml(watched: Watched, language: str) -> str:
    """Both in containers, in the host's network: so a server on 127.0.0.1 is reached, and nothing else listens."""
    services = {"prometheus": _prometheus(watched), "grafana": _grafana(language)}
    secret = {"grafana_password": {"file": f"./{PASSWORD}"}}
    return yaml_text({"services": services, "secrets": secret, "volumes": {"prometheus": {}, "grafana": {}}})


def _prometheus(watched: Watched) -> dict[str, object]:
    home = PurePosixPath("/etc/prometheus")
    return {
        "image": PROMETHEUS_IMAGE,
        "network_mode": "host",
        "restart": "unless-stopped",
        "command": [
            f"--config.file={home}/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            f"--web.listen-address={PROMETHEUS_ADDRESS}",
            "--enable-feature=exemplar-storage",
        ],
        "volumes": [
            f"./prometheus.yml:{home}/prometheus.yml:ro",
            f"./rules:{home}/rules:ro",
            _token_mount(watched.token_file, home),
            "prometheus:/prometheus",
        ],
    }


def _token_mount(file: str, home: PurePosixPath) -> dict[str, object]:
    """Written at length: a path may have a colon in it, and a dollar must stand twice."""
    inside = str(home / file).replace("$", "$$")
    source = f"./{file}" if file == TOKEN else inside
    return {"type": "bind", "source": source, "target": inside, "read_only": True}


def _grafana(language: str) -> dict[str, object]:
    host, _, port = GRAFANA_ADDRESS.partition(":")
    return {
        "image": GRAFANA_IMAGE,
        "network_mode": "host",
        "restart": "unless-stopped",
        "environment": {
            "GF_SERVER_HTTP_ADDR": host,
            "GF_SERVER_HTTP_PORT": port,
            "GF_SECURITY_ADMIN_PASSWORD__FILE": "/run/secrets/grafana_password",
            "GF_AUTH_ANONYMOUS_ENABLED": "false",
            "GF_USERS_ALLOW_SIGN_UP": "false",
            "GF_USERS_DEFAULT_LANGUAGE": _GRAFANA_LANGUAGES[language],
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{_DASHBOARDS}/{dashboard_file(language)}",
        },
        "secrets": ["grafana_password"],
        "volumes": [
            "./grafana/provisioning:/etc/grafana/provisioning:ro",
            f"./grafana/dashboards:{_DASHBOARDS}:ro",
            "grafana:/var/lib/grafana",
        ],
    }


def readme(watched: Watched, language: str) -> str:
    """What to do with the folder, in a page."""
    words = catalogue(language)
    serve = f'DECODESCOPE_TOKEN="$(cat {shlex.quote(watched.token_file)})" decodescope serve'
    prometheus = (
        f"prometheus --config.file=prometheus.yml --web.listen-address={PROMETHEUS_ADDRESS}"
        " --enable-feature=exemplar-storage"
    )
    own = watched.token_file == TOKEN
    parts = (
        "# " + words["setup.readme.title"],
        words["setup.readme.server"] + _shell(serve),
        words["setup.readme.prometheus"].format(address=PROMETHEUS_ADDRESS) + _shell(prometheus),
        words["setup.readme.compose"] + _shell("docker compose up -d"),
        words["setup.readme.grafana"].format(
            address=GRAFANA_ADDRESS,
            password=PASSWORD,
            prometheus=PROMETHEUS_IMAGE,
            grafana=GRAFANA_IMAGE,
            languages=", ".join(map(dashboard_file, LANGUAGES)),
        ),
        words["setup.readme.secrets" if own else "setup.readme.token"].format(file=watched.token_file),
        words["setup.readme.others"],
        words["setup.readme.alerts"],
    )
    return "\n\n".join(parts) + "\n"


def _shell(command: str) -> str:
    return f"\n\n```sh\n{command}\n```"
