//! Every rule speaks where it applies and is silent where it does not.

mod synthetic;

use std::collections::BTreeMap;

use strobe_analyze::advice::{findings, report};
use strobe_analyze::budget::{budget_by_kind, budgets};
use strobe_analyze::sheet::Value;
use strobe_trace::{CallKind, Counter, Device, GraphMode, Iteration, OpKind, RangeSource, Trace};
use synthetic::{Builder, all_traces, context, read, real_data};

const GEMM: &str = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT";
const ELEMENTWISE: &str = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>";
const SOFTMAX: &str = "void cunn_SoftMaxForward<8, float, float, float>";
const ATTENTION: &str = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true, false>";
const NCCL: &str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL";

fn ids(builder: &mut Builder) -> Vec<&'static str> {
    let trace = builder.build();
    let found = findings(&context(&trace));
    check(&trace, "made by hand");
    found.into_iter().map(|f| f.id).collect()
}

/// What holds for the advice on any trace.
fn check(trace: &Trace, what: &str) {
    let context = context(trace);
    let found = findings(&context);
    let share = |i: usize| found[i].gain.as_ref().map_or(-1.0, |g| g.share());
    for (i, finding) in found.iter().enumerate() {
        if let Some(gain) = &finding.gain {
            assert!(0 <= gain.ns && gain.ns <= gain.of_ns && !gain.of.is_empty(), "{what}: {finding:?}");
        }
        assert!(!finding.evidence.rows.is_empty(), "{what}: {} without evidence", finding.id);
        assert!(i == 0 || share(i - 1) >= share(i), "{what}: in order of gain");
    }
    let rendered = report(&context);
    assert_eq!(rendered.sheets.len(), if found.is_empty() { 0 } else { 1 + found.len() });
}

/// `kernels` launches, one every `period`, each call `call` long; the kernel starts when its call returns.
fn steady(name: &str, kernels: i64, period: i64, call: i64, kernel: i64) -> Builder {
    let mut builder = Builder::new();
    for i in 0..kernels {
        let at = i * period;
        builder.launch(name, (at, at + call), (at + call, at + call + kernel));
    }
    builder
}

/// Steps marked as decode, each of `launches` kernels of 2 µs, launched every 10 µs by calls of 4 µs.
fn decode_steps(steps: i64, launches: i64) -> Builder {
    let mut builder = Builder::new();
    let wall = launches * 10_000;
    for step in 0..steps {
        let at = step * wall;
        builder.range(RangeSource::PushPop, &format!("iteration {step}: 0 ctx reqs, 8 gen reqs"), at, at + wall);
        for i in 0..launches {
            let call = at + i * 10_000 + 100;
            builder.launch(GEMM, (call, call + 4_000), (call + 4_500, call + 6_500));
        }
    }
    builder
}

#[test]
fn launches_are_weighed_per_iteration_with_the_numbers_of_the_budget() {
    let trace = decode_steps(7, 20).build();
    let context = context(&trace);
    let found = findings(&context).into_iter().find(|f| f.id == "launch-bound").unwrap();
    // 20 kernels of 2 µs in 200 µs; what passes before the first launch of the next step is no matter of launches.
    assert_eq!(
        found.sentence,
        "decode is host-bound: 78.2 % of the wall is idle behind launches of 4.00 µs; CUDA graphs would remove up to \
         156 µs of 200 µs per iteration (median of 7 decode)"
    );
    let kinds = budget_by_kind(&budgets(&context));
    let medians: BTreeMap<String, f64> = kinds[0].parts.iter().map(|p| (p.part.to_string(), p.median_ns)).collect();
    for row in &found.evidence.rows[..2] {
        let [Value::Text(part), Value::Int(ns), _] = &row[..] else { panic!("{row:?}") };
        assert_eq!(*ns as f64, medians[part].trunc(), "{part}");
    }
}

#[test]
fn waits_without_a_kernel_between_them_count_once() {
    let mut builder = Builder::new();
    for i in 0..3 {
        let at = i * 10_000_000;
        builder.launch(GEMM, (at, at + 5_000), (at + 6_000, at + 1_000_000));
        for wait in 0..20 {
            let from = at + 900_000 + wait * 200_000;
            builder.call("cudaStreamSynchronize", from, from + 150_000, 0);
        }
    }
    let trace = builder.build();
    let found = findings(&context(&trace)).into_iter().find(|f| f.id == "sync-per-step").unwrap();
    let gain = found.gain.unwrap();
    assert!(gain.ns < gain.of_ns, "{gain:?}");
    assert!(found.sentence.contains("2 times"), "{}", found.sentence);
}

/// Kernels one behind the other, launched well ahead.
fn saturated(name: &str, kernels: i64, kernel: i64) -> Builder {
    let mut builder = Builder::new();
    for i in 0..kernels {
        let start = 20_000 + i * kernel;
        builder.launch(name, (i * 10, i * 10 + 5), (start, start + kernel));
    }
    builder
}

#[test]
fn launches_that_the_device_waits_for() {
    assert!(ids(&mut steady(GEMM, 100, 20_000, 5_000, 2_000)).contains(&"launch-bound"));
    assert!(!ids(&mut saturated(GEMM, 100, 20_000)).contains(&"launch-bound"));
    let mut replays = steady(GEMM, 100, 20_000, 5_000, 2_000);
    let name = replays.name("cudaGraphLaunch");
    replays.trace.calls.name.fill(name);
    assert!(!ids(&mut replays).contains(&"launch-bound"));
}

#[test]
fn work_calls_and_starts_that_the_device_waits_for() {
    let short = ids(&mut steady(GEMM, 100, 20_000, 5_000, 2_000));
    for rule in ["host-work", "long-calls", "late-start", "sync-per-step", "queue-full"] {
        assert!(!short.contains(&rule), "{rule}");
    }
    assert!(ids(&mut steady(GEMM, 10, 2_000_000, 5_000, 2_000)).contains(&"unexplained-idle"));
    let mut working = steady(GEMM, 10, 2_000_000, 5_000, 2_000);
    for i in 0..9 {
        working.range(RangeSource::PushPop, "pack the batch", i * 2_000_000 + 10_000, (i + 1) * 2_000_000 - 10_000);
    }
    let found = ids(&mut working);
    assert!(found.contains(&"host-work") && !found.contains(&"unexplained-idle"), "{found:?}");
    let mut late = Builder::new();
    late.launch(GEMM, (0, 5_000), (6_000, 7_000)).launch(GEMM, (8_000, 13_000), (6_000_000, 7_000_000));
    assert!(ids(&mut late).contains(&"late-start"));
    let mut allocating = steady(GEMM, 10, 4_000_000, 5_000, 2_000);
    for i in 0..9 {
        allocating.call("cudaMalloc", i * 4_000_000 + 100_000, i * 4_000_000 + 3_900_000, 0);
    }
    assert!(ids(&mut allocating).contains(&"long-calls"));
}

/// Steps of 20 launches of 50 µs each, before which the host is in a range for a while.
fn loading_steps(loading: i64) -> Builder {
    let mut builder = Builder::new();
    let wall = loading + 20 * 50_000;
    for step in 0..6 {
        let at = step * wall;
        builder.range(RangeSource::PushPop, "load_batch", at, at + loading);
        for i in 0..20 {
            let call = at + loading + i * 50_000;
            builder.launch(GEMM, (call, call + 4_000), (call + 4_500, call + 14_500));
        }
    }
    builder
}

#[test]
fn a_process_that_waits_for_data_is_not_told_to_use_graphs() {
    let waiting = ids(&mut loading_steps(5_000_000));
    assert_eq!(waiting[0], "data-loading");
    for rule in ["launch-bound", "between-iterations", "host-work", "unexplained-idle"] {
        assert!(!waiting.contains(&rule), "{waiting:?}");
    }
    let launching = ids(&mut loading_steps(20_000));
    assert!(launching.contains(&"launch-bound") && !launching.contains(&"data-loading"), "{launching:?}");
    let trace = loading_steps(5_000_000).build();
    let found = findings(&context(&trace)).remove(0);
    assert_eq!(
        found.sentence,
        "the device waits 25.0 ms (84.0 % of its idle time, 80.7 % of the 31.0 ms span of the GPU) for `load_batch` (data \
         loading), 5 times"
    );
}

#[test]
fn remedies_fit_the_program() {
    let remedy = |builder: &mut Builder, id: &str| {
        let trace = builder.build();
        let found = findings(&context(&trace));
        found.into_iter().find(|finding| finding.id == id).map(|finding| finding.remedy)
    };
    let without = remedy(&mut steady(GEMM, 100, 20_000, 5_000, 2_000), "launch-bound").unwrap();
    assert!(without.contains("CUDA graph") && !without.contains("torch"), "{without}");
    let with = remedy(&mut steady(ELEMENTWISE, 100, 20_000, 5_000, 2_000), "launch-bound").unwrap();
    assert!(with.contains("torch.compile"), "{with}");
    let mut on_hip = steady(ELEMENTWISE, 100, 20_000, 5_000, 2_000);
    let name = on_hip.name("hipLaunchKernel");
    on_hip.trace.calls.name.fill(name);
    let on_hip = remedy(&mut on_hip, "launch-bound").unwrap();
    assert!(on_hip.contains("HIP graph") && !on_hip.contains("CUDA"), "{on_hip}");
}

#[test]
fn waits_that_leave_the_device_without_work() {
    let steps = |wait: bool| {
        let mut builder = Builder::new();
        for i in 0..10 {
            let at = i * 1_500_000;
            let kernel = if wait { (at + 10_000, at + 1_000_000) } else { (at + 10_000, at + 1_510_000) };
            builder.launch(GEMM, (at, at + 5_000), kernel);
            if wait {
                builder.call("cudaStreamSynchronize", at + 6_000, at + 1_005_000, 0);
            }
        }
        ids(&mut builder)
    };
    assert!(steps(true).contains(&"sync-per-step"));
    assert!(!steps(false).contains(&"sync-per-step"));
}

#[test]
fn copies() {
    let copies = |host_side: u8, kernel: i64| {
        let mut builder = Builder::new();
        for i in 0..10 {
            let at = i * 1_000_000;
            builder.launch(GEMM, (at, at + 5_000), (at + 10_000, at + 10_000 + kernel));
            builder.call("cudaMemcpyAsync", at + 600_000, at + 900_000, 900 + i);
            builder.copy([2, 2, host_side], 1 << 20, at + 650_000, at + 890_000, 900 + i);
        }
        ids(&mut builder)
    };
    assert!(copies(0, 500_000).contains(&"pageable-copies"));
    assert!(!copies(1, 500_000).contains(&"pageable-copies"));
    assert!(copies(1, 500_000).contains(&"copies-dominate"));
    assert!(!copies(1, 900_000).contains(&"copies-dominate"), "hidden by kernels");
}

/// Steps marked as the PyTorch profiler does, with the time of each and how much of it the device works.
fn steps(walls: &[i64], busy: f64) -> Vec<&'static str> {
    let mut builder = Builder::new();
    let mut at = 0;
    for (i, &wall) in walls.iter().enumerate() {
        builder.range(RangeSource::Annotation, &format!("ProfilerStep#{i}"), at, at + wall);
        let end = at + 1_000 + (wall as f64 * busy) as i64;
        builder.launch(GEMM, (at + 10, at + 500), (at + 1_000, end));
        at += wall;
    }
    ids(&mut builder)
}

#[test]
fn iterations() {
    assert!(steps(&[9_000_000, 1_000_000, 1_000_000, 1_000_000, 1_000_000], 0.9).contains(&"slow-start"));
    assert!(!steps(&[1_000_000; 5], 0.9).contains(&"slow-start"));
    assert!(steps(&[1_000_000; 5], 0.5).contains(&"between-iterations"));
    assert!(!steps(&[1_000_000; 5], 0.99).contains(&"between-iterations"));
}

#[test]
fn a_full_queue() {
    let mut builder = Builder::new();
    for i in 0..1_600 {
        builder.launch(GEMM, (i * 1_000, i * 1_000 + 500), (i * 50_000 + 600, i * 50_000 + 50_600));
    }
    assert!(ids(&mut builder).contains(&"queue-full"));
}

#[test]
fn communication() {
    let run = |exposed: bool| {
        let mut builder = saturated(GEMM, 100, 20_000);
        let start = if exposed { 2_020_000 } else { 1_000_000 };
        builder.op(OpKind::Kernel, NCCL, 9, start, start + 500_000, 0);
        ids(&mut builder)
    };
    assert!(run(true).contains(&"exposed-communication"));
    assert!(!run(false).contains(&"exposed-communication"));
}

#[test]
fn devices_of_unequal_load() {
    let run = |second: i64| {
        let mut builder = Builder::new();
        builder.trace.devices.push(Device { ordinal: 1, ..Device::default() });
        builder.kernel(GEMM, 0, 1_000_000, 0).kernel(GEMM, 0, second, 0).kernel(GEMM, 990_000, 1_000_000, 0);
        builder.trace.ops.device[1..].fill(1);
        ids(&mut builder)
    };
    assert!(run(400_000).contains(&"imbalance"));
    assert!(!run(980_000).contains(&"imbalance"));
}

#[test]
fn kernels_by_size_and_category() {
    let tiny = ids(&mut saturated(ELEMENTWISE, 300, 2_000));
    assert!(tiny.contains(&"tiny-kernels") && tiny.contains(&"elementwise-share"));
    let gemms = ids(&mut saturated(GEMM, 300, 20_000));
    assert_eq!(gemms, [] as [&str; 0]);
    assert!(ids(&mut saturated(ATTENTION, 300, 20_000)).contains(&"attention-share"));
    let chain = |middle: &'static str| {
        let mut builder = Builder::new();
        for i in 0..30 {
            let name = [GEMM, middle, GEMM][i % 3];
            builder.launch(name, (i as i64, i as i64 + 1), (i as i64 * 1_000 + 100, i as i64 * 1_000 + 1_100));
        }
        ids(&mut builder)
    };
    assert!(chain(SOFTMAX).contains(&"unfused-attention"));
    assert!(!chain(ATTENTION).contains(&"unfused-attention"));
}

/// GEMMs of `m` x 4096 x 4096, each taking `times` as long as an H200 needs at least.
fn gemms(m: u64, data_type: &str, kernel: &str, times: f64) -> Vec<&'static str> {
    let mut builder = Builder::new();
    let (dims, types) = (format!("[[{m}, 4096], [4096, 4096]]"), format!(r#"["{data_type}", "{data_type}"]"#));
    let (peak, size) = if data_type == "float" { (67e12, 4.0) } else { (989.4e12, 2.0) };
    let compute = 2.0 * m as f64 * 4096.0 * 4096.0 / peak;
    let memory = size * (4096.0 * 4096.0 + 2.0 * m as f64 * 4096.0) / 4.8e12;
    let ns = (compute.max(memory) * 1e9 * times) as i64;
    for i in 0..40 {
        builder.operator(RangeSource::CpuOp, "aten::mm", i * 100, i * 100 + 90, &dims, &types);
        builder.launch(kernel, (i * 100 + 10, i * 100 + 20), (5_000 + i * ns, 5_000 + (i + 1) * ns));
    }
    ids(&mut builder)
}

#[test]
fn gemms_against_the_roofline() {
    let rules = ["gemm-below-roofline", "few-rows", "fp32-gemm"];
    let bf16 = "c10::BFloat16";
    assert_eq!(gemms(8192, bf16, GEMM, 1.2), [] as [&str; 0]);
    assert!(gemms(8192, bf16, GEMM, 3.0).contains(&rules[0]));
    assert!(!gemms(8192, bf16, GEMM, 3.0).contains(&rules[1]));
    assert!(gemms(8, bf16, GEMM, 1.2).contains(&rules[1]));
    assert!(
        !gemms(8, bf16, GEMM, 14.0).contains(&rules[1]),
        "at 7 % of what memory allows, memory is not what holds it"
    );
    assert!(gemms(8192, "float", "sm80_xmma_gemm_f32f32_f32f32", 1.2).contains(&rules[2]));
    assert!(!gemms(8192, "float", "sm80_xmma_gemm_f32f32_tf32f32", 1.2).contains(&rules[2]));
    assert!(!gemms(8192, "float", "sm80_xmma_gemm_f32f32_f32f32", 3.0).contains(&rules[2]));
}

/// Times of the host that grew because its threads had no CPU are no reason for advice.
#[test]
fn threads_that_waited_for_a_cpu() {
    let steps = |cpu_wait: Option<i64>| {
        let mut builder = steady(GEMM, 10, 2_000_000, 5_000, 2_000);
        for step in 0..10 {
            builder.trace.iterations.push(Iteration {
                iter: step as u64,
                start: step * 2_000_000,
                end: (step + 1) * 2_000_000,
                context_requests: 0,
                generation_requests: 1,
                context_tokens: 0,
                generation_tokens: 1,
                window: 0,
                cpu_wait,
            });
        }
        builder.trace.ops.iteration.iter_mut().enumerate().for_each(|(op, iteration)| *iteration = op as u32);
        ids(&mut builder)
    };
    for quiet in [steps(None), steps(Some(0)), steps(Some(10_000))] {
        assert!(quiet.contains(&"unexplained-idle") && !quiet.contains(&"waited-for-cpu"), "{quiet:?}");
    }
    let noisy = steps(Some(1_000_000));
    assert!(noisy.contains(&"waited-for-cpu"), "{noisy:?}");
    assert!(!noisy.contains(&"unexplained-idle") && !noisy.contains(&"between-iterations"), "{noisy:?}");
}

#[test]
fn recordings() {
    let mut graphs = Builder::new();
    for i in 0..10 {
        graphs.call("cudaGraphLaunch", i * 1_000_000, i * 1_000_000 + 9_000, i + 1);
        graphs.op(OpKind::Graph, "[CUDA graph]", 7, i * 1_000_000 + 10_000, (i + 1) * 1_000_000, i + 1);
    }
    assert!(ids(&mut graphs).contains(&"graph-rows-hide-kernels"));

    let nodes = |mode: Option<GraphMode>| {
        let mut builder = Builder::new();
        builder.trace.meta.graph_mode = mode;
        builder.call("cudaGraphLaunch", 0, 100, 1);
        builder.kernel(GEMM, 200, 1_000, 1).kernel(GEMM, 1_000, 2_000, 1);
        builder.trace.ops.graph_node.fill(5);
        ids(&mut builder)
    };
    assert!(nodes(Some(GraphMode::Node)).contains(&"node-trace-inflates"));
    assert!(!nodes(None).contains(&"node-trace-inflates"));

    let mut overhead = saturated(GEMM, 10, 20_000);
    assert!(!ids(&mut overhead).contains(&"profiler-overhead"));
    overhead.call("Buffer Flush", 50_000, 150_000, 0);
    let kinds = &mut overhead.trace.calls.kind;
    *kinds.last_mut().unwrap() = CallKind::Profiler;
    assert!(ids(&mut overhead).contains(&"profiler-overhead"));

    let clock = |mhz: f64| {
        let mut builder = saturated(GEMM, 10, 20_000);
        builder.trace.devices[0].clock_hz = Some(1.98e9);
        let (name, times) = ("GPC Clock Frequency [MHz]".to_owned(), vec![50_000, 100_000, 150_000]);
        builder.trace.counters.push(Counter { name, device: Some(0), times, values: vec![mhz * 1e6; 3] });
        ids(&mut builder)
    };
    assert!(clock(1_200.0).contains(&"low-clock"));
    assert!(!clock(1_950.0).contains(&"low-clock"));
}

#[test]
fn an_engine_on_the_cpu_gets_no_advice_about_gpus() {
    let mut builder = Builder::new();
    builder.trace.devices[0].is_cpu = true;
    for i in 0..100 {
        builder.op(OpKind::CpuOp, "gemv", 0, i * 1_000_000, i * 1_000_000 + 100_000, 0);
    }
    assert_eq!(ids(&mut builder), [] as [&str; 0]);
    assert!(report(&context(&Trace::default())).not_applicable.is_some());
}

/// Which rules speak on which real trace, and why that is right.
#[test]
fn real_traces() {
    let Some(data) = real_data() else { return };
    let expected: BTreeMap<&str, &[&str]> = BTreeMap::from([
        // Eager decode: 97.8 % idle, 924 launches a step; of iteration 1 500 ms passed between two calls. Elementwise kernels
        // are 43 % of the op time, but 1 % of the span.
        ("rep_sdpa.sqlite", &["unexplained-idle", "slow-start", "launch-bound", "long-calls"][..]),
        // Eager prefill of 10 ms, then replays recorded as single rows.
        ("gpum.sqlite", &["launch-bound", "graph-rows-hide-kernels"]),
        // The same with every node traced; tokens are read back into pageable memory after each step.
        (
            "node.sqlite",
            &[
                "launch-bound",
                "sync-per-step",
                "tiny-kernels",
                "elementwise-share",
                "pageable-copies",
                "node-trace-inflates",
            ],
        ),
        ("kineto_graph.json.gz", &["tiny-kernels", "sync-per-step", "elementwise-share", "pageable-copies"]),
        // 940 of 970 ms per GPU are copies from the host.
        ("h100_2gpu_1s.sqlite", &["copies-dominate", "profiler-overhead"]),
        // Idle grows from 63 to 110 ms between the two; NCCL is never hidden.
        ("mfu_2gpu_before.sqlite", &["elementwise-share", "exposed-communication", "attention-share"]),
        (
            "mfu_2gpu_after.sqlite",
            &["elementwise-share", "launch-bound", "exposed-communication", "profiler-overhead", "attention-share"],
        ),
        // Training on an A100; most GEMMs of fp32 inputs run as tf32 already.
        (
            "trace_diff_control.json.gz",
            &["exposed-communication", "elementwise-share", "launch-bound", "gemm-below-roofline"],
        ),
        ("trace_diff_test.json.gz", &["copies-dominate", "exposed-communication", "pageable-copies"]),
        // Saturated: 472 of 480 ms are ops, and the host runs a thousand launches ahead.
        ("ns_resolution_rank-0.json.gz", &["queue-full"]),
        // Events were sampled: most launches are missing, and much idle time has no cause.
        ("sampled_rank-0.json.gz", &["exposed-communication", "unexplained-idle", "host-work"]),
        ("sampled_rank-1.json.gz", &["exposed-communication", "unexplained-idle", "host-work"]),
        // A model without fused norms and rope: more than half of the time is elementwise.
        ("Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", &["elementwise-share"]),
        // The first ops stand long before the rest; GEMMs run at 35 % of the peak of an MI300X.
        ("sglang_Qwen3-8B_prefilldecode.json.gz", &["gemm-below-roofline", "late-start"]),
        ("sglang_Qwen3-8B_decode.json.gz", &["late-start"]),
        ("graph_execution.json.gz", &["late-start"]),
        ("bs_32_rank0.json.gz", &[]),
        ("graph_capture_rank_0.1773709742341309550.pt.trace.json.gz", &["long-calls"]),
    ]);
    let mut wrong = Vec::new();
    for file in all_traces(&data) {
        let trace = read(std::slice::from_ref(&file));
        let name = file.file_name().unwrap().to_string_lossy();
        check(&trace, &name);
        let found: Vec<_> = findings(&context(&trace)).into_iter().map(|f| f.id).collect();
        if let Some(expected) = expected.get(&*name).filter(|expected| found != **expected) {
            wrong.push(format!("{name}: {found:?}, expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
