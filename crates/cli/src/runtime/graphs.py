

# A step of our own: the rest of the runner, which stands behind runner.py ------------------------------------------


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


class Weights:
    """Fused qkv and gate-up products."""

    def __init__(self, task, device, dtype):
        self.model, self.device, self.dtype = task["model"], device, dtype
        if task["checkpoint"]:
            self.from_checkpoint(task)
        else:
            self.at_random(task["seed"])
        tensors = [self.embedding, self.final_norm] + [t for layer in self.layers for t in layer.values() if t is not None]
        if self.head is not self.embedding:
            tensors.append(self.head)
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)
        check_parameters(task, tensors)

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
                "o": state[f"{attention}.o_proj.weight"],
                "o_bias": state.get(f"{attention}.o_proj.bias"),
                "post_norm": state[f"model.layers.{index}.post_attention_layernorm.weight"],
                "gate_up": joined(mlp, ["gate_proj", "up_proj"], "weight"),
                "gate_up_bias": joined(mlp, ["gate_proj", "up_proj"], "bias"),
                "down": state[f"{mlp}.down_proj.weight"], "down_bias": state.get(f"{mlp}.down_proj.bias"),
            })


class Parts:
    """A step but for its attention. Each part is short enough to be compiled on its own, once for all layers."""

    def __init__(self, model):
        self.heads, self.pairs, self.dim = (model[key] for key in (
            "num_attention_heads", "num_key_value_heads", "head_dim"))
        self.hidden, self.eps = model["hidden_size"], model["rms_norm_eps"]

    def before(self, x, layer, cos, sin, cache, places):
        """Queries, keys and values of a layer, `[rows][heads][dim]`; keys and values are put into the cache."""
        normed = F.rms_norm(x, (self.hidden,), layer["norm"], self.eps)
        qkv = F.linear(normed, layer["qkv"], layer["qkv_bias"]).view(-1, self.heads + 2 * self.pairs, self.dim)
        rotating = qkv[:, :self.heads + self.pairs]
        if layer["q_norm"] is not None:
            rotating.copy_(torch.cat([
                F.rms_norm(rotating[:, :self.heads], (self.dim,), layer["q_norm"], self.eps),
                F.rms_norm(rotating[:, self.heads:], (self.dim,), layer["k_norm"], self.eps)], 1))
        rolled = torch.roll(rotating, self.dim // 2, -1)
        rotating.mul_(cos).addcmul_(rolled, sin)
        cache.index_copy_(0, places, qkv[:, self.heads:])
        return qkv

    def after(self, x, attention, layer):
        """The hidden state behind a layer, given what its attention gave."""
        x = self.added(x, attention, layer["o"], layer["o_bias"])
        normed = F.rms_norm(x, (self.hidden,), layer["post_norm"], self.eps)
        gate, up = F.linear(normed, layer["gate_up"], layer["gate_up_bias"]).chunk(2, -1)
        return self.added(x, F.silu(gate) * up, layer["down"], layer["down_bias"])

    @staticmethod
    def added(x, rows, weight, bias):
        if torch.compiler.is_compiling():
            return x + F.linear(rows, weight, bias)  # the sum becomes part of the norm behind it
        x.addmm_(rows, weight.t())
        return x if bias is None else x.add_(bias)

    def choose(self, x, norm, head):
        return F.linear(F.rms_norm(x, (self.hidden,), norm, self.eps), head).argmax(-1)


def compiled(parts):
    """The same parts through torch.compile."""
    torch._dynamo.config.cache_size_limit = 64  # every shape is compiled for itself
    names = ("before", "after", "choose")
    return SimpleNamespace(**{
        name: torch.compile(getattr(parts, name), dynamic=False) for name in names})


LENGTH_STEP = 64  # graphs are captured for caches of these lengths
TIMED_STEPS = 10  # that a way to make a step is judged by
WORTH_COMPILING = 0.1  # a batch size must make up so much of a run
MOST_CONTEXTS = 512  # that graphs are captured for one by one


class Way(NamedTuple):
    """A way to make a decode step."""
    even: bool  # all requests have filled as many places
    grouped: bool  # see Graphs.attention
    parts: object


class Graphs:
    """A Llama step written by hand over a static KV cache, the token fed back on the device; on a GPU one CUDA graph per
    batch size and cache length, of the ways to make it the one that was fastest at the start. Requests take the slots of
    others as those end. Output lengths are known, so the host plans everything ahead and never waits."""

    def __init__(self, task, requests, device, dtype):
        self.model, self.device, self.dtype = task["model"], device, dtype
        self.batch = max(1, min(task["batch"], len(requests)))
        self.prefill_tokens = task["prefill_tokens"]
        longest = max(len(r["input_ids"]) + r["output_tokens"] for r in requests)
        self.length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        self.gpu = device.type == "cuda"
        self.weights = Weights(task, device, dtype)
        self.weight_bytes = self.weights.bytes
        self.cos, self.sin = (table[:, None] for table in rotary_tables(self.model, self.length, device, dtype))
        self.heads, self.pairs, self.dim = (self.model[key] for key in (
            "num_attention_heads", "num_key_value_heads", "head_dim"))
        # [slot and position][keys, then values][dim]
        shape = (self.batch * self.length, 2 * self.pairs, self.dim)
        self.caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in self.weights.layers]
        self.kv_bytes = sum(cache.numel() * cache.element_size() for cache in self.caches)
        self.ids = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.positions = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.starts = torch.arange(self.batch, device=device) * self.length  # of each slot in the cache
        self.keys = torch.arange(self.length, device=device)
        self.parts = Parts(self.model)
        self.compiled = compiled(self.parts) if self.gpu else None
        self.graphs, self.pool, self.side, self.chosen, self.prefill_parts = {}, None, None, {}, {}
        with torch.no_grad():
            self.prepare(self.plan(requests))

    def forward(self, parts, ids, positions, places, attend):
        """The last hidden state of every row of `ids`."""
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.weights.embedding[ids]
        for layer, cache in zip(self.weights.layers, self.caches):
            qkv = parts.before(x, layer, cos, sin, cache, places)
            x = parts.after(x, attend(qkv, cache), layer)
        return x

    def attention(self, way, rows, length):
        """What attends over the first `length` places of every slot: all of them, where the requests have filled so many
        and no more; otherwise those that are filled, the others masked."""
        mask = None
        if not way.even:
            unseen = self.keys[:length] > self.positions[:rows, None]
            mask = torch.zeros(rows, 1, 1, length, device=self.device, dtype=self.dtype)
            mask = mask.masked_fill(unseen[:, None, None], float("-inf"))

        def attend(qkv, cache):
            # Every query head for itself, or those that see the same keys as the rows of one attention.
            queries = qkv[:, :self.heads].view(rows, *((self.pairs, -1) if way.grouped else (self.heads, 1)), self.dim)
            cache = cache.view(self.batch, self.length, 2, self.pairs, self.dim)[:rows, :length].transpose(1, 3)
            seen = None if mask is None else mask.expand(*queries.shape[:3], length)
            out = F.scaled_dot_product_attention(queries, cache[:, :, 0], cache[:, :, 1], attn_mask=seen,
                                                 enable_gqa=not way.grouped)
            return out.reshape(rows, -1)

        return attend

    def decode(self, rows, length, way):
        """One token more for slots 0 to `rows`, over the first `length` places of the cache."""
        ids, positions = self.ids[:rows], self.positions[:rows]
        places = self.starts[:rows] + positions
        x = self.forward(way.parts, ids, positions, places, self.attention(way, rows, length))
        ids.copy_(way.parts.choose(x, self.weights.final_norm, self.weights.head))
        # Slots whose request has ended run on without harm.
        positions.add_(1).clamp_(max=self.length - 1)

    def prefill(self, group, parts):
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
        places = (self.starts[slots][:, None] + self.keys[:longest]).view(-1)

        def attend(qkv, cache):
            qkv = qkv.view(count, longest, -1, self.dim).transpose(1, 2)
            out = F.scaled_dot_product_attention(*qkv.split([self.heads, self.pairs, self.pairs], 1),
                                                 is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(count * longest, -1)

        x = self.forward(parts, ids.view(-1), positions, places, attend).view(count, longest, -1)
        last = x[torch.arange(count, device=self.device), lengths - 1]
        self.ids[slots] = self.parts.choose(last, self.weights.final_norm, self.weights.head)
        self.positions[slots] = lengths

    # The run.

    def plan(self, requests):
        """Every step of the run: `("prefill", group)` or `("decode", rows, length, slots and requests, context)`, where the
        context is that of all requests, or None."""
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
            contexts = {len(request["input_ids"]) + made for request, made in active.values()}
            length = -(-max(contexts) // LENGTH_STEP) * LENGTH_STEP
            steps.append(("decode", min(rows, self.batch), length, [(slot, r) for slot, (r, _) in active.items()],
                          max(contexts) if len(contexts) == 1 else None))
            active = {slot: (request, made + 1) for slot, (request, made) in active.items()}
            end_finished()
        return steps

    def prepare(self, plan):
        """Decide how each kind of step is made, and capture all graphs, the largest first, which the others then share
        memory with."""
        decodes = Counter(step[1:3] for step in plan if step[0] == "decode")
        prefills = Counter(self.prefill_shape(step[1]) for step in plan if step[0] == "prefill")
        common = 0
        self.description = "a hand-written step"
        for rows in sorted({rows for rows, _ in decodes}, reverse=True):
            lengths = {length: steps for (r, length), steps in decodes.items() if r == rows}
            share = sum(lengths.values()) / sum(decodes.values())
            contexts = [step[4] for step in plan if step[0] == "decode" and step[1] == rows]
            alike = [context for context in contexts if context is not None]
            even = 2 * len(alike) >= len(contexts) and len(set(alike)) <= MOST_CONTEXTS
            self.chosen[rows] = self.fastest_decode(rows, max(lengths, key=lengths.get), share, even)
            if self.gpu and share > common:
                common = share
                self.description = f"one decode step in a CUDA graph, {self.described(self.chosen[rows][even])}"
        for kind in sorted({self.kind(step) for step in plan if step[0] == "decode"}, reverse=True):
            self.graph(*kind)
        for shape, steps in prefills.items():
            if self.gpu and steps / len(plan) >= WORTH_COMPILING:
                group = next(step[1] for step in plan if step[0] == "prefill" and self.prefill_shape(step[1]) == shape)
                ways = [(parts, lambda parts=parts: self.prefill(group, parts)) for parts in (self.parts, self.compiled)]
                self.prefill_parts[shape] = self.fastest(ways)

    def kind(self, step):
        """Rows, length and evenness of a decode step: what a graph is captured for."""
        _, rows, length, _, context = step
        even = context is not None and self.chosen[rows][True].even
        return rows, context if even else length, even

    def described(self, way):
        return ", ".join([
            "attention without a mask" if way.even else "masked attention",
            "heads in groups" if way.grouped else "each head for itself",
            "as written" if way.parts is self.parts else "compiled"])

    def fastest_decode(self, rows, length, share, even):
        """The fastest way to make a step: where contexts differ, and where they are all the same."""
        if not self.gpu:
            return Way(False, False, self.parts), Way(even, False, self.parts)
        compiled = [self.compiled] if share >= WORTH_COMPILING else []
        ways = [Way(alike, grouped, parts) for parts in [self.parts] + compiled
                for grouped in (False, True) for alike in [False] + [True] * even]

        def runner(way):
            graph = None

            def run():
                nonlocal graph
                graph = graph or self.captured(rows, length, way)
                graph.replay()

            return run

        # As if the cache were full.
        self.positions.fill_(length - 1)
        order = self.ranked([(way, runner(way)) for way in ways])
        self.positions.zero_()
        return next(way for way in order if not way.even), order[0]

    def fastest(self, ways):
        return self.ranked(ways)[0]

    def ranked(self, ways):
        """Of pairs of a way and what runs it, the ways by the time they took. One that can't run here is none, unless no
        other is left."""
        times, problem = [], None
        for way, run in ways:
            try:
                run()
                torch.cuda.synchronize()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(TIMED_STEPS):
                    run()
                end.record()
                torch.cuda.synchronize()
                times.append((begin.elapsed_time(end), len(times), way))
            except Exception as failed:  # torch.compile alone has dozens of kinds
                problem = failed
                print(f"a way to make a step can't run here: {failed}", file=sys.stderr)
        if not times:
            raise problem
        return [way for _, _, way in sorted(times, key=lambda time: time[:2])]

    def captured(self, rows, length, way, pool=None):
        # One stream for all of them: libraries keep memory for each stream that they have seen.
        self.side = self.side or torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.decode(rows, length, way)  # libraries set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.decode(rows, length, way)
        return graph

    def graph(self, rows, length, even):
        """What makes a step; nothing is captured on a CPU."""
        way = self.chosen[rows][even]
        if not self.gpu:
            return lambda: self.decode(rows, length, way)
        if (rows, length, even) not in self.graphs:
            graph = self.captured(rows, length, way, self.pool)
            self.pool = self.pool or graph.pool()
            self.graphs[rows, length, even] = graph
        return self.graphs[rows, length, even].replay

    @staticmethod
    def prefill_shape(group):
        return len(group), max(len(request["input_ids"]) for _, request in group)

    def step(self, step):
        if step[0] == "prefill":
            self.prefill(step[1], self.prefill_parts.get(self.prefill_shape(step[1]), self.parts))
        else:
            self.graph(*self.kind(step))()

    @torch.no_grad()
    def warm_up(self, requests):
        """Every kind of decode step once, and some of the prompts' shapes."""
        steps = {self.kind(step) if step[0] == "decode" else self.prefill_shape(step[1]) + ("prefill",): step
                 for step in self.plan(requests)}
        for step in [s for s in steps.values() if s[0] == "decode"] + [s for s in steps.values() if s[0] == "prefill"][:8]:
            self.step(step)

    @torch.no_grad()
    def run(self, requests):
        plan = self.plan(requests)
        made = torch.zeros(len(plan), self.batch, dtype=torch.long, device=self.device)
        clock = Clock(self.device)
        for index, step in enumerate(plan):
            self.step(step)
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
