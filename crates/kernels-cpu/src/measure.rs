//! What this machine can do, measured with the same workers and tier that run the ops: the denominators of every
//! roofline share.

use std::time::{Duration, Instant};

use half::bf16;

use crate::buffer::AlignedBuf;
use crate::cpu::{Cpu, SharedMut};
use crate::simd::{IntKernel, Kernel, PairKernel, Simd, SimdInt, SimdPairs};
use crate::simd::{dispatch, dispatch_int, dispatch_pairs};
use crate::tier::Tier;

/// How long a measurement repeats itself that is made once and remembered.
pub const THOROUGH: Duration = Duration::from_millis(350);
/// How long one repeats itself that stands beside a run: short enough that both sides of a run of seconds have some, and
/// still dozens of passes of arithmetic and at least three of memory.
pub const BRIEF: Duration = Duration::from_millis(50);
/// Independent chains: enough to hide the latency of two units, few enough for 16 registers.
const CHAINS: usize = 12;
/// Multiply-adds per chain and task: about a millisecond.
const LINKS: usize = 250_000;
/// Bytes that one pass over memory reads at least, and at most.
const STREAM_BYTES: std::ops::RangeInclusive<usize> = 512 << 20..=2 << 30;
/// A pass is this many times as large as the last cache, so that hardly any of it is still there in the next pass.
const TIMES_THE_CACHE: usize = 4;
/// Shares of a pass that workers claim.
const STREAM_TASKS: usize = 64;

/// f32 operations per second (a multiply-add counts two) of chains that never leave the registers, on all workers; the
/// best of many rounds.
pub fn peak_flops_f32(cpu: &mut Cpu, budget: Duration) -> f64 {
    let (tier, threads) = (cpu.tier(), cpu.threads());
    let mut sinks = vec![0.0f32; threads];
    let flops = (2 * CHAINS * LINKS * lanes(tier) * threads) as f64;
    let sinks = SharedMut::new(&mut sinks);
    let seconds = best_of(budget, || {
        cpu.pool.run(threads, &|task, _| {
            // SAFETY: each task has its own sink.
            let sink = unsafe { &mut sinks.slice(task, 1)[0] };
            // SAFETY: only registers and the sink are touched.
            unsafe { dispatch(tier, FmaChains { sink }) };
        });
    });
    flops / seconds
}

/// 8-bit operations per second (a multiply-add counts two) of dot products that stay in the registers, on all
/// workers; the best of many rounds. Without VNNI they take several instructions each.
pub fn peak_ops_int8(cpu: &mut Cpu, budget: Duration) -> f64 {
    let (tier, threads) = (cpu.tier(), cpu.threads());
    let mut sinks = vec![[0i32; 16]; threads];
    let ops = (2 * 4 * CHAINS * LINKS * lanes(tier) * threads) as f64;
    let sinks = SharedMut::new(&mut sinks);
    let seconds = best_of(budget, || {
        cpu.pool.run(threads, &|task, _| {
            // SAFETY: each task has its own sink.
            let sink = unsafe { &mut sinks.slice(task, 1)[0] };
            // SAFETY: only registers and the sink are touched.
            unsafe { dispatch_int(tier, DotChains { sink }) };
        });
    });
    ops / seconds
}

/// Operations per second (a multiply-add counts two) of products of bfloat16 pairs that stay in the registers, on all
/// workers; the best of many rounds. `None` on tiers that have none.
pub fn peak_flops_bf16(cpu: &mut Cpu, budget: Duration) -> Option<f64> {
    let (tier, threads) = (cpu.tier(), cpu.threads());
    if !tier.multiplies_pairs() {
        return None;
    }
    let mut sinks = vec![0.0f32; threads];
    let flops = (2 * 2 * CHAINS * LINKS * lanes(tier) * threads) as f64;
    let sinks = SharedMut::new(&mut sinks);
    let seconds = best_of(budget, || {
        cpu.pool.run(threads, &|task, _| {
            // SAFETY: each task has its own sink.
            let sink = unsafe { &mut sinks.slice(task, 1)[0] };
            // SAFETY: only registers and the sink are touched.
            unsafe { dispatch_pairs(tier, PairChains { sink }) };
        });
    });
    Some(flops / seconds)
}

fn lanes(tier: Tier) -> usize {
    match tier {
        Tier::Scalar => 1,
        Tier::Avx2 => 8,
        Tier::Avx512 | Tier::Avx512Vnni | Tier::Avx512Bf16 => 16,
    }
}

/// Bytes per second that all workers together read from memory; the best of several passes.
pub fn read_bandwidth(cpu: &mut Cpu, budget: Duration) -> f64 {
    let source = touched(cpu, stream_bytes() / size_of::<f32>());
    let tier = cpu.tier();
    let part = source.len() / STREAM_TASKS;
    let mut sums = vec![0.0f32; STREAM_TASKS];
    let sums = SharedMut::new(&mut sums);
    let seconds = best_of(budget, || {
        cpu.pool.run(STREAM_TASKS, &|task, _| {
            // SAFETY: each task has its own sum.
            let sum = unsafe { &mut sums.slice(task, 1)[0] };
            // SAFETY: plain slices.
            unsafe { dispatch(tier, Sum { source: &source[task * part..(task + 1) * part], sum }) };
        });
    });
    (part * STREAM_TASKS * size_of::<f32>()) as f64 / seconds
}

/// Bytes per second that all workers together copy, counting a byte read and written as two; the best of several passes.
pub fn copy_bandwidth(cpu: &mut Cpu, budget: Duration) -> f64 {
    let source = touched(cpu, stream_bytes() / 2 / size_of::<f32>());
    let mut target = touched(cpu, source.len());
    let part = source.len() / STREAM_TASKS;
    let target = SharedMut::new(&mut target);
    let seconds = best_of(budget, || {
        cpu.pool.run(STREAM_TASKS, &|task, _| {
            // SAFETY: the parts are disjoint.
            let target = unsafe { target.slice(task * part, part) };
            target.copy_from_slice(&source[task * part..(task + 1) * part]);
        });
    });
    (2 * part * STREAM_TASKS * size_of::<f32>()) as f64 / seconds
}

/// Bytes of one pass on this machine: server processors have last caches of hundreds of megabytes.
fn stream_bytes() -> usize {
    let sizes = (0..8).filter_map(|index| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        cache_bytes(std::fs::read_to_string(path).ok()?.trim())
    });
    let last = sizes.max().unwrap_or(0);
    let wanted = last.saturating_mul(TIMES_THE_CACHE).clamp(*STREAM_BYTES.start(), *STREAM_BYTES.end());
    wanted.next_multiple_of(STREAM_TASKS << 20)
}

/// The size of a cache as Linux writes it, such as `32768K`.
fn cache_bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

/// Memory that is really there: a page never written is one shared page of zeroes.
fn touched(cpu: &mut Cpu, len: usize) -> AlignedBuf<f32> {
    let mut buffer = AlignedBuf::zeroed(len);
    let part = len / STREAM_TASKS;
    let shared = SharedMut::new(&mut buffer);
    cpu.pool.run(STREAM_TASKS, &|task, _| {
        // SAFETY: the parts are disjoint.
        unsafe { shared.slice(task * part, part) }.fill(1.0);
    });
    buffer
}

/// The shortest run, in seconds, of at least three within the budget.
fn best_of(budget: Duration, mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || start.elapsed() < budget {
        let before = Instant::now();
        run();
        best = best.min(before.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

struct FmaChains<'a> {
    sink: &'a mut f32,
}

impl Kernel for FmaChains<'_> {
    fn scalar(self) {
        let (a, b) = (std::hint::black_box(0.999f32), std::hint::black_box(1e-3f32));
        let mut acc = [1.0f32; CHAINS];
        for _ in 0..LINKS {
            for x in &mut acc {
                *x = *x * a + b;
            }
        }
        *self.sink = acc.iter().sum();
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        // SAFETY: registers only.
        unsafe {
            let (a, b) = (S::splat(std::hint::black_box(0.999)), S::splat(std::hint::black_box(1e-3)));
            let mut acc = [S::splat(1.0); CHAINS];
            for _ in 0..LINKS {
                for x in &mut acc {
                    *x = S::fma(*x, a, b);
                }
            }
            let mut total = S::zero();
            for x in acc {
                total = S::add(total, x);
            }
            *self.sink = S::sum(total);
        }
    }
}

struct DotChains<'a> {
    /// As wide as a vector.
    sink: &'a mut [i32; 16],
}

impl IntKernel for DotChains<'_> {
    fn scalar(self) {
        let (weights, x) = (std::hint::black_box([3i8; 4]), std::hint::black_box([5i8; 4]));
        let mut sums = [0i32; CHAINS];
        for _ in 0..LINKS {
            for sum in &mut sums {
                for i in 0..4 {
                    *sum = sum.wrapping_add(i32::from(weights[i]) * i32::from(x[i]));
                }
            }
        }
        self.sink[0] = sums.iter().fold(0, |total, sum| total.wrapping_add(*sum));
    }

    #[inline(always)]
    unsafe fn simd<S: SimdInt>(self) {
        // SAFETY: registers only, and the sink holds a vector.
        unsafe {
            // Two weights and changing rows, as in a tile: else a product would be computed once and only added.
            let weights =
                [0x0102_0304, 0x0203_0405].map(|codes| S::int8_weights(S::splat(std::hint::black_box(codes))));
            let rows = [0x0101_0101i32; CHAINS / 2];
            let mut sums = [S::splat(0); CHAINS];
            for _ in 0..LINKS {
                for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(2)) {
                    let x = S::splat(std::ptr::read_volatile(row));
                    sums[0] = S::int8_dot(sums[0], weights[0], x);
                    sums[1] = S::int8_dot(sums[1], weights[1], x);
                }
            }
            for sum in sums {
                S::store(self.sink.as_mut_ptr().cast(), std::hint::black_box(sum));
            }
        }
    }
}

struct PairChains<'a> {
    sink: &'a mut f32,
}

impl PairKernel for PairChains<'_> {
    #[inline(always)]
    unsafe fn simd<S: SimdPairs>(self) {
        // SAFETY: registers only.
        unsafe {
            let [weights, x] = [1.0, 0.001].map(|value| std::hint::black_box([bf16::from_f32(value); 2]));
            let (weights, x) = (S::splat_pair(weights.as_ptr()), S::splat_pair(x.as_ptr()));
            let mut sums = [S::F::zero(); CHAINS];
            for _ in 0..LINKS {
                for sum in &mut sums {
                    *sum = S::dot(*sum, weights, x);
                }
            }
            let mut total = S::F::zero();
            for sum in sums {
                total = S::F::add(total, sum);
            }
            *self.sink = S::F::sum(total);
        }
    }
}

struct Sum<'a> {
    source: &'a [f32],
    sum: &'a mut f32,
}

/// Streams that are read side by side: more memory requests in flight than one stream gives.
const STREAMS: usize = 4;
/// How far ahead of the loads memory is asked for, in elements.
const PREFETCH: usize = 256;

impl Kernel for Sum<'_> {
    fn scalar(self) {
        let mut acc = [0.0f32; 16];
        for chunk in self.source.chunks_exact(16) {
            for (sum, x) in acc.iter_mut().zip(chunk) {
                *sum += x;
            }
        }
        *self.sum = acc.iter().sum();
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let stream = self.source.len() / STREAMS;
        // SAFETY: a stream of a share is a multiple of 32 elements long; a prefetch may point anywhere.
        unsafe {
            let mut acc = [[S::zero(); 4]; STREAMS];
            for i in (0..stream).step_by(32) {
                for s in 0..STREAMS {
                    let p = self.source.as_ptr().add(s * stream + i);
                    S::prefetch(p.wrapping_add(PREFETCH));
                    S::prefetch(p.wrapping_add(PREFETCH + 16));
                    for v in 0..32 / S::LANES {
                        acc[s][v] = S::add(acc[s][v], S::load(p.add(v * S::LANES)));
                    }
                }
            }
            let mut total = S::zero();
            for x in acc.into_iter().flatten() {
                total = S::add(total, x);
            }
            *self.sum = S::sum(total);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn cache_sizes_are_read() {
        assert_eq!(super::cache_bytes("32768K"), Some(32 << 20));
        assert_eq!(super::cache_bytes("2M"), Some(2 << 20));
        assert_eq!(super::cache_bytes("512"), Some(512));
        assert_eq!(super::cache_bytes("big"), None);
        assert!(super::stream_bytes() >= 512 << 20);
    }
}
