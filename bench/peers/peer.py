"""Runs workloads with one engine: peer.py PEER MODEL THREADS.

Standard input: one workload as JSON per line. Standard output: {"ready": true}, then one line per workload:
{"value": NUMBER} in tokens per second (seconds for `start`), or {"error": WHY}.
"""

import json
import os
import sys
import time

peer, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = str(threads)
# Libraries print what they like; the answer goes out where they can't reach it.
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(**values):
    answer.write(json.dumps(values) + "\n")
    answer.flush()


def seconds(run):
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def tokens(count, vocab=512):
    return [3 + 7919 * i % (vocab - 3) for i in range(count)]


class Llama:
    def __init__(self):
        from llama_cpp import llama_cpp as library

        self.library = library
        library.llama_backend_init()
        begin = time.perf_counter()
        self.model = library.llama_model_load_from_file(model.encode(), library.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.prompts = None
        self.context(1024, 1)
        self.decode([(1, 0, 0)])
        self.start_seconds = time.perf_counter() - begin

    def context(self, length, sequences):
        params = self.library.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = length, sequences, 2048, 512
        params.n_threads = params.n_threads_batch = threads
        self.ctx = self.library.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise RuntimeError("llama.cpp cannot make a context")

    def decode(self, rows):
        """Rows of (token, position, sequence); the last row of each sequence asks for logits."""
        batch = self.library.llama_batch_init(len(rows), 0, 1)
        last = {sequence: i for i, (_, _, sequence) in enumerate(rows)}
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, last[sequence] == i
        batch.n_tokens = len(rows)
        code = self.library.llama_decode(self.ctx, batch)
        self.library.llama_synchronize(self.ctx)
        self.library.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code}")

    def run(self, work):
        name, prompt, output = work["name"], work["prompt"], work["output"]
        if name == "start":
            return self.start_seconds
        ids = tokens(prompt + output)
        sequences, steps = work.get("batch", 1), work.get("steps", output - 1)

        def prompts():
            for sequence in range(sequences):
                self.decode([(ids[i], i, sequence) for i in range(prompt)])

        if self.prompts == (prompt, sequences) and name != "prefill":
            # The prompts of the turn before are still there: forget what came after them.
            memory = self.library.llama_get_memory(self.ctx)
            for sequence in range(sequences):
                self.library.llama_memory_seq_rm(memory, sequence, prompt, -1)
        else:
            self.library.llama_free(self.ctx)
            self.context(max(1024, sequences * (prompt + steps + 1)), sequences)
            self.decode([(ids[0], 0, 0)])  # the first call allocates
            self.library.llama_memory_clear(self.library.llama_get_memory(self.ctx), True)
            took = seconds(prompts)
            self.prompts = (prompt, sequences)
        if name == "prefill":
            return prompt / took

        def generate():
            for step in range(steps):
                self.decode([(ids[step], prompt + step, sequence) for sequence in range(sequences)])

        return sequences * steps / seconds(generate)


class Torch:
    def __init__(self):
        import torch
        import transformers

        self.torch = torch
        torch.set_num_threads(threads)
        shape = json.loads(model)
        config = transformers.LlamaConfig(
            vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["intermediate"],
            num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"], max_position_embeddings=shape["context"])
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape["dtype"])).eval()
        self.step(tokens(16), None)

    def step(self, ids, cache):
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.past_key_values

    def run(self, work):
        ids = tokens(work["prompt"] + work["output"])
        cache = None

        def prompt():
            nonlocal cache
            cache = self.step(ids[:work["prompt"]], None)

        took = seconds(prompt)
        if work["name"] == "prefill":
            return work["prompt"] / took
        if work["name"] != "decode":
            raise NotImplementedError(f"{work['name']} is not run with torch")

        def generate():
            nonlocal cache
            for step in range(work["output"] - 1):
                cache = self.step([ids[step]], cache)

        return (work["output"] - 1) / seconds(generate)


class CTranslate2:
    def __init__(self):
        import ctranslate2

        begin = time.perf_counter()
        self.generator = ctranslate2.Generator(model, device="cpu", inter_threads=1, intra_threads=threads)
        self.generate(1, 1)
        self.start_seconds = time.perf_counter() - begin

    def generate(self, prompt, output, batch=1):
        text = [f"t{i}" for i in tokens(prompt)]
        self.generator.generate_batch([text] * batch, max_length=output, min_length=output, sampling_topk=1,
                                      include_prompt_in_result=False, return_scores=False)

    def run(self, work):
        if work["name"] == "start":
            return self.start_seconds
        batch, steps = work.get("batch", 1), work.get("steps", work["output"] - 1)
        first = seconds(lambda: self.generate(work["prompt"], 1, batch))
        if work["name"] == "prefill":
            return work["prompt"] / first
        # What more tokens cost, beside the same prompt.
        whole = seconds(lambda: self.generate(work["prompt"], 1 + steps, batch))
        if whole <= first:
            raise RuntimeError("more tokens took less time: the machine is not quiet")
        return batch * steps / (whole - first)


try:
    engine = {"llama.cpp": Llama, "torch": Torch, "ctranslate2": CTranslate2}[peer]()
except Exception as problem:
    say(error=f"{type(problem).__name__}: {problem}".split("\n")[0])
    sys.exit(1)
say(ready=True)
for line in sys.stdin:
    try:
        say(value=engine.run(json.loads(line)))
    except Exception as problem:
        say(error=f"{type(problem).__name__}: {problem}".split("\n")[0])
