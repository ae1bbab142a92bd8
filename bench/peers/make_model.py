"""A Llama or Mixtral of random weights in the format of one peer: make_model.py PEER TYPE PATH SHAPE.

Speed does not depend on the values, so one layer's weights serve all layers; each has its own copy in the file. (For
CTranslate2, which stores equal weights once, the first value tells layers apart.)
"""

import json
import os
import sys

import numpy as np

peer, kind, path, shape = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
random = np.random.default_rng(1)
hidden, inter, vocab = shape["hidden"], shape["intermediate"], shape["vocab"]
heads, kv_heads = shape["heads"], shape["kv_heads"]
kv = hidden // heads * kv_heads
LAYER = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
         "ffn_gate": (inter, hidden), "ffn_up": (inter, hidden), "ffn_down": (hidden, inter)}


def floats(rows, columns):
    return (random.standard_normal((rows, columns), dtype=np.float32) * 0.02).astype(np.float32)


def gguf_file():
    import gguf

    def scaled_blocks(rows, blocks, code_bytes, scale):
        """A float16 scale, then codes."""
        data = random.integers(0, 256, (rows, blocks, 2 + code_bytes), dtype=np.uint8)
        data[:, :, :2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
        return data.reshape(rows, -1)

    def tensor(rows, columns, kind):
        if kind == "f32":
            return floats(rows, columns), gguf.GGMLQuantizationType.F32
        if kind == "bf16":
            upper = (floats(rows, columns).view(np.uint32) >> 16).astype(np.uint16)
            return upper.view(np.uint8), gguf.GGMLQuantizationType.BF16
        if kind == "q8_0":
            return scaled_blocks(rows, columns // 32, 32, 0.02 / 64), gguf.GGMLQuantizationType.Q8_0
        if kind == "q4_0":
            return scaled_blocks(rows, columns // 32, 16, 0.02 / 4), gguf.GGMLQuantizationType.Q4_0
        # 6 bits: codes and small scales, then one float16 scale.
        data = random.integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
        data[:, :, 208:] = np.frombuffer(np.float16(1e-5).tobytes(), dtype=np.uint8)
        return data.reshape(rows, -1), gguf.GGMLQuantizationType.Q6_K

    writer = gguf.GGUFWriter(path + ".partial", "llama")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inter)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    ones = np.ones(hidden, dtype=np.float32)
    weights = {name: tensor(rows, columns, kind) for name, (rows, columns) in LAYER.items()}
    experts = shape.get("experts", 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(shape["experts_per_token"])
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            rows, columns = LAYER[name]
            del weights[name]
            data, dtype = tensor(experts * rows, columns, kind)
            weights[f"{name}_exps"] = data.reshape(experts, rows, -1), dtype
        weights["ffn_gate_inp"] = floats(experts, hidden), gguf.GGMLQuantizationType.F32
    for layer in range(shape["layers"]):
        for name, (data, dtype) in weights.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=dtype)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    # The output head of a Q4_0 file has 6 bits, as llama.cpp's own converter makes it.
    for name, wanted in (("token_embd", kind), ("output", "q6_k" if kind == "q4_0" else kind)):
        data, dtype = tensor(vocab, hidden, wanted)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.rename(path + ".partial", path)


def ctranslate2_model():
    import ctranslate2
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        shape["layers"], heads, activation=common_spec.Activation.SWISH, pre_norm=True, ffn_glu=True, rms_norm=True,
        rotary_dim=0, rotary_interleave=False, rotary_base=10000, num_heads_kv=kv_heads)
    ones = np.ones(hidden, dtype=np.float32)
    weights = {name: floats(*size) for name, size in LAYER.items()}
    weights["attn_qkv"] = np.concatenate([weights.pop(f"attn_{name}") for name in "qkv"])

    def own(name, layer):
        copy = weights[name].copy()
        copy[0, 0] = 0.001 * (1 + layer)
        return copy

    spec.decoder.embeddings.weight = floats(vocab, hidden)
    spec.decoder.projection.weight = floats(vocab, hidden)
    spec.decoder.layer_norm.gamma = ones
    spec.decoder.scale_embeddings = False
    for i, layer in enumerate(spec.decoder.layer):
        layer.self_attention.layer_norm.gamma = layer.ffn.layer_norm.gamma = ones
        layer.self_attention.linear[0].weight = own("attn_qkv", i)
        layer.self_attention.linear[1].weight = own("attn_output", i)
        layer.ffn.linear_0.weight = own("ffn_gate", i)
        layer.ffn.linear_0_noact.weight = own("ffn_up", i)
        layer.ffn.linear_1.weight = own("ffn_down", i)
    spec.register_vocabulary([f"t{i}" for i in range(vocab)])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "t1", "t2", "t0"
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    os.makedirs(path + ".partial")
    spec.save(path + ".partial")
    os.rename(path + ".partial", path)


{"llama.cpp": gguf_file, "ctranslate2": ctranslate2_model}[peer]()
