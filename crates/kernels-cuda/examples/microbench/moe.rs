//! The experts' products in every shape of tiles, by tokens; and what routing costs.

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, ExpertActivation, ExpertArgs, ExpertProduct, ExpertRouting, Gpu, MoeOps, MoeShape,
    Precision, RouteArgs, WeightOps,
};

use super::graph_microseconds;

/// Name, hidden width, width of an expert, experts, experts of a token.
const MODELS: [(&str, usize, usize, usize, usize); 3] =
    [("mixtral-8x7b", 4096, 14336, 8, 2), ("gpt-oss-20b", 2880, 2880, 32, 4), ("qwen3-30b-a3b", 2048, 768, 128, 8)];

const TOKENS: [usize; 14] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    for (name, hidden, inter, experts, per_token) in MODELS {
        let most = TOKENS[TOKENS.len() - 1];
        let shape = MoeShape {
            experts,
            per_token,
            routing: ExpertRouting::TopKSoftmax,
            hidden,
            inter,
            activation: ExpertActivation::Silu,
        };
        let ops = MoeOps::new(gpu, Precision::Bf16, shape, most)?;
        let weights = WeightOps::new(gpu, Precision::Bf16)?;
        let random = |count: usize, key: u64, std: f32| {
            let buffer = DeviceBuffer::new(count * 2, "a matrix")?;
            // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
            unsafe { weights.random_normal(gpu, buffer.ptr(), Precision::Bf16, key, 0, count as u64, std) }?;
            Ok::<_, CudaError>(buffer)
        };
        let (up, down) = (random(experts * 2 * inter * hidden, 1, 0.02)?, random(experts * inter * hidden, 2, 0.02)?);
        let (x, act) = (random(most * hidden, 3, 1.0)?, random(most * per_token * inter, 4, 1.0)?);
        let (out, acted) = (random(most * per_token * hidden, 5, 1.0)?, random(most * per_token * inter, 6, 1.0)?);
        let gathered = random(most * per_token * hidden, 8, 1.0)?;
        let residual = DeviceBuffer::new(most * hidden * 4, "rows")?;
        residual.fill(0)?;
        let logits = DeviceBuffer::new(most * experts * 4, "logits")?;
        // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
        unsafe { weights.random_normal(gpu, logits.ptr(), Precision::F32, 7, 0, (most * experts) as u64, 1.0) }?;
        let counts = DeviceBuffer::new(experts * 4, "counts")?;
        println!("\n{name}: microseconds of gate and up / down in tiles of so many rows (h: Hopper's); route; sum");
        for tokens in TOKENS {
            let route = RouteArgs { logits: logits.ptr(), bias: 0, slots: 0, tokens, counts: counts.ptr() };
            let mut line = format!("{tokens:5} tokens, {:7.2} rows", (tokens * per_token) as f64 / experts as f64);
            let mut used = 0;
            for tiles in ops.tile_shapes() {
                // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
                unsafe { ops.route(gpu, &route, tiles) }?;
                gpu.synchronize()?;
                let mut found = vec![0u32; experts];
                counts.read(0, &mut found)?;
                used = found.iter().filter(|count| **count > 0).count();
                // Far from any choice that could win.
                let average = tokens * per_token / experts;
                let mark = if tiles.hopper { "h" } else { "" };
                if average > 40 * tiles.rows || (average > 256 && tiles.rows < 64) || (tiles.rows == 1 && tokens > 64) {
                    continue;
                }
                let args = |product, x: u64, w: u64, out: u64| ExpertArgs {
                    product,
                    x,
                    w,
                    bias: 0,
                    out,
                    gathered: gathered.ptr(),
                    tokens,
                };
                let first = args(ExpertProduct::GateUp, x.ptr(), up.ptr(), acted.ptr());
                let second = args(ExpertProduct::Down, act.ptr(), down.ptr(), out.ptr());
                // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
                let first_us = graph_microseconds(gpu, 3, |_| unsafe { ops.experts(gpu, &first, tiles) })?;
                // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
                let second_us = graph_microseconds(gpu, 3, |_| unsafe { ops.experts(gpu, &second, tiles) })?;
                line += &format!("  {}{mark} {first_us:.1} / {second_us:.1}", tiles.rows);
            }
            // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
            let routed = graph_microseconds(gpu, 5, |_| unsafe { ops.route(gpu, &route, ops.tiles_for(tokens)) })?;
            // SAFETY: all of it was made for the most tokens, and lives until the times are taken.
            let summed = graph_microseconds(gpu, 5, |_| unsafe { ops.sum(gpu, out.ptr(), residual.ptr(), tokens) })?;
            let matrix = (used * inter * hidden * 2) as f64;
            let floor = 3.0 * matrix / 4.27e12 * 1e6;
            println!(
                "{line}  route {routed:.1}  sum {summed:.1}  ({used} experts, {floor:.0} us to read their weights)"
            );
        }
    }
    Ok(())
}
