//! After `reserve`, no op allocates.

mod common;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{KINDS, Rng, Weight};
use strobe_kernels_cpu::{
    Activation, AttnBatch, Cpu, Elems, ExpertPairs, KvGeometry, KvLayer, KvType, Layout, Matrix, PANEL, QkvShape,
    QuantKind, QuantRows, RopeTable, SeqSpan, Tier, packed_bytes,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Memory) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let (rows, n, k) = (70, 100, 300);
    let shape = QkvShape { heads: 4, kv_heads: 2, head_dim: 64 };
    let mut rng = Rng(1);
    let x = rng.floats(rows * k);
    let values = rng.floats(n * k);
    let weights: Vec<Weight> = KINDS.map(|kind| Weight::new(&values, n, k, kind, Layout::Packed)).into();
    let quantized = [QuantKind::Int8, QuantKind::Int4].map(|kind| {
        let mut bytes = vec![0; packed_bytes(kind, n, k)];
        let fill = |row: usize, out: &mut [f32]| out.copy_from_slice(&values[row * k..(row + 1) * k]);
        Cpu::new(Tier::detect(), 1).quantize(kind, fill, n, k, &mut bytes);
        bytes
    });
    // Two panels, one of gates and one of ups.
    let gated: Vec<Weight> =
        KINDS.map(|kind| Weight::new(&values[..2 * PANEL * k], 2 * PANEL, k, kind, Layout::Packed)).into();
    let activates = Tier::detect().activated_multiple().is_some();
    let mut activated_rows = QuantRows::new();
    activated_rows.reserve(rows, PANEL);
    let mut pairs = ExpertPairs::new(4, 2, rows);
    let mut quant_rows = QuantRows::new();
    quant_rows.reserve(rows, k);
    let mut out = vec![0.0; rows * n];
    let mut qkv = rng.floats(rows * shape.row());
    let geometry = KvGeometry { kv_heads: 2, head_dim: 64, tokens_per_block: 16, blocks: 5, kind: KvType::Bf16 };
    let mut data = strobe_kernels_cpu::AlignedBuf::zeroed(geometry.bytes_per_layer());
    let mut kv = KvLayer { geometry, data: &mut data };
    let seqs = [SeqSpan { q_start: 0, q_len: rows as u32, kv_len: rows as u32, table_start: 0 }];
    let batch = AttnBatch { seqs: &seqs, block_tables: &[4, 2, 0, 1, 3] };
    let rope = RopeTable { half: 32, cos: vec![1.0; rows * 32], sin: vec![0.0; rows * 32] };
    let mut attended = vec![0.0; rows * shape.q_row()];
    let mut scores = vec![0.0; shape.heads * rows * rows];
    let mut tokens = vec![0; rows];

    let mut cpu = Cpu::new(Tier::detect(), 2);
    cpu.reserve(rows, k);
    cpu.reserve_activated(rows, PANEL);
    cpu.parallel_for(8, &|_| std::thread::sleep(std::time::Duration::from_millis(1)));
    let mut step = || {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for weight in &weights {
            for m in [1, 2, 16, rows] {
                cpu.linear(&x[..m * k], m, weight.matrix(), None, &mut out[..m * n]);
            }
        }
        for m in [1, 2, 16, rows] {
            cpu.rms_norm_quantized(&x[..m * k], &values[..k], 1e-5, &mut quant_rows);
            for data in [Elems::Int8(&quantized[0]), Elems::Int4(&quantized[1])] {
                let weight = Matrix { data, n, k, layout: Layout::Packed };
                cpu.linear_quantized(&quant_rows, weight, None, &mut out[..m * n]);
            }
            if activates {
                for weight in &gated {
                    let out = &mut out[..m * PANEL];
                    cpu.linear_activated(&x[..m * k], m, weight.matrix(), None, Activation::Silu, out);
                }
                for (kind, bytes) in [QuantKind::Int8, QuantKind::Int4].into_iter().zip(&quantized) {
                    let bytes = &bytes[..packed_bytes(kind, 2 * PANEL, k)];
                    let data = if kind == QuantKind::Int8 { Elems::Int8(bytes) } else { Elems::Int4(bytes) };
                    let weight = Matrix { data, n: 2 * PANEL, k, layout: Layout::Packed };
                    cpu.linear_activated_quantized(&quant_rows, weight, None, Activation::Silu, &mut activated_rows);
                }
            }
        }
        cpu.route(&mut pairs, rows / 2, |token, experts, weights| {
            (experts[0], experts[1]) = (token as u32 % 2, 2);
            weights.fill(0.5);
        });
        // A panel of the weight for each expert.
        for weight in &weights {
            cpu.expert_linear(&x, &pairs, Matrix { n: PANEL, ..weight.matrix() }, None, &mut out[..rows * PANEL]);
        }
        cpu.rope_kv_write(&mut qkv, shape, &rope, &batch, &mut kv);
        cpu.attention(&qkv, shape, &batch, &kv, None, &mut attended);
        cpu.attn_scores(&qkv, shape, &batch, &kv, None, &[0], &mut scores);
        cpu.attn_softmax(shape, &batch, None, &[0], &mut scores);
        cpu.attn_values(shape, &batch, &kv, &[0], &scores, &mut attended);
        cpu.argmax_rows(&out, n, &mut tokens);
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    // The test harness has threads of its own, which may allocate now and then; a step that allocates does so always.
    assert_eq!([step(), step(), step()].into_iter().min(), Some(0));

    // The first token of a new device after a long context, of which each worker takes a part.
    let positions = 3000;
    let seqs = [SeqSpan { q_start: 0, q_len: 1, kv_len: positions, table_start: 0 }];
    let block_tables: Vec<u32> = (0..positions.div_ceil(16)).map(|i| i % 5).collect();
    let batch = AttnBatch { seqs: &seqs, block_tables: &block_tables };
    let mut first_token = || {
        let mut cpu = Cpu::new(Tier::detect(), 2);
        cpu.reserve_attention(shape, positions as usize);
        cpu.parallel_for(8, &|_| std::thread::sleep(std::time::Duration::from_millis(1)));
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        cpu.attention(&qkv, shape, &batch, &kv, None, &mut attended);
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    assert_eq!([first_token(), first_token(), first_token()].into_iter().min(), Some(0));
}
