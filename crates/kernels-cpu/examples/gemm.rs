//! Prints how close `linear` comes to what this machine can do: GFLOP/s against the measured FMA peak for prompts, GB/s
//! against the measured read bandwidth for decoding. Peaks are measured right beside the products they are compared
//! with, since other programs may share the machine.
//!
//! Usage: `cargo run --release -p strobe-kernels-cpu --example gemm [-- THREADS]`; `STROBE_CPU` chooses the tier.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use strobe_kernels_cpu::{AlignedBuf, Cpu, Elems, Layout, Matrix, Tier, measure, packed_len};

/// (k, n) of TinyLlama's products: qkv, attention output, gate and up, down, vocabulary.
const SHAPES: [(usize, usize); 5] = [(2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048), (2048, 32000)];
/// Well above any cache, for the smallest of the element types.
const FRESH_BYTES: usize = 256 << 20;
const ROWS: [usize; 9] = [1, 2, 4, 8, 16, 24, 32, 64, 512];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = match std::env::args().nth(1) {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?.get(),
    };
    let mut cpu = Cpu::new(Tier::from_env()?, threads);
    println!("tier {}, {} threads", cpu.tier().name(), cpu.threads());
    println!(
        "{:>5} {:>6} {:>5} {:>5} {:>10} {:>9} {:>8} {:>8} {:>7}",
        "dtype", "k", "n", "m", "ms", "GFLOP/s", "of peak", "GB/s", "of read"
    );
    for (k, n) in SHAPES {
        // So many copies that decoding finds none of them in a cache, as in a model of many layers.
        let copies = FRESH_BYTES.div_ceil(n * k * 2);
        let mut weights = AlignedBuf::<f32>::zeroed(copies * packed_len(n, k));
        let mut bf16s = AlignedBuf::<bf16>::zeroed(weights.len());
        let mut f16s = AlignedBuf::<f16>::zeroed(weights.len());
        for (i, ((w, b), h)) in weights.iter_mut().zip(bf16s.iter_mut()).zip(f16s.iter_mut()).enumerate() {
            *w = ((i * 2_654_435_761) >> 8 & 0xff) as f32 / 256.0 - 0.5;
            *b = bf16::from_f32(*w);
            *h = f16::from_f32(*w);
        }
        let (peak, read) = (
            measure::peak_flops_f32(&mut cpu, measure::THOROUGH),
            measure::read_bandwidth(&mut cpu, measure::THOROUGH),
        );
        println!("peak {:.1} GFLOP/s, read {:.1} GB/s", peak / 1e9, read / 1e9);
        let len = packed_len(n, k);
        for (name, bytes) in [("f32", 4), ("bf16", 2), ("f16", 2)] {
            let copy = |i: usize| {
                let part = i % copies * len..(i % copies + 1) * len;
                let data = match name {
                    "f32" => Elems::F32(&weights[part]),
                    "bf16" => Elems::Bf16(&bf16s[part]),
                    _ => Elems::F16(&f16s[part]),
                };
                Matrix { data, n, k, layout: Layout::Packed }
            };
            for m in ROWS {
                let seconds = time_linear(&mut cpu, m, &copy);
                let flops = 2.0 * (m * n * k) as f64 / seconds;
                let traffic = (n * k * bytes) as f64 / seconds;
                println!(
                    "{name:>5} {k:>6} {n:>5} {m:>5} {:>10.3} {:>9.1} {:>7.1}% {:>8.1} {:>6.1}%",
                    seconds * 1e3,
                    flops / 1e9,
                    100.0 * flops / peak,
                    traffic / 1e9,
                    100.0 * traffic / read,
                );
            }
        }
    }
    Ok(())
}

/// The shortest of the runs that fit into a fifth of a second, after one to warm up; at least three. Run `i` uses the
/// weight `copy(i)`.
fn time_linear<'a>(cpu: &mut Cpu, m: usize, copy: &dyn Fn(usize) -> Matrix<'a>) -> f64 {
    let Matrix { n, k, .. } = copy(0);
    let x: Vec<f32> = (0..m * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let mut out = AlignedBuf::<f32>::zeroed(m * n);
    cpu.linear(&x, m, copy(0), None, &mut out);
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || start.elapsed() < Duration::from_millis(200) {
        let before = Instant::now();
        cpu.linear(&x, m, copy(runs + 1), None, &mut out);
        best = best.min(before.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
