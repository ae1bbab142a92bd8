#!/usr/bin/env python3
"""strobe beside the other CPU engines of PyPI: same shapes, same machine, turn about.

    bench/peers/run.py [--model NAME] [--only NAME,..] [--peers NAME,..] [--repeats 7] [--strobe target/release/strobe]

Makes a private virtual environment (--venv), installs the engines there by name, makes a TinyLlama of random weights in
each format (--work, about 20 GB; what an earlier call left there is used again), and lets strobe and one engine at a
time run each workload in turn. What the machine can do at that moment is read before and after every run: a turn in
which it changed by more than 15 % is repeated, and shares of a limit stand against the readings around the run. Medians
over the turns, their spread, and the median of the ratios of each turn go to bench/results/cpu-peers.json and
cpu-peers.svg; what could not run is listed there with its reason. Needs Python 3.10 or later, a C++ compiler for
llama.cpp, and a machine that has nothing else to do: half an hour on 2 cores, once models and engines are there.

--model mixtral-small lets llama.cpp run a small mixture of experts instead, prefill and decode; that result is
bench/results/moe-peers.json.

--rehearse takes a model of two small layers and two repeats: it tests this script and measures nothing worth keeping.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHAPES = {
    "tinyllama-1.1b": dict(vocab=32000, hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, context=16384),
    "mixtral-small": dict(vocab=32000, hidden=512, intermediate=1024, layers=8, heads=8, kv_heads=4, context=4096,
                          experts=8, experts_per_token=2),
}
REHEARSAL = dict(vocab=512, hidden=256, intermediate=512, layers=2, heads=8, kv_heads=2, context=16384)

# strobe's type, how it is built, and the formats of the peers that stand beside it.
TYPES = {
    "int8": (["--quantization", "int8"], {"llama.cpp": "q8_0", "ctranslate2": "int8"}),
    "int4": (["--quantization", "int4"], {"llama.cpp": "q4_0"}),
    "bfloat16": (["--dtype", "bfloat16"], {"llama.cpp": "bf16", "torch": "bfloat16"}),
    "float32": (["--dtype", "float32"], {"llama.cpp": "f32", "torch": "float32"}),
}
PEERS = {  # what pip installs
    "llama.cpp": ["llama-cpp-python", "gguf", "numpy"],
    "torch": ["torch", "transformers"],
    "ctranslate2": ["ctranslate2", "numpy"],
}
# Prompt and output tokens of a request; batch is how many run together; limit is what bounds the work.
WORKLOADS = {
    "prefill": dict(prompt=512, output=1, types=list(TYPES), peers=list(PEERS), unit="tok/s", limit="compute"),
    "decode": dict(prompt=128, output=33, types=list(TYPES), peers=list(PEERS), unit="tok/s", limit="read"),
    "throughput": dict(prompt=128, output=128, requests=64, batch=32, steps=16, types=["int8"], peers=["llama.cpp"],
                       unit="tok/s", limit="compute",
                       note="strobe: output tokens of the whole run, prompts included; the peer: decoding alone"),
    "start": dict(prompt=1, output=1, types=["int8"], peers=["llama.cpp"], unit="s",
                  note="a new process with a warm page cache, until the first token is there"),
}
BATCHED_DECODE = ("both: decoding alone, all 32 requests in every step. strobe: steps of the throughput run that hold "
                  "generating requests only, all 32 of them; the peer: 16 steps after prompts of the same length")
# What strobe is measured in alone.
OWN = ["depth", "scaling"]
# Readings of one turn that differ by more than this belong to different machines.
STEADY = 1.15
skipped = []


def skip(what, why):
    skipped.append({"what": what, "why": why})
    print(f"skipped: {what}: {why}", flush=True)


def cache_dir():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strobe-peers"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strobe", type=Path, default=ROOT / "target/release/strobe", help="the program to measure")
    parser.add_argument("--venv", type=Path, default=cache_dir() / "venv", help="environment of the peers")
    parser.add_argument("--torch-python", type=Path, help="a Python with torch and transformers instead of --venv's")
    parser.add_argument("--work", type=Path, default=cache_dir() / "work", help="where models and engines go")
    parser.add_argument("--output", type=Path, help="default: cpu-peers.json or moe-peers.json in bench/results")
    parser.add_argument("--model", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--only", default="", help=f"some of {', '.join([*WORKLOADS, *OWN])}")
    parser.add_argument("--types", default="", help=f"some of {', '.join(TYPES)}")
    parser.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    for option, known in (("only", [*WORKLOADS, *OWN]), ("types", TYPES), ("peers", PEERS)):
        names = [name for name in getattr(args, option).split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"--{option}: there is no `{unknown[0]}`; there are {', '.join(known)}")
        setattr(args, option, names or list(known))
    args.shape = REHEARSAL if args.rehearse else SHAPES[args.model]
    args.name = "moe-peers" if "experts" in args.shape else "cpu-peers"
    if "experts" in args.shape:
        args.only = [name for name in args.only if name in ("prefill", "decode")]
        args.peers = [name for name in args.peers if name == "llama.cpp"]
        if not args.only or not args.peers:
            parser.error(f"{args.model} has the workloads prefill and decode, and the peer llama.cpp")
        args.work = args.work / args.model
    if args.rehearse:
        args.work = args.work / "rehearsal"
    results = args.work if args.rehearse else ROOT / "bench/results"
    args.output = args.output or results / f"{args.name}.json"
    # Programs run in --work.
    args.strobe, args.work, args.output = args.strobe.resolve(), args.work.resolve(), args.output.resolve()
    if not args.strobe.is_file():
        parser.error(f"{args.strobe} is not there; build it with `cargo build --release`, or name it with --strobe")
    if args.rehearse:
        args.repeats = 2
    elif args.repeats < 7:
        parser.error("--repeats must be at least 7: the machine is never quiet")
    return args


def install(args):
    """The environment, and in it every peer that can be installed."""
    python = args.venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
    # A prebuilt llama.cpp would lack this machine's instructions and be a weak peer.
    environment = dict(os.environ, CMAKE_ARGS="-DGGML_NATIVE=ON")
    found = {}
    for peer in args.peers:
        packages = PEERS[peer]
        runs = args.torch_python if peer == "torch" and args.torch_python else python
        module = {"llama.cpp": "llama_cpp"}.get(peer, peer)
        test = [runs, "-c", f"import {module}; print({module}.__version__)"]
        have = subprocess.run(test, capture_output=True, text=True)
        if have.returncode != 0 and runs == python:
            print(f"installing {peer}: {' '.join(packages)}", flush=True)
            done = subprocess.run([python, "-m", "pip", "install", "-q", "--no-binary", "llama-cpp-python", *packages],
                                  env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                skip(peer, "pip: " + (done.stderr.strip().splitlines() or ["failed"])[-1])
                continue
            have = subprocess.run(test, capture_output=True, text=True)
        if have.returncode != 0:
            skip(peer, (have.stderr.strip().splitlines() or ["cannot be imported"])[-1])
            continue
        found[peer] = (runs, have.stdout.strip())
    subprocess.run([python, "-m", "pip", "install", "-q", "gguf", "numpy", "matplotlib"], check=True)
    return found


class Peer:
    """A worker that holds one model and answers one workload at a time."""

    def __init__(self, args, python, name, file):
        command = [python, HERE / "peer.py", name, file, str(args.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=open(args.work / "peer.log", "w"), text=True)
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended early (exit code {self.process.wait()}), see peer.log")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def run(self, workload):
        self.process.stdin.write(json.dumps(workload) + "\n")
        self.process.stdin.flush()
        return self.answer()["value"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Strobe:
    """The program as a user calls it, one process per measurement."""

    def __init__(self, args, shape):
        self.args, self.shape, self.commands = args, shape, {}
        self.threads = ["--threads", str(args.threads)]

    def call(self, *words):
        done = subprocess.run([self.args.strobe, *words], capture_output=True, text=True, cwd=self.args.work)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
        return done.stdout

    def build(self, kind):
        engine = f"engine-{kind}"
        if not (self.args.work / engine / "config.json").exists():
            print(f"building {engine}", flush=True)
            # An engine of experts is made from strobe's own preset of the same shapes.
            model = [self.args.model] if "experts" in self.shape else ["model-bf16.gguf", "--max-seq-len", "8448"]
            self.call("build", "--model", *model, *TYPES[kind][0], "--output-dir", engine, "--device", "cpu")
        return engine

    def peak(self, kind, limit):
        """What the machine can do now of what limits the work; None where nothing does."""
        if limit is None:
            return None
        which = limit if limit == "read" else "int8" if kind.startswith("int") else kind
        answer = json.loads(self.call("doctor", "--peaks", which, "--json", *self.threads))
        return next(iter(answer["peaks"].values()))

    def dataset(self, name, prompts, output):
        with open(self.args.work / name, "w") as file:
            for task, ids in enumerate(prompts):
                file.write(json.dumps({"task_id": task, "input_ids": ids, "output_tokens": output}) + "\n")
        return name

    def prompt(self, draw, length):
        return [draw.randrange(3, self.shape["vocab"]) for _ in range(length)]

    def run(self, name, *words):
        words = ["bench", *words, "--warmup", "1", *self.threads, "--device", "cpu"]
        self.commands[name] = "strobe " + " ".join(words)
        return self.call(*words)

    def bench(self, kind, name, workload):
        """`value` in the workload's unit; `used` is what of the limit was used in a second."""
        engine = self.build(kind)
        if name == "start":
            words = ["eval", "logits", "--engine-dir", engine, "--ids", "1", "--output", "-", *self.threads,
                     "--device", "cpu"]
            self.commands[name] = "strobe " + " ".join(words)
            begin = time.perf_counter()
            self.call(*words)
            return {"value": time.perf_counter() - begin}
        draw, requests = random.Random(1), workload.get("requests", 1)
        prompts = [self.prompt(draw, workload["prompt"]) for _ in range(requests)]
        data = self.dataset(f"{requests}x{workload['prompt']}-{workload['output']}.jsonl", prompts, workload["output"])
        mode = ["throughput", "--concurrency", str(workload["batch"])] if "batch" in workload else ["latency"]
        report = json.loads(self.run(name, *mode, "--engine-dir", engine, "--dataset", data, "--json"))["strobe"]
        metrics = report["metrics"]
        steps = {entry["kind"]: entry for entry in report["utilization"]}
        if "batch" in workload:
            full, decode, whole = report["full_batch_decode"], steps["decode"], steps["all"]
            if full["requests"] != workload["batch"]:
                raise RuntimeError(f"no step held all {workload['batch']} requests")
            return {"value": metrics["output_throughput_tok_s"], "used": 1e3 * whole["flops"] / whole["wall_ms"],
                    "decode": full["tokens_per_s"],
                    "decode_used": full["tokens_per_s"] * decode["flops"] / decode["tokens"]}
        if workload["output"] == 1:
            step = steps["prefill"]
            return {"value": workload["prompt"] * 1e3 / metrics["ttft_ms"]["p50"],
                    "used": 1e3 * step["flops"] / step["wall_ms"]}
        return {"value": 1e3 / metrics["tpot_ms"]["p50"], "used": steps["decode"]["bytes_per_s"]}


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def is_steady(readings):
    return max(readings) <= STEADY * min(readings)


def take_turns(args, kind, workload, strobe, ours, theirs):
    """Turns of both, each run between two readings of the limit, until enough of them met a steady machine."""
    turns, reading = [], strobe.peak(kind, workload.get("limit"))
    while sum(turn["steady"] for turn in turns) < args.repeats and len(turns) < args.repeats + args.repeats // 2:
        turn = {"strobe": ours(), "peaks": [reading]}
        turn["peaks"].append(strobe.peak(kind, workload.get("limit")))
        turn["peer"] = theirs()
        reading = strobe.peak(kind, workload.get("limit"))
        turn["peaks"].append(reading)
        turn["steady"] = reading is None or is_steady(turn["peaks"])
        turns.append(turn)
    return turns


def steady_turns(turns):
    """Those that count: the steady ones, or all where hardly any was."""
    steady = [turn for turn in turns if turn["steady"]]
    return steady if len(steady) >= 3 else turns


def summary(name, kind, peer, file_type, workload, turns, value="value", used="used", note=None):
    chosen = steady_turns(turns)
    ours, theirs = [turn["strobe"][value] for turn in chosen], [turn["peer"] for turn in chosen]
    faster = workload["unit"] == "tok/s"
    entry = {"workload": name, "type": kind, "peer": peer, "peer_type": file_type, "unit": workload["unit"],
             "strobe": spread(ours), "peer_result": spread(theirs),
             "strobe_is_faster_by": spread([a / b if faster else b / a for a, b in zip(ours, theirs)]), "note": note,
             "turns": len(turns), "turns_on_a_steady_machine": sum(turn["steady"] for turn in turns)}
    if "limit" in workload:
        # strobe ran between the first two readings of a turn.
        around = [statistics.mean(turn["peaks"][:2]) for turn in chosen]
        shares = [turn["strobe"][used] / peak for turn, peak in zip(chosen, around)]
        entry["limit"] = {"by": workload["limit"], "peak": spread(around), "strobe_share": spread(shares),
                          "most": spread([a / share for a, share in zip(ours, shares)])}
    entry["all_turns"] = turns
    a, b, ratio = (entry[key]["median"] for key in ("strobe", "peer_result", "strobe_is_faster_by"))
    share = f", {entry['limit']['strobe_share']['median']:.0%} of the limit" if "limit" in entry else ""
    print(f"{name:14} {kind:8} strobe {a:9.2f}  {peer} {file_type} {b:9.2f} {workload['unit']}: {ratio:.2f}x{share}",
          flush=True)
    return entry


def turn_about(args, strobe, found, shape):
    results = []
    for kind in args.types:
        for peer, file_type in TYPES[kind][1].items():
            names = [name for name, work in WORKLOADS.items()
                     if name in args.only and kind in work["types"] and peer in work["peers"]]
            if peer not in found or not names:
                continue
            try:
                file = make_model(args, peer, file_type, shape, found)
                worker = Peer(args, found[peer][0], peer, file)
            except RuntimeError as why:
                skip(f"{peer} {file_type}", str(why))
                continue
            for name in names:
                workload = dict(WORKLOADS[name], name=name)

                def theirs():
                    nonlocal worker
                    if name == "start":  # in a process of its own
                        worker.close()
                        worker = Peer(args, found[peer][0], peer, file)
                    return worker.run(workload)

                try:
                    turns = take_turns(args, kind, workload, strobe, lambda: strobe.bench(kind, name, workload), theirs)
                except RuntimeError as why:
                    skip(f"{name}, {kind} against {peer} {file_type}", str(why))
                    if worker.process.poll() is not None:
                        break
                    continue
                results.append(summary(name, kind, peer, file_type, workload, turns, note=workload.get("note")))
                if name == "throughput":
                    results.append(summary("batched decode", kind, peer, file_type, workload, turns, "decode",
                                           "decode_used", BATCHED_DECODE))
            worker.close()
    return results


def depth(args, strobe, shape):
    """Decoding far into a context against decoding at its begin: the slowdown, and what more bytes alone would cost."""
    far, output = (1024 if args.rehearse else 8192), 17
    draw = random.Random(1)
    prompts = [strobe.prompt(draw, 128), strobe.prompt(draw, far)]
    # One process, in which both take turns; prompts seen before come from the cache.
    data = strobe.dataset(f"depth-{far}.jsonl", prompts * (args.repeats + 1), output)
    run = args.work / "depth-run"
    strobe.run("depth", "latency", "--engine-dir", strobe.build("int8"), "--dataset", data, "--kv-cache-reuse", "enable",
               "--output-dir", run.name, "--overwrite")
    rates = {128: [], far: []}
    for line in (run / "requests.jsonl").read_text().splitlines():
        request = json.loads(line)
        times = request["token_times_ns"]
        rates[request["num_input_tokens"]].append((len(times) - 1) * 1e9 / (times[-1] - times[0]))
    near, deep = (rates[at][1:] for at in (128, far))  # the first of each filled the cache
    head = shape["hidden"] // shape["heads"]
    per_token = 2 * shape["layers"] * shape["kv_heads"] * head * 2
    weights = (args.work / "engine-int8/rank0.engine").stat().st_size - shape["vocab"] * shape["hidden"] * 2
    implied = (weights + per_token * (far + 8)) / (weights + per_token * (128 + 8))
    slowdown = [a / b for a, b in zip(near, deep)]
    return {"type": "int8", "context": [128, far], "tok_s": [spread(near), spread(deep)],
            "slowdown": spread(slowdown), "bytes_implied_slowdown": implied,
            "slowdown_over_implied": statistics.median(slowdown) / implied}


def scaling(args, strobe):
    """Matrix products on all threads against one, turn about in one process."""
    if args.threads < 2:
        raise RuntimeError("there is one thread")
    words = ["bench", "kernels", "--op", "gemm", "--dtype", ",".join(args.types), "--scaling", "--repeat",
             str(max(args.repeats, 7)), "--json", *strobe.threads]
    strobe.commands["scaling"] = "strobe " + " ".join(words)
    lines = json.loads(strobe.call(*words))["kernels"]
    result = {}
    for kind in args.types:
        for rows in sorted({line["shape"]["m"] for line in lines}):
            chosen = [line for line in lines if line["dtype"] == kind and line["shape"]["m"] == rows]
            result[f"{kind} m={rows}"] = dict(
                spread([line["scaling"] for line in chosen]),
                kernels={line["kernel"]: {"scaling": line["scaling"], "roofline_share": line["roofline_share"]}
                         for line in chosen})
            print(f"scaling        {kind:8} m={rows}: {result[f'{kind} m={rows}']['median']:.2f}x on {args.threads} threads")
    return result


def make_model(args, peer, file_type, shape, found):
    """The peer's file, made by its own library."""
    name = f"model-{file_type}.gguf" if peer == "llama.cpp" else f"{peer}-{file_type}"
    path = args.work / name
    if peer != "torch" and not path.exists():
        python = found[peer][0] if peer in found else args.venv / "bin/python"
        print(f"making {name}", flush=True)
        done = subprocess.run([python, HERE / "make_model.py", peer, file_type, path, json.dumps(shape)],
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
    return path if peer != "torch" else json.dumps(dict(shape, dtype=file_type))


def main():
    args = arguments()
    shape = args.shape
    args.work.mkdir(parents=True, exist_ok=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found = install(args)
    skip("onnxruntime", "it runs graphs that other tools export from a trained checkpoint, and there is none here")
    if "experts" not in shape:
        make_model(args, "llama.cpp", "bf16", shape, found)  # what strobe builds its engines from
    strobe = Strobe(args, shape)
    git = ["git", "-C", ROOT]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    if subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "crates", "Cargo.toml"]).returncode:
        commit += " with local changes"
    result = {
        "name": args.name, "commit": commit, "command": " ".join(["bench/peers/run.py", *sys.argv[1:]]),
        "machine": json.loads(strobe.call("doctor", "--json", "--threads", str(args.threads))), "shape": shape,
        "threads": args.threads, "repeats": args.repeats,
        "peers": {peer: version for peer, (_, version) in found.items()},
        "results": turn_about(args, strobe, found, shape),
    }
    for name, measure in (("depth", lambda: depth(args, strobe, shape)), ("scaling", lambda: scaling(args, strobe))):
        if name in args.only:
            try:
                result[name] = measure()
            except RuntimeError as why:
                skip(name, str(why))
    result.update(strobe_commands=strobe.commands, skipped=skipped)
    partial = args.output.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(args.output)
    print(f"written: {args.output}")
    if result["results"]:
        subprocess.run([args.venv / "bin/python", HERE / "plot.py", args.output], check=True)


if __name__ == "__main__":
    main()
