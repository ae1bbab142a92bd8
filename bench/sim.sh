#!/usr/bin/env bash
# Holds the simulator against the engine on this machine: `strobe simulate validate` for llama-110m and tinyllama-1.1b, each
# about 9 minutes. Writes bench/results/sim-validate-*.json with machine, commit and command, and the table of
# docs/simulate.md. Leave the machine alone meanwhile.
#
#   bench/sim.sh [WORK_DIR]
#   ONLY='110m' bench/sim.sh      only the models whose name matches
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
strobe="${STROBE:-$PWD/target/release/strobe}"
work="${1:-$(mktemp -d)}"
mkdir -p "$work"
[ -n "${STROBE:-}" ] || cargo build --release
commit="$(git rev-parse HEAD)"
git diff --quiet HEAD -- crates Cargo.toml || commit="$commit with local changes"

# validate MODEL DTYPE TURNS SECONDS
validate() {
  [[ "$1" =~ ${ONLY:-.} ]] || return 0
  local engine="$work/$1" runs="$work/$1-runs" options="--turns $3 --seconds $4"
  [ -d "$engine" ] || "$strobe" build --model "$1" --dtype "$2" --output-dir "$engine"
  # A prediction that misses its limits ends with 1, and is a result all the same.
  "$strobe" simulate validate --engine-dir "$engine" $options --output-dir "$runs" --json > "$work/$1.json" || [ -s "$work/$1.json" ]
  { printf '{"name": "sim-validate-%s",\n"commit": "%s",\n"command": "strobe simulate validate --engine-dir %s %s",\n"dtype": "%s",\n"report": ' \
      "$1" "$commit" "$1" "$options" "$2"
    cat "$work/$1.json"; printf '}\n'; } > "$root/bench/results/sim-validate-$1.json"
}
validate llama-110m float32 8 12
validate tinyllama-1.1b bfloat16 4 25
python3 "$root/bench/sim_docs.py"
