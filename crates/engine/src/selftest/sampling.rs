//! Drawing tokens.

use strobe_kernels_cuda::{CudaError, Draw, SampleArgs, SampleOps};

use super::{Outcome, Rig};
use crate::sampling::{self, Sampler};

/// What a row's logits look like.
#[derive(Clone, Copy, Debug)]
enum Logits {
    Normal(f32),
    /// Whole numbers, so that many are equal.
    Tied,
    Equal,
    /// Some are not a number, some minus infinity.
    Broken,
    AllBroken,
    AllInfinite,
    /// One stands out.
    Peaked,
}

const KINDS: [Logits; 8] = [
    Logits::Normal(1.0),
    Logits::Normal(6.0),
    Logits::Tied,
    Logits::Equal,
    Logits::Broken,
    Logits::AllBroken,
    Logits::AllInfinite,
    Logits::Peaked,
];

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    let ops = SampleOps::new(rig.gpu, 4096)?;
    for (rows, vocab) in [(1, 1), (2, 2), (40, 33), (300, 1000), (64, 32_000), (7, 50_257), (9, 128_256), (3, 262_144)]
    {
        for kind in KINDS {
            one_kind(rig, &ops, kind, rows, vocab, &mut outcomes)?;
        }
    }
    one_kind(rig, &ops, Logits::Normal(2.0), 4096, 500, &mut outcomes)?;
    Ok(outcomes)
}

fn one_kind(
    rig: &mut Rig,
    ops: &SampleOps,
    kind: Logits,
    rows: usize,
    vocab: usize,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let random = &mut rig.random;
    let logits: Vec<f32> = (0..rows * vocab)
        .map(|i| match kind {
            Logits::Normal(scale) => random.normal() * scale,
            Logits::Tied => (random.normal() * 2.0).round(),
            Logits::Equal => 0.25,
            Logits::Broken => match random.below(10) {
                0 => f32::NAN,
                1 => f32::NEG_INFINITY,
                _ => random.normal(),
            },
            Logits::AllBroken => f32::NAN,
            Logits::AllInfinite => f32::NEG_INFINITY,
            Logits::Peaked => random.normal() + if i % vocab == vocab / 3 { 12.0 } else { 0.0 },
        })
        .collect();
    let banned = random.tokens(64, vocab);
    let draws: Vec<Draw> = (0..rows)
        .map(|_| {
            let banned_start = random.below(banned.len()) as u32;
            Draw {
                temperature: random.pick(&[0.0, 0.05, 0.7, 1.0, 1.0, 2.5]),
                top_k: random.pick(&[0, 0, 0, 1, 5, 50, 1000]),
                top_p: random.pick(&[1.0, 1.0, 0.95, 0.5, 1e-6]),
                seed: random.bits(),
                index: random.below(1000) as u64,
                banned_start,
                banned_len: if random.below(3) == 0 { random.below(banned.len() - banned_start as usize) } else { 0 }
                    as u32,
            }
        })
        .collect();
    let device_logits = rig.upload(&logits)?;
    let draw_words: Vec<u32> = draws.iter().flat_map(Draw::words).collect();
    let (device_draws, device_banned) = (rig.upload(&draw_words)?, rig.upload(&banned)?);
    let out = rig.output(rows, 4)?;
    let case = format!("{rows} rows of {vocab}, {kind:?}");

    // SAFETY: logits, draws and tokens were made for these rows, and live until the result was read.
    unsafe { ops.argmax(rig.gpu, device_logits.ptr(), vocab, rows, out.ptr(), 0) }?;
    let mut expected = vec![0; rows];
    rig.cpu.argmax_rows(&logits, vocab, &mut expected);
    outcomes.push(Outcome::exact(("argmax", "f32"), &*case, &out.read_u32(rig.gpu)?, &expected));

    out.poison()?;
    let args = SampleArgs {
        logits: device_logits.ptr(),
        vocab,
        rows,
        draws: device_draws.ptr(),
        banned: device_banned.ptr(),
        out: out.ptr(),
        host: 0,
    };
    // SAFETY: logits, draws and tokens were made for these rows, and live until the result was read.
    unsafe { ops.sample(rig.gpu, &args) }?;
    let found = out.read_u32(rig.gpu)?;
    let mut sampler = Sampler::new(vocab);
    let (mut wrong, mut problem) = (0, None);
    for (row, draw) in draws.iter().enumerate() {
        let logits = &logits[row * vocab..(row + 1) * vocab];
        let start = draw.banned_start as usize;
        let banned = &banned[start..start + draw.banned_len as usize];
        let host = sampling::Draw {
            temperature: draw.temperature,
            top_k: draw.top_k,
            top_p: draw.top_p,
            seed: draw.seed,
            index: draw.index,
        };
        let expected = sampler.draw(logits, &host, banned);
        if found[row] != expected && !neighbours(logits, &host, banned, found[row], expected) {
            wrong += 1;
            problem.get_or_insert_with(|| {
                format!("row {row} drew {} instead of {expected} with {host:?}, {} banned", found[row], banned.len())
            });
        }
    }
    let error = wrong as f64;
    let (op, dtype) = ("sample".to_string(), "f32".to_string());
    outcomes.push(Outcome { op, case, dtype, error, tolerance: 0.0, problem });
    Ok(())
}

/// Whether two tokens lie side by side in the order of drawing, with next to no weight between them: then the draw fell on
/// the boundary between them, where the last bit of an exponential decides.
fn neighbours(logits: &[f32], draw: &sampling::Draw, banned: &[u32], a: u32, b: u32) -> bool {
    let (low, high) = (a.min(b), a.max(b));
    if draw.is_greedy() || high as usize >= logits.len() {
        return false;
    }
    let allowed = |(id, x): &(u32, f32)| !x.is_nan() && !banned.contains(id);
    let mut kept: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(allowed).collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if draw.top_k > 0 {
        kept.truncate(draw.top_k as usize);
    }
    let Some(&(_, highest)) = kept.first() else { return false };
    let weight = |x: f32| f64::from((x - highest) / draw.temperature).exp();
    let mut left = f64::from(draw.top_p) * kept.iter().map(|c| weight(c.1)).sum::<f64>();
    kept.retain(|c| {
        let wanted = left > 0.0;
        left -= weight(c.1);
        wanted
    });
    let total: f64 = kept.iter().map(|c| weight(c.1)).sum();
    let between: f64 = kept.iter().filter(|c| low < c.0 && c.0 < high).map(|c| weight(c.1)).sum();
    let both = [low, high].iter().all(|id| kept.iter().any(|c| c.0 == *id));
    both && between <= 1e-6 * total
}
