//! Which ops take the time, and how near they come to the hardware's limit.

mod synthetic;

use proptest::prelude::*;
use strobe_analyze::roofline::Bound;
use strobe_analyze::top_ops::{top_ops, top_ops_by_kind};
use strobe_trace::{Iteration, IterationKind, OpKind, Peaks, Trace, Work};
use synthetic::{Builder, context};

/// Adds an op of a CPU engine: name and category, iteration, span, FLOPs and bytes.
fn op(builder: &mut Builder, name: &str, iteration: u32, span: (i64, i64), flops: u64, bytes: u64) {
    builder.op(OpKind::CpuOp, "scalar", 0, span.0, span.1, 0);
    let (op, category) = (builder.name(name), builder.name(if name == "norm" { "norm" } else { "gemm" }));
    let trace = &mut builder.trace;
    trace.works.push(Work { op, category, layer: None, shape: [0; 3], bytes, flops });
    let last = trace.ops.len() - 1;
    trace.ops.work[last] = trace.works.len() as u32 - 1;
    trace.ops.iteration[last] = iteration;
}

fn iteration(trace: &mut Trace, iter: u64, requests: (u32, u32), start: i64, end: i64) {
    trace.iterations.push(Iteration {
        iter,
        start,
        end,
        context_requests: requests.0,
        generation_requests: requests.1,
        context_tokens: 0,
        generation_tokens: 0,
        window: 0,
        cpu_wait: None,
    });
}

#[test]
fn ops_are_summed_and_set_against_the_roofline() {
    let mut builder = Builder::new();
    builder.trace.devices[0].is_cpu = true;
    iteration(&mut builder.trace, 0, (1, 0), 0, 2_000);
    iteration(&mut builder.trace, 1, (0, 1), 2_000, 4_000);
    op(&mut builder, "qkv_proj", 0, (0, 1_000), 80_000, 1_000); // 800 ns of arithmetic at best
    op(&mut builder, "qkv_proj", 1, (2_000, 2_500), 100, 4_000); // 400 ns of memory at best
    op(&mut builder, "norm", 1, (2_500, 2_600), 0, 0);
    let mut trace = builder.build();
    assert!(top_ops(&context(&trace)).iter().all(|row| row.roofline.is_none()));

    trace.meta.peaks = Some(Peaks {
        flops_per_s: 1e11,
        int8_ops_per_s: None,
        bf16_flops_per_s: None,
        bytes_per_s: 1e10,
        note: String::new(),
    });
    let rows = top_ops(&context(&trace));
    let [qkv, norm] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((&*qkv.name, &*qkv.category, &*qkv.kernel), ("qkv_proj", "gemm", "scalar"));
    assert_eq!((qkv.calls, qkv.total_ns, qkv.median_ns), (2, 1_500, 750.0));
    assert_eq!((qkv.share_of_op_time, qkv.share_of_wall), (Some(1500.0 / 1600.0), Some(0.375)));
    assert_eq!((qkv.flops, qkv.bytes), (80_100, 5_000));
    let roofline = qkv.roofline.unwrap();
    assert!((roofline.share - 0.8).abs() < 1e-12, "{roofline:?}");
    assert_eq!(roofline.bound, Bound::Compute);
    // What was not recorded is absent, not zero.
    assert_eq!((norm.flops_per_s, norm.bytes_per_s, norm.roofline), (None, None, None));

    let decode = top_ops_by_kind(&context(&trace), IterationKind::Decode);
    assert_eq!((decode[0].total_ns, decode[0].share_of_wall), (500, Some(0.25)));
    assert_eq!(decode[0].roofline.unwrap().bound, Bound::Memory);
    assert!(top_ops_by_kind(&context(&trace), IterationKind::Mixed).is_empty());

    trace.meta.peaks = Some(Peaks {
        flops_per_s: f64::NAN,
        int8_ops_per_s: None,
        bf16_flops_per_s: None,
        bytes_per_s: 0.0,
        note: String::new(),
    });
    assert!(top_ops(&context(&trace)).iter().all(|row| row.roofline.is_none()));
}

proptest! {
    #[test]
    fn shares_of_op_time_add_up(spans in prop::collection::vec((0i64..1_000, 0i64..50, 0u8..4), 0..40)) {
        let mut builder = Builder::new();
        for (start, length, name) in &spans {
            builder.kernel(&format!("kernel {name}"), *start, start + length, 0);
        }
        let trace = builder.build();
        let rows = top_ops(&context(&trace));
        prop_assert_eq!(rows.iter().map(|r| r.calls).sum::<u64>(), trace.ops.len() as u64);
        prop_assert!(rows.windows(2).all(|w| w[0].total_ns >= w[1].total_ns));
        let shares: Option<Vec<f64>> = rows.iter().map(|r| r.share_of_op_time).collect();
        if let Some(shares) = shares.filter(|s| !s.is_empty()) {
            prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }
}
