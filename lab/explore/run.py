"""Explores the power losses of databases from registries: `run.py [--fs TYPE] [--states N] [NAME...]`, as root.

For each database and setting of `stores.py`, a workload commits changes and marks each acknowledged commit in the log
of the disk. `freestone explore` then checks the states after a power loss for two properties: `durable` (every marked
commit exists) and `consistent` (the content is that after some commit). The run fails if a database breaks what its
documentation promises and this is not listed as known, or if a check that must find a loss finds none.

The variable FREESTONE names the program, and EXPLORE_RUST_STORES the program of `rust/`, which is built otherwise.
`--json FILE` writes the results for a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Commits of the workload. The store is closed and opened again after half of them.
COMMITS = 14
KEYS = 5
# Sizes of values, in bytes: some fit into a page of the database with others, and some take several pages.
SIZES = (60, 900, 5000, 200, 12000)
# For each file system: the size of the disk, the command that makes it, and the pieces in which the disk may tear a
# write, in bytes. A torn superblock of ext4 (1024 bytes) or btrfs (4096 bytes) makes the mount fail, whatever the
# database does. XFS takes less than 300 MB, and so a log that a mount recovers quickly, only with --unsupported.
FILE_SYSTEMS = {
    "ext4": ("64M", ["mkfs.ext4", "-q", "-F"], 1024),
    "xfs": ("64M", ["mkfs.xfs", "-q", "-f", "--unsupported"], 512),
    "btrfs": ("112M", ["mkfs.btrfs", "-q", "-f"], 4096),
}
MODELS = ("prefix", "subset", "torn")
# Exit status of a check whose state breaks the property. A check that cannot run has another.
BROKEN = 3


def changes(number: int) -> dict[str, bytes | None]:
    """Returns the changes of a commit. Two keys always have equal values, so that half a commit is noticed."""
    slot = number % KEYS
    value = (f"{number}." * SIZES[number % len(SIZES)])[: SIZES[number % len(SIZES)]].encode()
    made: dict[str, bytes | None] = {"last": str(number).encode(), f"a{slot}": value, f"b{slot}": value}
    if number % 4 == 3:
        gone = (number + 2) % KEYS
        made |= {f"a{gone}": None, f"b{gone}": None}
    return made


def contents() -> list[dict[str, bytes]]:
    """Returns the content after each commit."""
    content: dict[str, bytes] = {}
    after = []
    for number in range(COMMITS):
        for key, value in changes(number).items():
            if value is None:
                content.pop(key, None)
            else:
                content[key] = value
        after.append(dict(content))
    return after


def write(name: str, directory: Path) -> None:
    """Runs the workload: commits, and marks each commit when the database has acknowledged it."""
    from stores import STORES

    open_store = STORES[name].open
    store = open_store(directory)
    writebacks = []
    for number in range(COMMITS):
        if number % 3 == 1:
            # The kernel may write back dirty pages at any time. Otherwise a database that does not flush writes nothing
            # before its end.
            writebacks.append(subprocess.Popen(["sync", "-f", directory]))
        if number == COMMITS // 2:
            store.close()
            store = open_store(directory)
        store.commit(changes(number))
        mark = [os.environ["FREESTONE"], "mark", os.environ["device"], f"c{number}"]
        subprocess.run(mark, check=True, stdout=subprocess.DEVNULL)
    store.close()
    for writeback in writebacks:
        writeback.wait()
    # The check of the last state, in which nothing is lost, must pass for databases that do not flush.
    subprocess.run(["sync", "-f", directory], check=True)


def check(name: str, directory: Path, level: str, mark: str) -> str:
    """Returns what is wrong with a state, or an empty string."""
    from stores import STORES

    if not mark:
        return ""
    kind = STORES[name]
    try:
        store = kind.open(directory)
        content = store.content()
        store.close()
    except Exception as error:
        return f"cannot be read: {type(error).__name__}: {error}"
    acknowledged = int(mark.removeprefix("c"))
    after = contents()
    if kind.atomic:
        numbers = [number for number, each in enumerate([{}, *after], -1) if each == content]
        if not numbers:
            return "no commit left this content"
        if level == "durable" and numbers[-1] < acknowledged:
            return f"commits lost: {numbers[-1]} instead of {acknowledged}" if content else "all commits lost"
        return ""
    possible = after[acknowledged : acknowledged + 2] if level == "durable" else [{}, *after]
    for key in sorted({*content, *(key for each in possible for key in each)}):
        if content.get(key) not in [each.get(key) for each in possible]:
            is_old = content.get(key) in [None, *(each.get(key) for each in after)]
            return f"{key}: {'lost or old' if is_old else 'never written'}"
    return ""


def explore(name: str, level: str, options: list[str], log: Path, arguments: argparse.Namespace) -> dict:
    """Explores the log and returns the result of `freestone explore --json`."""
    this = f"{sys.executable} {HERE / 'run.py'} --check {name} {level}"
    command = [os.environ["FREESTONE"], "explore", "--mount", "--fs", arguments.fs, "--json", "--log", str(log)]
    command += ["--progress", "none", "--seed", str(arguments.seed), "--budget", str(arguments.states)]
    # A check waits for its mount most of the time.
    command += ["--jobs", str(4 * (os.cpu_count() or 1))]
    command += ["--unit", str(FILE_SYSTEMS[arguments.fs][2])]
    command += [option for model in MODELS for option in ("--model", model)]
    command += [*options, "--check", this]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{name}: explore ended with status {done.returncode}")
    result = json.loads(done.stdout)
    if "error" in result:
        raise RuntimeError(f"{name}: {result['error']['message']}")
    return result


def reason(failure: dict) -> str:
    """Returns the kind of a failure, without numbers and names of keys."""
    if failure["end"] == "the file system cannot be mounted":
        return failure["end"]
    if failure["end"] != f"exit status {BROKEN}":
        return f"{failure['end']}: {failure['output'].strip()[-200:]}"
    text = failure["output"].strip().splitlines()[-1]
    return "commits lost" if text.startswith("commits lost") else text


def run(name: str, arguments: argparse.Namespace) -> dict:
    """Records and explores one database. Returns the results of both checks."""
    from stores import STORES

    kind = STORES[name]
    started = time.monotonic()
    levels = {}
    with tempfile.TemporaryDirectory(prefix="explore-") as directory:
        log, base = Path(directory, "log"), Path(directory, "base")
        size, make, _ = FILE_SYSTEMS[arguments.fs]
        subprocess.run(["truncate", "-s", size, base], check=True)
        subprocess.run([*make, base], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        this = f"{sys.executable} {HERE / 'run.py'} --write {name}"
        recording = ["--run", this]
        for level in ("durable", "consistent"):
            # Where a failure is expected, the first one shows that the check works.
            strength = {"durable": 2, "consistent": 1, "nothing": 0}
            is_expected = bool(kind.known) or strength[kind.promise] < strength[level]
            stops = is_expected and not arguments.all_failures
            options = ["--base", str(base), *recording, *(["--stop-at-first"] if stops else [])]
            result = explore(name, level, options, log, arguments)
            reasons: dict[str, int] = {}
            for failure in result["failures"]:
                reasons[reason(failure)] = reasons.get(reason(failure), 0) + failure["states"]
            result["reasons"] = reasons
            levels[level] = result
            recording = []
            if kind.promise == "durable" and not result["failing_states"]:
                # A state that is durable is consistent.
                break
    durable = levels["durable"]
    consistent = levels.get("consistent", durable)
    allowed = {"durable": 0, "consistent": 1, "nothing": 2}[kind.promise]
    found = 2 if consistent["failing_states"] else 1 if durable["failing_states"] else 0
    # Without a loss, the check of a database that promises nothing would show nothing.
    is_found = kind.promise != "nothing" or found > 0
    flaky = sum(len(result["flaky"]) for result in levels.values())
    return {
        "name": name,
        "fs": arguments.fs,
        "promise": kind.promise,
        "known": kind.known,
        "entries": durable["entries"],
        "ok": (found <= allowed or bool(kind.known)) and is_found and not flaky,
        "found": ("durable", "consistent", "nothing")[found],
        "flaky": flaky,
        "seconds": round(time.monotonic() - started, 1),
        "levels": {
            level: {key: result[key] for key in ("states", "failing_states", "end", "reasons", "failures")}
            for level, result in levels.items()
        },
    }


def describe(result: dict) -> str:
    """Returns the line of a result."""
    parts = []
    for level, counts in result["levels"].items():
        text = f"{level}: {counts['failing_states']} of {counts['states']} states fail"
        if counts["reasons"]:
            text += f" ({', '.join(counts['reasons'])})"
        parts.append(text)
    verdict = "ok" if result["ok"] else "FAILED"
    known = f", known: {result['known']}" if result["known"] else ""
    line = f"{result['name']} on {result['fs']}: promises {result['promise']}, is {result['found']}{known}; "
    return f"{verdict:<6} {line}{'; '.join(parts)}; {result['entries']} entries, {result['seconds']} s"


def build_rust() -> str:
    """Builds the program of `rust/` and returns its path."""
    target = HERE.parents[1] / "target" / "explore"
    command = ["cargo", "build", "--quiet", "--locked", "--manifest-path", str(HERE / "rust" / "Cargo.toml")]
    subprocess.run([*command, "--target-dir", str(target)], check=True)
    return str(target / "debug" / "explore-rust-stores")


def main() -> int:
    parser = argparse.ArgumentParser(description="Explores the power losses of databases.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="databases of stores.py, or their first letters")
    parser.add_argument("--fs", default="ext4", choices=FILE_SYSTEMS)
    parser.add_argument("--states", default="60", help="budget of each exploration")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--all-failures", action="store_true", help="continue after a failure that is expected")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--check", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, Path(os.environ["dir"]))
        return 0
    if arguments.check:
        name, level = arguments.check
        problem = check(name, Path(os.environ["dir"]), level, os.environ["mark"])
        print(problem)
        return BROKEN if problem else 0

    from stores import STORES

    os.environ.setdefault("FREESTONE", "freestone")
    chosen = [name for name in STORES if not arguments.names or name.startswith(tuple(arguments.names))]
    if "EXPLORE_RUST_STORES" not in os.environ and any(name.startswith(("redb", "sled")) for name in chosen):
        os.environ["EXPLORE_RUST_STORES"] = build_rust()
    results = []
    for name in chosen:
        try:
            results.append(run(name, arguments))
        except RuntimeError as error:
            results.append({"name": name, "fs": arguments.fs, "ok": False, "error": str(error)})
            print(f"FAILED {error}", flush=True)
        else:
            print(describe(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if chosen and all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
