"""Puts run directories of `strobe bench` together into one result per section, and results into the documents.

  cuda_results.py collect RESULT.json COMMIT COMMAND WORK RUN...
  cuda_results.py balance RESULT.json COMMIT WORK RUN BALANCE   the answer of `strobe bench moe-balance`; RUN has the machine
  cuda_results.py agree RESULT.json COMMIT WORK RUN...       what was said of each RUN's two recordings
  cuda_results.py gemm RESULT.json COMMIT PRINTED.txt        what `microbench gemm` printed
  cuda_results.py selftest RESULT.json COMMIT WORK           what `strobe selftest` said, and compute-sanitizer of it
  cuda_results.py ablation BEFORE AFTER COMPARISON.txt       the figures of both runs, then the comparison
  cuda_results.py docs RESULTS_DIR
"""

import json
import os
import re
import sys

# What of a report's own section is kept; the rest follows from it or is long.
KEPT = ("command", "runtime", "implementation", "torch", "weights", "arrival", "peaks", "utilization", "full_batch_decode",
        "start", "memory", "gpu_samples", "cuda", "overlap_scheduler", "repeats", "spread", "windows", "iterations")
# Output tokens per second of one H200 in TensorRT-LLM's own perf-overview.md, the best of its releases: 0.17 and 1.0.
PUBLISHED = {"fp8-short": 29526, "fp8-long": 17744}


def read(path):
    with open(path) as file:
        return json.load(file)


def write(path, document):
    with open(path + ".new", "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


def machine_of(report):
    return {**report["strobe"]["machine"], "device": report["machine"]["name"]}


def name_of(result):
    return os.path.splitext(os.path.basename(result))[0]


def median(strobe, name, single):
    """Median, extremes and number of the repetitions of a figure; the single value where it was run once."""
    spread = strobe.get("spread", {}).get(name)
    if spread:
        return {"median": spread["median"], "min": spread["min"], "max": spread["max"], "runs": spread["count"]}
    return None if single is None else {"median": single, "min": single, "max": single, "runs": 1}


def ceilings(run, strobe):
    """By kind of iteration of the last run: speed, MFU, MBU, and the share of the ceilings. The least an iteration can
    take is the larger of its FLOPs at the measured peak and its bytes at the measured bandwidth; the share is that over
    the time it took. Recorded iterations are left out."""
    peaks = strobe.get("peaks")
    path = os.path.join(run, "iterations.jsonl")
    if not peaks or not os.path.exists(path):
        return {}
    groups = {}
    with open(path) as file:
        for line in file:
            record = json.loads(line)
            own, batch = record["strobe"], record.get("inflightBatchingStats", {})
            prompts, generating = batch.get("numContextRequests", 0), batch.get("numGenRequests", 0)
            if own["profiled"] or own.get("leadIn") or not record["iterLatencyMS"]:
                continue
            kind = "decode" if not prompts else "mixed" if generating else "prefill"
            row = (record["iterLatencyMS"] / 1e3, own["flops"] / peaks["flops_per_s"],
                   own["bytes"] / peaks["read_bytes_per_s"], batch.get("numCtxTokens", 0) + generating, generating)
            groups.setdefault(kind, []).append(row)
            groups.setdefault("all", []).append(row)
    most = max((row[4] for row in groups.get("decode", [])), default=0)
    if most:
        groups["full_batch_decode"] = [row for row in groups["decode"] if row[4] == most]
    found = {}
    for kind, rows in groups.items():
        wall = sum(row[0] for row in rows)
        found[kind] = {
            "iterations": len(rows), "wall_ms": wall * 1e3, "tokens_per_s": sum(row[3] for row in rows) / wall,
            "mfu": sum(row[1] for row in rows) / wall, "mbu": sum(row[2] for row in rows) / wall,
            "share_of_ceilings": sum(max(row[1], row[2]) for row in rows) / wall}
    return found


def figures(run, report):
    strobe = report["strobe"]
    performance = report["performance"]
    found = {
        "requests": report["request_info"]["num_requests"],
        "input_tokens": report["request_info"]["avg_input_length"],
        "output_tokens": report["request_info"]["avg_output_length"],
        "output_tok_s": median(strobe, "Output throughput (tokens/sec)", performance["system_output_throughput_tok_s"]),
        "request_latency_ms": median(strobe, "Average request latency (ms)", performance["avg_request_latency_ms"]),
        "prefill_tok_s": median(strobe, "Prefill iterations (tokens/sec)", None),
    }
    full = strobe.get("full_batch_decode")
    if full:
        speed = median(strobe, "Decode at full batch (tokens/sec)", full["tokens_per_s"])
        found["decode_tok_s"] = speed
        found["decode_batch"] = full["requests"]
        found["decode_step_ms"] = full["requests"] / speed["median"] * 1e3
    found["by_kind"] = ceilings(run, strobe)
    return {name: value for name, value in found.items() if value}


def budget(report):
    """The parts of a recorded iteration and its ops, largest first."""
    profile = report["strobe"].get("profile")
    if not profile:
        return None
    kinds = []
    for kind in profile["budget_by_kind"]:
        parts = sorted(kind["parts"], key=lambda part: -part["mean_ns"])
        kinds.append({
            "kind": kind["kind"], "iterations": kind["iterations"], "mean_wall_us": kind["wall_ns"]["mean"] / 1e3,
            "parts": [{"part": part["part"], "mean_us": part["mean_ns"] / 1e3, "share_of_wall": part["share_of_wall"]}
                      for part in parts if part["mean_ns"] > 0]})
    return {"by_kind": kinds, "top_ops": profile["top_ops"][:16]}


def collect(result, commit, command, work, names):
    runs, machine = [], None
    for name in names:
        run = os.path.join(work, name)
        path = os.path.join(run, "report.json")
        error = run + ".error"
        entry = {"name": name}
        if os.path.exists(error):
            with open(error) as file:
                entry["error"] = file.read().strip()
        elif os.path.exists(path):
            report = read(path)
            strobe = report["strobe"]
            if machine is None or "gpu" not in machine:
                machine = machine_of(report)
            entry.update(command=strobe["command"], engine=report["engine"], figures=figures(run, report))
            recorded = budget(report)
            if recorded:
                entry["budget"] = recorded
            for choice in strobe.get("cuda", {}).get("gemm", {}).get("choices", []):
                choice.pop("candidates", None)
            for repeat in strobe.get("repeats", []):
                repeat.pop("cells", None)
            entry["strobe"] = {key: strobe[key] for key in KEPT if key in strobe}
        else:
            entry["error"] = "there is no report"
        runs.append(entry)
        print(summary(entry))
    write(result, {"name": name_of(result), "commit": commit, "command": command, "machine": machine, "runs": runs})


def balance(result, commit, work, run, name):
    report = read(os.path.join(work, run, "report.json"))
    answer = read(os.path.join(work, name, "balance.json"))
    write(result, {"name": name_of(result), "commit": commit, "command": answer["command"], "machine": machine_of(report),
                   "result": answer})


def agree(result, commit, work, names):
    machine, windows = None, []
    for name in names:
        run = os.path.join(work, name)
        with open(run + ".agree") as file:
            said = file.read().splitlines()
        with open(run + ".profile") as file:
            commands = ["strobe " + file.read().strip()]
        if os.path.exists(os.path.join(run, "report.json")):
            report = read(os.path.join(run, "report.json"))
            commands.insert(0, report["strobe"]["command"])
            machine = machine_of(report)
        windows.append({"name": name, "commands": commands, "said": said})
    what = ("the same iterations recorded by strobe itself and, in another run of the same engine directory, by Nsight Systems; "
            "compared by crates/trace/examples/agree.rs: the same kernels as often in every iteration, and the same time "
            "within 2 %")
    write(result, {"name": name_of(result), "commit": commit, "what": what, "command": "bench/cuda.sh agree",
                   "machine": machine, "windows": windows})


def gemm(result, commit, printed):
    """The tables of products: own and cuBLASLt's times by type, layer and rows."""
    rows, types, device = [], None, None
    with open(printed) as file:
        for line in map(str.strip, file):
            device = device or line
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith(("bf16:", "e4m3:")):
                types = line[:4]
            elif types and len(cells) == 11 and cells[1].isdigit():
                own, theirs, fused = float(cells[2]), float(cells[6]), float(cells[9])
                # Without cuBLASLt there is nothing to hold it against.
                known = theirs == theirs
                rows.append({
                    "types": types, "layer": cells[0], "m": int(cells[1]), "own_us": own, "own_tflops": float(cells[3]),
                    "own_variant": cells[4], "cublaslt_us": theirs if known else None,
                    "cublaslt_tflops": float(cells[7]) if known else None,
                    "own_over_cublaslt": round(theirs / own, 3) if known else None, "own_fused_us": fused,
                    "own_fused_variant": cells[10]})
    if not rows:
        sys.exit(f"{printed} has no table of products")
    what = ("strobe's own tensor-core GEMM against cuBLASLt on TinyLlama-1.1B's shapes, best variant and best algorithm of "
            "each, times inside CUDA graphs with weights that do not stay in L2; own_over_cublaslt is the ratio of speeds")
    write(result, {"name": name_of(result), "commit": commit, "what": what, "command": "bench/cuda.sh gemm",
                   "machine": {"device": device}, "rows": rows})


def selftest(result, commit, work):
    def said(name):
        with open(os.path.join(work, name)) as file:
            return file.read()

    text = said("selftest.txt")
    device = re.search(r"^device +(.*)$", text, re.M)
    checks = {name: {"cases": int(cases), "wrong": int(wrong or 0), "seconds": float(seconds)} for name, wrong, cases, seconds in
              re.findall(r"^([a-z]+) +(?:(\d+) of )?(\d+) cases (?:passed|FAILED) in ([\d.]+) s$", text, re.M)}
    for name, check in checks.items():
        path = f"sanitizer-{name}.txt"
        if os.path.exists(os.path.join(work, path)):
            found = said(path)
            errors = re.search(r"ERROR SUMMARY: (\d+) error", found)
            cases = re.search(r"^([\d,]+) cases in .*all passed", found, re.M)
            check["sanitizer"] = {"cases": int(cases[1].replace(",", "")) if cases else None,
                                  "errors": int(errors[1]) if errors else None}
    write(result, {"name": name_of(result), "commit": commit, "command": "bench/cuda.sh selftest",
                   "machine": {"device": device[1] if device else None}, "said": text.strip().splitlines()[-1],
                   "passes": text.strip().endswith("all passed"), "checks": checks})


def products(document):
    shares = [row["own_over_cublaslt"] * 100 for row in document["rows"]
              if row["types"] == "bf16" and row["m"] == 2048 and row["own_over_cublaslt"]]
    return (f"Product by product, strobe's kernels reach {min(shares):.0f} to {max(shares):.0f} % of cuBLASLt's speed at 2,048 rows in "
            f"bfloat16\n([`bench/results/cuda-gemm.json`](../bench/results/cuda-gemm.json), commit {document['commit'][:12]}).")


def count(value):
    return f"{value:,.0f}"


def percent(value):
    return f"{value * 100:.1f} %"


def microseconds(value):
    return f"{value / 1e3:.2f} ms" if value >= 1e3 else f"{value:.0f} µs" if value >= 100 else f"{value:.1f} µs"


def summary(entry):
    if "error" in entry:
        return f"{entry['name']}: FAILED: {entry['error'].splitlines()[0]}"
    found = entry["figures"]
    pieces = [f"{count(found['output_tok_s']['median'])} output tok/s"]
    if "prefill_tok_s" in found:
        pieces.append(f"prefill {count(found['prefill_tok_s']['median'])} tok/s")
    if "decode_tok_s" in found:
        pieces.append(f"decode at batch {found['decode_batch']} {count(found['decode_tok_s']['median'])} tok/s, "
                      f"{found['decode_step_ms']:.3f} ms per step")
    for kind, row in found.get("by_kind", {}).items():
        pieces.append(f"{kind} {percent(row['share_of_ceilings'])} of the ceilings")
    return f"{entry['name']}: " + "; ".join(pieces)


def ablation(before, after, comparison):
    """What was run, then what `strobe compare` says of it."""
    for run in (before, after):
        print(f"$ {read(os.path.join(run, 'report.json'))['strobe']['command']}")
    print(f"$ strobe compare {before} {after} --html {os.path.splitext(comparison)[0]}.html\n")
    with open(comparison) as file:
        print(file.read().rstrip())


def replace(path, marker, text):
    """Put `text` between `<!-- output: marker -->` and `<!-- end: marker -->`."""
    with open(path) as file:
        page = file.read()
    begin, end = f"<!-- output: {marker} -->", f"<!-- end: {marker} -->"
    if begin not in page or end not in page:
        sys.exit(f"{path} has no place for {marker}: it needs {begin} and {end}")
    head, rest = page.split(begin, 1)
    tail = rest.split(end, 1)[1]
    with open(path, "w") as file:
        file.write(f"{head}{begin}\n{text.rstrip()}\n{end}{tail}")
    print(f"{path}: {marker}")


def docs(results):
    documents = {}
    for section in ("decode", "throughput", "prefill", "fp8", "peers", "ablation"):
        path = os.path.join(results, f"cuda-{section}.json")
        if os.path.exists(path):
            documents[section] = read(path)
    done = {run["name"]: run for document in documents.values() for run in document["runs"] if "figures" in run}
    if not done:
        sys.exit(f"{results} has no results; make them with bench/cuda.sh")
    replace("docs/results.md", "cuda-table", table(documents, done))
    replace("docs/cuda.md", "cuda-budget", budgets(done))
    recordings = os.path.join(results, "cuda-agree.json")
    if os.path.exists(recordings):
        replace("docs/cuda.md", "cuda-agree", agreement(read(recordings)))
    measured = os.path.join(results, "cuda-gemm.json")
    if os.path.exists(measured):
        replace("docs/ablation.md", "cuda-gemm", products(read(measured)))
    for what in ("gemm", "fmha", "ab"):
        path = os.path.join(results, f"ablation-{what}.txt")
        if os.path.exists(path):
            with open(path) as file:
                replace("docs/ablation.md", f"ablation-{what}", f"```text\n{file.read().rstrip()}\n```")


def table(documents, done):
    rows = ["| workload | strobe, median (range) | % of roofline | others, tok/s |", "|---|---|---|---|"]

    def row(what, name, figure, kind, others):
        if name not in done:
            return
        found = done[name]["figures"]
        value = found[figure]["median"]
        ends = f"{count(found[figure]['min'])}-{count(found[figure]['max'])}"
        text = f"**{count(value)}** ({ends}) {'output ' if figure == 'output_tok_s' else ''}tok/s"
        if figure == "decode_tok_s":
            text += f", {found['decode_step_ms']:.2f} ms per step"
        share = percent(found["by_kind"][kind]["share_of_ceilings"]) if kind in found.get("by_kind", {}) else ""
        rows.append(f"| {what} | {text} | {share} | {others} |")

    def peer(names, figure, what, requests=None):
        """The best of these runs, with what is to be known of it: how many requests where they are others than strobe's, the
        batch it was given, and the least and the most where they are far apart."""
        found = [done[name] for name in names if name in done and figure in done[name]["figures"]]
        if not found:
            return ""
        best = max(found, key=lambda run: run["figures"][figure]["median"])
        figures, given = best["figures"], []
        if requests not in (None, figures["requests"]):
            given.append(f"{count(figures['requests'])} requests")
        batch = re.search(r"--max-batch-size (\d+)", best["command"])
        if requests and batch:
            given.append(f"batch {count(int(batch[1]))}")
        value = figures[figure]
        if value["max"] > 1.1 * value["min"]:
            given.append(f"{count(value['min'])} to {count(value['max'])}")
        return f"{what} {count(value['median'])}" + (f" ({', '.join(given)})" if given else "")

    by_batch = [name for name in done if re.fullmatch(r"decode-\d+", name)]
    for name in sorted(by_batch, key=lambda name: int(name.split("-")[1])):
        batch = name.split("-")[1]
        row(f"decode, batch {batch}", name, "decode_tok_s", "full_batch_decode",
            peer([f"peer-graph-{batch}"], "decode_tok_s", "PyTorch in a CUDA graph"))
    for name in (name for name in done if re.fullmatch(r"throughput-\d+", name)):
        found = done[name]["figures"]
        graphs = [other for other in done if re.fullmatch(rf"peer-graph-{found['requests']}(-by-\d+)?", other)]
        generate = [other for other in done if "generate" in other]
        others = [peer(graphs, "output_tok_s", "PyTorch in CUDA graphs", found["requests"]),
                  peer(generate, "output_tok_s", "Hugging Face `generate`", found["requests"])]
        row(f"{count(found['requests'])} requests of {lengths(found)}", name, "output_tok_s", "all",
            ", ".join(filter(None, others)))
    for name, what in (("prefill-one", "prefill, one prompt of {} tokens"),
                       ("prefill-packed", "prefill, prompts of {} tokens packed")):
        if name in done:
            row(what.format(count(done[name]["figures"]["input_tokens"])), name, "prefill_tok_s", "prefill",
                peer([f"peer-{name}"], "prefill_tok_s", "PyTorch"))
    for name in ("fp8-short", "fp8-long"):
        if name in done:
            row(f"Llama-3.1-8B in FP8, {lengths(done[name]['figures'])}", name, "output_tok_s", "all",
                f"TensorRT-LLM publishes {count(PUBLISHED[name])}")
    repeats = sorted({run["figures"]["output_tok_s"]["runs"] for run in done.values()})
    by_commit = {}
    for section, document in documents.items():
        by_commit.setdefault(document["commit"][:12], []).append(section)
    made = "; ".join(f"{', '.join(sections)}: commit {commit}" for commit, sections in sorted(by_commit.items()))
    rows.append("")
    rows.append(f"{where(documents)}; medians of {' to '.join(dict.fromkeys(map(str, (repeats[0], repeats[-1]))))} runs. "
                f"{made[0].upper()}{made[1:]}.")
    return "\n".join(rows)


def where(documents):
    """Which sections ran on the same GPU, as far as results tell."""
    machines = {section: document["machine"] or {} for section, document in documents.items()}
    device = next(iter(machines.values())).get("device", "GPU")
    by_gpu = {}
    for section, machine in machines.items():
        by_gpu.setdefault((machine.get("gpu") or {}).get("uuid"), []).append(section)
    if None in by_gpu:
        return f"Each section on one {device}, not necessarily the same"
    if len(by_gpu) == 1:
        return f"All on one {device}"
    (_, most), *rest = sorted(by_gpu.items(), key=lambda item: -len(item[1]))
    others = [f"{', '.join(sections)} on another" for _, sections in rest]
    return ", ".join([f"{', '.join(most).capitalize()} on one {device}", *others])


def agreement(document):
    """What was said of each window that strobe and Nsight Systems recorded."""
    lines = []
    for window in document["windows"]:
        lines += [f"$ {re.sub(r' --output-dir [^ ]+', '', command)}" for command in window["commands"]]
        lines += [*window["said"], ""]
    return "```text\n" + "\n".join(lines).rstrip() + f"\n```\n\n(commit {document['commit']}, {(document['machine'] or {}).get('device', 'GPU')})"


def lengths(found):
    return f"{found['input_tokens']:.0f}/{found['output_tokens']:.0f}"


def budgets(done):
    rows = ["| run | iterations | mean wall | where it went |", "|---|---|---|---|"]
    for name, run in done.items():
        if name.startswith(("gemm-", "fmha-")):
            continue
        for kind in run.get("budget", {}).get("by_kind", []):
            parts = [f"{part['part']} {microseconds(part['mean_us'])} ({percent(part['share_of_wall'])})"
                     for part in kind["parts"] if part["share_of_wall"] >= 0.005]
            rest = sum(part["share_of_wall"] for part in kind["parts"] if part["share_of_wall"] < 0.005)
            parts += [f"rest {percent(rest)}"] if rest > 0 else []
            iterations, wall = f"{kind['iterations']} {kind['kind']}", microseconds(kind["mean_wall_us"])
            rows.append(f"| {name} | {iterations} | {wall} | {', '.join(parts)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    verb, *given = sys.argv[1:] or [""]
    if verb == "collect" and len(given) >= 5:
        collect(*given[:4], given[4:])
    elif verb == "balance" and len(given) == 5:
        balance(*given)
    elif verb == "agree" and len(given) >= 4:
        agree(*given[:3], given[3:])
    elif verb == "selftest" and len(given) == 3:
        selftest(*given)
    elif verb == "gemm" and len(given) == 3:
        gemm(*given)
    elif verb == "ablation" and len(given) == 3:
        ablation(*given)
    elif verb == "docs" and len(given) == 1:
        docs(*given)
    else:
        sys.exit(__doc__)
