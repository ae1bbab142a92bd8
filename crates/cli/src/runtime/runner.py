"""Runs a dataset with PyTorch, for comparison with strobe.

Standard input: one line of JSON that says what to do, then one line per request. Standard output: one line of JSON per
event: `ready`, then for every run `run`, its `request`s and `done`; or `error`. Times are nanoseconds since the start
of a run.
"""

import json
import os
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

# Libraries print what they like; the answer goes out where they can't reach it.
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(event, **values):
    answer.write(json.dumps({"event": event, **values}) + "\n")
    answer.flush()


def fail(message):
    say("error", message=message)
    sys.exit(3)


try:
    import torch
    import torch.nn.functional as F
except Exception as problem:
    fail(f"{sys.executable} has no usable torch ({problem}); install it with `pip install torch transformers`, "
         "or name another Python with --python")


def read_task():
    lines = sys.stdin.buffer.read().splitlines()
    return json.loads(lines[0]), [json.loads(line) for line in lines[1:]]


def transformers():
    try:
        import transformers as library
    except Exception as problem:
        fail(f"{sys.executable} has no usable transformers ({problem}); install it with `pip install transformers`, "
             "or name another Python with --python")
    library.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def hugging_face_config(task, library):
    """The configuration that a preset's config.json would hold."""
    model = task["model"]
    values = {key: model[key] for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")}
    rope = {"rope_type": "default", "rope_theta": model["rope_theta"]}
    if model["rope_scaling"]["rope_type"] != "none":
        rope.update(model["rope_scaling"])
    values["rope_parameters"] = rope
    # Older versions know it by two other names.
    values["rope_theta"] = model["rope_theta"]
    if model["rope_scaling"]["rope_type"] != "none":
        values["rope_scaling"] = dict(rope)
    values["attention_bias"] = model["qkv_bias"]
    values["mlp_bias"] = model["mlp_bias"]
    return library.CONFIG_MAPPING[model["model_type"]](**values)


def check_parameters(task, tensors):
    """Random weights must be those of the model that was asked for."""
    made = sum(tensor.numel() for tensor in tensors)
    if not task["checkpoint"] and made != task["parameters"]:
        fail(f"this is another model: {made} random weights were made, and it has {task['parameters']}; use --runtime strobe")


def hugging_face_model(task, dtype, device):
    library = transformers()
    if task["checkpoint"]:
        model = library.AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=dtype)
        return model.to(device).eval()
    config = hugging_face_config(task, library)
    torch.manual_seed(task["seed"])
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_parameters(task, model.parameters())
    return model.eval()


class Clock:
    """Stamps of steps. On a GPU they are events in the stream, so that the host need not wait for the device."""

    def __init__(self, device):
        self.gpu = device.type == "cuda"
        self.marks = []
        if self.gpu:
            torch.cuda.synchronize(device)
        self.begin = self.mark()

    def mark(self):
        if self.gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter_ns()
        self.marks.append(now)
        return now

    def times(self):
        if not self.gpu:
            return [mark - self.begin for mark in self.marks]
        torch.cuda.synchronize()
        return [int(self.begin.elapsed_time(mark) * 1e6) for mark in self.marks]


# transformers.generate ---------------------------------------------------------------------------------------------


class HuggingFace:
    """`generate` on batches of requests, one batch after another: prompts padded on the left, as many tokens as the
    longest output asks for."""

    def __init__(self, task, requests, device, dtype):
        self.device, self.batch = device, task["batch"]
        self.model = hugging_face_model(task, dtype, device)
        settings = self.model.generation_config
        settings.do_sample, settings.eos_token_id, settings.pad_token_id = False, None, 0
        settings.temperature = settings.top_p = settings.top_k = None
        import transformers as library
        self.description = f"transformers {library.__version__} generate"
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.kv_bytes = 0
        from transformers.generation.streamers import BaseStreamer

        class Watch(BaseStreamer):
            """Called with the prompts, then with the tokens of every step when they have reached the host."""

            def __init__(self):
                self.tokens, self.times = [], []

            def put(self, value):
                self.times.append(time.perf_counter_ns())
                self.tokens.append(value)

            def end(self):
                pass

        self.watch = Watch

    def generate(self, requests):
        longest = max(len(r["input_ids"]) for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            prompt = request["input_ids"]
            ids[row, longest - len(prompt):] = torch.tensor(prompt)
            mask[row, longest - len(prompt):] = 1
        watch = self.watch()
        outputs = max(r["output_tokens"] for r in requests)
        with torch.inference_mode():
            self.model.generate(ids.to(self.device), attention_mask=mask.to(self.device), max_new_tokens=outputs,
                                min_new_tokens=outputs, streamer=watch)
        return watch

    def warm_up(self, requests):
        """The first batch: on a GPU to its end, since the memory of a cache that grows is had from the driver once."""
        batch = requests[:self.batch]
        if self.device.type == "cpu":
            batch = [{**r, "output_tokens": min(r["output_tokens"], 8)} for r in batch]
        self.generate(batch)

    def run(self, requests):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        results, steps = [], []
        begin = time.perf_counter_ns()
        for first in range(0, len(requests), self.batch):
            batch = requests[first:first + self.batch]
            start = time.perf_counter_ns() - begin
            watch = self.generate(batch)
            times = [t - begin for t in watch.times[1:]]  # the first call has the prompts
            tokens = torch.stack([t.reshape(-1) for t in watch.tokens[1:]], 1).tolist()
            for row, request in enumerate(batch):
                wanted = request["output_tokens"]
                results.append((request["id"], start, times[:wanted], tokens[row][:wanted]))
            before = start
            for index, end in enumerate(times):
                wanted = sum(r["output_tokens"] > index for r in batch)  # the others only fill their rows
                prompts = sum(len(r["input_ids"]) for r in batch)
                steps.append((before, end, wanted, 0, prompts) if index == 0 else (before, end, 0, wanted, 0))
                before = end
        return results, steps


def main():
    task, requests = read_task()
    device = torch.device(task["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        fail(f"this torch ({torch.__version__}) can't use a GPU; use --device cpu, or a Python with another torch")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif task["threads"]:
        torch.set_num_threads(task["threads"])
    dtype = getattr(torch, task["dtype"])
    try:
        kind = {"pytorch": HuggingFace, "pytorch-graph": Graphs}[task["runtime"]]
        begin = time.perf_counter()
        runtime = kind(task, requests, device, dtype)
        loaded = time.perf_counter()
        for _ in range(task["warmup"]):
            runtime.warm_up(requests)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        say("ready", torch=torch.__version__, python=sys.version.split()[0], description=runtime.description,
            device_name=name, device_bytes=total, threads=torch.get_num_threads(),
            load_seconds=loaded - begin, warmup_seconds=time.perf_counter() - loaded,
            weight_bytes=runtime.weight_bytes, kv_bytes=runtime.kv_bytes)
        for _ in range(task["repeat"]):
            say("run")
            results, steps = runtime.run(requests)
            for identity, start, times, tokens in sorted(results):
                say("request", id=identity, first_scheduled_ns=start, token_times_ns=times, output_ids=tokens)
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            say("done", steps=steps, peak_bytes=peak)
    except torch.OutOfMemoryError as problem:
        fail(f"out of memory: {str(problem).splitlines()[0]}; lower --max-batch-size")
