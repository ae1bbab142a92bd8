#!/usr/bin/env bash
# Measures figures of docs/results.md on this machine and writes them to bench/results, each with machine, commit and
# command. Takes about 6 minutes on 2 cores; leave the machine alone meanwhile. Prompts and decoding by themselves are
# measured by bench/peers/run.py.
#
#   bench/spine.sh [WORK_DIR]
#   ONLY='float32' bench/spine.sh      only the results whose name matches
set -euo pipefail
cd "$(dirname "$0")/.."
results="$PWD/bench/results"
strobe="$PWD/target/release/strobe"
work="${1:-$(mktemp -d)}"
mkdir -p "$work" "$results"
cargo build --release
commit="$(git rev-parse HEAD)"
git diff --quiet HEAD -- crates Cargo.toml || commit="$commit with local changes"
cd "$work"

# keep NAME REPORT COMMAND: put a report beside what made it.
keep() {
  { printf '{"name": "%s",\n"commit": "%s",\n"command": "%s",\n"report": ' "$1" "$commit" "$3"
    cat "$2"; printf '}\n'; } > "$results/$1.json"
}
bench() {
  local name="$1"; shift
  [[ "$name" =~ ${ONLY:-.} ]] || return 0
  echo "== $name: strobe bench $*"
  "$strobe" bench "$@" --report-json "$name.json" > "$name.txt"
  keep "$name" "$name.json" "strobe bench $*"
}
dataset() {
  "$strobe" prepare-dataset --model tinyllama-1.1b --output "$1" \
    token-norm-dist --num-requests "$2" --input-mean "$3" --output-mean "$4"
}

if [[ doctor =~ ${ONLY:-.} ]]; then
  "$strobe" doctor --json > doctor.json
  keep doctor doctor.json "strobe doctor --json"
fi
if [[ demo =~ ${ONLY:-.} ]]; then
  "$strobe" demo --output-dir demo --overwrite --json > demo.json
  keep demo demo.json "strobe demo --json"
fi
dataset decode.jsonl 2 16 64
dataset seed.jsonl 64 128 128
for dtype in float32 bfloat16; do
  [ -d "$dtype" ] || "$strobe" build --model tinyllama-1.1b --dtype "$dtype" --output-dir "$dtype"
  bench "tinyllama-$dtype-64x128-128" throughput --engine-dir "$dtype" --dataset seed.jsonl --streaming
done
bench tinyllama-float32-profiler-overhead latency --engine-dir float32 --dataset decode.jsonl --measure-profiler-overhead
