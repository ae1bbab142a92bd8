"""Times PyTorch's matmul and scaled_dot_product_attention, for comparison with strobe's kernels.

Standard input: one line of JSON that says where to run, then one line per case. Standard output: one line per line read:
{"torch": VERSION} or {"error": WHY}, then {"times": SECONDS} or {"skip": WHY}.
"""

import json
import os
import sys
import time

# Libraries print what they like; the answer goes out where they can't reach it.
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

FRESH_BYTES = 256 << 20
BUDGET, READING = 0.1, 100e-6


def say(**values):
    answer.write(json.dumps(values) + "\n")
    answer.flush()


setup = json.loads(sys.stdin.readline())
try:
    import torch
    import torch.nn.functional as F
except Exception as problem:
    say(error=f"{sys.executable} has no usable torch ({problem})")
    sys.exit(0)
device = torch.device(setup["device"])
if device.type == "cuda" and not torch.cuda.is_available():
    say(error=f"the torch of {sys.executable} has no CUDA")
    sys.exit(0)
torch.set_num_threads(setup["threads"])
torch.manual_seed(1)
say(torch=torch.__version__)


def random(*shape, dtype):
    return torch.empty(*shape, device=device).uniform_(-1, 1).to(dtype)


def cold(make):
    """So many copies that no cache holds them, as strobe's own operands."""
    first = make()
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    return [first] + [tuple(tensor.clone() for tensor in first) for _ in range(-(-FRESH_BYTES // size) - 1)]


def sample(repeats, run):
    turn = 0

    def read(inner):
        nonlocal turn
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        for _ in range(inner):
            run(turn)
            turn += 1
        if device.type == "cuda":
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / inner
        return (time.perf_counter() - start) / inner

    inner = max(1, min(1000, round(READING / max(min(read(1), read(1)), 1e-9))))
    times, begin = [], time.perf_counter()
    while len(times) < repeats or time.perf_counter() - begin < BUDGET:
        times.append(read(inner))
    return times


def product(shape, dtype, repeats):
    weights = cold(lambda: (random(shape["n"], shape["k"], dtype=dtype),))
    x = random(shape["m"], shape["k"], dtype=dtype)
    return sample(repeats, lambda turn: F.linear(x, weights[turn % len(weights)][0]))


def attention(shape, dtype, repeats):
    sequences, q_len, kv_len = shape["sequences"], shape["q_len"], shape["kv_len"]
    kv = (sequences, shape["kv_heads"], kv_len, shape["head_dim"])
    caches = cold(lambda: (random(*kv, dtype=dtype), random(*kv, dtype=dtype)))
    q = random(sequences, shape["heads"], q_len, shape["head_dim"], dtype=dtype)

    def run(turn):
        k, v = caches[turn % len(caches)]
        F.scaled_dot_product_attention(q, k, v, is_causal=q_len > 1, enable_gqa=shape["heads"] != shape["kv_heads"])

    return sample(repeats, run)


for line in sys.stdin:
    case = json.loads(line)
    shape, dtype = case["shape"], getattr(torch, case["dtype"] or "", None)
    if case["op"] not in ("gemm", "gemv", "attention"):
        say(skip="only products and attention are compared")
    elif not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        say(skip=f"it has no counterpart of {case['dtype']}")
    elif case["op"] == "attention" and shape["q_len"] not in (1, shape["kv_len"]):
        say(skip="its causal mask starts at the first position, so a part of a prompt has no counterpart")
    else:
        try:
            with torch.inference_mode():
                times = (attention if case["op"] == "attention" else product)(shape, dtype, case["repeats"])
            say(times=times)
        except Exception as problem:
            say(skip=f"{type(problem).__name__}: {problem}".split("\n")[0])
