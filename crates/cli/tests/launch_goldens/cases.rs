//! The runs that are compared. Weights are made by kernels, so that large models take no memory.

/// One run.
pub(crate) struct Case {
    pub name: &'static str,
    words: &'static str,
    /// How much runs at once.
    limits: &'static str,
    /// Settings of the driver (`hollow_gpu/driver.c`, `recorder.c`).
    pub variables: &'static [(&'static str, &'static str)],
    /// Lengths of prompts and answers.
    pub requests: &'static [(usize, usize)],
}

impl Case {
    pub(crate) fn words(&self) -> String {
        // Some of the tokens that the driver draws end requests.
        let usual = "bench throughput --device cuda --warmup 0 --eos-id 9 --stop-ids 5,6,7,8";
        match self.build() {
            None => format!("{usual} {} --model {}", self.limits, self.words),
            Some(_) => format!("{usual} --engine-dir engine"),
        }
    }

    /// The call that makes the engine, where it is not made in memory: with matrices in the layout of the CPU's kernels.
    pub(crate) fn build(&self) -> Option<String> {
        let words = || format!("build --device cpu {} --model {} --output-dir engine", self.limits, self.words);
        self.name.starts_with("built").then(words)
    }

    /// The whole call, for the golden.
    pub(crate) fn call(&self) -> String {
        let variables: String = self.variables.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        let build = self.build().map_or(String::new(), |words| format!("strobe {words}; "));
        format!("{build}{variables}strobe {}", self.words())
    }

    /// Whether the GPU's peaks are measured too; elsewhere they are known.
    pub(crate) fn measures_peaks(&self) -> bool {
        self.name.ends_with("peaks")
    }
}

/// Steps of prompts, of both and of answers; one prompt is longer than a step.
const FEW: &[(usize, usize)] = &[(150, 6), (40, 9), (300, 5), (7, 12), (90, 4), (33, 3), (1, 8), (64, 2)];
/// A request by itself.
const ONE: &[(usize, usize)] = &[(50, 4)];
const SMALL: &str = "--max-batch-size 16 --max-num-tokens 256 --max-seq-len 512";
/// Steps of more than a thousand rows, and more requests than fit into the graphs of small batches.
const MANY: &[(usize, usize)] = &[
    (1500, 3),
    (900, 4),
    (2000, 5),
    (700, 3),
    (10, 30),
    (20, 29),
    (30, 28),
    (40, 27),
    (50, 26),
    (60, 25),
    (70, 24),
    (80, 23),
    (90, 22),
    (1, 21),
    (2, 20),
    (3, 19),
    (4, 18),
    (5, 17),
    (6, 16),
    (7, 15),
    (8, 14),
    (9, 13),
    (11, 12),
    (12, 11),
    (13, 10),
];
const LARGE: &str = "--max-batch-size 160 --max-num-tokens 2048 --max-seq-len 2048";
/// Keys of one request that are shared out to many blocks.
const LONG: &[(usize, usize)] = &[(6000, 3), (5, 12)];
const FEW_LONG: &str = "--max-batch-size 4 --max-num-tokens 1024 --max-seq-len 8192";
/// A cache that does not hold all of them.
const TIGHT: &str = "--max-batch-size 16 --max-num-tokens 256 --max-seq-len 512 --kv-cache-blocks 16";

macro_rules! cases {
    ($($name:ident, $words:literal, $limits:expr, $requests:expr, [$($variable:literal = $value:literal),*];)*) => {
        pub(crate) const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            words: $words,
            limits: $limits,
            variables: &[$(($variable, $value)),*],
            requests: $requests,
        }),*];

        $(#[test]
        fn $name() {
            super::check(stringify!($name));
        })*
    };
}

cases! {
    micro_1, "micro --dtype bfloat16", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    micro_2, "micro --dtype float16", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    micro_3, "micro --dtype bfloat16 --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    tinyllama_1, "tinyllama-1.1b", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    tinyllama_2, "tinyllama-1.1b", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    tinyllama_3, "tinyllama-1.1b --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    qwen3_1, "qwen3-0.6b", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    qwen3_2, "qwen3-0.6b", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    qwen3_3, "qwen3-0.6b --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    llama_8b_1, "llama-3.1-8b", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    llama_8b_2, "llama-3.1-8b", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    llama_8b_3, "llama-3.1-8b --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    mixtral_1, "mixtral-small --dtype bfloat16", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    mixtral_2, "mixtral-small --dtype float16", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    mixtral_3, "mixtral-small --dtype bfloat16 --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    gpt_oss_20b_1, "gpt-oss-20b", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    gpt_oss_20b_2, "gpt-oss-20b", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    gpt_oss_20b_3, "gpt-oss-20b --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    deepseek_1, "deepseek-tiny --dtype bfloat16", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    deepseek_2, "deepseek-tiny --dtype float16", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    deepseek_3, "deepseek-tiny --dtype bfloat16 --gemm-plugin disable", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    gpt_oss_tiny_1, "gpt-oss-tiny --dtype bfloat16", SMALL, FEW, ["HOLLOW_SEED" = "1"];
    gpt_oss_tiny_2, "gpt-oss-tiny --dtype float16", SMALL, FEW, ["HOLLOW_SEED" = "2"];
    gpt_oss_tiny_3, "gpt-oss-tiny --dtype float32", SMALL, FEW, ["HOLLOW_SEED" = "3"];
    fp8, "tinyllama-1.1b --quantization fp8", SMALL, FEW, [];
    fp8_own, "tinyllama-1.1b --quantization fp8 --gemm-plugin disable", SMALL, FEW, [];
    fp8_sm_89, "micro --dtype float16 --quantization fp8", SMALL, FEW, ["HOLLOW_CAPABILITY" = "89"];
    fp8_cache, "tinyllama-1.1b --kv-cache-dtype fp8", SMALL, FEW, [];
    f16, "tinyllama-1.1b --dtype float16", SMALL, FEW, [];
    f32, "micro --dtype float32", SMALL, FEW, [];
    f32_fp8_cache, "micro --dtype float32 --kv-cache-dtype fp8 --context-fmha disable", SMALL, FEW, [];
    unfused, "tinyllama-1.1b --context-fmha disable", SMALL, FEW, [];
    unfused_latent, "deepseek-tiny --dtype bfloat16 --context-fmha disable", SMALL, FEW, [];
    unpaged, "tinyllama-1.1b --paged-kv-cache disable", SMALL, FEW, [];
    no_graphs, "tinyllama-1.1b --cuda-graph disable", SMALL, FEW, [];
    no_overlap, "tinyllama-1.1b --overlap-scheduler disable", SMALL, FEW, [];
    blocking, "micro --dtype bfloat16 --cuda-launch-blocking", SMALL, FEW, [];
    sampling, "tinyllama-1.1b --temperature 0.8 --top-k 40 --top-p 0.9 --min-tokens 3", SMALL, FEW, [];
    balanced, "mixtral-small --dtype bfloat16 --perfect-router", SMALL, FEW, [];
    sm_80, "tinyllama-1.1b", SMALL, FEW, ["HOLLOW_CAPABILITY" = "80"];
    sm_80_experts, "moe-tiny --dtype float16", SMALL, FEW, ["HOLLOW_CAPABILITY" = "80"];
    sm_89, "qwen3-0.6b", SMALL, FEW, ["HOLLOW_CAPABILITY" = "89"];
    preempted, "micro --dtype bfloat16 --scheduler-policy max_utilization", TIGHT, FEW, [];
    reused, "micro --dtype bfloat16 --kv-cache-reuse enable", SMALL, FEW, [];
    large, "tinyllama-1.1b", LARGE, MANY, ["HOLLOW_SEED" = "4"];
    long, "qwen3-0.6b", FEW_LONG, LONG, [];
    single, "micro --dtype bfloat16", SMALL, ONE, [];
    built, "micro --dtype bfloat16", SMALL, FEW, [];
    unfused_f16, "micro --dtype float16 --context-fmha disable", SMALL, FEW, [];
    unfused_fp8_cache, "micro --dtype bfloat16 --kv-cache-dtype fp8 --context-fmha disable", SMALL, FEW, [];
    deepseek_f32, "deepseek-tiny --dtype float32", SMALL, FEW, [];
    sm_80_many_experts, "mixtral-small --dtype bfloat16", LARGE, MANY, ["HOLLOW_CAPABILITY" = "80"];
    peaks, "micro --dtype bfloat16", SMALL, FEW, [];
}
