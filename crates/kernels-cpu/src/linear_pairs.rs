//! `linear` over bfloat16 weights on CPUs that multiply pairs of bfloat16: tasks, register tiles and cache blocks.
//!
//! The rows are rounded to bfloat16 once. Every output element is one chain `acc = dot(w[k..k + 2], x[k..k + 2], acc)` over k
//! in order, from zero; an odd k ends with a zero in both. A block of k that is not the last leaves its sums to the next one.
//! So tile sizes and blocking never change a bit of the result.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use crate::cpu::{Cpu, SharedMut};
use crate::gated::{Gated, Panels};
use crate::gemm::{GEMV_PANELS, GEMV_PREFETCH_BYTES, K_BLOCK, MAX_TILE_ROWS, Strips, add_bias};
use crate::linear::{PACK_ALONE, Shares, bias_of, most_sums, part};
use crate::matrix::{Matrix, PANEL};
use crate::rows::Activation;
use crate::runs::{Runs, threads_for};
use crate::simd::{PairKernel, Simd, SimdPairs, dispatch_pairs};

/// Rows that are multiplied at a time: a block of them and the sums of a task's panels share the second cache.
const ROW_BLOCK: usize = 264;
/// Strips of rows up to which weights are paired on the way, once per strip, instead of beforehand through the cache.
const STREAM_STRIPS: usize = 2;
/// Elements of a paired block of weights.
const PAIRED: usize = K_BLOCK * PANEL;

/// Scratch for the rounded rows of a product, in f32.
pub(crate) fn rounded_rows_len(m: usize, k: usize) -> usize {
    m.min(ROW_BLOCK) * k.next_multiple_of(K_BLOCK) * size_of::<bf16>() / size_of::<f32>()
}

impl Cpu {
    /// `linear_runs` of packed bfloat16 weights with at least one input.
    pub(crate) fn linear_pairs(
        &mut self,
        x: &[f32],
        runs: Runs<'_>,
        w: Matrix<'_>,
        data: &[bf16],
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        out: &mut [f32],
    ) {
        let m = runs.rows();
        let blocks = m.div_ceil(ROW_BLOCK);
        for block in 0..blocks {
            let rows = m * block / blocks..m * (block + 1) / blocks;
            self.pair_rows(x, rows, runs, w, data, bias, activation, out);
        }
    }

    /// The products of a block of at most [`ROW_BLOCK`] rows.
    fn pair_rows(
        &mut self,
        x: &[f32],
        block: Range<usize>,
        runs: Runs<'_>,
        w: Matrix<'_>,
        data: &[bf16],
        bias: Option<&[f32]>,
        activation: Option<Activation>,
        out: &mut [f32],
    ) {
        let (tier, threads, n, k) = (self.tier, self.threads(), w.n, w.k);
        let (m, rounded_k) = (block.len(), k.next_multiple_of(K_BLOCK));
        self.reserve_packed_rows(rounded_rows_len(m, k));

        // The rounded rows of each run lie together.
        let mut tasks = std::mem::take(&mut self.run_tasks);
        tasks.fill(runs.count(), |run| Strips::new(runs.within(run, &block).len(), tier).count);
        let rounded = SharedMut::new(bytemuck::cast_slice_mut::<f32, bf16>(&mut self.packed_rows));
        let round = |task: usize, _worker: usize| {
            let (run, strip) = tasks.locate(task);
            let own = runs.within(run, &block);
            let rows = Strips::new(own.len(), tier).rows(strip);
            let x = &x[own.start * k..own.end * k];
            // SAFETY: lengths were checked, and each task writes its own rows.
            unsafe {
                let rounded = rounded.ptr().add((own.start - block.start) * rounded_k);
                dispatch_pairs(tier, RoundRows { x, m: own.len(), k, rows, rounded });
            }
        };
        if m * k <= PACK_ALONE {
            (0..tasks.total()).for_each(|task| round(task, 0));
        } else {
            self.pool.run(tasks.total(), &round);
        }

        let (gated, out_width) = (activation.is_some(), if activation.is_some() { n / 2 } else { n });
        let shares =
            |rows: usize| Shares::new(Strips::new(rows, tier).count, n, k, gated, threads_for(rows, m, threads));
        let sums = most_sums(runs, &block, &shares);
        tasks.fill(runs.count(), |run| match runs.within(run, &block).len() {
            0 => 0,
            rows => shares(rows).tasks(),
        });
        let paired = PAIRED * size_of::<bf16>() / size_of::<f32>();
        self.reserve_worker_scratch(paired + sums);
        let scratch = SharedMut::new(&mut self.worker_scratch);
        let (rounded, out) = (bytemuck::cast_slice::<f32, bf16>(&self.packed_rows), SharedMut::new(out));
        self.pool.run(tasks.total(), &|task, worker| {
            let (run, task) = tasks.locate(task);
            let rows = runs.within(run, &block);
            let shares = shares(rows.len());
            // SAFETY: a worker runs one task at a time.
            let scratch = unsafe { &mut scratch.slice(worker, 1)[0] };
            let (paired, rest) = scratch.split_at_mut(paired);
            let bias = bias_of(bias, run, n);
            // SAFETY: lengths were checked, and each task writes its own tiles.
            unsafe {
                let task = PairGemm {
                    rows: &rounded[(rows.start - block.start) * rounded_k..][..rows.len() * rounded_k],
                    m: rows.len(),
                    strips: Strips::new(rows.len(), tier),
                    strip_range: shares.strips(task),
                    n,
                    k,
                    data: part(data, run, w.len_of_one()),
                    bias,
                    gated: activation.map(|activation| Gated { activation, bias, width: out_width }),
                    panels: shares.panels(task),
                    paired: bytemuck::cast_slice_mut(paired),
                    sums: &mut rest[..sums],
                    out: out.ptr().add(rows.start * out_width),
                };
                dispatch_pairs(tier, task);
            }
        });
        self.run_tasks = tasks;
    }
}

/// A range of rows rounded to `[k / K_BLOCK][m][K_BLOCK]`, zero behind the last k up to a whole vector.
struct RoundRows<'a> {
    x: &'a [f32],
    m: usize,
    k: usize,
    rows: Range<usize>,
    rounded: *mut bf16,
}

impl PairKernel for RoundRows<'_> {
    #[inline(always)]
    unsafe fn simd<S: SimdPairs>(self) {
        let lanes = S::F::LANES;
        for row in self.rows {
            // SAFETY: the rows lie within x, and blocks are whole vectors long.
            unsafe {
                let x = self.x.as_ptr().add(row * self.k);
                for i in (0..self.k).step_by(2 * lanes) {
                    let left = self.k - i;
                    let [low, high] = if left >= 2 * lanes {
                        [S::F::load(x.add(i)), S::F::load(x.add(i + lanes))]
                    } else {
                        let above = left.saturating_sub(lanes);
                        [
                            S::F::load_partial(x.add(i), left.min(lanes)),
                            S::F::load_partial(x.add(i).wrapping_add(lanes), above),
                        ]
                    };
                    let at = (i / K_BLOCK * self.m + row) * K_BLOCK + i % K_BLOCK;
                    S::store(self.rounded.add(at), S::round(low, high));
                }
            }
        }
    }
}

/// Where a tile finds its weights, and what it asks the memory for meanwhile.
#[derive(Clone, Copy)]
enum Source {
    /// As stored, panels `stride` elements apart side by side: weights are paired on the way.
    Stored { b: *const bf16, stride: usize },
    /// One block whose rows are already paired; meanwhile, memory from `ahead` on is fetched, `step` bytes with each pair.
    Paired { b: *const bf16, ahead: *const u8, step: usize },
}

/// One tile's products of a pair of inputs.
#[inline(always)]
unsafe fn multiply<S: SimdPairs, const R: usize, const P: usize>(
    acc: &mut [[[<S::F as Simd>::V; 2]; P]; R],
    weights: [[S::B; 2]; P],
    a: *const bf16,
) {
    for row in 0..R {
        // SAFETY: the caller's rows cover the tile.
        unsafe {
            let x = S::splat_pair(a.add(row * K_BLOCK));
            for p in 0..P {
                for v in 0..2 {
                    acc[row][p][v] = S::dot(acc[row][p][v], weights[p][v], x);
                }
            }
        }
    }
}

/// `R` rows times `P` panels over one block of k, all in registers. `a` is `[R][K_BLOCK]`. Sums are taken up from `[R][PANEL]`
/// of a single panel, and left with their panels side by side.
#[inline(always)]
unsafe fn tile<S: SimdPairs, const R: usize, const P: usize>(
    k_len: usize,
    a: *const bf16,
    source: Source,
    resumed: Option<*const f32>,
    c: *mut f32,
    c_stride: usize,
) {
    let lanes = S::F::LANES;
    // SAFETY: the caller's pointers cover the tile; a prefetch may point anywhere.
    unsafe {
        let mut acc = [[[S::F::zero(); 2]; P]; R];
        if let Some(sums) = resumed {
            for row in 0..R {
                for v in 0..2 {
                    acc[row][0][v] = S::F::load(sums.add(row * PANEL + v * lanes));
                }
            }
        }
        let mut a = a;
        match source {
            Source::Stored { mut b, stride } => {
                for _ in 0..k_len / 2 {
                    let mut weights = [[S::zero(); 2]; P];
                    for p in 0..P {
                        let b = b.add(p * stride);
                        let ahead = b.cast::<u8>().wrapping_add(GEMV_PREFETCH_BYTES);
                        S::F::prefetch(ahead);
                        S::F::prefetch(ahead.wrapping_add(PANEL * size_of::<bf16>()));
                        weights[p] = S::zip(S::load(b), S::load(b.add(PANEL)));
                    }
                    multiply::<S, R, P>(&mut acc, weights, a);
                    a = a.add(2);
                    b = b.add(2 * PANEL);
                }
                if k_len % 2 == 1 {
                    let mut weights = [[S::zero(); 2]; P];
                    for p in 0..P {
                        weights[p] = S::zip(S::load(b.add(p * stride)), S::zero());
                    }
                    multiply::<S, R, P>(&mut acc, weights, a);
                }
            }
            Source::Paired { mut b, mut ahead, step } => {
                for _ in 0..k_len.div_ceil(2) {
                    multiply::<S, R, P>(&mut acc, [[S::load(b), S::load(b.add(PANEL))]; P], a);
                    S::F::prefetch(ahead);
                    a = a.add(2);
                    b = b.add(2 * PANEL);
                    ahead = ahead.wrapping_add(step);
                }
            }
        }
        for row in 0..R {
            for p in 0..P {
                for v in 0..2 {
                    S::F::store(c.add(row * c_stride + p * PANEL + v * lanes), acc[row][p][v]);
                }
            }
        }
    }
}

/// A range of panels times a range of strips.
struct PairGemm<'a> {
    /// `[k / K_BLOCK][m][K_BLOCK]`.
    rows: &'a [bf16],
    m: usize,
    strips: Strips,
    strip_range: Range<usize>,
    n: usize,
    k: usize,
    data: &'a [bf16],
    bias: Option<&'a [f32]>,
    gated: Option<Gated<'a>>,
    panels: Panels,
    /// One block of paired weights.
    paired: &'a mut [bf16],
    /// What blocks of k leave to the next one, `[panels][rows][PANEL]`. In the output, whose rows may lie a power of two
    /// apart, they would drive each other out of the caches.
    sums: &'a mut [f32],
    /// The whole output, `[m][n]`, half as wide where it is activated.
    out: *mut f32,
}

impl PairKernel for PairGemm<'_> {
    #[inline(always)]
    unsafe fn simd<S: SimdPairs>(mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.strips.count <= STREAM_STRIPS {
                self.stream::<S>();
            } else {
                self.blocked::<S>();
            }
        }
    }
}

impl PairGemm<'_> {
    /// Few rows: the weights pass by once, in the order in which they are stored.
    #[inline(always)]
    unsafe fn stream<S: SimdPairs>(&mut self) {
        // The blocks of a single row lie end to end.
        let k_block = if self.m == 1 { self.k } else { K_BLOCK };
        let mut index = 0;
        while index < self.panels.len {
            // Several streams keep more memory requests in flight.
            let together = if self.m == 1 && index + GEMV_PANELS <= self.panels.len { GEMV_PANELS } else { 1 };
            let (panel, next) = self.side_by_side(index, together);
            let stride = (next - panel) * self.k * PANEL;
            for k_start in (0..self.k).step_by(k_block) {
                let block = k_start..self.k.min(k_start + k_block);
                for strip in self.strip_range.clone() {
                    let source = Source::Stored { b: self.block(panel, k_start), stride };
                    // SAFETY: the caller's promise.
                    unsafe { self.strip::<S>(strip, index, together, block.clone(), source) };
                }
            }
            index += together;
        }
    }

    /// Many rows: each block of weights is paired once, and stays in the cache for all strips.
    #[inline(always)]
    unsafe fn blocked<S: SimdPairs>(&mut self) {
        for k_start in (0..self.k).step_by(K_BLOCK) {
            let k_len = K_BLOCK.min(self.k - k_start);
            for index in 0..self.panels.len {
                let next = if index + 1 < self.panels.len {
                    self.block(self.panels.nth(index + 1), k_start)
                } else {
                    self.block(self.panels.nth(0), k_start + k_len)
                };
                // SAFETY: the caller's promise; `paired` holds one block.
                unsafe {
                    pair::<S>(self.block(self.panels.nth(index), k_start), k_len, self.paired.as_mut_ptr());
                    let step = 2 * PANEL * size_of::<bf16>() / self.strip_range.len();
                    let mut ahead = next.cast::<u8>();
                    for strip in self.strip_range.clone() {
                        let source = Source::Paired { b: self.paired.as_ptr(), ahead, step };
                        self.strip::<S>(strip, index, 1, k_start..k_start + k_len, source);
                        ahead = ahead.wrapping_add(k_len / 2 * step);
                    }
                }
            }
        }
    }

    /// The panels that are multiplied together: of a single row, gates with their ups, which are then still in the first
    /// cache when the activation needs them.
    #[inline(always)]
    fn side_by_side(&self, index: usize, together: usize) -> (usize, usize) {
        let (first, second) = match self.gated {
            Some(_) if together == GEMV_PANELS => (index / 2, index / 2 + self.panels.gates()),
            _ => (index, index + together - 1),
        };
        (self.panels.nth(first), self.panels.nth(second))
    }

    /// Where a block of weights starts (which may be beyond the last one).
    #[inline(always)]
    fn block(&self, panel: usize, k_start: usize) -> *const bf16 {
        self.data.as_ptr().wrapping_add((panel * self.k + k_start) * PANEL)
    }

    /// One strip times `together` panels over one block of k: only the last block writes to the output.
    #[inline(always)]
    unsafe fn strip<S: SimdPairs>(
        &mut self,
        strip: usize,
        index: usize,
        together: usize,
        block: Range<usize>,
        source: Source,
    ) {
        let rows = self.strips.rows(strip);
        let first = self.strips.rows(self.strip_range.start).start;
        let end = self.strips.rows(self.strip_range.end - 1).end;
        let (panel, k_len) = (self.side_by_side(index, together).0, block.len());
        let column = panel * PANEL;
        let width = (together * PANEL).min(self.n - column);
        let last = block.end == self.k;
        // A panel that sticks out over the last column goes through here.
        let mut edge = [const { MaybeUninit::<f32>::uninit() }; MAX_TILE_ROWS * PANEL];
        let is_edge = last && width < together * PANEL;
        let task_rows = end - first;
        // SAFETY: the strip's rows and the panels' columns lie within rows, sums and out.
        unsafe {
            let a = self.rows.as_ptr().add((block.start / K_BLOCK * self.m + rows.start) * K_BLOCK);
            let c = self.out.wrapping_add(rows.start * self.n + column);
            let place = index * task_rows + rows.start - first;
            let sums = self.sums.as_mut_ptr().add(place * PANEL);
            let resumed = (block.start > 0).then_some(sums.cast_const());
            let (to, stride) = match (last, is_edge) {
                _ if self.gated.is_some() => (sums, PANEL * together),
                (false, _) => (sums, PANEL),
                (true, true) => (edge.as_mut_ptr().cast(), together * PANEL),
                (true, false) => (c, self.n),
            };
            match (rows.len(), together) {
                (1, GEMV_PANELS) => tile::<S, 1, GEMV_PANELS>(k_len, a, source, resumed, to, stride),
                (1, _) => tile::<S, 1, 1>(k_len, a, source, resumed, to, stride),
                (2, _) => tile::<S, 2, 1>(k_len, a, source, resumed, to, stride),
                (3, _) => tile::<S, 3, 1>(k_len, a, source, resumed, to, stride),
                (4, _) => tile::<S, 4, 1>(k_len, a, source, resumed, to, stride),
                (5, _) => tile::<S, 5, 1>(k_len, a, source, resumed, to, stride),
                (6, _) => tile::<S, 6, 1>(k_len, a, source, resumed, to, stride),
                (7, _) => tile::<S, 7, 1>(k_len, a, source, resumed, to, stride),
                (8, _) => tile::<S, 8, 1>(k_len, a, source, resumed, to, stride),
                (9, _) => tile::<S, 9, 1>(k_len, a, source, resumed, to, stride),
                (10, _) => tile::<S, 10, 1>(k_len, a, source, resumed, to, stride),
                (11, _) => tile::<S, 11, 1>(k_len, a, source, resumed, to, stride),
                (12, _) => tile::<S, 12, 1>(k_len, a, source, resumed, to, stride),
                _ => unreachable!("a strip is higher than the tile"),
            }
            if !last {
                return;
            }
            if let Some(gated) = self.gated {
                let before = self.panels.gates();
                let (panel, gates, ups) = if together == GEMV_PANELS {
                    (panel, sums, sums.add(PANEL))
                } else if index >= before {
                    (self.panels.nth(index - before), sums.sub(before * task_rows * PANEL), sums)
                } else {
                    return;
                };
                let out = self.out.add(rows.start * gated.width + panel * PANEL);
                return gated.write::<S::F>(panel, rows.len(), gates, ups, out, gated.width);
            }
            for row in 0..rows.len() {
                if is_edge {
                    std::ptr::copy_nonoverlapping(to.add(row * stride), c.add(row * self.n), width);
                }
                if let Some(bias) = self.bias {
                    let out = std::slice::from_raw_parts_mut(c.add(row * self.n), width);
                    add_bias(out, &bias[column..column + width]);
                }
            }
        }
    }
}

/// Pairs the rows of one block of weights, an odd one out with zeroes.
#[inline(always)]
unsafe fn pair<S: SimdPairs>(stored: *const bf16, k_len: usize, paired: *mut bf16) {
    for i in (0..k_len).step_by(2) {
        // SAFETY: the caller's pointers cover the block, and the scratch one of even length.
        unsafe {
            let second = if i + 1 < k_len { S::load(stored.add((i + 1) * PANEL)) } else { S::zero() };
            let [low, high] = S::zip(S::load(stored.add(i * PANEL)), second);
            S::store(paired.add(i * PANEL), low);
            S::store(paired.add((i + 1) * PANEL), high);
        }
    }
}
