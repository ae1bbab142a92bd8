"""Measures how fast Nsight Systems exports are read, against SQL and plain Python on the same file in the same run.

    python bench/traces_sqlite.py measure RESULT FILE NAME COMMAND [NAME COMMAND ...]
    python bench/traces_sqlite.py sql FILE       sums by name, left to SQLite: what a hand-written query does
    python bench/traces_sqlite.py python FILE    all events into Python, joined to their launches, busy time per device

bench/traces_sqlite.sh builds strobe, scales a real export up and calls the first.
"""
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time

GPU_TABLES = ["KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"]


def open_export(path):
    database = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    database.text_factory = lambda text: text.decode("utf-8", "replace")
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return database, tables


def sums_in_sql(path):
    """Kernels, calls and ranges summed by name: three of the nine summaries, without median or deviation."""
    database, tables = open_export(path)
    queries = {
        "CUPTI_ACTIVITY_KIND_KERNEL": "SELECT s.value, count(*), sum(e.end - e.start), min(e.end - e.start), "
        "max(e.end - e.start) FROM CUPTI_ACTIVITY_KIND_KERNEL e JOIN StringIds s ON s.id = e.demangledName GROUP BY 1",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "SELECT s.value, count(*), sum(e.end - e.start), min(e.end - e.start), "
        "max(e.end - e.start) FROM CUPTI_ACTIVITY_KIND_RUNTIME e JOIN StringIds s ON s.id = e.nameId GROUP BY 1",
        "NVTX_EVENTS": "SELECT coalesce(s.value, e.text), count(*), sum(e.end - e.start), min(e.end - e.start), "
        "max(e.end - e.start) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId GROUP BY 1",
    }
    return {table: len(database.execute(query).fetchall()) for table, query in queries.items() if table in tables}


def everything_in_python(path):
    """What an import does: every event in memory, ops joined to their launches, busy time per device."""
    database, tables = open_export(path)
    names = dict(database.execute("SELECT id, value FROM StringIds"))
    calls = {}
    for start, end, thread, correlation, name in database.execute(
        "SELECT start, end, globalTid, correlationId, nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
    ):
        calls[(correlation, (thread or 0) >> 24)] = (start, end, thread, names.get(name))
    devices, launched, ops = {}, 0, 0
    for kind in GPU_TABLES:
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        if table not in tables:
            continue
        for start, end, device, correlation, process in database.execute(
            f"SELECT start, end, deviceId, correlationId, globalPid FROM {table}"
        ):
            devices.setdefault(device, []).append((start, end))
            launched += (correlation, (process or 0) >> 24) in calls
            ops += 1
    ranges = []
    if "NVTX_EVENTS" in tables:
        ranges = [
            (start, end, thread, names.get(text_id) if text_id is not None else text)
            for start, end, thread, text_id, text in database.execute(
                "SELECT start, end, globalTid, textId, text FROM NVTX_EVENTS"
            )
        ]
        ranges.sort(key=lambda row: row[0])
    busy = {}
    for device, spans in devices.items():
        spans.sort()
        reached, total = spans[0][0], 0
        for start, end in spans:
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
        busy[device] = total
    return {"ops": ops, "launched": launched, "calls": len(calls), "ranges": len(ranges), "busy_ns": busy}


def run(command):
    """Wall and processor seconds, peak memory and the last line of output of one run."""
    begun = time.perf_counter()
    process = subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    if status:
        sys.exit(f"{command} failed")
    lines = output.splitlines()
    told = json.loads(lines[-1]) if lines and lines[-1].startswith("{") and lines[-1].endswith("}") else None
    return {
        "wall_s": round(wall, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "output": told,
    }


def measure(result, trace, *named):
    size = os.path.getsize(trace)
    with open(trace, "rb") as file:  # all runs find the file in memory
        while file.read(1 << 24):
            pass
    report = {"bytes": size, "load_average_before": os.getloadavg()[0]}
    baselines = [name for name in named[::2] if not name.startswith("strobe")]
    for name, command in zip(named[::2], named[1::2]):
        # Plain Python takes a minute and many gigabytes: one run, and the result says so.
        repeats = 1 if name == "python" else int(os.environ.get("REPEAT", "5"))
        runs = [run(command) for _ in range(repeats)]
        wall = statistics.median(r["wall_s"] for r in runs)
        cpu = statistics.median(r["cpu_s"] for r in runs)
        peak = max(r["peak_rss_bytes"] for r in runs)
        report[name] = {
            "median_wall_s": wall,
            "median_cpu_s": cpu,
            "mb_per_s": round(size / 1e6 / wall, 1),
            "peak_rss_bytes": peak,
            "peak_rss_per_byte": round(peak / size, 3),
            "runs": runs,
        }
        print(f"{name}: {wall:.3f} s wall, {cpu:.3f} s of processor, {peak / 1e6:.0f} MB peak ({peak / size:.2f} of the file)")
    for name in named[::2]:
        for baseline in baselines if name not in baselines else []:
            keys = ("wall", "cpu")
            faster = {k: round(report[baseline][f"median_{k}_s"] / report[name][f"median_{k}_s"], 1) for k in keys}
            report[f"{baseline} / {name}"] = faster
            print(f"{name} is {faster['wall']} times as fast as {baseline} (processor time: {faster['cpu']} times)")
    cpu_name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    machine = {"cpu": cpu_name, "cores": os.cpu_count(), "memory_bytes": memory, "kernel": os.uname().release}
    record = {"name": "traces-nsys", "commit": os.environ.get("bench_commit"), "command": os.environ.get("bench_command")}
    with open(result, "w") as file:
        json.dump(record | {"machine": machine, "report": report}, file, indent=2)


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    if action == "measure":
        measure(*arguments)
    else:
        print(json.dumps({"sql": sums_in_sql, "python": everything_in_python}[action](*arguments)))
