#!/usr/bin/env bash
# Measures how fast Nsight Systems exports are read and reported, against SQL and plain Python on the same file in the same
# run, and writes bench/results/traces-nsys.json with machine, commit and command. Leave the machine alone meanwhile.
#
#   bench/traces_sqlite.sh [EXPORT]    an SQLite export to scale up; default: a two-GPU one of STROBE_TEST_DATA
#   SIZE_MB=1000 WORK=DIR REPEAT=5     size of the scaled export, where to put it, runs of strobe
#   OLD=STROBE                         only compare this build with the present one, in turns: traces-builds.json
set -euo pipefail
cd "$(dirname "$0")/.."
trace="${1:-${STROBE_TEST_DATA:?set it to the folder of test data, or name an export}/traces/nsys/nsys-ai/mfu_2gpu_before.sqlite}"
size_mb="${SIZE_MB:-1000}"
work="${WORK:-$(mktemp -d)}"
mkdir -p "$work" bench/results
cargo build --release -p strobe-cli -p strobe-trace --bins --examples
bin="${CARGO_TARGET_DIR:-target}/release"
commit="$(git rev-parse HEAD)"
git diff --quiet HEAD -- crates Cargo.toml || commit="$commit with local changes"
if [ -n "${OLD:-}" ]; then
  "$bin/examples/scale_trace" "$trace" "$work/scaled-$size_mb.sqlite" "$size_mb"
  exec python3 bench/traces_builds.py "$OLD" "$bin/strobe" "$work/scaled-$size_mb.sqlite" \
    "OLD=$("$OLD" --version) SIZE_MB=$size_mb bench/traces_sqlite.sh $(basename "$trace")"
fi
"$bin/examples/scale_trace" "$trace" "$work/scaled.sqlite" "$size_mb"
analyze=()
"$bin/strobe" analyze --help > /dev/null 2>&1 && analyze=("strobe analyze" "$bin/strobe analyze $work/scaled.sqlite --report all --json")
bench_command="SIZE_MB=$size_mb bench/traces_sqlite.sh $(basename "$trace")" bench_commit="$commit" \
python3 bench/traces_sqlite.py measure bench/results/traces-nsys.json "$work/scaled.sqlite" \
  "strobe import" "$bin/examples/read_trace $work/scaled.sqlite" \
  ${analyze[@]+"${analyze[@]}"} \
  "sql" "python3 bench/traces_sqlite.py sql $work/scaled.sqlite" \
  "python" "python3 bench/traces_sqlite.py python $work/scaled.sqlite"
