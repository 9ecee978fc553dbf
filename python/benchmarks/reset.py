"""Measures how long a test waits for a fresh database: with the plugin, by a template, by a copy.

    python benchmarks/reset.py [--rows N] [--rounds N] [--part sqlite,postgres,session]

Runs from the directory `python`, as root, with pytest and PostgreSQL. Prints medians; the ways
alternate in one run, so that other load of the machine affects all of them. A row is about 1 KiB.
"""

# ruff: noqa: S607, S608, T201 - It prints, and runs programs and SQL of its own.

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from pytest_freestone import _postgres, _system  # noqa: E402 - found by the line above.

_CONFTEST = """
import json, os, pytest

def pytest_runtest_logreport(report):
    with open("times", "a") as file:
        file.write(json.dumps([report.nodeid, report.when, report.duration]) + chr(10))

@pytest.fixture(scope="session")
def freestone_sqlite_schema():
    return "CREATE TABLE t (n INTEGER)"

@pytest.fixture(scope="session")
def freestone_postgres_setup():
    return os.environ["SETUP"]
"""

_TEST = """
import time, pytest

@pytest.mark.parametrize("number", range(COUNT))
def test_it(FIXTURE, number):
    USE
    time.sleep(PAUSE)
"""

_USES = {
    "freestone_sqlite": (
        "c = freestone_sqlite.connect(); c.execute('INSERT INTO t VALUES (1)'); c.commit()"
    ),
    "freestone_postgres": 'assert freestone_postgres.psql("SELECT 1") == "1" + chr(10)',
}


def setup(rows: int) -> str:
    """Returns the SQL of a table of about ``rows`` KiB."""
    return (
        "CREATE TABLE t AS SELECT n, repeat(md5(n::text), 30) AS filler "
        f"FROM generate_series(1, {rows}) n; CHECKPOINT;"
    )


def run_plugin(
    directory: Path, fixture: str, count: int, pause: float, ready: int, sql: str
) -> dict[str, list[float]]:
    """Runs tests with a fixture, and returns the durations of the phases."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    ini = (
        f"[pytest]\nfreestone_size = 8G\nfreestone_ready = {ready}\naddopts = -p pytest_freestone\n"
    )
    (directory / "pytest.ini").write_text(ini)
    (directory / "conftest.py").write_text(_CONFTEST)
    text = _TEST.replace("COUNT", str(count)).replace("FIXTURE", fixture)
    text = text.replace("PAUSE", str(pause)).replace("USE", _USES[fixture])
    (directory / "test_it.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "SETUP": sql}
    command = [sys.executable, "-m", "pytest", "-q"]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stdout)
    phases: dict[str, list[float]] = {}
    for line in (directory / "times").read_text().splitlines():
        name, phase, duration = json.loads(line)
        # The first tests make the image, and find no disk that is ready.
        if int(name.rpartition("[")[2].rstrip("]")) >= 2:
            phases.setdefault(phase, []).append(duration)
    return phases


def show(name: str, seconds: list[float]) -> float:
    """Prints a row and returns the median."""
    middle = statistics.median(seconds)
    spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}"
    print(f"{name:<56} {middle * 1e3:9.1f} ms   ({spread}, {len(seconds)} runs)", flush=True)
    return middle


def timed(work: Callable[[], object]) -> float:
    """Returns the duration of a call, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_postgres(directory: Path, rows: int, rounds: int) -> None:
    """Compares a reset by the plugin with `createdb -T` and with a copy of the data directory."""
    programs = _postgres.find_programs()
    owner = _postgres.server_user()
    session = directory / "session"
    (session / "processes").mkdir(parents=True)
    volume = directory / "volume"
    _postgres_fill(programs, session, volume, rows)
    size = int(subprocess.check_output(["du", "-sk", str(volume)]).split()[0])
    print(f"data directory: {size / 1024:.0f} MiB")
    server = _postgres.Postgres(programs, str(session), volume / "data", _postgres.SMALL)
    server.start()
    create = [str(programs / "createdb"), "-T", "template", "fresh"]
    drop = [str(programs / "dropdb"), "fresh"]
    environment = {**os.environ, **server.environment}
    server.psql("ALTER DATABASE postgres RENAME TO template", dbname="template1")
    by_template: list[float] = []
    by_file_copy: list[float] = []
    by_volume: list[float] = []
    by_plugin: dict[str, list[float]] = {"ready": [], "on demand": []}
    for _ in range(rounds):
        for options, into in (([], by_template), (["--strategy", "file_copy"], by_file_copy)):
            command = [*create, *options]
            into.append(timed(partial(_system.run, command, 600, environment=environment)))
            _system.run(drop, 600, environment=environment)
        server.stop()
        copy = directory / "copy"
        command = ["cp", "-a", str(volume / "data"), str(copy)]
        by_volume.append(timed(partial(subprocess.run, command, check=True)))
        shutil.rmtree(copy)
        server.start()
        for name, ready in (("ready", 1), ("on demand", 0)):
            phases = run_plugin(
                directory / "plugin", "freestone_postgres", 6, 1.0, ready, setup(rows)
            )
            both = [a + b for a, b in zip(phases["setup"], phases["teardown"])]
            by_plugin[name] += both
    server.dbname = "template1"
    server.close()
    template = show("createdb -T", by_template)
    show("createdb -T --strategy file_copy", by_file_copy)
    volume_copy = show("cp -a of the data directory", by_volume)
    for name, seconds in by_plugin.items():
        plugin = show(f"freestone_postgres, {name}: setup and teardown", seconds)
        ratios = f"1/{template / plugin:.1f} of createdb -T, 1/{volume_copy / plugin:.1f} of cp -a"
        print(f"    {ratios} (targets: 1/10 and 1/20); user of the server: {owner}")


def _postgres_fill(programs: Path, session: Path, volume: Path, rows: int) -> None:
    volume.mkdir()
    for path in (session.parent, session, volume):
        path.chmod(0o755)
    _postgres.fill(programs, str(session), volume, setup(rows), {})


def measure_sqlite(directory: Path) -> None:
    """Shows how long tests wait for a database, by the duration of the tests."""
    for ready in (0, 1, 2, 4):
        for pause in (0.0, 0.05, 0.2):
            count = 12 if ready == 0 else 30
            phases = run_plugin(directory / "plugin", "freestone_sqlite", count, pause, ready, "")
            name = f"freestone_sqlite, ready={ready}, tests of {pause * 1e3:.0f} ms"
            show(f"{name}: setup", phases["setup"])
            show(f"{name}: teardown", phases["teardown"])


def measure_session(directory: Path, rounds: int) -> None:
    """Compares a session that does not use the plugin with one that does not load it."""
    site = directory / "site" / "freestone-0.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: freestone\nVersion: 0.0\n")
    (site / "entry_points.txt").write_text("[pytest11]\nfreestone = pytest_freestone\n")
    project = directory / "project"
    project.mkdir()
    (project / "test_it.py").write_text("def test_it(): pass\n")
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{site.parent}"}
    command = [sys.executable, "-m", "pytest", "-q"]
    commands = {"with": command, "without": [*command, "-p", "no:freestone"]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds):
        for name in sorted(commands, reverse=bool(number % 2)):
            run = partial(subprocess.run, commands[name], cwd=project, env=environment)
            seconds[name].append(timed(partial(run, stdout=subprocess.DEVNULL, check=True)))
    middles = [show(f"session of one test, {name} the plugin", seconds[name]) for name in commands]
    print(f"    difference: {(middles[0] - middles[1]) * 1e3:.1f} ms (target: 20 ms)")


def main() -> None:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", default="session,sqlite,postgres")
    arguments = parser.parse_args()
    parts = arguments.part.split(",")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {load:.1f} at the start")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        if "session" in parts:
            measure_session(directory, 10 * arguments.rounds)
        if "sqlite" in parts:
            measure_sqlite(directory)
        if "postgres" in parts:
            measure_postgres(directory, arguments.rows, arguments.rounds)


if __name__ == "__main__":
    main()
