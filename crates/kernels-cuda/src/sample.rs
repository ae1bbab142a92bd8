//! From logits to tokens on the device.

use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::module::Function;

/// How one row's token is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens with this probability; 1 keeps all.
    pub top_p: f32,
    /// Seed of the request.
    pub seed: u64,
    /// How many tokens came before.
    pub index: u64,
    /// First of the tokens it may not be.
    pub banned_start: u32,
    /// How many they are.
    pub banned_len: u32,
}

impl Draw {
    /// Words of one that a kernel reads.
    pub const WORDS: usize = 10;

    /// As the kernel finds it in memory, on eight bytes.
    pub fn words(&self) -> [u32; Draw::WORDS] {
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        let ([s0, s1], [i0, i1]) = (halves(self.seed), halves(self.index));
        [
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            0, // the seed starts on eight bytes
            s0,
            s1,
            i0,
            i1,
            self.banned_start,
            self.banned_len,
        ]
    }
}

/// Rows of logits and how their tokens are drawn.
#[derive(Clone, Copy, Debug)]
pub struct SampleArgs {
    /// f32, `[rows][vocab]`.
    pub logits: DevicePtr,
    /// Logits of a row.
    pub vocab: usize,
    /// Rows.
    pub rows: usize,
    /// One [`Draw`] per row.
    pub draws: DevicePtr,
    /// Tokens that some rows may not draw (u32).
    pub banned: DevicePtr,
    /// Out: the token of each row (u32).
    pub out: DevicePtr,
    /// Out: the same in page-locked host memory, or 0.
    pub host: DevicePtr,
}

/// What a product has kept besides its logits: the largest of each row in each tile of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maxima {
    /// u64 `[rows][tiles]`: the bits of a value, then its column.
    pub kept: DevicePtr,
    /// Tiles of a row.
    pub tiles: usize,
}

/// Blocks that may share the search for one row's maximum.
const MOST_SPLITS: usize = 16;
/// Logits below which a further block is not worth it.
const LOGITS_PER_SPLIT: usize = 4096;
const THREADS: u32 = 1024;
const ARGMAX_THREADS: u32 = 256;
/// Shared memory before the bits of forbidden ids, as in the kernel.
const SCRATCH_BYTES: usize = 18_432;
/// Tokens of the largest vocabulary: sums of weights are made for no more.
pub const LARGEST_VOCAB: usize = 1 << 18;

/// Drawing tokens.
pub struct SampleOps {
    argmax: Function,
    argmax_tiles: Function,
    sample: Function,
    /// A maximum for each block, then a counter for each row.
    scratch: DeviceBuffer,
    max_rows: usize,
}

impl SampleOps {
    /// For at most `max_rows` rows at once.
    pub fn new(gpu: &Gpu, max_rows: usize) -> Result<SampleOps, CudaError> {
        let scratch = DeviceBuffer::new(max_rows * (MOST_SPLITS * 8 + 4), "sampling scratch")?;
        scratch.fill(0)?;
        Ok(SampleOps {
            argmax: gpu.function("sample.cu", "argmax_f32")?,
            argmax_tiles: gpu.function("sample.cu", "argmax_tiles")?,
            sample: gpu.function("sample.cu", "sample_f32")?,
            scratch,
            max_rows,
        })
    }

    /// The first maximum of each row (u32); NaN never wins, and a row of nothing else gives 0.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn argmax(
        &self,
        gpu: &Gpu,
        logits: DevicePtr,
        vocab: usize,
        rows: usize,
        out: DevicePtr,
        host: DevicePtr,
    ) -> Result<(), CudaError> {
        let Some(shape) = self.shape(gpu, vocab, rows)? else { return Ok(()) };
        let (columns, partials, counters) = (vocab as u32, self.scratch.ptr(), self.counters());
        let shape = Launch { block: ARGMAX_THREADS, ..shape };
        // SAFETY: these are the kernel's arguments, and the scratch is for as many rows; the rest is the caller's promise.
        unsafe { gpu.launch(self.argmax, shape, kernel_args![logits, columns, out, host, partials, counters]) }
    }

    /// [`SampleOps::argmax`] of rows whose product has kept the maxima of its tiles, see [`Maxima`].
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn argmax_tiles(
        &self,
        gpu: &Gpu,
        maxima: Maxima,
        rows: usize,
        out: DevicePtr,
        host: DevicePtr,
    ) -> Result<(), CudaError> {
        if rows == 0 {
            return Ok(());
        }
        let shape = Launch::grid(rows.div_ceil(ARGMAX_THREADS as usize / 32), ARGMAX_THREADS).overlapping();
        let (kept, tiles, rows) = (maxima.kept, maxima.tiles as u32, rows as u32);
        // SAFETY: these are the kernel's arguments, and the scratch is for as many rows; the rest is the caller's promise.
        unsafe { gpu.launch(self.argmax_tiles, shape, kernel_args![kept, tiles, rows, out, host]) }
    }

    /// A token for each row, as its [`Draw`] says.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name, and tokens that a row may not draw are among those given.
    pub unsafe fn sample(&self, gpu: &Gpu, args: &SampleArgs) -> Result<(), CudaError> {
        let Some(shape) = self.shape(gpu, args.vocab, args.rows)? else { return Ok(()) };
        let shape = shape.shared(SCRATCH_BYTES + args.vocab.div_ceil(32) * 4);
        let (columns, partials, counters) = (args.vocab as u32, self.scratch.ptr(), self.counters());
        let list = kernel_args![args.logits, columns, args.draws, args.banned, args.out, args.host, partials, counters];
        // SAFETY: these are the kernel's arguments, and the scratch is for as many rows; the rest is the caller's promise.
        unsafe { gpu.launch(self.sample, shape, list) }
    }

    fn counters(&self) -> DevicePtr {
        self.scratch.ptr() + (self.max_rows * MOST_SPLITS * 8) as DevicePtr
    }

    fn shape(&self, gpu: &Gpu, vocab: usize, rows: usize) -> Result<Option<Launch>, CudaError> {
        if rows > self.max_rows || rows > 65_535 || vocab > LARGEST_VOCAB {
            return Err(CudaError::Unsupported(format!(
                "{rows} rows of {vocab} logits: this sampler takes {} rows of {LARGEST_VOCAB}",
                self.max_rows.min(65_535)
            )));
        }
        if rows == 0 || vocab == 0 {
            return Ok(None);
        }
        let mut shape = Launch::grid(splits(rows, vocab, gpu.info().multiprocessors as usize), THREADS).overlapping();
        shape.grid.1 = rows as u32;
        Ok(Some(shape))
    }
}

/// Blocks per row: a few rows are spread over the whole GPU, many keep it busy by themselves.
fn splits(rows: usize, vocab: usize, multiprocessors: usize) -> usize {
    (multiprocessors / rows).min(vocab.div_ceil(LOGITS_PER_SPLIT)).clamp(1, MOST_SPLITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_has_the_layout_of_the_kernel() {
        let (seed, index) = (0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
        let draw = Draw { temperature: 0.5, top_k: 7, top_p: 0.25, seed, index, banned_start: 11, banned_len: 13 };
        let bytes: Vec<u8> = draw.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        let float = |at: usize| f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((float(0), bytes[4], float(8), bytes[32], bytes[36]), (0.5, 7, 0.25, 11, 13));
        assert!(bytes[16..32].iter().enumerate().all(|(at, byte)| *byte as usize == at));
    }

    #[test]
    fn few_rows_are_split_and_many_are_not() {
        assert_eq!(splits(1, 32_000, 132), 8);
        assert_eq!(splits(1, 128_256, 132), 16);
        assert_eq!(splits(64, 32_000, 132), 2);
        assert_eq!(splits(1024, 32_000, 132), 1);
        assert_eq!(splits(1, 100, 132), 1);
    }
}
