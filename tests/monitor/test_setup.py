"""`monitor init`: everything Prometheus and Grafana need, in one folder, and nothing overwritten."""

import json
import stat
from pathlib import Path

import pytest
import yaml
from prometheus_server import needs_promtool, promtool

from decodescope.errors import InputError
from decodescope.locale import LANGUAGES, set_language
from decodescope.monitor.alerts import ALERTS, EXAMPLES
from decodescope.monitor.rules import ENGINES, Pace
from decodescope.monitor.setup import write_setup

OURS = {"decodescope": ["127.0.0.1:8000"]}


def read(path: Path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@needs_promtool
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("scale", [1, 1 / 60, 0.001])
def test_prometheus_accepts_what_is_written(tmp_path, language, scale):
    set_language(language)
    every = {engine: [f"{engine}:1234", "[::1]:99"] for engine in ENGINES}
    write_setup(tmp_path / "new", every, pace=Pace(scale))
    promtool("check", "config", tmp_path / "new/prometheus.yml")


@needs_promtool
def test_examples_work_as_soon_as_the_comment_signs_are_gone(tmp_path):
    write_setup(tmp_path, OURS)
    for path in (tmp_path / "prometheus.yml", tmp_path / "rules/alerts.yml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.removeprefix("# ") for line in lines) + "\n", encoding="utf-8")
    promtool("check", "config", tmp_path / "prometheus.yml")
    assert [job["job_name"] for job in read(tmp_path / "prometheus.yml")["scrape_configs"]] == list(ENGINES)
    rules = read(tmp_path / "rules/alerts.yml")["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in (*ALERTS, *EXAMPLES)]


def test_only_what_is_named_is_watched_and_only_ours_gets_the_token(tmp_path):
    write_setup(tmp_path, {**OURS, "vllm": ["gpu1:8000", "gpu2:8000"]})
    jobs = {job["job_name"]: job for job in read(tmp_path / "prometheus.yml")["scrape_configs"]}
    assert jobs.keys() == {"decodescope", "vllm"}
    assert jobs["vllm"]["static_configs"] == [{"targets": ["gpu1:8000", "gpu2:8000"]}]
    assert jobs["decodescope"]["authorization"] == {"type": "Bearer", "credentials_file": "secrets/token"}
    assert "authorization" not in jobs["vllm"]


def test_secrets_are_made_anew_and_lie_where_only_their_owner_comes(tmp_path):
    for name in ("one", "two"):
        write_setup(tmp_path / name, OURS)
        assert stat.S_IMODE((tmp_path / name / "secrets").stat().st_mode) == 0o700
    for secret in ("token", "grafana_password"):
        one, two = ((tmp_path / name / "secrets" / secret).read_text() for name in ("one", "two"))
        assert one != two and min(len(one), len(two)) >= 32
        written = [
            path for path in (tmp_path / "one").rglob("*") if path.is_file() and path.parent.name != "secrets"
        ]
        assert written and not any(one in path.read_text(encoding="utf-8") for path in written)


def test_a_token_of_ones_own_is_named_not_copied(tmp_path):
    token = tmp_path / "my $token"
    token.write_text("abc123\n")
    written = write_setup(tmp_path / "new", OURS, token)
    job = read(tmp_path / "new/prometheus.yml")["scrape_configs"][0]
    assert job["authorization"]["credentials_file"] == str(token)
    assert not any("abc123" in path.read_text(encoding="utf-8") for path in written)
    mounts = read(tmp_path / "new/compose.yml")["services"]["prometheus"]["volumes"]
    doubled = str(token).replace("$", "$$")
    assert {"type": "bind", "source": doubled, "target": doubled, "read_only": True} in mounts
    assert f"'{token}'" in (tmp_path / "new/README.md").read_text()


def test_containers_listen_on_loopback_and_know_no_default_password(tmp_path):
    write_setup(tmp_path, OURS)
    compose = read(tmp_path / "compose.yml")
    prometheus, grafana = compose["services"]["prometheus"], compose["services"]["grafana"]
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["command"]
    assert "--enable-feature=exemplar-storage" in prometheus["command"]
    told = grafana["environment"]
    assert told["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert told["GF_AUTH_ANONYMOUS_ENABLED"] == told["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert told["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert compose["secrets"]["grafana_password"]["file"] == "./secrets/grafana_password"
    for service in (prometheus, grafana):
        assert "ports" not in service  # the host's network: an open port would be one on every address
        assert service["network_mode"] == "host"
        assert ":latest" not in service["image"] and service["image"].count(":") == 1
        for mount in service["volumes"]:
            source = mount["source"] if isinstance(mount, dict) else mount.split(":")[0]
            assert (tmp_path / source).exists() if source.startswith("./") else source in compose["volumes"]


def test_grafana_finds_its_source_and_both_dashboards(tmp_path):
    set_language("zh")
    write_setup(tmp_path, {"decodescope": ["gpu:8123"]})
    source = read(tmp_path / "grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "http://127.0.0.1:9090" and source["isDefault"] is True
    assert source["jsonData"]["timeInterval"] == "15s"
    assert source["jsonData"]["exemplarTraceIdDestinations"][0]["url"] == "http://gpu:8123/runs/$${__value.raw}"
    provider = read(tmp_path / "grafana/provisioning/dashboards/decodescope.yml")["providers"][0]
    grafana = read(tmp_path / "compose.yml")["services"]["grafana"]
    inside = provider["options"]["path"]
    assert f"./grafana/dashboards:{inside}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{inside}/decodescope.zh.json"
    for code in LANGUAGES:
        dashboard = json.loads(
            (tmp_path / f"grafana/dashboards/decodescope.{code}.json").read_text(encoding="utf-8")
        )
        assert dashboard["uid"] == f"decodescope-{code}"


def test_a_folder_with_files_is_left_as_it_is(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InputError, match="is not empty"):
        write_setup(tmp_path, OURS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(InputError):
            write_setup(path, OURS)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":80", "host:0", "host:65536", "host:99999999", "http://host:80", "host:80/metrics", "a b:80",
     "-a:80", "host:80\n", "[::1]", "[zz]:80", "h'ost:80", "host:８０"],
)  # fmt: skip
def test_what_is_no_address_is_refused_before_anything_is_written(tmp_path, address):
    with pytest.raises(InputError, match="HOST:PORT"):
        write_setup(tmp_path / "new", {"vllm": [address]})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"one\ntwo", "秘密".encode(), b"x" * 5000])
def test_a_file_without_one_token_is_refused(tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InputError, match="holds no token"):
        write_setup(tmp_path / "new", OURS, tmp_path / "token")
    assert not (tmp_path / "new").exists()


def test_a_missing_token_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        write_setup(tmp_path / "new", OURS, tmp_path / "token")
    with pytest.raises(InputError, match="cannot be read"):
        write_setup(tmp_path / "new", OURS, tmp_path)
