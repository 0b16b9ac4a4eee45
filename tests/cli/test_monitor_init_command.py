"""`decodescope monitor init`: what it prints, in both languages, and one sentence for every slip."""

import json

import pytest
import yaml


def test_it_tells_every_file_it_wrote_and_where_to_go_on(cli, tmp_path):
    folder = tmp_path / "watch"
    outcome = cli(
        "monitor", "init", folder, "--target", "127.0.0.1:8123", "--vllm", "gpu1:8000", "--vllm", "gpu2:8000"
    )
    assert outcome.code == 0 and outcome.err == ""
    *paths, last = outcome.out.splitlines()
    assert sorted(paths) == sorted(str(path) for path in folder.rglob("*") if path.is_file())
    assert str(folder / "README.md") in last
    jobs = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets == {"decodescope": ["127.0.0.1:8123"], "vllm": ["gpu1:8000", "gpu2:8000"]}


def test_without_any_address_it_watches_our_own_server(cli, tmp_path):
    assert cli("monitor", "init", tmp_path / "watch").code == 0
    (job,) = yaml.safe_load((tmp_path / "watch/prometheus.yml").read_text())["scrape_configs"]
    assert (job["job_name"], job["static_configs"][0]["targets"]) == ("decodescope", ["127.0.0.1:8000"])


def test_chinese_from_the_readme_to_grafanas_home(cli, tmp_path):
    outcome = cli("monitor", "init", tmp_path / "watch", "--lang", "zh")
    assert "README.md" in outcome.out and "请看" in outcome.out
    assert "启动服务" in (tmp_path / "watch/README.md").read_text(encoding="utf-8")
    rules = yaml.safe_load((tmp_path / "watch/rules/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    assert "无法访问" in rules[0]["annotations"]["summary"]
    both = [
        json.loads((tmp_path / f"watch/grafana/dashboards/decodescope.{code}.json").read_text(encoding="utf-8"))
        for code in ("en", "zh")
    ]
    assert [board["title"] for board in both] == ["decodescope: a running model", "decodescope：运行中的模型"]
    assert "decodescope.zh.json" in (tmp_path / "watch/compose.yml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nonsense"], "HOST:PORT"),
        (["--sglang", "host:99999"], "HOST:PORT"),
        (["--token-file", "nowhere"], "cannot be read"),
        (["--lang", "fr"], "fr"),
    ],
)
def test_a_slip_is_one_sentence_and_writes_nothing(cli, tmp_path, arguments, said):
    outcome = cli("monitor", "init", tmp_path / "watch", *arguments)
    assert outcome.code == 2 and said in outcome.fault
    assert not (tmp_path / "watch").exists()


def test_a_folder_with_files_is_refused(cli, tmp_path):
    assert cli("monitor", "init", tmp_path / "watch").code == 0
    again = cli("monitor", "init", tmp_path / "watch")
    assert again.code == 2 and "is not empty" in again.fault
    assert "DIR" in cli("monitor", "init").err


def test_it_loads_neither_torch_nor_numpy(program, tmp_path):
    """Writing text needs no model library."""
    outcome = program("monitor", "init", tmp_path / "watch", PYTHONPROFILEIMPORTTIME="1")
    assert outcome.code == 0
    loaded = {line.rpartition("|")[2].strip() for line in outcome.err.splitlines()}
    assert not loaded & {"torch", "numpy", "fastapi", "prometheus_client"}
