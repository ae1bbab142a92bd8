//! What queueing theory says about the servers that the self-test simulates. Times are in units of the mean service.

/// Probabilities of 0, 1, .. events of a Poisson distribution, up to where nothing is left.
fn poisson(mean: f64) -> Vec<f64> {
    let most = (mean + 12.0 * mean.sqrt() + 30.0) as usize;
    let mut log_factorial = 0.0;
    (0..=most)
        .map(|k| {
            if k > 0 {
                log_factorial += (k as f64).ln();
            }
            (k as f64 * mean.max(1e-300).ln() - mean - log_factorial).exp()
        })
        .collect()
}

/// Mean wait of M/G/1 (Pollaczek-Khinchine).
pub fn mg1_wait(rate: f64, service: f64, second_moment: f64) -> f64 {
    rate * second_moment / (2.0 * (1.0 - rate * service))
}

/// P(W <= t) of M/D/1 with service time 1. Terms alternate, so only for small `t`.
pub fn md1_wait_at_most(rate: f64, t: f64) -> f64 {
    let mut factorial = 1.0;
    let mut sum = 0.0;
    for k in 0..=(t.floor() as u32) {
        if k > 0 {
            factorial *= f64::from(k);
        }
        let x = rate * (f64::from(k) - t);
        sum += x.powi(k as i32) / factorial * (-x).exp();
    }
    (1.0 - rate) * sum
}

/// Mean wait of GI/M/1 with gamma arrivals of shape `k` and service rate 1.
pub fn gamma_m1_wait(rate: f64, k: f64) -> f64 {
    let excess = |sigma: f64| (1.0 + (1.0 - sigma) / (rate * k)).powf(-k) - sigma;
    // `excess` is positive below the root and negative between it and 1.
    let (mut low, mut high) = (0.0, 1.0 - 1e-12);
    for _ in 0..200 {
        let middle = f64::midpoint(low, high);
        if excess(middle) > 0.0 { low = middle } else { high = middle }
    }
    low / (1.0 - low)
}

/// Chance of waiting and mean wait of M/M/c with service rate 1.
pub fn mmc(rate: f64, servers: u32) -> (f64, f64) {
    let mut blocking = 1.0;
    for n in 1..=servers {
        blocking = rate * blocking / (f64::from(n) + rate * blocking);
    }
    let c = f64::from(servers);
    let waits = blocking / (1.0 - rate / c * (1.0 - blocking));
    (waits, waits / (c - rate))
}

/// Mean wait and mean batch of a server that takes up to `b` waiting requests and serves them in time 1.
pub fn batch_server(rate: f64, b: usize) -> (f64, f64) {
    let arrivals = poisson(rate);
    let most = 60 * b + arrivals.len();
    let mut pi = vec![1.0 / (most + 1) as f64; most + 1];
    for _ in 0..20_000 {
        let mut next = vec![0.0; most + 1];
        for (n, &p) in pi.iter().enumerate().filter(|(_, p)| **p > 1e-16) {
            let left = n.saturating_sub(b);
            for (k, &q) in arrivals.iter().enumerate() {
                next[(left + k).min(most)] += p * q;
            }
        }
        let change: f64 = next.iter().zip(&pi).map(|(a, b)| (a - b).abs()).sum();
        pi = next;
        if change < 1e-12 {
            break;
        }
    }
    let left: f64 = pi.iter().enumerate().map(|(n, p)| n.saturating_sub(b) as f64 * p).sum();
    let batch = rate + pi[0];
    ((left + rate / 2.0) / batch, batch)
}

/// Mean time in the system and mean batch of a server that takes all that waits and needs `alpha + beta * batch`.
pub fn take_all(rate: f64, alpha: f64, beta: f64) -> (f64, f64) {
    let service = |batch: usize| alpha + beta * batch as f64;
    let most = 400;
    let mut pi = vec![0.0; most + 1];
    pi[1] = 1.0;
    let next_batches: Vec<Vec<f64>> = (0..=most).map(|batch| poisson(rate * service(batch))).collect();
    for _ in 0..5_000 {
        let mut next = vec![0.0; most + 1];
        for (batch, &p) in pi.iter().enumerate().filter(|(_, p)| **p > 1e-16) {
            for (k, &q) in next_batches[batch].iter().enumerate() {
                next[k.clamp(1, most)] += p * q;
            }
        }
        let change: f64 = next.iter().zip(&pi).map(|(a, b)| (a - b).abs()).sum();
        pi = next;
        if change < 1e-13 {
            break;
        }
    }
    let mean = |f: &dyn Fn(usize) -> f64| pi.iter().enumerate().map(|(batch, p)| p * f(batch)).sum::<f64>();
    let cycle = mean(&service) + mean(&|b| (-rate * service(b)).exp()) / rate;
    let batch = mean(&|b| b as f64);
    let time = mean(&|b| service(b).powi(2)) / (2.0 * cycle) + mean(&|b| b as f64 * service(b)) / batch;
    (time, batch)
}

/// Mean batch and mean wait of a delay window of length `delay` or `most` requests, with a server always free.
pub fn delay_window(rate: f64, delay: f64, most: usize) -> (f64, f64) {
    let counts = poisson(rate * delay);
    let at_least = |k: usize| 1.0 - counts.iter().take(k).sum::<f64>();
    let batch = 1.0 + (1..most).map(at_least).sum::<f64>();
    let wait = (0..most - 1).map(|j| (j + 1) as f64 * at_least(j + 1)).sum::<f64>() / (rate * batch);
    (batch, wait)
}

/// Mean time in the system of in-flight batching with geometric outputs of mean `m`, `slots` places and iterations of
/// `alpha + beta * batch`, for requests that arrive in mid-iteration.
pub fn inflight(rate: f64, m: f64, slots: usize, alpha: f64, beta: f64) -> f64 {
    let tau = |n: usize| alpha + beta * n.min(slots) as f64;
    let mut weights = vec![1.0f64];
    for n in 1..20_000 {
        let next = weights[n - 1] * rate * m * tau(n) / n.min(slots) as f64;
        weights.push(next);
        if next < 1e-16 * weights[0] && n > slots {
            break;
        }
        if next > 1e200 {
            weights.iter_mut().for_each(|w| *w /= 1e200);
        }
    }
    let total: f64 = weights.iter().sum();
    let number: f64 = weights.iter().enumerate().map(|(n, w)| n as f64 * w).sum::<f64>() / total;
    let residual: f64 = weights.iter().enumerate().skip(1).map(|(n, w)| w * tau(n) / 2.0).sum::<f64>() / total;
    number / rate + residual
}

/// Mean time in the system of many servers with power of `d` choices at load `rho`.
pub fn power_of_d(rho: f64, d: f64) -> f64 {
    (1..60).map(|i| rho.powf((d.powi(i) - d) / (d - 1.0))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 2e-5, "{found} instead of {expected}");
    }

    #[test]
    fn the_values_of_the_literature() {
        near(mg1_wait(0.7, 1.0, std::f64::consts::E), 3.17133);
        near(mg1_wait(0.8, 1.0, 1.0), 2.0);
        near(md1_wait_at_most(0.5, 1.5), 0.897_997);
        near(md1_wait_at_most(0.5, 4.0), 0.995_658);
        near(md1_wait_at_most(0.8, 1.5), 0.544_677);
        near(md1_wait_at_most(0.8, 4.0), 0.845_375);
        near(gamma_m1_wait(0.7, 0.25), 6.76171);
        near(gamma_m1_wait(0.7, 1.0), 2.33333);
        near(mmc(6.4, 8).0, 0.457_645);
        near(mmc(6.4, 8).1, 0.286_028);
        near(batch_server(3.0, 4).0, 0.758_427);
        near(batch_server(3.0, 4).1, 3.03376);
        near(take_all(2.0, 1.0, 0.1).0, 1.96613);
        near(take_all(2.0, 1.0, 0.1).1, 2.60471);
        near(take_all(5.0, 1.0, 0.1).0, 3.16664);
        near(delay_window(2.0, 1.0, 4).0, 2.78198);
        near(delay_window(2.0, 1.0, 4).1, 0.543_250);
        near(delay_window(10.0, 0.5, 8).1, 0.265_380);
        near(inflight(5.0, 10.0, 64, 0.02, 0.0005), 0.216_978);
        near(inflight(10.0, 100.0, 256, 0.02, 0.0005), 4.12025);
        near(inflight(30.0, 10.0, 8, 0.02, 0.0005), 0.454_547);
        near(power_of_d(0.9, 2.0), 2.61406);
    }
}
