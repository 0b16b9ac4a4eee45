"""`monitor init`: a folder with all that Prometheus and Grafana need to watch a server."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from decodescope.errors import InputError
from decodescope.locale import LANGUAGES, language
from decodescope.monitor import setup_files as f
from decodescope.monitor.dashboard import dashboard
from decodescope.monitor.rules import Pace

_ADDRESS = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}\s?")
_HIGHEST_PORT = 65535


def write_setup(
    folder: Path,
    addresses: Mapping[str, Sequence[str]],
    token_file: Path | None = None,
    pace: Pace | None = None,
) -> list[Path]:
    """Write all files into a new or empty folder, in the language in force; returns their paths.

    `addresses` are HOST:PORT by engine (`rules.ENGINES`); without `token_file` a token is made and stands in the
    folder. A `pace` below 1 is for trying alerts out. Raises InputError for an address that is none, a token file
    that holds no token, and a folder that is not empty or cannot be written.
    """
    for each in (address for many in addresses.values() for address in many):
        _check_address(each)
    _check_empty(folder)
    watched = f.Watched(
        addresses, f.TOKEN if token_file is None else str(_checked_token(token_file)), pace or Pace()
    )
    try:
        return [_write(folder / name, text) for name, text in _texts(watched).items()]
    except OSError as fault:
        raise InputError("monitor.init.write", path=folder, reason=fault.strerror or fault) from None


def _texts(watched: f.Watched) -> dict[str, str]:
    """The files by name; the first one keeps what lies in its folder from other users."""
    spoken = language()
    made = {f.TOKEN: secrets.token_urlsafe(32)} if watched.token_file == f.TOKEN else {}
    return {
        **made,
        f.PASSWORD: secrets.token_urlsafe(24),
        "prometheus.yml": f.prometheus_yml(watched),
        "rules/recording.yml": f.recording_yml(watched.pace),
        "rules/alerts.yml": f.alerts_yml(spoken, watched.pace),
        "grafana/provisioning/datasources/prometheus.yml": f.datasource_yml(watched),
        "grafana/provisioning/dashboards/decodescope.yml": f.dashboards_yml(),
        **{f"grafana/dashboards/{f.dashboard_file(code)}": _json(code) for code in LANGUAGES},
        "compose.yml": f.compose_yml(watched, spoken),
        "README.md": f.readme(watched, spoken),
    }


def _json(code: str) -> str:
    return json.dumps(dashboard(code), ensure_ascii=False, indent=2) + "\n"


def _write(path: Path, text: str) -> Path:
    """Secrets lie in a folder that only its owner may enter: containers read single files, as other users."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name == "secrets":
        path.parent.chmod(0o700)
    path.write_text(text, encoding="utf-8")
    return path


def _check_address(address: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) <= _HIGHEST_PORT:
        raise InputError("monitor.init.address", address=address)


def _check_empty(folder: Path) -> None:
    try:
        if any(folder.iterdir()):
            raise InputError("monitor.init.not_empty", path=folder)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise InputError("monitor.init.not_folder", path=folder) from None
    except OSError as fault:
        raise InputError("monitor.init.write", path=folder, reason=fault.strerror or fault) from None


def _checked_token(path: Path) -> Path:
    """The absolute path of a file with one token in it."""
    try:
        text = path.read_text(encoding="ascii")
    except OSError as fault:
        raise InputError("monitor.init.token_file", path=path, reason=fault.strerror or fault) from None
    except UnicodeDecodeError:
        raise InputError("monitor.init.no_token", path=path) from None
    if not _TOKEN.fullmatch(text):
        raise InputError("monitor.init.no_token", path=path)
    return path.resolve()
