//! scratch
use half::bf16;
use std::time::Instant;
use strobe_kernels_cpu::*;
fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |x| x.parse().unwrap());
    let rows: Vec<usize> = std::env::args()
        .nth(2)
        .map_or(vec![1, 4, 12, 24, 36, 128, 512], |x| x.split(',').map(|x| x.parse().unwrap()).collect());
    let mut a = Cpu::new(Tier::Avx512Vnni, threads);
    let mut b = Cpu::new(Tier::Avx512Bf16, threads);
    println!(
        "peak fma {:.1} pairs {:.1}",
        measure::peak_flops_f32(&mut a) / 1e9,
        measure::peak_flops_bf16(&mut b).unwrap() / 1e9
    );
    for (k, n) in [(2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048)] {
        let copies = (128usize << 20).div_ceil(n * k * 2);
        let len = packed_len(n, k);
        let mut w = AlignedBuf::<bf16>::zeroed(copies * len);
        for (i, b) in w.iter_mut().enumerate() {
            *b = bf16::from_f32(((i * 2_654_435_761) >> 8 & 0xff) as f32 / 256.0 - 0.5);
        }
        for &m in &rows {
            let x: Vec<f32> = (0..m * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
            let mut out = AlignedBuf::<f32>::zeroed(m * n);
            let mut times = [vec![], vec![]];
            let mut run = 0;
            let start = Instant::now();
            while run < 5 || start.elapsed().as_secs_f64() < 0.6 {
                for (cpu, times) in [&mut a, &mut b].into_iter().zip(&mut times) {
                    let c = run % copies;
                    let m_ = Matrix { data: Elems::Bf16(&w[c * len..(c + 1) * len]), n, k, layout: Layout::Packed };
                    let t = Instant::now();
                    cpu.linear(&x, m, m_, None, &mut out);
                    times.push(t.elapsed().as_secs_f64());
                    run += 1;
                }
            }
            let med = times.map(|mut t| {
                t.sort_by(f64::total_cmp);
                (t[0], t[t.len() / 2])
            });
            let f = 2.0 * (m * n * k) as f64 / 1e9;
            let by = (n * k * 2) as f64 / 1e9;
            println!(
                "k {k} n {n} m {m}: fma {:.0} (best {:.0}) pairs {:.0} (best {:.0}) GFLOP/s; GB/s {:.1} ({:.1}) -> {:.1} ({:.1}); ratio {:.2}",
                f / med[0].1,
                f / med[0].0,
                f / med[1].1,
                f / med[1].0,
                by / med[0].1,
                by / med[0].0,
                by / med[1].1,
                by / med[1].0,
                med[0].1 / med[1].1
            );
        }
    }
}
