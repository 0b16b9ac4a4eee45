"""`decodescope serve`: keep a model loaded and let clients use it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from decodescope.cli import options as o
from decodescope.cli.console import StderrReport, err, line, out
from decodescope.cli.units import parsed_bytes
from decodescope.errors import InputError
from decodescope.locale import translate as t

if TYPE_CHECKING:
    from decodescope.monitor.telemetry import Telemetry
    from decodescope.serving.archive import Archive
    from decodescope.web.address import Listening

Host = Annotated[str, o.option("serve.host", "--host", metavar="ADDRESS")]
Port = Annotated[int, o.option("serve.port", "--port", metavar="N")]
Token = Annotated[str | None, o.option("serve.token", "--token", metavar="TEXT")]
TokenFile = Annotated[Path | None, o.option("serve.token_file", "--token-file", metavar="FILE")]
AllowHost = Annotated[list[str] | None, o.option("serve.allow_host", "--allow-host", metavar="NAME")]
MaxRunning = Annotated[int, o.option("serve.max_running", "--max-running", metavar="N")]
MaxWaiting = Annotated[int, o.option("serve.max_waiting", "--max-waiting", metavar="N")]
CacheBytes = Annotated[str, o.option("serve.cache_bytes", "--cache-bytes", metavar="BYTES")]
Record = Annotated[str | None, o.option("serve.record", "--record", metavar="all|sample=0.05|on-alert")]
Runs = Annotated[Path, o.option("serve.runs", "--runs", metavar="DIR")]
Keep = Annotated[str, o.option("serve.keep", "--keep", metavar="BYTES")]
Otel = Annotated[bool, o.option("serve.otel", "--otel")]


def serve(
    model: o.Model = "starter",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    max_running: MaxRunning = 8,
    max_waiting: MaxWaiting = 64,
    cache_bytes: CacheBytes = "1GiB",
    record: Record = None,
    runs: Runs = Path("decodescope-runs"),
    keep: Keep = "1GiB",
    guard: o.Guard = None,
    otel: Otel = False,
    json: o.Json = False,
    dtype: o.Dtype = None,
    quantize: o.Quantize = "none",
    cache_dtype: o.CacheDtype = None,
    random_weights: o.RandomWeights = None,
    layers_on_disk: o.LayersOnDisk = "0",
    max_memory: o.MaxMemory = None,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    engine: o.Engine = "native",
    lang: o.Lang = None,
) -> None:
    given = dict(locals())
    if engine != "native":
        raise InputError("engine.unknown", name=engine)
    from decodescope.options import RunOptions
    from decodescope.serving.orders import Plan
    from decodescope.session import Session
    from decodescope.web.address import listen, write_token
    from decodescope.web.serve import Service
    from decodescope.web.serve import serve as serve_session

    guards = RunOptions(guards=tuple(guard or ())).guards  # checked
    plan = Plan(_size("--cache-bytes", cache_bytes), max_running, max_waiting)
    service = Service(plan, _archive(given), guards, _telemetry(model) if otel else None)
    listening = listen(host, port, token, allow_host or ())
    if token_file is not None:
        write_token(token_file, listening.token)
    with StderrReport() as report:
        session = Session.open(model, report=report, progress=report.loading, **o.loading_of(given))
    serve_session(session, listening, service, lambda: _tell(listening, session.files.name, json))
    err().print(line((t("serve.stopped"), "dim")))


serve.__doc__ = t("help.serve")


def _archive(given: dict[str, Any]) -> "Archive | None":
    from decodescope.serving.archive import Archive

    most = _size("--keep", given["keep"])
    return None if given["record"] is None else Archive(given["runs"], given["record"], most)


def _telemetry(model: str) -> "Telemetry":
    from decodescope.monitor.telemetry import telemetry_watcher

    return telemetry_watcher(model)


def _size(option: str, text: str) -> int:
    """Bytes. Raises InputError."""
    size = parsed_bytes(text)
    if size is None:
        raise InputError("serve.size", option=option, value=text)
    return size


def _tell(listening: "Listening", model: str, json: bool) -> None:
    """Say where clients find the server, now that they do."""
    err().print(line(t("serve.listening", model=model, url=listening.url)))
    if json:
        from decodescope.trace.lines import json_text

        serving = {"type": "serving", "url": listening.url, "host": listening.host, "port": listening.port}
        out().file.write(json_text({**serving, "model": model}) + "\n")
        out().file.flush()
