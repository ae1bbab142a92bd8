"""Runs a dataset with PyTorch, for comparison with strobe.

Standard input: one line of JSON that says what to do, then one line per request. Standard output: one line of JSON per
event: `ready`, then for every run `run`, its `request`s and `done`; or `error`. Times are nanoseconds since the start
of a run.
"""

import json
import os
import sys
import time

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
    values["attention_bias"] = model["qkv_bias"]
    values["mlp_bias"] = model["mlp_bias"]
    return library.CONFIG_MAPPING[model["model_type"]](**values)


def hugging_face_model(task, dtype, device):
    library = transformers()
    if task["checkpoint"]:
        model = library.AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=dtype)
        return model.to(device).eval()
    config = hugging_face_config(task, library)
    torch.manual_seed(task["seed"])
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
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
        self.generate([{**r, "output_tokens": min(r["output_tokens"], 8)} for r in requests[:self.batch]])

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


# A step of our own -------------------------------------------------------------------------------------------------


def rotary_tables(model, length, device, dtype):
    """cos and sin for every position and element of a head, the sign of the rotation folded into sin."""
    half = model["head_dim"] // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    frequencies = model["rope_theta"] ** -exponents
    scaling = model["rope_scaling"]
    if scaling["rope_type"] == "linear":
        frequencies = frequencies / scaling["factor"]
    elif scaling["rope_type"] == "llama3":
        wavelengths = 2 * torch.pi / frequencies
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
        smooth = smooth.clamp(0, 1)
        frequencies = frequencies / scaling["factor"] * (1 - smooth) + frequencies * smooth
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1).to(device, dtype), torch.cat([-sin, sin], 1).to(device, dtype)


LENGTH_STEP = 64  # graphs are captured for caches of these lengths


class Graphs:
    """A Llama step written by hand: fused qkv and gate-up products, SDPA over a static KV cache, the residual added by
    the product, the arg-max on the device; on a GPU one CUDA graph per batch size and cache length. Requests take the
    slots of others as those end. Output lengths are known, so the host plans everything ahead and never waits."""

    def __init__(self, task, requests, device, dtype):
        self.model, self.device, self.dtype = task["model"], device, dtype
        self.batch = max(1, min(task["batch"], len(requests)))
        self.prefill_tokens = task["prefill_tokens"]
        longest = max(len(r["input_ids"]) + r["output_tokens"] for r in requests)
        windows = [w for w in self.model["sliding_window"] if w]
        if windows and min(windows) < longest:
            fail(f"--runtime pytorch-graph has no sliding window, and requests of {longest} tokens pass the model's "
                 f"{min(windows)}; use --runtime pytorch")
        self.length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        self.gpu = device.type == "cuda"
        self.description = "one decode step in a CUDA graph" if self.gpu else "a hand-written decode step"
        if task["checkpoint"]:
            self.from_checkpoint(task)
        else:
            self.at_random(task["seed"])
        tensors = [self.embedding, self.final_norm] + [t for layer in self.layers for t in layer.values() if t is not None]
        if self.head is not self.embedding:
            tensors.append(self.head)
        self.weight_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.cos, self.sin = rotary_tables(self.model, self.length, device, dtype)
        shape = (self.batch, self.model["num_key_value_heads"], self.length, self.model["head_dim"])
        self.caches = [(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
                       for _ in self.layers]
        self.kv_bytes = sum(k.numel() * k.element_size() * 2 for k, _ in self.caches)
        self.ids = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.positions = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.slots = torch.arange(self.batch, device=device)
        self.kv_heads = torch.arange(self.model["num_key_value_heads"], device=device)
        self.keys = torch.arange(self.length, device=device)
        self.graphs, self.pool = {}, None
        self.capture(requests)

    def at_random(self, seed):
        model = self.model
        torch.manual_seed(seed)

        def matrix(*shape):
            return torch.empty(*shape, device=self.device, dtype=self.dtype).normal_(0, 0.02)

        def ones(size):
            return torch.ones(size, device=self.device, dtype=self.dtype)

        def bias(wanted, size):
            return torch.zeros(size, device=self.device, dtype=self.dtype) if wanted else None

        hidden, inner, dim = model["hidden_size"], model["intermediate_size"], model["head_dim"]
        queries, pairs = model["num_attention_heads"] * dim, model["num_key_value_heads"] * dim
        self.embedding, self.final_norm = matrix(model["vocab_size"], hidden), ones(hidden)
        self.head = self.embedding if model["tie_word_embeddings"] else matrix(model["vocab_size"], hidden)
        self.layers = [{
            "norm": ones(hidden), "qkv": matrix(queries + 2 * pairs, hidden),
            "qkv_bias": bias(model["qkv_bias"], queries + 2 * pairs),
            "q_norm": ones(dim) if model["qk_norm"] else None, "k_norm": ones(dim) if model["qk_norm"] else None,
            "o": matrix(hidden, queries), "o_bias": bias(model["o_bias"], hidden), "post_norm": ones(hidden),
            "gate_up": matrix(2 * inner, hidden), "gate_up_bias": bias(model["mlp_bias"], 2 * inner),
            "down": matrix(hidden, inner), "down_bias": bias(model["mlp_bias"], hidden),
        } for _ in range(model["num_hidden_layers"])]

    def from_checkpoint(self, task):
        state = hugging_face_model(task, self.dtype, self.device).state_dict()

        def joined(prefix, names, kind):
            parts = [state.get(f"{prefix}.{name}.{kind}") for name in names]
            return None if parts[0] is None else torch.cat(parts)

        self.embedding, self.final_norm = state["model.embed_tokens.weight"], state["model.norm.weight"]
        self.head = self.embedding if self.model["tie_word_embeddings"] else state["lm_head.weight"]
        self.layers = []
        for index in range(self.model["num_hidden_layers"]):
            attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
            self.layers.append({
                "norm": state[f"model.layers.{index}.input_layernorm.weight"],
                "qkv": joined(attention, ["q_proj", "k_proj", "v_proj"], "weight"),
                "qkv_bias": joined(attention, ["q_proj", "k_proj", "v_proj"], "bias"),
                "q_norm": state.get(f"{attention}.q_norm.weight"), "k_norm": state.get(f"{attention}.k_norm.weight"),
                "o": state[f"{attention}.o_proj.weight"], "o_bias": state.get(f"{attention}.o_proj.bias"),
                "post_norm": state[f"model.layers.{index}.post_attention_layernorm.weight"],
                "gate_up": joined(mlp, ["gate_proj", "up_proj"], "weight"),
                "gate_up_bias": joined(mlp, ["gate_proj", "up_proj"], "bias"),
                "down": state[f"{mlp}.down_proj.weight"], "down_bias": state.get(f"{mlp}.down_proj.bias"),
            })

    def forward(self, ids, positions, attend):
        """The last hidden state of every row of `ids`; `attend` stores keys and values and gives the attention."""
        model = self.model
        dim, heads, pairs = model["head_dim"], model["num_attention_heads"], model["num_key_value_heads"]
        eps, hidden = model["rms_norm_eps"], model["hidden_size"]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embedding[ids]
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(x, (hidden,), layer["norm"], eps)
            qkv = F.linear(normed, layer["qkv"], layer["qkv_bias"]).view(-1, heads + 2 * pairs, dim)
            rotating, values = qkv[:, :heads + pairs], qkv[:, heads + pairs:]
            if layer["q_norm"] is not None:
                rotating = torch.cat([F.rms_norm(rotating[:, :heads], (dim,), layer["q_norm"], eps),
                                      F.rms_norm(rotating[:, heads:], (dim,), layer["k_norm"], eps)], 1)
            rotated = torch.addcmul(rotating * cos, torch.roll(rotating, dim // 2, -1), sin)
            out = attend(index, rotated[:, :heads], rotated[:, heads:], values)
            x = self.added(x, out, layer["o"], layer["o_bias"])
            normed = F.rms_norm(x, (hidden,), layer["post_norm"], eps)
            gate, up = F.linear(normed, layer["gate_up"], layer["gate_up_bias"]).chunk(2, -1)
            x = self.added(x, F.silu(gate) * up, layer["down"], layer["down_bias"])
        return x

    @staticmethod
    def added(x, rows, weight, bias):
        x.addmm_(rows, weight.t())
        return x if bias is None else x.add_(bias)

    def choose(self, x):
        normed = F.rms_norm(x, (self.model["hidden_size"],), self.final_norm, self.model["rms_norm_eps"])
        return F.linear(normed, self.head).argmax(-1)

    def decode(self, rows, length):
        """One token more for slots 0 to `rows`, over the first `length` places of the cache."""
        ids, positions = self.ids[:rows], self.positions[:rows]
        dim, pairs = self.model["head_dim"], self.model["num_key_value_heads"]
        group = self.model["num_attention_heads"] // pairs
        hidden_keys = self.keys[:length] > positions[:, None]
        mask = torch.zeros(rows, 1, 1, length, device=self.device, dtype=self.dtype)
        mask = mask.masked_fill(hidden_keys[:, None, None], float("-inf")).expand(rows, pairs, group, length)
        place = (self.slots[:rows, None], self.kv_heads[None], positions[:, None])

        def attend(layer, queries, keys, values):
            key_cache, value_cache = self.caches[layer]
            key_cache[place] = keys
            value_cache[place] = values
            # The query heads of a group are rows that see the same keys: one pass over the cache serves them all.
            out = F.scaled_dot_product_attention(queries.view(rows, pairs, group, dim), key_cache[:rows, :, :length],
                                                 value_cache[:rows, :, :length], attn_mask=mask)
            return out.reshape(rows, -1)

        ids.copy_(self.choose(self.forward(ids, positions, attend)))
        # Slots whose request has ended run on without harm.
        positions.add_(1).clamp_(max=self.length - 1)

    def prefill(self, group):
        """The prompts of `group`, pairs of slot and request, padded on the right; their first tokens."""
        longest = max(len(r["input_ids"]) for _, r in group)
        count = len(group)
        ids = torch.zeros(count, longest, dtype=torch.long)
        for row, (_, request) in enumerate(group):
            ids[row, :len(request["input_ids"])] = torch.tensor(request["input_ids"])
        lengths = torch.tensor([len(r["input_ids"]) for _, r in group])
        slots = torch.tensor([slot for slot, _ in group])
        if self.gpu:
            ids, lengths, slots = (t.pin_memory().to(self.device, non_blocking=True) for t in (ids, lengths, slots))
        positions = self.keys[:longest].repeat(count)

        def attend(layer, queries, keys, values):
            def heads_first(t):
                return t.reshape(count, longest, -1, self.model["head_dim"]).transpose(1, 2)

            queries, keys, values = heads_first(queries), heads_first(keys), heads_first(values)
            key_cache, value_cache = self.caches[layer]
            key_cache[slots, :, :longest] = keys
            value_cache[slots, :, :longest] = values
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(count * longest, -1)

        x = self.forward(ids.view(-1), positions, attend).view(count, longest, -1)
        last = x[torch.arange(count, device=self.device), lengths - 1]
        self.ids[slots] = self.choose(last)
        self.positions[slots] = lengths

    def plan(self, requests):
        """Every step of the run: `("prefill", group)` or `("decode", rows, length, slots and requests)`."""
        waiting, free, active, steps = list(reversed(requests)), list(reversed(range(self.batch))), {}, []

        def end_finished():
            for slot in [slot for slot, (request, made) in active.items() if made >= request["output_tokens"]]:
                del active[slot]
                free.append(slot)
            free.sort(reverse=True)

        while waiting or active:
            group, longest = [], 0
            while waiting and free:
                longest = max(longest, len(waiting[-1]["input_ids"]))
                if group and longest * (len(group) + 1) > self.prefill_tokens:
                    break
                group.append((free.pop(), waiting.pop()))
            if group:
                steps.append(("prefill", group))
                active.update((slot, (request, 1)) for slot, request in group)
                end_finished()
                continue
            highest = max(active) + 1
            rows = min(size for size in [1 << i for i in range(20)] + [self.batch] if size >= highest)
            context = max(len(request["input_ids"]) + made for request, made in active.values())
            length = -(-context // LENGTH_STEP) * LENGTH_STEP
            steps.append(("decode", min(rows, self.batch), length, [(slot, r) for slot, (r, _) in active.items()]))
            active = {slot: (request, made + 1) for slot, (request, made) in active.items()}
            end_finished()
        return steps

    def graph(self, rows, length):
        """The captured step; nothing is captured on a CPU."""
        if not self.gpu:
            return lambda: self.decode(rows, length)
        if (rows, length) not in self.graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.decode(rows, length)  # libraries set themselves up outside the capture
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self.decode(rows, length)
            self.pool = self.pool or graph.pool()
            self.graphs[rows, length] = graph
        return self.graphs[rows, length].replay

    @torch.inference_mode()
    def capture(self, requests):
        """All graphs of a run, the largest first, which the others then share memory with."""
        shapes = {step[1:3] for step in self.plan(requests) if step[0] == "decode"}
        for rows, length in sorted(shapes, reverse=True):
            self.graph(rows, length)

    @torch.inference_mode()
    def warm_up(self, requests):
        plan = self.plan(requests)
        for rows, length in {step[1:3] for step in plan if step[0] == "decode"}:
            self.graph(rows, length)()
        shapes = {}
        for step in plan:
            if step[0] == "prefill":
                shapes.setdefault((len(step[1]), max(len(r["input_ids"]) for _, r in step[1])), step[1])
        for group in list(shapes.values())[:8]:
            self.prefill(group)

    @torch.inference_mode()
    def run(self, requests):
        plan = self.plan(requests)
        made = torch.zeros(len(plan), self.batch, dtype=torch.long, device=self.device)
        clock = Clock(self.device)
        for index, step in enumerate(plan):
            if step[0] == "prefill":
                self.prefill(step[1])
            else:
                self.graph(step[1], step[2])()
            made[index].copy_(self.ids)
            clock.mark()
        times = clock.times()
        made = made.tolist()
        results, steps = {}, []
        for index, step in enumerate(plan):
            start, end = times[index], times[index + 1]
            if step[0] == "prefill":
                prompts = sum(len(r["input_ids"]) for _, r in step[1])
                steps.append((start, end, len(step[1]), 0, prompts))
                for _, request in step[1]:
                    results[request["id"]] = (request["id"], start, [], [])
            else:
                steps.append((start, end, 0, len(step[3]), 0))
            for slot, request in step[1] if step[0] == "prefill" else step[3]:
                results[request["id"]][2].append(end)
                results[request["id"]][3].append(made[index][slot])
        return list(results.values()), steps


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
        if task["warmup"]:
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


main()
