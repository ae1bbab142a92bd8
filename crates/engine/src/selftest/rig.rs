//! What checks share: random numbers, inputs on the device, and outputs that show what was not written.

use bytemuck::NoUninit;
use half::{bf16, f16};
use strobe_kernels_cpu::Cpu;
use strobe_kernels_cuda::{CudaError, DeviceBuffer, DevicePtr, Gpu, Precision};

/// What a check works with.
pub struct Rig<'a> {
    /// The device under test.
    pub gpu: &'a Gpu,
    /// The scalar reference.
    pub cpu: Cpu,
    /// The check's own numbers.
    pub random: Random,
    /// Whether a few cases of each kind are enough.
    pub quick: bool,
}

impl Rig<'_> {
    /// All of `cases`, or one in `step` where a few are enough.
    pub fn some<'c, T>(&self, cases: &'c [T], step: usize) -> impl Iterator<Item = &'c T> + use<'c, T> {
        cases.iter().step_by(if self.quick { step } else { 1 })
    }

    /// Any plain data on the device.
    pub fn upload<T: NoUninit>(&self, values: &[T]) -> Result<DeviceBuffer, CudaError> {
        let buffer = DeviceBuffer::new(size_of_val(values), "a selftest's input")?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Values on the device as `precision`; `values` become what the device holds.
    pub fn upload_rounded(&self, values: &mut [f32], precision: Precision) -> Result<DeviceBuffer, CudaError> {
        round(values, precision);
        self.upload(&encode(values, precision))
    }

    /// An output of `count` elements of `element_bytes`, poisoned.
    pub fn output(&self, count: usize, element_bytes: usize) -> Result<Output, CudaError> {
        let bytes = count * element_bytes;
        let buffer = DeviceBuffer::new(bytes + 2 * GUARD, "a selftest's output")?;
        buffer.fill(POISON)?;
        Ok(Output { buffer, bytes })
    }

    /// An output of `count` values of `precision`, poisoned.
    pub fn output_of(&self, count: usize, precision: Precision) -> Result<Output, CudaError> {
        self.output(count, precision.bytes())
    }

    /// An output that starts with `values`, for what is changed in place; `values` become what the device holds.
    pub fn in_place(&self, values: &mut [f32], precision: Precision) -> Result<Output, CudaError> {
        let output = self.output_of(values.len(), precision)?;
        round(values, precision);
        output.buffer.write(GUARD, &encode(values, precision))?;
        Ok(output)
    }
}

/// Every type reads this as not a number.
const POISON: u8 = 0xff;
/// Bytes on both sides of an output that nobody may write; keeps the alignment of allocations.
const GUARD: usize = 1024;

/// Memory that an op writes: poisoned, between guards.
pub struct Output {
    buffer: DeviceBuffer,
    bytes: usize,
}

impl Output {
    /// Where it starts.
    pub fn ptr(&self) -> DevicePtr {
        self.buffer.ptr() + GUARD as u64
    }

    /// Poison it again.
    pub fn poison(&self) -> Result<(), CudaError> {
        self.buffer.fill(POISON)
    }

    /// Its bytes once the stream is through. An op that wrote beside it is an error: what it hit is not known.
    pub fn bytes(&self, gpu: &Gpu) -> Result<Vec<u8>, CudaError> {
        gpu.synchronize()?;
        let mut all = vec![0u8; self.bytes + 2 * GUARD];
        self.buffer.read(0, &mut all)?;
        let (before, rest) = all.split_at(GUARD);
        let (inside, after) = rest.split_at(self.bytes);
        if let Some(at) = before.iter().rposition(|&b| b != POISON) {
            let far = GUARD - at;
            return Err(CudaError::Unsupported(format!("a kernel wrote {far} bytes before the start of its output")));
        }
        if let Some(at) = after.iter().position(|&b| b != POISON) {
            return Err(CudaError::Unsupported(format!("a kernel wrote {at} bytes beyond the end of its output")));
        }
        Ok(inside.to_vec())
    }

    /// Its values as `f32`.
    pub fn read(&self, gpu: &Gpu, precision: Precision) -> Result<Vec<f32>, CudaError> {
        Ok(decode(&self.bytes(gpu)?, precision))
    }

    /// Its values as 32-bit integers.
    pub fn read_u32(&self, gpu: &Gpu) -> Result<Vec<u32>, CudaError> {
        Ok(self.bytes(gpu)?.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Its values, each an e4m3 code.
    pub fn read_fp8(&self, gpu: &Gpu) -> Result<Vec<f32>, CudaError> {
        Ok(self.bytes(gpu)?.into_iter().map(fp8_value).collect())
    }
}

/// Round to what `precision` can hold; float16 saturates, as on the device.
pub fn round(values: &mut [f32], precision: Precision) {
    for value in values {
        *value = match precision {
            Precision::F32 => *value,
            Precision::F16 => f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32(),
            Precision::Bf16 => bf16::from_f32(*value).to_f32(),
        };
    }
}

/// The bytes of values that `precision` can hold.
pub fn encode(values: &[f32], precision: Precision) -> Vec<u8> {
    match precision {
        Precision::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Precision::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Precision::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}

/// The values of bytes.
pub fn decode(bytes: &[u8], precision: Precision) -> Vec<f32> {
    let pairs = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match precision {
        Precision::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Precision::F16 => pairs.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        Precision::Bf16 => pairs.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
    }
}

/// The value of an e4m3 code: four bits of exponent, three of mantissa, no infinity.
pub fn fp8_value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// The nearest e4m3 code, ties to the even one; beyond 448 the largest.
pub fn fp8_code(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let size = value.abs().min(448.0);
    // Codes are ordered as their values are.
    static VALUES: std::sync::LazyLock<[f32; 0x7f]> =
        std::sync::LazyLock::new(|| std::array::from_fn(|code| fp8_value(code as u8)));
    let above = VALUES.partition_point(|&value| value < size).min(0x7e) as u8;
    let below = above.saturating_sub(1);
    let (up, down) = (fp8_value(above) - size, size - fp8_value(below));
    let nearest = if above == 0 || up < down || (up == down && above.is_multiple_of(2)) { above } else { below };
    sign | nearest
}

/// Random numbers that depend on nothing but a seed.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// From a seed and a name.
    pub fn named(seed: u64, name: &str) -> Random {
        // FNV-1a: any spread of the name over the bits will do.
        let hash =
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Random::new(seed ^ hash)
    }

    /// 64 random bits (splitmix64).
    pub fn bits(&mut self) -> u64 {
        strobe_stats::splitmix64(&mut self.state)
    }

    /// A whole number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// A whole number from `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// One of them; `choices` must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A number from 0 up to 1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A draw from the standard normal distribution.
    pub fn normal(&mut self) -> f32 {
        let (a, b) = (1.0 - self.uniform(), self.uniform());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }

    /// `count` normal draws times `scale`.
    pub fn normals(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.normal() * scale).collect()
    }

    /// `count` whole numbers below `n`.
    pub fn tokens(&mut self, count: usize, n: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(n) as u32).collect()
    }

    /// The numbers below `n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_encoding_once_rounded() {
        let mut random = Random::new(3);
        for precision in Precision::ALL {
            let mut values = random.normals(100, 10.0);
            values.extend([0.0, 1e9, -1e9]);
            round(&mut values, precision);
            assert_eq!(decode(&encode(&values, precision), precision), values, "{precision:?}");
            assert!(decode(&[POISON; 64], precision).iter().all(|v| v.is_nan()), "{precision:?}");
        }
        assert!(fp8_value(POISON).is_nan());
    }

    #[test]
    fn e4m3_codes_and_values() {
        for code in (0..=0xffu8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(fp8_code(fp8_value(code)), code);
        }
        assert_eq!((fp8_value(0x7e), fp8_value(0x01), fp8_value(0x38)), (448.0, 0.001953125, 1.0));
        assert_eq!(fp8_code(1e9), 0x7e);
        assert_eq!(fp8_code(1.0625), 0x38, "half way, to the even code");
        assert_eq!(fp8_code(1.1875), 0x3a, "half way, to the even code");
        assert_eq!(fp8_code(-1e-9), 0x80);
    }

    #[test]
    fn random_numbers_are_the_same_for_the_same_seed_and_spread_out() {
        assert_eq!(Random::named(1, "a").tokens(5, 100), Random::named(1, "a").tokens(5, 100));
        assert_ne!(Random::named(1, "a").tokens(5, 100), Random::named(1, "b").tokens(5, 100));
        let mut random = Random::new(1);
        let normals = random.normals(10_000, 1.0);
        let mean = normals.iter().sum::<f32>() / 1e4;
        let variance = normals.iter().map(|v| v * v).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.1, "{mean} {variance}");
        let mut order = random.permutation(50);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(i, &v)| i as u32 == v));
        assert!((0..100).all(|_| (3..=5).contains(&random.between(3, 5))));
    }
}
