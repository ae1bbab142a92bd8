#!/usr/bin/env bash
# Measures the GPU figures of docs/results.md with a built strobe and writes one JSON per section to bench/results, each with
# machine, commit, commands, medians, the share of the measured ceilings and an iteration budget. All sections take some
# fifteen minutes on an H200, half of them PyTorch's; leave the GPU alone meanwhile. Needs Python 3; section peers needs one
# with torch and transformers.
#
#   bench/cuda.sh [SECTION...]     decode throughput prefill fp8 peers ablation moe; default: all of them, in this order
#   bench/cuda.sh agree            record the same iterations by strobe and by Nsight Systems, and check that they agree
#   bench/cuda.sh gemm             time strobe's own matrix products beside cuBLASLt's, shape by shape
#   bench/cuda.sh selftest         `strobe selftest`, then a few cases of each of its checks under compute-sanitizer
#   bench/cuda.sh docs             put the results into docs/ (then bench/results_docs.py for the README)
#
#   STROBE=target/release/strobe   the program to measure
#   OUT_DIR=bench/results          where results go
#   WORK=DIR                       where datasets and run directories go; default: a temporary directory
#   COMMIT=...                     what was built, where there is no git repository to ask
#   PYTHON=python3                 the Python of section peers
#   AGREE=target/release/examples/agree   what compares two recordings: cargo build --release -p strobe-trace --example agree
#   MICROBENCH=target/release/examples/microbench   times kernels: cargo build --release -p strobe-kernels-cuda --example microbench
#   SANITIZER=...                  compute-sanitizer; default: that on the PATH, or of a CUDA toolkit
#   RUN_LIMIT_S=300                a run that takes longer is ended, and its result says so
#   STROBE_BENCH_DEVICE=cpu        a rehearsal with tiny models on the CPU: tests this script, measures nothing worth keeping
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
if [[ "${1:-}" == docs ]]; then
  exec python3 bench/cuda_results.py docs "$(realpath -m "${OUT_DIR:-bench/results}")"
fi
device="${STROBE_BENCH_DEVICE:-cuda}"
strobe="$(realpath "${STROBE:-target/release/strobe}")"
work="$(realpath -m "${WORK:-$(mktemp -d)}")"
rehearsal=""
if [[ "$device" == cpu ]]; then
  rehearsal=1
  out="$(realpath -m "${OUT_DIR:-$work/results}")"
else
  out="$(realpath -m "${OUT_DIR:-bench/results}")"
fi
python="${PYTHON:-python3}"
commit="${COMMIT:-$(git rev-parse HEAD 2> /dev/null || echo unknown)}"
if [[ -z "${COMMIT:-}" && "$commit" != unknown ]]; then
  git diff --quiet HEAD -- crates Cargo.toml || commit="$commit with local changes"
fi
results() { python3 "$root/bench/cuda_results.py" "$@"; }

agree="" microbench=""
# example SECTION NAME CRATE PATH: what a section needs beside strobe becomes the variable NAME.
example() {
  if [[ -n "$rehearsal" ]]; then
    echo "section $1 measures a GPU; it can't be rehearsed" >&2
    exit 2
  fi
  printf -v "$2" %s "$(realpath -m "${4:-target/release/examples/$2}")"
  if [[ ! -x "${!2}" ]]; then
    echo "there is no ${!2}; make it with: cargo build --release -p $3 --example $2" >&2
    exit 2
  fi
}

sections=("$@")
[[ $# -gt 0 ]] || sections=(decode throughput prefill fp8 peers ablation moe)
for section in "${sections[@]}"; do
  case "$section" in
    decode | throughput | prefill | fp8 | peers | ablation | moe) ;;
    agree) example agree agree strobe-trace "${AGREE:-}" ;;
    selftest) [[ -z "$rehearsal" ]] || { echo "section selftest needs a GPU; it can't be rehearsed" >&2; exit 2; } ;;
    gemm) example gemm microbench strobe-kernels-cuda "${MICROBENCH:-}" ;;
    *)
      echo "there is no section \`$section\`; write some of decode throughput prefill fp8 peers ablation moe agree gemm selftest, or docs" >&2
      exit 2
      ;;
  esac
done
mkdir -p "$work" "$out"
cd "$work"

# The workloads: a model, requests of input/output tokens, and the iterations to record in each.
if [[ -z "$rehearsal" ]]; then
  small=(--model tinyllama-1.1b --dtype bfloat16) big=(--model llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8)
  batches=(1 64 256 1024) decode_lengths=(64 256) requests=3000 seed_lengths=(128 128)
  prompts=32 long_prompt=2047 ablation_prompts=64 ablation_lengths=(2032 16)
  big_requests=2000 big_long_requests=600 big_long=(1000 1000)
  decode_window=120-130 throughput_windows=20-24,60-69 prefill_window=8-11 ablation_window=2-9
  big_windows=30-32,150-154 big_long_windows=30-32,500-504
  peer_batches=(1024 2048) hf_requests=1024
  moe_models=(mixtral-8x7b gpt-oss-20b) moe_requests=128 moe_lengths=(256 64) moe_limits=(128 4096) moe_pairs=5
else
  small=(--model micro) big=(--model micro --dtype bfloat16)
  batches=(1 4) decode_lengths=(8 32) requests=40 seed_lengths=(16 16)
  prompts=4 long_prompt=127 ablation_prompts=8 ablation_lengths=(120 8)
  big_requests=16 big_long_requests=4 big_long=(32 32)
  decode_window=6-8 throughput_windows=2-3,10-12 prefill_window=1-2 ablation_window=1-3
  big_windows=2-3,8-9 big_long_windows=0-0,20-22
  peer_batches=(4 8) hf_requests=8
  moe_models=(moe-tiny) moe_requests=8 moe_lengths=(64 16) moe_limits=(8 256) moe_pairs=2
fi

failed=0
runs=()
# run NAME OPTIONS...: one benchmark into the run directory $work/NAME. A failure becomes its result, and the rest goes on.
run() {
  local name="$1"; shift
  local begun=$SECONDS status=0
  runs+=("$name")
  rm -rf "$name" "$name.error"
  timeout --signal=INT --kill-after=10 "${RUN_LIMIT_S:-300}" \
    "$strobe" bench "$@" --device "$device" --output-dir "$name" > "$name.txt" 2> "$name.error" || status=$?
  if [[ $status -eq 0 ]]; then
    rm -f "$name.error"
  else
    failed=1
    echo "exit status $status" >> "$name.error"
    echo "FAILED: strobe bench $*" >&2
    cat "$name.error" >&2
  fi
  echo "$name: $((SECONDS - begun)) s"
}
# dataset FILE MODEL REQUESTS INPUT OUTPUT
dataset() {
  [[ -s "$1" ]] || "$strobe" prepare-dataset --model "$2" --output "$1" \
    token-norm-dist --num-requests "$3" --input-mean "$4" --output-mean "$5" > /dev/null
}
# keep SECTION: the runs since the last call become one result.
keep() {
  results collect "$out/cuda-$1.json" "$commit" "bench/cuda.sh $1" "$work" "${runs[@]}"
  runs=()
}
# Long answers to short prompts: decoding in a steady state, at a mean context of 192 tokens.
decode_dataset() { dataset decode.jsonl "${small[1]}" "${batches[-1]}" "${decode_lengths[@]}"; }
seed_dataset() { dataset seed.jsonl "${small[1]}" "$requests" "${seed_lengths[@]}"; }
# decode_load BATCH: the mode and load that decode at this batch size, all requests at once.
decode_load() {
  if [[ "$1" == 1 ]]; then
    echo "latency --dataset decode.jsonl --num-requests 3 --max-batch-size 1"
  else
    echo "throughput --dataset decode.jsonl --num-requests $1 --max-batch-size $1"
  fi
}

decode() {
  decode_dataset
  for batch in "${batches[@]}"; do
    # shellcheck disable=SC2046 # words on purpose
    run "decode-$batch" $(decode_load "$batch") "${small[@]}" --repeat 5 --profile "$decode_window"
  done
}
throughput() {
  seed_dataset
  run "throughput-$requests" throughput "${small[@]}" --dataset seed.jsonl --repeat 5 --profile "$throughput_windows"
}
prompts_dataset() { dataset prompts.jsonl "${small[1]}" "$prompts" "$long_prompt" 1; }
prefill() {
  prompts_dataset
  run prefill-one latency "${small[@]}" --dataset prompts.jsonl --repeat 5 --profile "$prefill_window"
  run prefill-packed throughput "${small[@]}" --dataset prompts.jsonl --repeat 5 --profile 2-3
}
fp8() {
  dataset big.jsonl "${big[1]}" "$big_requests" "${seed_lengths[@]}"
  dataset big-long.jsonl "${big[1]}" "$big_long_requests" "${big_long[@]}"
  run fp8-short throughput "${big[@]}" --dataset big.jsonl --max-batch-size 1024 --repeat 5 --profile "$big_windows"
  run fp8-long throughput "${big[@]}" --dataset big-long.jsonl --max-batch-size 1024 --repeat 5 \
    --profile "$big_long_windows"
}
# PyTorch on the same requests; where a batch has to be given, what it is best at counts.
peers() {
  decode_dataset
  seed_dataset
  prompts_dataset
  local graph=(--runtime pytorch-graph --python "$python")
  for batch in "${batches[@]}"; do
    # shellcheck disable=SC2046
    run "peer-graph-$batch" $(decode_load "$batch") "${small[@]}" "${graph[@]}" --repeat 5
  done
  for batch in "${peer_batches[@]}"; do
    run "peer-graph-$requests-by-$batch" throughput "${small[@]}" --dataset seed.jsonl --max-batch-size "$batch" \
      "${graph[@]}" --repeat 5
  done
  run peer-prefill-one latency "${small[@]}" --dataset prompts.jsonl "${graph[@]}" --repeat 5
  run peer-prefill-packed throughput "${small[@]}" --dataset prompts.jsonl --max-batch-size "$prompts" "${graph[@]}" \
    --repeat 5
  run "peer-generate-$hf_requests" throughput "${small[@]}" --dataset seed.jsonl --num-requests "$hf_requests" \
    --max-batch-size "${peer_batches[0]}" --runtime pytorch --python "$python" --repeat 5
}
ablation() {
  seed_dataset
  dataset ablation.jsonl "${small[1]}" "$ablation_prompts" "${ablation_lengths[@]}"
  for choice in disable auto; do
    run "gemm-$choice" throughput "${small[@]}" --dataset seed.jsonl --gemm-plugin "$choice" --repeat 5 \
      --profile "$throughput_windows"
  done
  for choice in disable enable; do
    run "fmha-$choice" throughput "${small[@]}" --dataset ablation.jsonl --context-fmha "$choice" --repeat 5 \
      --profile "$ablation_window"
  done
  for pair in "gemm disable auto" "fmha disable enable"; do
    read -r what before after <<< "$pair"
    if COLUMNS=110 "$strobe" compare "$what-$before" "$what-$after" --html "$what.html" > "$what.compare" 2>&1; then
      results ablation "$what-$before" "$what-$after" "$what.compare" > "$out/ablation-$what.txt"
    else
      failed=1
      cat "$what.compare" >&2
    fi
  done
  # The first question once more, by interleaved runs in fresh processes.
  local ab=(ab --a "--gemm-plugin disable" --b "--gemm-plugin auto" --model "${small[1]}" --dataset seed.jsonl
    --profile "$throughput_windows" --pairs 5..8 --output-dir gemm-ab --overwrite -- "${small[@]:2}" --device "$device")
  if COLUMNS=110 "$strobe" "${ab[@]}" > gemm-ab.txt 2> gemm-ab.error; then
    { printf '$ strobe'; printf ' %q' "${ab[@]}" | sed "s/--gemm-plugin\\\\ \\([a-z]*\\)/'--gemm-plugin \\1'/g; s/\\\\,/,/g"; printf '\n'; cat gemm-ab.txt; } \
      | sed -n '/^Kernels that stand in/q; p' > "$out/ablation-ab.txt"
  else
    failed=1
    cat gemm-ab.error >&2
  fi
}
# Routers of random weights prefer no expert; skewed ones show what balance brings.
moe() {
  for model in "${moe_models[@]}"; do
    local name="moe-$model" load=(--model "$model" --dataset "$model.jsonl" --max-batch-size "${moe_limits[0]}"
      --max-num-tokens "${moe_limits[1]}")
    local skewed=("${load[@]}" --router-skew zipf:1.2 --assume-ep 8)
    dataset "$model.jsonl" "$model" "$moe_requests" "${moe_lengths[@]}"
    run "$name-one" latency "${load[@]}" --num-requests 2
    run "$name" throughput "${load[@]}"
    run "$name-learned" throughput "${skewed[@]}" --profile 0-40
    run "$name-perfect" throughput "${skewed[@]}" --profile 0-40 --perfect-router
    if ! COLUMNS=110 "$strobe" compare "$name-learned" "$name-perfect" > "$name.compare" 2>&1; then
      failed=1
      cat "$name.compare" >&2
    fi
    run "$name-balance" moe-balance "${skewed[@]}" --repeat "$moe_pairs"
    unset 'runs[-1]'
    results balance "$out/moe-balance-$device-$model.json" "$commit" "$work" "$name" "$name-balance" || failed=1
  done
}
# CUPTI serves one client, so each window is run twice, from one engine directory, where the GEMM kernels are chosen once:
# prompts, mixed steps and the first decode steps, then decode steps from a graph. The steps are small: at its power limit a
# GPU takes no two runs at the same clock.
agree() {
  seed_dataset
  decode_dataset
  "$strobe" build "${small[@]}" --max-seq-len 512 --max-batch-size 64 --max-num-tokens 512 \
    --output-dir agree-engine --overwrite --device "$device" > agree-build.txt
  local load
  for load in "seed 64 0-29" "decode 64 60-99"; do
    local words
    read -ra words <<< "$load"
    local name="agree-${words[0]}" window="${words[2]}"
    local given=(throughput --engine-dir agree-engine --dataset "${words[0]}.jsonl" --num-requests "${words[1]}")
    local profile=(profile --windows "$window" -o "$name-nsys" -- "$strobe" bench "${given[@]}" --device "$device")
    run "$name" "${given[@]}" --profile "$window"
    rm -f "$name"-nsys.*
    echo "${profile[*]/#"$strobe"/strobe}" > "$name.profile"
    if ! "$strobe" "${profile[@]}" > "$name-nsys.txt" 2>&1; then
      failed=1
      tail -n 40 "$name-nsys.txt" >&2
    fi
    "$agree" "$name/trace.sqlite" "$name"-nsys*.sqlite > "$name.agree" 2>&1 || failed=1
    cat "$name.agree"
  done
  results agree "$out/cuda-agree.json" "$commit" "$work" "${runs[@]}"
  runs=()
}

# The check `fault` writes out of bounds on purpose: that is no case for the sanitizer.
selftest() {
  local sanitizer check
  "$strobe" selftest --device "$device" > selftest.txt 2>&1 || failed=1
  tail -n 1 selftest.txt
  sanitizer="${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | tail -n 1 || true)}"
  rm -f sanitizer-*.txt
  if [[ -z "$sanitizer" ]]; then
    echo "compute-sanitizer is not here; SANITIZER names it" >&2
    failed=1
  else
    for check in $(sed -nE 's/^([a-z]+) +([0-9]+ of )?[0-9]+ cases (passed|FAILED) in .*/\1/p' selftest.txt | grep -vx fault); do
      "$sanitizer" --error-exitcode 9 "$strobe" selftest --device "$device" --quick --only "$check" \
        > "sanitizer-$check.txt" 2>&1 || failed=1
      echo "sanitizer, $check: $(tail -n 1 "sanitizer-$check.txt")"
    done
  fi
  results selftest "$out/cuda-selftest.json" "$commit" "$work"
}
gemm() {
  "$microbench" gemm > gemm.txt
  results gemm "$out/cuda-gemm.json" "$commit" gemm.txt
}

for section in "${sections[@]}"; do
  "$section"
  # Sections agree, gemm and selftest have made their results.
  [[ ${#runs[@]} -eq 0 ]] || keep "$section"
done
echo "results: $out; runs: $work; $SECONDS s"
exit "$failed"
