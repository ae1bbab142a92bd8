#!/usr/bin/env python3
"""strobe beside the other CPU engines of PyPI: same shapes, same machine, turn about.

    bench/peers/run.py [--only NAME,..] [--peers NAME,..] [--repeats 7] [--strobe target/release/strobe]

Makes a private virtual environment (--venv), installs the engines there by name, makes a TinyLlama of random weights in
each format (--work, about 20 GB; what an earlier call left there is used again), and lets strobe and one engine at a
time run each workload in turn. Medians over the repeats, their spread, and the median of the ratios of each turn go to
bench/results/cpu-peers.json and cpu-peers.svg; what could not run is listed there with its reason. Needs Python 3.10 or
later, a C++ compiler for llama.cpp, and a machine that has nothing else to do: about an hour on 2 cores.

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
TINYLLAMA = dict(vocab=32000, hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, context=16384)
REHEARSAL = dict(vocab=512, hidden=256, intermediate=512, layers=2, heads=8, kv_heads=2, context=16384)

# strobe's type, how it is built, and the formats of the peers that stand beside it.
TYPES = {
    "int8": (["--quantization", "int8"], {"llama.cpp": "q8_0", "ctranslate2": "int8"}),
    "int4": (["--quantization", "int4"], {"llama.cpp": "q4_0"}),
    "bfloat16": (["--dtype", "bfloat16"], {"llama.cpp": "bf16", "torch": "bfloat16"}),
    "float32": (["--dtype", "float32"], {"llama.cpp": "f32", "torch": "float32", "ctranslate2": "float32"}),
}
# Prompt and output tokens of a request; batch is how many run together.
WORKLOADS = {
    "prefill": dict(prompt=512, output=1, types=list(TYPES), unit="tok/s"),
    "decode": dict(prompt=128, output=33, types=list(TYPES), unit="tok/s"),
    "throughput": dict(prompt=128, output=128, requests=64, batch=32, steps=16, types=["int8"], unit="tok/s",
                       note="strobe: output tokens of the whole run, prompts included; the peer: decoding alone"),
    "start": dict(prompt=1, output=1, types=["int8"], unit="s",
                  note="a new process with a warm page cache, until the first token is there"),
}
PEERS = {  # what pip installs
    "llama.cpp": ["llama-cpp-python", "gguf", "numpy"],
    "torch": ["torch", "transformers"],
    "ctranslate2": ["ctranslate2", "numpy"],
}
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
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/cpu-peers.json")
    parser.add_argument("--only", default="", help=f"some of {', '.join(WORKLOADS)}, depth")
    parser.add_argument("--types", default="", help=f"some of {', '.join(TYPES)}")
    parser.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    for option, known in (("only", [*WORKLOADS, "depth"]), ("types", TYPES), ("peers", PEERS)):
        names = [name for name in getattr(args, option).split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"--{option}: there is no `{unknown[0]}`; there are {', '.join(known)}")
        setattr(args, option, names or list(known))
    # Programs run in --work.
    args.strobe, args.work, args.output = args.strobe.resolve(), args.work.resolve(), args.output.resolve()
    if not args.strobe.is_file():
        parser.error(f"{args.strobe} is not there; build it with `cargo build --release`, or name it with --strobe")
    if args.rehearse:
        args.repeats = 2
        if args.output == parser.get_default("output"):
            args.output = args.work / "rehearsal/cpu-peers.json"
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
        self.args, self.shape, self.commands, self.shares = args, shape, {}, {}

    def call(self, *words):
        done = subprocess.run([self.args.strobe, *words], capture_output=True, text=True, cwd=self.args.work)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
        return done.stdout

    def build(self, kind):
        engine = f"engine-{kind}"
        if not (self.args.work / engine / "config.json").exists():
            print(f"building {engine}", flush=True)
            self.call("build", "--model", "model-bf16.gguf", *TYPES[kind][0], "--max-seq-len", "8448", "--output-dir",
                      engine, "--device", "cpu")
        return engine

    def dataset(self, prompt, output, requests):
        path = self.args.work / f"{requests}x{prompt}-{output}.jsonl"
        draw = random.Random(1)
        with open(path, "w") as file:
            for task in range(requests):
                ids = [draw.randrange(3, self.shape["vocab"]) for _ in range(prompt)]
                file.write(json.dumps({"task_id": task, "input_ids": ids, "output_tokens": output}) + "\n")
        return path.name

    def bench(self, kind, name, workload):
        """One value in the workload's unit."""
        engine, threads = self.build(kind), ["--threads", str(self.args.threads), "--device", "cpu"]
        if name == "start":
            words = ["eval", "logits", "--engine-dir", engine, "--ids", "1", "--output", "-", *threads]
            self.commands[name] = "strobe " + " ".join(words)
            begin = time.perf_counter()
            self.call(*words)
            return time.perf_counter() - begin
        requests = workload.get("requests", 1)
        data = self.dataset(workload["prompt"], workload["output"], requests)
        mode = ["throughput", "--concurrency", str(workload["batch"])] if "batch" in workload else ["latency"]
        words = ["bench", *mode, "--engine-dir", engine, "--dataset", data, "--warmup", "1", "--json", *threads]
        self.commands[name] = "strobe " + " ".join(words)
        report = json.loads(self.call(*words))["strobe"]
        metrics = report["metrics"]
        iterations = {entry["kind"]: entry for entry in report.get("utilization", [])}
        of, what = ("prefill", "mfu") if workload["output"] == 1 else ("decode", "mbu")
        share = iterations.get(of, {}).get(what)
        if share is not None:
            self.shares.setdefault(f"{kind} {name}", []).append(share)
        if "batch" in workload:
            return metrics["output_throughput_tok_s"]
        if workload["output"] == 1:
            return workload["prompt"] * 1e3 / metrics["ttft_ms"]["p50"]
        return 1e3 / metrics["tpot_ms"]["p50"]


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def turn_about(args, strobe, found, shape):
    results = []
    for kind in args.types:
        names = [name for name in WORKLOADS if name in args.only and kind in WORKLOADS[name]["types"]]
        for peer, file_type in TYPES[kind][1].items():
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
                turns = []
                try:
                    for turn in range(args.repeats):
                        if name == "start":  # in a process of its own
                            worker.close()
                            worker = Peer(args, found[peer][0], peer, file)
                        turns.append((strobe.bench(kind, name, workload), worker.run(workload)))
                except RuntimeError as why:
                    skip(f"{name}, {kind} against {peer} {file_type}", str(why))
                    if worker.process.poll() is not None:
                        break
                    continue
                ours, theirs = zip(*turns)
                better = [a / b if workload["unit"] == "tok/s" else b / a for a, b in turns]
                results.append({"workload": name, "type": kind, "peer": peer, "peer_type": file_type,
                                "unit": workload["unit"], "strobe": spread(ours), "peer_result": spread(theirs),
                                "strobe_is_faster_by": spread(better), "note": workload.get("note")})
                a, b, ratio = (statistics.median(values) for values in (ours, theirs, better))
                print(f"{name:10} {kind:8} strobe {a:9.2f}  {peer} {file_type} {b:9.2f} {workload['unit']}: "
                      f"{ratio:.2f}x", flush=True)
            worker.close()
    return results


def depth(args, strobe, shape):
    """Decoding far into a context against decoding at its begin: the slowdown, and what more bytes alone would cost."""
    far = 1024 if args.rehearse else 8192
    turns = []
    for _ in range(args.repeats):
        turns.append([strobe.bench("int8", f"depth {at}", dict(prompt=at, output=17)) for at in (128, far)])
    head = shape["hidden"] // shape["heads"]
    per_token = 2 * shape["layers"] * shape["kv_heads"] * head * 2
    weights = (args.work / "engine-int8/rank0.engine").stat().st_size - shape["vocab"] * shape["hidden"] * 2
    implied = (weights + per_token * (far + 8)) / (weights + per_token * (128 + 8))
    slowdown = [near / deep for near, deep in turns]
    return {"type": "int8", "context": [128, far], "tok_s": [spread(list(values)) for values in zip(*turns)],
            "slowdown": spread(slowdown), "bytes_implied_slowdown": implied,
            "slowdown_over_implied": statistics.median(slowdown) / implied}


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
    shape = REHEARSAL if args.rehearse else TINYLLAMA
    if args.rehearse:
        args.work = args.work / "rehearsal"
    args.work.mkdir(parents=True, exist_ok=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found = install(args)
    skip("onnxruntime", "it runs graphs that other tools export from a checkpoint, and there is no checkpoint here")
    make_model(args, "llama.cpp", "bf16", shape, found)  # what strobe builds its engines from
    strobe = Strobe(args, shape)
    git = ["git", "-C", ROOT]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    if subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "crates", "Cargo.toml"]).returncode:
        commit += " with local changes"
    result = {
        "name": "cpu-peers", "commit": commit, "command": " ".join(["bench/peers/run.py", *sys.argv[1:]]),
        "machine": json.loads(strobe.call("doctor", "--json", "--threads", str(args.threads))), "shape": shape,
        "threads": args.threads, "repeats": args.repeats,
        "peers": {peer: version for peer, (_, version) in found.items()},
        "results": turn_about(args, strobe, found, shape),
    }
    if "depth" in args.only:
        try:
            result["depth"] = depth(args, strobe, shape)
        except RuntimeError as why:
            skip("depth", str(why))
    # Of the machine's measured peak in prefill, of its measured read bandwidth in decoding; one value per turn.
    shares = {name: spread(values) for name, values in strobe.shares.items()}
    result.update(strobe_commands=strobe.commands, strobe_shares=shares, skipped=skipped)
    partial = args.output.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(args.output)
    print(f"written: {args.output}")
    if result["results"]:
        subprocess.run([args.venv / "bin/python", HERE / "plot.py", args.output], check=True)


if __name__ == "__main__":
    main()
